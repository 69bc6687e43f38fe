"""A random case of tests/gpu/cases.py on the device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx_cuda
import numpy as np
from numpy.typing import NDArray

from . import cases
from .cases import Case

DTYPES = {"float16": mx.float16, "bfloat16": mx.bfloat16, "float32": mx.float32}
NOWHERE = 1 << 20  # an entry of a block table that must not be looked up


@dataclass
class Outcome:
    """What a case gave: the engine that computed it, and results in float32."""

    engine: str
    results: dict[str, NDArray[np.float32]] = field(default_factory=dict)


def on_a_gpu() -> bool:
    """Where cases are computed: tests of the package have them computed on the CPU, with a GPU too."""
    return mx.cuda.is_available() and mx.default_device().type == mx.gpu


def compute(case: Case) -> Outcome:
    """The case's results, and gradients where it asks for them."""
    return {"dense": _dense, "varlen": _varlen, "paged": _paged}[case.kind](case, cases.inputs(case))


def judged(of: Any, compute: Callable[[Any], Outcome], seed: int, most: int) -> Outcome:
    """Compute and judge one of these cases; a failure shows it."""
    case = of.draw(seed, most=most)
    outcome = compute(case)
    wrong = of.judge(case, outcome.engine, outcome.results, gpu=on_a_gpu())
    assert not wrong, f"{'; '.join(wrong)}\n  {outcome.engine}: {case}"
    return outcome


def check(seed: int, *, most: int = cases.SCORES) -> Outcome:
    return judged(cases, compute, seed, most)


def on_device(values: NDArray[Any], dtype: mx.Dtype) -> mx.array:
    result = mx.array(values if values.dtype == np.bool_ else values.astype(np.float32))
    result = result if result.dtype == mx.bool_ else result.astype(dtype)
    mx.eval(result)
    return result


def laid_out(values: NDArray[np.float32], layout: str, dtype: mx.Dtype) -> mx.array:
    """The values [B, H, T, D] as models and caches leave them in memory; what lies between is NaN."""
    _, _, length, dim = values.shape
    around = np.full((*values.shape[:2], length, dim + 3), np.nan, np.float32)
    if layout == "rows first":
        return on_device(values.swapaxes(1, 2), dtype).swapaxes(1, 2)
    if layout == "heads last":
        return on_device(values.transpose(0, 2, 3, 1), dtype).transpose(0, 3, 1, 2)
    if layout == "cache":
        rest = np.full((*values.shape[:2], 5, dim), np.nan, np.float32)
        return on_device(np.concatenate([rest, values, rest], axis=2), dtype)[:, :, 5 : 5 + length]
    if layout == "unaligned":
        around[..., 1 : dim + 1] = values
        return on_device(around, dtype)[..., 1 : dim + 1]
    if layout == "every other":
        return on_device(np.stack([values, np.full_like(values, np.nan)], axis=3).reshape(*values.shape[:2], -1, dim), dtype)[:, :, ::2]
    if layout == "backwards":
        return on_device(values[:, :, ::-1], dtype)[:, :, ::-1]
    if layout == "one batch":
        return mx.broadcast_to(on_device(values[:1], dtype), values.shape)
    if layout == "one head":
        return mx.broadcast_to(on_device(values[:, :1], dtype), values.shape)
    if layout == "one for all":
        return mx.broadcast_to(on_device(values[:1, :1], dtype), values.shape)
    return on_device(values, dtype)


def _options(case: Case, arrays: dict[str, Any]) -> dict[str, Any]:
    """The arguments by name that are no arrays to differentiate by."""
    options: dict[str, Any] = {"scale": case.scale, "return_lse": case.lse}
    if case.kind == "paged":
        options["window_size"] = None if case.window[0] < 0 else case.window[0]
    elif case.window != (-1, -1):
        options["window_size"] = tuple(None if side < 0 else side for side in case.window)
    if case.mask == "causal" and case.kind != "paged":
        options["mask"] = "causal"
    if case.mask == "bool":
        options["mask"] = mx.array(arrays["mask"])
    if case.softcap:
        options["softcap"] = case.softcap
    for name, bounds in (("left_padding", case.starts), ("lengths", case.ends)):
        if bounds is not None:
            options[name] = mx.array(bounds, mx.int32)
    return options


def _evaluate(case: Case, arrays: dict[str, Any], call: Callable[..., Any], given: dict[str, mx.array]) -> dict[str, NDArray[np.float32]]:
    """The results of ``call(**given)``, and the gradients with respect to what is given."""
    named = list(given)

    def function(*values: mx.array) -> list[mx.array]:
        results = call(**dict(zip(named, values, strict=True)))
        return list(results) if case.lse else [results]

    if not case.gradient:
        results = dict(zip(("out", "lse"), function(*given.values()), strict=False))
    else:
        cotangents = [on_device(arrays["cotangent"], DTYPES[case.dtype])]
        if case.lse:
            seed = arrays["lse_cotangent"]
            cotangents.append(mx.array(seed.swapaxes(0, 1) if case.kind == "varlen" else seed))
        values, gradients = mx.vjp(function, list(given.values()), cotangents)
        results = dict(zip(("out", "lse"), values, strict=False)) | dict(zip(named, gradients, strict=True))
    for name, array in results.items():
        wanted = mx.float32 if name == "lse" else DTYPES[case.dtype]
        assert array.dtype == wanted, f"{name} is of the type {array.dtype}"
    mx.eval(list(results.values()))
    host: dict[str, NDArray[np.float32]] = {name: np.array(array.astype(mx.float32)) for name, array in results.items()}
    return host


