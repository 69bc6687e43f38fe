"""The list of checks. A new one is a function with a decorator; docs/factory/audit.md needs its line."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ...wheelfile.wheel import Wheel
    from ..policy import Policy

    Findings = Iterator[tuple[str, str]]  # the member it is about ("" for the wheel as a whole), and what is wrong and what was expected
    Check = Callable[[Wheel, Policy], Findings]
    Differences = Iterator[tuple[Wheel, str, str]]
    Comparison = Callable[[Sequence[Wheel]], Differences]

CHECKS: dict[str, Check] = {}
ACROSS: dict[str, Comparison] = {}
CURES: dict[str, str] = {}


def check(cure: str) -> Callable[[Check], Check]:
    """Add a check of one wheel, under the function's name with dashes. `cure` mends what it finds."""

    def add(function: Check) -> Check:
        name = function.__name__.replace("_", "-")
        CHECKS[name], CURES[name] = function, cure
        return function

    return add


def across(cure: str) -> Callable[[Comparison], Comparison]:
    """Add a check of several wheels of one release against each other."""

    def add(function: Comparison) -> Comparison:
        name = function.__name__.replace("_", "-")
        ACROSS[name], CURES[name] = function, cure
        return function

    return add
