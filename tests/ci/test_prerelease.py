"""``python -m ci prerelease``: whether upstream has one that can be built for."""

from __future__ import annotations

import pytest
from packaging.version import Version

from ci import __main__ as cli
from ci import matrix
from ci.maintain import bump
from ci.maintain.prerelease import coming

OLD = matrix.load().mlx


@pytest.mark.parametrize(
    ("there", "found"),
    [
        ("1 2rc1", "2rc1"),
        ("1 2.dev5 2rc1", "2rc1"),
        ("1 2.dev5", "2.dev5"),
        ("1 2rc1 2", ""),  # a release has followed: `bump --mlx newest` takes it
        ("1 1rc1", ""),
        ("1", ""),
        ("", ""),
    ],
)
def test_which_is_coming(there: str, found: str) -> None:
    assert coming("1", set(map(Version, there.split()))) == found


def test_the_pinned_one_is_not_coming() -> None:
    assert coming("2rc1", {Version("2rc1")}) == ""


@pytest.mark.parametrize(("found", "platforms", "said"), [("99rc1", 3, "99rc1"), ("99rc1", 2, ""), ("99", 3, ""), (OLD, 3, "")])
def test_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], found: str, platforms: int, said: str) -> None:
    monkeypatch.setattr(bump, "on_index", lambda _: {Version(found): set(list(matrix.load().platforms)[:platforms])})
    assert cli.main(["prerelease", "--github"]) == 0
    github = capsys.readouterr()
    assert github.out == f"mlx={said}\n"
    assert ("nothing to build" in github.err) == (not said)
    assert cli.main(["prerelease"]) == 0
    assert capsys.readouterr().out == (f"{said}\n" if said else "")
