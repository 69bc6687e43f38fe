"""Run uv, which resolves, downloads, caches, retries and checks hashes, and say what to do when it fails."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from ci.errors import EnvironmentProblem
from ci.process import shown

# (what uv says, what it means, what helps). uv prints the whole chain of causes, so the most specific comes first.
_CAUSES = (
    (
        r"Hash mismatch",
        "a downloaded wheel is not the one that was locked (hash mismatch)",
        "if the index is a mirror, clean it (and `uv cache clean`); if the publisher replaced the file, find out why before locking again",
    ),
    (
        r"No space left on device|\(os error (?:28|112|122)\)|Disk quota exceeded",
        "the disk is full",
        "free space, or set MLX_CUDA_TOOLKITS (roots) and UV_CACHE_DIR (downloads) to folders on a larger disk",
    ),
    (
        r"invalid peer certificate|UnknownIssuer",
        "the package index's certificate is not trusted",
        "set SSL_CERT_FILE to the certificate bundle of your network",
    ),
    (
        r"error sending request|dns error|tcp connect|[Cc]onnection (?:refused|reset)|timed? ?out|[Nn]etwork [a-z ]*disabled",
        "the package index cannot be reached (no network)",
        "check the network; behind a proxy set HTTPS_PROXY, for a mirror UV_DEFAULT_INDEX (docs/factory/toolkits.md)",
    ),
    (
        r"(?:401|403) (?:Unauthorized|Forbidden)",
        "the package index refuses access",
        "give uv the index's credentials (docs/factory/toolkits.md)",
    ),
    (
        r"--require-hashes",
        "the lock is damaged: a requirement has no hash",
        "take it from version control again, or run `python -m ci toolkit lock`",
    ),
    (
        r"No solution found|no matching|not found in the",
        "the package index lacks a wheel that is wanted",
        "point UV_DEFAULT_INDEX at a complete mirror, or correct what is asked for (ci/toolkit/locks/toolkits.toml, pyproject.toml)",
    ),
)


def executable() -> str:
    try:
        from uv import find_uv_bin

        return find_uv_bin()
    except (ImportError, FileNotFoundError):
        fix = shown([sys.executable, "-m", "pip", "install", "--require-hashes", "-r", "requirements/factory.txt"])
        raise EnvironmentProblem("uv, which downloads the toolkits, is missing", fix=fix) from None


def run(*arguments: str, cwd: Path) -> None:
    """Run uv in ``cwd``, passing its messages on; a failure becomes an :class:`EnvironmentProblem`."""
    said = []
    command = [executable(), "--color", "never", *arguments]
    with subprocess.Popen(
        command, cwd=cwd, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, encoding="utf-8", errors="replace"
    ) as process:
        for line in process.stderr or ():
            sys.stderr.write(line)
            said.append(line)
    if process.returncode:
        raise explain("".join(said), process.returncode)


def explain(said: str, code: int) -> EnvironmentProblem:
    for pattern, meaning, fix in _CAUSES:
        if re.search(pattern, said):
            return EnvironmentProblem(f"uv failed: {meaning}", fix=fix)
    return EnvironmentProblem(f"uv failed with exit code {code}; its messages are above")
