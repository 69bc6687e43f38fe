"""The page itself: one HTML file that asks nothing of a network and runs nothing."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from markupsafe import Markup, escape

from ..audit.wheel import DEVICE
from ..matrix import architecture_order
from .contents import GPU
from .treemap import Box, squarify

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from .contents import Code, Contents, Label
    from .model import Report

TEMPLATES = Path(__file__).parent / "templates"
MINUS = "\N{MINUS SIGN}"
UNITS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))

# Sizes in pixels that the treemap is laid out for: a desktop's and a phone's. Title: the height of a group's name.
SHAPES: Mapping[str, Box] = {"wide": Box(0, 0, 1080, 400), "tall": Box(0, 0, 320, 560)}
TITLE = 22
MOST = 60  # files of a group that are shown one by one

# Kinds of bytes, from the most to the least interesting, and their names in legends.
KINDS: Mapping[str, str] = {
    "sass": "GPU machine code",
    "ptx": "PTX",
    "code": "host code",
    "data": "constants",
    "tables": "tables",
    "debug": "debug information",
    "python": "Python",
    "about": "about the wheel",
    "other": "other",
}


@dataclass(frozen=True)
class Piece:
    name: str
    kind: str
    size: int
    short: str  # the name, where there is little room
    shade: float = 0.0  # 0 to 1, from the oldest architecture to the newest


@dataclass(frozen=True)
class Cell:
    piece: Piece
    box: Box  # in percent of its group


@dataclass(frozen=True)
class Group:
    name: str
    size: int
    box: Box  # in percent of the map
    cells: tuple[Cell, ...]


def render(report: Report) -> str:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=visible,
    )
    environment.filters.update(size=size, signed=signed, ratio=ratio, elided=elided, prose=prose, places=places)
    environment.globals.update(treemap=treemap, bytes_by_kind=bytes_by_kind, kinds=KINDS, shapes=SHAPES, labels=labels)
    page = environment.get_template("page.html").render(report=report)
    return re.sub(r"\n\s*\n+", "\n", page) + "\n"


def visible(value: Any) -> Any:
    """Whatever a wheel says is shown as it is: control characters and marks that turn the text around become visible escapes."""
    if not isinstance(value, str) or isinstance(value, Markup) or value.isprintable():
        return value
    return "".join(each if each.isprintable() else each.encode("unicode_escape", "backslashreplace").decode() for each in value)


def size(number: int) -> str:
    for unit, name in UNITS:
        if abs(number) >= unit:
            value = number / unit
            return f"{value:.{2 if abs(value) < 10 else 1 if abs(value) < 100 else 0}f} {name}"
    return f"{number} B"


def signed(number: int) -> str:
    return f"{'+' if number > 0 else MINUS if number < 0 else '±'}{size(abs(number))}"


def ratio(percent: float) -> str:
    """A change in percent, as a factor where percent would be a long number."""
    return f"\N{MULTIPLICATION SIGN} {1 + percent / 100:.0f}" if percent >= 1000 else f"{percent:+.1f} %".replace("-", MINUS)


def places(number: float, digits: int = 3) -> str:
    """A coordinate for CSS and SVG, without the last digits that a computer might round otherwise."""
    return f"{number:.{digits}f}".rstrip("0").rstrip(".") if digits else f"{number:.0f}"


def prose(text: str) -> Markup:
    """A sentence of the documentation as HTML: code, emphasis, and links as their text."""
    text = re.sub(r"\[([^\]]+)\]\([^)]*\)", r"\1", visible(text))
    html = re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text)))
    return Markup(re.sub(r"\*(\w+)\*", r"<em>\1</em>", html))  # noqa: S704  (escaped above)


def elided(text: str, width: float) -> str:
    """A name that has to fit into a box of the graph, its middle left out if it is too long."""
    room = int((width - 24) / 7.6)  # of a character that is rather wide
    return text if len(text) <= room else f"{text[: room // 2 - 1]}…{text[len(text) - room // 2 :]}"


def labels(codes: Sequence[Code]) -> list[Label]:
    """Every kind of byte in native code, GPU code by architecture first."""
    found = dict.fromkeys(part.label for code in codes for part in code.parts)
    gpu = sorted(
        (label for label in found if label.architecture), key=lambda each: (each.kind != "sass", architecture_order(each.architecture))
    )
    return [*gpu, *(label for label in found if not label.architecture)]


def bytes_by_kind(contents: Contents) -> dict[str, int]:
    """Every unpacked byte of a wheel by kind, in the order of `KINDS`; kinds without any are left out."""
    sizes = dict.fromkeys(KINDS, 0)
    for code in contents.code:
        for part in code.parts:
            sizes[part.label.kind] += part.size
    for piece in _files(contents):
        sizes[piece.kind] += piece.size
    return {kind: amount for kind, amount in sizes.items() if amount}


def treemap(contents: Contents, shape: Box) -> list[Group]:
    """The wheel's bytes: device code and native modules with their parts, the Python package, and what describes the wheel."""
    groups = [(code.name, _pieces(code, contents)) for code in contents.code]
    files = _files(contents)
    for title, wanted in (("package", {"python", "other"}), ("about", {"about"})):
        groups.append((title, _merged([each for each in files if each.kind in wanted and each.size])))
    groups = sorted(((name, pieces) for name, pieces in groups if pieces), key=lambda group: -_total(group[1]))
    boxes = squarify([_total(pieces) for _, pieces in groups], shape) if groups else []
    return [
        Group(name, _total(pieces), _percent(box, shape), tuple(_cells(pieces, box)))
        for (name, pieces), box in zip(groups, boxes, strict=True)
    ]


