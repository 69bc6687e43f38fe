"""Which differences are rounding and which are wrong, from what the three processes have found.

Nothing here has to be set for a model: how far 16-bit logits may be off is measured, by those of MLX itself against float32.
"""

from __future__ import annotations

import math
from statistics import fmean, stdev
from typing import TYPE_CHECKING, NamedTuple

from .forms import ModelCheck, Row

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from .forms import Answer, Judged, Passage, Side, SideName, Status

MORE_PERPLEXITY = 0.005  # of the logarithm: so much more than MLX may it be away from float32's, and three standard errors
MORE_ERROR, WRONG_ERROR = 1.1, 1.5  # times the error of MLX's logits: worth a warning, and wrong
STANDARD_ERRORS = 3
# Of the largest error that a difference of two of MLX's leading logits has: the largest that was seen is not the largest that there is.
TIE = 1.5
RESOLUTION = 1e-4  # of logits: what float32 itself does not tell apart
SLOWER = 0.9  # times the speed: worth a warning

PASSAGES = {"prompt": "prompt", "steps": "decode steps", "cache": "8-bit KV cache"}
ANSWERS = {"answers": "one request", "at once": "{count} requests at once"}


class Difference(NamedTuple):
    """The mean of numbers that each have another one beside them, minus theirs, and its standard error."""

    mean: float
    error: float

    @classmethod
    def of(cls, ours: Sequence[float], theirs: Sequence[float]) -> Difference:
        each = [a - b for a, b in zip(ours, theirs, strict=True)]
        return cls(fmean(each), stdev(each) / math.sqrt(len(each)) if len(each) > 1 else 0.0)


def squared_errors(values: list[list[float]], float32: list[list[float]]) -> list[float]:
    """At each position the mean square of the errors of logits; one that all of them share changes nothing, and does not count."""
    found = []
    for own, right in zip(values, float32, strict=True):
        errors = [a - b for a, b in zip(own, right, strict=True)]
        mean = fmean(errors)
        found.append(fmean((each - mean) ** 2 for each in errors))
    return found


def largest_error(values: list[list[float]], float32: list[list[float]]) -> float:
    """The largest error of a difference of two logits at one position."""
    errors = ([a - b for a, b in zip(own, right, strict=True)] for own, right in zip(values, float32, strict=True))
    return max((max(each) - min(each) for each in errors), default=0.0)


def perplexity(nll: Sequence[float]) -> float:
    mean = fmean(nll)
    return math.exp(mean) if mean < 700 else math.inf


def _is_finite(values: Iterable[float]) -> bool:
    return all(map(math.isfinite, values))


def judge_perplexity(name: str, theirs: Passage, ours: Passage, float32: Passage | None) -> Row:
    """Wrong where it is further from float32's than MLX's is, and more than rounding explains."""
    numbers = [perplexity(each["nll"]) if each else None for each in (theirs, ours, float32)]
    if not _is_finite(ours["nll"]):
        status: Status = "fail" if _is_finite(theirs["nll"]) else "skip"
        return Row(name, status, *numbers, note="patch() gives NaN" if status == "fail" else "MLX by itself gives NaN")
    right = fmean((float32 or theirs)["nll"])
    further = abs(fmean(ours["nll"]) - right) - abs(fmean(theirs["nll"]) - right)
    allowed = MORE_PERPLEXITY + STANDARD_ERRORS * Difference.of(ours["nll"], theirs["nll"]).error
    if not further <= allowed:
        return Row(name, "fail", *numbers, note=f"WRONG: its logarithm is {further:.3f} further from float32's, rounding is up to {allowed:.3f}")
    return Row(name, "ok", *numbers)


def judge_errors(name: str, theirs: Passage, ours: Passage, float32: Passage) -> Row:
    """Wrong where errors of logits are larger than those of MLX, by their root mean square, and not by chance."""
    ours_squared, theirs_squared = (squared_errors(each["values"], float32["values"]) for each in (ours, theirs))
    own, upstream = (math.sqrt(fmean(each)) for each in (ours_squared, theirs_squared))
    if not math.isfinite(own):
        return Row(name, "fail" if math.isfinite(upstream) else "skip", upstream, None, note="logits are not finite")

    def exceeds(times: float) -> bool:
        beyond = Difference.of(ours_squared, [times**2 * each for each in theirs_squared])
        return own > RESOLUTION and beyond.mean > STANDARD_ERRORS * beyond.error

    status: Status = "fail" if exceeds(WRONG_ERROR) else "warn" if exceeds(MORE_ERROR) else "ok"
    limit = {"fail": WRONG_ERROR, "warn": MORE_ERROR}.get(status)
    return Row(name, status, upstream, own, note=f"{'WRONG: ' * (status == 'fail')}over {limit} times MLX's" if limit else "")


