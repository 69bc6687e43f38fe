from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import mlx_cuda
import pytest
from mlx_cuda import _doctor
from mlx_cuda.__main__ import _to_a_reader, main
from mlx_cuda._loader import checks
from mlx_cuda._loader.driver import Driver
from mlx_cuda._loader.environment import Environment, Probe
from mlx_cuda._loader.loaded import Loaded

from .environments import RUN, TABLE, distributions, healthy

CUDNN = Loaded("/a/libcudnn.so.9", "9.28.0")
BROKEN = healthy(driver=Driver(error="libcuda.so.1: cannot open shared object file"))


def use(monkeypatch: pytest.MonkeyPatch, env: Environment, *, result: Probe | None = None) -> None:
    monkeypatch.setattr(_doctor, "take", lambda **_: env)

    def probe(*, on_cuda: bool) -> Probe:
        assert on_cuda is (env.cuda is not None)
        assert result is not None, "the doctor must not load the module here"
        return result

    monkeypatch.setattr(_doctor, "probe", probe)


def test_checklist_of_a_broken_machine(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    use(monkeypatch, BROKEN)
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert f"[ ok ] backend    mlx-cuda-13 {TABLE.mlx}\n" in out
    assert "[fail] driver     no NVIDIA driver: libcuda.so.1: cannot open shared object file\n            fix:  install NVIDIA's" in out
    assert "[skip] run        needs the checks above\n" in out
    assert out.endswith("1 of 15 checks failed; the first often causes the others\n")


def test_checklist_of_a_healthy_machine(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    use(monkeypatch, healthy(), result=replace(RUN, details="cudnn 9.28.0"))
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert f"[ ok ] loaded     {RUN.libraries[0].path} (9.28.0)\n" in out
    assert "[ ok ] run        cudnn 9.28.0\n" in out
    assert "fix:" not in out
    assert out.endswith("no check failed\n")


def test_a_warning_is_no_failure(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    use(
        monkeypatch,
        healthy(distributions=dict(healthy().distributions) | distributions("nvidia-cudnn-cu12")),
        result=Probe(details="right"),
    )
    assert main(["doctor"]) == 0
    assert "[warn] versions" in capsys.readouterr().out


def test_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    use(monkeypatch, BROKEN)
    assert main(["doctor", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert (report["mlx_cuda"], report["ok"]) == (mlx_cuda.__version__, False)
    assert [check["name"] for check in report["checks"]] == [check.name for check in checks.run(BROKEN)]
    assert {"name", "status", "summary", "fix", "cure"} == set(report["checks"][0])


def test_usage() -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["no-such-command"])


@pytest.mark.parametrize(
    ("returncode", "stdout", "stderr", "expected"),
    [
        (0, '{"details": "cudnn 9.28.0"}\n', "", Probe(details="cudnn 9.28.0")),
        (0, 'noise\n{"error": "wrong"}\n', "", Probe(error="wrong")),
        (0, '{"details": "", "libraries": [["/a/libcudnn.so.9", "9.28.0", "", ""]]}', "", Probe(libraries=(CUDNN,))),
        (
            -6,
            "",
            "terminate called\nwhat(): no kernel image\n",
            Probe(error="the process that ran one operation ended with -6: what(): no kernel image"),
        ),
        (-11, '{"details": "cudnn 9.28.0"}', "", Probe(error="the process that ran one operation ended with -11: without a message")),
        (1, "", "", Probe(error="the process that ran one operation ended with 1: without a message")),
    ],
)
def test_reading_a_probe(returncode: int, stdout: str, stderr: str, expected: Probe) -> None:
    assert _doctor.read_probe(returncode, stdout, stderr) == expected


def test_the_probe_runs_in_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_doctor, "_PROBE", "import json, os; print(json.dumps({'details': str(os.getpid())}))")
    assert int(_doctor.probe().details) > 1
    monkeypatch.setattr(_doctor, "_PROBE", "raise SystemExit('broken')")
    assert _doctor.probe() == Probe(error="the process that ran one operation ended with 1: broken")


def test_a_library_that_writes_in_another_encoding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither UTF-8 nor Windows' own code page knows this byte."""
    monkeypatch.setattr(_doctor, "_PROBE", "import os; os.write(2, b'no symbol in \\x81\\n'); os._exit(9)")
    assert _doctor.probe().error.startswith("the process that ran one operation ended with 9: no symbol in ")


def test_a_path_with_letters_that_stdout_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, healthy(), result=replace(RUN, details="C:/Users/Ελένη"))
    pipe = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(pipe, encoding="cp1252", write_through=True))
    assert _to_a_reader(["doctor"]) == 0
    assert rb"C:/Users/\u0395\u03bb" in pipe.getvalue()


def test_the_probe_finds_the_modules_of_this_process() -> None:
    """The interpreter's options have others found, or a module of the current folder's."""
    folder = str(Path(mlx_cuda.__file__).parents[1])
    code = f"import sys; sys.path.insert(0, {folder!r}); from mlx_cuda import _doctor\n"
    code += "_doctor._PROBE = 'import json, sys; print(json.dumps({\"details\": str(sys.flags)}))'\nprint(_doctor.probe().details)"
    options = ["-I", "-S"]
    done = subprocess.run([sys.executable, *options, "-c", code], capture_output=True, text=True, check=True)
    assert "isolated=1" in done.stdout
    assert "no_site=1" in done.stdout


def doctor(*arguments: str, **changed: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "mlx_cuda", *(arguments or ("doctor",))]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | changed)


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no broken pipes")
@pytest.mark.parametrize("arguments", [["doctor"], ["doctor", "--json"], ["tune", "--show"]])
def test_a_reader_that_stops_halfway(arguments: list[str]) -> None:
    with doctor(*arguments) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 1


