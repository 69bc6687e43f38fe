"""The cases that are measured, by operation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from . import attention, decode, linear, swiglu
from .base import Case

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

GROUPS: dict[str, Callable[..., Sequence[Case]]] = {
    "attention": attention.cases,
    "decode": decode.cases,
    "linear": linear.cases,
    "swiglu": swiglu.cases,
}

__all__ = ["GROUPS", "Case"]
