"""mlx-lm's caches over captured steps: their memory, files, copies and classes are what they are without; and what is computed when."""

from __future__ import annotations

import contextlib
import copy
import ctypes
import gc
import os
import pickle
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_cuda
import numpy as np
import pytest
from mlx_cuda._loader import native
from mlx_cuda._mlx_lm import in_pages
from mlx_cuda._mlx_lm.models import decoding_of
from mlx_cuda._patch import _unpatched
from mlx_cuda._replay import sequences
from mlx_cuda._replay.pool import held_by

from .decoding_model import KVCache, Model
from .mlx_lm_parts import SIZES, make_model, part, with_windows
from .support import host, relative_error

try:
    caches, generate, qwen3 = map(part, ("models.cache", "generate", "models.qwen3"))
except ImportError as error:
    pytest.skip(f"mlx_lm cannot be imported: {error}", allow_module_level=True)

pytestmark = pytest.mark.gpu

TOLERANCE = 6e-2  # of logits in bfloat16 after two layers
KINDS: dict[str, Callable[[], Any]] = {
    "growing": caches.KVCache,
    "rotating": lambda: caches.RotatingKVCache(100_000),
    "full": lambda: caches.RotatingKVCache(40, keep=4),
    "quantized": lambda: caches.QuantizedKVCache(group_size=64, bits=8),
}
COPIES: dict[str, Callable[[Any], Any]] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda cache: pickle.loads(pickle.dumps(cache)),  # noqa: S301
}


@pytest.fixture(autouse=True)
def _patched() -> Iterator[None]:
    with mlx_cuda.patch():
        yield


def words(rng: np.random.Generator, *shape: int) -> mx.array:
    return mx.array(rng.integers(0, 512, shape))


def run(model: Any, cache: list[Any], tokens: mx.array, prompt: int = 20) -> mx.array:
    """Logits of the tokens after a prompt."""
    if prompt:
        mx.eval(model(tokens[:, :prompt], cache=cache))
    found = []
    for at in range(prompt, tokens.shape[1]):
        found.append(model(tokens[:, at : at + 1], cache=cache))
        mx.eval(found[-1])
    return mx.concatenate(found, axis=1)


def as_it_is(model: Any, cache: list[Any], tokens: mx.array, prompt: int = 20) -> mx.array:
    """Without captured steps, and by MLX's own kernels where it has any: of a quantized cache it has none."""
    quantized = isinstance(cache[0], caches.QuantizedKVCache)
    with contextlib.nullcontext() if quantized else _unpatched():
        function = getattr(type(model).__call__, "unpatched", type(model).__call__)
        return run(lambda tokens, cache: function(model, tokens, cache=cache), cache, tokens, prompt)


def fresh(model: Any, make: Callable[[], Any]) -> list[Any]:
    return [make() for _ in model.layers]


def test_a_rotating_cache_grows_with_its_use(rng: np.random.Generator) -> None:
    model, tokens, used = make_model(0), words(rng, 1, 60), []
    for call in (as_it_is, run):
        gc.collect()
        mx.clear_cache()
        cache = caches.make_prompt_cache(model, 2_000_000)
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        call(model, cache, tokens)
        used.append(mx.get_peak_memory() - before)
        del cache
    assert decoding_of(model).replayed >= 38
    assert used[1] < 2 * used[0] + (64 << 20)  # 1024 rows of a capture are a few MiB here


@pytest.mark.parametrize("kind", KINDS)
def test_files_hold_what_is_used_alone(rng: np.random.Generator, tmp_path: Path, kind: str) -> None:
    model, tokens, more = make_model(0), words(rng, 1, 60), words(rng, 1, 30)
    run(model, fresh(model, KINDS[kind]), words(rng, 1, 90))  # whose rows nobody else is to see
    ours, theirs = fresh(model, KINDS[kind]), fresh(model, KINDS[kind])
    run(model, ours, tokens), as_it_is(model, theirs, tokens)
    assert decoding_of(model).replayed > 70
    files = [tmp_path / "ours.safetensors", tmp_path / "theirs.safetensors"]
    for cache, file in zip((ours, theirs), files, strict=True):
        caches.save_prompt_cache(str(file), cache)
    assert files[0].stat().st_size <= files[1].stat().st_size
    for each in ours:
        memory = each.keys if isinstance(each.keys, tuple) else (each.keys,)
        assert all(not mx.any(array[..., each.offset :, :]).item() for array in memory)
    expected = as_it_is(model, theirs, more, 0)
    loaded = caches.load_prompt_cache(str(files[0]))
    assert [type(each) for each in loaded] == [type(each) for each in theirs]
    assert relative_error(as_it_is(model, loaded, more, 0), host(expected)) < TOLERANCE
    assert relative_error(run(model, ours, more, 0), host(expected)) < TOLERANCE


