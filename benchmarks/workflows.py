"""``python -m benchmarks.workflows`` draws the picture of docs/factory/overview.md, from the workflows themselves."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from . import svg

FOLDER = Path(__file__).parents[1] / ".github" / "workflows"
PICTURE = FOLDER.parents[1] / "docs" / "img" / "workflows.svg"
ORDER = ("wheels", "platform", "gpu", "release", "nightly", "upstream", "security")
WHEN = {
    "pull_request": "pull request",
    "merge_group": "merge queue",
    "push": "push",
    "schedule": "schedule",
    "workflow_dispatch": "manual",
    "workflow_call": "called",
}
WIDTH, HEIGHT = 134, 40  # of a box
STEP, ROW = 156, 52  # from one to the next
LEFT, TOP, GAP = 150, 14, 12  # of a lane, around its boxes, between lanes
_STYLE = """
    text { font: 600 13px system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; text-anchor: middle; fill: #1f2328 }
    .note { font-weight: 400; font-size: 11px; fill: #424a53 }
    .name { font: 700 14px ui-monospace, "DejaVu Sans Mono", monospace }
    .name, .when, .legend { fill: #7d8590; text-anchor: start }
    .when, .legend { font-weight: 400; font-size: 12px }
    rect { stroke-width: 1.5; fill: #eaeef2; stroke: #8c959f }
    .lane { fill: none; stroke: #7d8590; stroke-opacity: .4 }
    .call { stroke-dasharray: 4 3 }
    .own { fill: #d2f4d9; stroke: #2da44e }
    .write { fill: #ffe7cf; stroke: #e16f24 }
    path { fill: none; stroke: #7d8590; stroke-width: 1.5; marker-end: url(#head) }
    #head path { fill: #7d8590; stroke: none; marker-end: none }
    @media (prefers-color-scheme: dark) {
      text { fill: #f0f6fc } .note { fill: #c2cad3 } rect { fill: #262c36; stroke: #656c76 }
      .own { fill: #12361f; stroke: #3fb950 } .write { fill: #4a2a12; stroke: #f0883e }
    }
"""
_COMMAND = re.compile(r"python -m (ci (?:release )?[a-z-]+|nox -s [a-z-]+|cibuildwheel)|(?<!.)(gh [a-z]+ [a-z]+|zizmor)")
_LEGEND = (
    ("call", "calls another workflow"),
    ("own", "self-hosted runner"),
    ("write", "may write or sign"),
    ("", "no permission"),
)


def drawing() -> str:
    """The picture as SVG."""
    import yaml

    tables = {name: yaml.safe_load((FOLDER / f"{name}.yml").read_text("utf-8")) for name in ORDER}
    if missing := {path.stem for path in FOLDER.glob("*.yml")} - tables.keys():
        raise ValueError(f"no place in the picture for {', '.join(sorted(missing))}")
    parts: list[str] = []
    top, columns = 40.0, 0
    for name, table in tables.items():
        lane, height, width = _lane(name, table, top)
        parts += lane
        top += height + GAP
        columns = max(columns, width)
    total = LEFT + columns * STEP + 10
    legend = []
    for number, (kind, said) in enumerate(_LEGEND):
        x = 10 + sum(44 + 6.6 * len(each) for _, each in _LEGEND[:number])
        legend += [f'<rect class="{kind}" x="{x:g}" y="12" width="22" height="14" rx="3"/>', svg.text("legend", x + 28, 23.5, said)]
    lanes = [part.replace("LANE", f"{total - 16:g}") for part in parts]
    size = 'viewBox="0 0 8 8" refX="7" refY="4" markerWidth="6" markerHeight="6"'
    head = f'<marker id="head" {size} orient="auto"><path d="M0 0 L8 4 L0 8 Z"/></marker>'
    said = "The workflows and their jobs: what waits for what, what may write"
    return svg.picture(f"{total:g} {top:g}", said, _STYLE, (f"<defs>{head}</defs>", *legend, *lanes))


def _lane(name: str, table: dict[Any, Any], top: float) -> tuple[list[str], float, int]:
    """A workflow's lane, its height, and its number of columns."""
    jobs: dict[str, Any] = table["jobs"]
    needs = {job: set(_list(each.get("needs"))) for job, each in jobs.items()}
    cells = _cells(needs)
    place = {job: (LEFT + column * STEP, top + TOP + row * ROW) for job, (column, row) in cells.items()}
    triggers: dict[str, Any] = table[True]  # YAML 1.1 reads the key `on` so
    when = [f"a tag {each['tags'][0]}" if "tags" in (each or {}) else WHEN[key] for key, each in triggers.items()]
    rows = max(row for _, row in cells.values()) + 1
    height = 2 * TOP + max(rows * ROW - (ROW - HEIGHT), 16 * (len(when) + 1))
    parts = [f'<rect class="lane" x="8" y="{top}" width="LANE" height="{height}" rx="8"/>', svg.text("name", 20, top + 26, f"{name}.yml")]
    parts += [svg.text("when", 20, top + 44 + 15 * number, each) for number, each in enumerate(when)]
    for job, before in needs.items():
        implied = set().union(*(_before(each, needs) for each in before))
        parts += [_arrow(place[each], place[job]) for each in sorted(before - implied)]
    for job, each in jobs.items():
        x, y = place[job]
        kind = "write" if "write" in each["permissions"].values() else "own" if "label" in str(each.get("runs-on")) else ""
        kind = "call" if "uses" in each else kind
        title = job + (" …" if "strategy" in each else "")
        parts += [
            f'<rect class="{kind}" x="{x}" y="{y}" width="{WIDTH}" height="{HEIGHT}" rx="6"/>',
            svg.text("", x + WIDTH / 2, y + 17, title),
        ]
        parts.append(svg.text("note", x + WIDTH / 2, y + 32, _note({name, job}, each)))
    return parts, height, max(column for column, _ in cells.values()) + 1


def _cells(needs: dict[str, set[str]]) -> dict[str, tuple[int, int]]:
    """The column and the row of each job: behind all that it waits for; those that have to do with no other side by side, below."""
    column: dict[str, int] = {}
    while len(column) < len(needs):
        column |= {job: max((column[each] + 1 for each in before), default=0) for job, before in needs.items() if before <= column.keys()}
    alone = [job for job, before in needs.items() if not before and not any(job in each for each in needs.values())]
    bound = [job for job in needs if job not in alone]
    cells = {job: (column[job], sum(column[each] == column[job] for each in bound[: bound.index(job)])) for job in bound}
    below = max((row + 1 for _, row in cells.values()), default=0)
    return cells | {job: (number, below) for number, job in enumerate(alone)}


def _note(names: set[str], job: dict[str, Any]) -> str:
    """Return the command that has the name of the job or workflow, or else the last command, or else the last action."""
    if "uses" in job:
        return Path(job["uses"]).name
    commands = ["".join(said) for step in job["steps"] for said in _COMMAND.findall(step.get("run", ""))]
    actions = [step["uses"].partition("@")[0].rpartition("/")[2] for step in job["steps"] if "uses" in step]
    own = [said for said in commands if said.split()[-1] in names]
    return str([*actions, *commands, *own][-1]) if actions else "fails if a job failed"


def _before(job: str, needs: dict[str, set[str]]) -> set[str]:
    return needs[job].union(*(_before(each, needs) for each in needs[job]))


def _arrow(start: tuple[float, float], end: tuple[float, float]) -> str:
    x, y, to_x, to_y = start[0] + WIDTH, start[1] + HEIGHT / 2, end[0] - 2, end[1] + HEIGHT / 2
    bend = to_x + WIDTH - STEP + 2  # up to there in its own row, so as not to run behind boxes of others
    return f'<path d="M{x:g} {y:g} H{bend:g} C{bend + 14:g} {y:g} {to_x - 14:g} {to_y:g} {to_x:g} {to_y:g}"/>'


def _list(value: Any) -> list[str]:
    return [value] if isinstance(value, str) else list(value or [])


if __name__ == "__main__":
    PICTURE.write_text(drawing(), "utf-8")
