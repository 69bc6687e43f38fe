"""What the tests of batch invariance share: bits, models, and requests served alone and in random company."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np

from .mlx_lm_parts import make_model, part

EXPERTS: dict[str, Any] = {
    "model_type": "qwen3_moe", "num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 128, "decoder_sparse_step": 1,
    "mlp_only_layers": [], "norm_topk_prob": True,
}  # fmt: skip
MOST_AT_ONCE, MOST_PROMPTS, MOST_OF_A_PROMPT = 24, 6, 96


def differing(one: mx.array, other: mx.array) -> int:
    """How many numbers differ in a bit."""
    assert (one.shape, one.dtype) == (other.shape, other.dtype)
    words = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32}[one.itemsize]
    return int(np.sum(np.array(one.view(words) != other.view(words))))


def model_of(kind: str, bits: int | None) -> Any:
    """A small random one in bfloat16, with or without experts."""
    return make_model(3, bits) if kind == "dense" else make_model(3, bits, "qwen3_moe", **EXPERTS)


@dataclass
class Request:
    """``cached``: how many tokens of the prompt are in a cache already; ``stays``: how many answers it waits for at most."""

    prompt: list[int]
    wanted: int
    cached: int = 0
    stays: int | None = None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)


def draw(count: int, vocabulary: int, seed: int) -> list[Request]:
    """Of 1 to 600 tokens: every fifth begins in a cache, every tenth is cancelled."""
    chance = random.Random(seed)  # noqa: S311
    requests = []
    for number in range(count):
        length = chance.choice([chance.randint(1, 20), chance.randint(1, 200), chance.randint(1, 600)])
        request = Request([chance.randrange(vocabulary) for _ in range(length)], chance.randint(1, 12))
        if number % 5 == 0 and length > 1:
            request.cached = chance.randrange(1, length)
        if number % 10 == 3:
            request.stays = chance.randint(0, request.wanted - 1)
        requests.append(request)
    return requests


def serve(model: Any, requests: Sequence[Request], chance: random.Random | None) -> None:
    """Fill in what each is answered: by one generator that they join at random, or, without chance, by one of its own for each."""
    if chance is None:
        for request in requests:
            _serve(model, [request], None)
    else:
        _serve(model, requests, chance)


def _serve(model: Any, requests: Sequence[Request], chance: random.Random | None) -> None:
    options = {"completion_batch_size": MOST_AT_ONCE, "prefill_batch_size": MOST_PROMPTS, "prefill_step_size": MOST_OF_A_PROMPT}
    generator = part("generate").BatchGenerator(model, stop_tokens=[], **(options if chance else {}))
    waiting, under_way = list(reversed(requests)), dict[int, Request]()
    while waiting or under_way:
        for _ in range(chance.choice([0, 0, 1, 2, 7]) if chance and under_way else 1):
            if waiting:
                request = waiting.pop()
                cache = _cached(model, request) if chance and request.cached else None
                prompt = request.prompt[request.cached :] if cache else request.prompt
                before = [request.prompt[: request.cached]] if cache else None
                (uid,) = generator.insert([prompt], [request.wanted], caches=[cache] if cache else None, all_tokens=before)
                under_way[uid] = request
        for response in generator.next()[1]:
            request = under_way[response.uid]
            request.tokens.append(int(response.token))
            request.logprobs.append(np.array(response.logprobs.astype(mx.float32)))
            if response.finish_reason is not None:
                del under_way[response.uid]
        if chance:
            gone = [uid for uid, each in under_way.items() if each.stays is not None and len(each.tokens) >= each.stays and each.tokens]
            if gone:
                generator.remove(gone)
            for uid in gone:
                del under_way[uid]
    generator.close()


def _cached(model: Any, request: Request) -> list[Any]:
    cache: list[Any] = part("models.cache").make_prompt_cache(model)
    model(mx.array([request.prompt[: request.cached]]), cache=cache)
    mx.eval([each.state for each in cache])
    return cache


def differing_answers(alone: Sequence[Request], together: Sequence[Request]) -> list[int]:
    """Which differ in a token or in a bit of a logarithm, as far as both were answered."""
    found = []
    for number, (one, other) in enumerate(zip(alone, together, strict=True)):
        count = len(other.tokens)
        complete = count == other.wanted or other.stays is not None
        same = one.tokens[:count] == other.tokens and all(
            np.array_equal(a, b, equal_nan=True) for a, b in zip(one.logprobs, other.logprobs, strict=False)
        )
        if not (same and complete):
            found.append(number)
    return found


def logits_of(model: Any, tokens: Sequence[int], sizes: Sequence[int]) -> mx.array:
    """All logits of a prompt that is given in pieces of these sizes."""
    cache, results, at = part("models.cache").make_prompt_cache(model), [], 0
    for size in sizes:
        results.append(model(mx.array([tokens[at : at + size]]), cache=cache)[0])
        mx.eval(results[-1])
        at += size
    return mx.concatenate(results)
