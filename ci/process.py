"""Other programs: one encoding, nothing on stdin, and one sentence where they are missing or fail."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

from .errors import EnvironmentProblem

_STDERR = 2


class TookTooLong(EnvironmentProblem):
    """A program did not end in the time that it had."""


def run(command: Sequence[str | Path], *, fix: str | None = None, show: bool = False, **options: Any) -> CompletedProcess[str]:
    """A program's result, whatever its exit code; with `show` its output goes to stderr. Options are `subprocess.run`'s."""
    name, *arguments = map(str, command)
    streams = {"stdout": _STDERR if show else subprocess.PIPE, "stderr": None if show else subprocess.PIPE}
    streams |= {} if "input" in options else {"stdin": subprocess.DEVNULL}
    try:
        return subprocess.run([name, *arguments], check=False, encoding="utf-8", errors="replace", **(streams | options))
    except subprocess.TimeoutExpired as error:
        raise TookTooLong(f"{name} has not ended in {error.timeout:g} s", fix=fix or "run again") from error
    except OSError as error:
        missing = isinstance(error, FileNotFoundError) and error.filename == name
        said = "is not installed" if missing else f"cannot be run: {error.strerror or error}"
        raise EnvironmentProblem(f"{name} {said}", fix=fix or f"install {name}") from error


def output(command: Sequence[str | Path], *, fix: str, said: str = "", missing: str | None = None, **options: Any) -> str:
    """A program's output. A failure is an EnvironmentProblem with its first line, after `said` or its name."""
    done = run(command, fix=missing, **options)
    if done.returncode:
        words = (done.stderr or done.stdout or f"exit code {done.returncode}").strip()
        raise EnvironmentProblem("{}: {}".format(said or f"{command[0]} failed", words.partition("\n")[0]), fix=fix)
    return done.stdout


def git(*words: str, **options: Any) -> str:
    """git's output."""
    return output(["git", *words], **options)
