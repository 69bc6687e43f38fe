"""mlx-cuda's operations instead of MLX's, for programs that call the latter, such as mlx-lm."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any, Literal, NamedTuple

import mlx.core as mx

from ._all_sum import patched_all_sum, upstream_all_sum
from ._attention.attention import OURS, prepare
from ._attention.composed import upstream_attention
from ._common.arrays import StreamOrDevice
from ._common.choice import OLDEST_GPU
from ._invariant import attention as invariant_attention
from ._invariant import matmul as invariant_matmul
from ._invariant import mlx_lm as invariant_mlx_lm
from ._invariant import refused
from ._invariant.state import marking, refusal, refusing, setting
from ._loader import native
from ._loader.graph_cache import cached, growing, natively
from ._loader.replacing import Prepared, alone, in_place_of, in_this_thread
from ._matmul.batches import batched_quantized_matmul, upstream_quantized_matmul
from ._matmul.gather import gather_mm, gather_qmm, misread_by_mlx
from ._matmul.quantized import OURS as OUR_MATMULS
from ._matmul.quantized import quantized_matmul
from ._matmul.upstream import upstream_gather_mm, upstream_gather_qmm
from ._mlx_lm import places as mlx_lm
from ._mlx_lm import wrapped
from ._operation import Call, Operation
from ._recurrence.fused import upstream_gated_delta
from ._recurrence.gated_delta import gated_delta
from ._recurrence.short_conv import depthwise, upstream_conv1d
from ._replay import packing


@in_place_of(upstream_attention)
@growing(k=2, v=2)
def _attention(
    q: mx.array, k: mx.array, v: mx.array, *, scale: float, mask: str | mx.array | None = None, sinks: mx.array | None = None,
    force_fused: bool = False, stream: StreamOrDevice = None,
) -> Call[Any] | Prepared | None:  # fmt: skip
    """As :func:`mlx_cuda.attention`, ours gives zeros to a query that sees no key. MLX's takes less of its other arguments."""
    if not hasattr(scale, "__float__") or not isinstance(force_fused, bool):
        return None
    if sinks is not None and mx.result_type(sinks.dtype, dtype := mx.result_type(q.dtype, k.dtype, v.dtype)) != dtype:
        return None
    call = prepare(q, k, v, scale=scale, mask=mask, sinks=sinks, force_fused=force_fused, stream=stream)
    return call if call.choice.engine in OURS or not call.at_once else Prepared(None, call.sizes)


def _patched_matmul(ours: Operation[..., Call[mx.array]], upstream: Callable[..., mx.array]) -> Callable[..., mx.array]:
    """MLX's function of a matmul, which leaves to mlx-cuda what its kernels support."""
    return in_place_of(upstream, lambda call: call.choice.engine in OUR_MATMULS or misread_by_mlx(call))(ours.prepare)


@cached
@in_place_of(upstream_gated_delta)
def _gated_delta_update(
    q: Any, k: Any, v: Any, gamma: Any, beta: Any, initial_state: Any = None, mask: Any = None, stream: StreamOrDevice = None
) -> Prepared | None:
    call = gated_delta.prepare(q, k, v, gamma, beta, state=initial_state, mask=mask, stream=stream)
    if call.choice.engine == "mlx":
        return None

    def compute() -> tuple[mx.array, mx.array]:
        y, state = call.result()
        return y.astype(mx.result_type(q.dtype, k.dtype), stream=call.stream), state

    return Prepared(compute)


@wraps(upstream_gated_delta)
def _gated_delta(*arguments: Any, **options: Any) -> list[mx.array]:
    return list(_gated_delta_update(*arguments, **options))


_conv1d = in_place_of(upstream_conv1d)(depthwise)


@contextlib.contextmanager
def _unpatched() -> Iterator[None]:
    """MLX's own functions, and mlx-lm's, for this thread."""
    with alone:
        of_mlx = [route[:3] for route in (*ROUTES, *OTHERS, *_invariant_ones())]
        with in_this_thread([*of_mlx, *(invariant_mlx_lm if setting.on else mlx_lm).originals()]):
            yield


def _exporting(upstream: Callable[..., Any]) -> Callable[..., Any]:
    """MLX's function that traces its second argument and writes what that does to a file, which has no names for mlx-cuda's kernels."""

    @wraps(upstream)
    def export(*arguments: Any, **options: Any) -> Any:
        if len(arguments) > 1 and callable(arguments[1]):
            arguments = (arguments[0], _unpatched()(arguments[1]), *arguments[2:])
        elif callable(options.get("fun")):
            options["fun"] = _unpatched()(options["fun"])
        return upstream(*arguments, **options)

    return export


class Route(NamedTuple):
    """A function of MLX that is replaced: where it is, what it is called, what it is and what takes its place."""

    owner: Any
    name: str
    upstream: Callable[..., Any]
    ours: Callable[..., Any]


