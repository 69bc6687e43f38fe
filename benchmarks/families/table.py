"""Tables of what ``benchmarks.families`` found, for docs/results/models.md."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping
from typing import Any

from ..cells import markdown
from .judging import worse

QUIET = 2  # modules at a time
CACHES = {
    "KVCache": "keys and values",
    "RotatingKVCache": "windows",
    "ChunkedKVCache": "chunks",
    "ArraysCache": "states",
    "CacheList": "lists of caches",
}


def _times(entry: Mapping[str, Any], part: str) -> list[str]:
    theirs, ours = (entry["seconds"][side][part] * 1e3 for side in ("upstream", "patched"))
    return [f"{theirs:.2f}", f"{ours:.2f}", f"{theirs / ours:.2f}x"]


def _engines(entry: Mapping[str, Any]) -> str:
    """Those of the prompt; of a step where they are others."""
    prompt, step = (", ".join(sorted(entry["engines"][part])) for part in ("prompt", "step"))
    return prompt if prompt == step else f"{prompt or 'none'}; a step: {step or 'none'}"


def _steps(entry: Mapping[str, Any]) -> str:
    return "replayed" if entry["replayed"] else entry["reason"] or "as they are"


def _requests(entry: Mapping[str, Any]) -> str:
    theirs, ours = entry["upstream"]["at once"], entry["patched"]["at once"]
    if "failed" in ours:
        return "fail, upstream's too" if "failed" in theirs else "fail"
    where = "pages" if ours["pages"] else "replayed" if ours["replayed"] else "as they are"
    others = "" if entry.get("requests apart in float32", theirs.get("right")) else ", upstream's too"
    return where if ours["right"] else f"{where}; tokens differ{others}"


def _error(entry: Mapping[str, Any]) -> str:
    """The larger one of prompt and steps, of each side."""
    both = []
    for side in ("upstream", "patched"):
        values = entry[side]["error"].values()
        both.append("no number" if None in values else f"{max(values):.1%}")
    return ", ".join(both)


def speed_table(results: Mapping[str, Any]) -> str:
    head = [
        "module", "caches", "prompt, ms: MLX", "patched", "", "a step, ms: MLX", "patched", "", "steps", "requests at once",
        "attention and experts", "error: MLX, patched",
    ]  # fmt: skip
    rows = [
        [
            f"`{entry['family']}`",
            ", ".join(CACHES.get(each, each) for each in entry["caches"]),
            *_times(entry, "prompt"),
            *_times(entry, "step"),
            _steps(entry),
            _requests(entry),
            _engines(entry),
            _error(entry),
        ]
        for entry in results["cases"]
        if "seconds" in entry
    ]
    return markdown([head, *rows])


def failing_table(results: Mapping[str, Any]) -> str:
    """What has no speeds, and why: it crashes, fails on MLX's own side, or cannot be made."""
    rows = [["module", "MLX", "patched"]]
    for entry in results["cases"]:
        if "failed" in entry:
            both = [entry["failed"], ""] if entry["side"] == "upstream" else ["", entry["failed"]]
            rows.append([f"`{entry['family']}`", *both])
        elif "seconds" not in entry:
            rows.append([f"`{entry['family']}`", *(entry[side].get("failed", "right") for side in ("upstream", "patched"))])
    rows += [[f"`{name}`", f"left out: {reason}", ""] for name, reason in results["left out"].items()]
    return markdown(rows)


def counts(results: Mapping[str, Any]) -> str:
    """The walk in a few sentences."""
    entries = results["cases"]
    timed = [entry for entry in entries if "seconds" in entry]
    steps, prompts = (
        [entry["seconds"]["upstream"][part] / entry["seconds"]["patched"][part] for entry in timed] for part in ("step", "prompt")
    )
    at_once = Counter(_requests(entry) for entry in timed)
    bad = [f"`{entry['family']}` ({found})" for entry in entries if (found := worse(entry))]
    known, settings = results["provenance"], results["settings"]
    return "\n".join([
        f"- Of {len(entries)} modules {len(timed)} run; steps of {sum(bool(entry['replayed']) for entry in timed)} are replayed.",
        f"- A step takes {statistics.median(steps):.1f} times as long without `patch()` in the median, {min(steps):.2f} to "
        f"{max(steps):.0f} times; "
        f"a prompt {statistics.median(prompts):.1f} times, {min(prompts):.2f} to {max(prompts):.0f} times.",
        "- Requests at once:\n" + "\n".join(f"  - {name}: {count}" for name, count in at_once.most_common()),
        f"- Worse than MLX's own: {'; '.join(bad) or 'none'}.",
        f"- {known['device']}, commit `{known['commit'][:12]}`, {known['date'][:10]}; prompts of {settings['prompt']} tokens and "
        f"{settings['steps']} steps, the least of {settings['turns']} turns, {settings['jobs']} modules at a time.",
    ])  # fmt: skip


def family_tables(results: Mapping[str, Any]) -> dict[str, str]:
    """The blocks of docs/results/models.md: of all modules, or of a few that hardly disturbed each other."""
    if results["settings"]["jobs"] <= QUIET:
        return {"families_quiet": speed_table(results)}
    return {
        "families_counts": counts(results),
        "families_speed": speed_table(results),
        "families_failing": failing_table(results),
    }
