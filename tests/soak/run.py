"""A soak: rounds of requests of several clients at once, then known ones alone, then what the server holds."""

from __future__ import annotations

import argparse
import contextlib
import random
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from .children import Child, Silent
from .judging import FEWEST_READINGS, complaints, difference, errors, grown, growth, not_clean
from .traffic import Request, Traffic
from .wire import COMPLETIONS, HEALTH, Answer, Late, Reply, exchange, post, said

SERVER, BALLAST = "tests.soak.server", "tests.soak.ballast"
DEADLINE = 120.0  # seconds for a request, and for the server to be there
END = 30.0  # seconds in which it has to be gone after SIGINT
ENOUGH = 20  # failures, after which more tell nothing new
# What one gives mlx-lm's server where there is little memory: masks and scores are of so many tokens of so many prompts at a time.
LITTLE_MEMORY = {"--prompt-cache-bytes": "512MB", "--prefill-step-size": 512, "--prompt-concurrency": 4}
LENGTHS = range(40, 600)  # tokens of prompts alone, about: each number has a plan of cuDNN's with 2 MiB of the host's; 256 are kept
OF_THE_REST = 0.6  # of what is left of the GPU's memory: what MLX may use, which keeps what it frees until then


class Over(Exception):
    """Nothing more can be asked: the server hangs or is gone."""


