"""The two ways a factory command fails, each with its exit code.

Exit codes of ``python -m ci``: 0 success; 1 a check failed (:class:`CheckFailed`); 2 usage or environment (:class:`EnvironmentProblem`).
"""

from __future__ import annotations

import io
import sys
from collections.abc import Callable


class CiError(Exception):
    """A failure that the command line reports as one message, without a traceback."""

    exit_code: int = 2


class CheckFailed(CiError):
    """The examined thing is wrong: a bad wheel, a root that does not verify."""

    exit_code = 1


class EnvironmentProblem(CiError):
    """The command could not do its work here; ``fix`` is the line that helps."""

    exit_code = 2

    def __init__(self, message: str, *, fix: str | None = None) -> None:
        super().__init__(message)
        self.fix = fix

    def __str__(self) -> str:
        message = super().__str__()
        return f"{message}\n  fix: {self.fix}" if self.fix else message


def ending(command: Callable[[], int]) -> int:
    """The exit code of a command, which ends with one message where it fails."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # a pipe on Windows has a code page without the lines that uv and pytest draw
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        try:
            return int(command())
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] == __package__:  # ours: no environment lacks it
                raise
            groups = " ".join(f"-r requirements/{name}.txt" for name in ("factory", "release"))
            fix = f"python -m pip install --require-hashes {groups}"
            raise EnvironmentProblem(f"the module {error.name} is not installed", fix=fix) from error
    except CiError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
