"""Whatever is changed of what is reachable from a model is noticed; the watch is compiled for MLX's CPU backend."""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import random
import weakref
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.nn.layers.quantized import quantize
from mlx_cuda._mlx_lm import positions
from mlx_cuda._mlx_lm.models import Decoding
from mlx_cuda._replay import watch
from mlx_cuda._replay.errors import NotReplayed
from mlx_cuda._replay.watch import STATE, Watch

from ..gpu.changes import changes
from ..gpu.decoding_model import Model
from .compiled import compiles

nn: Any = importlib.import_module("mlx.nn")  # whose names mypy does not see

pytestmark = [pytest.mark.usefixtures("on_the_cpu"), compiles]


@pytest.fixture
def watched(native: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], Watch]:
    """What watches a model."""
    monkeypatch.setattr(watch, "native", SimpleNamespace(module=lambda _: native))
    return lambda model, *notes: Watch(model, mx.default_stream(mx.cpu), notes)


class Slotted:
    __slots__ = ("factor", "of")
    always = 3

    def __init__(self) -> None:
        self.factor, self.of = 2.0, [1.5]


class Holder:
    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)


class Factor(float):
    """A number of somebody's own class."""


def shifting() -> Any:
    shift = mx.ones(4)
    return lambda x: x + shift


class Scaled:
    """What somebody puts in the place of a method."""

    def __init__(self, by: float) -> None:
        self.by = by

    def __call__(self, x: mx.array) -> mx.array:
        return x * self.by


class Adapted(nn.Module):  # type: ignore[misc]
    """What layers of libraries hold besides arrays: numbers, functions of several kinds, objects with slots, closures over numbers."""

    limits: dict[str, float] = {"most": 4.0}  # noqa: RUF012
    shared: Any = Holder(by=1.0)
    louder = Scaled(2.0)

    def bounded(self, x: mx.array, within: list[float] = [9.0]) -> mx.array:  # noqa: B006
        return mx.minimum(x, within[0])

    @property
    def table(self) -> Any:
        return self.tables[0]

    def __init__(self) -> None:
        super().__init__()
        scale, table = 3.5, [0.25]

        def scaled(x: mx.array, more: float = 1.5, *, most: float = 9.0) -> mx.array:
            return mx.minimum(x * scale * table[0] + more, most)

        self.inner = nn.Linear(4, 4)
        self.scale, self.name, self.flag, self.nothing = 20.0, "linear", True, None
        self.slotted, self.options, self.shape = Slotted(), {"eps": 1e-5, "deep": [{"x": 1}]}, (4, (5, 6.5))
        self.scaled, self.activation = scaled, nn.silu
        self.part = functools.partial(scaled, more=2.5)
        self.bound = self.slotted.of.append
        self.method = self.inner.__call__
        self.kept = Holder(window=7)
        self.queue = deque([8.5])
        self.chosen = {3}
        self.compiled, self.sign, self.matmul = mx.compile(scaled), mx.sin, mx.fast.rms_norm
        self.factor, self.shifted, self.tables = Factor(2.0), shifting(), (mx.ones(4), [mx.ones(4)])
        self.deque, self.kinds = deque([mx.ones(4)], maxlen=4), {Holder(on=True): None}
        self.hooks: tuple[set[int], set[int]] = (set(), {1, 2})

    def __call__(self, x: mx.array) -> Any:
        return self.scaled(self.inner(x)) * self.scale


def quantized() -> Any:
    model = Model(size=64, heads=2, kv_heads=1, dim=32, hidden=64)
    quantize(model, 32, 4)
    return model


MODELS: dict[str, Callable[[], Any]] = {
    "dense": lambda: Model(size=32, heads=2, kv_heads=1, dim=16, hidden=32, window=8),
    "quantized": quantized,
    "mixture": lambda: Model(size=32, heads=2, kv_heads=1, dim=16, hidden=32, mixture=(4, 2, "qwen3_moe"), sinks=True),
    "linear attention": lambda: Model(size=32, heads=2, kv_heads=1, dim=16, hidden=32, memory=True, norms_after=True),
    "adapted": lambda: nn.Sequential(Adapted(), nn.RMSNorm(4)),
}


@pytest.mark.parametrize("name", MODELS)
def test_every_change_of_what_is_reachable_is_noticed(watched: Callable[[Any], Watch], name: str) -> None:
    model = MODELS[name]()
    mx.eval(model.parameters())
    found = changes(model)
    assert len(found) > 50
    watch = watched(model)
    assert watch.same(model)
    unseen = []
    for change in found:
        with change.made():
            if watch.same(model):
                unseen.append(change.name)
        assert watch.same(model), f"{change.name}, taken back"
    assert not unseen


