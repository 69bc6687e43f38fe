"""Sums over GPUs, in a process alone and without one: as MLX's own. Two processes are in tests/gpu."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx_cuda
import pytest
from mlx_cuda import _all_sum
from mlx_cuda._all_sum import patched_all_sum, upstream_all_sum
from mlx_cuda._loader import native
from mlx_cuda._patch import our_matmuls


@pytest.mark.parametrize("x", [mx.arange(12.0).reshape(3, 4), mx.array(2.0), mx.zeros((0, 3)), mx.arange(3), 1.5], ids=str)
@pytest.mark.parametrize("options", [{}, {"stream": mx.cpu}, {"group": None}], ids=str)
def test_as_mlx(x: Any, options: dict[str, Any]) -> None:
    found, expected = mlx_cuda.all_sum(x, **options), upstream_all_sum(x, **options)
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    assert mx.array_equal(found, expected).item()


def test_of_a_group_of_one() -> None:
    x = mx.arange(5.0)
    assert mx.array_equal(mlx_cuda.all_sum(x, group=mx.distributed.init()), x).item()


@pytest.mark.parametrize("taken", [True, False])
def test_what_the_native_module_is_asked(monkeypatch: pytest.MonkeyPatch, taken: bool) -> None:
    """The stream as MLX would choose it; what it does not take is MLX's."""
    asked: list[tuple[Any, ...]] = []

    def native_sum(x: mx.array, *rest: Any) -> mx.array | None:
        asked.append(rest)
        return 3 * x if taken else None

    engine = SimpleNamespace(module=SimpleNamespace(all_sum=native_sum))
    monkeypatch.setattr(native, "engine", lambda _: engine)
    group, x = mx.distributed.init(), mx.arange(4.0)
    own, standard = mx.new_stream(mx.cpu), mx.default_stream(mx.default_device())
    for options, stream in ({}, standard), ({"stream": mx.cpu}, mx.default_stream(mx.cpu)), ({"stream": own}, own):
        assert mx.array_equal(mlx_cuda.all_sum(x, group=group, **options), 3 * x if taken else x).item()
        assert asked.pop() == (group, stream)
    assert mlx_cuda.all_sum(2.0).item() == 2  # type: ignore[arg-type]
    assert asked == []


def test_transformations() -> None:
    x = mx.arange(6.0).reshape(2, 3)
    assert mx.array_equal(mx.grad(lambda each: (mlx_cuda.all_sum(each) ** 2).sum())(x), 2 * x).item()
    assert mx.array_equal(mx.vmap(mlx_cuda.all_sum)(x), x).item()
    assert mx.array_equal(mx.compile(mlx_cuda.all_sum)(x), x).item()


def test_what_mlx_raises_for() -> None:
    wrong: Any
    for wrong, error in (("x", ValueError), (None, TypeError)):
        for function in (upstream_all_sum, mlx_cuda.all_sum):
            with pytest.raises(error):
                function(wrong)


def test_it_is_explained() -> None:
    choice = mlx_cuda.explain(mlx_cuda.all_sum, mx.zeros((4,)))
    assert choice.engine == "mlx"
    assert choice.reason
    with pytest.raises(TypeError, match=r"^\[all_sum\] x must be an mlx\.core\.array, got float\.$"):
        mlx_cuda.explain(mlx_cuda.all_sum, 2.0)


def test_patch_puts_it_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """But into nothing that is exported; and steps of one's own have it too."""
    asked: list[mx.Stream] = []

    def engine(stream: mx.Stream) -> str:
        asked.append(stream)
        return "none"

    def look(x: mx.array) -> mx.array:
        return mx.distributed.all_sum(x)

    monkeypatch.setattr(native, "engine", engine)
    our_matmuls()(look)(mx.array(1.0))
    assert len(asked) == 1
    with mlx_cuda.patch():
        mx.export_function(str(tmp_path / "look.mlxfn"), look, mx.array(1.0))
        assert len(asked) == 1
        assert mx.distributed.all_sum is patched_all_sum
        assert mx.array_equal(mx.distributed.all_sum(mx.arange(3.0)), mx.arange(3.0)).item()
    assert mx.distributed.all_sum is upstream_all_sum


@pytest.mark.parametrize("given", [None, mx.cpu])
def test_mlx_is_given_the_stream_of_the_call(monkeypatch: pytest.MonkeyPatch, given: Any) -> None:
    """What the kernel refuses: MLX chooses the device by the group if no stream is given."""
    seen: list[Any] = []

    def upstream(x: mx.array, **options: Any) -> mx.array:
        seen.append(options["stream"])
        return x

    module = SimpleNamespace(all_sum=lambda *_: None)
    monkeypatch.setattr(native, "engine", lambda _: SimpleNamespace(module=module))
    monkeypatch.setattr(_all_sum, "upstream_all_sum", upstream)
    _all_sum.prepare(mx.zeros(4), stream=given).result()
    assert seen == [given]
