"""What errors do to steps that are captured or replayed: whose they are, and whether the model goes on."""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest
from mlx_cuda._loader import native as _native
from mlx_cuda._mlx_lm import models
from mlx_cuda._mlx_lm.models import Decoding
from mlx_cuda._replay.errors import CaptureFailed, NotReplayed
from mlx_cuda._replay.memory import has_room
from mlx_cuda._replay.step import compare

from .sessions_on_cpu import CaptureError, native_module
from .test_decoding import TOKEN, BatchKVCache, KVCache, Session, decoding, step

pytestmark = pytest.mark.usefixtures("on_the_cpu")

__all__ = ["decoding"]


@pytest.mark.parametrize(("refusal", "tries"), [(NotReplayed("it reads"), 1), (CaptureError("a kernel failed"), models.FAILURES)])
def test_what_cannot_be_captured_runs_as_it_is(decoding: Decoding, monkeypatch: pytest.MonkeyPatch, refusal: Exception, tries: int) -> None:
    monkeypatch.setattr(Session, "refusal", refusal)
    made: list[Session] = []

    class Made(Session):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            made.append(self)

    monkeypatch.setattr(models, "Session", Made)
    one = KVCache()
    assert {step(decoding, one) for _ in range(20)} == {"as it is"}
    assert len(made) == tries
    assert str(refusal) in decoding.reason
    assert bool(decoding.errors) == isinstance(refusal, CaptureError)


