"""mlx-lm's own caches through captured steps, on the CPU: their memory, files, copies and classes are what they are without."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_cuda._mlx_lm import in_pages, wrapped
from mlx_cuda._mlx_lm.batches import Batches
from mlx_cuda._mlx_lm.models import Decoding
from mlx_cuda._replay import packing, sequences

from benchmarks.mlx_lm_parts import part

from ..gpu.mlx_lm_parts import SIZES
from .sessions_on_cpu import close, replayed

try:
    caches = part("models.cache")
except ImportError as error:
    pytest.skip(f"mlx_lm.models.cache cannot be imported: {error}", allow_module_level=True)

pytestmark = pytest.mark.usefixtures("on_the_cpu")

SMALL = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "vocab_size": 100}
PROMPT, MOST = 10, 40  # tokens of a prompt; rows of a rotating cache that is full at the end
KINDS: dict[str, Callable[[], Any]] = {
    "growing": caches.KVCache,
    "rotating": lambda: caches.RotatingKVCache(100_000),
    "full": lambda: caches.RotatingKVCache(MOST, keep=4),
    "quantized": lambda: caches.QuantizedKVCache(group_size=32, bits=8),
}
BATCHES = {"growing": KINDS["growing"], "rotating": KINDS["rotating"], "full": lambda: caches.RotatingKVCache(MOST)}
FORMS: dict[str, Any] = {"captured": None, "in pages": None, "quantized": packing.Packing(32, 8)}
LARGEST = {"captured": 1e-4, "in pages": 1e-4, "quantized": 0.2}  # errors of keys and values
WORDS = mx.array(np.random.default_rng(3).integers(0, 100, (3, 200)))


@pytest.fixture
def model() -> Any:
    module = part("models.qwen3")
    mx.random.seed(7)
    made = module.Model(module.ModelArgs.from_dict(SIZES | SMALL))
    mx.eval(made.parameters())
    return made


@pytest.fixture
def step(decoding: Decoding, model: Any) -> Callable[[mx.array, list[Any]], mx.array]:
    return replayed(decoding, model)


@pytest.fixture
def as_it_is(model: Any) -> Callable[[mx.array, list[Any]], mx.array]:
    return lambda tokens, cache: model(tokens, cache=cache)


def after_a_prompt(model: Any, make: Callable[[], Any], row: int = 0, count: int = PROMPT) -> list[Any]:
    cache = [make() for _ in model.layers]
    model(WORDS[row : row + 1, :count], cache=cache)
    return cache


def batch(model: Any, make: Callable[[], Any]) -> list[Any]:
    layers = zip(*(after_a_prompt(model, make, row, count) for row, count in enumerate((PROMPT, 3, 7))), strict=True)
    return [layer[0].merge(list(layer)) for layer in layers]


def steps(call: Callable[[mx.array, list[Any]], mx.array], cache: list[Any], first: int, last: int, rows: int = 1) -> mx.array:
    """Logits of each of these tokens."""
    return mx.concatenate([call(WORDS[:rows, at : at + 1], cache) for at in range(first, last)], axis=1)


def hide(decoding: Decoding, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have batches be where a test wants them."""
    monkeypatch.setattr(packing.settings, "packing", FORMS[form])
    vars(decoding)["_own"].batches = Batches(refused=form == "captured")


def arrays_of(cache: Any) -> list[mx.array]:
    """The arrays of its state that hold keys and values."""
    return [array for part in cache.state[:2] for array in (part if isinstance(part, tuple) else [part])]


def largest(array: mx.array) -> float:
    return float(mx.abs(array).max().item()) if array.size else 0.0  # type: ignore[arg-type]


def own_memory(cache: list[Any]) -> int:
    return sum(each.nbytes for each in cache)


