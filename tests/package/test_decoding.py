"""Which calls are steps, and when they are captured and replayed."""

from __future__ import annotations

import copy
import gc
import importlib
import threading
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx_cuda
import pytest
from mlx_cuda._loader import native as _native
from mlx_cuda._mlx_lm import in_pages, models, wrapped
from mlx_cuda._mlx_lm.caches import Growing
from mlx_cuda._mlx_lm.models import Decoding, decoding_of
from mlx_cuda._mlx_lm.wrapped import replaying
from mlx_cuda._replay.capture import Capture, while_captured
from mlx_cuda._replay.errors import NotReplayed

from .sessions_on_cpu import native_module

pytestmark = pytest.mark.usefixtures("on_the_cpu")

nn: Any = importlib.import_module("mlx.nn")  # whose names mypy does not see
TOKEN = mx.array([[3]])


class KVCache:
    """What can be weakly referred to, after a prompt."""

    offset = 5

    def trim(self, count: int) -> int:
        return count


class BatchKVCache(KVCache):
    """Of a batch, whose company stays with its second step."""

    def extract(self, index: int) -> Any:
        return index


class ArraysCache:
    """What linear attention keeps, of one sequence or of a batch."""

    lengths = left_padding = None

    def __init__(self) -> None:
        self.cache: list[Any] = [mx.zeros(2)]

    extract = BatchKVCache.extract


KVCache.__module__ = BatchKVCache.__module__ = ArraysCache.__module__ = "mlx_lm.models.cache"


class Session:
    """What `Decoding` uses of a captured step."""

    refusal: Exception | None = None
    nbytes = 1

    @classmethod
    def nbytes_for(cls, caches: list[Any]) -> int:
        return cls.nbytes * len(caches)

    def __init__(self, tokens: mx.array, caches: list[Any], stream: mx.Stream) -> None:  # noqa: ARG002
        self.shape = tokens.shape
        self.room = 2
        self.taken = 0
        self.caches = caches

    def owner(self) -> Any:
        return self.caches[0] if self.caches else None

    def leave(self) -> None:
        self.caches = []

    release = leave

    def record(self, taken: Any, _: Any) -> Any:
        if self.refusal:
            raise self.refusal
        return taken.logits

    def is_for(self, stream: mx.Stream) -> bool:  # noqa: ARG002
        return True

    def take(self, caches: list[Any]) -> bool:
        self.taken += 1
        self.caches = caches
        return self.room > 0

    def call(self, *_: Any) -> Any:
        self.room -= 1
        return "replayed" if self.room >= 0 else None


@pytest.fixture
def decoding(monkeypatch: pytest.MonkeyPatch, forgetful: None) -> Decoding:
    monkeypatch.setattr(models, "Session", Session)
    monkeypatch.setattr(models, "Watch", lambda *_: SimpleNamespace(same=lambda _: True))
    monkeypatch.setattr(Session, "refusal", None)
    monkeypatch.setattr(_native, "module", lambda _: native_module())
    return Decoding()


def step(decoding: Decoding, *caches: Any, at_once: bool = False, batch: int = 1) -> Any:
    tokens = mx.zeros((batch, 1), mx.int32)
    logits = decoding.step(None, lambda *_, **__: mx.zeros(1), tokens, list(caches), at_once=at_once)
    return logits if isinstance(logits, str) else "as it is"


def test_the_first_step_of_a_conversation_is_captured(decoding: Decoding) -> None:
    one = KVCache()
    assert [step(decoding, one) for _ in range(3)] == ["as it is", "replayed", "replayed"]
    assert decoding.reason == ""


