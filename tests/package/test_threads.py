"""Functions that a capture or an export replaces: for its own thread, while other threads have what they had."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from types import ModuleType
from typing import Any

import mlx.core as mx
import mlx_cuda
import pytest
from mlx_cuda import _patch
from mlx_cuda._invariant.state import NotInvariant
from mlx_cuda._mlx_lm import copies, places, wrapped
from mlx_cuda._patch import EVERY, our_matmuls

from .matmuls import Matmuls
from .references import random
from .threads import in_another_thread, in_threads

pytestmark = pytest.mark.usefixtures("on_the_cpu")
X = random((80, 1, 64), mx.float16)
W, S, B = (each.astype(mx.float16) if each.dtype == mx.float32 else each for each in mx.quantize(random((4, 8, 64)), group_size=32))
EXPERTS = mx.arange(80) % 4


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    before = functions()
    yield
    mlx_cuda.unpatch()
    assert functions() == before


def functions() -> list[Any]:
    return [getattr(route.owner, route.name) for route in (*EVERY, *_patch.INVARIANT)]


def matmul() -> mx.array:
    return mx.quantized_matmul(X[:3, 0], W[0], S[0], B[0], group_size=32)


CALLS: list[Callable[[], mx.array]] = [
    matmul,
    lambda: mx.gather_mm(X[..., :16], X[:4, :, :16].swapaxes(1, 2), None, EXPERTS),
    lambda: mx.gather_qmm(X, W, S, B, rhs_indices=EXPERTS, group_size=32),
    lambda: mx.distributed.all_sum(X),
]


class Engines:
    """Who computes these calls."""

    def __init__(self, matmuls: Matmuls) -> None:
        self.matmuls = matmuls

    def ours(self, call: Callable[[], Any] = matmul) -> bool:
        before = len(self.matmuls.calls)
        call()
        return len(self.matmuls.calls) > before

    def of_all(self) -> set[bool]:
        return {self.ours(call) for call in CALLS}


@pytest.fixture
def engines(matmuls: Matmuls, monkeypatch: pytest.MonkeyPatch) -> Engines:
    def all_sum(x: mx.array, *_: Any) -> mx.array:
        matmuls.calls.append("all_sum")
        return x

    monkeypatch.setattr(matmuls, "all_sum", all_sum, raising=False)
    return Engines(matmuls)


def test_a_capture_is_its_own_thread_s(engines: Engines) -> None:
    expected = matmul().tolist()
    with our_matmuls():
        assert engines.of_all() == {True}
        assert in_another_thread(engines.of_all) == {False}
        assert in_another_thread(lambda: matmul().tolist()) == expected
    assert engines.of_all() == {False}


def test_names_and_texts_are_those_of_mlx() -> None:
    with our_matmuls():
        for route in _patch.ROUTES:
            for name in ("__name__", "__doc__", "__module__"):
                assert getattr(getattr(route.owner, route.name), name) == getattr(route.upstream, name), route.name


def test_what_another_thread_keeps_is_the_original_afterwards(engines: Engines) -> None:
    with our_matmuls():
        kept = in_another_thread(lambda: mx.quantized_matmul)
    call = lambda: kept(X[:3, 0], W[0], S[0], B[0], group_size=32)  # noqa: E731
    assert not engines.ours(call)
    with our_matmuls():
        assert not engines.ours(call)


def test_nested_captures_and_errors_restore(engines: Engines) -> None:
    before = functions()
    with our_matmuls():
        with pytest.raises(RuntimeError, match="inside"), our_matmuls():
            raise RuntimeError("inside")
        assert engines.ours()
        with _patch._unpatched():
            assert not engines.ours()
        assert engines.ours()
        assert not in_another_thread(engines.ours)
    assert functions() == before


def test_one_thread_captures_at_a_time(engines: Engines) -> None:
    inside, most = [0], [0]

    def capture() -> None:
        for _ in range(3):
            with our_matmuls():
                inside[0] += 1
                most[0] = max(most[0], inside[0])
                asked.append(engines.ours())
                inside[0] -= 1

    asked: list[bool] = []
    in_threads(4, capture)
    assert (asked, most) == ([True] * 12, [1])


def beside(context: AbstractContextManager[None], work: Callable[[], Any]) -> None:
    """Have another thread begin this while this one has functions of its own."""
    thread = threading.Thread(target=work)
    with context:
        thread.start()
        thread.join(0.05)
    thread.join()


def test_patches_of_other_threads_last(engines: Engines) -> None:
    upstream = functions()
    mlx_cuda.patch()
    patched = functions()
    mlx_cuda.unpatch()
    for own in (our_matmuls, _patch._unpatched):
        beside(own(), mlx_cuda.patch)
        assert functions() == patched
        beside(own(), mlx_cuda.unpatch)
        assert functions() == upstream
        context = mlx_cuda.patch()
        beside(own(), context.close)
        assert functions() == upstream
    assert not engines.ours()


def test_a_capture_replaces_nothing_that_is_replaced_already() -> None:
    with mlx_cuda.patch():
        patched = functions()
        with our_matmuls():
            assert functions() == patched


def theirs(*_: Any) -> str:
    """A function of mlx-lm."""
    return "theirs"


@pytest.fixture
def mlx_lm(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module of a package with a known copy of mlx-lm's linear attention."""
    module: Any = ModuleType(f"{__name__.partition('.')[0]}.copy")
    module.gated_delta_ops = theirs
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(theirs, "__module__", module.__name__)
    monkeypatch.setitem(copies._known, theirs, "gated_delta_ops")
    monkeypatch.setitem(places.COPIES, "gated_delta_ops", lambda _: lambda *_: "ours")
    yield module
    places.take_away()
    assert module.gated_delta_ops is theirs