# What changes() does not make: other things than one value in the place of another.
EDITS: dict[str, Callable[[Any], object]] = {
    "a layer is added": lambda model: model.layers.append(nn.Linear(4, 4)),
    "a layer is taken away": lambda model: model.layers.pop(),
    "layers change places": lambda model: model.layers.reverse(),
    "the list is another": lambda model: setattr(model, "layers", [model.layers[1], model.layers[0]]),
    "a weight is added": lambda model: setattr(model.layers[1], "bias", mx.ones(4)),
    "a weight is taken away": lambda model: model.layers[0].inner.pop("bias"),
    "a layer is another of the same weights": lambda model: model.layers[0].update_modules({"inner": _of(model.layers[0].inner)}),
    "an attribute is added": lambda model: setattr(model.layers[0], "more", 1),
    "an attribute is taken away": lambda model: delattr(model.layers[0], "scale"),
    "attributes change names": lambda model: vars(model.layers[0]).update(flagged=vars(model.layers[0]).pop("flag")),
    "the class is another": lambda model: setattr(model.layers[1], "__class__", type("Norm", (nn.RMSNorm,), {})),
    "the attributes' dict is another": lambda model: setattr(model.layers[0].kept, "__dict__", {"window": 8}),
    "a set gets another member": lambda model: model.layers[0].chosen.add(4),
    "a queue gets another member": lambda model: model.layers[0].queue.append(4),
    "a slot's list grows": lambda model: model.layers[0].slotted.of.append(2.5),
    "a partial's option is another": lambda model: model.layers[0].part.keywords.update(more=3.5),
    "a closure's array is added to": lambda model: _add_to(model.layers[0].shifted.__closure__[0].cell_contents),
    "a tuple's array is added to": lambda model: _add_to(model.layers[0].tables[0]),
    "a queue's array is added to": lambda model: _add_to(model.layers[0].deque[0]),
    "a function of C's is another": lambda model: setattr(model.layers[0], "sign", mx.cos),
    "a function of MLX's is another": lambda model: setattr(model.layers[0], "matmul", mx.fast.layer_norm),
    "a compiled function is another": lambda model: setattr(model.layers[0], "compiled", mx.compile(mx.tanh)),
    "a number of another class is another": lambda model: setattr(model.layers[0], "factor", Factor(3.0)),
    "one set gives a member to another": lambda model: model.layers[0].hooks[0].add(model.layers[0].hooks[1].pop()),
    "a dict's key is changed": lambda model: setattr(next(iter(model.layers[0].kinds)), "on", False),
    "a class's object is changed": lambda _: setattr(Adapted.shared, "by", Adapted.shared.by + 1),
    "what is in the place of a method is changed": lambda _: setattr(Adapted.louder, "by", Adapted.louder.by + 1),
    "a method's default is changed": lambda _: vars(Adapted)["bounded"].__defaults__[0].append(1.0),
    "dropout begins": lambda model: model.train(not model.training),
}  # fmt: skip


def _add_to(array: mx.array) -> None:
    array[...] = array + 1


def _of(other: Any) -> Any:
    layer = type("Linear", (nn.Linear,), {})(1, 1)
    layer.update(dict(other))
    return layer


@pytest.mark.parametrize("name", EDITS)
def test_an_edit_is_noticed(watched: Callable[[Any], Watch], name: str) -> None:
    model = MODELS["adapted"]()
    watch = watched(model)
    EDITS[name](model)
    assert not watch.same(model)
    assert watched(model).same(model)


def test_equal_values_are_as_good(watched: Callable[[Any], Watch]) -> None:
    """Some models write what they hold anew in each call."""
    model = MODELS["adapted"]()
    layer = model.layers[0]
    watch = watched(model)
    layer.scale = float("20.0")
    layer.name = "".join(["lin", "ear"])
    layer.options = {"eps": 1e-5, "deep": [{"x": 1}]}
    layer.inner.weight = layer.inner.weight + 0
    assert watch.same(model)
    assert watch.same(model)
    layer.inner.weight = layer.inner.weight + 1
    assert not watch.same(model)


@pytest.mark.parametrize("other", [mx.zeros(3), mx.ones(2), mx.ones(3, mx.float16), mx.array([1, 1, float("nan")])])
def test_other_weights_are_not(watched: Callable[[Any], Watch], other: mx.array) -> None:
    model = nn.RMSNorm(3)
    watch = watched(model)
    model.weight = other
    assert not watch.same(model)


def test_weights_of_a_transformation_are_others(watched: Callable[[Any], Watch]) -> None:
    model = nn.Linear(4, 4)
    watch, same = watched(model), []

    def loss(parameters: Any) -> mx.array:
        model.update(parameters)
        same.append(watch.same(model))
        return model(mx.ones((1, 4))).sum()  # type: ignore[no-any-return]

    mx.grad(loss)(model.parameters())
    assert same == [False]