def served(model: Any, rng: np.random.Generator, count: int = 3) -> list[list[Any]]:
    """The caches that requests leave behind, of 20 to 22 tokens and some more."""
    made = generate.BatchGenerator(model, completion_batch_size=4, prefill_batch_size=4)
    numbers = made.insert([words(rng, 20 + i).tolist() for i in range(count)], max_tokens=[12 + 2 * i for i in range(count)])
    left: dict[int, list[Any]] = {}
    while len(left) < count:
        left.update({each.uid: each.prompt_cache for each in made.next_generated() if each.finish_reason})
    return [left[number] for number in numbers]


@pytest.mark.parametrize("copied", COPIES)
def test_what_leaves_a_batch_is_a_plain_cache(rng: np.random.Generator, tmp_path: Path, copied: str) -> None:
    model = make_model(3)
    left = served(model, rng)
    pool = decoding_of(model).batches.pool
    assert pool is not None
    gc.collect()
    assert len(pool.regions[0].free) == pool.regions[0].count - 1  # nothing of it is in pages
    for index, cache in enumerate(left):
        assert {type(each) for each in cache} == {caches.KVCache}
        assert {each.keys.shape[2] for each in cache} == {cache[0].offset}
        other = [COPIES[copied](each) for each in cache]
        assert {type(each) for each in other} == {caches.KVCache}
        assert all(mx.array_equal(one.keys, each.keys).item() for one, each in zip(other, cache, strict=True))
        caches.save_prompt_cache(str(tmp_path / f"{index}.safetensors"), cache)
        loaded = caches.load_prompt_cache(str(tmp_path / f"{index}.safetensors"))
        tokens = words(rng, 1, 12)
        expected = host(as_it_is(model, loaded, tokens, 0))
        assert relative_error(run(model, other, tokens, 0), expected) < TOLERANCE
        if copied != "copy":  # whose arrays are the same ones
            assert relative_error(run(model, cache, tokens, 0), expected) < TOLERANCE


@pytest.mark.parametrize("copied", COPIES)
def test_a_batch_keeps_its_class(rng: np.random.Generator, copied: str) -> None:
    model, tokens = make_model(3), words(rng, 2, 60)
    ours, theirs = ([layer[0].merge(list(layer)) for layer in zip(*two(model, tokens), strict=True)] for _ in range(2))
    run(model, ours, tokens[:, 30:50], 0), as_it_is(model, theirs, tokens[:, 30:50], 0)
    assert all(map(sequences.is_in_pages, ours))
    other = [COPIES[copied](each) for each in ours]
    assert {type(each) for each in (*ours, *other)} == {caches.BatchKVCache}
    expected = host(as_it_is(model, theirs, tokens[:, 50:], 0))
    assert relative_error(as_it_is(model, other, tokens[:, 50:], 0), expected) < TOLERANCE
    assert relative_error(run(model, ours, tokens[:, 50:], 0), expected) < TOLERANCE
    assert all(map(sequences.is_in_pages, ours))


def two(model: Any, tokens: mx.array) -> list[list[Any]]:
    """Caches of two sequences that have read 30 and 17 tokens."""
    made = []
    for row, count in enumerate((30, 17)):
        made.append(fresh(model, caches.KVCache))
        as_it_is(model, made[-1], tokens[row : row + 1, : count + 1], count)
    return made


