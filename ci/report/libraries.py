"""What each native module loads, and who supplies it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from ..audit.checks.libraries import SUPPLIERS, Supplier, supplier

if TYPE_CHECKING:
    from ..audit.policy import Policy
    from ..audit.wheel import Wheel


@dataclass(frozen=True)
class Use:
    """A library that some modules of a wheel need."""

    library: str
    modules: tuple[str, ...]
    supplier: Supplier


def uses(wheel: Wheel, policy: Policy) -> tuple[Use, ...]:
    """Every needed library of every binary in the wheel, grouped by who supplies it."""
    found: dict[tuple[str, Supplier], set[str]] = {}
    for member, binary in wheel.binaries.items():
        for library in binary.needed:
            found.setdefault((library, supplier(wheel, policy, member, library)), set()).add(PurePosixPath(member).name)
    each = [Use(library, tuple(sorted(modules)), supplier) for (library, supplier), modules in found.items()]
    return tuple(sorted(each, key=lambda use: (SUPPLIERS.index(use.supplier.kind), use.modules, use.supplier.name, use.library)))
