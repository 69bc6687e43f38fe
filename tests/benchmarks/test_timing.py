"""How time is measured: batches of the same length, sides in fair turns, what costs the others nothing."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest

from benchmarks import clock
from benchmarks.record import SideResult
from benchmarks.timing import Batch, Settings, Side, Timing, in_turn, measure


class SlowEngine:
    """Takes the seconds it is told, by its own clock, and fails at one of its batches."""

    def __init__(self, seconds: float, fails_at: int = -1) -> None:
        self.seconds = seconds
        self.fails_at = fails_at
        self.batches = 0

    def batch(self, call: object, inputs: object, count: int) -> Batch:  # noqa: ARG002
        self.batches += 1
        if self.batches == self.fails_at:
            raise RuntimeError("out of memory")
        return Batch(self.seconds * count)

    def peak_bytes(self, call: object, inputs: object) -> int:  # noqa: ARG002
        return 0


@pytest.mark.parametrize(("seconds", "samples"), [(1e-4, 8), (0.05, 6), (0.3, 1), (3.0, 1)])
def test_slow_sides_get_fewer_batches(seconds: float, samples: int) -> None:
    measured = measure([Side("ours", SlowEngine(seconds), print, [()])], 1, Settings(repetitions=8, side_seconds=0.3))
    assert isinstance(timing := measured["ours"], Timing)
    assert timing.wall == pytest.approx([seconds] * samples)
    assert SideResult.of(timing).quartiles == pytest.approx((seconds, seconds))


@pytest.mark.parametrize("count", range(1, 7))
def test_a_round_is_fair(count: int) -> None:
    """Each side is at each place, and right after each other one, equally often."""
    sides = [Side(str(number), SlowEngine(0.02), print, [()]) for number in range(count)]
    turns = Settings(repetitions=1).turns(count)
    orders = [[side.name for side in in_turn(sides, turn)] for turn in range(turns)]
    assert all(len(set(order)) == count for order in orders)
    places = Counter((place, name) for order in orders for place, name in enumerate(order))
    after = Counter(pair for order in orders for pair in itertools.pairwise(order))
    assert set(places.values()) == {turns // count}
    assert len(after) == count * (count - 1)
    assert set(after.values()) <= {turns // count}
    assert Settings(repetitions=2 * turns).turns(count) == 2 * turns


def test_every_side_is_warmed_up_and_timed_by_batches_of_the_same_length() -> None:
    fast, slow = SlowEngine(1e-4), SlowEngine(2e-3)
    measured = measure([Side("ours", fast, print, [()]), Side("upstream", slow, print, [()])], 1, Settings(repetitions=4))
    for timing, seconds in zip(measured.values(), (1e-4, 2e-3), strict=True):
        assert isinstance(timing, Timing)
        assert 0.03 <= timing.calls_per_batch * seconds <= 0.04
        assert len(timing.wall) == 4


def test_memory_that_is_given_at_first_makes_no_batch_shorter() -> None:
    class FirstTouch(SlowEngine):
        most = 1

        def batch(self, call: object, inputs: object, count: int) -> Batch:
            new, self.most = max(count - self.most, 0), max(count, self.most)
            return Batch(super().batch(call, inputs, count).wall + new * 5e-3)

    timing = measure([Side("ours", FirstTouch(1e-3), print, [()])], 1, Settings(repetitions=2))["ours"]
    assert isinstance(timing, Timing)
    assert timing.wall == pytest.approx([1e-3] * len(timing.wall))
    assert 0.03 <= timing.calls_per_batch * 1e-3 <= 0.04


def test_clocks_are_kept_where_they_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    for known in 1980, None:
        monkeypatch.setattr("benchmarks.timing.read_clock", lambda known=known: known)
        timing = measure([Side("ours", SlowEngine(0.02), print, [()])], 1, Settings(repetitions=2))["ours"]
        details = SideResult.from_json(SideResult.of(timing).to_json()).details
        assert details.get("clocks") == (known and [known, known])


def test_a_machine_without_the_driver_has_no_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.clock.LIBRARY", "libof-no-driver.so")
    clock._library.cache_clear()
    try:
        assert clock.read_clock() is None
    finally:
        clock._library.cache_clear()


def test_a_side_that_fails_in_the_middle_costs_the_others_nothing() -> None:
    sides = [Side("ours", SlowEngine(0.02), print, [()]), Side("broken", SlowEngine(0.02, fails_at=5), print, [()])]
    measured = measure(sides, 1, Settings(repetitions=7))
    assert isinstance(measured["ours"], Timing)
    assert str(measured["broken"]) == "out of memory"