def test_notes_that_a_step_does_not_read_may_change(watched: Callable[..., Watch], monkeypatch: pytest.MonkeyPatch) -> None:
    """None is an attribute, an array one of a module's items: both may come and go."""
    model = Adapted()
    model._rope_deltas = model._position_ids = None
    noted = watched(model, *positions.NOTES)
    monkeypatch.setattr(watch, "_Found", None)  # no walk is needed
    for value in (mx.ones((1, 1)), mx.zeros((1, 1)), None, mx.ones((3, 1, 7))):
        model._rope_deltas = value
        model._position_ids = value
        assert noted.same(model)
    monkeypatch.undo()
    monkeypatch.setattr(watch, "native", SimpleNamespace(module=lambda _: noted._module))
    model.scale = 21.0
    assert not noted.same(model)


def test_an_unchanged_model_takes_the_short_way(watched: Callable[[Any], Watch]) -> None:
    """Which is C++'s alone, whatever kinds of objects it holds."""
    for make in MODELS.values():
        model = make()
        watch = watched(model)
        assert watch._native.unchanged(model)
        mx.eval(model.parameters())
        assert watch._native.unchanged(model)


class Odd:
    @property
    def __dict__(self) -> Any:  # type: ignore[override]
        raise RuntimeError("not yet")

    def __getattr__(self, name: str) -> Any:
        return getattr(self.of, name)


UNWATCHED = [
    np.zeros(3), bytearray(3), memoryview(bytearray(3)), np.zeros(2, "M8[s]"), random.Random(), iter([1]), weakref.ref(Holder),  # noqa: S311
]  # fmt: skip


@pytest.mark.parametrize("held", UNWATCHED, ids=lambda held: type(held).__name__)
def test_what_may_be_another_unseen_cannot_be_watched(watched: Callable[[Any], Watch], held: Any) -> None:
    model = nn.Linear(4, 4)
    vars(model)["table"] = [held]
    with pytest.raises(NotReplayed, match="cannot be watched"):
        watched(model)


@pytest.mark.parametrize("held", [*UNWATCHED, {str(i): i for i in range(watch.MOST)}], ids=lambda held: type(held).__name__)
def test_a_model_that_comes_to_hold_such_is_another(watched: Callable[[Any], Watch], held: Any) -> None:
    model = nn.Linear(4, 4)
    watch = watched(model)
    vars(model)["table"] = [held]
    assert not watch.same(model)


def test_objects_with_odd_attributes_raise_nothing_else(watched: Callable[[Any], Watch]) -> None:
    model = nn.Linear(4, 4)
    vars(model)["odd"] = Odd()
    with contextlib.suppress(NotReplayed):
        assert watched(model).same(model)


def test_objects_of_the_package_say_nothing_of_a_model(watched: Callable[[Any], Watch]) -> None:
    """Such as what holds its captured steps, where a function has that in a closure."""
    model, decoding = nn.Linear(4, 4), Decoding()
    vars(model)["after"] = lambda: decoding
    watch = watched(model)
    decoding.replayed += 1
    assert watch._native.unchanged(model)


def test_more_than_can_be_watched_is_refused(watched: Callable[[Any], Watch]) -> None:
    model = nn.Linear(4, 4)
    vars(model)["words"] = {str(i): i for i in range(watch.MOST)}
    with pytest.raises(NotReplayed, match="too many"):
        watched(model)


def test_addresses_that_are_used_again_are_no_models_own(watched: Callable[[Any], Watch]) -> None:
    model = MODELS["adapted"]()
    watch = watched(model)
    for value in range(100):  # what was there before is freed each time
        model.layers[0].scale = float(str(value))
        model.layers[1].weight = mx.full(4, value + 2.0)
        model.layers[0].options = {"eps": float(value)}
        assert not watch.same(model)


def test_a_model_that_is_watched_ends_as_if_it_were_not(watched: Callable[[Any], Watch]) -> None:
    model = MODELS["adapted"]()
    del model.layers[0].method
    vars(model)[STATE] = watched(model)  # where the package has it
    ended = [weakref.ref(each) for each in (model, model.layers[0], model.layers[0].inner)]
    gc.disable()
    try:
        del model
        assert [each() for each in ended] == [None] * 3
    finally:
        gc.enable()


def test_a_model_that_leads_to_itself_ends_too(watched: Callable[[Any], Watch]) -> None:
    model = MODELS["adapted"]()
    model._parent = model.layers[0]._parent = model
    watch = vars(model)[STATE] = watched(model)
    assert watch.same(model)
    model.layers[0]._parent = None
    assert not watch.same(model)
    ended = weakref.ref(model)
    del model, watch
    gc.collect()
    assert ended() is None
