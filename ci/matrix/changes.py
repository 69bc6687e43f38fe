"""Which platforms a change needs, by the files that git finds changed."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase

from .. import process
from . import REPOSITORY, load

_HISTORY = "check out the whole history (fetch-depth: 0), or name another revision"


def since(revision: str) -> list[str]:
    """The files that differ between HEAD and its merge base with ``revision``. A moved file counts at both places."""
    commit = _git("rev-parse", "--verify", "--end-of-options", f"{revision}^{{commit}}", said=f"git knows no revision {revision!r} here")
    base = _git("merge-base", commit, "HEAD", said=f"HEAD and {revision} have no commit in common here")
    return _git("diff", "--name-only", "--no-renames", "-z", base, "HEAD", said="git cannot compare").split("\0")[:-1]


def _git(*words: str, said: str) -> str:
    return process.git(*words, cwd=REPOSITORY, said=said, fix=_HISTORY).removesuffix("\n")


def needed(files: Iterable[str]) -> dict[str, str]:
    """The platforms that have to be built, each with the first file that needs it."""
    found: dict[str, str] = {}
    for file in files:
        needs = next((change.needs for change in load().changes if _any(change.files, file)), ("*",))
        found = {name: file for name in load().platforms if _any(needs, name)} | found
    return {name: found[name] for name in load().platforms if name in found}


def _any(patterns: Iterable[str], name: str) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)
