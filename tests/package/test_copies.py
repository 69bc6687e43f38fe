"""Copies of mlx-lm's code in other packages: known by what they do, and left alone where that is not known."""

from __future__ import annotations

import functools
import importlib
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_cuda
import pytest
from mlx_cuda import _patch
from mlx_cuda._invariant.mlx_lm import MASKS
from mlx_cuda._mlx_lm import caches as caches_module
from mlx_cuda._mlx_lm import copies, places, positions, wrapped
from mlx_cuda._mlx_lm.caches import Growing, kind_of
from mlx_cuda._replay.errors import NotReplayed

pytestmark = pytest.mark.usefixtures("on_the_cpu")

BASE = """
    import mlx.core as mx

    PARTS = (1, 2)
    SCALE = 2.0

    def helper(x):
        return x * SCALE * PARTS[1]

    class Parent:
        def size(self):
            return 1

    class KVCache(Parent):
        def __init__(self):
            self.offset = 5

        @property
        def state(self):
            return self.offset

    def gated_delta_ops(q, k, v, g, beta, state=None, mask=None):
        return "theirs", helper(q)
"""
MODEL = """
    import mlx.core as mx
    import mlx.nn as nn
    from .base import KVCache, gated_delta_ops

    def update(*arrays):
        return gated_delta_ops(*arrays)

    class {name}(nn.Module):
        def __call__(self, inputs, cache=None, {others}**kwargs):
            return inputs

    class Layer(nn.Module):
        def __call__(self, inputs, cache=None):
            return inputs
"""
EQUAL: dict[str, Callable[[str], str]] = {
    "under another name": lambda text: text,
    "with comments and docstrings": lambda text: text.replace("def helper(x):", 'def helper(x):\n        """Twice."""  # or so'),
    "with annotations": lambda text: text.replace("helper(x):", "helper(x: mx.array) -> mx.array:").replace("beta,", "beta: int,"),
    "in other lines": lambda text: text.replace("(q, k, v,", "(\n        q, k,\n\n        v,"),
    "beside other code": lambda text: text + "\n    def other():\n        return helper(3)\n",
    "in another order": lambda text: text.replace("SCALE = 2.0\n", "") + "\n    SCALE = 2.0\n",
}
ALTERED: dict[str, Callable[[str], str]] = {
    "itself": lambda text: text.replace("helper(q)", "helper(k)").replace("= 5", "= 6"),
    "what it calls": lambda text: text.replace("x * SCALE", "x + SCALE").replace("return 1", "return 2"),
    "a constant that it uses": lambda text: text.replace("SCALE = 2.0", "SCALE = 3.0").replace("return 1", "return 1.0"),
    "constants that it uses": lambda text: text.replace("(1, 2)", "(1, 3)").replace("return 1", "return 3"),
    "a default": lambda text: text.replace("mask=None", "mask=0").replace("__init__(self)", "__init__(self, a=1)"),
    "its arguments": lambda text: text.replace("k, v,", "v, k,").replace("@property", "@classmethod"),
    "what it is made of": lambda text: text.replace("(Parent)", "").replace("import mlx.core as mx", "from math import tan as mx").replace(
        "helper(q)", "helper(mx)"
    ),
}  # fmt: skip


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Makes a package of modules, and imports one of them."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(tmp_path))

    def make(name: str, module: str, **sources: str) -> Any:
        (tmp_path / name / "models").mkdir(parents=True, exist_ok=True)
        for each, text in {"__init__": "", **sources}.items():
            (tmp_path / name / "models" / f"{each}.py").write_text(textwrap.dedent(text), "utf-8")
        importlib.invalidate_caches()
        return importlib.import_module(f"{name}.models.{module}")

    yield make
    mlx_cuda.unpatch()
    wrapped.remove()
    places.take_away()
    for each in set(sys.modules) - before:
        del sys.modules[each]


