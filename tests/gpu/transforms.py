"""Calls of every function that ``patch`` replaces, each of two sizes, and MLX's transformations of them: results as without the patch."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import mlx.core as mx
import mlx_cuda
import numpy as np
import pytest
from mlx_cuda._mlx_lm import places as mlx_lm
from mlx_cuda._patch import EVERY, EXPORTERS

from .mlx_lm_parts import part
from .support import host, normal

Arrays: TypeAlias = "list[mx.array]"
Function: TypeAlias = "Callable[..., Any]"

MLX: Any = mx  # whose stubs take no arrays of any number
DTYPE = mx.float16
TOLERANCE = 3e-2  # MLX rounds what is between its operations to the dtype
N, K = (64, 128) if mx.cuda.is_available() else (16, 64)  # of quantized weights, with which MLX is slow on the CPU


class Example(NamedTuple):
    """A way to call a function of MLX's or mlx-lm's, and its arrays in two sizes."""

    form: str
    call: Function
    small: Callable[[np.random.Generator], Arrays]
    large: Callable[[np.random.Generator], Arrays]
    any_size: bool = False  # MLX's own graph for one size holds for others; else it may read what lies beyond its arrays


def attention(
    form: str, small: tuple[int, int], large: tuple[int, int], *, dim: int = 64, mask: str | None = None, **more: bool
) -> Example:
    """Sizes are how many queries and keys there are; a ``mask`` of another name than "causal" is an array's dtype."""
    array_mask, sinks = mask not in {None, "causal"}, more.get("sinks", False)

    def make(sizes: tuple[int, int]) -> Callable[[np.random.Generator], Arrays]:
        def arrays(rng: np.random.Generator) -> Arrays:
            q_len, k_len = sizes
            found = [normal(rng, (1, heads, length, dim), DTYPE) for heads, length in ((4, q_len), (2, k_len), (2, k_len))]
            if array_mask:
                numbers = normal(rng, (1, 1, *sizes), DTYPE)
                found.append(numbers > -1 if mask == "bool" else numbers)
            return [*found, *([normal(rng, (4,), DTYPE)] if sinks else [])]

        return arrays

    def call(q: mx.array, k: mx.array, v: mx.array, *rest: mx.array) -> Any:
        own_mask = rest[0] if array_mask else mask
        options = {"sinks": rest[-1]} if sinks else {}
        return MLX.fast.scaled_dot_product_attention(q, k, v, scale=dim**-0.5, mask=own_mask, **options)

    return Example(form, call, make(small), make(large), mask is None and not sinks)


def quantized(rng: np.random.Generator, *shape: int) -> Arrays:
    with mx.stream(mx.cpu):
        return list(mx.quantize(normal(rng, shape, DTYPE, shape[-1] ** -0.5), 64, 4))


def matmul(form: str, small: tuple[int, ...], large: tuple[int, ...], w: tuple[int, ...], *, transpose: bool = True) -> Example:
    """The shapes of x, and the shape of the weights."""

    def call(x: mx.array, *parts: mx.array) -> Any:
        return MLX.quantized_matmul(x, *parts, transpose=transpose, group_size=64, bits=4)

    def make(x: tuple[int, ...]) -> Callable[[np.random.Generator], Arrays]:
        return lambda rng: [normal(rng, x, DTYPE), *quantized(rng, *w)]

    return Example(form, call, make(small), make(large), any_size=True)


def experts(form: str, small: int, large: int, *, dense: bool, named: bool) -> Example:
    """Sizes are numbers of rows, each of which has two experts; ``named``: by their indices, too, which MLX counts for one size else."""

    def call(x: mx.array, chosen: mx.array, rows: mx.array, *parts: mx.array) -> Any:
        indices = {"lhs_indices": rows, "rhs_indices": chosen} if named else {"rhs_indices": chosen}
        return MLX.gather_mm(x, *parts, **indices) if dense else MLX.gather_qmm(x, *parts, **indices, group_size=64, bits=4)

    def make(rows: int) -> Callable[[np.random.Generator], Arrays]:
        def arrays(rng: np.random.Generator) -> Arrays:
            chosen = mx.array(rng.integers(0, 4, (rows, 2)), mx.uint32)
            parts = [normal(rng, (4, K, N), DTYPE, 0.1)] if dense else quantized(rng, 4, N, K)
            return [normal(rng, (rows, 1, 1, K), DTYPE), chosen, mx.arange(rows, dtype=mx.uint32)[:, None], *parts]

        return arrays

    return Example(form, call, make(small), make(large), any_size=named)