def test_linear_attention_of_mlx_lm(mlx_lm: Any, tmp_path: Path) -> None:
    """In a capture, in one while all is patched, and in an export."""
    found: list[tuple[str, str]] = []

    def which() -> str:
        return str(mlx_lm.gated_delta_ops())

    def look(*_: Any) -> list[mx.array]:
        found.append((which(), in_another_thread(which)))
        return [mx.array(1.0)]

    with our_matmuls():
        look()
        assert not in_another_thread(places.put)
        assert places.left_alone("tests") == []
    assert mlx_lm.gated_delta_ops is theirs
    with mlx_cuda.patch():
        _patch._install()  # as with a GPU
        mlx_lm.gated_delta_ops = theirs  # as imported since
        with our_matmuls():
            look()
        look()
        mx.export_function(str(tmp_path / "look.mlxfn"), look, mx.array(1.0))
        look()
        assert wrapped.installed()
    look()
    both, none = ("ours", "ours"), ("theirs", "theirs")
    assert found == [("ours", "theirs"), both, both, ("theirs", "ours"), both, none]


def test_an_export_is_its_own_thread_s(engines: Engines, tmp_path: Path) -> None:
    asked: list[tuple[bool, bool]] = []

    def look(x: mx.array) -> mx.array:
        asked.append((engines.ours(), in_another_thread(engines.ours)))
        return x

    with mlx_cuda.patch():
        mx.export_function(str(tmp_path / "look.mlxfn"), look, X)
    assert asked == [(False, True)]


def test_an_export_while_results_are_batch_invariant(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its own thread may call what is refused in others: MLX's functions, methods of caches, and functions that modules hold."""
    monkeypatch.setattr(_patch, "refusal", lambda: "")
    other: Any = ModuleType("other")
    other.RotatingKVCache = type("RotatingKVCache", (), {"update_and_fetch": lambda _: "theirs"})
    other.ssm_attn, other.einsum = theirs, mx.einsum
    monkeypatch.setitem(sys.modules, "other", other)
    calls: list[Callable[[], Any]] = [
        lambda: mx.einsum("ij->ji", X[0]),
        lambda: other.einsum("ij->ji", X[0]),
        lambda: X @ X.swapaxes(1, 2),
        lambda: other.RotatingKVCache().update_and_fetch(),
        lambda: other.ssm_attn(1),
    ]

    def refused() -> list[bool]:
        def is_refused(call: Callable[[], Any]) -> bool:
            try:
                call()
            except NotInvariant:
                return True
            return False

        return [is_refused(call) for call in calls]

    found: list[tuple[list[bool], list[bool]]] = []

    def look(x: mx.array) -> mx.array:
        found.append((refused(), in_another_thread(refused)))
        return x

    with mlx_cuda.patch(batch_invariant=True):
        mx.export_function(str(tmp_path / "look.mlxfn"), look, X)
        assert refused() == [True] * len(calls)
    assert found == [([False] * len(calls), [True] * len(calls))]
    assert refused() == [False] * len(calls)
