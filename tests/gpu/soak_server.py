"""mlx-lm's server, without HTTP, under ``patch()`` for minutes: ``python -m tests.gpu.soak_server --minutes 10``.

Rounds of requests of many lengths, several at a time, in batches and alone, greedy and sampled, of which some are cancelled. After each
round the same greedy requests are made alone, and memory is read with nothing under way. Exit code 1 where a request fails or gives too
little, where a request that is repeated gives other bits, where memory grows from the middle of the run to its end, or where a
round takes so long that something hangs: then with the stack of each thread.
"""

from __future__ import annotations

import argparse
import ctypes
import faulthandler
import gc
import os
import random
import statistics
import sys
import threading
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import mlx.core as mx
import mlx_cuda
from mlx_cuda._decoding.models import decoding_of

from .mlx_lm_parts import SIZES, Tokenizer, make_model, part

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

HANG = 120  # seconds in which a round must have got somewhere
FEWEST_ROUNDS = 9  # of which three are the middle and three the end
GROWTH = {"active": 32 * 2**20, "driver": 192 * 2**20}  # bytes; the driver's also has kernels that are loaded late
COMMON = [random.Random(1).randrange(512) for _ in range(300)]  # noqa: S311  (what many prompts begin with)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.soak_server", description="mlx-lm's server with requests of many kinds.")
    parser.add_argument("--minutes", type=float, default=10, help="stop after so long, and nine rounds at least")
    parser.add_argument("--clients", type=int, default=6, help="requests at a time")
    parser.add_argument("--requests", type=int, default=8, help="of a client in each round")
    parser.add_argument("--bits", type=int, choices=(4, 8), help="of the weights; default: bfloat16")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--upstream", action="store_true", help="without patch(), to compare")
    return parser.parse_args(arguments)


class Request(NamedTuple):
    prompt: list[int]
    wanted: int
    temperature: float = 0.0
    seed: int | None = None  # with one, it is served alone
    cancelled_after: int | None = None


def draw(chance: random.Random) -> Request:
    length, count = chance.choice((1, 2, 17, 60, 250, 700)), chance.choice((1, 3, 20, 64, 150))
    shared = chance.choice((0, 0, 40, 300))
    return Request(
        COMMON[:shared] + [chance.randrange(SIZES["vocab_size"]) for _ in range(length)],
        count,
        chance.choice((0.0, 0.0, 0.8)),
        chance.choice((None, None, None, 5)),
        chance.randrange(count + 1) if chance.random() < 0.2 else None,
    )


class Provider:
    """What the server asks for models: there is one."""

    is_batchable = True
    processor = draft_model = None

    def __init__(self, bits: int | None) -> None:
        self.bits = bits
        self.model: Any = None
        self.tokenizer: Any = None
        self.model_key: Any = None
        self.cli_args = SimpleNamespace(
            decode_concurrency=4, prompt_concurrency=2, prefill_step_size=256, kv_bits=None, kv_group_size=64, quantized_kv_start=0,
            prompt_cache_bytes=None, chat_template_args={},
        )  # fmt: skip

    def load_default(self) -> None:
        """In the server's own thread, whose streams its arrays belong to."""
        self.model, self.model_key = make_model(0, self.bits), ("small", None, None)
        self.tokenizer = part("tokenizer_utils").TokenizerWrapper(Tokenizer())

    def load(self, *_: Any) -> tuple[Any, Any]:
        return self.model, self.tokenizer

    def reset(self) -> None:
        self.model = self.tokenizer = None


class Server:
    def __init__(self, bits: int | None) -> None:
        self.parts = part("server")
        self.provider = Provider(bits)
        self.memory = part("models.cache").LRUPromptCache(max_size=6)
        self.generator = self.parts.ResponseGenerator(self.provider, self.memory)

    def answer(self, request: Request) -> list[tuple[int, float]]:
        """The tokens and their logarithms of probability."""
        parts = self.parts
        arguments = parts.GenerationArguments(
            model=parts.ModelDescription("small", None, None),
            sampling=parts.SamplingArguments(request.temperature, 0.0, 0, 0.0, 0.0, 0.1),
            logits=parts.LogitsProcessorArguments(None, 0.0, 20, 0.0, 20, 0.0, 20),
            stop_words=[], max_tokens=request.wanted, num_draft_tokens=3, logprobs=False, top_logprobs=-1, seed=request.seed,
            chat_template_kwargs=None,
        )  # fmt: skip
        text = " ".join(map(str, request.prompt))
        context, responses = self.generator.generate(parts.CompletionRequest("text", text, [], None, None), arguments)
        found: list[tuple[int, float]] = []
        for response in responses:
            if len(found) == request.cancelled_after:
                context.stop()
                return found  # as a client that has hung up: what is still put on its queue is read by nobody
            found.append((response.token, response.logprob))
        return found


