"""Functions of MLX whose kernels depend on the amount of work, and that have no batch-invariant form."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import mlx.core as mx

from .state import NotInvariant

MATMULS = (
    "block_masked_mm", "conv1d", "conv2d", "conv3d", "conv_general", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "convolve",
    "einsum", "gather_qqmm", "inner", "qqmm", "segmented_mm", "tensordot", "vecdot",
)  # fmt: skip
WHY = "chooses its kernel by all of its sizes, the number of tokens among them: write it as x @ w with a matrix w, or as attention."
STATES = "carries a state from token to token, by other sums for a prompt: linear attention and state space models cannot have it."
PLACES: tuple[tuple[Any, str, str], ...] = (
    *((mx, name, f"mx.{name} {WHY}") for name in MATMULS),
    (mx.fast, "gated_delta_update", f"mx.fast.gated_delta_update {STATES}"),
    (mx, "import_function", "mx.import_function gives a function whose matmuls are MLX's own: call the one that it was exported from."),
    (mx.array, "__imatmul__", "a @= b would change an array in place: write a = a @ b."),
)
upstream_all_sum = mx.distributed.all_sum
upstream_sum_scatter = mx.distributed.sum_scatter


def in_one_process(upstream: Callable[..., mx.array]) -> Callable[..., mx.array]:
    """Refuse a sum over processes, whose order of additions depends on its size."""

    @wraps(upstream)
    def function(x: mx.array, *arguments: Any, **options: Any) -> mx.array:
        group = options.get("group", arguments[0] if arguments else None) or mx.distributed.init()
        if group.size() > 1:
            name = f"mx.distributed.{upstream.__name__}"
            raise NotInvariant(f"{name} adds in an order that depends on how many numbers there are: use one GPU.")
        return upstream(x, *arguments, **options)

    return function


all_sum, sum_scatter = in_one_process(upstream_all_sum), in_one_process(upstream_sum_scatter)
