"""The treemap: areas are sizes, nothing overlaps, no byte is lost."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ci.audit.wheel import read
from ci.report import page
from ci.report.contents import examine
from ci.report.page import SHAPES, bytes_by_kind, treemap
from ci.report.treemap import Box, squarify

from ..audit_support import (
    DIST_INFO,
    MATRIX,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

from .support import assert_apart


@given(st.lists(st.integers(1, 10**9), min_size=1, max_size=40), st.floats(1, 2000), st.floats(1, 2000))
def test_a_treemaps_areas_are_the_sizes(sizes: list[int], width: float, height: float) -> None:
    boxes = squarify(sizes, Box(3, 5, width, height))
    for size, box in zip(sizes, boxes, strict=True):
        assert box.area == pytest.approx(size / sum(sizes) * width * height, rel=1e-6)
    assert sum(box.area for box in boxes) == pytest.approx(width * height)


@given(st.lists(st.integers(1, 10**5), min_size=1, max_size=25))
def test_a_treemaps_boxes_do_not_overlap(sizes: list[int]) -> None:
    whole = Box(0, 0, 300, 200)
    assert_apart(squarify(sizes, whole), whole)


def test_equal_sizes_become_squares() -> None:
    assert squarify([1, 1, 1, 1], Box(0, 0, 2, 2)) == [Box(0, 0, 1, 1), Box(0, 1, 1, 1), Box(1, 0, 1, 1), Box(1, 1, 1, 1)]


@pytest.mark.parametrize("shape", SHAPES.values(), ids=list(SHAPES))
def test_the_treemap_holds_every_byte(wheel: Callable[..., Path], shape: Box) -> None:
    contents = examine(read(wheel()))
    groups = treemap(contents, shape)
    assert sum(group.size for group in groups) == sum(bytes_by_kind(contents).values()) == contents.unpacked
    assert sum(group.box.area for group in groups) == pytest.approx(100 * 100)
    hundred = Box(0, 0, 100, 100)
    assert_apart([group.box for group in groups], hundred)
    for group in groups:
        assert sum(cell.piece.size for cell in group.cells) == group.size
        assert_apart([cell.box for cell in group.cells], hundred)
        assert all(cell.box.area == pytest.approx(1e4 * cell.piece.size / group.size) for cell in group.cells)


def test_many_small_files_are_one_cell(wheel: Callable[..., Path]) -> None:
    path = wheel(lambda files: files.update({f"mlx_cuda/m{number:03}.py": b"x" * (200 - number) for number in range(100)}))
    contents = examine(read(path))
    (group,) = (group for group in treemap(contents, SHAPES["wide"]) if group.name == "package")
    others = len([each for each in contents.members if each.size and not each.name.startswith(DIST_INFO)])
    others -= len(contents.modules) + len(contents.device.fatbins)
    assert [cell.piece.name for cell in group.cells if cell.piece.name.endswith(" more")] == [f"{others - page.MOST} more"]
    assert len(group.cells) == page.MOST + 1
    assert sum(each.size for each in treemap(contents, SHAPES["wide"])) == contents.unpacked


def test_gpu_code_stands_together_in_the_order_of_architectures(wheel: Callable[..., Path]) -> None:
    groups = {group.name: group for group in treemap(examine(read(wheel())), SHAPES["wide"])}
    machine_code = [cell.piece for cell in groups["device code"].cells if cell.piece.kind == "sass"]
    assert [piece.short for piece in machine_code] == list(MATRIX.device.sass)
    last = len(machine_code) - 1
    assert [piece.shade for piece in machine_code] == pytest.approx([rank / last for rank in range(last + 1)])
    assert not {"sass", "ptx"} & {cell.piece.kind for cell in groups["_cu13.abi3.so"].cells}
