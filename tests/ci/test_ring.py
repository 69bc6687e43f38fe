"""A model of the ring of `attention/decode/decode_sm90.cu`: what its barriers let happen when copies arrive in any order.

An mbarrier tells a wait by the parity of a phase alone. Where two warpgroups take tiles in turn and a stage belongs to now one and now
the other, a group may take the phase before the last for the one it waits for: it reads a tile that is not there, and in the end all wait.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from ci import matrix

SOURCE = matrix.REPOSITORY / "src/attention/decode"
PATIENCE = 20_000  # steps in which nothing happens


class ProtocolError(Exception):
    """What no order of events may lead to."""


@dataclass
class Barrier:
    """Arrivals and announced copies of a phase; it is over when none is missing."""

    arrivals: int
    phase: int = 0
    copies: int = 0
    missing: int = field(init=False)

    def __post_init__(self) -> None:
        self.missing = self.arrivals

    def arrive(self) -> None:
        self.missing -= 1
        if self.missing < 0:
            raise ProtocolError("more arrivals than a phase has")
        self._turn()

    def complete(self) -> None:
        self.copies -= 1
        self._turn()

    def over(self, parity: int) -> bool:
        return self.phase % 2 != parity

    def _turn(self) -> None:
        if self.missing == 0 and self.copies == 0:
            self.phase += 1
            self.missing = self.arrivals


class Ring:
    """One block: a producer, and two groups that take tiles in turn (`slices` 2) or all of them (1). A group arrives as one."""

    def __init__(self, stages: int, slices: int, units: list[int], chance: random.Random) -> None:
        self.stages, self.slices, self.units, self.chance = stages, slices, units, chance
        self.full = [Barrier(1) for _ in range(stages)]
        self.empty = [Barrier(3 - slices) for _ in range(stages)]
        self.tiles: list[int | None] = [None] * stages
        self.flying: list[tuple[int, int]] = []  # stage and tile
        self.met, self.meetings = 0, 0

    def producer(self) -> Iterator[None]:
        for turn in range(sum(self.units)):
            stage = turn % self.stages
            while not self.empty[stage].over(turn // self.stages % 2 ^ 1):
                yield
            self.full[stage].copies += 1
            self.full[stage].arrive()
            self.flying.append((stage, turn))
            yield

    def consumer(self, group: int, delay: int) -> Iterator[None]:
        first = 0
        for tiles in self.units:
            yield from self.meet()
            last = 0
            mine = range(group if self.slices == 2 else 0, tiles, self.slices)
            for count, tile in enumerate(mine):
                turn = first + tile
                stage = turn % self.stages
                while not self.full[stage].over(turn // self.stages % 2):
                    yield
                if self.tiles[stage] != turn:
                    raise ProtocolError(f"tile {turn} is not there yet")
                if count > 0:
                    self.empty[last].arrive()
                last = stage
                for _ in range(self.chance.randrange(delay)):
                    yield
            if mine:
                self.empty[last].arrive()
            first += tiles

    def meet(self) -> Iterator[None]:
        """Both groups have come to the next unit."""
        meeting = self.meetings
        self.met += 1
        if self.met == 2:
            self.met, self.meetings = 0, self.meetings + 1
        while self.meetings == meeting:
            yield

    def run(self) -> None:
        delays = [self.chance.randrange(1, 6) for _ in range(2)]
        actors = [self.producer(), *(self.consumer(group, delay) for group, delay in enumerate(delays))]
        idle = 0
        while actors:
            choice = self.chance.randrange(len(actors) + 1)
            if choice == len(actors):
                if self.flying:
                    late = self.chance.random() < 0.3  # what lies in the cache overtakes what comes from memory
                    stage, turn = self.flying.pop(self.chance.randrange(len(self.flying)) if late else 0)
                    self.tiles[stage] = turn
                    self.full[stage].complete()
                    idle = 0
                continue
            try:
                next(actors[choice])
                idle += 1
            except StopIteration:
                actors.pop(choice)
                idle = 0
            if idle > PATIENCE and not self.flying:
                raise ProtocolError("all wait")


def run(stages: int, slices: int, seed: int) -> None:
    chance = random.Random(seed)  # noqa: S311  (no secret)
    units = [chance.randrange(1, 30) for _ in range(chance.randrange(1, 5))]
    Ring(stages, slices, units, chance).run()


TRAITS = (SOURCE / "traits.h").read_text("utf-8")
STAGES = re.search(r"int stages\(\) const {\s+return width == 64 \? (\d+) : (\d+);", TRAITS[TRAITS.index("struct Sm90Traits") :])
COMPILED = sorted(int(number) for number in STAGES.groups()) if STAGES else []


@pytest.mark.parametrize("slices", [1, 2])
@pytest.mark.parametrize("stages", COMPILED)
def test_rings_that_are_compiled(stages: int, slices: int) -> None:
    for seed in range(2000):
        run(stages, slices, seed)


def test_the_model_sees_what_an_odd_number_of_stages_does() -> None:
    def fails(seed: int) -> bool:
        try:
            run(5, 2, seed)
        except ProtocolError:
            return True
        return False

    assert any(fails(seed) for seed in range(2000))


def test_there_are_rings() -> None:
    assert COMPILED
    assert "static_assert(kStages % kGroups == 0 && kStages >= 2 * kGroups" in (SOURCE / "decode_sm90.cu").read_text("utf-8")
