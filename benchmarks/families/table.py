"""Tables of what ``benchmarks.families`` found, for docs/results/models.md."""

from __future__ import annotations

import statistics
from collections import Counter
from typing import TYPE_CHECKING, Any

from ..cells import markdown, shown
from .judging import worse

if TYPE_CHECKING:
    from collections.abc import Mapping

QUIET = 2  # modules at a time
CACHES = {
    "KVCache": "KV cache",
    "RotatingKVCache": "sliding window",
    "ChunkedKVCache": "chunked KV cache",
    "ArraysCache": "state",
    "CacheList": "cache list",
}


def _times(entry: Mapping[str, Any], part: str) -> list[str]:
    theirs, ours = (entry["seconds"][side][part] * 1e3 for side in ("upstream", "patched"))
    return [f"{theirs:.2f}", f"{ours:.2f}", f"{theirs / ours:.2f}x"]


def _engines(entry: Mapping[str, Any]) -> str:
    """Of the prompt, and of a step if it has others."""
    prompt, step = (", ".join(sorted(entry["engines"][part])) for part in ("prompt", "step"))
    return shown(prompt if prompt == step else f"{prompt or 'none'}; decode: {step or 'none'}")


def _steps(entry: Mapping[str, Any]) -> str:
    return "captured" if entry["replayed"] else shown(entry["reason"]) or "eager"


def _requests(entry: Mapping[str, Any]) -> str:
    theirs, ours = entry["upstream"]["at once"], entry["patched"]["at once"]
    if "failed" in ours:
        return "fail, with MLX too" if "failed" in theirs else "fail"
    where = "paged" if ours["pages"] else "captured" if ours["replayed"] else "eager"
    others = "" if entry.get("requests apart in float32", theirs.get("right")) else ", with MLX too"
    return where if ours["right"] else f"{where}; tokens differ{others}"


def _error(entry: Mapping[str, Any]) -> str:
    """The larger one of prompt and steps, of each side."""
    both = []
    for side in ("upstream", "patched"):
        values = entry[side]["error"].values()
        both.append("not finite" if None in values else f"{max(values):.1%}")
    return ", ".join(both)


def speed_table(results: Mapping[str, Any]) -> str:
    head = [
        "module", "caches", "prefill, ms: MLX", "patched", "speedup", "decode step, ms: MLX", "patched", "speedup", "steps",
        "batched requests", "attention and MoE engines", "logit error: MLX, patched",
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
        f"- {len(timed)} of {len(entries)} modules run; {sum(bool(entry['replayed']) for entry in timed)} have captured decode steps.",
        f"- Median speedup of a decode step {statistics.median(steps):.1f}x ({min(steps):.2f}x to {max(steps):.0f}x), "
        f"of prefill {statistics.median(prompts):.1f}x ({min(prompts):.2f}x to {max(prompts):.0f}x).",
        "- Batched requests:\n" + "\n".join(f"  - {name}: {count}" for name, count in at_once.most_common()),
        f"- Less accurate than MLX: {'; '.join(bad) or 'none'}.",
        f"- {known['device']}, commit `{known['commit'][:12]}`, {known['date'][:10]}; prompts of {settings['prompt']} tokens, "
        f"{settings['steps']} steps, fastest of {settings['turns']} turns, {settings['jobs']} modules at a time.",
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
