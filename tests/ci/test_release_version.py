"""The version: where it stands, how another is stamped, and which one a commit between releases has."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from packaging.version import Version

from ci import __main__ as cli
from ci import matrix
from ci.errors import CheckFailed, EnvironmentProblem
from ci.files import tomllib
from ci.release.version import PACKAGE, PROJECT, current, development, stamp, stated, tagged, unfit

MLX = matrix.load().mlx
NOON = "2026-03-04T13:06:59+01:00"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A checkout of version <mlx>.3, in a repository of one commit."""
    for path in (PROJECT, PACKAGE):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(matrix.REPOSITORY / path, tmp_path / path)
    stamp(tmp_path, Version(f"{MLX}.3"))
    git(tmp_path, "init", "--quiet")
    commit(tmp_path, NOON)
    return tmp_path


def git(root: Path, *arguments: str, when: str = NOON) -> str:
    environment = {**os.environ, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
    environment |= {f"GIT_{who}_{what}": "a@b" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    environment |= {"GIT_AUTHOR_DATE": "2001-01-01T00:00:00Z", "GIT_COMMITTER_DATE": when}
    done = subprocess.run(["git", *arguments], cwd=root, env=environment, check=True, capture_output=True, text=True)
    return done.stdout


def commit(root: Path, when: str) -> None:
    git(root, "add", ".")
    git(root, "commit", "--quiet", "--allow-empty", "--message", "m", when=when)


@pytest.mark.parametrize("text", [f"{MLX}.4", f"{MLX}.4rc1", f"{MLX}.4a2", f"{MLX}.4.dev202603041206"])
def test_stamp(root: Path, text: str) -> None:
    before = (root / PROJECT).read_text("utf-8")
    stamp(root, Version(text))
    assert stated(root) == {PROJECT: text, PACKAGE: text}
    assert current(root) == Version(text)
    assert (root / PROJECT).read_text("utf-8") == before.replace(f'\nversion = "{MLX}.3"\n', f'\nversion = "{text}"\n')
    assert tomllib.loads((root / PROJECT).read_text("utf-8"))["project"]["version"] == text
    assert git(root, "diff", "--name-only").split() == [PROJECT.as_posix(), PACKAGE.as_posix()]
    assert b"\r" not in (root / PACKAGE).read_bytes()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (f"{MLX}.4+local", "is a local version"),
        (f"{MLX}.4.post1", f"is not {MLX}.<n>"),
        (f"1!{MLX}.4", f"is not {MLX}.<n>"),
        (f"{MLX}.0", f"is not {MLX}.<n>"),
        (MLX, f"is not {MLX}.<n>"),
        (f"{MLX}.4.1", f"is not {MLX}.<n>"),
        ("99.1.0.1", f"is not {MLX}.<n>"),
        ("9+a", f"is a local version, which no index accepts; 9+a is not {MLX}.<n>"),
    ],
)
def test_versions_that_are_not_ours(root: Path, text: str, said: str) -> None:
    with pytest.raises(CheckFailed) as failure:
        stamp(root, Version(text))
    assert str(failure.value).startswith(f"{text} {said}")
    assert git(root, "diff") == ""


