"""The rules that choose who computes an operation, as pure functions of its shapes, dtype and GPU."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

EngineName = Literal["cudnn", "upstream"]
MaskKind = Literal["none", "causal", "array"]

HALF = ("float16", "bfloat16")
NATIVE = (*HALF, "float32")

OLDEST_CUDNN = (9, 19)
OLDEST_CUDNN_GPU = (8, 0)
FEWEST_QUERIES = 4  # below, it is decoding: each step has a new length, for which cuDNN would build a new plan
VECTOR_HEADS = (64, 96, 128)  # what MLX's vector kernel takes of it, at the speed of memory
WIDEST_HEAD = 256
WIDEST_HEAD_BEFORE_HOPPER = 128  # and the widest for which MLX itself uses cuDNN


class AttentionCase(NamedTuple):
    """One call of ``attention``, as far as the choice depends on it."""

    batch: int
    heads: int
    kv_heads: int
    q_len: int
    k_len: int
    head_dim: int
    v_head_dim: int
    dtype: str
    mask: MaskKind
    capability: tuple[int, int]
    cudnn: tuple[int, ...]


@dataclass(frozen=True)
class Choice:
    """Who computes the call, and why it is not cuDNN (empty when it is)."""

    engine: EngineName
    reason: str = ""


@lru_cache(1024)
def choose_attention(case: AttentionCase) -> Choice:
    """The first rule that speaks against cuDNN's fused kernel decides."""
    widest = WIDEST_HEAD if case.capability >= (9, 0) else WIDEST_HEAD_BEFORE_HOPPER
    sm = "sm_" + "".join(map(str, case.capability))
    decoding = case.q_len < FEWEST_QUERIES
    rules: tuple[tuple[bool, str], ...] = (
        (0 in (case.batch, case.heads, case.q_len, case.k_len, case.head_dim, case.v_head_dim), "a dimension is 0"),
        (case.dtype not in HALF, f"cuDNN computes float16 and bfloat16, not {case.dtype}"),
        (case.mask == "array", "cuDNN is given no array masks"),
        (case.mask == "causal" and case.q_len > case.k_len, "the first queries see no key"),
        (decoding and case.head_dim in VECTOR_HEADS, f"MLX's vector kernel takes fewer than {FEWEST_QUERIES} queries"),
        (decoding and case.head_dim > WIDEST_HEAD_BEFORE_HOPPER, f"a plan for fewer than {FEWEST_QUERIES} queries does not pay"),
        (case.head_dim != case.v_head_dim, f"head_dim {case.head_dim} of q and k differs from {case.v_head_dim} of v"),
        (case.head_dim % 8 != 0, f"head_dim {case.head_dim} is no multiple of 8"),
        (case.head_dim > widest, f"head_dim {case.head_dim} is over {widest}, the widest on {sm}"),
        (case.capability < OLDEST_CUDNN_GPU, f"cuDNN's fused attention needs sm_80 or newer, not {sm}"),
        (case.cudnn < OLDEST_CUDNN, f"cuDNN {'.'.join(map(str, case.cudnn))} is older than {'.'.join(map(str, OLDEST_CUDNN))}"),
    )
    return next((Choice("upstream", reason) for applies, reason in rules if applies), Choice("cudnn"))


def native_elementwise(dtype: str, sizes: tuple[int, ...]) -> bool:
    """Whether the native kernels take this dtype and these sizes."""
    return dtype in NATIVE and 0 not in sizes
