"""What ``python -m tests.models measure`` found, as tables."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

from benchmarks.cells import markdown, significant

from . import places
from .judging import Difference

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

SIDES = ("upstream", "patched")


def _name(result: Mapping[str, Any]) -> str:
    return f"{places.known()[result['model']].title}, {result['form']}"


def _both(numbers: Mapping[str, Any], form: str = "") -> str:
    return ", ".join(format(numbers[side], form) if side in numbers else "fails" for side in SIDES)


def texts(results: Sequence[Mapping[str, Any]]) -> str:
    """Perplexities, errors and best tokens of each text."""
    rows = [
        ["model", "text", "perplexity: float32, MLX, patched", "logit error: MLX, patched", "tokens unlike float32's", "of these, no ties"]
    ]
    for each in (each for each in results if each["part"] in {"text", "kv"}):
        for place, found in each.items():
            if isinstance(found, dict):
                shown = f"KV cache, {place}" if each["part"] == "kv" else place
                ours = ", ".join(significant(found["perplexity"][side]) for side in ("float32", *SIDES))
                tokens = f"{_both(found['other tokens'])} of {found['positions']}"
                rows.append([_name(each), shown, ours, _both(found["error"], ".2%"), tokens, _both(found["wrong tokens"])])
    return markdown(rows)


def differences(results: Sequence[Mapping[str, Any]]) -> str:
    """Where greedy answers part, and what float32 says of these places."""
    rows = [
        [
            "model",
            "answers",
            "equal",
            "tokens before the first difference",
            "ties",
            "patched closer to float32",
            "float32's token: MLX, patched",
        ]
    ]
    for each in (each for each in results if each["part"] == "alone" and "differences" in each):
        parted = [Difference(**one) for one in each["differences"] if "gap" in one]
        counts = [one.position for one in parted]
        own = {side: sum(side in one.right for one in parted) for side in SIDES}
        median = f"{statistics.median(counts):.0f} in the median, {min(counts)} at least" if counts else ""
        ties, nearer = sum(one.tie for one in parted), sum(one.nearer == "patched" for one in parted)
        shown = [f"{ties} of {len(parted)}", f"{nearer} of {len(parted)}", _both(own)] if parted else [""] * 3
        rows.append([_name(each), str(len(each["differences"])), str(len(each["differences"]) - len(parted)), median, *shown])
    return markdown(rows)


def answers(results: Sequence[Mapping[str, Any]]) -> str:
    """Generated tokens that float32 would not have chosen."""
    rows = [["model", "part", "tokens: MLX, patched", "tokens unlike float32's", "of these, no ties", "captured steps"]]
    for each in (each for each in results if "tokens" in each):
        numbers = [_both(each[what]) for what in ("tokens", "other tokens", "wrong tokens")]
        rows.append([_name(each), each["part"], *numbers, str(each["replayed"])])
    return markdown(rows)


def curves(results: Sequence[Mapping[str, Any]]) -> str:
    """Losses of LoRA: of the first tenth of the steps and of the last."""
    rows = [["model", "steps", "loss, first tenth: float32, MLX, patched", "last tenth", "tokens/s: MLX, patched", "speedup"]]
    for each in (each for each in results if each["part"] == "training"):
        losses, speeds = each["losses"], each.get("tokens/s")  # none where other programs had the GPU too
        tail = max(1, len(losses["float32"]) // 10)
        cuts = slice(tail), slice(-tail, None)
        first, last = (", ".join(f"{statistics.fmean(losses[side][cut]):.4f}" for side in ("float32", *SIDES)) for cut in cuts)
        timed = [_both(speeds, ".0f"), f"{speeds['patched'] / speeds['upstream']:.2f}x"] if speeds else ["not timed", ""]
        rows.append([_name(each), str(len(losses["float32"])), first, last, *timed])
    return markdown(rows)


def tables(results: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """The blocks of docs/results/models.md that have a row."""
    made = {"real_texts": texts, "real_differences": differences, "real_answers": answers, "real_training": curves}
    found = {name: table(results) for name, table in made.items()}
    return {name: text for name, text in found.items() if text.count("\n") > 1}
