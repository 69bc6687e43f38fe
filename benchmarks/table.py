"""The results as Markdown, and docs/performance.md brought up to date with them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .record import CaseResult, Results

BLOCK = re.compile(r"(<!-- results: (\w+) -->\n).*?(<!-- end of results -->)", re.DOTALL)


def sides_of(cases: Sequence[CaseResult]) -> list[str]:
    """Every side that any of the cases has, in the order in which they were measured."""
    return list(dict.fromkeys(name for case in cases for name in case.sides))


def duration(seconds: float) -> str:
    return f"{seconds * 1e3:.3f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.1f} us"


def case_table(cases: Sequence[CaseResult]) -> str:
    """One row per case: time and rate of each side, and ours against each of the others."""
    sides = sides_of(cases)
    others = [name for name in sides if name != "ours"]
    rows = [["case", *sides, *(f"ours / {name}" for name in others)]]
    for case in cases:
        if case.error:
            rows.append([case.name, f"failed: {case.error.splitlines()[-1]}", *[""] * (len(rows[0]) - 2)])
            continue
        cells = []
        for name in sides:
            side, rate = case.sides.get(name), case.rate(name)
            if side is None or side.median is None or rate is None:
                cells.append("" if side is None else "failed")
            else:
                cells.append(f"{duration(side.median)}, {rate:.{0 if rate >= 100 else 1 if rate >= 10 else 2}f} {case.unit}")
        speedups = [case.speedup(name) for name in others]
        rows.append([case.name, *cells, *("" if value is None else f"{value:.2f}x" for value in speedups)])
    header, *body = (f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in rows)
    return "\n".join([header, "|" + "---|" * len(rows[0]), *body])


def provenance_list(results: Results) -> str:
    """Machine and versions, as a list."""
    provenance = results.provenance
    native, torch, gpu = provenance["native"], provenance["torch"], provenance["gpu_before"]
    lines = [f"- {provenance['device']}, Python {provenance['python']}, {provenance['date']}"]
    if gpu:
        lines[0] += f", driver {gpu['driver_version']}"
    versions = {name: version for name, version in provenance["distributions"].items() if name.lower().startswith("mlx")}
    if native and "libraries" in native:
        versions |= {f"{name} (loaded)": version for name, version in native["libraries"].items()}
    lines.append(f"- {', '.join(f'{name} {version}' for name, version in versions.items())}")
    lines.append(f"- torch {torch['torch']}, cuDNN {torch['cudnn']}" if torch else "- without torch")
    if provenance["wheel"]:
        lines.append(f"- `{provenance['wheel']['name']}`, sha256 `{provenance['wheel']['sha256']}`")
    if provenance["commit"]:
        lines.append(f"- commit `{provenance['commit']}`")
    if provenance["quick"]:
        lines.append("- **quick run: tiny sizes that prove the program works; the numbers mean nothing**")
    return "\n".join(lines)


def sections(results: Results) -> dict[str, str]:
    """The blocks by name: one for each operation, and ``provenance``."""
    groups = dict.fromkeys(case.group for case in results.cases)
    tables = {group: case_table([case for case in results.cases if case.group == group]) for group in groups}
    return {"provenance": provenance_list(results), **tables}


def fill(document: str, results: Results) -> str:
    """The document with each block between its markers made anew; a block that the results lack stays."""
    blocks = sections(results)
    return BLOCK.sub(lambda match: f"{match[1]}{blocks[match[2]]}\n{match[3]}" if match[2] in blocks else match[0], document)