_quantized_matmul = _patched_matmul(quantized_matmul, batched_quantized_matmul)
# Calls with a batch of weights go there without a look into the cache: a quantized cache of keys and values is one, of another size at each
# token, so that the graph would be built each time.
vars(_quantized_matmul)["of_batches"] = batched_quantized_matmul
ROUTES = (
    Route(mx.fast, "scaled_dot_product_attention", upstream_attention, _attention),
    Route(mx, "quantized_matmul", upstream_quantized_matmul, _quantized_matmul),
    Route(mx, "gather_mm", upstream_gather_mm, _patched_matmul(gather_mm, upstream_gather_mm)),
    Route(mx, "gather_qmm", upstream_gather_qmm, _patched_matmul(gather_qmm, upstream_gather_qmm)),
)
ALL_SUM = Route(mx.distributed, "all_sum", upstream_all_sum, patched_all_sum)
OTHERS = (
    Route(mx.fast, "gated_delta_update", upstream_gated_delta, _gated_delta),  # gives a list, which none is cached of
    Route(mx, "conv1d", upstream_conv1d, _conv1d),
    ALL_SUM,  # asks other processes
)
EXPORTERS = tuple(Route(mx, each.__name__, each, _exporting(each)) for each in (mx.export_function, mx.exporter))
EVERY: tuple[Route, ...] = (*ROUTES, *OTHERS, *EXPORTERS)

_fixed_quantized_matmul = invariant_matmul.quantized(cached(_quantized_matmul))
_gathered = tuple(cached(route.ours) for route in ROUTES[2:])
INVARIANT: tuple[Route, ...] = (  # with batch_invariant, instead of those
    Route(mx, "matmul", invariant_matmul.upstream_matmul, invariant_matmul.matmul),
    Route(mx, "addmm", invariant_matmul.upstream_addmm, invariant_matmul.addmm),
    Route(mx.array, "__matmul__", invariant_matmul.upstream_operator, invariant_matmul.operator),
    Route(mx, "quantized_matmul", upstream_quantized_matmul, _fixed_quantized_matmul),
    Route(mx, "gather_mm", upstream_gather_mm, invariant_matmul.gathered(_gathered[0])),
    Route(mx, "gather_qmm", upstream_gather_qmm, invariant_matmul.gathered_quantized(_gathered[1], _fixed_quantized_matmul)),
    Route(mx.fast, "scaled_dot_product_attention", upstream_attention, invariant_attention.attention),
    Route(mx, "vmap", mx.vmap, marking(mx.vmap)),
    Route(mx.distributed, "all_sum", upstream_all_sum, refused.all_sum),
    Route(mx.distributed, "sum_scatter", refused.upstream_sum_scatter, refused.sum_scatter),
    *(Route(owner, name, upstream, refusing(upstream, why)) for owner, name, why in refused.PLACES for upstream in (getattr(owner, name),)),
)
invariant_mlx_lm.held.update({route.name: route[2:] for route in INVARIANT if route.owner is not mx.array})


def _invariant_ones() -> tuple[Route, ...]:
    """Those that are there now, or none: nothing is done to MLX's classes without need."""
    return INVARIANT if setting.on else ()


@contextlib.contextmanager
def our_matmuls() -> Iterator[None]:
    """mlx-cuda's matmuls instead of MLX's, and its linear attention instead of mlx-lm's, for this thread."""
    matmuls = [(route.owner, route.name, natively(route.ours)) for route in ROUTES if route.owner is mx]
    with alone:
        if wrapped.installed():
            mlx_lm.put()  # for all threads, as what they import is replaced
        with in_this_thread([*matmuls, (ALL_SUM.owner, ALL_SUM.name, ALL_SUM.ours), *mlx_lm.replacements()]):
            yield


class Patched(contextlib.ExitStack):
    """The context manager that :func:`patch` returns. Leaving it restores the previous functions."""

    def __exit__(self, *details: Any) -> bool | None:
        with alone:
            return super().__exit__(*details)


def _put(functions: dict[Route, Callable[..., Any]]) -> Patched:
    """Replace functions of MLX."""
    before = Patched()
    for route, function in functions.items():
        before.callback(setattr, route.owner, route.name, getattr(route.owner, route.name))
        setattr(route.owner, route.name, function)
    return before


