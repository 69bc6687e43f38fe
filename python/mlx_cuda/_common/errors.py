"""The package's own exceptions."""

from __future__ import annotations


class BackendError(ImportError):
    """The native kernels cannot be used here.

    The text says which part is missing or wrong; ``cure`` is the line that helps, and is part of the text.
    """

    def __init__(self, message: str, *, cure: str = "") -> None:
        super().__init__(f"{message}\n  cure: {cure}" if cure else message)
        self.cure = cure


class Refused(Exception):
    """An operation does not take these arguments: whoever stands in for MLX's function leaves such a call, and no other, to that."""


class WrongValue(Refused, ValueError):
    """The shapes, dtypes or values of the arguments do not fit."""


class WrongType(Refused, TypeError):
    """An argument is of another type."""
