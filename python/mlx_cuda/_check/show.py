"""The results of a check, as a table and as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from .forms import ModelCheck, Row
from .judge import NOT_JUDGED

HEADS = ("", "MLX", "patch()", "", "float32", "")


def number(value: float | None, unit: str) -> str:
    """Return a number with its significant digits."""
    if value is None:
        return ""
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "inf"
    if unit:
        return f"{value:,.0f}" if value >= 100 or unit == "tokens" else f"{value:.3g}"
    return f"{value:.3f}" if value >= 1 else f"{value:.2e}"


def _cells(row: Row) -> list[str]:
    ratio = ""
    if row.unit in {"tokens/s", "MiB"} and row.upstream and row.patched is not None:
        ratio = f"{row.patched / row.upstream:.2f}x"
    name = f"{row.name}, {row.unit}" if row.unit in {"tokens/s", "MiB"} else row.name
    values = [number(value, row.unit) for value in (row.upstream, row.patched, row.float32)]
    return [name, *values[:2], ratio, values[2], row.note]


def table(rows: Iterable[Row]) -> list[str]:
    """Return the lines of the table, numbers aligned to the right."""
    found = [(row.status, _cells(row)) for row in rows]
    widths = [max(len(cells[column]) for cells in (list(HEADS), *(cells for _, cells in found))) for column in range(len(HEADS) - 1)]

    def line(mark: str, cells: Iterable[str]) -> str:
        name, *numbers, note = cells
        shown = [f"{value:>{width}}" for value, width in zip(numbers, widths[1:], strict=True)]
        return f"{mark} {name:<{widths[0]}}  {'  '.join(shown)}  {note}".rstrip()

    return [line(" " * 6, HEADS), *(line(f"[{status:^4}]", cells) for status, cells in found)]


def render(check: ModelCheck) -> str:
    """Return the whole check as text."""
    about = dict(check.about)
    versions = ", ".join(f"{name} {about.pop(name)}" for name in ("mlx-cuda", "mlx", "mlx-lm") if name in about)
    lines = [f"{check.model}: {about.get('model type', '')}, {about.get('weights', '')}", f"{versions}, on {about.get('device', '')}", ""]
    lines += table(check.rows)
    if check.steps:
        lines += ["", "decode steps that were launches of a captured CUDA graph:"]
        lines += [f"  {each['where']}: {each['replayed']} of {each['taken']}; {each['reason']}" for each in check.steps]
    if check.calls:
        lines += ["", "engines of prefill:"]
        for each in sorted(check.calls, key=lambda each: (each["function"], -each["count"])):
            who = f"{each['engine']}" if each["ours"] else "MLX's own"
            lines.append(f"  {each['count']} {each['function']}: {who}, {each['reason']}")
    failed = sum(row.status == "fail" for row in check.rows)
    unjudged = sum(row.note.startswith(NOT_JUDGED) for row in check.rows)
    agree = f"no result is wrong, {unjudged} of {len(check.rows)} rows are not judged" if unjudged else "results agree"
    verdict = f"{failed} of {len(check.rows)} rows are wrong" if failed else agree
    return "\n".join([*lines, "", f"{verdict} ({check.seconds:.0f} s)"])


def _plain(value: Any) -> Any:
    """Replace NaN and infinities, which JSON does not have."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, (list, tuple)) else value


def as_json(check: ModelCheck) -> str:
    """Return the dataclass as JSON; numbers that are not finite are null."""
    return json.dumps(_plain(asdict(check)), indent=2)
