"""Which GPUs the device code is for, and what each of them gets of it, against what is declared."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ..matrix import Targets, architecture_order, capability
from . import contents
from .contents import Label

# A reader's name of a compute capability.
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
    """One kind of code for one architecture."""

    kind: str
    declared: int  # how many fatbins should have it
    missing: int  # how many of these have not
    surplus: int  # how many have it and should not
    size: int

    @property
    def found(self) -> int:
        return self.declared - self.missing + self.surplus

    @property
    def state(self) -> str:
        """present, partial (not in every fatbin that should have it), missing, surplus (not declared) or absent."""
        if self.surplus:
            return "surplus"
        if self.missing:
            return "partial" if self.found else "missing"
        return "present" if self.declared else "absent"


@dataclass(frozen=True)
class Served:
    """The code of some fatbins that a GPU runs."""

    kind: str  # sass: directly; ptx: compiled by its driver on first use
    name: str  # sm_80
    fatbins: int


@dataclass(frozen=True)
class Cell:
    codes: tuple[Code, Code]  # SASS and PTX for the architecture
    served: tuple[Served, ...]  # to the GPUs of its compute capability, which may be code for an older one
    without: int  # fatbins that have nothing for them


@dataclass(frozen=True)
class Column:
    architecture: str
    generation: str
    examples: str


def columns(architectures: Iterable[str]) -> tuple[Column, ...]:
    """Those that there is or should be code for, and the GPUs that come after the first of them."""
    named = set(architectures)
    known = {capability(each) for each in named}
    named |= {each for each in GPUS if known and int(each) > min(known) and int(each) not in known}
    return tuple(Column(name, *GPUS.get(str(capability(name)), ("", ""))) for name in sorted(named, key=architecture_order))


def row(code: contents.Code, promise: Mapping[str, Targets], across: Iterable[Column]) -> tuple[Cell, ...]:
    """The code of a place for each column, and what its GPUs get. The promise is by the names of its fatbins."""
    wanted = {
        name: {*(("sass", each) for each in targets.sass), *(("ptx", each) for each in targets.ptx)} for name, targets in promise.items()
    }
    names = sorted({*wanted, *code.fatbins})

    def cell(architecture: str) -> Cell:
        found = Counter(_served(held, capability(architecture)) for held in code.fatbins.values())
        served = [Served(*what, number) for what, number in found.items() if what]
        codes = one("sass", architecture), one("ptx", architecture)
        return Cell(codes, tuple(sorted(served, key=lambda each: (-each.fatbins, each.name))), found[None])

    def one(kind: str, architecture: str) -> Code:
        key, label = (kind, architecture), Label(kind, spell(kind, architecture), architecture)
        declared = {name for name in names if key in wanted.get(name, ())}
        found = {name for name in names if key in code.fatbins.get(name, ())}
        return Code(kind, len(declared), len(declared - found), len(found - declared), code.parts.get(label, 0))

    return tuple(cell(each.architecture) for each in across)


def spell(kind: str, architecture: str) -> str:
    return f"{'sm' if kind == 'sass' else 'compute'}_{architecture}"


def _served(held: Iterable[tuple[str, str]], gpu: int) -> tuple[str, str] | None:
    """Kind and name of the code that a GPU takes from a fatbin: the newest SASS of its family, or else PTX; None for neither."""
    fitting = [(kind == "sass", architecture_order(each), kind, each) for kind, each in held if _runs(kind, each, gpu)]
    return (best[2], spell(*best[2:])) if (best := max(fitting, default=None)) else None


def _runs(kind: str, architecture: str, gpu: int) -> bool:
    """Whether a GPU runs the code: `a` binds it to one compute capability; an `f`, or being SASS, to the family."""
    number, variant = architecture_order(architecture)
    if variant == "a":
        return number == gpu
    return number <= gpu and (number // 10 == gpu // 10 or (kind == "ptx" and not variant))
