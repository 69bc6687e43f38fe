"""Measurements of a model in the processes with MLX alone and with :func:`mlx_cuda.patch`."""

from __future__ import annotations

import importlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import mlx.core as mx

from .forms import Answer, Passage
from .plan import Plan

Few = Callable[[list[Any]], list[Any]]

LEADING = 8  # tokens whose logits are compared at each position
CHUNK = 256  # tokens of a prompt whose logits are all there at once
KV_BITS, KV_GROUP = 8, 64


def part(name: str) -> Any:
    """A module of mlx-lm, which is not installed where mypy runs, and whose package names functions as it does modules."""
    return importlib.import_module(f"mlx_lm.{name}")


def new_cache(model: Any) -> list[Any]:
    return list(part("models.cache").make_prompt_cache(model))


def numbers(array: mx.array) -> list[Any]:
    """Those of an array that is no scalar."""
    return cast("list[Any]", array.tolist())


def look(logits: mx.array, targets: mx.array, ids: list[list[int]] | None) -> tuple[mx.array, mx.array, mx.array]:
    """Of logits ``[T, vocabulary]``: the negative log-likelihood of each target, which tokens lead (or these), and their logits."""
    wide = logits.astype(mx.float32)
    nll = mx.logsumexp(wide, axis=-1) - mx.take_along_axis(wide, targets[:, None], axis=-1)[:, 0]
    count = min(LEADING, wide.shape[-1])
    leading = mx.argpartition(-wide, count - 1, axis=-1)[:, :count] if ids is None else mx.array(ids)
    return nll, leading, mx.take_along_axis(wide, leading, axis=-1)


class Reading:
    """A text that a model reads: what it says of the next token at each place."""

    def __init__(self, model: Any, tokens: Sequence[int], ids: list[list[int]] | None, *, call: Callable[..., Any] | None = None) -> None:
        self.call, self.tokens, self.ids = call or model, mx.array(list(tokens)), ids
        self.cache = new_cache(model)
        self.seen: Passage = {"nll": [], "ids": [], "values": []}

    def skip(self, begin: int, end: int) -> None:
        """Have the cache hold these tokens."""
        for first in range(begin, end, CHUNK):
            self.call(self.tokens[None, first : min(first + CHUNK, end)], cache=self.cache)
            mx.eval([each.state for each in self.cache])

    def read(self, begin: int, end: int, step: int) -> Passage:
        """The logits after each of these tokens, in chunks of so many."""
        for first in range(begin, end, step):
            last = min(first + step, end)
            logits = self.call(self.tokens[None, first:last], cache=self.cache)[0]
            place = len(self.seen["nll"])
            ids = None if self.ids is None else self.ids[place : place + last - first]
            nll, leading, values = look(logits, self.tokens[first + 1 : last + 1], ids)
            mx.eval(nll, leading, values)
            self.seen["nll"] += numbers(nll)
            self.seen["ids"] += numbers(leading)
            self.seen["values"] += numbers(values)
        return self.seen


def quantized(cache: list[Any]) -> list[Any]:
    """The caches of layers, which hold keys and values in 8 bits, as mlx-lm's ``kv_bits`` has them; a ValueError where none can."""
    part("generate").maybe_quantize_kv_cache(cache, 0, KV_GROUP, KV_BITS)
    if not any(hasattr(each, "bits") for each in cache):
        raise ValueError("mlx-lm quantizes no cache of this model")
    return cache


def rounded(cache: list[Any], bits: int = KV_BITS, group_size: int = KV_GROUP) -> list[Any]:
    """Caches that hold the same values in the model's dtype, to which any attention can attend; windows stay."""
    plain: Any = part("models.cache").KVCache

    def through(rows: mx.array) -> mx.array:
        return mx.dequantize(*mx.quantize(rows, group_size=group_size, bits=bits), group_size=group_size, bits=bits)

    class Rounded(plain):  # type: ignore[misc]
        def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
            return super().update_and_fetch(through(keys), through(values))

    found: list[Any] = []
    for each in cache:
        if type(each) is plain:
            held = Rounded()
            held.keys, held.values, held.offset = through(each.keys), through(each.values), each.offset
            found.append(held)
        else:
            found.append(each)
    return found


