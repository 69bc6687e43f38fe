"""Minutes of requests at random through mlx-lm's ``BatchGenerator``: whether memory grows, and whether a request's tokens depend on who
else is in the batch.

Lengths, arrivals and cancellations are random. A few greedy requests are served alone first and come again and again in other company. Now
and then nobody joins until nobody is left, half of the times because all are cancelled: then memory is read.
"""

from __future__ import annotations

import gc
import random
import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from .provenance import memory_used
from .requests import LONGEST_WAIT, Answer, Request, draw, equal_start, note, serve

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

READ_EVERY = 10.0  # seconds
FEWEST_READINGS = 8  # of which two are a quarter
CANCELLED, REPEATED = 0.2, 0.15  # the parts of the requests
DIFFERENT_REPEATED = 4
MIB = 2**20


def resident() -> float | None:
    """MiB of the host's memory that this process has, where the system tells it."""
    try:
        lines = Path("/proc/self/status").read_text("utf-8").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS:")), None)


def growth(readings: Sequence[dict[str, float | None]]) -> dict[str, float | None]:
    """MiB by which the last quarter's median is above the second quarter's, without what recordings have; None of too few readings.

    Recordings come and go with the sizes of batches, and have a limit of their own.
    """
    quarter = len(readings) // 4

    def median(part: Sequence[dict[str, float | None]], name: str) -> float | None:
        known = [(each[name], each["recordings"] or 0.0 if name != "host" else 0.0) for each in part]
        values = [value - captured for value, captured in known if value is not None]
        return statistics.median(values) if values else None

    found: dict[str, float | None] = {}
    for name in ("active", "driver", "host"):
        before, after = median(readings[quarter : 2 * quarter], name), median(readings[-quarter:], name)
        enough = len(readings) >= FEWEST_READINGS and before is not None and after is not None
        found[name] = after - before if enough and before is not None and after is not None else None
    return found


class Soak:
    """``lengths``: the longest prompt and the most tokens; ``most``: requests that are there at a time; ``captures``: bytes of those."""

    def __init__(
        self,
        make: Callable[[], Any],
        lengths: tuple[int, int],
        vocabulary: int,
        *,
        rate: float,
        most: int,
        seed: int = 0,
        captures: Callable[[], int] = lambda: 0,
        log: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.make, self.generator = make, make()
        self.lengths, self.vocabulary, self.rate, self.most = lengths, vocabulary, rate, most
        self.captures, self.log = captures, log
        self.chance = random.Random(seed)  # noqa: S311
        self.open: dict[int, Answer] = {}
        self.ends: dict[int, int] = {}  # after how many tokens a request is cancelled
        self.comes_again: dict[int, int] = {}  # which of the repeated ones it is
        self.requests = self.cancelled = self.tokens = self.steps = 0
        self.readings: list[dict[str, float | None]] = []
        self.first_differences: list[int | None] = []  # None: there is none
        self.failures: list[str] = []
        self.repeated = draw(DIFFERENT_REPEATED, 0, lengths, vocabulary, seed, vary=0.5)
        self.alone = [serve(make(), [request]).answers[0].tokens for request in self.repeated]

    def run(self, seconds: float) -> None:
        """For so long, or longer, until there are enough readings to judge growth by."""
        start = last = time.monotonic()
        come = 0.0
        while time.monotonic() - start < seconds or len(self.readings) < FEWEST_READINGS - 1:  # the last one comes after
            now = time.monotonic() - start
            while come <= now:
                come = max(come, now - 1) + (self.chance.expovariate(self.rate) if self.rate else LONGEST_WAIT)
                if len(self.open) < self.most:
                    self._insert()
            if self.open:
                self._step()
            else:
                time.sleep(min(LONGEST_WAIT, max(0.0, come - now)))
            if time.monotonic() - last > READ_EVERY:
                self._read(start)
                last = time.monotonic()
        self._read(start)

    def _insert(self) -> None:
        again = self.chance.randrange(DIFFERENT_REPEATED) if self.chance.random() < REPEATED else None
        if again is None:
            prompt, tokens = (round(most ** self.chance.random()) for most in self.lengths)
            request = Request(0.0, [self.chance.randrange(self.vocabulary) for _ in range(prompt)], tokens)
        else:
            request = self.repeated[again]
        (uid,) = self.generator.insert([request.prompt], [request.tokens])
        self.open[uid] = Answer(request)
        self.requests += 1
        if again is not None:
            self.comes_again[uid] = again
        elif self.chance.random() < CANCELLED:
            self.ends[uid] = self.chance.randrange(request.tokens + 1)

    def _step(self) -> None:
        under_way = dict(self.open)
        _, responses = self.generator.next()
        self.steps += bool(responses)
        note(responses, self.open, 0.0)
        self.tokens += len(responses)
        for uid in under_way.keys() - self.open.keys():
            self._finished(uid, under_way[uid])
        self._cancel([uid for uid, end in self.ends.items() if len(self.open[uid].tokens) >= end])

    def _finished(self, uid: int, answer: Answer) -> None:
        self.ends.pop(uid, None)
        if len(answer.tokens) != answer.request.tokens or not all(0 <= token < self.vocabulary for token in answer.tokens):
            self.failures.append(f"a request gave {len(answer.tokens)} tokens of {answer.request.tokens}: {answer.tokens[:5]}, …")
        if uid in self.comes_again:
            alone = self.alone[self.comes_again.pop(uid)]
            equal = equal_start(answer.tokens, alone)
            self.first_differences.append(None if equal == len(alone) else equal)

    def _cancel(self, uids: Sequence[int]) -> None:
        if uids:
            self.generator.remove(uids)
        for uid in uids:
            del self.open[uid]
            self.ends.pop(uid, None)
            self.comes_again.pop(uid, None)
        self.cancelled += len(uids)

    def _read(self, start: float) -> None:
        """Memory with nobody there, which is what may not grow."""
        if self.chance.random() < 0.5:
            self._cancel(list(self.open))
        while self.open:
            self._step()
        gc.collect()
        mx.synchronize()
        mx.clear_cache()
        reading = {
            "at": time.monotonic() - start,
            "active": mx.get_active_memory() / MIB,
            "recordings": self.captures() / MIB,
            "driver": memory_used(),
            "host": resident(),
        }
        self.readings.append(reading)
        different = sum(each is not None for each in self.first_differences)
        memory = ", ".join(f"{name} {value:.0f}" for name, value in reading.items() if name != "at" and value is not None)
        self.log(
            f"{reading['at']:.0f} s: {self.requests} requests, {self.cancelled} cancelled, {self.tokens} tokens; "
            f"{different} of {len(self.first_differences)} repeated ones differ; MiB: {memory}"
        )

    def to_json(self, most_growth: float) -> dict[str, Any]:
        """What came of it; a kind of memory that grew by more than ``most_growth`` MiB is a failure."""
        grown = growth(self.readings)
        failures = [*self.failures]
        failures += [f"{name} memory grew by {by:.0f} MiB" for name, by in grown.items() if by is not None and by > most_growth]
        return {
            "requests": self.requests,
            "cancelled": self.cancelled,
            "tokens": self.tokens,
            "decoding steps": self.steps,
            "repeated": len(self.first_differences),
            "first differences": [each for each in self.first_differences if each is not None],
            "growth, MiB": grown,
            "most growth, MiB": most_growth,
            "readings, MiB": self.readings,
            "failures": failures,
        }
