"""What each native module loads, and who supplies it: the rows of a table, and the same laid out as a graph."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, TypeVar

from ..audit.systems import is_system_library

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ..audit.policy import Policy
    from ..audit.wheel import Wheel

T = TypeVar("T")

LEVELS = ("package", "inside", "driver", "system", "nobody")  # kinds of suppliers, from the top of the graph to its bottom
WIDTH, ROW, NODE = 1080.0, 46.0, 36.0  # of the graph; of a library and its gap; of its box
COLUMNS = ((0.0, 210.0), (400.0, 250.0), (830.0, 250.0))  # left edge and width of modules, libraries, suppliers


@dataclass(frozen=True)
class Supplier:
    kind: str  # one of LEVELS
    name: str
    detail: str = ""


@dataclass(frozen=True)
class Use:
    """A library that some modules of a wheel need."""

    library: str
    modules: tuple[str, ...]
    supplier: Supplier
    directory: str  # below site-packages, "" for those that the system finds


@dataclass(frozen=True)
class Node:
    label: str
    detail: str
    kind: str
    x: float
    y: float  # of its centre
    width: float
    height: float


@dataclass(frozen=True)
class Edge:
    kind: str  # of the supplier
    path: str  # an SVG path


@dataclass(frozen=True)
class Graph:
    width: float
    height: float
    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...]


def uses(wheel: Wheel, policy: Policy) -> tuple[Use, ...]:
    """Every needed library of every binary in the wheel, grouped by who supplies it."""
    found: dict[tuple[str, Supplier, str], list[str]] = defaultdict(list)
    for member, binary in wheel.binaries.items():
        for library in binary.needed:
            supplier, directory = _supplier(wheel, policy, member, library)
            found[library, supplier, directory].append(PurePosixPath(member).name)
    each = [Use(library, tuple(sorted(set(modules))), supplier, directory) for (library, supplier, directory), modules in found.items()]
    return tuple(sorted(each, key=lambda use: (LEVELS.index(use.supplier.kind), use.modules, use.supplier.name, use.library)))


def _supplier(wheel: Wheel, policy: Policy, member: str, library: str) -> tuple[Supplier, str]:
    key = wheel.key(library)
    inside = {wheel.key(PurePosixPath(each).name): each for each in wheel.binaries}
    owner = policy.module(member)
    for module in [owner] if owner else policy.modules:
        for each in module.libraries:
            if key == wheel.key(each.files[wheel.system]):
                extra = f"of the extra {module.extra}" if module.extra else "required"
                return Supplier("package", each.provider, extra), each.directories[wheel.system]
    if key in inside:
        return Supplier("inside", "this wheel", "copied in by repair"), str(PurePosixPath(inside[key]).parent)
    if key == wheel.key(policy.driver):
        return Supplier("driver", "NVIDIA driver", "of the machine"), ""
    if is_system_library(wheel, library):
        where = "Windows and Python" if wheel.system == "windows" else "every Linux of the tag"
        return Supplier("system", where, ", ".join(wheel.platforms)), ""
    return Supplier("nobody", "nobody", "not declared, not the system's"), ""


def layout(each: Sequence[Use]) -> Graph:
    """Modules, libraries and suppliers in three columns; both outer ones stand at the middle of what they are joined to."""
    rows = _untangled(each)
    names = {name for use in rows for name in use.modules}
    height = max(len(rows), len(names), len({use.supplier for use in rows})) * ROW
    centre = {use: (position + 0.5) * ROW for position, use in enumerate(rows)}
    modules = _spread({name: _middle(centre[use] for use in rows if name in use.modules) for use in rows for name in use.modules}, height)
    suppliers = _spread({use.supplier: _middle(centre[other] for other in rows if other.supplier == use.supplier) for use in rows}, height)
    (left, left_width), (middle, middle_width), (right, right_width) = COLUMNS
    nodes = [Node(name, "in the wheel", "module", left, y, left_width, NODE) for name, y in modules.items()]
    nodes += [Node(use.library, use.directory, use.supplier.kind, middle, centre[use], middle_width, NODE) for use in rows]
    nodes += [Node(each.name, each.detail, each.kind, right, y, right_width, NODE) for each, y in suppliers.items()]
    edges = [Edge(use.supplier.kind, _curve(left + left_width, modules[name], middle, centre[use])) for use in rows for name in use.modules]
    edges += [Edge(use.supplier.kind, _curve(middle + middle_width, centre[use], right, suppliers[use.supplier])) for use in rows]
    return Graph(WIDTH, height, tuple(nodes), tuple(edges))


def _untangled(each: Sequence[Use]) -> list[Use]:
    """Libraries of the first module alone on top, of the last at the bottom, what they share between, each supplier's together."""
    names = sorted({name for use in each for name in use.modules})

    def height(use: Use) -> float:
        return _middle(names.index(name) for name in use.modules)

    of_supplier: dict[Supplier, list[float]] = defaultdict(list)
    for use in each:
        of_supplier[use.supplier].append(height(use))
    return sorted(
        each,
        key=lambda use: (
            round(_middle(of_supplier[use.supplier]), 6),
            LEVELS.index(use.supplier.kind),
            use.supplier.name,
            height(use),
            use.library,
        ),
    )


def _middle(values: Iterable[float]) -> float:
    found = list(values)
    return sum(found) / len(found)


def _spread(wanted: dict[T, float], height: float) -> dict[T, float]:
    """Move nodes apart that would overlap, keeping their order and staying within `height`."""
    placed: dict[T, float] = {}
    lowest = ROW / 2
    for name, y in sorted(wanted.items(), key=lambda item: item[1]):
        placed[name] = max(y, lowest)
        lowest = placed[name] + ROW
    highest = height - ROW / 2
    for name in reversed(placed):
        placed[name] = min(placed[name], highest)
        highest = placed[name] - ROW
    return placed


def _curve(x: float, y: float, to_x: float, to_y: float) -> str:
    bend = (to_x - x) / 2
    return f"M{x:.1f} {y:.1f}C{x + bend:.1f} {y:.1f} {to_x - bend:.1f} {to_y:.1f} {to_x:.1f} {to_y:.1f}"
