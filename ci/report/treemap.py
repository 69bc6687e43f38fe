"""Treemaps: rectangles whose areas are sizes, as square as they come (the squarified layout of Bruls, Huizing and van Wijk)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True)
class Box:
    x: float
    y: float
    width: float
    height: float

    @property
    def area(self) -> float:
        return self.width * self.height


def squarify(sizes: Sequence[float], box: Box) -> list[Box]:
    """A box for each size, in the order given, which together fill `box`. Sizes are positive; the largest first looks best."""
    total = sum(sizes)
    areas = [size * box.area / total for size in sizes]
    placed: list[Box] = []
    while len(placed) < len(areas):
        row = _row(areas[len(placed) :], min(box.width, box.height))
        boxes, box = _place(row, box)
        placed += boxes
    return placed


def _row(areas: Sequence[float], side: float) -> list[float]:
    """The first areas that, side by side along `side`, have the best worst aspect ratio."""
    row = [areas[0]]
    for area in areas[1:]:
        if _worst([*row, area], side) > _worst(row, side):
            break
        row.append(area)
    return row


def _worst(row: Sequence[float], side: float) -> float:
    depth = sum(row) / side
    return max(max(area / depth**2, depth**2 / area) for area in row)


def _place(row: Sequence[float], box: Box) -> tuple[list[Box], Box]:
    """Lay a row along the shorter side of `box`; returns its boxes and what is left."""
    boxes = []
    if box.width >= box.height:
        depth, position = sum(row) / box.height, box.y
        for area in row:
            boxes.append(Box(box.x, position, depth, area / depth))
            position += area / depth
        return boxes, Box(box.x + depth, box.y, max(0.0, box.width - depth), box.height)
    depth, position = sum(row) / box.width, box.x
    for area in row:
        boxes.append(Box(position, box.y, area / depth, depth))
        position += area / depth
    return boxes, Box(box.x, box.y + depth, box.width, max(0.0, box.height - depth))
