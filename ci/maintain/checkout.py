"""A commit of this repository in a folder of its own, so that nothing of the working tree takes part."""

from __future__ import annotations

from pathlib import Path

from .. import matrix, process
from ..errors import EnvironmentProblem


def commit(name: str | None) -> str:
    """The full name of the commit to build. Without a name it is the one that is checked out, and nothing may have been changed since."""
    resolved = _git("rev-parse", "--verify", "--quiet", "--end-of-options", f"{name or 'HEAD'}^{{commit}}")
    changes = "" if name else _git("status", "--porcelain")
    if changes:
        raise EnvironmentProblem(
            f"the working tree differs from the commit in {len(changes.splitlines())} files, which no build of the commit would have",
            fix="commit first, or add --commit HEAD to build the commit without the changes",
        )
    return resolved.strip()


def export(name: str, folder: Path, *, umask: int = -1) -> None:
    """Clone a commit into a new folder. Its files bear the time of now and the modes that the umask leaves."""
    _git("clone", "--quiet", "--no-checkout", str(matrix.REPOSITORY), str(folder), umask=umask)
    _git("-C", str(folder), "checkout", "--quiet", "--detach", name, umask=umask)


def _git(*arguments: str, umask: int = -1) -> str:
    return process.git(*arguments, cwd=matrix.REPOSITORY, umask=umask, fix="start from a git checkout, and name a commit of it")
