"""``python -m ci try``: the whole command on a small repository and stub wheels, with the real uv and the real pytest."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import sys
import sysconfig
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ci import __main__ as cli
from ci import matrix
from ci.matrix import Row, gpu, host_platform
from ci.trial import trial
from ci.trial.trial import Case, copy_tests

from .audit_support import NAMES, VERSION, write_wheel
from .trial_support import DOCTOR, FILES, PURE, make_wheel

PYPROJECT = """\
[tool.pytest.ini_options]
addopts = ["--strict-markers", "--disable-plugin-autoload"]
"""
GOOD = "import mlx_cuda\ndef test_good(): pass\ndef test_too(): pass\n"
ON_GPU = "import os\ndef test_gpu(): assert os.environ['MLX_CUDA_REQUIRE_GPU'] == '1'\n"
OF_AN_INSTALLATION = ("checks", "device_code", "doctor", "environment", "load_errors", "loaded", "native", "nn", "public_names", "run")
BENCHMARK = """\
import json, os, pathlib, sys, mlx_cuda
output = pathlib.Path(sys.argv[sys.argv.index("-o") + 1])
output.write_text(json.dumps({"arguments": sys.argv[1:], "from": mlx_cuda.__file__, "git": os.environ["GIT_DIR"]}))
sys.exit("MLX_FAILS" in os.environ)
"""


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary folders are made."""
    folder = tmp_path / "temporary files"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


