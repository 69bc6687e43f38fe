"""The package's own exceptions, and the words of the commands that fix them."""

from __future__ import annotations

import shlex
import sys
import warnings


def quote(word: object) -> str:
    """Return a word of a printed command, quoted for the shell; cmd on Windows has no single quotes."""
    return f'"{word}"' if sys.platform == "win32" else shlex.quote(str(word))


class BackendError(ImportError):
    """Raised if the native kernels or ``mlx.core`` cannot be used.

    The message says what is missing or wrong and ends with ``fix``, the line that repairs it.
    """

    def __init__(self, message: str, *, fix: str = "") -> None:
        super().__init__(f"{message}\n  fix: {fix}" if fix else message)
        self.fix = fix

    @property
    def cure(self) -> str:
        """Return ``fix``, under its name before 0.32.4.1."""
        warnings.warn("`BackendError.cure` is deprecated: use `BackendError.fix`", DeprecationWarning, stacklevel=2)
        return self.fix


class Refused(Exception):
    """Raised if an operation does not support the arguments. A replacement of an MLX function then calls MLX's own, and only then."""


class WrongValue(Refused, ValueError):
    """Raised if shapes, dtypes or values of the arguments do not fit."""


class WrongType(Refused, TypeError):
    """Raised if an argument has the wrong type."""