def dense(case: Case, arrays: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The arguments of a dense case: arrays that gradients are of, and options."""
    dtype, arrays = DTYPES[case.dtype], dict(arrays)  # the right values are of the given ones
    for name, layout in zip("kv", case.layouts[1:], strict=True) if case.spoilt else ():
        arrays[name] = arrays[name] if layout in {"one batch", "one for all"} else _spoilt(case, arrays[name])
    given = {name: laid_out(arrays[name], layout, dtype) for name, layout in zip("qkv", case.layouts, strict=True)}
    given |= {name: on_device(arrays[name], dtype) for name in ("mask", "sinks") if name in arrays and arrays[name].dtype != np.bool_}
    return given, _options(case, arrays)


def _dense(case: Case, arrays: dict[str, Any]) -> Outcome:
    given, options = dense(case, arrays)
    engine = mlx_cuda.explain(**given, **options).engine
    return Outcome(engine, _evaluate(case, arrays, lambda **given: mlx_cuda.attention(**given, **options), given))


def _spoilt(case: Case, values: NDArray[np.float32]) -> NDArray[np.float32]:
    """NaN where the lengths and the padding say that there are no keys."""
    result: NDArray[np.float32] = values.copy()
    for b in range(case.batch):
        result[b, :, : case.starts[b] if case.starts else 0] = np.nan
        result[b, :, case.ends[b] if case.ends else case.k_len :] = np.nan
    return result


def _fused_or_not(call: Callable[..., Any], name: str) -> tuple[str, Callable[..., Any]]:
    """The call, and who computes it."""
    try:
        call(force_fused=True)
    except ValueError as error:
        if "no fused kernel" not in str(error):
            raise
        return f"fallback {name}", call
    return f"{'flash' if name == 'varlen' else 'decode'} {name}", call


def _varlen(case: Case, arrays: dict[str, Any]) -> Outcome:
    dtype = DTYPES[case.dtype]
    cu_q, cu_k = (np.concatenate([[0], np.cumsum(lengths)]) for lengths in (case.q_lens, case.k_lens))
    if case.spoilt:
        for name, end in (("q", cu_q[-1]), ("k", cu_k[-1]), ("v", cu_k[-1])):
            arrays[name] = arrays[name].copy()
            arrays[name][end:] = np.nan
    given: dict[str, Any] = {name: on_device(arrays[name], dtype) for name in ("q", "k", "v", "sinks") if name in arrays}
    options = _options(case, arrays) | {
        "cu_seqlens_q": mx.array(cu_q, mx.int32),
        "cu_seqlens_k": mx.array(cu_k, mx.int32),
        "max_seqlen_q": max(case.q_lens) + case.seed % 2,
        "max_seqlen_k": max(case.k_lens) + case.seed % 3,
    }
    engine, _ = _fused_or_not(lambda **more: mlx_cuda.attention_varlen(**given, **options, **more), "varlen")
    return Outcome(engine, _evaluate(case, arrays, lambda **given: mlx_cuda.attention_varlen(**given, **options), given))


def _paged(case: Case, arrays: dict[str, Any]) -> Outcome:
    dtype, size = DTYPES[case.dtype], case.page_size
    rng = np.random.default_rng([case.seed, 1])
    assert case.ends is not None
    columns = -(-case.k_len // size)
    used = [-(-end // size) for end in case.ends]
    free = rng.permutation(sum(used) + 3)
    table = rng.choice([-1, NOWHERE], (case.batch, columns))
    pages = {name: np.full((len(free), case.kv_heads, size, arrays[name].shape[3]), np.nan, np.float32) for name in "kv"}
    new = {name: np.full((case.batch, case.kv_heads, case.written, arrays[name].shape[3]), np.nan, np.float32) for name in "kv"}
    for b, (end, count) in enumerate(zip(case.ends, used, strict=True)):
        table[b, :count], free = free[:count], free[count:]
        for name in "kv":
            before = max(end - case.written, 0)
            for j in range(count):
                rows = arrays[name][b, :, j * size : min(j * size + size, before)]
                pages[name][table[b, j], :, : rows.shape[1]] = rows
            new[name][b, :, case.written - (end - before) :] = arrays[name][b, :, before:end]
    k_pages, v_pages = (on_device(pages[name], dtype) for name in "kv")
    block_table, lengths = mx.array(table.astype(np.int32)), mx.array(case.ends, mx.int32)
    if case.written:
        keys, values = (on_device(new[name], dtype) for name in "kv")
        k_pages, v_pages = mlx_cuda.paged_cache_update(k_pages, v_pages, keys, values, block_table, lengths)
    given: dict[str, Any] = {"q": on_device(arrays["q"], dtype), "k_pages": k_pages, "v_pages": v_pages}
    if case.sinks:
        given["sinks"] = on_device(arrays["sinks"], dtype)
    options = _options(case, arrays) | {"block_table": block_table, "lengths": lengths}
    engine, call = _fused_or_not(lambda **more: mlx_cuda.paged_attention(**given, **options, **more), "paged")
    return Outcome(engine, _evaluate(case, arrays, lambda **_: call(), given))
