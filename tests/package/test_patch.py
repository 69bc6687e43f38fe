"""``patch``: what it routes, what it leaves to MLX, and that it goes away again."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_cuda
import pytest
from mlx_cuda._loader import native as _native
from mlx_cuda._mlx_lm import wrapped
from mlx_cuda._operations import OPERATIONS
from mlx_cuda._patch import EVERY
from mlx_cuda._replay import packing

from .matmuls import Matmuls
from .references import assert_close, host, random

nn: Any = importlib.import_module("mlx.nn")  # whose names mypy does not see
NAMES = ("quantized_matmul", "gather_mm", "gather_qmm")
EXPORTERS = ("export_function", "exporter")
W, S, B = mx.quantize(random((4, 8, 64)), group_size=32)
PACKED = mx.quantize(random((1, 1, 5, 64)), group_size=64)


@pytest.fixture(autouse=True)
def _unpatched() -> Iterator[None]:
    yield
    mlx_cuda.unpatch()


def functions() -> list[Any]:
    return [mx.fast.scaled_dot_product_attention, *(getattr(mx, name) for name in (*NAMES, *EXPORTERS))]


def test_patches_and_restores() -> None:
    before = functions()
    with mlx_cuda.patch():
        assert all(now is not then for now, then in zip(functions(), before, strict=True))
        inside = functions()
        with mlx_cuda.patch():
            pass
        mlx_cuda.patch()  # once more changes nothing
        assert functions() == inside
    assert functions() == before
    mlx_cuda.patch()
    mlx_cuda.unpatch()
    assert functions() == before
    mlx_cuda.unpatch()
    assert functions() == before


def test_names_and_texts_are_those_of_mlx() -> None:
    with mlx_cuda.patch():
        for route in EVERY:
            function = getattr(route.owner, route.name)
            assert function is not route.upstream
            for name in ("__name__", "__doc__", "__module__"):
                assert getattr(function, name) == getattr(route.upstream, name), route.name


class Loaded:
    """A native module, of which nothing is called."""

    def cached(self, operation: Any, *_: Any) -> Any:
        return operation


def test_gpus_that_no_kernel_of_ours_runs_on_keep_mlx_s(monkeypatch: pytest.MonkeyPatch) -> None:
    before = functions()
    monkeypatch.setattr(mx.cuda, "is_available", lambda: True)
    monkeypatch.setattr(_native, "load", lambda: None)
    monkeypatch.setattr(_native, "loaded", Loaded())
    for capability, replaced in (((7, 5), False), ((8, 0), True)):
        monkeypatch.setattr(_native, "capability", lambda _, found=capability: found)
        with mlx_cuda.patch():
            assert [now is not then for now, then in zip(functions(), before, strict=True)] == [replaced] * len(before)
            assert wrapped.installed() == replaced
        assert functions() == before
        assert not wrapped.installed()


def test_restores_after_an_error() -> None:
    before = functions()
    with pytest.raises(RuntimeError, match="inside"), mlx_cuda.patch():
        raise RuntimeError("inside")
    assert functions() == before


@pytest.mark.usefixtures("on_the_cpu")
def test_routes(matmuls: Matmuls) -> None:
    half = mx.float16
    x, a, b, rhs = random((80, 1, 64), half), random((80, 1, 16), half), random((4, 16, 9), half, seed=1), mx.arange(80) % 4
    scales, biases = S.astype(half), B.astype(half)
    theirs = (
        mx.quantized_matmul(x, W[0], S[0], B[0], True, 32, 4),
        mx.gather_mm(a.astype(mx.float32), b.astype(mx.float32), None, rhs),  # the CPU's dtype
        mx.gather_qmm(x, W, scales, biases, rhs_indices=rhs, group_size=32),
    )
    with mlx_cuda.patch():
        ours = (
            mx.quantized_matmul(x, W[0], S[0], B[0], True, 32, 4),
            mx.gather_mm(a, b, None, rhs),
            mx.gather_qmm(x, W, scales, biases, rhs_indices=rhs, group_size=32),
        )
        layer = nn.QuantizedLinear(64, 8)
        layer(x[:3, 0])
    assert [name.split(" (")[0] for name in matmuls.calls] == ["dequantize", "gather", "grouped quantised", "small_m"]
    for got, expected in zip(ours, theirs, strict=True):
        assert_close(got, host(expected), slack=2)


@pytest.mark.usefixtures("on_the_cpu")
def test_leaves_the_rest_to_mlx(matmuls: Matmuls) -> None:
    x = random((3, 64))
    with mlx_cuda.patch():
        expected = mx.quantized_matmul(x, W, S, B, group_size=32)  # a batch of weights
        assert expected.shape == (3, 8)
        assert mx.gather_mm(x, x.T).shape == (3, 3)
    assert not matmuls.calls


@pytest.mark.usefixtures("on_the_cpu")
def test_what_is_exported_is_made_of_mlx_alone(matmuls: Matmuls, tmp_path: Path) -> None:
    x = random((3, 64), mx.float16)
    file, scales, biases = str(tmp_path / "function.mlxfn"), S[0].astype(mx.float16), B[0].astype(mx.float16)

    def function(x: mx.array) -> mx.array:
        return mx.quantized_matmul(x, W[0], scales, biases, group_size=32)

    def export_by_name(x: mx.array) -> None:
        with mx.exporter(file=file, fun=function) as export:
            export(x)

    for export in (lambda x: mx.export_function(file, function, x), export_by_name):
        with mlx_cuda.patch():
            inside = functions()
            export(x)
            assert functions() == inside
        imported: Any = mx.import_function(file)
        (got,) = imported(x)
        assert_close(got, host(function(x)))
    assert not matmuls.calls
    with mlx_cuda.patch():
        function(x)
    assert matmuls.calls


def test_an_export_that_fails_leaves_the_patch_as_it_was(tmp_path: Path) -> None:
    def fails(_: mx.array) -> mx.array:
        raise RuntimeError("inside")

    with mlx_cuda.patch():
        inside = functions()
        with pytest.raises(RuntimeError, match="inside"):
            mx.export_function(str(tmp_path / "function.mlxfn"), fails, W)
        assert functions() == inside
        for nothing in ((), ("function.mlxfn",), ("function.mlxfn", 3)):
            with pytest.raises(TypeError):
                mx.export_function(*nothing)


def test_errors_are_those_of_mlx(matmuls: Matmuls) -> None:
    calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
        ("quantized_matmul", (random((3, 64)), W[0], S[0]), {"group_size": 32}),
        ("quantized_matmul", (random((3, 32)), W[0], S[0], B[0]), {"group_size": 32}),
        ("quantized_matmul", (random((3, 64)), W[0], S[0], B[0], 1.5), {}),
        ("quantized_matmul", (random((3, 64)),), {}),
        ("gather_mm", (random((3, 64)), random((3, 64))), {"rhs_indices": mx.array([0])}),
        ("gather_qmm", (random((3, 64)), W, S, B), {"rhs_indices": mx.array([0.5]), "group_size": 32}),
        ("gather_qmm", (random((3, 64)), W, S, B), {"unknown": 1}),
    ]
    for name, arguments, options in calls:
        with pytest.raises((ValueError, TypeError)) as theirs:
            getattr(mx, name)(*arguments, **options)
        with mlx_cuda.patch(), pytest.raises(type(theirs.value)) as ours:
            getattr(mx, name)(*arguments, **options)
        assert str(ours.value) == str(theirs.value)


def test_explain_takes_every_operation() -> None:
    x, q = random((3, 64)), random((1, 2, 8, 16))
    on = {"stream": mx.cpu}
    ends = mx.array([0, 1, 2, 3, 3])
    operations: list[tuple[Any, tuple[Any, ...], dict[str, Any], str]] = [
        (mlx_cuda.attention, (q, q, q), {}, "mlx"),
        (mlx_cuda.attention_varlen, (q[0], q[0], q[0], ends[:2], ends[:2]), {"max_seqlen_q": 1, "max_seqlen_k": 1}, "fallback"),
        (mlx_cuda.paged_attention, (q, q, q, mx.zeros((1, 1), mx.int32), mx.array([8])), {}, "fallback"),
        (mlx_cuda.paged_cache_update, (*[q] * 4, mx.zeros((1, 1), mx.int32), mx.array([8])), {}, "fallback"),
        (mlx_cuda.quantized_attention, (x.reshape(1, 1, 3, 64), PACKED, PACKED), {}, "fallback"),
        (mlx_cuda.linear, (x, x, x[:, 0]), {"activation": "relu"}, "fallback"),
        (mlx_cuda.swiglu, (x, x), {}, "fallback"),
        (mlx_cuda.gated_delta, (*[x.reshape(1, 3, 2, 32)] * 3, *[x[None, :, :2]] * 2), {}, "mlx"),
        (mlx_cuda.ssd, (x.reshape(1, 3, 2, 32), x[None, :, :2], x[0, :2], *[x.reshape(1, 3, 2, 32)] * 2), {}, "mlx"),
        (mlx_cuda.short_conv, (x[None], x.T), {}, "mlx"),
        (mlx_cuda.all_sum, (x,), {}, "mlx"),
        (mlx_cuda.quantized_matmul, (x, W[0], S[0], B[0]), {"group_size": 32}, "mlx"),
        (mlx_cuda.gather_mm, (x, random((4, 64, 8))), {"rhs_indices": mx.array([0])}, "mlx"),
        (mlx_cuda.gather_mm, (x, x.T), {}, "mlx"),
        (mlx_cuda.gather_qmm, (x, W, S, B), {"rhs_indices": mx.array([0]), "group_size": 32}, "mlx"),
        (mlx_cuda.gather_qmm, (x, W[0], S[0], B[0]), {"group_size": 32}, "mlx"),
        (mlx_cuda.grouped_matmul, (x, random((4, 8, 64)), ends), {}, "fallback"),
        (mlx_cuda.fp8_matmul, (mx.to_fp8(x), mx.to_fp8(x)), {}, "fallback"),
        (mlx_cuda.quantize_fp8, (x,), {"axis": -1}, "fallback"),
    ]
    assert {operation.__name__ for operation, *_ in operations} == set(OPERATIONS)
    for operation, arguments, options, engine in operations:
        assert mlx_cuda.explain(operation, *arguments, **options, **on).engine == engine
    assert mlx_cuda.explain(q, q, q, **on) == mlx_cuda.explain(mlx_cuda.attention, q, q, q, **on)
    with pytest.raises(ValueError, match=r"^\[explain\] The operation must be one of mlx_cuda\.attention, .*, got tune\.$"):
        mlx_cuda.explain(mlx_cuda.tune, x, x)
    with pytest.raises(ValueError, match=r"^\[quantized_matmul\] Mode 'affine' needs biases"):
        mlx_cuda.explain(mlx_cuda.quantized_matmul, x, W[0], S[0])


def test_bits_of_batches() -> None:
    with mlx_cuda.patch(kv_bits=8, kv_group_size=32):
        assert packing.settings.packing == (32, 8)
        with mlx_cuda.patch(), mlx_cuda.patch(kv_bits=16):
            assert packing.settings.packing is None
            with mlx_cuda.patch(kv_bits=4):
                assert packing.settings.packing == (64, 4)
            assert packing.settings.packing is None
        mlx_cuda.patch()
        assert packing.settings.packing == (32, 8)
        mlx_cuda.unpatch()
        assert packing.settings.packing is None
    assert packing.settings.packing is None
    before = functions()
    for wrong in ({"kv_bits": 3}, {"kv_bits": 8, "kv_group_size": 16}):
        with pytest.raises(ValueError, match=r"\[patch\] kv_bits must be 4, 8 or 16 and kv_group_size 32, 64 or 128, got"):
            mlx_cuda.patch(**wrong)
    assert functions() == before
