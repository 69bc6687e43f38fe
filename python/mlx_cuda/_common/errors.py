"""The package's own exception."""

from __future__ import annotations


class BackendError(ImportError):
    """The native kernels cannot be used here.

    The text says which part is missing or wrong; ``cure`` is the line that helps, and is part of the text.
    """

    def __init__(self, message: str, *, cure: str = "") -> None:
        super().__init__(f"{message}\n  cure: {cure}" if cure else message)
        self.cure = cure