def first_difference(theirs: list[int], ours: list[int]) -> int | None:
    """The first place at which the tokens differ."""
    return next((place for place, (a, b) in enumerate(zip(theirs, ours, strict=True)) if a != b), None)


def judge_answers(name: str, theirs: list[Answer], ours: list[Answer], judged: list[Judged] | None, tie: float | None) -> Row:
    """Wrong where a token lies further below the best one, in float32, than rounding explains.

    Where both sides differ first, they have read the same, so both tokens are judged by the same logits; after that each goes on with a
    text of its own, and is judged by its own.
    """
    count = sum(len(each["tokens"]) for each in theirs)
    places = [first_difference(a["tokens"], b["tokens"]) for a, b in zip(theirs, ours, strict=True)]
    equal = sum(len(each["tokens"]) if place is None else place for each, place in zip(theirs, places, strict=True))
    numbers = (name, float(count), float(equal))
    differing = [place for place in places if place is not None]
    if not differing:
        return Row(numbers[0], "ok", *numbers[1:], unit="tokens", note="all equal")
    note = f"{len(places) - len(differing)} of {len(places)} answers equal, others up to token {min(differing)} or later"
    if judged is None or tie is None:
        return Row(numbers[0], "fail", *numbers[1:], unit="tokens", note=f"{note}; float32, which decides, could not be computed")
    wrong, margins = [], []
    for number, (place, each) in enumerate(zip(places, judged, strict=True), start=1):
        if place is not None and each["patched"] is not None:
            margins.append(abs(each["patched"][place] - each["upstream"][place]))
            wrong += [(number, at, below) for at, below in enumerate(each["patched"]) if not below <= tie]
    note += f"; there the two are {max(margins):.2g} apart in float32 at most, and a tie is up to {tie:.2g}"
    if not wrong:
        return Row(numbers[0], "ok", *numbers[1:], unit="tokens", note=f"{note}: tie")
    number, at, below = wrong[0]
    note = f"WRONG: token {at} of answer {number} lies {below:.2g} below the best in float32, and a tie is up to {tie:.2g}; {note}"
    return Row(numbers[0], "fail", *numbers[1:], unit="tokens", note=note)


def tie_of(upstream: Side, float32: Side) -> float | None:
    """How far apart two tokens may be in float32 for 16 bits to choose either: by the errors of MLX itself, wherever they are known."""
    passages = [
        (upstream["passages"][name]["values"], right["values"]) for name, right in float32.get("passages", {}).items() if name != "cache"
    ]
    answers = [
        (each["values"], right["values"])
        for name, judged in float32.get("judged", {}).items()
        for each, right in zip(upstream["answers"][name], judged, strict=True)
    ]
    largest = [largest_error(*pair) for pair in (*passages, *answers)]
    finite = [each for each in largest if math.isfinite(each)]
    return max(RESOLUTION, TIE * max(finite)) if finite else None


def _failed(name: str, upstream: Side, patched: Side, part: str) -> Row | None:
    """A row for a part that failed on one side or both."""
    theirs, ours = (side.get("errors", {}).get(part) for side in (upstream, patched))
    if theirs is not None:
        return Row(name, "skip", note=f"not without patch() either: {theirs}" if ours is not None else f"not without patch(): {theirs}")
    return None if ours is None else Row(name, "fail", note=f"with patch() it fails: {ours}")


def _speed(name: str, upstream: Side, patched: Side, part: str, key: str) -> Row:
    failed = _failed(name, upstream, patched, part)
    if failed is not None:
        return failed
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
        rows.append(judge_perplexity(name, *passages, right))
        if right is not None:
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
            mebibytes = (side["memory"][key] / 2**20 for side in (upstream, patched))
            rows.append(Row(f"peak memory, {shown}", "ok", *mebibytes, unit="MiB"))
    return rows


def judge(
    model: str, upstream: Side, patched: Side, float32: Side, *, quick: bool, seconds: float, crashes: dict[SideName, str]
) -> ModelCheck:
    """The rows, and whether one of them is wrong. ``crashes``: of processes that ended without a result."""
    rows = []
    if crashed := crashes.get("patched"):
        rows.append(Row("patch()", "fail", note=crashed))
    elif patched["unused"]:
        shown = "python -m mlx_cuda doctor names the cure: " if patched["broken"] else "both sides are MLX's own: "
        rows.append(Row("kernels", "fail" if patched["broken"] else "skip", note=shown + patched["unused"]))
    if crashed := crashes.get("float32"):
        rows.append(Row("float32", "warn", note=f"could not be computed: {crashed}"))
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