@pytest.mark.parametrize("error", [RuntimeError("cudaGraphLaunch: out of memory"), TypeError("an error of ours")])
def test_errors_that_are_not_of_the_capture_alone_are_the_callers(
    decoding: Decoding, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """MLX has dropped kernels then whose arrays it holds for evaluated: the model must not go on with them."""
    monkeypatch.setattr(Session, "refusal", error)
    one = KVCache()
    vars(one)["offset"] = 5

    def model(*_: Any, cache: list[Any]) -> mx.array:
        cache[0].offset += 1
        return mx.zeros(1)

    for at_once in (False, True):
        with pytest.raises(type(error), match=str(error)):
            decoding.step(None, model, TOKEN, [one], at_once=at_once)
        assert one.offset == 5
    monkeypatch.setattr(Session, "refusal", None)
    step(decoding, one)
    monkeypatch.setattr(Session, "call", lambda *_: (_ for _ in ()).throw(error))
    with pytest.raises(type(error), match=str(error)):
        step(decoding, one)


def test_a_model_whose_arrays_are_kept_is_not_run_once_more(decoding: Decoding, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a hook would see that."""
    module = native_module()
    module.lifetimes_between = lambda *_: SimpleNamespace(any_left=lambda known: [id(each) for each in known] != [])
    monkeypatch.setattr(_native, "module", lambda _: module)
    one = KVCache()
    assert {step(decoding, one) for _ in range(5)} == {"as it is"}
    assert "kept somewhere" in decoding.reason
    assert not decoding.sessions


@pytest.mark.parametrize(("room", "steps"), [(10, ["as it is", "replayed", "replayed"]), (9, ["as it is"] * 3)])
def test_caches_that_fill_the_memory_are_not_held_twice(
    decoding: Decoding, monkeypatch: pytest.MonkeyPatch, room: int, steps: list[str]
) -> None:
    """Where MLX runs out of memory in a step of the model's own, the error is the caller's: upstream has none."""
    monkeypatch.setattr(Session, "nbytes", 10)
    monkeypatch.setattr(mx, "get_memory_limit", lambda: 1000)
    monkeypatch.setattr(mx, "get_active_memory", lambda: 1000 - room)
    one = KVCache()
    assert [step(decoding, one) for _ in range(3)] == steps
    assert bool(decoding.sessions) == (room == 10)


@pytest.mark.parametrize(
    ("active", "cached", "free", "nbytes", "room"),
    [
        (50, 0, 50, 50, True),
        (50, 0, 50, 51, False),  # beyond MLX's limit
        (50, 40, 10, 50, True),  # it frees what it has cached
        (50, 40, 9, 50, False),  # and another process has the rest
        (20, 30, 5, 6, False),  # nothing is freed: MLX is far from its limit, as it does not know of other processes
        (20, 30, 6, 6, True),
    ],
)
def test_other_processes_have_memory_too(
    monkeypatch: pytest.MonkeyPatch, active: int, cached: int, free: int, nbytes: int, room: bool
) -> None:
    for name, value in {"memory_limit": 100, "active_memory": active, "cache_memory": cached}.items():
        monkeypatch.setattr(mx, f"get_{name}", lambda value=value: value)
    monkeypatch.setattr(mx, "device_info", lambda: {"free_memory": free})
    assert has_room(nbytes) == room


def test_memory_that_was_full_may_have_room_the_next_time(decoding: Decoding, monkeypatch: pytest.MonkeyPatch) -> None:
    one = KVCache()
    monkeypatch.setattr(Session, "refusal", CaptureError("CUDA_ERROR_OUT_OF_MEMORY (out of memory)"))
    assert {step(decoding, one) for _ in range(models.FAILURES + 2)} == {"as it is"}
    monkeypatch.setattr(Session, "refusal", None)
    assert [step(decoding, one), step(decoding, one), *decoding.errors] == ["as it is", "replayed"]


@pytest.mark.parametrize("where", ["recording", "replaying"])
@pytest.mark.parametrize("error", ["cudaMallocAsync(&data, size, stream) failed: out of memory", "no kernel image"])
def test_memory_of_an_attempt_is_given_back_where_it_is_full(
    decoding: Decoding, monkeypatch: pytest.MonkeyPatch, where: str, error: str
) -> None:
    """MLX keeps it otherwise, and finds none for arrays of other sizes while others have the rest: the model's own step would fail."""
    held: list[weakref.ref[Session]] = []

    def fail(session: Session, *_: Any) -> Any:
        held.append(weakref.ref(session))
        raise CaptureFailed(error)

    def clear() -> None:
        held_when_cleared.append(sum(each() is not None for each in held))

    held_when_cleared: list[int] = []
    one = KVCache()
    if where == "replaying":
        step(decoding, one)
    monkeypatch.setattr(mx, "clear_cache", clear)
    monkeypatch.setattr(Session, "record" if where == "recording" else "call", fail)
    assert step(decoding, one) == "as it is"
    assert len(held) == 1
    assert held_when_cleared == ([0] if "memory" in error else [])


def test_what_cannot_be_captured_stops_nothing_of_another_kind(decoding: Decoding, monkeypatch: pytest.MonkeyPatch) -> None:
    one = BatchKVCache()
    monkeypatch.setattr(Session, "refusal", NotReplayed("it reads"))
    assert {step(decoding, one, batch=2) for _ in range(4)} == {"as it is"}
    monkeypatch.setattr(Session, "refusal", None)
    assert [step(decoding, one) for _ in range(3)] == ["as it is", "as it is", "replayed"]
    assert step(decoding, one, batch=2) == "as it is"  # which is not tried again
    assert decoding.reason


@pytest.mark.parametrize("error", [CaptureError, CaptureFailed])
def test_a_replay_that_fails_leaves_the_step_to_the_model(
    decoding: Decoding, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    def fail(_: Session, __: mx.array, caches: list[Any], *___: Any) -> Any:
        caches[0].offset = 7
        raise error("no memory")

    one = KVCache()
    vars(one)["offset"] = 6
    step(decoding, one, at_once=True)
    with monkeypatch.context() as failing:
        failing.setattr(Session, "call", fail)
        assert step(decoding, one) == "as it is"
    assert vars(one)["offset"] == 6
    assert not decoding.sessions
    assert [decoding.reason, *decoding.errors] == ["replaying it failed: no memory"] * 2
    assert [step(decoding, one) for _ in range(2)] == ["as it is", "replayed"]


def test_a_model_that_has_changed_is_tried_again(decoding: Decoding, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that drew random numbers while it was trained."""
    one = KVCache()
    monkeypatch.setattr(Session, "refusal", NotReplayed("it draws random numbers"))
    assert step(decoding, one) == "as it is"
    monkeypatch.setattr(Session, "refusal", None)
    assert [step(decoding, one) for _ in range(2)] == ["as it is"] * 2
    decoding._own.weights.same = lambda _: False  # type: ignore[union-attr, method-assign]
    assert [step(decoding, one) for _ in range(2)] == ["as it is", "replayed"]


def test_a_step_that_changes_its_model_ends_what_was_captured(decoding: Decoding) -> None:
    one, other = KVCache(), KVCache()
    step(decoding, one)
    (before,) = decoding.sessions

    def model(*_: Any, **__: Any) -> mx.array:
        decoding._own.weights.same = lambda _: False  # type: ignore[union-attr, method-assign]
        return mx.zeros(1)

    decoding.step(None, model, TOKEN, [other], at_once=False)
    assert before not in decoding.sessions


def test_other_weights_have_to_be_evaluated_too(decoding: Decoding, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "is_evaluated", lambda model: model == "evaluated")
    assert decoding.may_begin("evaluated")
    assert decoding.may_begin("not yet")  # they are asked once
    decoding.forget()
    assert not decoding.may_begin("not yet")


def test_logits_that_a_model_masks_are_equal_and_others_are_not() -> None:
    """As of phi3small, which sets logits of unused tokens to -inf."""
    logits = mx.random.normal((1, 64))
    masked = mx.where(mx.arange(64) > 50, -mx.inf, logits)
    compare(masked, masked)
    compare(masked * (1 + 1e-4), masked)
    for wrong in (logits, masked * 2, mx.where(mx.arange(64) == 3, mx.nan, masked), mx.where(mx.arange(64) == 3, -mx.inf, masked)):
        with pytest.raises(NotReplayed, match="other logits"):
            compare(wrong, masked)
    with pytest.raises(NotReplayed, match="other logits"):
        compare(mx.where(mx.arange(64) == 3, mx.nan, masked), mx.where(mx.arange(64) == 3, mx.nan, masked))