def test_pages_of_windows(rng: np.random.Generator) -> None:
    """Of long sequences a layer with a window has the pages that this may lie in, and logits are those of whole sequences."""
    model = with_windows(100)
    mx.eval(model.parameters())
    tokens, found = words(rng, 3, 700), []
    for call in (as_it_is, run):
        made = []
        for row, count in enumerate((150, 20, 300)):
            made.append(model.make_cache())
            as_it_is(model, made[-1], tokens[row : row + 1, : count + 1], count)
        batch = [layer[0].merge(list(layer)) for layer in zip(*made, strict=True)]
        found.append(call(model, batch, tokens[:, 301:], 0))
    assert relative_error(found[1], host(found[0])) < TOLERANCE
    held = held_by(batch)
    assert held is not None
    assert [len(sequence.pages[held.pool.places[0]]) for sequence in held.sequences] == [3, 3, 3]
    one = [each.extract(0) for each in batch]
    assert [each.keys.shape[2] for each in one] == [100, 100, 150 + 1 + 399]


def test_the_newest_bits_count(rng: np.random.Generator) -> None:
    model, found = make_model(3), []

    def packing() -> tuple[int, int] | None:
        served(model, rng)
        pool = decoding_of(model).batches.pool
        assert pool is not None
        return pool.packing

    found.append(packing())
    with mlx_cuda.patch(kv_bits=4):
        found.append(packing())
        with mlx_cuda.patch(kv_bits=16):
            found.append(packing())
        with mlx_cuda.patch():
            found.append(packing())
    found.append(packing())
    assert found == [None, (64, 4), None, (64, 4), None]


def test_what_has_been_evaluated() -> None:
    there, later = mx.ones(3), mx.ones(3) + 1
    mx.eval(there)
    assert native.loaded is not None
    assert native.loaded.evaluated([there, mx.array([1, 2])])
    assert not native.loaded.evaluated([there, later])
    mx.async_eval(later)  # type: ignore[no-untyped-call]
    assert native.loaded.evaluated([there, later])


def test_nothing_is_computed_while_weights_are_not_evaluated(rng: np.random.Generator) -> None:
    model = qwen3.Model(qwen3.ModelArgs.from_dict(SIZES | {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16}))
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    cache = fresh(model, caches.KVCache)
    logits = model(words(rng, 1, 64), cache=cache)
    logits = model(words(rng, 1, 1), cache=cache)
    assert logits.shape == (1, 1, 512)
    assert mx.get_peak_memory() - before < 1 << 24  # the weights would be 4 GiB
    assert not decoding_of(model).captured


def test_classes_are_mlx_lm_s_again(rng: np.random.Generator) -> None:
    model, tokens = make_model(0), words(rng, 1, 50)
    cache = fresh(model, caches.KVCache)
    run(model, cache, tokens)
    assert (caches.KVCache, "state") in in_pages._own
    mlx_cuda.unpatch()
    gc.collect()
    assert not [cls for cls, _ in in_pages._own if cls is caches.KVCache]
    assert {each.keys.shape[2] for each in cache} == {50}


@pytest.mark.skipif(sys.platform != "linux", reason="asks the driver by its library's name")
@pytest.mark.skipif("PYTEST_XDIST_WORKER" in os.environ, reason="other processes use the GPU's memory meanwhile")
def test_steps_that_are_dropped_while_they_run_leave_no_memory() -> None:
    driver = ctypes.CDLL("libcuda.so.1")

    def free() -> int:
        mx.synchronize()
        gc.collect()
        time.sleep(0.1)  # MLX's own thread lets go of the last one
        mx.clear_cache()
        amount, total = ctypes.c_size_t(), ctypes.c_size_t()
        assert driver.cuMemGetInfo_v2(ctypes.byref(amount), ctypes.byref(total)) == 0
        return amount.value

    big = mx.random.normal((4096, 4096), dtype=mx.float32).astype(mx.bfloat16)
    mx.eval(big)
    before = 0
    for turn in range(300):
        model = Model(layers=8, size=128, hidden=128)
        cache = [KVCache() for _ in model.layers]
        mx.eval(model(mx.array([[1, 2, 3, 4, 5, 6]]), cache=cache))
        mx.eval(mlx_cuda.decode_step(model, mx.array([[7]]), cache))
        busy = big
        for _ in range(6):
            busy = (busy @ big) * 1e-3
        mx.async_eval(busy)  # type: ignore[no-untyped-call]
        logits = mlx_cuda.decode_step(model, mx.array([[8]]), cache)  # behind it
        del model, cache, logits, busy
        if turn == 100:
            before = free()
    assert before - free() < 64 << 20
