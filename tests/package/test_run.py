"""``python -m mlx_cuda run``: any program with ``patch()`` on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import mlx_cuda
import pytest
from mlx_cuda import _patch
from mlx_cuda.__main__ import main


@pytest.mark.parametrize("before", [[], ["-m"], ["--"], ["--kv-bits", "8", "--"]], ids=" ".join)
def test_run(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, before: list[str]) -> None:
    script = tmp_path / "program_that_is_run.py"
    script.write_text("import sys, mlx.core as mx\nprint(__name__, mx.gather_mm.__module__, sys.argv[1:])\nsys.exit(3)\n", "utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))
    own = mx.gather_mm
    try:
        with pytest.raises(SystemExit) as ended:
            main(["run", *before, script.stem if before == ["-m"] else str(script), "--model", "x"])
        assert mx.gather_mm is not own
    finally:
        mlx_cuda.unpatch()
    assert ended.value.code == 3
    assert capsys.readouterr().out == "__main__ mlx.core ['--model', 'x']\n"


def test_bits_hold_for_a_program_that_patches_itself(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text("import mlx_cuda\nmlx_cuda.patch()\nprint(mlx_cuda._replay.packing.settings.packing)\n", "utf-8")
    command = [sys.executable, "-m", "mlx_cuda", "run", "--kv-bits", "8", str(script)]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() == "Packing(group_size=64, bits=8)"


def test_what_cannot_be_had_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "program.py"
    script.write_text("", "utf-8")
    monkeypatch.setattr(_patch, "refusal", lambda: "there is no such GPU")
    with pytest.raises(SystemExit) as ended:
        main(["run", "--batch-invariant", str(script)])
    assert ended.value.code == 2
    assert "batch_invariant is not available: there is no such GPU.\n" in capsys.readouterr().err


@pytest.mark.parametrize(("words", "message"), [
    ([], "name a module"),
    (["--"], "name a module"),
    (["nowhere.py"], "there is no script nowhere.py\n"),
    (["json.tool"], "there is no script json.tool; for the module: -m json.tool\n"),
])  # fmt: skip
def test_run_without_a_program(capsys: pytest.CaptureFixture[str], words: list[str], message: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["run", *words])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def python(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    path = repr(str(Path(mlx_cuda.__file__).parents[1]))
    code = f"import sys; sys.path.insert(1, {path}); from mlx_cuda.__main__ import main; sys.exit(main(['run', *sys.argv[1:]]))"
    *options, module, name = arguments
    return subprocess.run([sys.executable, *options, "-c", code, module, name], cwd=folder, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(("name", "said"), [
    ("no_such_module", "No module named no_such_module"),
    ("json.nothing", "No module named json.nothing"),
    ("json", "No module named json.__main__; 'json' is a package and cannot be directly executed"),
])  # fmt: skip
def test_a_module_that_is_not_there(tmp_path: Path, name: str, said: str) -> None:
    """As the interpreter says it."""
    done = python("-m", name, folder=tmp_path)
    assert (done.returncode, done.stderr) == (1, f"{sys.executable}: {said}\n")


def test_an_import_that_the_program_misses_is_the_program_s(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("import no_such_module\n")
    done = python("-m", "program", folder=tmp_path)
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert done.stderr.endswith("ModuleNotFoundError: No module named 'no_such_module'\n")


def test_an_isolated_interpreter_s_path_stays(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("import sys; print(sys.path[0])\n")
    own = python("-I", "--", "program.py", folder=tmp_path)
    assert own.stdout.endswith(".zip\n"), own.stderr
    assert python("--", "program.py", folder=tmp_path).stdout == f"{tmp_path.resolve()}\n"
