"""Fresh environments, made by the real uv; nothing is downloaded."""

from __future__ import annotations

import json
import os
import shlex
import sys
import tarfile
from pathlib import Path, PurePosixPath

import pytest

from ci.errors import CheckFailed, EnvironmentProblem
from ci.toolkit import uv
from ci.trial import variables
from ci.trial.fresh import Fresh

from .audit_support import VERSION
from .trial_support import ALWAYS, DOCTOR, make_wheel, record


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UV_OFFLINE", "1")


@pytest.fixture
def fresh(tmp_path: Path) -> Fresh:
    return Fresh.make(tmp_path / "an environment")


def test_it_is_empty_and_of_this_version(fresh: Fresh) -> None:
    assert fresh.version.rstrip("t") == ".".join(map(str, sys.version_info[:3]))
    assert fresh.run("-c", "import pytest").returncode == 1
    assert fresh.run("-c", "import sys; print(sys.prefix)").stdout.strip() == str(fresh.folder)


def test_it_installs_a_wheel_with_an_extra_and_asks_its_doctor(fresh: Fresh, tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path / "a folder")
    fresh.install(f"mlx-cuda[cpu] @ {wheel.as_uri()}")
    assert fresh.doctor() == DOCTOR


def test_nothing_of_the_caller_reaches_it(fresh: Fresh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mlx_cuda").mkdir()
    (tmp_path / "mlx_cuda" / "__init__.py").touch()
    monkeypatch.chdir(tmp_path)
    for name in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "PYTHONUSERBASE"):
        monkeypatch.setenv(name, str(tmp_path))
    assert fresh.run("-c", "import mlx_cuda").returncode == 1


SEEN = "import json, os; print(json.dumps(dict(os.environ)))"


def test_code_and_installers_get_what_is_theirs(fresh: Fresh, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "https://user:word@example.org/simple")
    monkeypatch.setenv("MLX_SETTING", "yes")
    code = json.loads(fresh.run("-c", SEEN, env={"GIVEN": "1"}).stdout)
    assert {"MLX_SETTING": "yes", "GIVEN": "1", "PYTHONNOUSERSITE": "1"}.items() <= code.items()
    assert "PIP_INDEX_URL" not in code
    assert code["HOME"] == str(fresh.folder / "home")
    assert Path(code["HOME"]).is_dir()
    installer = json.loads(fresh.run("-c", SEEN, installs=True).stdout)
    assert installer["PIP_INDEX_URL"] == "https://user:word@example.org/simple"
    assert installer.get("HOME") == os.environ.get("HOME")
    assert "MLX_SETTING" not in installer


def test_installing_runs_no_code(fresh: Fresh, tmp_path: Path) -> None:
    """What has to be built first is refused, by name and by address."""
    ran, backend = tmp_path / "ran", '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
    (tmp_path / "pyproject.toml").write_text(f'{backend}[project]\nname = "evil"\nversion = "1"\n')
    (tmp_path / "backend.py").write_text(f"open({str(ran)!r}, 'w')\n")
    sdist = tmp_path / "evil-1.tar.gz"
    with tarfile.open(sdist, "w:gz") as archive:
        for name in ("pyproject.toml", "backend.py"):
            archive.add(tmp_path / name, f"evil-1/{name}")
    for what in ("evil", f"evil @ {sdist.as_uri()}"):
        with pytest.raises(CheckFailed, match=f"cannot install --no-index --find-links .* {what}:"):
            fresh.install(what, options=["--no-index", "--find-links", str(tmp_path)])
    assert not ran.exists()


def test_a_doctor_that_finds_something_is_heard(fresh: Fresh, tmp_path: Path) -> None:
    report = {**DOCTOR, "ok": False}
    fresh.install(str(make_wheel(tmp_path, main=f"import sys; print({json.dumps(report)!r}); sys.exit(1)")))
    assert fresh.doctor() == report


@pytest.mark.parametrize(("main", "said"), [("raise SystemExit('no MLX')", "1, and it said: no MLX"), ("", "0, and it said: nothing")])
def test_a_doctor_that_cannot_run(fresh: Fresh, tmp_path: Path, main: str, said: str) -> None:
    fresh.install(str(make_wheel(tmp_path, main=main)))
    with pytest.raises(CheckFailed, match=f"the doctor did not run: exit code {said}"):
        fresh.doctor()


