"""Which differences are rounding and which are wrong, from what the three processes have found.

Nothing here has to be set for a model: how far 16-bit logits may be off is measured, by those of MLX itself against float32.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean, stdev

from .forms import Answer, Judged, ModelCheck, Passage, Row, Side, SideName

MORE_PERPLEXITY = 0.005  # of the logarithm: so much more than MLX may it be away from float32's, and three standard errors
MORE_ERROR, WRONG_ERROR = 1.1, 1.5  # times the error of MLX's logits: worth a warning, and wrong
STANDARD_ERRORS = 3
# Of the largest error that a difference of two of MLX's leading logits has: the largest that was seen is not the largest that there is.
TIE = 1.5
RESOLUTION = 1e-4  # of logits: what float32 itself cannot tell apart
SLOWER = 0.9  # times the speed: worth a warning
NOT_JUDGED = "not judged, because float32 could not be computed"

PASSAGES = {"prompt": "prompt", "steps": "decode steps", "cache": "8-bit KV cache"}
ANSWERS = {"answers": "one request", "at once": "{count} requests at once"}


def noise_of(values: Sequence[float]) -> float:
    """Return the statistical error of the mean: some standard errors."""
    return STANDARD_ERRORS * stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0


def squared_errors(values: list[list[float]], float32: list[list[float]]) -> list[float]:
    """Return the mean square error of the logits at each position; a constant offset per position is ignored."""
    found = []
    for own, right in zip(values, float32, strict=True):
        errors = [a - b for a, b in zip(own, right, strict=True)]
        mean = fmean(errors)
        found.append(fmean((each - mean) ** 2 for each in errors))
    return found


def largest_error(values: list[list[float]], float32: list[list[float]]) -> float:
    """Return the largest error of a difference of two logits at one position."""
    errors = ([a - b for a, b in zip(own, right, strict=True)] for own, right in zip(values, float32, strict=True))
    return max((spread for each in errors if math.isfinite(spread := max(each) - min(each))), default=0.0)


def perplexity(nll: Sequence[float]) -> float:
    mean = fmean(nll)
    return math.exp(mean) if mean < 700 else math.inf


def is_finite(passage: Passage) -> bool:
    return all(map(math.isfinite, itertools.chain(passage["nll"], *passage["values"])))


def judge_perplexity(name: str, theirs: Passage, ours: Passage, float32: Passage | None) -> Row:
    """Compare perplexity: it is wrong if it is further from float32's than MLX's by more than rounding explains."""
    right = float32 or theirs
    row = Row(name, "ok", perplexity(theirs["nll"]), perplexity(ours["nll"]), perplexity(float32["nll"]) if float32 else None)
    if not is_finite(theirs):
        return replace(row, status="skip", note="NaN with MLX alone")
    if not is_finite(ours):
        return replace(row, status="fail", note="WRONG: NaN")
    of_theirs, of_ours = (abs(fmean(each["nll"]) - fmean(right["nll"])) for each in (theirs, ours))
    # The noise of MLX's rounding: mlx-cuda's own noise must not hide its errors.
    allowed = MORE_PERPLEXITY + noise_of([a - b for a, b in zip((theirs if float32 else ours)["nll"], right["nll"], strict=True)])
    if of_ours - of_theirs <= allowed:
        return row
    reference = "float32" if float32 else "MLX"
    note = f"WRONG: log perplexity is {of_ours:.3f} from {reference}, MLX's {of_theirs:.3f}; rounding explains {allowed:.3f} more"
    return replace(row, status="fail", note=note)


def judge_errors(name: str, theirs: Passage, ours: Passage, float32: Passage) -> Row:
    """Compare the RMS error of logits: it is wrong if it exceeds MLX's by more than noise."""
    of_theirs, of_ours = (squared_errors(each["values"], float32["values"]) for each in (theirs, ours))
    row = Row(name, "ok", math.sqrt(fmean(of_theirs)), math.sqrt(fmean(of_ours)))

    allowed = fmean(of_theirs) + math.sqrt(2) * noise_of(of_theirs)  # as far as two such means are apart

    def exceeds(times: float) -> bool:
        return fmean(of_ours) > max(RESOLUTION, times * math.sqrt(allowed)) ** 2

    if exceeds(WRONG_ERROR):
        return replace(row, status="fail", note=f"WRONG: more than {WRONG_ERROR} times MLX's")
    return replace(row, status="warn", note=f"more than {MORE_ERROR} times MLX's") if exceeds(MORE_ERROR) else row