@pytest.fixture
def base(write: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    """What is known is this one's code."""
    monkeypatch.setattr(caches_module, "_packages", {"mlx_lm"})
    module = write("original", "base", base=BASE)
    known = {copies.digest(each): each.__name__ for each in (module.KVCache, module.gated_delta_ops)}
    monkeypatch.setattr(copies, "KNOWN", known)
    assert [*known.values()] == ["KVCache", "gated_delta_ops"]
    return module


@pytest.mark.parametrize("change", EQUAL.values(), ids=EQUAL)
@pytest.mark.usefixtures("base")
def test_code_that_does_the_same(write: Callable[..., Any], change: Callable[[str], str]) -> None:
    copy = write("equal", "base", base=change(BASE))
    assert [copies.known_as(each) for each in (copy.KVCache, copy.gated_delta_ops)] == ["KVCache", "gated_delta_ops"]
    assert kind_of(copy.KVCache()) is Growing


@pytest.mark.parametrize("change", ALTERED.values(), ids=ALTERED)
@pytest.mark.usefixtures("base")
def test_code_that_does_something_else(write: Callable[..., Any], change: Callable[[str], str]) -> None:
    copy = write("altered", "base", base=change(BASE))
    assert [copies.known_as(each) for each in (copy.KVCache, copy.gated_delta_ops)] == ["", ""]
    with pytest.raises(
        NotReplayed, match=r"its cache is a altered\.models\.base\.KVCache \(digest [0-9a-f]{16}\), and the code of that is none of mlx-lm "
    ):
        kind_of(object.__new__(copy.KVCache))


def test_code_that_somebody_has_put_elsewhere(base: Any, write: Callable[..., Any]) -> None:
    copy = write("equal", "base", base=BASE)
    copy.helper = lambda x: x
    copy.KVCache.state = property(lambda _: 3)
    assert [copies.known_as(each) for each in (copy.KVCache, copy.gated_delta_ops)] == ["", ""]
    wrapped = write("wrapped", "base", base=BASE)
    wrapped.helper = functools.wraps(wrapped.helper)(lambda x: x)
    wrapped.Parent.size = lambda _: 3
    assert [copies.known_as(each) for each in (wrapped.KVCache, wrapped.gated_delta_ops)] == ["", ""]
    inner = write("inner", "base", base="def outer():\n    def gated_delta_ops():\n        pass\n    return gated_delta_ops\n").outer()
    others: list[Any] = [inner, len, 3, None, mx.array, [], mx]
    for other in others:
        assert copies.known_as(other) == ""
    assert copies.known_as(base.KVCache) == "KVCache"


def test_a_module_without_its_source_is_not_known(base: Any, write: Callable[..., Any], tmp_path: Path) -> None:
    copy = write("equal", "base", base=BASE)
    (tmp_path / "equal" / "models" / "base.py").unlink()
    assert copies.known_as(copy.gated_delta_ops) == ""
    assert copies.known_as(base.gated_delta_ops) == "gated_delta_ops"


def wraps(function: Any) -> bool:
    return hasattr(function, "unpatched")


@pytest.mark.usefixtures("base")
def test_known_functions_are_replaced_where_their_package_has_them(write: Callable[..., Any]) -> None:
    model = write("equal", "model", base=BASE, model=MODEL.format(name="Model", others=""))
    other = write("altered", "base", base=ALTERED["itself"](BASE))
    user = write("user", "user", user="from equal.models.base import gated_delta_ops")
    copy = sys.modules["equal.models.base"]
    theirs = copy.gated_delta_ops
    assert places.put()
    assert wraps(copy.gated_delta_ops)
    assert wraps(model.gated_delta_ops)
    assert not wraps(other.gated_delta_ops)
    assert user.gated_delta_ops is theirs  # who holds on to it has asked for theirs
    late = write("equal", "late", late="from .base import gated_delta_ops")
    assert wraps(late.gated_delta_ops)
    assert copy.gated_delta_ops(mx.ones(1), "no array", None, None, None)[0] == "theirs"
    assert places.left_alone("altered") == ["altered.models.base.gated_delta_ops"]
    assert places.left_alone("equal") == places.left_alone("mlx_lm") == []
    places.take_away()
    assert {copy.gated_delta_ops, model.gated_delta_ops, late.gated_delta_ops} == {theirs}
    places.take_away()
    assert copy.gated_delta_ops is theirs


@pytest.mark.usefixtures("base")
def test_more_arguments_than_mlx_lm_s(write: Callable[..., Any]) -> None:
    text = BASE.replace("mask=None):", "mask=None, state_steps=None):")
    copy = write("longer", "base", base=text)
    copies.KNOWN[copies.digest(copy.gated_delta_ops)] = "gated_delta_ops"
    places.put()
    arrays = [mx.ones((1, 2, 1, 4))] * 3 + [mx.ones((1, 2, 1))] * 2
    for more in ((), (None, None, 2), (None, None, None)):
        assert copy.gated_delta_ops(*arrays, *more)[0] == "theirs"  # without a GPU
    assert copy.gated_delta_ops(*arrays, state_steps=3)[0] == "theirs"
    with pytest.raises(TypeError, match="wrong"):
        copy.gated_delta_ops(*arrays, wrong=3)


@pytest.mark.parametrize("name", ["Model", "LanguageModel"])
@pytest.mark.usefixtures("base")
def test_models_beside_known_caches_replay_their_steps(write: Callable[..., Any], name: str) -> None:
    source = MODEL.format(name=name, others="")
    before = getattr(write("equal", "before", base=BASE, before=source), name)
    unknown = getattr(write("altered", "model", base=ALTERED["itself"](BASE), model=source), name)
    own = before.__call__
    with mlx_cuda.patch():
        _patch._install()  # as with a GPU
        during = write("equal", "during", during=source)
        pictures = write("equal", "pictures", pictures=MODEL.format(name=name, others="pixel_values=None, "))
        assert wraps(before.__call__)
        assert wraps(getattr(during, name).__call__)
        assert wraps(during.gated_delta_ops)
        for cls in (unknown, during.Layer, getattr(pictures, name)):
            assert not wraps(cls.__call__)
        assert before()("tokens", cache=None) == "tokens"
        reason = mlx_cuda.explain(mlx_cuda.decode_step, unknown()).reason
        assert reason.startswith(f"altered.models.model.{name} is no model of mlx-lm, and of none that has its caches from mlx-lm ")
        assert reason.endswith("; left alone, as their code is not known: altered.models.base.gated_delta_ops")
        assert "no decode step" in mlx_cuda.explain(mlx_cuda.decode_step, before()).reason
    mlx_cuda.unpatch()
    assert before.__call__ is own
    assert not wraps(getattr(during, name).__call__)
    assert not wraps(during.gated_delta_ops)
    assert not wraps(sys.modules["equal.models.base"].gated_delta_ops)


def test_what_is_tried_is_named() -> None:
    assert {name.partition(" ")[0] for name in copies.KNOWN.values()} == {*places.NAMES, *caches_module.NAMES, positions.KNOWN, MASKS}
