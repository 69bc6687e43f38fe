"""Requests that begin alike have the same pages, and the numbers by which that is seen."""

from __future__ import annotations

import copy
from typing import Any, Literal

import mlx.core as mx
import mlx_cuda
import numpy as np
import pytest
from mlx_cuda._loader import native
from mlx_cuda._replay.pool import held_by
from numpy.typing import NDArray

from .mlx_lm_parts import make_model, part, wide
from .support import host, relative_error

pytestmark = pytest.mark.gpu
TOLERANCE = 6e-2  # of logits in bfloat16 after two layers
SHAPES = [(mx.bfloat16, 128), (mx.float32, 3), (mx.uint32, 16), (mx.float16, 1), (mx.bfloat16, 6)]


def factors(seed: int, first: int, count: int) -> NDArray[np.uint64]:
    """splitmix64, from its published description."""
    z = np.uint64(seed) + (np.arange(first, first + count, dtype=np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    odd: NDArray[np.uint64] = (z ^ (z >> np.uint64(31))) | np.uint64(1)
    return odd


def expected(parts: list[mx.array], seed: int) -> NDArray[np.uint64]:
    first = 0
    found = np.zeros((parts[0].shape[0], parts[0].shape[2]), np.uint64)
    for part_ in parts:
        width = part_.shape[3] * part_.itemsize
        words = np.array(part_.view(mx.uint32 if width % 4 == 0 else mx.uint16)).astype(np.uint64)
        words = words.swapaxes(1, 2).reshape(*found.shape, -1)
        found += (words * factors(seed, first, words.shape[2])).sum(axis=2)
        first += part_.shape[1] * width
    return found


@pytest.mark.parametrize(("batch", "heads", "count"), [(1, 8, 300), (3, 2, 37), (2, 1, 1)])
def test_row_sums(rng: np.random.Generator, batch: int, heads: int, count: int) -> None:
    seed, stream = int(rng.integers(1 << 63)), mx.default_stream(mx.gpu)
    parts = []
    for dtype, width in SHAPES:
        bits = mx.array(rng.integers(0, 1 << 16, (batch, heads, count + 9, width * dtype.size // 2)), mx.uint16)
        parts.append(bits.view(dtype)[:, :, 4 : 4 + count])  # of a larger cache
    with np.errstate(over="ignore"):
        wanted = expected(parts, seed)
    module = native.module(stream)
    assert np.array_equal(np.array(module.row_sums(parts, seed, stream)), wanted)
    alike = [mx.concatenate([each, each[:1]]) for each in parts]
    assert np.array_equal(np.array(module.row_sums(alike, seed, stream))[batch], wanted[0])


@pytest.mark.parametrize("bits", [None, 8])
def test_requests_with_one_prefix(rng: np.random.Generator, bits: Literal[4, 8] | None) -> None:
    try:
        make_cache = part("models.cache").make_prompt_cache
    except ImportError as error:
        pytest.skip(f"mlx_lm.models.cache cannot be imported: {error}")
    model, prefix = make_model(3), mx.array(rng.integers(0, 512, (1, 150)))
    ends = mx.array(rng.integers(0, 512, (3, 10)))
    tokens = mx.array(rng.integers(0, 512, (3, 80)))  # over the end of a page

    def logits(model: Any) -> tuple[Any, list[list[int]]]:
        kept = make_cache(model)
        model(prefix, cache=kept)
        own = [copy.deepcopy(kept) for _ in range(3)]
        for index, cache in enumerate(own):
            model(ends[index : index + 1], cache=cache)
        batches = [[type(layers[0]).merge(list(layers)) for layers in zip(*some, strict=True)] for some in (own[:2], own[2:])]
        words = tokens[:2], tokens[2:]
        found = [
            mx.concatenate([model(own_tokens[:, at : at + 1], cache=cache) for own_tokens, cache in zip(words, batches, strict=True)])
            for at in range(tokens.shape[1])
        ]
        held = [held_by(cache) for cache in batches]
        numbers = [[page.number for page in sequence.pages[0]] for each in held if each is not None for sequence in each.sequences]
        return host(mx.concatenate(found, axis=1)), numbers

    exact, _ = logits(wide(model))
    with mlx_cuda.patch(kv_bits=bits):
        ours, numbers = logits(model)
    assert relative_error(ours, exact) < TOLERANCE
    assert len(numbers) == 3
    assert numbers[0][:2] == numbers[1][:2] == numbers[2][:2]  # 128 of 150 rows
    rest = [page for own in numbers for page in own[2:]]
    assert len({*rest, *numbers[0][:2]}) == len(rest) + 2
