"""Whether a model's words are as good as float32 allows, by numbers for each position: perplexity, ties, errors of the logits.

Logits of 16 bits lie on a coarse grid, so two tokens that float32 puts close together may change places by one rounding. Such a place is
a tie: float32's own logits of the two are no further apart than twice the largest error of upstream's. Elsewhere the best token of
float32 is the only right one.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

LARGER = 1.10  # of upstream's error of the logits: what a patched model's may be
DEVIATIONS = 3.0  # standard errors by which perplexities may be apart, beside what upstream's is


@dataclass(frozen=True)
class Reading:
    """Of one side, a number for each position. Errors are those of logits from which their mean is taken off, which no token feels."""

    nll: Sequence[float]  # minus the logarithm of the probability of the token that follows
    best: Sequence[int]  # its best token
    lost: Sequence[float]  # by how much float32 puts that token below its own best
    error: Sequence[float]  # in norm, relative to float32's logits
    most: Sequence[float]  # of one logit among float32's best


@dataclass(frozen=True)
class Difference:
    """The first token at which two sides part: by how much float32 prefers one of the two, and how far off each side's logits are."""

    position: int
    tokens: Mapping[str, int]
    best: int  # float32's
    gap: float  # between the logits of the two tokens in float32
    tie: bool
    error: Mapping[str, float]

    @property
    def nearer(self) -> str:
        """The side whose logits are nearer to float32's."""
        return min(self.error, key=lambda side: self.error[side])

    @property
    def right(self) -> list[str]:
        """The sides that chose as float32 does."""
        return [side for side, token in self.tokens.items() if token == self.best]

    def __str__(self) -> str:
        kind = f"tie by {self.gap:.3g}" if self.tie else f"{' and '.join(self.right) or 'neither'} right by {self.gap:.3g}"
        errors = ", ".join(f"{side} {error:.2%}" for side, error in self.error.items())
        return f"at {self.position}: {kind}; {self.nearer} is nearer to float32 ({errors})"


def perplexity(nll: Sequence[float]) -> float:
    return math.exp(statistics.fmean(nll))


def root_mean_square(values: Sequence[float]) -> float:
    return math.sqrt(statistics.fmean(value * value for value in values))


def near(*upstream: Reading) -> float:
    """Logits of float32 that are no further apart than this are a tie."""
    return 2 * max(value for reading in upstream for value in reading.most)


def wrong(reading: Reading, closest: float) -> list[int]:
    """The positions outside ties at which another token than float32's is the best."""
    return [position for position, lost in enumerate(reading.lost) if not lost <= closest]


def further(one: Sequence[float], other: Sequence[float]) -> tuple[float, float]:
    """The mean of the first less the second, and its standard error: what two sides say of the same tokens."""
    differences = [a - b for a, b in zip(one, other, strict=True)]
    count, mean = len(differences), statistics.fmean(differences)
    return mean, math.sqrt(sum((each - mean) ** 2 for each in differences) / max(1, count - 1) / count)


def compare(exact: Sequence[float], upstream: Reading, patched: Reading) -> dict[str, Any]:
    """What the sides' readings of one text add up to; ``exact``: float32's ``nll``."""
    sides, closest = {"upstream": upstream, "patched": patched}, near(upstream)
    return {
        "positions": len(exact),
        "perplexity": {"float32": perplexity(exact), **{name: perplexity(side.nll) for name, side in sides.items()}},
        "nll above float32's": {name: further(side.nll, exact)[0] for name, side in sides.items()},
        "patched nll above upstream's": dict(zip(("mean", "standard error"), further(patched.nll, upstream.nll), strict=True)),
        "error": {name: root_mean_square(side.error) for name, side in sides.items()},
        "tie": closest,
        "other tokens": {name: sum(lost > 0 for lost in side.lost) for name, side in sides.items()},
        "wrong tokens": {name: len(wrong(side, closest)) for name, side in sides.items()},
    }


def worse(result: Mapping[str, Any]) -> list[str]:
    """In what a patched model is worse than it may be, by what ``compare`` found."""
    found = []
    errors, above = result["error"], result["nll above float32's"]
    if not errors["patched"] <= LARGER * errors["upstream"]:
        found.append(f"error of the logits {errors['patched']:.3%}, upstream's {errors['upstream']:.3%}")
    apart = result["patched nll above upstream's"]["standard error"]
    if not abs(above["patched"]) <= abs(above["upstream"]) + DEVIATIONS * apart:
        shown = ", ".join(f"{side} {value:.4f}" for side, value in result["perplexity"].items())
        found.append(f"perplexity is further from float32's than chance explains: {shown}")
    if result["wrong tokens"]["patched"]:
        found.append(f"{result['wrong tokens']['patched']} of {result['positions']} tokens are not float32's best, and no ties")
    return found


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Where two sequences part; None where one is the beginning of the other."""
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), None)


def worse_curve(exact: Sequence[float], upstream: Sequence[float], patched: Sequence[float]) -> list[str]:
    """In what a patched training's losses are worse than they may be: further from float32's than upstream's, or not falling as these do.

    Losses of a few steps are near one another whoever computes: a thousandth of them is not told apart.
    """
    if not all(map(math.isfinite, patched)):
        return ["a loss is not a number"]
    off = {name: root_mean_square([a - b for a, b in zip(side, exact, strict=True)]) for name, side in (("u", upstream), ("p", patched))}
    found = []
    if off["p"] > LARGER * off["u"] + statistics.fmean(exact) / 1000:
        found.append(f"losses are off float32's by {off['p']:.4f}, upstream's by {off['u']:.4f}")
    tail = max(1, len(exact) // 5)
    begin, end = statistics.fmean(patched[:tail]), statistics.fmean(patched[-tail:])
    if not end < begin:
        found.append(f"losses do not fall: {begin:.4f} to {end:.4f}")
    return found
