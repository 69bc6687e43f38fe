"""A file that is written appears whole, or not at all."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path

import platformdirs
import pytest

from ci import files
from ci.errors import EnvironmentProblem
from ci.files import user_cache, whole


def test_it_replaces_what_was_there_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "new" / "file"
    with whole(path) as part:
        part.write_text("first")
        assert not path.exists()
    with whole(path) as part:
        part.write_text("second")
        assert path.read_text() == "first"
    assert path.read_text() == "second"
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_an_interruption_leaves_what_was_there(tmp_path: Path, error: type[BaseException]) -> None:
    path = tmp_path / "file"
    path.write_text("before")

    def interrupted() -> None:
        with whole(path) as part:
            part.write_text("half")
            raise error

    with pytest.raises(error):
        interrupted()
    assert [each.read_text() for each in tmp_path.iterdir()] == ["before"]


def test_a_full_disk_has_a_fix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with (
        pytest.raises(EnvironmentProblem, match=r"cannot write .*file: No space left on device\n  fix: give another -o"),
        whole(tmp_path / "file", fix="give another -o") as part,
    ):
        part.touch()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("times", [1, 6])
def test_a_file_that_a_virus_scanner_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, times: int) -> None:
    refused = refuse(monkeypatch, times)
    monkeypatch.setattr(files, "WINDOWS", True)
    with whole(tmp_path / "file") as part:
        part.write_text("new")
    assert (tmp_path / "file").read_text() == "new"
    assert len(refused) == times


@pytest.mark.parametrize(("windows", "times"), [(True, 7), (False, 1)])
def test_a_file_that_stays_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, windows: bool, times: int) -> None:
    refused = refuse(monkeypatch, times=100)
    monkeypatch.setattr(files, "WINDOWS", windows)
    with pytest.raises(EnvironmentProblem, match=r"cannot write .*file: Access is denied"), whole(tmp_path / "file") as part:
        part.touch()
    assert len(refused) == times
    assert not list(tmp_path.iterdir())


def refuse(monkeypatch: pytest.MonkeyPatch, times: int) -> list[Path]:
    """Let a file be renamed after so many tries alone."""
    refused: list[Path] = []
    replace = Path.replace

    def held(path: Path, target: Path) -> Path:
        if len(refused) < times:
            refused.append(path)
            raise PermissionError(errno.EACCES, "Access is denied")
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", held)
    monkeypatch.setattr(time, "sleep", lambda _: None)
    return refused


@pytest.mark.usefixtures("_no_home")
def test_no_home_no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    assert user_cache("ours") is None
    monkeypatch.setattr(platformdirs, "user_cache_dir", lambda name: f"~/.cache/{name}")  # an older one's
    assert user_cache("ours") is None
