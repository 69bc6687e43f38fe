"""The targets of matmul."""

from __future__ import annotations

from typing import Any

from .judge import Share, Speedup, Target, TimeOver, cases

MANY = "every format, M >= 512"
ONE = "M = 1, 4 bit"
FEW = "M = 2-16, 4 and 8 bit"
SOME = "M = 64"
EXPERTS = "gather_qmm, 32 experts of 2048x2048, 8192 sorted tokens, 4 bit"
DECODE = "gather_qmm decode (top-8 of 128 experts, 1-8 tokens)"
GROUPED = "gather_mm / grouped_matmul bf16, 8192 tokens"
FP8 = "FP8 8192^3, scales per tensor and per row"
LINEAR = "linear + GELU, M=8192 K=4096 N=16384"

SWEEP = "every point of the sweep"

OF_FOUR_AND_EIGHT_BITS: dict[str, dict[str, Any]] = {
    "affine 4 bit": {"mode": "affine", "bits": 4}, "affine 8 bit": {"mode": "affine", "bits": 8},
    **{mode: {"mode": mode} for mode in ("mxfp4", "nvfp4", "mxfp8")},
}  # fmt: skip
SORTED: dict[str, Any] = {"rows": 8192, "chosen": None}
UNQUANTIZED = cases("experts", operation=("gather_mm", "grouped_matmul"), **SORTED)
LARGE = {"m": 8192, "n": 16384, "k": 4096}

MATMUL = (
    Target(MANY, "M = 512: <= 1.6 x the bf16 cuBLAS time", cases("quantized", rows=512), TimeOver("bf16"), at_most=1.6),
    Target(MANY, "M = 512: >= 2 x MLX", cases("quantized", rows=512), Speedup("upstream"), at_least=2.0),
    Target(
        MANY,
        "M = 2048 and 8192: <= 1.12 x the bf16 cuBLAS time",
        cases("quantized", rows=(2048, 8192)),
        TimeOver("bf16"),
        at_most=1.12,
    ),
    Target(MANY, "M = 2048 and 8192: >= 4 x MLX", cases("quantized", rows=(2048, 8192)), Speedup("upstream"), at_least=4.0),
    Target(
        ONE, ">= 60 % of bandwidth", cases("quantized", rows=1, bits=4), Share(), at_least=0.60,
        why="dequantizing mxfp4 and nvfp4 needs twice the instructions of affine weights; the rest is CPU overhead",
    ),
    Target(ONE, ">= 2 x MLX", cases("quantized", rows=1, bits=4), Speedup("upstream"), at_least=2.0),
    *(
        Target(
            FEW, f"{name}: <= 1.5 x the time of M = 1", cases("quantized", rows=(2, 4, 8, 16), **stored),
            TimeOver(base=cases("quantized", rows=1, **stored)), at_most=1.5, why="M = 1 is that fast",
        )
        for name, stored in OF_FOUR_AND_EIGHT_BITS.items()
    ),
    Target(FEW, "M = 4: >= 4 x MLX", cases("quantized", rows=4, bits=(4, 8)), Speedup("upstream"), at_least=4.0),
    Target(SOME, ">= 1.5 x MLX", cases("quantized", rows=64), Speedup("upstream"), at_least=1.5),
    Target(SOME, "not slower than bf16", cases("quantized", rows=64), Speedup("bf16"), at_least=1.0),
    Target(
        EXPERTS, ">= 40 x MLX", cases("experts", operation="gather_qmm", bits=4, **SORTED), Speedup("upstream"), at_least=40.0,
        why="MLX is faster with mxfp4 than with affine weights",
    ),
    Target(
        EXPERTS, "<= 2.5 x torch._grouped_mm on bf16", cases("experts", operation="gather_qmm", bits=4, **SORTED),
        TimeOver("torch grouped bf16"), at_most=2.5,
    ),
    Target(
        DECODE, ">= 60 % of bandwidth", cases("experts", operation="gather_qmm", chosen=8), Share(), at_least=0.60,
        why="CPU overhead and launch latency exceed the time to read the weights of one token",
    ),
    Target(GROUPED, ">= 6 x MLX's gather_mm", UNQUANTIZED, Speedup("upstream"), at_least=6.0),
    Target(GROUPED, "<= 1.05 x torch._grouped_mm", UNQUANTIZED, TimeOver("torch grouped bf16"), at_most=1.05),
    Target(FP8, ">= 0.98 x torch._scaled_mm", cases("fp8", m=8192, scales=("tensor", "row")), Speedup("torch"), at_least=0.98),
    Target(
        LINEAR, "<= 1.04 x the bare matmul", cases("linear", activation="gelu_approx", **LARGE),
        TimeOver(base=cases("linear", activation=None, bias=False, **LARGE)), at_most=1.04,
    ),
    *(
        Target(SWEEP, f"{group}: never slower than MLX", cases(group), Speedup("upstream"), at_least=1.0)
        for group in ("quantized", "experts", "linear")
    ),
)  # fmt: skip
