"""A random case of tests/gpu/matmul_cases.py on the device."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import mlx.core as mx
import mlx_cuda
import numpy as np
from numpy.typing import NDArray

from . import matmul_cases as cases
from .matmul_cases import Case
from .trials import DTYPES, Outcome, judged, on_device

OURS: Any = mlx_cuda


Results = Callable[[], "dict[str, NDArray[np.float32]]"]


def compute(case: Case, without: Collection[str] = ()) -> Outcome:
    """The case's results, and gradients where it asks for them; nothing if one of these engines would compute it."""
    engine, results = _prepared(case)
    return Outcome(engine) if engine in without else Outcome(engine, results())


def _prepared(case: Case) -> tuple[str, Results]:
    """Who computes the case, and what does."""
    arrays = cases.inputs(case)
    if case.kind == "fp8":
        return _fp8(case, arrays)
    x = laid_out(arrays["x"], case.x_layout, DTYPES[case.dtype])
    if case.form is None:
        w = on_device(arrays["w"], DTYPES[case.dtype])
        engine, call = _dense(case, arrays)
        return engine, lambda: _evaluate(case, arrays, call, [x, w])
    parts = [laid_out(arrays[name], case.w_layout, _dtype(case, name)) for name in ("w", "scales", "biases") if arrays[name] is not None]
    options = {**case.form.options, "transpose": case.transpose, **_indices(case, arrays)}
    function = OURS.gather_qmm if case.kind == "experts" else OURS.quantized_matmul
    engine = OURS.explain(function, x, *parts, **options).engine
    return engine, lambda: _evaluate(case, arrays, lambda x: function(x, *parts, **options), [x])


def check(seed: int, *, most: int = cases.MULTIPLICATIONS) -> Outcome:
    return judged(cases, compute, seed, most)


def _dtype(case: Case, name: str) -> mx.Dtype:
    assert case.form
    return mx.uint32 if name == "w" else DTYPES[case.dtype] if case.form.mode == "affine" else mx.uint8


def laid_out(values: NDArray[Any], layout: str, dtype: mx.Dtype) -> mx.array:
    """The values [..., rows, columns] in another order in memory, or amidst others: NaN, or any words."""
    junk: Any = np.nan if values.dtype == np.float32 else 77

    def device(each: NDArray[Any]) -> mx.array:
        result = mx.array(each.copy())
        result = result if result.dtype == dtype else result.astype(dtype)
        mx.eval(result)
        return result

    def around(before: tuple[int, int], after: tuple[int, int]) -> NDArray[Any]:
        return np.pad(values, [(0, 0)] * (values.ndim - 2) + [before, after], constant_values=junk)

    if values.ndim < 2:
        return device(values)
    if layout == "wide":
        return device(around((0, 0), (8, 16)))[..., 8 : 8 + values.shape[-1]]
    if layout == "unaligned":
        return device(around((0, 0), (1, 2)))[..., 1 : 1 + values.shape[-1]]
    if layout == "rows of more":
        return device(around((3, 2), (0, 0)))[..., 3 : 3 + values.shape[-2], :]
    if layout == "every other":
        both = np.stack([values, np.full_like(values, junk)], axis=-2)
        return device(both.reshape(*values.shape[:-2], -1, values.shape[-1]))[..., ::2, :]
    if layout == "backwards":
        return device(values[..., ::-1, :])[..., ::-1, :]
    if layout == "columns":
        return device(values.swapaxes(-1, -2)).swapaxes(-1, -2)
    if layout == "one row":
        return mx.broadcast_to(device(values[..., :1, :]), values.shape)
    return device(values)


def _indices(case: Case, arrays: dict[str, Any]) -> dict[str, Any]:
    if not case.indices:
        return {}
    named = {f"{side}_indices": mx.array(arrays[side].astype(np.uint32)) for side in ("lhs", "rhs") if side in arrays}
    return {**named, "sorted_indices": case.ordered}


def _dense(case: Case, arrays: dict[str, Any]) -> tuple[str, Callable[..., mx.array]]:
    """Who computes groups or pairs, and the function of x and w."""
    if case.kind == "groups":
        offsets = mx.array(case.offsets, mx.int32)
        shapes = [mx.zeros(shape, DTYPES[case.dtype]) for shape in ((*case.leading, case.k), case.w_shape)]
        engine = OURS.explain(OURS.grouped_matmul, *shapes, offsets, transpose=case.transpose).engine
        return engine, lambda x, w: OURS.grouped_matmul(x, w, offsets, transpose=case.transpose)

    def gathered(x: mx.array, w: mx.array) -> Any:
        return x, w.swapaxes(1, 2) if case.transpose else w  # as layers give their weights

    indices = _indices(case, arrays)
    shapes = [mx.zeros(shape, DTYPES[case.dtype]) for shape in ((*case.leading, case.k), case.w_shape)]
    engine = OURS.explain(OURS.gather_mm, *gathered(*shapes), **indices).engine
    return engine, lambda x, w: OURS.gather_mm(*gathered(x, w), **indices)


def _evaluate(case: Case, arrays: dict[str, Any], call: Callable[..., mx.array], given: list[mx.array]) -> dict[str, NDArray[np.float32]]:
    if case.gradient:
        (out,), gradients = mx.vjp(call, given, [on_device(arrays["cotangent"], DTYPES[case.dtype])])
        results = {"out": out} | dict(zip("xw", gradients, strict=False))
    else:
        results = {"out": call(*given)}
    return _host(results, DTYPES[case.dtype])


def _host(results: dict[str, mx.array], dtype: mx.Dtype) -> dict[str, NDArray[np.float32]]:
    for name, array in results.items():
        assert array.dtype == dtype, f"{name} is of the type {array.dtype}"
    mx.eval(list(results.values()))
    host: dict[str, NDArray[np.float32]] = {name: np.array(array.astype(mx.float32)) for name, array in results.items()}
    return host


def _fp8(case: Case, arrays: dict[str, Any]) -> tuple[str, Results]:
    dtype = DTYPES[case.dtype]
    codes = {}
    for name, given, axis in zip("ab", ("x", "w"), case.axes, strict=True):
        codes[name], codes[f"scale_{name}"] = OURS.quantize_fp8(on_device(arrays[given], dtype), axis=axis)
    scales = {name: codes[name] for name in ("scale_a", "scale_b")}
    options = scales | {"bias": on_device(arrays["bias"], dtype) if case.bias else None, "out_dtype": dtype}
    engine = OURS.explain(OURS.fp8_matmul, codes["a"], codes["b"], **options).engine

    def results() -> dict[str, NDArray[np.float32]]:
        out = _host({"out": OURS.fp8_matmul(codes["a"], codes["b"], **options)}, dtype)
        return out | {name: np.array(array.astype(mx.float32)) for name, array in codes.items()}

    return engine, results