def first_difference(theirs: list[int], ours: list[int]) -> int | None:
    """Return the first index at which the tokens differ."""
    return next((place for place, (a, b) in enumerate(zip(theirs, ours, strict=True)) if a != b), None)


def judge_answers(name: str, theirs: list[Answer], ours: list[Answer], judged: list[Judged] | None, tie: float | None) -> Row:
    """Compare greedy tokens: one is wrong if its float32 logit is further below the maximum than rounding explains.

    At the first difference both sides share the same context, so one set of logits judges both. After it, each token is judged by the
    logits of its own text. Without float32, differing tokens are not judged.
    """
    places = [first_difference(a["tokens"], b["tokens"]) for a, b in zip(theirs, ours, strict=True)]
    lengths = [len(each["tokens"]) for each in theirs]
    equal = [length if place is None else place for length, place in zip(lengths, places, strict=True)]
    row = Row(name, "ok", float(sum(lengths)), float(sum(equal)), unit="tokens", note="all equal")
    differing = [(at, place) for at, place in enumerate(places) if place is not None]
    if not differing:
        return row
    note = f"{len(differing)} of {len(places)} answers differ, first at token {1 + min(place for _, place in differing)}"
    if judged is None or tie is None:
        return replace(row, status="warn", note=f"{NOT_JUDGED}: {note}")
    margins = []
    for at, place in differing:
        upstream, patched = judged[at]["upstream"], judged[at]["patched"] or judged[at]["upstream"]
        margins.append(abs(patched[place] - upstream[place]))
        if further := [(token, below) for token, below in enumerate(patched, 1) if not below <= tie]:
            token, below = further[0]
            wrong = f"WRONG: token {token} of answer {at + 1} is {below:.2g} below float32's best, and rounding explains {tie:.2g}"
            return replace(row, status="fail", note=f"{wrong}; {note}")
    return replace(row, note=f"tie: {note}, by {max(margins):.2g} at most in float32, and rounding explains {tie:.2g}")


def tie_of(upstream: Side, float32: Side) -> float | None:
    """Return how far apart two float32 logits may be for 16 bits to choose either: from all known errors of MLX itself."""
    passages = [
        (upstream["passages"][name]["values"], right["values"]) for name, right in float32.get("passages", {}).items() if name != "cache"
    ]
    answers = [
        (each["values"], right["values"])
        for name, judged in float32.get("judged", {}).items()
        for each, right in zip(upstream["answers"][name], judged, strict=True)
    ]
    largest = [largest_error(*pair) for pair in (*passages, *answers)]
    return max(RESOLUTION, TIE * max(largest)) if largest else None


def _failed(name: str, upstream: Side, patched: Side, part: str) -> Row | None:
    """Return a row for a part that failed on one side or both."""
    theirs, ours = (side.get("errors", {}).get(part) for side in (upstream, patched))
    if theirs is not None and part not in upstream["passages"]:
        return Row(name, "skip", note=f"fails without patch() too: {theirs}" if ours is not None else f"runs only with patch(): {theirs}")
    if theirs is not None and ours == theirs:  # one of MLX's, which has something to be judged by nevertheless
        return Row(name, "skip", note=f"fails without patch() too: {theirs}")
    return None if ours is None else Row(name, "fail", note=f"fails only with patch(): {ours}")


