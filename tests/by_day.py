"""Long tables of cases: by day the first of each kind, at night (``--place nightly``) all of them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Any, TypeVar

import pytest

Case = TypeVar("Case")


def first_of_each(cases: Iterable[Case], kind: Callable[[Case], Hashable], name: Callable[[Case], str], *before: Any) -> list[Any]:
    """Parameters of a test: what is ``before``, and a case; those whose kind an earlier one has are left to the nightly workflow."""
    seen, found = set[Hashable](), []
    for case in cases:
        found.append(pytest.param(*before, case, id=name(case), marks=pytest.mark.nightly if kind(case) in seen else ()))
        seen.add(kind(case))
    return found
