"""Requests that arrive at random and are served at once by mlx-lm's ``BatchGenerator``: their tokens, when each came, and what they add
up to.
"""

from __future__ import annotations

import itertools
import math
import random
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

import mlx.core as mx

SAID_EVERY = 10.0  # seconds between two lines of progress
LONGEST_WAIT = 0.05  # seconds of sleep where nobody is served and nobody is due
METHODS = ("merge", "extend", "filter", "extract", "finalize")  # of caches: what batches are put together and taken apart with


@dataclass(frozen=True)
class Request:
    """``arrival`` in seconds after the first one's; ``tokens``: how many are to be generated."""

    arrival: float
    prompt: list[int]
    tokens: int


def draw(count: int, rate: float, lengths: tuple[int, int], vocabulary: int, seed: int = 0, vary: float = 0.0) -> list[Request]:
    """Requests with random tokens, ``rate`` of them a second on the average (0: all at once), with a prompt and generated tokens of
    ``lengths``, each up to ``vary`` of it shorter or longer. The same seed gives the same.
    """
    chance = random.Random(seed)  # noqa: S311
    requests, now = [], 0.0
    for index in range(count):
        now += chance.expovariate(rate) if rate and index else 0.0
        prompt, tokens = (max(1, round(length * (1 + vary * chance.uniform(-1, 1)))) for length in lengths)
        requests.append(Request(now, [chance.randrange(vocabulary) for _ in range(prompt)], tokens))
    return requests


def percentile(values: Sequence[float], share: float) -> float | None:
    """The value that ``share`` of them do not exceed, between two of them where it lies there; None of none."""
    if not values:
        return None
    ordered = sorted(values)
    at = share * (len(ordered) - 1)
    low, high = ordered[math.floor(at)], ordered[math.ceil(at)]
    return low + (high - low) * (at - math.floor(at))


@dataclass
class Answer:
    """Of a request: its tokens, and seconds after the start at which each came."""

    request: Request
    tokens: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    finished: bool = False


@dataclass
class Served:
    """Answers in the order of arrival, and how many sequences each decoding step had; ``joins``: first steps of those that joined;
    ``idle``: seconds in which nobody was there.
    """

    answers: list[Answer]
    sizes: list[int] = field(default_factory=list)
    joins: int = 0
    seconds: float = 0.0
    idle: float = 0.0
    limited: bool = False

    @property
    def tokens(self) -> int:
        return sum(len(answer.tokens) for answer in self.answers)

    @property
    def span(self) -> float:
        """Seconds from the first arrival to the last token, or to the limit that ended it."""
        return self.seconds if self.limited else max((answer.times[-1] for answer in self.answers if answer.times), default=0.0)

    @property
    def gaps(self) -> list[float]:
        """Seconds between the tokens of a request, of all requests."""
        return [after - before for answer in self.answers for before, after in itertools.pairwise(answer.times)]

    @property
    def waits(self) -> list[float]:
        """Seconds to the first token."""
        return [answer.times[0] - answer.request.arrival for answer in self.answers if answer.times]


def note(responses: Sequence[Any], answers: dict[int, Answer], at: float, *, logprobs: bool = False) -> None:
    """Add what the generator gave to the answers by their uid; those that are finished are taken out."""
    for response in responses:
        answer = answers[response.uid]
        answer.tokens.append(response.token)
        answer.times.append(at)
        if logprobs:  # the server reads each token's own
            response.logprobs[response.token].item()
        if response.finish_reason is not None:
            answer.finished = True
            del answers[response.uid]