@pytest.mark.skipif(sys.platform != "linux", reason="LD_LIBRARY_PATH is of Linux")
def test_an_old_libstdcxx_has_a_fix(tmp_path: Path) -> None:
    """Another library under its name, which has none of the versions that MLX asks for."""
    library = next(line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libm.so" in line)
    shutil.copy(library, tmp_path / "libstdc++.so.6")
    with doctor(LD_LIBRARY_PATH=str(tmp_path)) as process:
        out, error = process.communicate()
    assert f"fix:  take {tmp_path} out of LD_LIBRARY_PATH: its libstdc++.so.6 is too old\n" in out, out + error
    use = "import mlx_cuda\ntry:\n    mlx_cuda.swiglu\nexcept mlx_cuda.BackendError as error:\n    print(error.fix)"
    done = subprocess.run(
        [sys.executable, "-c", use], env=os.environ | {"LD_LIBRARY_PATH": str(tmp_path)}, capture_output=True, text=True, check=True
    )
    assert done.stdout == f"take {tmp_path} out of LD_LIBRARY_PATH: its libstdc++.so.6 is too old\n"


def test_the_doctor_out_of_an_archive(tmp_path: Path) -> None:
    shutil.copytree(Path(mlx_cuda.__file__).parent, tmp_path / "site" / "mlx_cuda", ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    archive = shutil.make_archive(str(tmp_path / "package"), "zip", tmp_path / "site")
    with doctor("doctor", "--json", PYTHONPATH=archive) as process:
        out, error = process.communicate()
    assert error == ""
    assert json.loads(out)["mlx_cuda"] == mlx_cuda.__version__
    code = "from mlx_cuda._loader.environment import take; print(take(ask_driver=False).archive)"
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": archive}, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == archive


# Imports are refused as on a machine where libmlx or the driver is missing.
WITHOUT_MLX = """\
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name == "mlx" or name.startswith("mlx."):
            raise ImportError("libmlx.so: cannot open shared object file")
sys.meta_path.insert(0, Refuse())
"""


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", WITHOUT_MLX + code], capture_output=True, text=True, check=False)


def test_the_package_imports_without_mlx() -> None:
    done = python("import mlx_cuda; print(mlx_cuda.__version__, sorted(dir(mlx_cuda)))")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(mlx_cuda.__version__)


@pytest.mark.parametrize("use", ["from mlx_cuda import linear", "import mlx_cuda; mlx_cuda.attention"])
def test_an_operation_without_mlx_says_what_is_wrong(use: str) -> None:
    done = python(f"import mlx_cuda\ntry:\n    {use}\nexcept mlx_cuda.BackendError as error:\n    print(error)")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("mlx.core cannot be imported: ")
    assert "\n  fix: " in done.stdout


def test_the_doctor_never_imports_mlx() -> None:
    code = "import json; from mlx_cuda import __main__, _doctor\n_doctor.probe = lambda **_: _doctor.Probe()\n"
    done = python(code + "__main__.main(['doctor', '--json'])\nassert not any(name.split('.')[0] == 'mlx' for name in sys.modules)")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["mlx_cuda"] == mlx_cuda.__version__


def test_unknown_names_are_attribute_errors() -> None:
    with pytest.raises(AttributeError, match="module 'mlx_cuda' has no attribute 'no_such_operation'"):
        mlx_cuda.no_such_operation  # type: ignore[attr-defined]  # noqa: B018
