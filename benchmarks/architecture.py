"""``python -m benchmarks.architecture`` draws the picture of CONTRIBUTING.md: its list of folders, in the order that the code has them.

A row of the list is a box. What it stands below, its files import or include; boxes side by side know nothing of each other.
"""

from __future__ import annotations

import argparse
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from textwrap import wrap

from ci.errors import CheckFailed, ending

from . import svg

REPOSITORY = Path(__file__).parents[1]
CONTRIBUTING = REPOSITORY / "CONTRIBUTING.md"
PICTURE = REPOSITORY / "docs" / "img" / "architecture.svg"
TOPS = ("python/mlx_cuda", "src", "ci")
UNSAID = {"__init__", "__main__", "__pycache__", "_version"}  # what ties a package together, and its version
SUFFIXES = {".py", ".h", ".cpp", ".cuh", ".cu"}
WIDTH, GAP, LEFT, TOP = 324, 10, 14, 40  # of a column, around its boxes, where the first begins
BESIDE = 2  # boxes in a column, at most
TITLE, LINE = 17, 13  # the heights of lines
WIDE_TITLE, WIDE = 7.3, 6.1  # the widths of letters, about
_STYLE = """
    text { font: 11px system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; text-anchor: middle; fill: #424a53 }
    .name { font: 600 12px ui-monospace, "DejaVu Sans Mono", monospace; fill: #1f2328 }
    .top { font: 700 15px ui-monospace, "DejaVu Sans Mono", monospace; fill: #7d8590 }
    rect { stroke-width: 1.5 }
    .python { fill: #ddf0ff; stroke: #3b82c4 }
    .src { fill: #d2f4d9; stroke: #2da44e }
    .ci { fill: #ffe7cf; stroke: #e16f24 }
    @media (prefers-color-scheme: dark) {
      text { fill: #c2cad3 } .name { fill: #f0f6fc } .top { fill: #7d8590 }
      .python { fill: #10304a; stroke: #58a6ff } .src { fill: #12361f; stroke: #3fb950 } .ci { fill: #4a2a12; stroke: #f0883e }
    }
"""


@dataclass(frozen=True)
class Row:
    """A row of the list: folders and modules, and what is said of them."""

    names: tuple[str, ...]
    words: str

    @property
    def parts(self) -> set[str]:
        return {name.removesuffix("/").removesuffix(".py") for name in self.names}

    def lines(self, width: float) -> tuple[list[str], list[str]]:
        """The names and the words as a box of this width has them."""
        names, words = (int((width - GAP) / letter) for letter in (WIDE_TITLE, WIDE))
        return wrap(" ".join(self.names), names, break_long_words=False), wrap(self.words, words, break_long_words=False)

    def height(self, width: float) -> int:
        names, words = self.lines(width)
        return TITLE * len(names) + LINE * len(words) + GAP


def rows(top: str) -> list[Row]:
    """Those of the list below a folder of the repository; CheckFailed where the folder has others."""
    text = CONTRIBUTING.read_text("utf-8")
    block = re.search(rf"^    {top}/ .*\n((?:        .*\n)+)", text, re.MULTILINE)
    found = re.findall(r"^ {8}(\S+(?: \S+)*)(?: {2,}(\S.*(?:\n {9,}\S.*)*))?$", block[1] if block else "", re.MULTILINE)
    listed = [Row(tuple(names.split()), " ".join(words.split())) for names, words in found]
    there = {path.stem for path in (REPOSITORY / top).iterdir() if path.is_dir() or path.suffix == ".py"} - UNSAID
    if wrong := there ^ {part for row in listed for part in row.parts}:
        fix = "give each part a row in the list, and take away the rows of what is gone"
        raise CheckFailed(f"CONTRIBUTING.md's list and {top} differ in {', '.join(sorted(wrong))}\n  fix: {fix}")
    return listed


def uses(top: str, part: str) -> set[str]:
    """The parts of the same folder whose files those of one import or include."""
    place, found = REPOSITORY / top / part, set[str]()
    files = place.rglob("*") if place.is_dir() else [place.with_suffix(".py")]
    for path in (path for path in files if path.suffix in SUFFIXES):
        up = r"\." * len(path.relative_to(REPOSITORY / top).parts)
        text = path.read_text("utf-8")
        for module, *names in re.findall(rf"^ *from {up}([a-z_]\w*)?[\w.]* import (?:\(([\w, \n]+)|([\w, ]+))", text, re.MULTILINE):
            found |= {module} if module else {each.split(" as ")[0].strip() for each in "".join(names).split(",")}
        for module, folder in re.findall(rf'^ *from {Path(top).name}\.(\w+)|^#include "(\w+)/', text, re.MULTILINE):
            found |= {module or folder}
    return found


def layers(top: str) -> list[list[Row]]:
    """The rows, each below all that it uses."""
    listed = rows(top)
    below = {row: {other for part in row.parts for other in listed if other.parts & uses(top, part)} - {row} for row in listed}
    depth = dict.fromkeys(listed, 0)
    for _ in listed:
        depth |= {row: max((depth[other] + 1 for other in below[row]), default=0) for row in listed}
    if max(depth.values()) >= len(listed):
        raise CheckFailed(f"parts of {top} use each other in a circle\n  fix: tests/ci/test_layers.py says which import or include it is")
    found = [[row for row in listed if depth[row] == each] for each in range(max(depth.values()) + 1)]
    return [layer[i : i + BESIDE] for layer in found for i in range(0, len(layer), BESIDE)]


def drawing() -> str:
    """The picture as SVG."""
    parts, bottom = [], 0
    for column, top in enumerate(TOPS):
        x, y = LEFT + column * WIDTH, TOP
        parts.append(svg.text("top", x + (WIDTH - GAP) / 2, 28, f"{top}/"))
        for layer in layers(top):
            width = (WIDTH - GAP) / len(layer) - GAP
            height = max(row.height(width) for row in layer)
            for number, row in enumerate(layer):
                parts += _box(top.partition("/")[0], row, (x + number * (width + GAP), y), (width, height))
            y += height + GAP
        bottom = max(bottom, y)
    size = f"{2 * LEFT + len(TOPS) * WIDTH - 2 * GAP} {bottom + 4}"
    said = "The folders of python/mlx_cuda, src and ci: each uses only what stands above it"
    return svg.picture(size, said, _STYLE, parts)


def _box(kind: str, row: Row, place: tuple[float, float], size: tuple[float, float]) -> list[str]:
    (x, y), (width, height), (names, words) = place, size, row.lines(size[0])
    y_text = y + (height - row.height(width)) / 2 + GAP / 2
    said = [svg.text("name", x + width / 2, y_text + TITLE * (i + 1) - 4, name) for i, name in enumerate(names)]
    said += [svg.text("", x + width / 2, y_text + TITLE * len(names) + LINE * (i + 1) - 3, line) for i, line in enumerate(words)]
    return [f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="6"/>', *said]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.architecture", description=__doc__)
    parser.add_argument("-o", "--output", type=Path, default=PICTURE, help="the picture (default: docs/img/architecture.svg)")
    parser.parse_args().output.write_text(drawing(), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(ending(main))
