"""Errors of capturing or launching a step."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator

KEPT = "arrays that it computes are kept somewhere, as by a hook"  # as their reader expects other ones at each step


def are_kept(any_left: Callable[[], bool]) -> bool:
    """Return whether arrays are still referred to, other than by cycles that Python's garbage collector has not freed yet."""
    if not any_left():
        return False
    gc.collect()
    return any_left()


class NotReplayed(Exception):
    """The reason why a model's steps are not captured. The caller's arrays are intact, as with the native module's ``CaptureError``."""


class CaptureFailed(Exception):
    """A temporary reason, such as a lack of memory: another time it may work."""


@contextlib.contextmanager
def own_arrays() -> Iterator[None]:
    """Evaluate only arrays that nothing else refers to, so that an error of MLX does not affect the caller's.

    After an error MLX drops kernels that it has not launched and treats the caller's arrays as evaluated, although they were never written:
    such an error is the caller's.
    """
    try:
        yield
    except RuntimeError as error:
        raise CaptureFailed(str(error)) from error
