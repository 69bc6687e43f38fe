"""Which texts are paths of a build (ci/audit/checks/binaries.py), by their beginning and what stands before it."""

from __future__ import annotations

import pytest

from ci.audit.checks import binaries


def found(text: str) -> list[str]:
    return list(dict.fromkeys(binaries._build_paths(text.encode())))


@pytest.mark.parametrize("path", ["/home/me/src/x.cpp", "C:/build/src/x.cpp", "c:\\build\\src\\x.cpp", "\\\\server\\share\\src\\x.cpp"])
@pytest.mark.parametrize("before", ["", "\0", "\0\0\0\0", " ", "=", "a=", '"', "x "])
def test_what_stands_before(path: str, before: str) -> None:
    """At the beginning of a file too."""
    assert found(f"{before}{path}\0") == [path]


@pytest.mark.parametrize("before", ["-I", "-L", "\0-I", "ab:", ":", "old:", "a/bc:"])
def test_options_and_lists(before: str) -> None:
    assert found(f"{before}/home/me/src/x.cpp") == ["/home/me/src/x.cpp"]


@pytest.mark.parametrize("before", ["x", "..", "$HOME", "-i", "-l", "-D", "-II", "~"])
def test_the_end_of_a_longer_path(before: str) -> None:
    assert found(f"{before}/home/me/src/x.cpp") == []


@pytest.mark.parametrize(
    ("text", "paths"),
    [
        ("/a/b/cd", ["/a/b/cd"]),
        ("/a/b", []),
        ("/a/b/", []),
        ("/a/bc/d e", ["/a/bc/d"]),
        ("C:/a/b c/d e", ["C:/a/b c/d e"]),
        ("C:/ab/cd", []),
        ("CD:/ab/cd/ef", ["/ab/cd/ef"]),
        ("C:/Windows/ab/cd", []),
        ("C:/windows nt/ab/cd", ["C:/windows nt/ab/cd"]),
        ("C:/Program Files/ab/cd", []),
        ("/-a/bc/de", []),
        ("/proc/ab/cd", []),
        ("/process/ab/cd", ["/process/ab/cd"]),
        ("/usr/ab/cd/site-packages/ef/gh", ["/usr/ab/cd/site-packages/ef/gh"]),
        ("/usr/ab/cd/dist-packages/ef/gh", ["/usr/ab/cd/dist-packages/ef/gh"]),
        ("/usr/ab/cd/ef/gh", []),
        ("/a/b/c", []),
        ("/a/b/c/d/e", []),
        ("/one/ab/cd\0/two/ab/cd", ["/one/ab/cd", "/two/ab/cd"]),
        ("/" + "a" * 4000 + "/ab/cd", ["/" + "a" * 4000 + "/ab/cd"]),
        ("/" + "a" * 4096 + "/ab/cd", []),
    ],
)
def test_paths(text: str, paths: list[str]) -> None:
    assert found(text) == paths


def test_the_longest_path() -> None:
    assert binaries.LONGEST_PATH == 4096
