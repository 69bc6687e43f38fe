"""The list of checks. A new one is a function with a decorator; docs/factory/audit.md needs its line."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from ...wheelfile.wheel import Wheel
from ..policy import Policy

Findings = Iterator[tuple[str, str]]  # the member it is about ("" for the wheel as a whole), and what is wrong and what was expected
Check = Callable[[Wheel, Policy], Findings]
Differences = Iterator[tuple[Wheel, str, str]]
Comparison = Callable[[Sequence[Wheel]], Differences]
Function = TypeVar("Function", bound=Callable[..., Any])

CHECKS: dict[str, Check] = {}
ACROSS: dict[str, Comparison] = {}
FIXES: dict[str, str] = {}


def check(fix: str) -> Callable[[Check], Check]:
    """Add a check of one wheel, under the function's name with dashes. `fix` repairs its findings."""
    return _adding(CHECKS, fix)


def across(fix: str) -> Callable[[Comparison], Comparison]:
    """Add a check of several wheels of one release against each other."""
    return _adding(ACROSS, fix)


def _adding(checks: dict[str, Function], fix: str) -> Callable[[Function], Function]:
    def add(function: Function) -> Function:
        name = function.__name__.replace("_", "-")
        checks[name], FIXES[name] = function, fix
        return function

    return add
