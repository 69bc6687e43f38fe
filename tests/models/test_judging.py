"""Perplexities, ties and errors of invented readings."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from .judging import (
    Difference,
    Reading,
    compare,
    first_difference,
    further,
    near,
    perplexity,
    root_mean_square,
    worse,
    worse_curve,
    wrong,
)

COUNT = 40
EXACT = [1.0 + 0.1 * (index % 7) for index in range(COUNT)]


def reading(**changes: Any) -> Reading:
    """A side that is off by a little, one way and the other."""
    nll = [value + 0.01 * (-1) ** index for index, value in enumerate(EXACT)]
    return replace(Reading(nll, [5] * COUNT, [0.0] * COUNT, [0.02] * COUNT, [0.1] * COUNT), **changes)


def test_perplexity_is_that_of_the_mean() -> None:
    assert perplexity([math.log(2), math.log(8)]) == pytest.approx(4)


def test_how_much_further_one_is_has_an_error_of_its_own() -> None:
    mean, error = further([1.1, 2.3, 3.2], [1.0, 2.0, 3.0])
    assert mean == pytest.approx(0.2)
    assert error == pytest.approx(0.1 / math.sqrt(3))
    assert further([2.0], [1.0]) == (1.0, 0.0)


def test_a_tie_is_within_twice_upstreams_largest_error() -> None:
    closest = near(reading(), reading(most=[0.1] * (COUNT - 1) + [0.3]))
    assert closest == pytest.approx(0.6)
    lost = [0.0, 0.5, 0.7, math.nan]
    assert wrong(reading(lost=lost), closest) == [2, 3]


def test_a_side_like_upstreams_is_not_worse() -> None:
    result = compare(EXACT, reading(), reading(error=[0.0219] * COUNT, lost=[0.0, 0.19] * (COUNT // 2)))
    assert worse(result) == []
    assert result["other tokens"] == {"upstream": 0, "patched": COUNT // 2}
    assert result["wrong tokens"] == {"upstream": 0, "patched": 0}
    assert result["perplexity"]["float32"] == pytest.approx(perplexity(EXACT))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"error": [0.0221] * COUNT}, "error of the logits 2.210%, upstream's 2.000%"),
        ({"error": [math.nan] * COUNT}, "error of the logits nan%, upstream's 2.000%"),
        ({"lost": [0.0, 0.21] * (COUNT // 2)}, "20 of 40 tokens are not float32's best, and no ties"),
        ({"nll": [value + 0.01 for value in EXACT]}, "perplexity is further from float32's than chance explains: float32 "),
        ({"nll": [value - 0.01 for value in EXACT]}, "perplexity is further from float32's than chance explains: float32 "),
        ({"nll": [math.nan] * COUNT}, "perplexity is further from float32's than chance explains: float32 "),
    ],
)
def test_what_is_worse_is_said(changes: dict[str, Any], reason: str) -> None:
    (found,) = worse(compare(EXACT, reading(), reading(**changes)))
    assert found.startswith(reason)


def test_root_mean_square_counts_what_is_large() -> None:
    assert root_mean_square([3.0, -4.0]) == pytest.approx(math.sqrt(12.5))


@pytest.mark.parametrize(("one", "other", "place"), [([1, 2, 3], [1, 5, 3], 1), ([1, 2], [1, 2, 3], None), ([], [], None)])
def test_where_answers_part(one: list[int], other: list[int], place: int | None) -> None:
    assert first_difference(one, other) == place


def test_a_difference_says_whose_logits_are_nearer() -> None:
    found = Difference(4, {"upstream": 7, "patched": 9}, 9, 0.25, True, {"upstream": 0.02, "patched": 0.01})
    assert (found.nearer, found.right) == ("patched", ["patched"])
    assert str(found) == "at 4: tie by 0.25; patched is nearer to float32 (upstream 2.00%, patched 1.00%)"
    found = replace(found, best=1, tie=False)
    assert found.right == []
    assert str(found).startswith("at 4: neither right by 0.25; ")


FALLING = [3.0 - 0.02 * step for step in range(50)]


@pytest.mark.parametrize(
    ("patched", "reasons"),
    [
        (FALLING, []),
        ([value + 0.003 for value in FALLING], []),  # a thousandth of a loss
        ([value + 0.02 for value in FALLING], ["losses are off float32's by 0.0200, upstream's by 0.0010"]),
        ([3.0] * 50, ["losses are off float32's by 0.5687, upstream's by 0.0010", "losses do not fall: 3.0000 to 3.0000"]),
        ([math.nan] * 50, ["a loss is not a number"]),
    ],
)
def test_curves(patched: list[float], reasons: list[str]) -> None:
    assert worse_curve(FALLING, [value + 0.001 for value in FALLING], patched) == reasons