def serve(
    generator: Any,
    requests: Sequence[Request],
    seconds: float | None = None,
    log: Callable[[str], None] = lambda _: None,
    *,
    logprobs: bool = False,
) -> Served:
    """Serve requests that come in the order of their arrival, for ``seconds`` at most.

    A request's tokens get the time at which the generator gave them. Caches of finished ones are dropped.
    """
    served = Served([Answer(request) for request in requests])
    waiting, under_way = deque(served.answers), dict[int, Answer]()
    start = said = time.perf_counter()
    while waiting or under_way:
        now = time.perf_counter() - start
        if seconds is not None and now > seconds:
            served.limited = True
            break
        due = []
        while waiting and waiting[0].request.arrival <= now:
            due.append(waiting.popleft())
        if due:
            uids = generator.insert([answer.request.prompt for answer in due], [answer.request.tokens for answer in due])
            under_way.update(zip(uids, due, strict=True))
        if not under_way:
            time.sleep(min(LONGEST_WAIT, waiting[0].request.arrival - now))
            served.idle += time.perf_counter() - start - now
            continue
        prompts, responses = generator.next()
        note(responses, under_way, time.perf_counter() - start, logprobs=logprobs)
        served.sizes += [len(responses)] if responses else []
        served.joins += any(prompt.end_of_prompt for prompt in prompts)
        if time.perf_counter() - said > SAID_EVERY:
            said = time.perf_counter()
            log(f"{said - start:.0f} s: {served.tokens} tokens, {len(under_way)} requests under way, {len(waiting)} to come")
    served.seconds = time.perf_counter() - start
    return served


def equal_start(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens are equal before the first that is not."""
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def figures(served: Served, stats: Any) -> dict[str, Any]:
    """What a served run adds up to; ``stats`` are the generator's own counters."""

    def milliseconds(values: list[float]) -> dict[str, float | None]:
        found = {"50th": percentile(values, 0.5), "99th": percentile(values, 0.99), "most": percentile(values, 1.0)}
        return {name: None if value is None else 1e3 * value for name, value in found.items()}

    return {
        "ended by the limit": served.limited,
        "requests finished": sum(answer.finished for answer in served.answers),
        "requests begun": sum(bool(answer.tokens) for answer in served.answers),
        "seconds": served.span,
        "tokens": served.tokens,
        "prompt tokens": stats.prompt_tokens,
        "between tokens, ms": milliseconds(served.gaps),
        "to the first token, ms": milliseconds(served.waits),
        "mean batch": sum(served.sizes) / len(served.sizes) if served.sizes else None,
        "largest batch": max(served.sizes, default=0),
        "changes of the batch's size": sum(before != after for before, after in itertools.pairwise(served.sizes)),
        "decoding steps": len(served.sizes),
        "first steps of joining requests": served.joins,
        "wall clock": {
            "prompt steps": stats.prompt_time,
            "decoding steps": stats.decode_time,
            "joining and the rest": max(0.0, served.seconds - stats.prompt_time - stats.decode_time - served.idle),
            "nobody there": served.idle,
        },
    }


class CacheCalls:
    """Counts and times what mlx-lm's caches are put together and taken apart with; the outermost calls alone, while ``counting``.

    MLX does all that lazily, so each call waits for the device before and after: the run as a whole is slower than without. And what is
    extracted is computed, which MLX leaves where nobody reads it.
    """

    def __init__(self, module: Any) -> None:
        self.counting = self._inside = False
        self.calls: Counter[str] = Counter()
        self.seconds = dict.fromkeys(METHODS, 0.0)
        self._own: list[tuple[type, str, Any]] = []
        classes = [each for each in vars(module).values() if isinstance(each, type) and each.__module__ == module.__name__]
        self._found = [(cls, name, vars(cls)[name]) for cls in classes for name in METHODS if name in vars(cls)]

    def __enter__(self) -> CacheCalls:
        for cls, name, own in self._found:
            timed = self._timed(name, own.__func__ if isinstance(own, classmethod) else own)
            setattr(cls, name, classmethod(timed) if isinstance(own, classmethod) else timed)
            self._own.append((cls, name, own))
        return self

    def __exit__(self, *_: object) -> None:
        while self._own:
            setattr(*self._own.pop())

    def _timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def call(*arguments: Any, **options: Any) -> Any:
            if not self.counting or self._inside:
                return function(*arguments, **options)
            self._inside = True
            try:
                mx.synchronize()
                start = time.perf_counter()
                result = function(*arguments, **options)
                self._wait(arguments[0] if name not in {"merge", "extract"} else result)
                self.calls[name] += 1
                self.seconds[name] += time.perf_counter() - start
                return result
            finally:
                self._inside = False

        return call

    @staticmethod
    def _wait(cache: Any) -> None:
        """Have what a cache holds computed."""
        if not cache.empty():
            mx.eval(cache.state)
        mx.synchronize()

    def to_json(self) -> dict[str, dict[str, float]]:
        return {name: {"calls": self.calls[name], "seconds": self.seconds[name]} for name in METHODS if self.calls[name]}
