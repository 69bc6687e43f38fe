"""The rules that choose who computes an operation, as pure functions of its shapes, dtype and GPU."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

EngineName = Literal["decode", "cudnn", "upstream", "composed"]
MaskKind = Literal["none", "causal", "array"]

HALF = ("float16", "bfloat16")
NATIVE = (*HALF, "float32")

OLDEST_CUDNN = (9, 19)
OLDEST_GPU = (8, 0)  # of cuDNN's fused attention, and of the decode kernel's tensor core instruction
WIDEST_HEAD = 256
WIDEST_HEAD_BEFORE_HOPPER = 128  # of cuDNN
FEWEST_QUERIES = 4  # below, it is decoding: each step has a new length, for which cuDNN would build a new plan
MOST_QUERIES = 32  # of one call of the decode kernel
MOST_BLOCKS = 65535
MOST_ROWS = {64: 128, 128: 128, 256: 64}  # queries of the heads that share a kv head, by the head_dims compiled
VECTOR_HEADS = (64, 96, 128)  # what MLX's vector kernel takes, with fewer than 4 queries
SHORT_CACHE = 256  # keys below which that is as fast, where there are few heads in all
FEW_HEADS = 8
ROWS_BEFORE_CUDNN = 64  # above, where cuDNN takes the case as well, it is faster


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
    window: bool = False
    softcap: bool = False
    sinks: bool = False
    ragged: bool = False  # lengths or left padding

    @property
    def options(self) -> tuple[str, ...]:
        """What the call asks for besides causal attention."""
        given = {"window_size": self.window, "softcap": self.softcap, "sinks": self.sinks, "lengths or left_padding": self.ragged}
        return tuple(name for name, wanted in given.items() if wanted)

    @property
    def rows(self) -> int:
        """Queries that share one read of the keys."""
        return self.q_len * self.heads // max(self.kv_heads, 1)


@dataclass(frozen=True)
class Choice:
    """Who computes the call, and why no fused kernel of ours does (empty when one does)."""

    engine: EngineName
    reason: str = ""


@lru_cache(1024)
def choose_attention(case: AttentionCase) -> Choice:
    """The decode kernel for few queries, else cuDNN, else MLX's own or what is composed of its operations."""
    cudnn, decode = _against_cudnn(case), _against_decode(case)
    if _short(case):
        return Choice("upstream", f"MLX's vector kernel is as fast with fewer than {SHORT_CACHE} keys")
    if not decode and (cudnn or case.q_len < FEWEST_QUERIES or case.rows <= ROWS_BEFORE_CUDNN):
        return Choice("decode")
    if not cudnn:
        return Choice("cudnn")
    return Choice("composed" if case.options else "upstream", f"{cudnn}; {decode}")


def _short(case: AttentionCase) -> bool:
    plain = case.mask != "array" and not case.options and case.head_dim == case.v_head_dim and case.head_dim in VECTOR_HEADS
    few = case.q_len < FEWEST_QUERIES and case.k_len < SHORT_CACHE and case.batch * case.kv_heads <= FEW_HEADS
    return plain and few and case.q_len <= case.k_len


def _first(rules: tuple[tuple[bool, str], ...]) -> str:
    return next((reason for applies, reason in rules if applies), "")


def _against_cudnn(case: AttentionCase) -> str:
    """The first rule that speaks against cuDNN's fused kernel."""
    widest = WIDEST_HEAD if case.capability >= (9, 0) else WIDEST_HEAD_BEFORE_HOPPER
    sm = "sm_" + "".join(map(str, case.capability))
    return _first((
        (0 in (case.batch, case.heads, case.q_len, case.k_len, case.head_dim, case.v_head_dim), "a dimension is 0"),
        (case.dtype not in HALF, f"cuDNN computes float16 and bfloat16, not {case.dtype}"),
        (case.mask == "array", "cuDNN is given no array masks"),
        (bool(case.options), f"cuDNN is not given {', '.join(case.options)}"),
        (case.mask == "causal" and case.q_len > case.k_len, "the first queries see no key"),
        (case.q_len < FEWEST_QUERIES, f"a plan for fewer than {FEWEST_QUERIES} queries does not pay"),
        (case.head_dim != case.v_head_dim, f"head_dim {case.head_dim} of q and k differs from {case.v_head_dim} of v"),
        (case.head_dim % 8 != 0, f"head_dim {case.head_dim} is no multiple of 8"),
        (case.head_dim > widest, f"head_dim {case.head_dim} is over {widest}, the widest on {sm}"),
        (case.capability < OLDEST_GPU, f"cuDNN's fused attention needs sm_80 or newer, not {sm}"),
        (case.cudnn < OLDEST_CUDNN, f"cuDNN {'.'.join(map(str, case.cudnn))} is older than {'.'.join(map(str, OLDEST_CUDNN))}"),
    ))  # fmt: skip


def _against_decode(case: AttentionCase) -> str:
    """The first rule that speaks against the decode kernel."""
    rows = next((most for widest, most in MOST_ROWS.items() if case.head_dim <= widest), 0)
    return _first((
        (0 in (case.batch, case.heads, case.q_len, case.k_len, case.head_dim, case.v_head_dim), "a dimension is 0"),
        (case.dtype not in HALF, f"the decode kernel computes float16 and bfloat16, not {case.dtype}"),
        (case.capability < OLDEST_GPU, "the decode kernel needs sm_80 or newer"),
        (case.head_dim != case.v_head_dim, "the decode kernel needs one head_dim"),
        (case.head_dim % 8 != 0 or not rows, f"the decode kernel takes multiples of 8 up to {max(MOST_ROWS)} as head_dim"),
        (max(case.batch, case.kv_heads) > MOST_BLOCKS, f"the decode kernel's grid has at most {MOST_BLOCKS} blocks in two dimensions"),
        (case.q_len > MOST_QUERIES, f"the decode kernel takes up to {MOST_QUERIES} queries"),
        (case.rows > rows, f"{case.rows} queries share each key, more than the decode kernel's {rows}"),
    ))  # fmt: skip


def native_elementwise(dtype: str, sizes: tuple[int, ...]) -> bool:
    """Whether the native kernels take this dtype and these sizes."""
    return dtype in NATIVE and 0 not in sizes