@pytest.fixture
def repository(tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A small repository and no GPU. The tests' requirement is a package that lends this environment's pytest: nothing is downloaded."""
    folder = tmp_path / "repository"
    write(folder / "pyproject.toml", PYPROJECT)
    write(folder / "tests" / "__init__.py", "")
    write(folder / "tests" / "package" / "test_good.py", GOOD)
    write(folder / "tests" / "gpu" / "test_gpu.py", ON_GPU)
    write(folder / "tests" / "ci" / "test_factory.py", "raise RuntimeError('not for here')")
    write(folder / "benchmarks" / "__main__.py", BENCHMARK)
    write(folder / "mlx_cuda" / "__init__.py", "raise RuntimeError('the source tree')")
    borrowed = {
        "sitecustomize.py": f"import site\nsite.addsitedir({sysconfig.get_path('purelib')!r})\n",
        "borrowed-1.dist-info/METADATA": "Metadata-Version: 2.1\nName: borrowed\nVersion: 1\n",
        "borrowed-1.dist-info/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        "borrowed-1.dist-info/RECORD": "",
    }
    (tmp_path / "links").mkdir()
    with zipfile.ZipFile(tmp_path / "links" / "borrowed-1-py3-none-any.whl", "w") as archive:
        for name, text in borrowed.items():
            archive.writestr(name, text)
    digest = hashlib.sha256((tmp_path / "links" / "borrowed-1-py3-none-any.whl").read_bytes()).hexdigest()
    write(folder / "requirements" / "package-tests.txt", f"borrowed==1 --hash=sha256:{digest}\n")
    monkeypatch.setenv("UV_OFFLINE", "1")
    monkeypatch.setenv("UV_FIND_LINKS", str(tmp_path / "links"))
    monkeypatch.delenv("MLX_CUDA_REQUIRE_GPU", raising=False)
    monkeypatch.setattr(trial, "REPOSITORY", folder)
    monkeypatch.setattr(gpu, "extra", lambda: "cpu")
    monkeypatch.chdir(folder)
    before = sorted(folder.rglob("*"))
    yield folder
    assert sorted(folder.rglob("*")) == before


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    return make_wheel(tmp_path / "dist")


def report(capfd: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    code = cli.main(["try", "--json", *arguments])
    out, err = capfd.readouterr()
    assert out, err
    said = json.loads(out)
    assert out == json.dumps(said, indent=2) + "\n"
    return code, said


def problems(capfd: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    code, said = report(capfd, *arguments)
    assert (code, said["works"], said["outcomes"][0]["works"]) == (1, False, False)
    found: list[str] = said["outcomes"][0]["problems"]
    return found


def test_a_wheel_that_works(repository: Path, temporary: Path, wheel: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["try", str(wheel)]) == 0
    out = capfd.readouterr().out
    assert out.endswith(f"WORKS here with [cpu]: {PURE}\n")
    for part in ("installed", "doctor", "tests/package", "2 passed", " ok ", " yes "):
        assert part in out
    assert "tests/gpu" not in out
    assert list(temporary.iterdir()) == []


def test_a_folder_on_two_pythons_for_a_machine(repository: Path, wheel: Path, capfd: pytest.CaptureFixture[str]) -> None:
    code, said = report(capfd, str(wheel.parent), "--python", sys.executable, "--python", sys.executable)
    assert (code, said["works"], said["kept"]) == (0, True, [])
    assert [(outcome["row"], outcome["extra"], outcome["gpu"]) for outcome in said["outcomes"]] == [("", "cpu", False)] * 2
    assert [outcome["tests"]["package"] for outcome in said["outcomes"]] == [{"passed": 2, "skipped": 0, "failed": []}] * 2
    assert [outcome["wheel"] for outcome in said["outcomes"]] == [PURE] * 2


def test_a_failing_test(repository: Path, temporary: Path, wheel: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (repository / "tests" / "package" / "test_good.py").write_text("def test_good(): pass\ndef test_bad(): assert 1 == 2\n")
    assert cli.main(["try", str(wheel)]) == 1
    out, err = capfd.readouterr()
    assert "1 passed, 1 failed" in out
    assert "tests/package: failed: test_good::test_bad" in out
    assert out.splitlines()[-1].startswith("DOES NOT WORK here with [cpu]: ")
    assert "assert 1 == 2" in err
    assert list(temporary.iterdir()) == []


@pytest.mark.parametrize(
    ("tests", "said"),
    [
        ("import pytest\n@pytest.mark.skip(reason='no')\ndef test_one(): pass\n", "pytest ended with exit code 0 after 0 passed tests"),
        ("", "pytest ended with exit code 5 after 0 passed tests"),
        ("import os\ndef test_one(): os._exit(7)\n", "pytest ended with exit code 7 after 0 passed tests"),
        ("import nothing_like_this\n", "failed: ::tests.package.test_good"),
        ("def test_one(x): pass\n", "failed: test_good::test_one"),
    ],
)
def test_no_proof_is_no_success(repository: Path, wheel: Path, capfd: pytest.CaptureFixture[str], tests: str, said: str) -> None:
    (repository / "tests" / "package" / "test_good.py").write_text(tests)
    assert problems(capfd, str(wheel)) == [f"tests/package: {said}"]


def test_the_wheel_has_nothing_of_what_the_tests_need(repository: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    looking = "from importlib.metadata import distributions\nprint([each.name for each in distributions()], file=open({!r}, 'w'))\n"
    seen = tmp_path / "seen"
    main = looking.format(str(seen)) + f"print({json.dumps(DOCTOR)!r})"
    assert cli.main(["try", str(make_wheel(tmp_path / "dist", main=main))]) == 0
    assert seen.read_text() == "['mlx-cuda']\n"


# Each with a value that no file and no output may hold.
SECRETS = (
    *("GH_TOKEN", "GITHUB_TOKEN", "TWINE_USERNAME", "TWINE_PASSWORD", "UV_PUBLISH_TOKEN", "UV_INDEX_PRIVATE_PASSWORD", "PIP_INDEX_URL"),
    *("ACTIONS_RUNTIME_TOKEN", "ACTIONS_ID_TOKEN_REQUEST_TOKEN", "ACTIONS_ID_TOKEN_REQUEST_URL", "AWS_ACCESS_KEY_ID", "AWS_PROFILE"),
    *("MLX_CUDA_FOO_TOKEN", "CUDA_PASSWORD", "NVIDIA_API_KEY", "OPENAI_KEY", "SSH_AUTH_SOCK", "NETRC", "HTTPS_PROXY", "https_proxy"),
    *("PYTEST_ADDOPTS", "DBUS_SESSION_BUS_ADDRESS", "WHATEVER", "GIT_ASKPASS", "XDG_CONFIG_HOME"),
)


def test_a_wheel_that_dumps_its_environment_finds_no_secret(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Import, doctor and tests, and whatever starts the interpreter that the wheel lies in."""
    for name in SECRETS:
        monkeypatch.setenv(name, f"-k hush-{name}")
    monkeypatch.setenv("UV_NO_CACHE", "1")  # uv asks the interpreter each time, as when a wheel has touched it
    dumped = tmp_path / "dumped"
    dump = f"import os, sys; print(sys.argv, dict(os.environ), file=open({str(dumped)!r}, 'a', encoding='utf-8'))\n"
    assert cli.main(["try", str(make_wheel(tmp_path / "dist", init=dump, pth=dump))]) == 0
    lines = dumped.read_text("utf-8").splitlines()
    for part in ("'doctor'", "pytest", "['-c']"):
        assert any(part in line.partition("]")[0] + "]" for line in lines), part
    assert [line for line in lines if "hush" in line] == []
    assert all(re.search(r"'HOME': '[^']*environment-1.home'", line) for line in lines)
    assert "hush" not in "".join(capfd.readouterr())


def test_many_failures_are_counted(repository: Path, wheel: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (repository / "tests" / "package" / "test_good.py").write_text("".join(f"def test_{n}(): assert 0\n" for n in range(8)))
    named = ", ".join(f"test_good::test_{n}" for n in range(5))
    assert problems(capfd, str(wheel)) == [f"tests/package: failed: {named} and 3 more"]


def test_what_the_doctor_finds(repository: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    check = {"name": "mlx", "status": "fail", "summary": "mlx is missing", "fix": "install it"}
    sick = json.dumps({**DOCTOR, "ok": False, "checks": [{**check, "name": "python", "status": "ok"}, check]})
    path = make_wheel(tmp_path / "dist", main=f"import sys; print({sick!r}); sys.exit(1)")
    code, said = report(capfd, str(path))
    assert code == 1
    assert said["outcomes"][0]["problems"] == ["doctor: mlx: mlx is missing\n  fix: install it"]
    assert said["outcomes"][0]["tests"]["package"]["passed"] == 2


@pytest.mark.parametrize(
    ("init", "said"),
    [
        ("raise ImportError('libmlx.so: cannot open')", "the doctor did not run: .*libmlx.so: cannot open"),
        ("import sys\nif '-W' in sys.orig_argv: raise ImportError('no')", "it cannot be imported:\n(.|\n)*ImportError: no"),
        ("__file__ = '/elsewhere/mlx_cuda/__init__.py'", "is imported from /elsewhere/mlx_cuda/__init__.py, expected it in "),
        ("__version__ = '1.2.3'", f"mlx_cuda.__version__ is 1.2.3, expected that of mlx_cuda-{VERSION}"),
    ],
)
def test_a_package_that_is_not_the_wheels(
    repository: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], init: str, said: str
) -> None:
    (found,) = problems(capfd, str(make_wheel(tmp_path / "dist", init=init)))
    assert re.search(said, found)


def test_a_wheel_that_cannot_be_installed(repository: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = make_wheel(tmp_path / "dist", requires="Requires-Dist: mlx-cuda-of-nobody\n")
    assert cli.main(["try", str(path)]) == 1
    out = capfd.readouterr().out
    assert "│ no " in out
    assert "cannot install mlx-cuda[cpu] @ file://" in out


def test_a_wheel_for_another_platform(repository: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    other = NAMES["linux" if sys.platform == "win32" else "windows"]
    path = write_wheel(tmp_path / other, dict(FILES))
    assert cli.main(["try", str(path)]) == 1
    out = capfd.readouterr().out
    assert "no wheel for this platform\n  there is: cp310-abi3-" in out
    assert "DOES NOT WORK here with [cpu]: none of the wheels" in out


def test_a_bad_record_is_refused_before_anything_is_made(
    repository: Path, temporary: Path, wheel: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ci.trial.trial.Fresh.make", lambda *_: pytest.fail("made an environment"))
    write_wheel(wheel, {**FILES, f"mlx_cuda-{VERSION}.dist-info/RECORD": b""})
    assert cli.main(["try", str(wheel)]) == 1
    assert "error: the wheel is not what its RECORD says:" in capfd.readouterr().err
    assert list(temporary.iterdir()) == []


def test_requirements_of_the_tests_are_not_the_wheels_fault(
    repository: Path, temporary: Path, wheel: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (repository / "requirements" / "package-tests.txt").write_text(f"borrowed==1 --hash=sha256:{'0' * 64}\n")
    assert cli.main(["try", str(wheel)]) == 2
    said = capfd.readouterr().err
    assert said.startswith("error: the tests cannot be prepared: cannot install --target ")
    assert said.endswith("\n  fix: lock the group package-tests again: python -m ci bump --tools\n")
    assert list(temporary.iterdir()) == []


def test_a_python_that_is_not_here_is_found_out_first(
    repository: Path, temporary: Path, wheel: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["try", str(wheel), "--python", sys.executable, "--python", "/nowhere/python"]) == 2
    err = capfd.readouterr().err
    assert "error: no environment for Python /nowhere/python" in err
    assert "install" not in err.replace("an installed interpreter", "")
    assert list(temporary.iterdir()) == []


@pytest.mark.parametrize("kept", [[], ["--keep"]])
def test_an_interruption_leaves_nothing(
    repository: Path, temporary: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch, kept: list[str]
) -> None:
    def interrupted(*_: object) -> None:
        assert any(temporary.iterdir())
        raise KeyboardInterrupt

    monkeypatch.setattr(trial.Trial, "examine", interrupted)
    assert cli.main(["try", str(wheel), *kept]) == 130
    assert list(temporary.iterdir()) == []


def test_an_environment_can_be_kept(repository: Path, wheel: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["try", str(wheel), "--keep"]) == 0
    last = capfd.readouterr().out.splitlines()[-1]
    assert last.startswith("kept, activate with: ")
    activate = Path(last.partition("source ")[2].strip("'"))
    assert activate.is_file()
    shutil.rmtree(activate.parents[2])


@pytest.fixture
def with_gpu(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "extra", lambda: "cu13")


@pytest.mark.usefixtures("with_gpu")
@pytest.mark.parametrize(("asked", "extra"), [([], "cu13"), (["--extra", "cu12", "--require-gpu"], "cu12")])
def test_with_a_gpu_its_tests_run_and_have_to(
    repository: Path, wheel: Path, capfd: pytest.CaptureFixture[str], asked: list[str], extra: str
) -> None:
    code, said = report(capfd, str(wheel), *asked)
    (outcome,) = said["outcomes"]
    assert (code, outcome["extra"], outcome["gpu"]) == (0, extra, True)
    assert outcome["tests"]["gpu"]["passed"] == 1


@pytest.mark.usefixtures("with_gpu")
def test_the_cpu_extra_leaves_the_gpu_out(repository: Path, wheel: Path, capfd: pytest.CaptureFixture[str]) -> None:
    code, said = report(capfd, str(wheel), "--extra", "cpu")
    assert (code, said["outcomes"][0]["gpu"], list(said["outcomes"][0]["tests"])) == (0, False, ["package"])
    assert cli.main(["try", str(wheel), "--extra", "cpu", "--require-gpu"]) == 1
    assert capfd.readouterr().err == "error: a GPU is required, and [cpu] leaves it out\n"


def test_a_gpu_that_is_required(repository: Path, wheel: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert cli.main(["try", str(wheel), "--require-gpu"]) == 1
    assert capfd.readouterr().err == "error: a GPU is required, and there is none that this driver can use\n"
    monkeypatch.setenv("MLX_CUDA_REQUIRE_GPU", "1")
    assert cli.main(["try", str(wheel)]) == 1


def test_a_benchmark_needs_a_gpu(repository: Path, wheel: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["try", str(wheel), "--benchmark", str(tmp_path / "out.json")]) == 2
    assert "error: a benchmark needs a GPU\n  fix: omit --benchmark" in capfd.readouterr().err


@pytest.mark.nightly
@pytest.mark.usefixtures("with_gpu")
@pytest.mark.parametrize("fails", [False, True])
def test_a_benchmark_of_the_wheel(
    repository: Path, wheel: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *, fails: bool
) -> None:
    if fails:
        monkeypatch.setenv("MLX_FAILS", "1")
    output = tmp_path / "results" / "out.json"
    code, said = report(capfd, str(wheel), "--benchmark", str(output), "--python", sys.executable, "--python", sys.executable)
    assert code == int(fails)
    assert [outcome["benchmark"] for outcome in said["outcomes"]] == [str(output), ""]
    problem = f"the benchmark ended with exit code 1; what it measured is in {output}"
    assert [outcome["problems"] for outcome in said["outcomes"]] == [[problem] * fails, []]
    results = json.loads(output.read_text())
    assert results["arguments"][-2:] == ["--wheel", str(wheel)]
    assert "environment-1" in results["from"]
    assert results["git"] == str(repository / ".git")
    assert list(output.parent.iterdir()) == [output]


@pytest.mark.usefixtures("with_gpu")
def test_results_that_cannot_be_written(wheel: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert cli.main(["try", str(wheel), "--benchmark", str(tmp_path / "file" / "out.json")]) == 2
    assert capfd.readouterr().err.endswith("out.json: File exists\n  fix: give another --benchmark\n")


HERE = f"{sys.version_info.major}.{sys.version_info.minor}"
ON_CPU = Row(host_platform().name, HERE, "cpu")
ON_HOPPER = Row(host_platform().name, HERE, "cu12", "hopper", "550.54")
ELSEWHERE = Row("linux-riscv64", HERE, "cpu")


@pytest.fixture
def rows(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows for this Python, and a Hopper."""
    monkeypatch.setattr(trial, "load", lambda: replace(matrix.load(), tests=(ON_CPU, ON_HOPPER, ELSEWHERE)))
    monkeypatch.setattr(gpu, "capabilities", lambda _: (90,))
    monkeypatch.setattr(gpu, "driver_version", lambda: "580.65.06")
    place = "import os\ndef test_place(): assert os.environ['MLX_CUDA_PLACE'] == {!r}\n"
    (repository / "tests" / "gpu" / "test_gpu.py").write_text(ON_GPU + place.format("gpu"))
    (repository / "tests" / "package" / "test_good.py").write_text(GOOD + place.format("try"))


@pytest.mark.nightly
@pytest.mark.usefixtures("rows")
def test_rows_one_after_another(wheel: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The tests of the GPU's place are not the others': one of each fails."""
    code, said = report(capfd, str(wheel), "--row", f"{ON_CPU.name} {ON_HOPPER.name}", "--row", ON_CPU.name)
    assert (code, said["works"]) == (1, False)
    assert [outcome["row"] for outcome in said["outcomes"]] == [ON_CPU.name, ON_HOPPER.name, ON_CPU.name]
    assert [(outcome["extra"], outcome["gpu"], outcome["works"]) for outcome in said["outcomes"][:2]] == [
        ("cpu", False, True),
        ("cu12", True, False),
    ]
    tests = said["outcomes"][1]["tests"]
    assert (tests["gpu"]["failed"], tests["package"]["failed"]) == ([], ["test_good::test_place"])


@pytest.mark.nightly
@pytest.mark.usefixtures("rows")
def test_rows_have_one_table_and_one_verdict(wheel: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert cli.main(["try", str(wheel), "--row", ON_HOPPER.name, "--row", ON_CPU.name]) == 1
    out = capfd.readouterr().out
    assert re.search(rf"┃ row .*\n.*\n│ {ON_HOPPER.name} +│ yes ", out)
    assert f"{ON_HOPPER.name}: tests/package: failed: test_good::test_place\n" in out
    assert out.splitlines()[-1] == f"DOES NOT WORK here with [cu12], [cpu]: {PURE}"
    assert trial.declared([ON_HOPPER.name]) == [Case("cu12", on_gpu=True, python=HERE, row=ON_HOPPER.name)]


@pytest.mark.usefixtures("rows")
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["--row", ON_CPU.name, "--row", ELSEWHERE.name],
            f"the row {ELSEWHERE.name} is not for this machine's {ON_CPU.platform}\n  fix: leave",
        ),
        (["--row", "nonsense"], f"unknown row 'nonsense'\n  fix: use one of {ON_CPU.name}, {ON_HOPPER.name}"),
        (["--row", " "], "--row is empty\n  fix: give a name; `python -m ci matrix` prints them"),
        (["--row", ON_CPU.name, "--extra", "cpu"], "a row determines the Python and the extra\n  fix: omit --extra and --python"),
        (["--row", ON_CPU.name, "--python", HERE], "a row determines the Python and the extra"),
        (["--row", ON_CPU.name, "--row", ON_HOPPER.name, "--benchmark", "x.json"], "a benchmark needs a GPU"),
    ],
)
def test_rows_that_cannot_be_tried(
    temporary: Path, wheel: Path, capfd: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    assert cli.main(["try", str(wheel), *arguments]) == 2
    assert f"error: {said}" in capfd.readouterr().err
    assert list(temporary.iterdir()) == []


@pytest.mark.usefixtures("rows")
@pytest.mark.parametrize(
    ("found", "driver", "said"),
    [
        ((80, 90), "580.65", "a GPU here has the compute capability 8.0, which is not of hopper"),
        ((90,), "550.53.99", "the driver here is 550.53.99"),
    ],
)
def test_a_row_for_another_gpu_or_driver(
    wheel: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, found: tuple[int, ...], driver: str, said: str
) -> None:
    monkeypatch.setattr(gpu, "capabilities", lambda _: found)
    monkeypatch.setattr(gpu, "driver_version", lambda: driver)
    assert cli.main(["try", str(wheel), "--row", ON_HOPPER.name]) == 2
    fix = f"run the row {ON_HOPPER.name} on a machine with a GPU of the family hopper and the driver 550.54 or newer"
    assert capfd.readouterr().err == f"error: {said}\n  fix: {fix}\n"


def of_an_installation(folder: Path) -> Path:
    """As `copy_tests`, but of the package's those alone that look at how it is installed and loaded: this run has the others itself."""
    tests = copy_tests(folder) / "tests" / "package"
    assert all((tests / f"test_{name}.py").exists() for name in OF_AN_INSTALLATION)
    for path in tests.glob("test_*.py"):
        if path.stem.removeprefix("test_") not in OF_AN_INSTALLATION:
            path.unlink()
    return folder


@pytest.mark.nightly
@pytest.mark.slow
def test_the_real_wheel_works_here(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, at_night: bool, tested_wheel: Path
) -> None:
    """At night (``--place nightly``) with all tests of the package, as `python -m ci try` has them."""
    if not at_night:
        monkeypatch.setattr(trial, "copy_tests", of_an_installation)
    code, said = report(capfd, str(tested_wheel), "--extra", "cpu")
    assert (code, said["works"]) == (0, True), json.dumps(said, indent=1)  # whole, with what failed
    assert said["outcomes"][0]["tests"]["package"]["passed"] > 100
