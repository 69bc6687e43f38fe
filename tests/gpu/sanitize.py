"""Every kernel of ours, at small and odd sizes, for compute-sanitizer, which makes them some hundred times slower.

    compute-sanitizer --tool memcheck --report-api-errors no python -m tests.gpu.sanitize
    compute-sanitizer --tool racecheck python -m tests.gpu.sanitize quantised grouped

Results are not looked at (the tests do that), but an exception fails the run. Without the option memcheck names calls of MLX's that are
answered with "the graph update was not performed", which MLX expects. MLX_CUDA_CAPABILITY=80 and MLX_CUDA_EPILOGUE=separate have the
kernels called that other GPUs and libraries get, but for what another GPU's shared memory would decide.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Iterator
from typing import Any, TypeAlias

Calls: TypeAlias = Iterator[tuple[Any, ...]]  # a name, a function and its arguments

FORMS = [*(("affine", 32, bits) for bits in (2, 3, 4, 5, 6, 8)), ("mxfp4", 32, 4), ("mxfp8", 32, 8), ("nvfp4", 16, 4)]


class Inputs:
    """The native module, and random operands for it."""

    def __init__(self) -> None:
        import mlx.core as mx
        import mlx_cuda._loader.native
        from mlx_cuda._attention.options import Options

        self.mx, self.stream = mx, mx.default_stream(mx.gpu)
        self.native: Any = mlx_cuda._loader.native.module(self.stream)
        self.options = Options
        self.capability = mlx_cuda._loader.native.capability(self.stream.device)
        self.halves = [mx.float16, mx.bfloat16]
        self.dtypes = [*self.halves, mx.float32]

    def normal(self, *shape: int, dtype: Any) -> Any:
        return self.mx.random.normal(shape).astype(dtype)

    def integers(self, *numbers: int, dtype: str = "int32") -> Any:
        return self.mx.array(numbers, getattr(self.mx, dtype))

    def weights(self, form: tuple[str, int, int], *shape: int, dtype: Any) -> tuple[Any, ...]:
        """Packed weights, their scales and biases, None where there are none, and how they are quantised."""
        mx, (mode, group, bits) = self.mx, form
        *rows, inner = shape
        packed = mx.random.randint(0, 2**31 - 1, (*rows, inner * bits // 32)).astype(mx.uint32)
        groups = (*rows, inner // group)
        if mode == "affine":
            return packed, self.normal(*groups, dtype=dtype), self.normal(*groups, dtype=dtype), group, bits, mode
        return packed, mx.random.randint(100, 130, groups).astype(mx.uint8), None, group, bits, mode


def quantised(has: Inputs) -> Calls:
    """Values of quantised weights, and matmuls of few and many rows with them."""

    def few(x: Any, parts: tuple[Any, ...], transpose: bool = True, lhs: Any = None, rhs: Any = None) -> Any:
        return has.native.quantized_small_m(x, *parts, lhs, rhs, transpose, False, False, has.stream)

    def many(x: Any, parts: tuple[Any, ...], transpose: bool) -> Any:
        return has.native.dequantize_then_gemm(x, *parts, transpose, has.stream)

    def experts(x: Any, parts: tuple[Any, ...], offsets: Any, transpose: bool) -> Any:
        return has.native.grouped_quantized(x, *parts, offsets, transpose, has.stream)

    for form, dtype in itertools.product(FORMS, has.dtypes):
        name = f"{form[0]} {form[2]} {dtype}"
        parts = has.weights(form, 67, 352, dtype=dtype)
        yield f"values {name}", has.native.dequantize, *parts, dtype, has.stream
        for rows in (1, 3) if dtype == has.mx.float32 else (3, 12, 29, 50, 75):  # Hopper has kernels for up to 32, 64 and 128
            yield f"few {name} {rows}", few, has.normal(rows, 352, dtype=dtype), parts
        yield f"few {name} plain", few, has.normal(5, 67, dtype=dtype), parts, False
        if dtype != has.mx.float32:  # the kernel that unpacks weights itself: a whole tile and some rows of one, more steps than stages
            parts = has.weights(form, 3, 264, 384, dtype=dtype)
            yield f"unpacked {name}", experts, has.normal(150, 384, dtype=dtype), parts, has.integers(0, 139, 139, 150), True
            # Hopper's kernel for pairs: several units in a block, and columns of one matmul.
            parts = has.weights(form, 5, 256, 768, dtype=dtype)
            anyone = has.mx.random.randint(0, 5, (60,)).astype(has.mx.uint32)
            yield f"shared experts {name}", few, has.normal(60, 1, 768, dtype=dtype), parts, True, anyone[::-1], anyone
    for dtype in has.dtypes:
        rows = 4 if dtype == has.mx.float32 else 8
        yield f"few {dtype} in parts", few, has.normal(rows, 8192, dtype=dtype), has.weights(FORMS[2], 33, 8192, dtype=dtype)
        if dtype != has.mx.float32:  # rows of w are shared by blocks, of which the last adds up
            for rows in (30, 60, 200):
                yield f"few {dtype} in parts {rows}", few, has.normal(rows, 4096, dtype=dtype), has.weights(FORMS[2], 33, 4096, dtype=dtype)
        parts = has.weights(FORMS[2], 1000, 64, dtype=dtype)
        yield f"few {dtype} plain in parts", few, has.normal(3, 1000, dtype=dtype), parts, False
        yield f"few {dtype} half a chunk", few, has.normal(3, 48, dtype=dtype), has.weights(FORMS[-1], 45, 48, dtype=dtype)
        stack = has.weights(FORMS[2], 5, 67, 96, dtype=dtype)
        lhs, rhs = has.integers(0, 2, 1, 0, dtype="uint32"), has.integers(4, 0, 0, 3, dtype="uint32")
        for transpose in (True, False):
            name = f"{dtype} {'transposed' if transpose else 'plain'}"
            for rows in (3, 20):
                x = has.normal(3, rows, 96 if transpose else 67, dtype=dtype)
                yield f"experts {name} {rows}", few, x, stack, transpose, lhs, rhs
            x, parts = has.normal(70, 96 if transpose else 64, dtype=dtype), has.weights(FORMS[1], 64, 96, dtype=dtype)
            yield f"many {name}", many, x, parts, transpose
            if dtype != has.mx.float32:
                parts = has.weights(FORMS[0], 3, 64, 96, dtype=dtype)
                yield f"many experts {name}", experts, x[:30], parts, has.integers(0, 7, 7, 30), transpose


def grouped(has: Inputs) -> Calls:
    """Matmuls of groups of rows and of pairs, and the gradients of their weights."""
    mx = has.mx

    def matmul(x: Any, w: Any, ends: Any, transpose: bool) -> Any:
        return has.native.grouped_matmul(x, w, ends, transpose, has.stream)

    def gradients(x: Any, w: Any, ends: Any, transpose: bool, gradient: Any) -> Any:
        return mx.vjp(lambda x, w: matmul(x, w, ends, transpose), [x, w], [gradient])[1]

    def pairs(x: Any, w: Any, lhs: Any, rhs: Any, transpose: bool, ordered: bool) -> Any:
        return has.native.gather_mm(x, w, lhs, rhs, transpose, ordered, has.stream)

    ends = has.integers(0, 5, 5, 90, 200)
    anywhere = mx.random.randint(0, 4, (200,)).astype(mx.uint32)
    rising = mx.sort(anywhere)
    for dtype, transpose, (n, k) in itertools.product(has.halves, (True, False), ((72, 136), (200, 64), (520, 64), (33, 13))):
        x, w = has.normal(200, k, dtype=dtype), has.normal(4, *((n, k) if transpose else (k, n)), dtype=dtype)
        about = f"{dtype} {n} {k} {'transposed' if transpose else 'plain'}"
        yield f"groups {about}", matmul, x, w, ends, transpose
        if n < 100:
            yield f"gradients {about}", gradients, x, w, ends, transpose, has.normal(200, n, dtype=dtype)
            for ordered, lhs in itertools.product((True, False), (None, anywhere[::-1])):
                yield f"pairs {about}", pairs, x[:, None], w, lhs, rising if ordered else anywhere, transpose, ordered
            yield f"few pairs {about}", pairs, x[:5, None], w, None, anywhere[:5], transpose, False
    # As many groups as make tiles of 128 and 256 columns the better ones, some of these of one block: most of few rows, one of many.
    ends = has.integers(*range(100), 300)
    for dtype, transpose, n in itertools.product(has.halves, (True, False), (200, 520)):
        x, w = has.normal(300, 64, dtype=dtype), has.normal(100, *((n, 64) if transpose else (64, n)), dtype=dtype)
        yield f"groups {dtype} {n} of many {'transposed' if transpose else 'plain'}", matmul, x, w, ends, transpose
    x, w = has.normal(100, 1, 16, dtype=mx.bfloat16), has.normal(13000, 8, 16, dtype=mx.bfloat16)
    yield "pairs of many", pairs, x, w, None, mx.random.randint(0, 13000, (100,)).astype(mx.uint32), True, False
    yield "offsets", has.native.expert_offsets, rising, 7, has.stream


def fp8(has: Inputs) -> Calls:
    """8-bit numbers, and matmuls of them, where there are any."""
    if has.capability < (8, 9):
        return
    parts, shapes = ("tensor", "row", "block128", "block128x128"), ((9, 272), (130, 301), (5, 9008), (5, 9001))
    for dtype, part, shape in itertools.product(has.dtypes, parts, shapes):
        yield f"codes {dtype} {part} {shape}", has.native.quantize_fp8, has.normal(*shape, dtype=dtype), part, has.stream
    for dtype, part, (n, k) in itertools.product(has.dtypes, parts[:2], ((48, 64), (33, 50))):
        a, scale_a = has.native.quantize_fp8(has.normal(17, k, dtype=dtype), part, has.stream)
        b, scale_b = has.native.quantize_fp8(has.normal(n, k, dtype=dtype), part, has.stream)
        bias = has.normal(n, dtype=dtype)
        yield f"matmul {dtype} {part} {n} {k}", has.native.fp8_matmul, a, b, scale_a, scale_b, bias, dtype, has.stream


def layers(has: Inputs) -> Calls:
    """linear with its gradients, and swiglu."""
    import mlx_cuda

    def gradients(given: list[Any], activation: Any, gradient: Any) -> Any:
        return has.mx.vjp(lambda *given: mlx_cuda.linear(*given, activation=activation), given, [gradient])

    for dtype, activation, (n, k) in itertools.product(has.dtypes, (None, "relu", "gelu_approx"), ((48, 64), (33, 50))):
        x, w, bias, gradient = (has.normal(*shape, dtype=dtype) for shape in ((17, k), (n, k), (n,), (17, n)))
        yield f"linear {dtype} {activation} {n} {k}", gradients, [x, w, bias], activation, gradient
    for dtype, columns in itertools.product(has.dtypes, (96, 131)):
        gate, up = has.normal(7, 200, dtype=dtype)[:, :columns], has.normal(7, columns, dtype=dtype)
        yield f"swiglu {dtype} {columns}", mlx_cuda.swiglu, gate, up
        yield f"copies {dtype} {columns}", mlx_cuda.swiglu, gate.T[::2], up.T[::2]
    codes = has.mx.zeros((64, 48), has.mx.uint8).T
    yield "copies of codes", has.native.fp8_matmul, codes, codes, None, None, None, has.mx.bfloat16, has.stream


# Heads of queries and of keys, queries, keys, and the dims of keys and values.
FEW = [
    (4, 2, 1, 300, 64, 64), (4, 2, 1, 300, 128, 128), (36, 18, 1, 1111, 64, 64), (36, 18, 1, 1111, 128, 128), (4, 2, 1, 300, 64, 40),
    (4, 2, 1, 300, 128, 72), (4, 2, 1, 300, 256, 256), (16, 4, 9, 300, 64, 64), (16, 4, 9, 300, 128, 128), (16, 4, 9, 300, 256, 256),
    (16, 1, 1, 200, 576, 512), (5, 1, 5, 200, 576, 512), (16, 1, 4, 200, 576, 512), (2, 1, 3, 200, 512, 512), (2, 1, 11, 200, 512, 512),
    (2, 1, 30, 200, 512, 512),
]  # fmt: skip
MANY = [*((4, 2, 200, 200, dim, dim) for dim in (64, 128, 192, 256)), (4, 2, 77, 200, 192, 128), (4, 1, 77, 130, 576, 512)]


def attention(has: Inputs) -> Calls:
    """Attention of few and of many queries, with everything that it takes."""
    mx = has.mx

    def call(which: str, q: Any, k: Any, v: Any, more: dict[str, Any]) -> Any:
        return getattr(has.native, f"{which}_attention")(q, k, v, has.options(0.1, **more), has.stream)

    def options(b: int, h: int, t: int, s: int, dtype: Any) -> dict[str, dict[str, Any]]:
        return {
            "causal": {"window": (-1, 0)},
            "ragged": {"starts": has.integers(*[5] * b), "ends": has.integers(*[s, 7][:b]), "lse": True},
            "mask": {"mask": mx.random.uniform(shape=(b, h, t, s)) > 0.5, "softcap": 20.0},
            "mask of keys": {"mask": mx.broadcast_to(mx.random.uniform(shape=(b, 1, 1, s)) > 0.5, (b, h, t, s))},
            "sinks": {"sinks": has.normal(h, dtype=dtype), "window": (50, 3), "softcap": 5.0},
        }

    for dtype, (h, kv, t, s, dim, v_dim) in itertools.product(has.halves, FEW):
        q, k, v = (has.normal(2, *shape, dtype=dtype) for shape in ((h, t, dim), (kv, s, dim), (kv, s, v_dim)))
        about = f"{dtype} {dim} {v_dim} {h} {t} {s}"
        for name, extra in {"bare": {}, **options(2, h, t, s, dtype)}.items():
            yield f"decode {about} {name}", call, "decode", q, k, v, extra
        pages = [has.normal(44, kv, 16, each, dtype=dtype) for each in (dim, v_dim)]
        table, lengths = mx.arange(s // 16 * 2).reshape(2, -1) % 44, has.integers(s // 16 * 16 - 3, 33)
        paged = (has.options(0.1, window=(-1, 0), ends=lengths, lse=True), has.stream, table)
        yield f"paged {about}", has.native.decode_attention, q, *pages, *paged
        if dim > 256:
            yield f"decode {about}, values of keys", call, "decode", q, k, k[..., :v_dim], {}
            yield f"paged {about}, values of keys", has.native.decode_attention, q, pages[0], pages[0][..., :v_dim], *paged
    for dtype, dim, keys in itertools.product(has.halves, (64, 128), (50, 300)):  # as many units as fill waves
        q, k, v = (has.normal(200, *shape, dtype=dtype) for shape in ((8, 1, dim), (2, keys, dim), (2, keys, dim)))
        yield f"decode {dtype} {dim} {keys} of many", call, "decode", q, k, v, {}
    new, cache = has.normal(2, 2, 5, 64, dtype=mx.float16), has.normal(40, 2, 16, 64, dtype=mx.float16)
    table, lengths = mx.arange(38).reshape(2, 19), has.integers(300, 7)
    yield "pages", has.native.paged_cache_update, cache, cache, new, new, table, lengths, has.stream

    for dtype, (h, kv, t, s, dim, v_dim) in itertools.product(has.dtypes, MANY):
        if dtype == mx.float32 and dim > 256:
            continue
        q, k, v = (has.normal(1, *shape, dtype=dtype) for shape in ((h, t, dim), (kv, s, dim), (kv, s, v_dim)))
        about = f"{dtype} {dim} {v_dim}"
        # A mask that the copy engine can read, and one that it cannot.
        masks = {f"{size} of {s}": has.normal(1, 1, t, size, dtype=dtype)[..., :s] for size in (s + 3, -(-s // 8) * 8)}
        extras = {name: {"mask": mx.broadcast_to(mask, (1, h, t, s))} for name, mask in masks.items()}
        for name, extra in {"bare": {}, **options(1, h, t, s, dtype), **extras}.items():
            yield f"flash {about} {name}", call, "flash", q, k, v, extra
        if dim <= 256:
            packed = [has.normal(200, *shape, dtype=dtype) for shape in ((h, dim), (kv, dim), (kv, v_dim))]
            ends = has.integers(0, 60, 60, 200)
            causal = has.options(0.1, window=(-1, 0), lse=True)
            yield f"packed {about}", has.native.flash_varlen, *packed, ends, ends, 140, 140, causal, has.stream


def decoding(has: Inputs) -> Calls:
    """A small model's step, captured and replayed three times, with each kind of head and as many rows as blocks share."""
    import mlx_cuda
    from mlx.nn.layers.quantized import quantize
    from mlx.utils import tree_map

    from .decoding_model import KVCache, Model, RotatingKVCache

    def steps(model: Any, tokens: Any, make_cache: Any) -> Any:
        cache = [make_cache() for _ in model.layers]
        logits = [model(tokens[:, :3], cache=cache)]
        logits.extend(mlx_cuda.decode_step(model, tokens[:, i : i + 1], cache) for i in range(3, 7))
        return logits

    for dtype, form, head_norms, batch in itertools.product(has.halves, (None, (4, 64), (8, 32)), (True, False), (1, 3)):
        # 8 bits with experts, and with sizes that are no whole tiles or units.
        sizes: dict[str, Any] = {"size": 320, "hidden": 416, "dim": 128, "mixture": (8, 3, "mixtral")} if form == (8, 32) else {}
        model = Model(head_norms=head_norms, norms_after=head_norms, gate="gelu" if head_norms else "gelu_approx", **sizes)
        model.update(tree_map(lambda weight: weight.astype(dtype), model.parameters()))  # noqa: B023
        if form:
            quantize(model, bits=form[0], group_size=form[1])
        tokens = has.mx.random.randint(0, 500, (batch, 7))
        about = f"{dtype} {form or 16} bits{', norms of heads' if head_norms else ''}, {batch} rows"
        yield f"step {about}", steps, model, tokens, KVCache
        if batch == 1 and head_norms:
            yield f"step {about}, rotating", steps, model, tokens, lambda: RotatingKVCache(5, 1)
    for weights, mixture in itertools.product((None, *FORMS), (None, (8, 3, "mixtral"))):  # rows that are no whole units
        model = Model(size=384, hidden=640, dim=128, mixture=mixture)
        model.update(tree_map(lambda weight: weight.astype(has.mx.bfloat16), model.parameters()))
        if weights:
            quantize(model, mode=weights[0], group_size=weights[1], bits=weights[2])
        yield f"step {weights} {mixture}", steps, model, has.mx.random.randint(0, 500, (1 if mixture else 2, 7)), KVCache


