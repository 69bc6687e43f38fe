"""What several tests of the report use."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ci.report.treemap import Box


def assert_apart(boxes: list[Box], whole: Box, slack: float = 1e-6) -> None:
    for index, box in enumerate(boxes):
        assert box.x >= whole.x - slack
        assert box.y >= whole.y - slack
        assert box.x + box.width <= whole.x + whole.width + slack
        assert box.y + box.height <= whole.y + whole.height + slack
        for other in boxes[:index]:
            across = min(box.x + box.width, other.x + other.width) - max(box.x, other.x)
            down = min(box.y + box.height, other.y + other.height) - max(box.y, other.y)
            assert min(across, down) <= slack
