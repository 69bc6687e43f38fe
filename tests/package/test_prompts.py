"""Prompts whose first layers are begun while the model still builds the others."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest
from mlx_cuda._loader import native
from mlx_cuda._mlx_lm import models, prompts, wrapped
from mlx_cuda._mlx_lm.caches import Replaced
from mlx_cuda._mlx_lm.stand_ins import Session

from ..gpu.decoding_model import KVCache, Model

pytestmark = pytest.mark.usefixtures("on_the_cpu")


class Cache:
    def __init__(self) -> None:
        self.given: list[mx.array] = []

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self.given += [keys, values]
        return keys + 1, values + 1


class State:
    """Of a layer that has no keys; or a model, of no weights."""

    @staticmethod
    def parameters() -> dict[str, Any]:
        return {}


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[mx.array]:
    found: list[mx.array] = []
    monkeypatch.setattr(mx, "async_eval", lambda *arrays: found.extend(arrays))
    monkeypatch.setattr(mx, "eval", found.append)
    return found


def test_every_few_layers_are_begun(begun: list[mx.array]) -> None:
    caches: list[Any] = [Cache() for _ in range(11)]
    caches[5] = State()  # whose group begins with the next one
    arrays = [(mx.array(layer), mx.array(-layer)) for layer in range(11)]
    with prompts.begun_ahead(caches):
        results = [cache.update_and_fetch(*each) for cache, each in zip(caches, arrays, strict=True) if isinstance(cache, Cache)]
    assert [int(array.item()) for array in begun] == [1, -1, 6, -6, 9, -9, 1]  # type: ignore[arg-type]
    assert [int(keys.item()) for keys, _ in results] == [1, 2, 3, 4, 5, 7, 8, 9, 10, 11]  # type: ignore[arg-type]
    assert [len(cache.given) for cache in caches if isinstance(cache, Cache)] == [2] * 10


def test_the_host_does_not_run_away(begun: list[mx.array]) -> None:
    """It waits for the part before the last one that the device has been given."""
    caches = [Cache() for _ in range(5 * prompts.LAYERS)]
    with prompts.begun_ahead(caches):
        for layer, cache in enumerate(caches):
            cache.update_and_fetch(mx.array(layer), mx.array(-layer))
    assert [int(array.item()) for array in begun] == [1, -1, 5, -5, 9, -9, 1, 13, -13, 5, 17, -17, 9]  # type: ignore[arg-type]


def test_caches_are_what_they_were(begun: list[mx.array]) -> None:
    """After an error too, and inside of another model's call with them."""
    caches = [Cache() for _ in range(3)]

    def model() -> None:
        with prompts.begun_ahead(caches):
            with prompts.begun_ahead(caches):
                caches[1].update_and_fetch(mx.array(1), mx.array(2))
            caches[1].update_and_fetch(mx.array(3), mx.array(4))
            raise RuntimeError("in a layer")

    with pytest.raises(RuntimeError, match="in a layer"):
        model()
    assert len(begun) == 4
    assert all(vars(cache).keys() == {"given"} for cache in caches)