def recurrence(has: Inputs) -> Calls:
    """Linear attention of few and many tokens, and the steps of models that have it."""
    import mlx_cuda

    from benchmarks.mlx_lm_parts import part

    from .test_linear_models import MODELS, make

    mx = has.mx

    def packed(*arrays: Any) -> Any:
        return mlx_cuda.gated_delta(*arrays[:5], cu_seqlens=arrays[5])

    for dtype, (tokens, channels, taps) in itertools.product(has.halves, ((1, 70, 4), (1, 8, 8), (2, 72, 4), (21, 72, 3), (150, 1032, 4))):
        rows, weight = has.normal(2, tokens, channels, dtype=dtype), has.normal(channels, taps, dtype=dtype)
        yield f"short convolution {dtype} {tokens} {channels} {taps}", mlx_cuda.short_conv, rows, weight
    for dtype, tokens, channels in itertools.product(has.dtypes, (1, 3, 21, 150), (False, True)):
        q, k = (has.normal(2, tokens, 2, 72, dtype=dtype) / 8 for _ in range(2))
        v, beta = has.normal(2, tokens, 4, 40, dtype=dtype), mx.sigmoid(has.normal(2, tokens, 4, dtype=dtype))
        g = mx.sigmoid(has.normal(2, tokens, 4, *([72] if channels else []), dtype=dtype))
        about = f"{dtype} {tokens}{' channels' if channels else ''}"
        yield f"gated delta {about}", mlx_cuda.gated_delta, q, k, v, g, beta
        if channels:
            continue
        yield f"ssd {about}", mlx_cuda.ssd, v, beta, -mx.arange(4), q, k
        if tokens > 1:
            rows = [each[:1] for each in (q, k, v, g, beta)]
            yield f"packed {about}", packed, *rows, has.integers(0, 1, 1, tokens)
    for heads, count in ((3, 130), (1, 64)):
        parts = [has.normal(2, heads, count, 40, dtype=dtype) for dtype in has.halves]
        yield f"sums of {count} rows", has.native.row_sums, parts, 7, has.stream

    def steps(model: Any, tokens: Any) -> Any:
        cache = part("models.cache").make_prompt_cache(model)
        logits = [model(tokens[:, :5], cache=cache)]
        logits.extend(mlx_cuda.decode_step(model, tokens[:, i : i + 1], cache) for i in range(5, 9))
        return logits

    for name, batch in itertools.product(MODELS, (1, 3)):
        yield f"step {name} {batch}", steps, make(name), mx.random.randint(0, 500, (batch, 9))