class DriversMemory:
    """How much of the device's memory is in use, of all programs."""

    def __init__(self) -> None:
        self.cuda = ctypes.CDLL("libcuda.so.1")
        self.context = ctypes.c_void_p()
        if self.cuda.cuDevicePrimaryCtxRetain(ctypes.byref(self.context), 0):
            raise RuntimeError("cuDevicePrimaryCtxRetain failed")

    def __call__(self) -> int:
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self.cuda.cuCtxPushCurrent_v2(self.context)
        failed = self.cuda.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total))
        self.cuda.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))
        if failed:
            raise RuntimeError("cuMemGetInfo failed")
        return total.value - free.value


class Soak:
    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.server = options, Server(options.bits)
        self.failures: list[str] = []
        self.requests = self.cancelled = self.tokens = 0
        self.memory: dict[str, list[int]] = {name: [] for name in GROWTH}
        self.drivers: Callable[[], int] = DriversMemory() if mx.cuda.is_available() else int
        self.lock = threading.Lock()

    def ask(self, request: Request) -> list[tuple[int, float]]:
        try:
            found = self.server.answer(request)
        except Exception as error:  # whatever it is, it is what this looks for
            self.failures.append(f"{request}: {type(error).__name__}: {error}")
            return []
        wanted = request.wanted if request.cancelled_after is None else min(request.wanted, request.cancelled_after)
        if len(found) != wanted or not all(0 <= token < SIZES["vocab_size"] and logprob <= 1e-3 for token, logprob in found):
            self.failures.append(f"{request}: {len(found)} tokens, {found[:3]}, …")
        with self.lock:
            self.requests += 1
            self.cancelled += request.cancelled_after is not None
            self.tokens += len(found)
        return found

    def mixed(self, number: int) -> None:
        """Requests of all clients at once."""

        def client(index: int) -> None:
            chance = random.Random(f"{self.options.seed} {number} {index}")  # noqa: S311
            for _ in range(self.options.requests):
                self.ask(draw(chance))

        threads = [threading.Thread(target=client, args=(index,)) for index in range(self.options.clients)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def repeated(self) -> None:
        """Greedy requests alone, in a batch of one and served singly: the second and the third are made of the same steps."""
        for seed in (None, 3):
            self.server.memory.trim_to(n_sequences=0)  # others' prompts begin alike, but their keys are of other steps
            request = Request(COMMON[:50], 40, seed=seed)
            _, second, third = (self.ask(request) for _ in range(3))
            if second != third:
                at = next((i for i, (one, other) in enumerate(zip(second, third, strict=False)) if one != other), -1)
                self.failures.append(f"a request with seed {seed} gave other bits when it was repeated, from token {at} on")

    def read_memory(self) -> None:
        self.server.memory.trim_to(n_sequences=0)
        gc.collect()
        mx.synchronize()
        mx.clear_cache()
        self.memory["active"].append(mx.get_active_memory())
        self.memory["driver"].append(self.drivers())

    def growth(self) -> Iterator[tuple[str, float]]:
        for name, read in self.memory.items():
            third = len(read) // 3
            yield name, statistics.median(read[-third:]) - statistics.median(read[third : 2 * third])

    def run(self) -> None:
        until, number = time.monotonic() + 60 * self.options.minutes, 0
        while not self.failures and (time.monotonic() < until or number < FEWEST_ROUNDS):
            faulthandler.dump_traceback_later(HANG, exit=True)
            self.mixed(number)
            self.repeated()
            self.read_memory()
            number += 1
        faulthandler.cancel_dump_traceback_later()
        if number >= FEWEST_ROUNDS:
            self.failures.extend(f"{name} memory grew by {grown / 2**20:.1f} MiB" for name, grown in self.growth() if grown > GROWTH[name])
        decoding = decoding_of(self.server.provider.model)
        if not self.options.upstream and mx.cuda.is_available() and not decoding.replayed:
            self.failures.append(f"no step was replayed: {decoding.reason}")
        self.failures.extend(decoding.errors)
        print(f"{number} rounds, {self.requests} requests, {self.cancelled} of them cancelled, {self.tokens} tokens")
        print(f"{decoding.recorded} steps recorded, {decoding.replayed} replayed. {decoding.reason}".strip())
        for name, read in self.memory.items():
            print(f"{name} memory, MiB: {', '.join(f'{each / 2**20:.1f}' for each in read)}")


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    if not options.upstream:
        mlx_cuda.patch()
    soak = Soak(options)
    try:
        soak.run()
    finally:
        faulthandler.dump_traceback_later(HANG, exit=True)
        soak.server.generator.stop_and_join()
        faulthandler.cancel_dump_traceback_later()
    for failure in soak.failures:
        print(failure)
    return 1 if soak.failures else 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # MLX's threads may abort a process that ends by itself, patched or not
