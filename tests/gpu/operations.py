"""One call of each engine, and what each needs that may not be there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import mlx.core as mx
import mlx_cuda
import numpy as np

from .support import normal

Make: TypeAlias = Callable[[np.random.Generator], Callable[[], mx.array]]


def attention(rng: np.random.Generator, queries: int, keys: int, **options: Any) -> Callable[[], mx.array]:
    q, k, v = (normal(rng, (2, 8, size, 64), mx.float16) for size in (queries, keys, keys))
    return lambda: mlx_cuda.attention(q, k, v, **options)


def quantized(rng: np.random.Generator, rows: int) -> Callable[[], mx.array]:
    x, w = normal(rng, (rows, 512), mx.bfloat16), mx.quantize(normal(rng, (768, 512), mx.bfloat16))
    return lambda: mlx_cuda.quantized_matmul(x, *w)


def experts(rng: np.random.Generator, rows: int) -> Callable[[], mx.array]:
    x, w = normal(rng, (rows, 1, 256), mx.bfloat16), mx.quantize(normal(rng, (8, 128, 256), mx.bfloat16))
    chosen = mx.array(rng.integers(0, 8, rows), mx.uint32)
    return lambda: mlx_cuda.gather_qmm(x, *w, rhs_indices=chosen)


def linear(rng: np.random.Generator) -> Callable[[], mx.array]:
    x, w, b = (normal(rng, shape, mx.float16) for shape in ((96, 256), (160, 256), (160,)))
    return lambda: mlx_cuda.linear(x, w, b, activation="gelu_approx")


def swiglu(rng: np.random.Generator) -> Callable[[], mx.array]:
    gate, up = (normal(rng, (33, 512), mx.float16) for _ in range(2))
    return lambda: mlx_cuda.swiglu(gate, up)


def fp8(rng: np.random.Generator) -> Callable[[], mx.array]:
    (a, a_scale), (b, b_scale) = (mlx_cuda.quantize_fp8(normal(rng, (128, 256), mx.bfloat16)) for _ in range(2))
    return lambda: mlx_cuda.fp8_matmul(a, b, scale_a=a_scale, scale_b=b_scale)


def packed(rng: np.random.Generator) -> Callable[[], mx.array]:
    q, k, v = (normal(rng, (90, 4, 64), mx.float16) for _ in range(3))
    ends = mx.array([0, 50, 90], mx.int32)
    return lambda: mlx_cuda.attention_varlen(q, k, v, ends, ends, max_seqlen_q=50, max_seqlen_k=50)


def paged_update(rng: np.random.Generator) -> Callable[[], mx.array]:
    pages, rows = normal(rng, (4, 2, 16, 64), mx.float16), normal(rng, (1, 2, 1, 64), mx.float16)
    table, lengths = mx.array([[1, 2]], mx.int32), mx.array([7], mx.int32)
    return lambda: mlx_cuda.paged_cache_update(pages + 0, pages + 0, rows, rows, table, lengths)[0]


def codes(rng: np.random.Generator) -> Callable[[], mx.array]:
    x = normal(rng, (64, 128), mx.bfloat16)
    return lambda: mlx_cuda.quantize_fp8(x)[0]


def dense_experts(rng: np.random.Generator) -> Callable[[], mx.array]:
    x, w = normal(rng, (40, 1, 64), mx.float16), normal(rng, (4, 64, 96), mx.float16)
    chosen = mx.array(rng.integers(0, 4, 40), mx.uint32)
    return lambda: mlx_cuda.gather_mm(x, w, rhs_indices=chosen)


def biased_fp8(rng: np.random.Generator) -> Callable[[], mx.array]:
    (a, a_scale), (b, b_scale) = (mlx_cuda.quantize_fp8(normal(rng, (128, 256), mx.bfloat16)) for _ in range(2))
    bias = normal(rng, (128,), mx.bfloat16)
    return lambda: mlx_cuda.fp8_matmul(a, b, scale_a=a_scale, scale_b=b_scale, bias=bias)


def paged(rng: np.random.Generator) -> Callable[[], mx.array]:
    q, pages = normal(rng, (2, 4, 1, 64), mx.float16), normal(rng, (2, 8, 2, 16, 64), mx.float16)
    table, lengths = mx.array([[1, 2, 6], [5, 0, 3]], mx.int32), mx.array([40, 17], mx.int32)
    return lambda: mlx_cuda.paged_attention(q, pages[0], pages[1], table, lengths)


def quantized_cache(rng: np.random.Generator, queries: int) -> Callable[[], mx.array]:
    q = normal(rng, (2, 8, queries, 64), mx.float16)
    k, v = (mx.quantize(normal(rng, (2, 4, 300, 64), mx.float16)) for _ in range(2))
    return lambda: mlx_cuda.quantized_attention(q, k, v, mask="causal")


def linear_attention(rng: np.random.Generator, tokens: int) -> Callable[[], mx.array]:
    q, k = (normal(rng, (1, tokens, 2, 64), mx.bfloat16) / 8 for _ in range(2))
    v, g, beta = normal(rng, (1, tokens, 4, 64), mx.bfloat16), *(mx.sigmoid(normal(rng, (1, tokens, 4), mx.float32)) for _ in range(2))
    return lambda: mlx_cuda.gated_delta(q, k, v, g, beta)[0]


def short_conv(rng: np.random.Generator, tokens: int) -> Callable[[], mx.array]:
    x, weight, bias = (normal(rng, shape, mx.bfloat16) for shape in ((2, tokens, 96), (96, 4), (96,)))
    return lambda: mlx_cuda.short_conv(x, weight, bias=bias, activation="silu")[0]


OPERATIONS: dict[str, tuple[str, Make]] = {
    "decode": ("kernel", lambda rng: attention(rng, 1, 300)),
    "flash": ("kernel", lambda rng: attention(rng, 200, 300, mask="causal")),
    "flash with a soft cap": ("kernel", lambda rng: attention(rng, 200, 200, softcap=20.0)),
    "cudnn": ("cudnn", lambda rng: attention(rng, 208, 208, mask="causal")),
    "small_m": ("kernel", lambda rng: quantized(rng, 6)),
    "dequantize, no kernel": ("kernel", lambda rng: quantized(rng, 600)),
    "dequantize, no algorithm": ("cublaslt", lambda rng: quantized(rng, 600)),
    "experts, few": ("kernel", lambda rng: experts(rng, 7)),
    "experts, many": ("kernel", lambda rng: experts(rng, 300)),
    "swiglu": ("kernel", swiglu),
    "short convolution": ("kernel", lambda rng: short_conv(rng, 70)),
    "linear": ("cublaslt", linear),
    "fp8": ("cublaslt", fp8),
}
MORE: dict[str, tuple[str, Make]] = {
    "varlen": ("kernel", packed),
    "paged update": ("kernel", paged_update),
    "codes": ("kernel", codes),
    "dense experts": ("kernel", dense_experts),
    "fp8 with a bias": ("cublaslt", biased_fp8),
}
OTHERS: dict[str, Make] = {
    "paged attention": paged,
    "quantised cache, decode": lambda rng: quantized_cache(rng, 1),
    "quantised cache, prompt": lambda rng: quantized_cache(rng, 200),
    "linear attention, decode": lambda rng: linear_attention(rng, 1),
    "linear attention, prompt": lambda rng: linear_attention(rng, 300),
}
