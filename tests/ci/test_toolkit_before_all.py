"""wheel_hooks/before_all.py: what cibuildwheel calls before it builds."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from ci import matrix
from wheel_hooks import before_all

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def opt_python(tmp_path: Path) -> Path:
    for name in ("cp39-cp39", "cp310-cp310", "cp313-cp313", "cp314-cp314t", "pp311-pypy311_pp73"):
        (tmp_path / name / "bin").mkdir(parents=True)
        (tmp_path / name / "bin" / "python").touch()
    return tmp_path


def test_an_interpreter_that_is_new_enough_is_kept(opt_python: Path) -> None:
    assert before_all.choose_interpreter("/usr/bin/python", (3, 10), opt_python) == "/usr/bin/python"


def test_an_old_interpreter_gives_way_to_the_newest_of_the_container(opt_python: Path, tmp_path: Path) -> None:
    chosen = before_all.choose_interpreter("/usr/bin/python", (3, 9), opt_python)
    assert chosen == str(opt_python / "cp313-cp313" / "bin" / "python")
    assert before_all.choose_interpreter("/usr/bin/python", (3, 9), tmp_path / "nothing") is None


@pytest.mark.parametrize(("failing", "code"), [("--target", 1), ("--group", 3), ("toolkit", 2), (None, 0)])
def test_commands_are_shown_and_a_failure_is_passed_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], failing: str | None, code: int
) -> None:
    ran = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[bytes]:
        ran.append(command)
        return subprocess.CompletedProcess(command, code if failing in command else 0)

    monkeypatch.setattr(subprocess, "run", run)
    assert before_all.main(["--cuda", "13.0"]) == code
    assert len(ran) == {"--target": 1, "--group": 3}.get(failing or "", 4)
    assert capsys.readouterr().err.count("\n") == len(ran)
    if failing in {None, "toolkit"}:
        assert ran[-1][1:] == ["-m", "ci", "toolkit", "install", "--cuda", "13.0"]


def test_no_interpreter_is_an_environment_problem(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(before_all, "choose_interpreter", lambda *_: None)
    assert before_all.main([]) == 2
    assert "cure:" in capsys.readouterr().err


@pytest.mark.slow
def test_it_works_from_an_empty_environment() -> None:
    command = [sys.executable, "-I", str(matrix.REPOSITORY / "wheel_hooks" / "before_all.py"), "cudnn-frontend"]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", check=True)
    assert done.stdout.startswith("cudnn-frontend")
