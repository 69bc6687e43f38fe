"""What type checkers say of programs that use the package. mypy reads this; nothing runs it.

Where mypy has no error, ``type: ignore`` is one.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import mlx_cuda
from mlx_cuda import Calibration, Choice, ModelCheck, Patched, Tuning

if TYPE_CHECKING:
    import mlx.core as mx


def misspelled(x: mx.array) -> None:
    mlx_cuda.atention(x, x, x)  # type: ignore[attr-defined]
    from mlx_cuda import patsh  # type: ignore[attr-defined]  # noqa: F401


def wrong_arguments(x: mx.array) -> None:
    mlx_cuda.patch(kv_bits=5)  # type: ignore[arg-type]
    mlx_cuda.patch(kv_bits="four")  # type: ignore[arg-type]
    mlx_cuda.patch(kv_group_size=16)  # type: ignore[arg-type]
    mlx_cuda.unpatch(3)  # type: ignore[call-arg]
    mlx_cuda.linear(x, x, activation="gelu")  # type: ignore[arg-type]
    mlx_cuda.swiglu(x)  # type: ignore[call-arg]
    mlx_cuda.attention(x, x, x, causal=True)  # type: ignore[call-overload]


def returned(path: Path) -> tuple[Patched, Tuning, Calibration, Choice]:
    return mlx_cuda.patch(kv_bits=8), mlx_cuda.tune(path=path), mlx_cuda.calibrate(), mlx_cuda.explain(mlx_cuda.swiglu)


def checked(path: Path) -> list[str]:
    found: ModelCheck = mlx_cuda.check(path, quick=True)
    mlx_cuda.check(3)  # type: ignore[arg-type]
    return [row.name for row in found.rows if row.status == "fail"]


def with_lse(x: mx.array, lse: bool) -> None:
    one: mx.array = mlx_cuda.attention(x, x, x)
    two: tuple[mx.array, mx.array] = mlx_cuda.attention(x, x, x, return_lse=True, mask="causal")
    either: mx.array | tuple[mx.array, mx.array] = mlx_cuda.attention(x, x, x, return_lse=lse)
    either = mlx_cuda.paged_attention(x, x, x, x, x, return_lse=lse)
    either = mlx_cuda.attention_varlen(x, x, x, x, x, max_seqlen_q=1, max_seqlen_k=1, return_lse=lse)
    either = mlx_cuda.quantized_attention(x, (x, x), (x, x), return_lse=lse)
    one = mlx_cuda.attention(x, x, x, return_lse=lse)  # type: ignore[assignment]
    del one, two, either