def _pieces(code: Code, contents: Contents) -> list[Piece]:
    ranks = [label.architecture for label in labels(contents.code) if label.kind == "sass"]
    shades = {name: rank / max(1, len(ranks) - 1) for rank, name in enumerate(ranks)}
    return [
        Piece(label.name, label.kind, part.size, label.architecture or label.name, shades.get(label.architecture, 0.0))
        for part in code.parts
        for label in [part.label]
    ]


def _merged(pieces: list[Piece]) -> list[Piece]:
    """The largest pieces, and the rest as one: nobody sees the thousandth."""
    ordered = sorted(pieces, key=lambda piece: (-piece.size, piece.name))
    if len(ordered) <= MOST:
        return ordered
    rest = ordered[MOST:]
    name = f"{len(rest)} more"
    return [*ordered[:MOST], Piece(name, rest[0].kind, _total(rest), name)]


def _cells(cells: Sequence[Piece], box: Box) -> list[Cell]:
    """The cells of a group in percent of the room below its title. What belongs together stands together: GPU code, the host's."""
    room = Box(0, 0, box.width, box.height - TITLE if box.height > 3 * TITLE else box.height)
    blocks = [[cell for cell in cells if (cell.kind in GPU) is gpu] for gpu in (False, True)]
    blocks = sorted(filter(None, blocks), key=_total, reverse=True)
    placed = []
    for block, part in zip(blocks, squarify([_total(block) for block in blocks], room), strict=True):
        # GPU code in the order of the architectures, which are much alike in size; the rest by size.
        ordered = block if block[0].kind in GPU else sorted(block, key=lambda cell: (-cell.size, cell.name))
        boxes = squarify([cell.size for cell in ordered], part)
        placed += [Cell(cell, _percent(each, room)) for cell, each in zip(ordered, boxes, strict=True)]
    return placed


def _total(pieces: Sequence[Piece]) -> int:
    return sum(piece.size for piece in pieces)


def _percent(box: Box, whole: Box) -> Box:
    across, down = 100 / whole.width, 100 / whole.height
    return Box(box.x * across, box.y * down, box.width * across, box.height * down)


def _files(contents: Contents) -> list[Piece]:
    """Members that hold no native code."""
    native = {*(module.facts.member for module in contents.modules), *(f"{DEVICE}{source}.fatbin" for source in contents.device.fatbins)}
    others = [member for member in contents.members if member.name not in native]
    return [Piece(name := member.name.rpartition("/")[2], _file_kind(member.name, contents), member.size, name) for member in others]


def _file_kind(name: str, contents: Contents) -> str:
    if name.startswith(f"{contents.dist_info}/"):
        return "about"
    return "python" if name.endswith((".py", ".pyi", ".typed")) else "other"
