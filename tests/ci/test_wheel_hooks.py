"""wheel_hooks: what cibuildwheel calls, from whichever interpreter, with nothing installed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ci import matrix
from wheel_hooks import before_all, factory

FACTORY = str(matrix.REPOSITORY / "requirements" / "factory.txt")  # a word of the third command only


@pytest.fixture
def opt_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A container's interpreters; those whose folder has a file `pre-release` say that they are one."""
    for name in ("cp39-cp39", "cp310-cp310", "cp312-cp312", "cp313-cp313", "cp314-cp314", "cp314-cp314t", "pp311-pypy311_pp73"):
        (tmp_path / name / "bin").mkdir(parents=True)
        (tmp_path / name / "bin" / "python").touch()
    monkeypatch.setattr(factory, "is_final", lambda python: not Path(python).with_name("pre-release").exists())
    return tmp_path


def test_an_interpreter_that_is_new_enough_is_kept(opt_python: Path) -> None:
    assert factory.choose_interpreter("/usr/bin/python", (3, 10), opt_python) == "/usr/bin/python"


def test_an_old_interpreter_gives_way_to_the_newest_of_the_container(opt_python: Path, tmp_path: Path) -> None:
    chosen = factory.choose_interpreter("/usr/bin/python", (3, 9), opt_python)
    assert chosen == str(opt_python / "cp314-cp314" / "bin" / "python")
    assert factory.choose_interpreter("/usr/bin/python", (3, 9), tmp_path / "nothing") is None


def test_pre_releases_of_the_container_are_passed_over(opt_python: Path) -> None:
    for name in ("cp314-cp314", "cp313-cp313"):
        (opt_python / name / "bin" / "pre-release").touch()
    assert factory.choose_interpreter("/usr/bin/python", (3, 9), opt_python) == str(opt_python / "cp312-cp312" / "bin" / "python")
    for python in opt_python.glob("*/bin"):
        (python / "pre-release").touch()
    assert factory.choose_interpreter("/usr/bin/python", (3, 9), opt_python) is None


def test_the_interpreter_says_whether_it_is_final(tmp_path: Path) -> None:
    assert factory.is_final(sys.executable) is (sys.version_info.releaselevel == "final")
    if sys.platform != "win32":
        for answer in ("candidate", "alpha", ""):
            fake = tmp_path / "python"
            fake.write_text(f"#!/bin/sh\necho {answer}\n", "utf-8")
            fake.chmod(0o755)
            assert not factory.is_final(str(fake)), answer


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str | None, int], list[list[str]]]:
    """Commands are recorded instead of run; one of them may fail. The environment lies in a folder of the test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path))

    def prepare(failing: str | None, code: int) -> list[list[str]]:
        commands: list[list[str]] = []

        def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[bytes]:
            commands.append(command)
            if "venv" in command:
                python = Path(factory.python_of(Path(command[-1])))
                python.parent.mkdir(parents=True)
                python.touch()
            return subprocess.CompletedProcess(command, code if failing in command else 0)

        monkeypatch.setattr(subprocess, "run", run)
        return commands

    return prepare


@pytest.mark.parametrize(("failing", "code"), [("--target", 1), (FACTORY, 3), ("toolkit", 2), (None, 0)])
def test_commands_are_shown_and_a_failure_is_passed_on(
    ran: Callable[[str | None, int], list[list[str]]], capsys: pytest.CaptureFixture[str], failing: str | None, code: int
) -> None:
    commands = ran(failing, code)
    assert before_all.main(["--cuda", "13.0"]) == code
    assert len(commands) == {"--target": 1, FACTORY: 3}.get(failing or "", 4)
    assert capsys.readouterr().err.count("\n") == len(commands)
    if failing in {None, "toolkit"}:
        assert commands[-1][1:] == ["-m", "ci", "toolkit", "install", "--cuda", "13.0"]


def test_the_environment_is_made_once_and_again_when_it_was_not_finished(ran: Callable[[str | None, int], list[list[str]]]) -> None:
    ran(FACTORY, 1)
    assert factory.main(["audit"]) == 1
    commands = ran(None, 0)
    assert factory.main(["audit"]) == 0
    assert len(commands) == 4
    commands = ran(None, 0)
    assert factory.main(["repair"]) == 0
    assert [command[1:] for command in commands] == [["-m", "ci", "repair"]]


def test_nothing_is_installed_without_its_hash(ran: Callable[[str | None, int], list[list[str]]]) -> None:
    commands = ran(None, 0)
    factory.main(["audit"])
    installing = [command for command in commands if "install" in command]
    assert [command[command.index("--require-hashes") :] for command in installing] == [
        ["--require-hashes", "-r", FACTORY.replace("factory.txt", "uv.txt")],
        ["--require-hashes", "-r", FACTORY],
    ]


def test_each_state_of_the_locks_has_an_environment_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(factory, "LOCKS", locks := [tmp_path / "uv.txt", tmp_path / "factory.txt"])
    folders = set()
    for texts in (("a", "b"), ("a", "c"), ("d", "b"), ("a", "b")):
        for lock, text in zip(locks, texts, strict=True):
            lock.write_text(text)
        folders.add(factory.environment())
    assert len(folders) == 3


def test_an_environment_whose_interpreter_is_gone_is_made_again(ran: Callable[[str | None, int], list[list[str]]]) -> None:
    ran(None, 0)
    factory.main(["audit"])
    Path(factory.python_of(factory.environment())).unlink()
    commands = ran(None, 0)
    assert factory.main(["audit"]) == 0
    assert len(commands) == 4


def test_no_interpreter_is_an_environment_problem(
    ran: Callable[[str | None, int], list[list[str]]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    commands = ran(None, 0)
    monkeypatch.setattr(factory, "choose_interpreter", lambda *_: None)
    assert before_all.main([]) == 2
    assert "fix:" in capsys.readouterr().err
    assert commands == []


@pytest.mark.nightly
@pytest.mark.slow
def test_it_works_from_an_empty_environment(tmp_path: Path) -> None:
    """From another folder, as a script, in isolated mode; the second call starts at once."""
    command = [sys.executable, "-I", str(matrix.REPOSITORY / "wheel_hooks" / "before_all.py"), "cudnn-frontend"]
    toolkits = {"MLX_CUDA_TOOLKITS": str(tmp_path / "toolkits"), "XDG_CACHE_HOME": str(tmp_path), "LOCALAPPDATA": str(tmp_path)}
    for lines in (4, 1):
        done = subprocess.run(command, capture_output=True, encoding="utf-8", check=True, cwd=tmp_path, env=os.environ | toolkits)
        assert done.stdout.startswith("cudnn-frontend")
        assert sum(line.startswith("+ ") for line in done.stderr.splitlines()) == lines


@pytest.mark.usefixtures("_no_home")
def test_without_a_home_a_folder_has_to_be_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert factory.main(["wheel"]) == 2
    assert "no home directory, where the factory is kept\n  fix: set XDG_CACHE_HOME to a folder\n" in capsys.readouterr().err