def test_a_post_release_is_for_one_of_mlx(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ci.release.version.load", lambda: replace(matrix.load(), mlx=f"{MLX}.post2"))
    assert list(unfit(Version(f"{MLX}.1.post2"))) == []
    assert list(unfit(Version(f"{MLX}.1"))) != []


def test_all_is_stamped_or_nothing(root: Path) -> None:
    (root / PACKAGE).write_text("__version__ = computed()\n")
    before = (root / PROJECT).read_bytes()
    with pytest.raises(
        CheckFailed,
        match=f'{PACKAGE.as_posix()} does not say its version in one line __version__ = "…"\n  fix: git restore {PACKAGE.as_posix()}$',
    ):
        stamp(root, Version(f"{MLX}.4"))
    assert (root / PROJECT).read_bytes() == before


def test_a_version_in_the_first_line(root: Path) -> None:
    (root / PACKAGE).write_text(f'__version__ = "{MLX}.3"\n', "utf-8")
    stamp(root, Version(f"{MLX}.4"))
    assert (root / PACKAGE).read_text("utf-8") == f'__version__ = "{MLX}.4"\n'


def test_a_full_disk(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(EnvironmentProblem, match=r"No space left on device\n  fix: git restore . restores the files"):
        stamp(root, Version(f"{MLX}.4"))
    assert git(root, "diff") == ""


def test_a_version_that_stands_twice(root: Path) -> None:
    with (root / PROJECT).open("a") as stream:
        stream.write(f'[tool.other]\nversion = "{MLX}.3"\n')
    with pytest.raises(CheckFailed, match=r"pyproject\.toml does not say its version in one line"):
        stamp(root, Version(f"{MLX}.4"))


@pytest.mark.parametrize(
    ("path", "old", "new", "said"),
    [
        (PACKAGE, f'"{MLX}.3"', f'"{MLX}.4"', f"pyproject.toml says {MLX}.3; {PACKAGE.as_posix()} says {MLX}.4"),
        (PACKAGE, "__version__", "version", f"pyproject.toml says {MLX}.3; {PACKAGE.as_posix()} says nothing"),
        (PROJECT, f'"{MLX}.3"', '"some"', f"pyproject.toml says some; {PACKAGE.as_posix()} says {MLX}.3; Invalid version: 'some'"),
    ],
)
def test_a_checkout_without_a_version(root: Path, path: Path, old: str, new: str, said: str) -> None:
    (root / path).write_text((root / path).read_text("utf-8").replace(old, new), "utf-8")
    with pytest.raises(CheckFailed) as failure:
        current(root)
    assert str(failure.value) == f"this checkout has no version to release: {said}\n  fix: python -m ci release stamp VERSION"


def test_another_mlx_than_the_versions(root: Path) -> None:
    for path in (PROJECT, PACKAGE):
        (root / path).write_text((root / path).read_text("utf-8").replace(f'"{MLX}.3"', '"0.1.0.3"'), "utf-8")
    with pytest.raises(CheckFailed, match=rf"0\.1\.0\.3 is not {MLX}\.<n>"):
        current(root)


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A machine whose clock is far from UTC."""
    if not hasattr(time, "tzset"):
        pytest.skip("Windows sets its zone elsewhere")
    with monkeypatch.context() as patch:
        patch.setenv("TZ", "EAST-9")
        time.tzset()
        yield
    time.tzset()


@pytest.mark.usefixtures("elsewhere")
def test_development_versions_are_of_the_next_release(root: Path) -> None:
    """By the time of the commit in UTC; the tag of a release that was made from it, or later, changes nothing."""
    first = Version(f"{MLX}.3.dev202603041206")
    assert development(root) == first
    git(root, "tag", f"v{MLX}.2")
    git(root, "tag", f"v{MLX}.3")
    assert development(root) == first
    commit(root, "2026-03-05T00:00:00Z")
    assert development(root) == Version(f"{MLX}.4.dev202603050000")
    git(root, "tag", f"v{MLX}.4")
    commit(root, "2026-03-06T00:00:00Z")
    assert development(root) == Version(f"{MLX}.5.dev202603060000")
    git(root, "checkout", "--quiet", f"v{MLX}.4")
    assert development(root) == Version(f"{MLX}.4.dev202603050000")


def test_development_versions_of_a_stamped_checkout(root: Path) -> None:
    stamp(root, development(root))
    assert development(root) == Version(f"{MLX}.3.dev202603041206")


def test_a_shallow_clone_may_lack_tags(root: Path, tmp_path: Path) -> None:
    commit(root, NOON)
    git(root, "clone", "--quiet", "--depth", "1", root.as_uri(), str(tmp_path / "shallow"))
    with pytest.raises(EnvironmentProblem, match=r"shallow.*\n  fix: git fetch --unshallow --tags"):
        development(tmp_path / "shallow")


def test_tags(root: Path) -> None:
    for tag in (f"v{MLX}.2", "v1.0rc1", "very-old", "1.0"):
        git(root, "tag", tag)
    assert tagged(root) == {Version(f"{MLX}.2"), Version("1.0rc1")}


def test_no_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    with pytest.raises(
        EnvironmentProblem,
        match=r"^git failed: fatal: not a git repository .*[^\n]\n  fix: run from a clone of the repository, with its tags$",
    ):
        tagged(tmp_path)


def test_the_command(root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(matrix, "REPOSITORY", root)
    assert cli.main(["release", "stamp", "dev", "--github"]) == 0
    assert capsys.readouterr().out == f"version={MLX}.3.dev202603041206\n"
    assert current(root).is_devrelease
    assert cli.main(["release", "stamp", f"{MLX}.4-RC1"]) == 0
    assert capsys.readouterr().out == f"{MLX}.4rc1\n"
    for wrong in ([], ["some"]):
        with pytest.raises(SystemExit, match="2"):
            cli.main(["release", "stamp", *wrong])
    assert "Invalid version: 'some', expected one such as" in capsys.readouterr().err