def linear_attention(form: str, call: Function, small: int, large: int) -> Example:
    """Sizes are numbers of tokens."""

    def make(tokens: int) -> Callable[[np.random.Generator], Arrays]:
        def arrays(rng: np.random.Generator) -> Arrays:
            q, k = (normal(rng, (1, tokens, 2, 64), DTYPE, 0.1) for _ in range(2))
            g, beta = (mx.sigmoid(normal(rng, (1, tokens, 4), mx.float32)) for _ in range(2))
            return [q, k, normal(rng, (1, tokens, 4, 64), DTYPE), g, beta]

        return arrays

    return Example(form, call, make(small), make(large))


def state_space(form: str, small: int, large: int) -> Example:
    """Mamba-2's, of so many tokens."""

    def call(*arrays: mx.array) -> Any:
        return part("models.ssm").ssm_attn(*arrays)

    def make(tokens: int) -> Callable[[np.random.Generator], Arrays]:
        def arrays(rng: np.random.Generator) -> Arrays:
            x, b, c = (normal(rng, (1, tokens, heads, 64), DTYPE, 0.3) for heads in (4, 2, 2))
            a_log, d, bias = (normal(rng, (4,), mx.float32, 0.1) for _ in range(3))
            return [x, a_log, b, c, d, normal(rng, (1, tokens, 4), DTYPE), bias]

        return arrays

    return Example(form, call, make(small), make(large))


def convolution(form: str, small: int, large: int) -> Example:
    """Of as many numbers as make it ours on a GPU."""
    channels = 4096 if mx.cuda.is_available() else 8

    def call(x: mx.array, weight: mx.array) -> Any:
        return MLX.conv1d(x, weight, groups=channels)

    def make(tokens: int) -> Callable[[np.random.Generator], Arrays]:
        return lambda rng: [normal(rng, (1, tokens, channels), DTYPE), normal(rng, (channels, 4, 1), DTYPE)]

    return Example(form, call, make(small), make(large), any_size=True)


def quantized_cache(form: str, small: tuple[int, int], large: tuple[int, int], mask: str | None) -> Example:
    """Sizes are how many queries and keys there are."""

    def call(q: mx.array, *parts: mx.array) -> Any:
        function = part("models.base").quantized_scaled_dot_product_attention
        return function(q + 0, parts[:3], parts[3:], scale=0.125, mask=mask, group_size=64, bits=4)  # mlx-lm scales q in place

    def make(sizes: tuple[int, int]) -> Callable[[np.random.Generator], Arrays]:
        def arrays(rng: np.random.Generator) -> Arrays:
            keys = [quantized(rng, 1, 2, sizes[1], 64) for _ in range(2)]
            return [normal(rng, (1, 4, sizes[0], 64), DTYPE), *keys[0], *keys[1]]

        return arrays

    return Example(form, call, make(small), make(large), mask is None)


def summed(x: mx.array) -> Any:
    return MLX.distributed.all_sum(x)


def updated(*arrays: mx.array) -> Any:
    return MLX.fast.gated_delta_update(*arrays)


def looped(*arrays: mx.array) -> Any:
    return part("models.gated_delta").gated_delta_ops(*arrays)


EXAMPLES: dict[str, list[Example]] = {  # of each function by its name
    "scaled_dot_product_attention": [
        attention("causal", (1, 70), (136, 136), mask="causal"),
        attention("causal, head_dim 256", (1, 70), (136, 136), dim=256, mask="causal"),
        attention("no mask", (1, 70), (77, 90)),
        attention("additive mask", (1, 72), (64, 72), mask="additive"),
        attention("bool mask", (1, 72), (64, 72), mask="bool"),
        attention("sinks", (1, 70), (64, 70), mask="causal", sinks=True),
    ],
    "quantized_matmul": [
        matmul("rows", (1, 1, K), (1, 600, K), (N, K)),
        matmul("rows, not transposed", (1, 1, N), (1, 600, N), (N, K), transpose=False),
        matmul("batches", (1, 4, 1, K), (1, 4, 40, K), (4, N, K)),  # not broadcast: MLX is wrong then
    ],
    "gather_mm": [experts(form, 1, 300, dense=True, named=form != "experts") for form in ("experts", "experts of rows")],
    "gather_qmm": [experts(form, 1, 300, dense=False, named=form != "experts") for form in ("experts", "experts of rows")],
    "gated_delta_update": [linear_attention("tokens", updated, 1, 70)],
    "conv1d": [convolution("channels by themselves", 10, 4100 if mx.cuda.is_available() else 40)],
    "all_sum": [
        Example("numbers", summed, lambda rng: [normal(rng, (1, 8), DTYPE)], lambda rng: [normal(rng, (40, 64), DTYPE)], any_size=True)
    ],
    # mlx-lm's
    "quantized_scaled_dot_product_attention": [
        quantized_cache("no mask", (1, 64), (1, 192), None),
        quantized_cache("causal", (1, 64), (40, 128), "causal"),
    ],
    "gated_delta_ops": [linear_attention("tokens", looped, 1, 70)],
    "ssm_attn": [state_space("tokens", 1, 70)],
}