@pytest.mark.parametrize(("most", "keep"), [(100_000, 0), (100_000, 4), (50, 4), (33, 0), (16, 2)])
def test_rotating_memory_grows_with_its_use(decoding: Decoding, model: Any, step: Any, as_it_is: Any, most: int, keep: int) -> None:
    ours, theirs = (after_a_prompt(model, lambda: caches.RotatingKVCache(most, keep)) for _ in range(2))
    at = PROMPT
    for count in (8, 5, 30, 40):
        for _ in range(count):
            assert close(steps(step, ours, at, at + 1), steps(as_it_is, theirs, at, at + 1))
            at += 1
            assert ours[0].keys.shape[2] <= min(most, max(16, 2 * (ours[0].offset + 4)))
        if ours[0].is_trimmable():
            assert [each.trim(3) for each in (*ours, *theirs)] == [3] * 4
        logits = [model(WORDS[:1, at : at + 4], cache=cache) for cache in (ours, theirs)]  # several tokens
        assert close(*logits)
        at += 4
    assert [each.state[2:] for each in ours] == [each.state[2:] for each in theirs]
    assert decoding.replayed >= 83 - decoding.captured
    assert decoding.captured <= 10


@pytest.mark.parametrize("most", [100_000, 50, 33])
def test_a_rotating_batch_grows_with_its_use(
    decoding: Decoding, model: Any, step: Any, as_it_is: Any, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    hide(decoding, "captured", monkeypatch)
    ours, theirs = (batch(model, lambda: caches.RotatingKVCache(most)) for _ in range(2))
    for first, last, rows in ((PROMPT, 40, 3), (40, 90, 2)):
        for each in (*ours, *theirs) if rows == 2 else ():
            each.filter([2, 0])
        for at in range(first, last):
            assert close(steps(step, ours, at, at + 1, rows), steps(as_it_is, theirs, at, at + 1, rows))
            assert ours[0].keys.shape[2] <= min(most, max(16, 2 * (ours[0]._offset + 4)))
    assert [each.offset.tolist() for each in ours] == [each.offset.tolist() for each in theirs]


def test_a_rotating_cache_takes_over_the_memory_of_another_size(model: Any, step: Any, as_it_is: Any, decoding: Decoding) -> None:
    """While both are not full; another one has more or fewer rows."""
    steps(step, after_a_prompt(model, lambda: caches.RotatingKVCache(100_000)), PROMPT, 20)
    for most, more in ((60, 0), (30, 2), (100_000, 0)):
        before = decoding.captured
        ours, theirs = (after_a_prompt(model, partial(caches.RotatingKVCache, most), 1) for _ in range(2))
        assert close(steps(step, ours, PROMPT, 20), steps(as_it_is, theirs, PROMPT, 20))
        assert decoding.captured == before + more
        del ours


@pytest.mark.parametrize("kind", KINDS)
def test_files_hold_what_is_used_alone(
    decoding: Decoding, model: Any, step: Any, as_it_is: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    steps(step, after_a_prompt(model, KINDS[kind], 1), 20, 58)  # whose rows nobody else is to see
    ours, theirs = (after_a_prompt(model, KINDS[kind]) for _ in range(2))
    end = 50 if kind == "full" else 30
    steps(step, ours, PROMPT, end), steps(as_it_is, theirs, PROMPT, end)
    files = [tmp_path / "ours.safetensors", tmp_path / "theirs.safetensors"]
    for cache, file in zip((ours, theirs), files, strict=True):
        caches.save_prompt_cache(str(file), cache, {"of": "a test"})
    for each in ours:
        memory = each.keys if isinstance(each.keys, tuple) else (each.keys,)
        assert all(mx.all(array[..., each.offset :, :] == 0).item() for array in memory)
        assert {array.shape[2] for array in arrays_of(each)} == {MOST if kind == "full" else end}
    assert files[0].stat().st_size <= files[1].stat().st_size
    in_pages.restore()  # as where this package is not
    loaded, metadata = caches.load_prompt_cache(str(files[0]), return_metadata=True)
    assert metadata == {"of": "a test"}
    assert [type(each) for each in loaded] == [type(each) for each in theirs]
    expected = steps(as_it_is, theirs, 60, 75)
    assert close(steps(as_it_is, loaded, 60, 75), expected)
    assert close(steps(step, ours, 60, 75), expected)  # which goes on as well


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", BATCHES)
def test_files_of_batches_hold_what_is_used_alone(
    decoding: Decoding, model: Any, step: Any, as_it_is: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, form: str
) -> None:
    hide(decoding, form, monkeypatch)
    if form == "quantized":
        model.set_dtype(mx.bfloat16)
    gone = batch(model, BATCHES[kind])
    steps(step, gone, 20, 50, 3)
    del gone
    ours, theirs = (batch(model, BATCHES[kind]) for _ in range(2))
    steps(step, ours, PROMPT, 50, 3), steps(as_it_is, theirs, PROMPT, 50, 3)
    assert all(map(sequences.is_in_pages, ours)) == (form != "captured")
    caches.save_prompt_cache(str(tmp_path / "ours.safetensors"), ours)
    for one, other in zip(ours, theirs, strict=True):
        for array, wanted in zip(arrays_of(one), arrays_of(other), strict=True):
            assert array.shape[2] == (MOST if kind == "full" else 50)
            if kind == "full":
                assert largest(mx.roll(array, -one._idx, 2) - mx.roll(wanted, -other._idx, 2)) < LARGEST[form]
                continue
            for row, start in enumerate(other.left_padding.tolist()):
                assert largest(array[row, :, start:] - wanted[row, :, start:50]) < LARGEST[form]
                assert largest(array[row, :, :start]) == 0
    in_pages.restore()
    if kind == "growing":  # mlx-lm's rotating ones lack an attribute once they are loaded
        loaded = caches.load_prompt_cache(str(tmp_path / "ours.safetensors"))
        expected = steps(as_it_is, theirs, 60, 64, 3)
        assert form == "quantized" or close(steps(as_it_is, loaded, 60, 64, 3), expected)
        assert form == "quantized" or close(steps(step, ours, 60, 64, 3), expected)


COPIES: dict[str, Callable[[Any], Any]] = {
    "copy": lambda cache: list(map(copy.copy, cache)),
    "deepcopy": copy.deepcopy,
    "pickle": lambda cache: pickle.loads(pickle.dumps(cache)),  # noqa: S301
}


@pytest.mark.parametrize("copied", COPIES)
@pytest.mark.parametrize("kind", KINDS)
def test_copies_of_a_cache(model: Any, step: Any, as_it_is: Any, kind: str, copied: str) -> None:
    ours, theirs = (after_a_prompt(model, KINDS[kind]) for _ in range(2))
    end = 55 if kind == "full" else 30
    steps(step, ours, PROMPT, end), steps(as_it_is, theirs, PROMPT, end)
    other = COPIES[copied](ours)
    assert [type(each) for each in other] == [type(each) for each in ours] == [type(each) for each in theirs]
    assert [vars(each).keys() for each in other] == [vars(each).keys() for each in theirs]
    assert own_memory(other) <= own_memory(theirs)
    expected = steps(as_it_is, theirs, 60, 70)
    if copied != "copy":  # whose arrays are the same ones, and are written to in place, as without this package
        assert close(steps(step, ours, 60, 70), expected)
    assert close(steps(step, other, 60, 70), expected)


@pytest.mark.parametrize("copied", COPIES)
@pytest.mark.parametrize("form", ["captured", "in pages"])
@pytest.mark.parametrize("kind", BATCHES)
def test_copies_of_a_batch(
    decoding: Decoding, model: Any, step: Any, as_it_is: Any, monkeypatch: pytest.MonkeyPatch, kind: str, form: str, copied: str
) -> None:
    hide(decoding, form, monkeypatch)
    ours, theirs = (batch(model, BATCHES[kind]) for _ in range(2))
    kinds = [type(each) for each in ours]
    steps(step, ours, PROMPT, 55, 3), steps(as_it_is, theirs, PROMPT, 55, 3)
    other = COPIES[copied](ours)
    assert all(map(sequences.is_in_pages, ours)) == (form != "captured")
    assert not any(map(sequences.is_in_pages, other))
    assert [type(each) for each in other] == [type(each) for each in ours] == kinds
    assert [vars(each).keys() for each in other] == [vars(each).keys() for each in theirs]
    expected = steps(as_it_is, theirs, 60, 66, 3)
    if (copied, form) != ("copy", "captured"):
        assert close(steps(step, ours, 60, 66, 3), expected)
    assert close(steps(as_it_is, other, 60, 66, 3), expected)


@pytest.mark.parametrize("form", ["captured", "in pages"])
@pytest.mark.parametrize("kind", BATCHES)
def test_what_leaves_a_batch_is_a_plain_cache(
    decoding: Decoding, model: Any, step: Any, as_it_is: Any, monkeypatch: pytest.MonkeyPatch, kind: str, form: str
) -> None:
    hide(decoding, form, monkeypatch)
    ours, theirs = (batch(model, BATCHES[kind]) for _ in range(2))
    steps(step, ours, PROMPT, 55, 3), steps(as_it_is, theirs, PROMPT, 55, 3)
    left, wanted = ([each.extract(1) for each in cache] for cache in (ours, theirs))
    for one, other in zip(left, wanted, strict=True):
        assert type(one) is type(other)
        assert vars(one).keys() == vars(other).keys()
        assert one.state[2:] == other.state[2:]
        assert [array.shape for array in arrays_of(one)] == [array.shape for array in arrays_of(other)]
        assert all(map(close, arrays_of(one), arrays_of(other)))
    for cache in (ours, theirs):
        for each in cache:
            each.filter([2])
    assert close(steps(step, left, 60, 66), steps(as_it_is, wanted, 60, 66))
    assert close(steps(step, ours, 60, 66), steps(as_it_is, theirs, 60, 66))


def test_a_batch_in_pages_is_written_to(model: Any, step: Any, as_it_is: Any) -> None:
    ours, theirs = (batch(model, caches.KVCache) for _ in range(2))
    steps(step, ours, PROMPT, 30, 3), steps(as_it_is, theirs, PROMPT, 30, 3)
    for each in (*ours, *theirs):
        with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
            _ = each.nothing
        each.left_padding = each.left_padding + mx.array([1, 0, 2])
    assert not any(map(sequences.is_in_pages, ours))
    for one, other in zip(ours, theirs, strict=True):
        assert (one.size(), one.empty(), one.left_padding.tolist()) == (other.size(), False, other.left_padding.tolist())
    assert close(model(WORDS[:, 30:31], cache=ours), model(WORDS[:, 30:31], cache=theirs))


def test_quantizing_a_captured_cache(model: Any, step: Any) -> None:
    cache = after_a_prompt(model, caches.KVCache)
    steps(step, cache, PROMPT, 30)
    quantized = cache[0].to_quantized(group_size=32, bits=8)
    assert (quantized.offset, {array.shape[2] for array in (*quantized.keys, *quantized.values)}) == (30, {30})


def test_classes_that_are_made_of_mlx_lm_s(model: Any, step: Any) -> None:
    class Own(caches.KVCache):  # type: ignore[misc, name-defined]
        pass

    steps(step, after_a_prompt(model, caches.KVCache), PROMPT, 12)
    steps(step, batch(model, caches.KVCache), PROMPT, 12, 3)
    (own, _) = after_a_prompt(model, Own)
    other = copy.deepcopy(own)
    assert type(other) is Own
    assert vars(other).keys() == vars(own).keys()
    assert own.state[0] is own.keys


def test_classes_and_memory_are_mlx_lm_s_again(model: Any, step: Any, as_it_is: Any, tmp_path: Path) -> None:
    """Once steps are not captured any more, and no cache is in pages."""
    classes = caches.KVCache, caches.BatchKVCache
    before = [dict(vars(cls)) for cls in classes]
    ours, theirs = (after_a_prompt(model, caches.KVCache) for _ in range(2))
    steps(step, ours, PROMPT, 30), steps(as_it_is, theirs, PROMPT, 30)
    together = batch(model, caches.KVCache)
    steps(step, together, PROMPT, 20, 3)
    assert [dict(vars(cls)) for cls in classes] != before
    wrapped.remove()
    assert {each.keys.shape[2] for each in ours} == {30}
    caches.save_prompt_cache(str(tmp_path / "cache.safetensors"), ours)
    assert close(steps(as_it_is, ours, 30, 40), steps(as_it_is, theirs, 30, 40))
    assert [each._idx for each in together] == [20, 20]
    assert together[0].keys.shape[2] == 20
    del together
    wrapped.remove()
    assert [dict(vars(cls)) for cls in classes] == before