def patch(
    *, kv_bits: Literal[4, 8, 16] | None = None, kv_group_size: Literal[32, 64, 128] = 64, batch_invariant: bool | None = None
) -> Patched:
    """Replace functions of MLX and mlx-lm with mlx-cuda's in this process, for calls in which they are faster::

        mlx_cuda.patch()  # until unpatch(), or: with mlx_cuda.patch(): ...

    It replaces :func:`mlx.core.fast.scaled_dot_product_attention`, :func:`mlx.core.fast.gated_delta_update`,
    :func:`mlx.core.quantized_matmul`, :func:`mlx.core.gather_mm`, :func:`mlx.core.gather_qmm`, :func:`mlx.core.conv1d` (depthwise),
    :func:`mlx.core.distributed.all_sum` (:func:`all_sum`; patch all processes), and mlx-lm's linear attention (``gated_delta_ops``,
    ``ssm_attn``). MLX's layers and mlx-lm's models need no change. Decode steps of mlx-lm's models are captured as CUDA graphs
    (:func:`decode_step`), and so are those of known copies of mlx-lm's code in other packages, such as mlx-vlm and mlx-audio.

    MLX's function gets three kinds of calls unchanged: calls that no kernel supports, wrong calls (it raises its own error), and calls in
    functions that are compiled or exported with ``shapeless=True``. On GPUs older than sm_80 nothing is replaced. Call it before a program
    stores a function under another name (``from mlx.core import quantized_matmul``).

    A captured step runs without the model's Python code. Before each launch, everything reachable from the model (weights, numbers, flags,
    functions, layers, classes) is compared with its state at capture. After a change, the step is captured again. A model whose layers pass
    arrays to other objects, such as a hook, is not captured. Not detected: global variables of modules, files, environment variables, the
    contents of C objects, code or defaults replaced inside a method, and other side effects, such as a counter or a print.

    :func:`mlx.core.export_function` and :func:`mlx.core.exporter` write MLX's own functions, so the file can be read without this package.
    One case fails: a function that was compiled by :func:`mlx.core.compile` and called while patched cannot be part of an export that calls
    it without an array of the export.

    Args:
        kv_bits: 4 or 8: new batches of mlx-lm's ``BatchGenerator`` quantize their KV cache after prefill, as :func:`mlx.core.quantize`
            does. Caches whose head sizes are not a multiple of the group size, or over 256, are not quantized. 16: not quantized. None: as
            set by an earlier call; 16 at first and after :func:`unpatch`.
        kv_group_size: Values that share a scale: 32, 64 or 128.
        batch_invariant: Make results independent of the batch: of the number of tokens and sequences in a call, padding, chunked prefill,
            cached prefixes, and whether a token is decoded or part of a prompt. Each token then goes through one kernel in one shape; calls
            that cannot be batch-invariant raise a ValueError that begins with ``[batch_invariant]`` (docs/guides/batch-invariance.md). It
            is slower, needs a Hopper GPU, and steps are not captured. None: as set by an earlier call; False at first and after
            :func:`unpatch`.

    Returns:
        A context manager that restores the previous functions.

    Raises:
        ValueError: ``kv_bits`` or ``kv_group_size`` has another value, or ``batch_invariant`` is not available on this machine or with
            ``kv_bits`` 4 or 8.
    """
    if kv_bits not in {None, 4, 8, 16} or kv_group_size not in {32, 64, 128}:
        raise ValueError(f"[patch] kv_bits must be 4, 8 or 16 and kv_group_size 32, 64 or 128, got {kv_bits} and {kv_group_size}.")
    with alone:
        invariant = setting.on if batch_invariant is None else batch_invariant
        return _patch_invariant(kv_bits) if invariant else _patch(kv_bits, kv_group_size)


def _patch(kv_bits: Literal[4, 8, 16] | None, kv_group_size: Literal[32, 64, 128]) -> Patched:
    replaced = EVERY
    if mx.cuda.is_available():
        native.load()
        if native.capability(mx.Device(mx.gpu, 0)) < OLDEST_GPU:  # no kernel of mlx-cuda runs there
            replaced = ()
    upstream = {route: route.upstream for route in _invariant_ones()}
    patched = _put(upstream | {route: natively(route.ours) if route in ROUTES else route.ours for route in replaced})
    patched.callback(_models())
    patched.callback(setattr, packing.settings, "packing", packing.settings.packing)
    if kv_bits is not None:
        packing.settings.packing = packing.Packing(kv_group_size, kv_bits) if kv_bits in {4, 8} else None
    if setting.on:
        _remove()
    if native.loaded is not None and replaced:
        _install()
    return patched


def _patch_invariant(kv_bits: int | None) -> Patched:
    if kv_bits in {4, 8} or (kv_bits is None and packing.settings.packing is not None):
        raise ValueError("[patch] batch_invariant has no kernel for quantized keys and values: leave kv_bits out, or set it to 16.")
    if why := refusal():
        raise ValueError(f"[patch] batch_invariant is not available: {why}.")
    patched = _put({route: route.ours for route in (*INVARIANT, *EXPORTERS)})
    patched.callback(_models())
    patched.callback(setattr, packing.settings, "packing", packing.settings.packing)
    packing.settings.packing = None
    _install_invariant()
    return patched


def _models() -> Callable[[], None]:
    """Return a function that restores mlx-lm's present state."""
    if setting.on:
        return _install_invariant
    return _install if wrapped.installed() else _remove


def _install() -> None:
    if setting.on:
        _remove()
    wrapped.install(mlx_lm.put)


def _install_invariant() -> None:
    _remove()
    setting.on, setting.put, setting.modules = True, invariant_mlx_lm.put, 0
    wrapped.install(invariant_mlx_lm.put, replay=False)


def _remove() -> None:
    setting.on = False
    wrapped.remove()
    mlx_lm.take_away()
    invariant_mlx_lm.take_away()


def unpatch() -> None:
    """Restore the functions that :func:`patch` replaced, and release captured steps. Calling it again has no effect."""
    with alone:
        _put({route: route.upstream for route in (*EVERY, *_invariant_ones())})
        packing.settings.packing = None
        _remove()