def _speed(name: str, upstream: Side, patched: Side, part: str, key: str) -> Row:
    failed = _failed(name, upstream, patched, part)
    if failed is not None:
        return replace(failed, patched=patched["speeds"].get(key), unit="tokens/s")
    theirs, ours = upstream["speeds"][key], patched["speeds"][key]
    slower = ours < SLOWER * theirs and not patched["unused"]
    return Row(name, "warn" if slower else "ok", theirs, ours, unit="tokens/s", note="slower" if slower else "")


def _results(upstream: Side, patched: Side, float32: Side) -> list[Row]:
    rows = []
    for part, shown in PASSAGES.items():
        name = f"perplexity, {shown}"
        failed = _failed(name, upstream, patched, part)
        if failed is not None:
            rows.append(failed)
            continue
        passages = upstream["passages"][part], patched["passages"][part]
        right = float32.get("passages", {}).get(part)
        if right is not None and not is_finite(right):
            right = None
        row = judge_perplexity(name, *passages, right)
        if theirs := upstream["errors"].get(part):
            instead = f"the MLX side uses the dequantized cache: {theirs}"
            row = replace(row, note="; ".join(filter(None, (row.note, instead))))
        rows.append(row)
        if right is not None and all(map(is_finite, passages)):
            rows.append(judge_errors(f"error of the logits, {shown}", *passages, right))
    tie = tie_of(upstream, float32)
    for part, shown in ANSWERS.items():
        name = f"greedy tokens, {shown.format(count=len(upstream['prompts']))}"
        failed = _failed(name, upstream, patched, part)
        judged = float32.get("judged", {}).get(part)
        rows.append(failed or judge_answers(name, upstream["answers"][part], patched["answers"][part], judged, tie))
    return rows


def _costs(upstream: Side, patched: Side) -> list[Row]:
    count = len(upstream["prompts"])
    rows = [
        _speed("prefill", upstream, patched, "speed", "prompt"),
        _speed("decode", upstream, patched, "speed", "one request"),
        _speed(f"decode, {count} requests at once", upstream, patched, "at once", "at once"),
        _speed("decode, 8-bit KV cache", upstream, patched, "cache speed", "cache"),
    ]
    for key, shown in (("one request", "one request"), ("at once", f"{count} requests at once")):
        if key in upstream["memory"] and key in patched["memory"]:
            theirs, ours = (side["memory"][key] / 2**20 for side in (upstream, patched))
            rows.append(Row(f"peak memory, {shown}", "ok", theirs, ours, unit="MiB"))
    if unknown := patched["errors"].get("engines"):
        rows.append(Row("engines", "warn", note=unknown))
    return rows


def judge(
    model: str, upstream: Side, patched: Side, float32: Side, *, quick: bool, seconds: float, crashes: dict[SideName, str]
) -> ModelCheck:
    """Return all rows, and whether one of them is wrong. ``crashes``: errors of processes that ended without a result."""
    rows = []
    if crashed := crashes.get("patched"):
        rows.append(Row("patch()", "fail", note=crashed))
    elif patched["unused"]:
        shown = "run python -m mlx_cuda doctor: " if patched["broken"] else "both sides are MLX: "
        rows.append(Row("kernels", "fail" if patched["broken"] else "skip", note=shown + patched["unused"]))
    if crashed := crashes.get("float32"):
        rows.append(Row("float32", "warn", note=f"could not be computed: {crashed}"))
    rows += [Row(f"float32, {part}", "warn", note=error) for part, error in float32.get("errors", {}).items()]
    if patched:
        rows += [*_results(upstream, patched, float32), *_costs(upstream, patched)]
    return ModelCheck(
        model=model,
        ok=all(row.status != "fail" for row in rows),
        quick=quick,
        seconds=seconds,
        about=upstream["about"],
        rows=tuple(rows),
        calls=tuple(patched.get("calls", ())),
        steps=tuple(patched.get("steps", ())),
    )
