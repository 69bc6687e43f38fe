"""What the forms of attention ask of the native module's memory of calls, and what they tell it."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import mlx_cuda
import pytest
from mlx_cuda._loader import graph_cache as _remembered
from mlx_cuda._loader import native as _native
from mlx_cuda._loader.native import Engine

from .references import random

if TYPE_CHECKING:
    from collections.abc import Callable


class Memory:
    """A native module that answers what it is told to, and keeps what it is asked."""

    def __init__(self) -> None:
        self.answer: Any = None
        self.asked: list[tuple[Any, ...]] = []
        self.kept: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.endswith("_again"):
            return partial(self._ask, name)
        if name.startswith("remember_"):
            return lambda *call: self.kept.append((name, *call))
        return lambda *arrays, **_: [arrays[0], arrays[0][..., 0]]

    def remembered(self, operation: Callable[..., mx.array]) -> Callable[..., mx.array]:
        return operation

    def attention_unsupported(self, *_: Any) -> str:
        return ""

    def _ask(self, *call: Any) -> Any:
        self.asked.append(call)
        if call[-1] is mx.cpu:
            raise TypeError("no stream")
        return self.answer


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Memory:
    module: Any = Memory()
    monkeypatch.setattr(_native, "loaded", module)
    monkeypatch.setattr(_native, "engine", lambda _: Engine(module, (9, 0), (9, 28, 0)))
    return module  # type: ignore[no-any-return]


Q, K = random((1, 4, 1, 64), mx.float16), random((1, 2, 300, 64), mx.float16)
PAGES, TABLE, LENGTHS = random((5, 2, 16, 64), mx.float16), mx.array([[0, 1]]), mx.array([17])
PACKED, ENDS = random((30, 4, 64), mx.float16), mx.array([0, 10, 25])


OURS: Any = mlx_cuda  # overloads do not let options through


def paged(*arrays: mx.array, **options: Any) -> Any:
    return OURS.paged_attention(*arrays, TABLE, LENGTHS, **options)


def varlen(*arrays: mx.array, **options: Any) -> Any:
    return OURS.attention_varlen(*arrays, ENDS, ENDS, max_seqlen_q=15, max_seqlen_k=15, **options)


def patched(*arrays: mx.array, **options: Any) -> mx.array:
    with mlx_cuda.patch():
        return mx.fast.scaled_dot_product_attention(*arrays, scale=0.5, **options)


FORMS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "attention": (mlx_cuda.attention, (None, None, None, None, None, None, None, False, False, False)),
    "patched": (patched, (0.5, None, None, None, None, None, None, False, False, False)),
    "paged": (paged, (TABLE, LENGTHS, *[None] * 4, False)),
    "varlen": (varlen, (ENDS, ENDS, 15, 15, *[None] * 5, False)),
}
INPUTS = {"attention": (Q, K, K), "patched": (Q, K, K), "paged": (Q, PAGES, PAGES), "varlen": (PACKED, PACKED, PACKED)}
MEMORIES = {"patched": "attention"}


@pytest.mark.parametrize("form", FORMS)
def test_an_answer_is_returned_as_it_is(memory: Memory, form: str) -> None:
    call, rest = FORMS[form]
    memory.answer = object()
    assert call(*INPUTS[form]) is memory.answer
    assert memory.asked == [(f"{MEMORIES.get(form, form)}_again", *INPUTS[form], *rest, None)]
    assert not memory.kept


@pytest.mark.parametrize("form", FORMS)
def test_what_a_fused_kernel_computes_is_kept_with_its_stream(memory: Memory, form: str) -> None:
    call, rest = FORMS[form]
    call(*INPUTS[form], stream=mx.cpu)
    engine = {"attention": ("decode", 2, 2**31 - 1), "patched": ("decode", 2, 2**31 - 1)}.get(form, ())
    stream = mx.default_stream(mx.cpu)
    assert memory.kept == [(f"remember_{MEMORIES.get(form, form)}", *engine, *INPUTS[form], *rest, stream)]


@pytest.mark.parametrize("form", FORMS)
def test_what_is_composed_or_refused_is_not_kept(memory: Memory, form: str) -> None:
    call, _ = FORMS[form]
    narrow = [each[..., :60] for each in INPUTS[form]]
    if form in {"paged", "varlen"}:
        call(*narrow)
    else:
        call(*narrow, sinks=mx.ones(4, mx.float16))
    with pytest.raises((ValueError, TypeError)):
        call(*INPUTS[form], sinks=mx.ones(3))
    assert not memory.kept
    assert len(memory.asked) >= 2


def test_every_option_is_part_of_a_call(memory: Memory) -> None:
    sinks, padding, mask = mx.ones(4, mx.float16), mx.array([3]), mx.ones((300,), mx.bool_)
    options = {"scale": 0.5, "mask": mask, "window_size": (3, 4), "softcap": 2.0, "sinks": sinks, "lengths": LENGTHS}
    options |= {"left_padding": padding, "return_lse": True, "deterministic": True, "force_fused": True}
    mlx_cuda.attention(Q, K, K, **options)  # type: ignore[call-overload]
    assert memory.asked == [("attention_again", Q, K, K, *options.values(), None)]
    assert memory.kept == [("remember_attention", "decode", 300, 300, Q, K, K, *options.values(), mx.default_stream(mx.default_device()))]


def test_a_memory_that_cannot_read_the_arguments_changes_nothing(memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise TypeError("incompatible function arguments")

    for form in ("attention", "paged", "varlen"):
        monkeypatch.setattr(memory, f"remember_{form}", refuse, raising=False)
    for form, (call, _) in FORMS.items():
        assert call(*INPUTS[form]).shape == INPUTS[form][0].shape


def test_an_operation_goes_by_way_of_the_module_that_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, ...]] = []

    def operation(*arguments: Any, **options: Any) -> Any:
        """What it does."""
        calls.append((arguments, options))

    class Module:
        def remembered(self, function: Callable[..., mx.array]) -> Callable[..., mx.array]:
            assert function is operation
            return lambda *arguments, **options: calls.append((self, arguments, options))  # type: ignore[return-value]

    monkeypatch.setattr(_native, "loaded", None)
    call: Any = _remembered.remembered(operation)
    assert (call.__name__, call.__doc__) == ("operation", "What it does.")
    assert _remembered.natively(operation) is operation
    call(1, two=2)
    for module in (Module(), Module()):
        monkeypatch.setattr(_native, "loaded", module)
        call(3)
        call(four=4)
        assert calls[-2:] == [(module, (3,), {}), (module, (), {"four": 4})]
        assert _remembered.natively(operation) is _remembered.natively(operation)
    monkeypatch.setattr(_native, "loaded", None)
    call()
    assert calls[0] == ((1,), {"two": 2})
    assert calls[-1] == ((), {})


def test_patch_puts_the_modules_functions_in_place(memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    answers: dict[str, object] = {}

    def remember(operation: Any) -> Any:
        return lambda *_, **__: answers.setdefault(operation.__name__, object())

    monkeypatch.setattr(memory, "remembered", remember)
    with mlx_cuda.patch():
        for name in ("quantized_matmul", "gather_mm", "gather_qmm"):
            assert getattr(mx, name)(1) is answers[name]
