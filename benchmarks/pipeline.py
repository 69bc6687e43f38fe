"""What ``nox -s pipeline`` measured: the table of docs/factory/releasing.md, from docs/factory/pipeline.json."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .cells import markdown

if TYPE_CHECKING:
    from collections.abc import Sequence


def pipeline_table(report: Sequence[dict[str, Any]]) -> str:
    """A row for each job: its time, and its longest step."""
    rows = [["job", "seconds", "of that the longest step", "not as it stands"]]
    for job in report:
        longest = max(job["steps"], key=lambda step: step["seconds"], default={"seconds": 0, "step": "none"})
        notes = [f"`{step['step']}`: {step['note']}" for step in job["steps"] if step.get("note", "a stand-in") != "a stand-in"]
        said = job["job"] + (f": **{job['failed']} failed**" if job["failed"] else "")
        rows.append([said, f"{job['seconds']:.0f}", f"{longest['seconds']:.0f}: `{longest['step']}`", "; ".join(notes)])
    rows.append(["together", f"{sum(job['seconds'] for job in report):.0f}", "", ""])
    return markdown(rows)