def read_prompt(model: Any, tokens: Sequence[int], plan: Plan, ids: list[list[int]] | None = None) -> Passage:
    """A text as a prompt."""
    return Reading(model, tokens, ids).read(0, min(plan.text, len(tokens) - 1), CHUNK)


def read_steps(
    model: Any, tokens: Sequence[int], plan: Plan, ids: list[list[int]] | None = None, *, few: Few | None = None, at_once: int = 1
) -> Passage:
    """The text after a context token by token, as in decoding, or several ``at_once``. ``few``: what holds keys and values in few bits."""
    reading = Reading(model, tokens, ids)
    reading.skip(0, plan.context)
    if few is not None:
        reading.cache = few(reading.cache)
    return reading.read(plan.context, min(plan.context + plan.steps, len(tokens) - 1), at_once)


def answer(model: Any, prompt: list[int], count: int, *, leading: bool) -> Answer:
    """The greedy tokens of one request, and with ``leading`` what else was near."""
    found: Answer = {"prompt": prompt, "tokens": [], "ids": [], "values": []}
    for token, scores in part("generate").generate_step(mx.array(prompt), model, max_tokens=count):
        _add(found, token, scores if leading else None)
    return found


def _add(found: Answer, token: int, scores: mx.array | None) -> None:
    found["tokens"].append(int(token))
    if scores is not None:
        _, ids, values = look(scores[None], mx.array([token]), None)
        found["ids"] += numbers(ids)
        found["values"] += numbers(values)


def answer_at_once(model: Any, prompts: list[list[int]], count: int, *, leading: bool) -> tuple[list[Answer], float]:
    """The same for many requests through mlx-lm's ``BatchGenerator``, and the tokens of all per second after their first ones."""
    generator = part("generate").BatchGenerator(
        model, max_tokens=count, completion_batch_size=len(prompts), prefill_batch_size=len(prompts)
    )
    found: dict[int, Answer] = {
        uid: {"prompt": prompt, "tokens": [], "ids": [], "values": []}
        for uid, prompt in zip(generator.insert([list(prompt) for prompt in prompts]), prompts, strict=True)
    }
    times: list[float] = []
    while any(len(each["tokens"]) < count for each in found.values()):
        responses = generator.next_generated()
        if not responses:
            raise RuntimeError("mlx-lm's BatchGenerator ended before its requests")
        for each in responses:
            _add(found[each.uid], each.token, each.logprobs if leading else None)
        times += [time.perf_counter()] * len(responses)
    generator.close()
    return list(found.values()), sum(each > times[0] for each in times) / max(times[-1] - times[0], 1e-9)


def _timed(tokens: Iterator[Any]) -> tuple[float, float]:
    """Seconds until the first, and from there to the last; at least two tokens."""
    began = time.perf_counter()
    times = [time.perf_counter() for _ in tokens]
    return times[0] - began, times[-1] - times[0]


def speeds(model: Any, prompt: list[int], count: int, runs: int, **options: Any) -> tuple[float, float]:
    """Tokens per second of a prompt, and of decoding after it: the medians of some runs after one that warms up."""

    def run() -> tuple[float, float]:
        return _timed(part("generate").generate_step(mx.array(prompt), model, max_tokens=count, **options))

    run()
    of_prompts, of_steps = zip(*(run() for _ in range(runs)), strict=True)
    return len(prompt) / statistics.median(of_prompts), (count - 1) / max(statistics.median(of_steps), 1e-9)


def peak_of(run: Callable[[], Any]) -> tuple[Any, int]:
    """Return its result, and MLX's peak memory meanwhile."""
    mx.synchronize()
    mx.clear_cache()
    mx.reset_peak_memory()
    return run(), int(mx.get_peak_memory())
