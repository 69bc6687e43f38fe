"""Which GPUs each native module has code for, against what is declared."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..matrix import architecture_order, capability
from .contents import Label

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ..audit.policy import Module as Declared
    from .contents import Module

# What a reader calls a compute capability.
GPUS = {
    "70": ("Volta", "V100"),
    "75": ("Turing", "T4, RTX 20"),
    "80": ("Ampere", "A100"),
    "86": ("Ampere", "A10, RTX 30"),
    "87": ("Ampere", "Jetson Orin"),
    "89": ("Ada", "L4, RTX 40"),
    "90": ("Hopper", "H100, H200"),
    "100": ("Blackwell", "B200"),
    "103": ("Blackwell", "B300"),
    "110": ("Blackwell", "Jetson Thor"),
    "120": ("Blackwell", "RTX 50"),
    "121": ("Blackwell", "DGX Spark"),
}


@dataclass(frozen=True)
class Code:
    """One kind of code for one architecture in one module."""

    kind: str
    declared: bool
    fatbins: int  # how many of them have it
    of: int
    size: int

    @property
    def state(self) -> str:
        """present, partial (not in every fatbin), missing, surplus (not declared) or absent."""
        if not self.fatbins:
            return "missing" if self.declared else "absent"
        if not self.declared:
            return "surplus"
        return "present" if self.fatbins == self.of else "partial"


@dataclass(frozen=True)
class Column:
    architecture: str
    generation: str
    examples: str


def columns(architectures: Iterable[str]) -> tuple[Column, ...]:
    names = sorted(set(architectures), key=architecture_order)
    return tuple(Column(name, *GPUS.get(str(capability(name)), ("", ""))) for name in names)


def declared(module: Declared | None) -> set[str]:
    return {*module.sass, *module.ptx} if module else set()


def row(module: Module, promise: Declared | None, across: Iterable[Column]) -> tuple[tuple[Code, Code], ...]:
    """Machine code and PTX of a module for each column."""
    wanted = {"sass": promise.sass, "ptx": promise.ptx} if promise else {"sass": frozenset(), "ptx": frozenset()}

    def code(kind: str, architecture: str) -> Code:
        label = Label(kind, f"{'sm' if kind == 'sass' else 'compute'}_{architecture}", architecture)
        found = module.fatbins_with.get((kind, architecture), 0)
        return Code(kind, architecture in wanted[kind], found, module.facts.fatbins, module.size_of(label))

    return tuple((code("sass", each.architecture), code("ptx", each.architecture)) for each in across)