class Soak:
    def __init__(self, options: argparse.Namespace, window: int, log: Path, say: Callable[[str], None]) -> None:
        self.options, self.window, self.log, self.say = options, window, log, say
        self.failures: list[str] = []
        self.counts: Counter[str] = Counter()  # by kind and status
        self.tokens = 0
        self.readings: list[dict[str, Any]] = []
        self.alone: dict[str, Answer] = {}
        self.first: dict[str, tuple[Any, ...]] = {}  # what repeated requests gave at the start
        self.judged: Counter[str] = Counter()  # known requests in company, and repeated ones
        self.replayed = 0
        self.seconds: dict[str, float] = {}
        self.over: str | None = None  # why nothing more can be asked
        self.lock = threading.Lock()
        self.ballast: Child | None = None
        self.server: Child

    def run(self) -> None:
        """Whatever happens, no process of ours is left, nor memory that one holds."""
        with self.log.open("wb") as log:
            try:
                self._start(log)
                self._rounds()
                self._stop()
            except Over as error:
                self.failures.append(str(error))
                self._ended_or_hangs()
            finally:
                for child in (getattr(self, "server", None), self.ballast):
                    if child is not None:
                        child.end()
        self.failures += [f"the server has written\n{each}" for each in errors(self.log.read_text("utf-8", "replace"))[:ENOUGH]]
        self.failures += grown(self.readings)
        if self.readings and self.readings[-1]["gpu"] and not self.options.upstream and not self.replayed:
            self.failures.append(f"no step was replayed: {'; '.join(self.readings[-1]['reasons'])}")
        self.failures += sorted({error for reading in self.readings for error in reading["errors"]})

    def _start(self, log: Any) -> None:
        words, options = [], self.options
        if options.fill:
            self.ballast = Child(["-m", BALLAST], log)
            total = self._asked(self.ballast, "read")["total"]
            words = ["--memory-limit", str(total * (1 - options.fill / 100) * OF_THE_REST)]
        words += ["--upstream"] * options.upstream
        of_mlx_lm = {"--model": options.model, "--port": options.port, "--log-level": "WARNING", **(LITTLE_MEMORY if options.fill else {})}
        self.server = Child(["-m", SERVER, *words, *(str(word) for pair in of_mlx_lm.items() for word in pair)], log)
        until = time.monotonic() + DEADLINE
        while (status := self._health()) != 200:
            if status or self.server.process.poll() is not None or time.monotonic() > until:
                raise Over(f"the server does not begin: {self._tail()}")
            time.sleep(0.1)
        self.traffic = Traffic(options.longest, self.window, 4.0, options.tokens)
        text = self.traffic.text(0, options.longest)
        letters = len(text) / self._answered({"prompt": text, "max_tokens": 1}, 5 * DEADLINE).prompt
        self.traffic = Traffic(options.longest, self.window, letters, options.tokens)
        for name in self.traffic.known:  # the first one may be computed otherwise than those that follow it: steps are captured meanwhile
            for logprobs in ({}, {}, {"top_logprobs": 11}):
                answer = self._alone(self.traffic.known_body(name, **logprobs))
                if logprobs:
                    self._say_best(name, answer)
                else:
                    self.alone[name] = answer
        for name, (sent, statuses) in self.traffic.malformed.items():  # each of them, once alone
            self._one(Request("malformed", name, sent, statuses))
        if self._asked(self.server, "read")["gpu"]:  # or these plans would be added for as long as requests come
            for length in (each for each in LENGTHS if each < self.window):
                self._answered({"prompt": self.traffic.text(7 * length, length), "max_tokens": 1, "seed": 1})
        self._check_health()
        time.sleep(1)
        self.threads = self._asked(self.server, "busy")["threads"]  # when it has nothing to do
        self.say(f"{len(self.alone)} known requests, {len(self.traffic.malformed)} malformed ones")

    def _say_best(self, name: str, answer: Answer) -> None:
        """Add what is the most likely in the place of each token, which says how wrong another one there is."""
        if answer.text != self.alone[name].text:  # as in _repeated: steps may have been captured meanwhile
            self.alone[name] = self._alone(self.traffic.known_body(name))
        alone = self.alone[name]
        if answer.text != alone.text:
            self.failures.append(f"alone, {name!r}, gave another text with top_logprobs: {answer.text!r}")
        if not len(answer.best) == len(alone.tokens) == alone.count:
            raise Over(f"alone, {name!r}: {len(alone.tokens)} tokens and {len(answer.best)} with the most likely ones, not {alone.count}")
        self.alone[name] = replace(alone, best=answer.best)

    def _health(self) -> int:
        """A status; 0 as long as nobody listens."""
        try:
            return exchange(self.options.port, HEALTH, DEADLINE).status
        except OSError:
            return 0

    def _rounds(self) -> None:
        begun = last = time.monotonic()
        options, number, filling = self.options, 0, False
        while len(self.failures) < ENOUGH and (time.monotonic() < begun + 60 * options.minutes or number < FEWEST_READINGS):
            now = time.monotonic() - begun
            if self.ballast is not None and not filling and now >= 60 * options.fill_after:
                self.say(f"filling the GPU's memory: {self._asked(self.ballast, f'fill {options.fill}')}")
                filling = True
            started = time.monotonic()
            self._mixed(number)
            mixed = time.monotonic()
            self._settle()
            self._repeated(number)
            self._read(begun, filling=filling)
            for name, seconds in {"requests in company": mixed - started, "requests alone": time.monotonic() - mixed}.items():
                self.seconds[name] = self.seconds.get(name, 0.0) + seconds
            number += 1
            if time.monotonic() - last > options.say_every or number <= 2:
                last = time.monotonic()
                self.say(self._progress(number))

    def _progress(self, number: int) -> str:
        shown = {name: value for name, value in self.readings[-1].items() if isinstance(value, (int, float))}
        memory = ", ".join(f"{name} {value:.0f}" for name, value in shown.items() if name not in {"at", "gpu"})
        counted = f"{self.counts.total()} requests, {self.tokens} tokens, {len(self.failures)} failures"
        return f"{self.readings[-1]['at']:.0f} s, {number} rounds: {counted}; {memory}"

    def _mixed(self, number: int) -> None:
        """Requests of all clients at once."""

        def client(index: int) -> None:
            chance = random.Random(f"{self.options.seed} {number} {index}")  # noqa: S311
            try:
                for _ in range(self.options.requests):
                    if self.over is None:
                        self._one(self.traffic.draw(chance))
            except Exception as error:  # in its own thread nobody else would notice
                with self.lock:
                    self.failures.append(f"a client: {type(error).__name__}: {error}")

        threads = [threading.Thread(target=client, args=(index,), daemon=True) for index in range(self.options.clients)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self._check_health()

    def _check_health(self) -> None:
        if self.over is not None:
            raise Over(self.over)
        if self._health() != 200:
            raise Over(f"the server is not healthy any more: {self._tail()}")

    def _one(self, request: Request) -> None:
        try:
            reply = exchange(self.options.port, request.sent, DEADLINE, request.closed_after)
        except (Late, OSError) as error:
            self.over = f"{request.kind}, {request.name}: {error}"
            return
        wrong, tokens = self._wrong(request, reply)
        with self.lock:
            self.counts[f"{request.kind} {'closed' if reply.closed else reply.status or 'no answer'}"] += 1
            self.tokens += tokens
            self.failures += [f"{request.kind}, {request.name}: {each}" for each in wrong]

    def _wrong(self, request: Request, reply: Reply) -> tuple[list[str], int]:
        if reply.closed:
            return [], 0
        if reply.status not in request.statuses and not (
            request.kind == "cancelled" and request.closed_after is not None and not reply.status
        ):
            return [f"status {reply.status}, not {' or '.join(map(str, request.statuses))}: {reply.body[:200]!r}"], 0
        if request.kind == "malformed" or not reply.status:
            return [], 0
        try:
            answer = said(reply, streamed=request.streamed)
        except ValueError as error:
            return [f"no answer: {error}: {reply.body[-200:]!r}"], 0
        wrong = complaints(answer, request.wanted)
        if request.kind == "known":
            at, why = difference(self.alone[request.name], answer)
            with self.lock:
                self.judged["in company"] += 1
                self.judged["in company, wrong" if why else "in company, a tie" if at is not None else "in company, equal"] += 1
            wrong += [why] * bool(why)
        return wrong, answer.count

    def _answered(self, body: dict[str, Any], seconds: float = 0.0) -> Answer:
        try:
            reply = exchange(self.options.port, post(COMPLETIONS, body), seconds or DEADLINE)
        except (Late, OSError) as error:
            raise Over(f"a request alone: {error}") from error
        try:
            answer = said(reply, streamed=bool(body.get("stream")))
        except ValueError as error:
            raise Over(f"a request alone, status {reply.status}: {error}: {reply.body[:500]!r}") from error
        self.counts["alone 200"] += 1
        self.tokens += answer.count
        return answer

    def _alone(self, body: dict[str, Any]) -> Answer:
        """With nothing that the server has kept of others, which are of other steps."""
        self._asked(self.server, "forget")
        answer = self._answered(body)
        self.failures += [f"alone: {each}" for each in complaints(answer, body["max_tokens"])]
        return answer

    def _settle(self) -> None:
        """Until the server has nothing to do: no connection has a thread, and nobody is in a batch."""
        until = time.monotonic() + DEADLINE
        while self._asked(self.server, "busy")["threads"] > self.threads:
            if time.monotonic() > until:
                raise Over("a connection's thread does not end")
            time.sleep(0.02)
        self._answered({"prompt": "The", "max_tokens": 1, "seed": 1})  # which is served when the others have been

    def _repeated(self, number: int) -> None:
        """A greedy request, one that is sampled with a seed and so served by another path, and the first one as a stream."""
        names = list(self.alone)
        name = names[number % len(names)]
        bodies = {
            name: self.traffic.known_body(name),
            "seeded": self.traffic.known_body("long", temperature=0.8, seed=5),
        }
        for which, body in bodies.items():
            found = [self._alone(body) for _ in range(2)]
            if _bits(found[0]) != _bits(found[1]):  # steps may have been captured meanwhile; those that follow are made of the same
                found.append(self._alone(body))
            self.judged["repeated alone"] += 1
            if _bits(found[-2]) != _bits(found[-1]):
                self.failures.append(f"a request alone, {which!r}, gave other bits when it was repeated")
            if _bits(found[-1]) != self.first.setdefault(which, _bits(found[-1])):
                self.judged["repeated alone, other bits than at the start"] += 1
            _, why = difference(self.alone[which], found[-1]) if which in self.alone else (None, "")
            self.failures += [f"alone, {which!r}: {why}"] * bool(why)
            if which in self.alone:
                streamed = self._alone({**body, "logprobs": False, "stream": True, "stream_options": {"include_usage": True}})
                if streamed.text != found[-1].text:
                    self.failures.append(f"a request alone, {which!r}, gave another text when it was streamed: {streamed.text!r}")

    def _read(self, begun: float, *, filling: bool) -> None:
        reading = {"at": time.monotonic() - begun, **self._asked(self.server, "read")}
        self.replayed = max(self.replayed, reading["replayed"])
        if self.ballast is not None:
            memory = self._asked(self.ballast, "read")
            reading |= {"driver": memory["others"], "ballast": memory["held"]}
            used = (memory["others"] + memory["held"]) / memory["total"]
            if filling and used < self.options.fill / 100 - 0.01:
                self.failures.append(f"the GPU's memory is not full: {used:.1%} are in use")
        self.readings.append(reading)

    def _asked(self, child: Child, word: str) -> dict[str, Any]:
        try:
            return child.ask(word, DEADLINE)
        except (Silent, OSError, subprocess.TimeoutExpired) as error:
            raise Over(f"{word}: {error}: {self._tail()}") from error

    def _tail(self) -> str:
        return self.log.read_text("utf-8", "replace")[-3000:]

    def _ended_or_hangs(self) -> None:
        """With what, or what each of its threads is doing."""
        if not hasattr(self, "server"):
            return
        with contextlib.suppress(subprocess.TimeoutExpired):  # it may be about to
            self.failures.append(f"the server has ended with {self.server.process.wait(1)}: {self._tail()}")
            return
        size = self.log.stat().st_size
        self.server.signal(signal.SIGUSR1)
        time.sleep(2)
        self.say(f"what the server's threads do:\n{self.log.read_bytes()[size:][:20_000].decode('utf-8', 'replace')}")

    def _stop(self) -> None:
        """As one stops mlx-lm's server."""
        began = time.monotonic()
        self.server.signal(signal.SIGINT)
        try:
            code = self.server.process.wait(END)
        except subprocess.TimeoutExpired:
            raise Over(f"the server is still there {END:.0f} s after SIGINT") from None
        self.seconds["shutdown"] = time.monotonic() - began
        wrong = not_clean(code, self.log.read_text("utf-8", "replace"))
        self.failures += [f"after SIGINT: {wrong}"] * bool(wrong)

    def to_json(self) -> dict[str, Any]:
        few = self.readings[:: max(1, len(self.readings) // 40)]
        kept = [{name: value for name, value in each.items() if name not in {"reasons", "errors", "gpu"}} for each in few]
        return {
            "minutes": self.readings[-1]["at"] / 60 if self.readings else 0.0,
            "rounds": len(self.readings),
            "requests": dict(sorted(self.counts.items())),
            "tokens": self.tokens,
            "answers": dict(sorted(self.judged.items())),
            "steps replayed": self.replayed,
            "seconds": self.seconds,
            "growth": growth(self.readings),
            "failures": self.failures,
            "cases": kept,
        }


def _bits(answer: Answer) -> tuple[Any, ...]:
    return answer.text, answer.tokens, answer.logprobs