def test_not_while_the_model_is_transformed(begun: list[mx.array], monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens are none of what a gradient is for, but keys are made of it."""
    monkeypatch.setattr(native, "loaded", SimpleNamespace(traced=lambda _: True))
    caches = [Cache(), Cache()]
    with prompts.begun_ahead(caches):
        caches[1].update_and_fetch(mx.array(1), mx.array(2))
    assert begun == []
    assert len(caches[1].given) == 2


@pytest.mark.parametrize("processes", ["1", "2"])
def test_sums_over_gpus_take_in_the_residual_before_they_are_begun(
    begun: list[mx.array], monkeypatch: pytest.MonkeyPatch, processes: str
) -> None:
    seen: list[tuple[list[mx.array], int]] = []
    module = SimpleNamespace(traced=lambda _: False, sum_with_residuals=lambda arrays: seen.append((arrays, len(begun))))
    monkeypatch.setattr(native, "loaded", module)
    monkeypatch.setenv("MLX_WORLD_SIZE", processes)
    caches, pair = [Cache(), Cache()], [mx.array(1), mx.array(2)]
    with prompts.begun_ahead(caches):
        caches[1].update_and_fetch(*pair)
    assert [(list(map(id, arrays)), count) for arrays, count in seen] == ([(list(map(id, pair)), 0)] if processes == "2" else [])


@pytest.mark.parametrize(
    ("tokens", "cache", "is_one"),
    [
        (mx.zeros((1, 16), mx.int32), [], True),
        (mx.zeros((4, 2048), mx.int32), [Cache()], True),
        (mx.zeros((1, 15), mx.int32), [], False),
        (mx.zeros((2048,), mx.int32), [], False),
        (mx.zeros((1, 16), mx.int32), None, False),
        ([[1] * 16], [], False),
    ],
)
def test_what_is_a_prompt(tokens: Any, cache: Any, is_one: bool) -> None:
    assert prompts.is_prompt(tokens, cache) == is_one


def session_of(cache: Any) -> Session:
    """As one that has the cache, whose memory is counted as one byte."""
    made = Session.__new__(Session)
    made.kinds, made.memory, made.step = [Replaced], [[]], SimpleNamespace(clear=lambda _: None)
    made._give([cache], [])
    return made


def test_a_prompt_has_the_memory_of_conversations_that_are_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wrapped, "_on_gpu", lambda _: True)
    monkeypatch.setattr(mx, "get_memory_limit", lambda: 2 / models.MEMORY_BESIDE_A_PROMPT)
    monkeypatch.setattr(Session, "nbytes", 1)
    model, conversations = State(), [Cache() for _ in range(6)]
    sessions = models.decoding_of(model).sessions
    sessions += map(session_of, conversations)
    seen: list[int] = []
    call = wrapped.replaying(lambda *_, **__: seen.append(len(sessions)))
    prompt, none, newest = mx.zeros((1, 16), mx.int32), mx.zeros((1, 15), mx.int32), list(sessions)
    conversations[1:5] = []  # the first and the last go on
    newest[3].leave()  # what decodes a batch of another size at present
    call(model, none, cache=[Cache()])
    assert sessions == newest
    for _ in range(2):
        call(model, prompt, cache=[Cache()])
        assert sessions == [newest[i] for i in (0, 1, 2, 3, 5)]
    conversations.clear()
    call(model, prompt, cache=[Cache()])
    assert sessions == [newest[i] for i in (0, 1, 3)]
    assert seen == [6, 5, 5, 3]  # there was room before the model began


def test_nothing_begins_while_weights_are_not_evaluated(monkeypatch: pytest.MonkeyPatch, begun: list[mx.array]) -> None:
    """As MLX, which would need memory for all of them; they are looked at until they are there."""
    weights, there, asked = {"layers": [{"weight": mx.zeros(1)}, {"weight": mx.ones(1)}]}, [False], []

    def evaluated(arrays: list[mx.array]) -> bool:
        asked.append([array.item() for array in arrays])
        return there[0]

    monkeypatch.setattr(native, "loaded", SimpleNamespace(traced=lambda _: False, evaluated=evaluated))
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
    model: Any = State()
    model.parameters = lambda: weights
    rows, found = mx.zeros(1), []
    call = wrapped.replaying(lambda _, __, cache: cache[1].update_and_fetch(rows, rows))
    for there[0] in (False, True, False):
        begun.clear()
        call(model, mx.zeros((1, 16), mx.int32), cache=[Cache(), Cache()])
        found.append(bool(begun))
    assert found == [False, True, True]
    assert asked == [[0, 1]] * 2


@pytest.mark.parametrize("name", ["is_evaluated", "are_evaluated"])
def test_no_step_is_captured_while_nothing_is_evaluated(monkeypatch: pytest.MonkeyPatch, decoding: models.Decoding, name: str) -> None:
    """Neither the weights nor what caches hold; a weight that no step reads may never be."""
    for each in ("is_evaluated", "are_evaluated"):
        monkeypatch.setattr(models, each, lambda _: False)
    model: Any = Model(size=32, heads=2, kv_heads=1, dim=16, hidden=32)
    cache = [KVCache() for _ in model.layers]
    model(mx.array([[1, 2, 3]]), cache=cache)
    for token in range(3):
        decoding.step(model, Model.__call__, mx.array([[token]]), cache, at_once=False)
    assert (decoding.captured, decoding.replayed) == (0, 0)
    monkeypatch.setattr(models, name, lambda _: True)
    for token in range(3):
        decoding.step(model, Model.__call__, mx.array([[token]]), cache, at_once=False)
    assert (decoding.captured, decoding.replayed) == (1, 2)


@pytest.mark.parametrize(("share", "counts"), [(1.0, (1, 2)), (0.99, (1, 1))])
def test_the_first_token_does_not_wait_for_a_capture_of_its_own(
    monkeypatch: pytest.MonkeyPatch, decoding: models.Decoding, share: float, counts: tuple[int, int]
) -> None:
    """Of caches whose captures are given up when the next prompt begins."""
    model: Any = Model(size=32, heads=2, kv_heads=1, dim=16, hidden=32)
    cache = [KVCache() for _ in model.layers]
    model(mx.array([[1, 2, 3]]), cache=cache)
    held = Session.nbytes_for(cache)
    monkeypatch.setattr(mx, "get_memory_limit", lambda: share * held / models.MEMORY_BESIDE_A_PROMPT)
    monkeypatch.setattr(mx, "get_active_memory", lambda: held)
    for token in range(3):
        decoding.step(model, Model.__call__, mx.array([[token]]), cache, at_once=False)
    assert (decoding.captured, decoding.replayed) == counts


@pytest.mark.parametrize(("tokens", "on_gpu", "ahead"), [(16, True, True), (15, True, False), (16, False, False)])
def test_prompts_on_a_gpu_are_begun_ahead(
    monkeypatch: pytest.MonkeyPatch, begun: list[mx.array], tokens: int, on_gpu: bool, ahead: bool
) -> None:
    monkeypatch.setattr(wrapped, "_on_gpu", lambda _: on_gpu)
    caches, rows = [Cache(), Cache()], mx.zeros(1)
    call = wrapped.replaying(lambda _, __, cache: cache[1].update_and_fetch(rows, rows))
    call(State(), mx.zeros((1, tokens), mx.int32), cache=caches)
    assert bool(begun) == ahead