FUNCTIONS = {route.name for route in EVERY if route not in EXPORTERS}
OF_MLX_LM = {name for _, name in mlx_lm.PLACES} - {"trim_prompt_cache"}  # which computes nothing


def case(name: str, value: object, form: str = "") -> Any:
    """A parameter of a test; functions of mlx-lm's need that."""
    left_out = name in OF_MLX_LM and importlib.util.find_spec("mlx_lm") is None
    return pytest.param(value, id=f"{name}: {form}" if form else name, marks=pytest.mark.skipif(left_out, reason="mlx_lm is not installed"))


CASES = [case(name, each, each.form) for name, examples in EXAMPLES.items() for each in examples]
every_example = pytest.mark.parametrize("example", CASES)


# ------------------------------------------------------------------------------------------------------------- transformations
class Transform(NamedTuple):
    """What becomes of a function, which sizes it is called with (s: small, l: large), and what gives the same results without it."""

    apply: Callable[[Function, Path], Function]
    order: str
    plain: Callable[[Function], Function] = lambda function: function
    shapeless: bool = False

    def run(self, function: Function, example: Example, rng: np.random.Generator) -> Arrays:
        """All results, evaluated one call after another."""
        given = {"s": example.small(rng), "l": example.large(rng)}
        order = self.order[:1] if self.shapeless and not example.any_size else self.order
        return each_in_turn(function, *(given[size] for size in order))


def each_in_turn(function: Function, *calls: Arrays) -> Arrays:
    found: Arrays = []
    for arrays in calls:
        results = listed(function(*arrays))
        mx.eval(results)
        found += results
    return found


def listed(results: Any) -> Arrays:
    return list(results) if isinstance(results, (tuple, list)) else [results]


def compiled(function: Function, *, shapeless: bool = False) -> Function:
    """As another function each time: MLX keeps what it has traced by the function's address."""
    return mx.compile(partial(function), shapeless=shapeless)


def exported(function: Function, file: Path, *, shapeless: bool = False, by_name: bool = False) -> Function:
    """As the first call's arrays have it written to a file, from which all calls read it."""

    def call(*arrays: mx.array) -> Any:
        if not file.exists():
            if by_name:
                with mx.exporter(file=str(file), fun=function, shapeless=shapeless) as export:
                    export(*arrays)
            else:
                mx.export_function(str(file), function, *arrays, shapeless=shapeless)
        imported: Any = mx.import_function(str(file))
        return imported(*arrays)

    return call


def derived(function: Function) -> Function:
    """The results, and the gradients of all arrays that may have some."""

    def call(*arrays: mx.array) -> Arrays:
        places = [i for i, each in enumerate(arrays) if mx.issubdtype(each.dtype, mx.floating)]

        def of_some(*some: mx.array) -> Arrays:
            given = list(arrays)
            for place, each in zip(places, some, strict=True):
                given[place] = each
            return listed(function(*given))

        plain = of_some(*(arrays[place] for place in places))
        weights = [mx.cos(mx.arange(each.size, dtype=mx.float32)).reshape(each.shape).astype(each.dtype) for each in plain]
        results, found = mx.vjp(of_some, [arrays[place] for place in places], weights)
        return [*results, *found]

    return call