@pytest.mark.parametrize(("kinds", "offset"), [
    ([BatchKVCache], 5),
    ([KVCache, BatchKVCache], 5),
    ([BatchKVCache, ArraysCache], 5),
    ([ArraysCache], 5),
    ([KVCache], 0),
    ([KVCache, ArraysCache], 0),
])  # fmt: skip
def test_the_second_step_is_captured_of_a_batch_and_without_a_prompt(decoding: Decoding, kinds: list[type[Any]], offset: int) -> None:
    caches = [kind() for kind in kinds]
    vars(caches[0])["offset"] = offset
    assert step(decoding, *caches) == "as it is"
    assert not decoding.sessions
    assert [step(decoding, *caches) for _ in range(3)] == ["as it is", "replayed", "replayed"]


def test_the_first_step_is_captured_beside_linear_attention(decoding: Decoding) -> None:
    caches = [ArraysCache(), KVCache()]
    assert [step(decoding, *caches) for _ in range(3)] == ["as it is", "replayed", "replayed"]


@pytest.mark.parametrize("first", [None, mx.zeros(2, mx.float16), mx.zeros(3)])
def test_a_step_that_changes_what_its_arrays_are_is_not_captured(decoding: Decoding, first: mx.array | None) -> None:
    one, rows = ArraysCache(), KVCache()
    one.cache = [first]

    def model(*_: Any, cache: list[Any]) -> mx.array:
        cache[0].cache = [mx.ones(2)]
        return mx.zeros(1)

    for _ in range(models.FAILURES + 1):
        decoding.step(None, model, TOKEN, [one, rows], at_once=False)
        assert not decoding.sessions
        assert "its first step" in decoding.reason
        one.cache = [first]
    one.cache = [mx.ones(2)]
    decoding.step(None, model, TOKEN, [one, rows], at_once=False)
    assert len(decoding.sessions) == 1