PARTS = {
    "attention": attention, "quantised": quantised, "grouped": grouped, "fp8": fp8, "layers": layers, "decoding": decoding,
    "recurrence": recurrence,
}  # fmt: skip


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.sanitize", description="Calls every kernel, for compute-sanitizer.")
    parser.add_argument("parts", nargs="*", metavar="part", help=f"some of {', '.join(PARTS)}; default: all")
    parser.add_argument("--only", default="", help="calls whose names contain this")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no call after so long")
    parser.add_argument("--verbose", action="store_true", help="say when each call is made, and name it")
    options = parser.parse_args(arguments)
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"there are no parts called {', '.join(sorted(unknown))}")
    return options


def main(arguments: list[str] | None = None) -> int:
    """Exit code 1 where a call fails; what the sanitizer finds is its own to report."""
    options = parse(arguments)
    began, done, left, failed = time.monotonic(), 0, 0, 0
    has = Inputs()
    for part in options.parts or PARTS:
        for name, call, *given in PARTS[part](has):
            if options.only not in name:
                continue
            if time.monotonic() - began > options.seconds:
                left += 1
                continue
            if options.verbose:
                print(f"{time.monotonic() - began:.1f} s: {name}", flush=True)
            try:
                has.mx.eval(call(*given))
                done += 1
            except Exception as error:
                failed += 1
                print(f"{name}: {type(error).__name__}: {error}", flush=True)
        print(f"{part}: {done} calls in all after {time.monotonic() - began:.0f} s", flush=True)
    print(f"{done} calls, {failed} failed, {left} left out for want of time")
    return 1 if failed or not done else 0


if __name__ == "__main__":
    sys.exit(main())