UNKNOWN = partial(Transform, shapeless=True)  # sizes
SHAPELESS = {
    "shapeless, small first": UNKNOWN(lambda f, _: compiled(f, shapeless=True), "sls"),
    "shapeless, large first": UNKNOWN(lambda f, _: compiled(f, shapeless=True), "lsl"),
    "exported": Transform(exported, "s"),
    "exported by the exporter": Transform(partial(exported, by_name=True), "l"),
    "exported shapeless, small first": UNKNOWN(partial(exported, shapeless=True), "sls"),
    "exported shapeless, large first": UNKNOWN(partial(exported, shapeless=True, by_name=True), "lsl"),
}
TRANSFORMS = {
    "compiled": Transform(lambda f, _: compiled(f), "sls"),
    "gradients": Transform(lambda f, _: derived(f), "sl", derived),
    "gradients, compiled": Transform(lambda f, _: derived(compiled(f)), "sl", derived),
    "gradients, checkpointed": Transform(lambda f, _: derived(mx.checkpoint(f)), "sl", derived),
    "compiled gradients": Transform(lambda f, _: compiled(derived(f)), "sl", derived),
}


# ---------------------------------------------------------------------------------------------------------------------- checks
def check(transform: Transform, example: Example, seed: int, folder: Path) -> bool:
    """Whether MLX's own transformation of MLX's own function gives something right, which ours is the same as then."""
    files = folder / "theirs.mlxfn", folder / "ours.mlxfn"
    ways = transform.plain(example.call), *(transform.apply(example.call, file) for file in files)
    exact, theirs, ours = (
        outcome(partial(transform.run, way, example, np.random.default_rng(seed)), patched=i == 2) for i, way in enumerate(ways)
    )
    return compare(exact, theirs, ours, same_error=transform in SHAPELESS.values())


def check_gradient_graphs(example: Example, seed: int) -> None:
    """Of a trace for any size; not evaluated, as MLX's own of a batch of weights end the process."""
    arrays = example.large(np.random.default_rng(seed))
    work = partial(compiled(derived(example.call), shapeless=True), *arrays)
    theirs, ours = (outcome(work, patched=patched, evaluated=False) for patched in (False, True))
    assert type(ours) is type(theirs), (ours, theirs)


def check_vmap(example: Example, size: str, seed: int) -> None:
    """Over each of the arrays, and over all of them."""
    rng = np.random.default_rng(seed)
    entries: list[Arrays] = [getattr(example, size)(rng) for _ in range(2)]
    count = len(entries[0])
    for places in [{place} for place in range(count)] + [set(range(count))]:
        axes = tuple(0 if i in places else None for i in range(count))
        alone = [[entry[i] if i in places else entries[0][i] for i in range(count)] for entry in entries]
        together = [mx.stack([entry[i] for entry in entries]) if i in places else entries[0][i] for i in range(count)]
        exact = outcome(partial(stacked, example.call, alone), patched=False)
        work = partial(each_in_turn, mx.vmap(example.call, axes), together)
        compare(exact, *(outcome(work, patched=patched) for patched in (False, True)))


def stacked(function: Function, calls: list[Arrays]) -> Arrays:
    results = [listed(function(*arrays)) for arrays in calls]
    return [mx.stack(list(each)) for each in zip(*results, strict=True)]


def outcome(work: Callable[[], Arrays], *, patched: bool, evaluated: bool = True) -> Arrays | Exception:
    """The results, or the error."""
    with mlx_cuda.patch() if patched else mx.stream(mx.default_device()):
        try:
            results = work()
            mx.eval(results if evaluated else [])
            return results
        except (RuntimeError, TypeError, ValueError) as error:
            return error


def compare(exact: Arrays | Exception, theirs: Arrays | Exception, ours: Arrays | Exception, *, same_error: bool = False) -> bool:
    """Where MLX's result is right, ours is as well; where MLX raises, ours is right or raises (``same_error``: the same); returns which."""
    if isinstance(theirs, Exception):
        if isinstance(ours, Exception) or same_error:
            assert not same_error or type(ours) is type(theirs), (ours, theirs)
        elif not isinstance(exact, Exception):
            assert equal(ours, exact)
        return False
    if isinstance(exact, Exception) or not equal(theirs, exact):
        return False
    assert not isinstance(ours, Exception), ours
    assert equal(ours, exact)
    return True


def equal(ours: Arrays, theirs: Arrays) -> bool:
    """Up to roundings, relative to the norm."""
    if [(each.shape, each.dtype) for each in ours] != [(each.shape, each.dtype) for each in theirs]:
        return False
    pairs = [(host(one), host(other)) for one, other in zip(ours, theirs, strict=True)]
    return all(
        bool(np.isfinite(a).all()) and float(np.linalg.norm(a - b)) <= TOLERANCE * max(float(np.linalg.norm(b)), 1e-3 * b.size**0.5)
        for a, b in pairs
    )