def test_a_step_that_gives_other_arrays_is_begun_at_once_beside_other_processes(
    decoding: Decoding, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[mx.array] = []
    monkeypatch.setattr(mx, "async_eval", begun.append)
    monkeypatch.setenv("MLX_WORLD_SIZE", "2")
    one, logits = ArraysCache(), mx.ones(3)

    def model(*_: Any, cache: list[Any]) -> mx.array:
        cache[0].cache.append(mx.ones(2))  # one more than before
        return logits

    assert decoding.step(None, model, TOKEN, [one, KVCache()], at_once=False) is logits
    assert not decoding.sessions
    assert list(map(id, begun)) == [id(logits)]


def test_caches_that_take_turns(decoding: Decoding) -> None:
    one, other = KVCache(), KVCache()
    assert [step(decoding, cache) for cache in (one, other) * 3] == ["as it is"] * 2 + ["replayed"] * 4
    for session in decoding.sessions:
        vars(session).update(caches=[], room=9)
    two = KVCache(), KVCache()
    assert [step(decoding, cache) for cache in two * 3] == ["replayed"] * 6
    assert decoding.captured == 2


def test_caches_that_are_gone_are_not_counted(decoding: Decoding) -> None:
    for _ in range(5):
        step(decoding, BatchKVCache())
    gc.collect()
    assert len(vars(decoding)["_own"]._steps) == 0


def test_a_step_is_captured_at_once_where_that_is_asked(decoding: Decoding) -> None:
    one = KVCache()
    assert [step(decoding, one, at_once=True) for _ in range(2)] == ["as it is", "replayed"]


def test_a_full_cache_is_captured_again(decoding: Decoding) -> None:
    one = KVCache()
    assert [step(decoding, one) for _ in range(6)] == ["as it is", "replayed", "replayed"] * 2
    assert len(decoding.sessions) == 1


def test_the_memory_of_a_cache_that_is_gone_serves_the_next(decoding: Decoding) -> None:
    first = KVCache()
    step(decoding, first, at_once=True)
    vars(decoding.sessions[0])["caches"] = []
    cache = KVCache()
    assert step(decoding, cache) == "replayed"
    assert decoding.sessions[0].taken == 1  # type: ignore[attr-defined]


def test_a_batch_of_one_begins_as_when_nothing_had_been_captured(decoding: Decoding) -> None:
    step(decoding, BatchKVCache(), at_once=True)
    vars(decoding.sessions[0])["caches"] = []
    cache = BatchKVCache()
    assert [step(decoding, cache) for _ in range(2)] == ["as it is", "replayed"]


def test_each_size_of_a_batch_has_its_own(decoding: Decoding) -> None:
    one = BatchKVCache()
    sizes = [2, 2, 2, 3, 3, 2, 1, 3]
    expected = ["as it is", "as it is", "replayed", "as it is", "as it is", "replayed", "as it is", "replayed"]
    assert [step(decoding, one, batch=size) for size in sizes] == expected
    assert decoding.captured == 2


def test_a_batch_that_outgrows_what_it_was_given_is_captured_at_once(decoding: Decoding) -> None:
    step(decoding, KVCache(), at_once=True, batch=2)
    vars(decoding.sessions[0])["caches"] = []
    one = KVCache()
    assert [step(decoding, one, batch=2) for _ in range(4)] == ["replayed", "replayed", "as it is", "replayed"]


def test_what_no_cache_has_is_kept_while_it_is_small(decoding: Decoding, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mx, "get_memory_limit", lambda: 2 / models.IDLE_MEMORY)
    monkeypatch.setattr(mx, "get_active_memory", lambda: 0)
    one, other = KVCache(), KVCache()
    step(decoding, other, at_once=True)
    for size in (2, 3, 4, 5):
        step(decoding, one, at_once=True, batch=size)
    assert [session.shape[0] for session in decoding.sessions] == [5, 4, 3, 1]
    assert [session.owner() for session in decoding.sessions] == [one, None, None, other]


def test_other_weights_end_what_was_captured(decoding: Decoding) -> None:
    one = KVCache()
    step(decoding, one, at_once=True)
    decoding._own.weights.same = lambda _: False  # type: ignore[union-attr, method-assign]
    assert [step(decoding, one), decoding.captured] == ["as it is", 1]


def test_a_capture_leaves_what_was_patched_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    upstream = mx.fast.scaled_dot_product_attention
    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", upstream)  # afterwards
    captured: list[bool] = []
    while_captured(Capture(None), lambda _: captured.append(mx.fast.scaled_dot_product_attention is upstream))
    assert captured == [False]
    assert mx.fast.scaled_dot_product_attention is upstream

    def patched(*_: Any, **__: Any) -> mx.array:
        raise AssertionError

    while_captured(Capture(None), lambda _: monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", patched))
    assert mx.fast.scaled_dot_product_attention is patched


def test_captures_that_are_not_replayed_end(decoding: Decoding) -> None:
    for _ in range(40):
        assert step(decoding, KVCache()) == "as it is"
        vars(decoding)["_own"].sessions.clear()
    assert decoding.captured == models.FEW_REPLAYS
    assert "rarely" in decoding.reason
    one = KVCache()
    for _ in range(models.FEW_REPLAYS**2 - 1):  # as many steps as they should have replayed
        assert step(decoding, one) == "as it is"
        assert "rarely" in decoding.reason
    assert [step(decoding, one) for _ in range(2)] == ["as it is", "replayed"]


def test_who_asks_for_a_capture_is_given_one(decoding: Decoding) -> None:
    """However many there were: ``decode_step`` raises where there is none."""
    for count in range(1, 2 * models.FEW_REPLAYS):
        assert step(decoding, KVCache(), at_once=True) == "as it is"
        assert decoding.captured == count
        assert not decoding.reason


def test_with_other_weights_everything_is_tried_again(decoding: Decoding, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = KVCache(), KVCache()
    monkeypatch.setattr(Session, "refusal", NotReplayed("it reads"))
    step(decoding, other, at_once=True, batch=2)
    monkeypatch.setattr(Session, "refusal", None)
    step(decoding, one, at_once=True)
    decoding._own.weights.same = lambda _: False  # type: ignore[union-attr, method-assign]
    assert [step(decoding, other, batch=2) for _ in range(2)] == ["as it is", "replayed"]


def test_what_a_batch_gives_away_is_computed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    class BatchKVCache(KVCache):
        def extract(self, index: int) -> Any:
            return SimpleNamespace(keys=mx.ones(index) + 1, values=mx.ones(index) + 2)

    computed: list[mx.array] = []
    monkeypatch.setattr(mx, "async_eval", lambda *arrays: computed.extend(arrays))
    monkeypatch.setattr(models, "Session", Session)
    monkeypatch.setattr(models, "Watch", lambda *_: None)
    monkeypatch.setattr(_native, "module", lambda _: native_module())
    for module in (models, in_pages):
        monkeypatch.setattr(module, "kind_of", lambda _: Growing)
    own, cache = BatchKVCache.extract, BatchKVCache()
    for _ in range(2):
        step(Decoding(), cache, at_once=True)
    one = cache.extract(3)
    assert [array.tolist() for array in (one.keys, one.values)] == [[2] * 3, [3] * 3]
    assert len(computed) == 2
    assert computed[0] is one.keys
    assert computed[1] is one.values
    wrapped.remove()
    assert BatchKVCache.extract is own
    assert {"__getstate__", "__getattr__", "__setattr__"}.isdisjoint(vars(BatchKVCache))


def test_each_thread_has_its_own(decoding: Decoding) -> None:
    one = KVCache()
    step(decoding, one, at_once=True)
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.extend([list(decoding.sessions), step(decoding, one)]))
    thread.start()
    thread.join()
    assert found == [[], "as it is"]
    assert step(decoding, one) == "replayed"


def test_another_thread_may_end_what_was_captured_at_any_time(decoding: Decoding, monkeypatch: pytest.MonkeyPatch) -> None:
    def ended(_: Any) -> Any:
        decoding.forget()
        return Growing

    one = BatchKVCache()
    step(decoding, one)
    with monkeypatch.context() as ending:
        ending.setattr(models, "kind_of", ended)
        assert step(decoding, one) == "as it is"
    assert [step(decoding, one) for _ in range(2)] == ["as it is", "replayed"]


def test_a_copy_of_a_model_has_nothing_captured() -> None:
    model = nn.Linear(1, 1)
    own = decoding_of(model)
    for other in (copy.copy(model), copy.deepcopy(model)):
        assert decoding_of(other) is not own
    assert decoding_of(model) is own


def test_at_most_so_many_sessions_are_kept(decoding: Decoding) -> None:
    caches = [KVCache() for _ in range(models.MOST_SESSIONS + 2)]
    decoding.replayed = len(caches) * models.FEW_REPLAYS
    for cache in caches:
        step(decoding, cache, at_once=True)
    assert [session.owner() for session in decoding.sessions] == caches[:1:-1]


def test_caches_of_other_kinds_do_not_count(decoding: Decoding) -> None:
    assert {step(decoding, SimpleNamespace()) for _ in range(20)} == {"as it is"}
    other = SimpleNamespace()
    assert {step(decoding, other) for _ in range(9)} == {"as it is"}
    assert "its cache is a SimpleNamespace" in decoding.reason
    one = KVCache()
    assert [step(decoding, one) for _ in range(2)] == ["as it is", "replayed"]


def test_a_model_that_is_part_of_one_takes_no_steps_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wrapped, "is_step", lambda *_: True)
    steps: list[Any] = []

    def count(self: Decoding, model: Any, function: Any, tokens: Any, caches: Any, **_: Any) -> Any:
        steps.append(model)
        return function(model, tokens, cache=caches)

    def call(self: Decoding, model: Any, function: Any, tokens: Any, caches: Any, **_: Any) -> Any:
        models._inside.a_step = True
        try:
            return count(self, model, function, tokens, caches)
        finally:
            models._inside.a_step = False

    monkeypatch.setattr(Decoding, "step", call)
    inner, outer = nn.Linear(1, 1), nn.Linear(1, 1)
    part = replaying(lambda _, tokens, cache: (tokens, cache))
    whole = replaying(lambda _, tokens, cache: part(inner, tokens, cache=cache))
    for _ in range(2):
        assert whole(outer, "token", cache=["cache"]) == ("token", ["cache"])
    assert steps == [outer, outer]
    part(inner, "token", cache=["cache"])
    assert steps[2] is inner


@pytest.mark.parametrize(("tokens", "cache", "others"), [
    (mx.zeros((1, 2)), [KVCache()], {}), (mx.zeros((1, 1, 1)), [KVCache()], {}), ("token", [KVCache()], {}),
    (TOKEN, [], {}), (TOKEN, None, {}), (TOKEN, [KVCache()], {"input_embeddings": mx.zeros(1)}),
])  # fmt: skip
def test_other_calls_are_left_alone(monkeypatch: pytest.MonkeyPatch, tokens: Any, cache: Any, others: dict[str, Any]) -> None:
    monkeypatch.setattr(_native, "loaded", SimpleNamespace(traced=lambda _: False))
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
    model = nn.Linear(1, 1)
    call = replaying(lambda *arguments, **options: (arguments, options))
    assert call(model, tokens, cache=cache, **others) == ((model, tokens), {"cache": cache, **others})
    reason = mlx_cuda.explain(mlx_cuda.decode_step, model).reason
    assert ("input_embeddings" in reason) == bool(others)  # what its steps are given besides


@pytest.mark.parametrize(("more", "options"), [([], {"inputs": TOKEN}), ([[KVCache()], 3], {})])
def test_arguments_that_do_not_fit_are_the_models_to_refuse(
    decoding: Decoding, monkeypatch: pytest.MonkeyPatch, more: list[Any], options: dict[str, Any]
) -> None:
    monkeypatch.setattr(_native, "loaded", SimpleNamespace(traced=lambda _: False))
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
    monkeypatch.setattr(wrapped, "decoding_of", lambda _: decoding)
    monkeypatch.setattr(models, "decoding_of", lambda _: decoding)
    monkeypatch.setattr(Decoding, "step", lambda *_, **__: "captured")
    call = replaying(lambda model, inputs, cache=None: (model, inputs, cache))
    with pytest.raises(TypeError):
        call(nn.Linear(1, 1), TOKEN, *more, **options, **({} if more else {"cache": [KVCache()]}))
    assert call(nn.Linear(1, 1), TOKEN, cache=[KVCache()]) == "captured"


def test_models_of_mlx_lm_are_wrapped_while_patched(monkeypatch: pytest.MonkeyPatch) -> None:
    class Module:
        @staticmethod
        def cached(function: Any, *_: Any) -> Any:
            return function

    monkeypatch.setattr(_native, "loaded", Module())

    def answer(_: Any, inputs: Any = None, cache: Any = None) -> Any:
        return inputs, cache

    def model(name: str = "Model") -> Any:
        return type(name, (nn.Module,), {"__module__": "mlx_lm.models.any", "__call__": answer})

    def wrapped(cls: Any) -> bool:
        return hasattr(cls.__call__, "unpatched")

    seen: list[Any] = []

    before, other = model(), model("Layer")
    with mlx_cuda.patch():
        during = model()
        with mlx_cuda.patch():
            pass

        class Registered:
            def __init_subclass__(cls, **options: Any) -> None:
                seen.append(options)

        type("Mixed", (nn.Module, Registered), {}, word=1)
        assert seen == [{"word": 1}]
        with pytest.raises(TypeError):
            type("Wrong", (nn.Module,), {}, word=1)
        assert wrapped(before)
        assert wrapped(during)
        assert not wrapped(other)
        assert before()("tokens", cache=None) == ("tokens", None)
    assert not wrapped(before)
    assert not wrapped(during)
    assert not wrapped(model())
    mlx_cuda.patch()
    mlx_cuda.unpatch()
    assert not wrapped(before)
    del before, during, other
    gc.collect()
