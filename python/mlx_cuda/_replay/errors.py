"""How capturing a step, or launching it, fails."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator

KEPT = "arrays that it computes are kept somewhere, as by a hook"  # whoever does expects others at each step


def are_kept(any_left: Callable[[], bool]) -> bool:
    """Whether arrays are left by more than cycles that Python's collector has not come to yet."""
    if not any_left():
        return False
    gc.collect()
    return any_left()


class NotReplayed(Exception):
    """Why a model's steps are not replayed. Nothing of the caller's was consumed, as with ``CaptureError`` of the native module."""


class CaptureFailed(Exception):
    """Why not at present, as for want of memory: another time it may work."""


@contextlib.contextmanager
def own_arrays() -> Iterator[None]:
    """Only arrays that nobody else has are computed here: where MLX fails to, the caller has lost nothing.

    Of the caller's arrays MLX drops the kernels that it has not launched and holds the arrays for evaluated, so whoever goes on with
    them computes with what was never written: such an error is the caller's.
    """
    try:
        yield
    except RuntimeError as error:
        raise CaptureFailed(str(error)) from error