def test_requirements_that_cannot_be_met_are_the_wheels_fault(fresh: Fresh, tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path, requires="Requires-Dist: mlx-cuda==2.0\n")
    with pytest.raises(CheckFailed, match=r"cannot install (.|\n)*No solution found"):
        fresh.install(str(wheel))


def test_a_wheel_for_another_platform(fresh: Fresh, tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path)
    other = wheel.rename(wheel.with_name(f"mlx_cuda-{VERSION}-cp310-abi3-win_arm64.whl"))
    with pytest.raises(CheckFailed, match="incompatible with the current platform"):
        fresh.install(str(other))


def test_no_dependencies_and_other_options(fresh: Fresh, tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path, requires="Requires-Dist: mlx-cuda-of-nobody==2.0\n")
    fresh.install("mlx-cuda", options=["--no-deps", "--find-links", str(wheel.parent), "--no-index"])
    assert fresh.doctor() == DOCTOR


def test_an_index_that_cannot_be_reached_is_not_the_wheels_fault(
    fresh: Fresh, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("UV_OFFLINE", "0")
    monkeypatch.setenv("UV_HTTP_RETRIES", "0")
    with pytest.raises(EnvironmentProblem, match="cannot be reached"):
        fresh.install("mlx-cuda", options=["--default-index", "http://127.0.0.1:9/simple/", "--no-cache"])
    assert "127.0.0.1:9" in capsys.readouterr().err


def test_a_python_that_is_not_here(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentProblem, match=r"no environment for Python .*nowhere: No interpreter found .*\n  fix: give the path"):
        Fresh.make(tmp_path / "environment", tmp_path / "nowhere")
    assert not (tmp_path / "environment").exists()


def test_output_can_be_passed_on(fresh: Fresh, capfd: pytest.CaptureFixture[str]) -> None:
    done = fresh.run("-c", "import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)", show=True)
    assert done.returncode == 3
    out, err = capfd.readouterr()
    assert out == ""
    assert sorted(err.split()) == ["err", "out"]


def test_a_shell_can_read_the_activation(fresh: Fresh) -> None:
    assert Path(shlex.split(fresh.activation, posix=sys.platform != "win32")[-1].strip('"')).is_file()


@pytest.mark.parametrize(
    ("system", "python", "activation"),
    [("linux", "bin/python", "source 'a folder/bin/activate'"), ("win32", "Scripts/python.exe", '"a folder\\Scripts\\activate"')],
)
def test_each_system_has_its_places(system: str, python: str, activation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", system)
    fresh = Fresh(PurePosixPath("a folder"))  # type: ignore[arg-type]
    assert (str(fresh.python), fresh.activation) == (f"a folder/{python}", activation)


def test_how_programs_are_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """None asks for anything, and no output is too odd to be read."""
    monkeypatch.setattr(variables, "for_installers", lambda: {"FOR": "installers"})
    monkeypatch.setattr(variables, "for_code", lambda home: {"FOR": "code", "HOME": str(home)})
    monkeypatch.chdir(tmp_path)
    runs = record(monkeypatch, out=json.dumps(DOCTOR))
    Path("fresh").mkdir()
    Fresh.make(Path("fresh"))
    fresh = Fresh.make(Path("fresh"), "3.13")
    fresh.install("a", "b", options=["--option"])
    assert fresh.doctor() == DOCTOR
    fresh.run("x", cwd=tmp_path, env={"GIVEN": "1"}, show=True, installs=True)
    folder = tmp_path / "fresh"
    command = [uv.executable(), "--color", "never"]
    venv = [*command, "venv", "--quiet", "--no-project", "--python"]
    code = {"cwd": folder, "env": {"FOR": "code", "HOME": str(folder / "home")}}
    installing = {"env": {"FOR": "installers"}}
    assert runs == [
        ([*venv, sys.executable, str(folder)], ALWAYS | installing),
        ([*venv, "3.13", str(folder)], ALWAYS | installing),
        ([*command, "pip", "install", "--no-build", "--python", str(fresh.python), "--option", "a", "b"], ALWAYS | installing),
        ([str(fresh.python), "-m", "mlx_cuda", "doctor", "--json"], ALWAYS | code),
        (
            [str(fresh.python), "x"],
            ALWAYS | {"cwd": tmp_path, "env": {"FOR": "installers", "GIVEN": "1"}, "stdout": 2, "stderr": None},
        ),
    ]
