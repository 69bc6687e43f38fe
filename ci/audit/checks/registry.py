"""The list of checks. A new one is a function with a decorator; docs/audit.md needs its line."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ..policy import Policy
    from ..wheel import Wheel

    Findings = Iterator[tuple[str, str]]  # the member it is about ("" for the wheel as a whole), and what is wrong and what was expected
    Check = Callable[[Wheel, Policy], Findings]
    Differences = Iterator[tuple[Wheel, str, str]]
    Comparison = Callable[[Sequence[Wheel]], Differences]

CHECKS: dict[str, Check] = {}
ACROSS: dict[str, Comparison] = {}


def check(function: Check) -> Check:
    """Add a check of one wheel, under the function's name with dashes."""
    CHECKS[function.__name__.replace("_", "-")] = function
    return function


def across(function: Comparison) -> Comparison:
    """Add a check of several wheels of one release against each other."""
    ACROSS[function.__name__.replace("_", "-")] = function
    return function
