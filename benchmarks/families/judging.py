"""Whether a patched model is as good as MLX's own, by what ``walk`` found: one rule for the program, its test and the table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

BEGINS = "side: "  # before a side's name on stderr
# A patched model rounds otherwise, so its error may be somewhat larger than upstream's, and one that is tiny may be several times as large.
LARGER, TINY = 1.5, 0.01


def worse(entry: Mapping[str, Any]) -> str:
    """What is worse than upstream's: a failure, an error against float32, recordings that are never replayed, or the tokens of requests at
    once; empty where nothing is.
    """
    if "failed" in entry:
        return "" if entry["side"] == "upstream" else str(entry["failed"])
    upstream, patched = entry["upstream"], entry["patched"]
    if "failed" in upstream:
        return ""
    if "failed" in patched:
        return str(patched["failed"])
    for part, most in upstream["error"].items():
        found = patched["error"][part]
        if most is not None and (found is None or not found <= LARGER * most + TINY):
            return f"error of the {part} {'not a number' if found is None else f'{found:.2%}'}, upstream's {most:.2%}"
    if not entry["replayed"] and not entry["reason"]:
        return "its steps are recorded again and again"
    theirs, ours = upstream["at once"], patched["at once"]
    if "failed" not in theirs and "failed" in ours:
        return f"requests at once: {ours['failed']}"
    if theirs.get("right") and not ours["right"] and entry.get("requests apart in float32", True):
        return "requests at once have tokens that are not those of their own prompts"
    return ""


def summary(entry: Mapping[str, Any]) -> str:
    """A line for the log."""
    if "failed" in entry:
        return f"fails{' upstream' if entry['side'] == 'upstream' else ''}: {entry['failed']}"
    if "failed" in entry["upstream"]:
        return f"fails upstream: {entry['upstream']['failed']}"
    if reason := worse(entry):
        return f"WORSE: {reason}"
    times = entry.get("seconds")
    speed = " and ".join(f"{name} {times['upstream'][name] / times['patched'][name]:.2f}x" for name in ("prompt", "step")) if times else ""
    return f"{speed or 'right'}{', replayed' if entry.get('replayed') else ''}"
