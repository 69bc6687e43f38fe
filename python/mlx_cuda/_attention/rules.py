"""Dispatch rules of attention: pure functions of shapes, dtype and GPU."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Literal, NamedTuple

from .._common.choice import HALF, NATIVE, OLDEST_GPU, SMALL_SHARED_MEMORY, Choice, against_native, first_reason, sm
from .._common.limits import Attention, by_limits, limits

if TYPE_CHECKING:
    from .._matmul.formats import Format

MaskKind = Literal["none", "causal", "bool", "additive"]
WindowKind = Literal["none", "left", "sides"]  # left: beside a causal mask

OLDEST_CUDNN = (9, 19)
WIDEST_HEAD = 256
WIDEST_HEAD_BEFORE_HOPPER = 128  # of cuDNN
WIDEST_HEADS = (576, 512)  # of q and v, of mlx-cuda's kernels in 16 bits
FEWEST_QUERIES = 4  # below, it is decoding: each step has a new length, for which cuDNN would build a new plan
MOST_QUERIES = 32  # of one call of the decode kernel
MOST_BLOCKS = 65535
FEWEST_FLOAT32_QUERIES = 16  # below, MLX's GEMV kernels read the keys as fast
WIDEST_GROWING = 128  # of the decode kernel for Hopper, with which the limit of growing caches was measured
WIDEST_UPSTREAM_HEAD = 128  # that MLX gives cuDNN, with an additive mask too
PAGE_TILE = 16  # keys of one step of the decode kernel


class AttentionCase(NamedTuple):
    """The properties of a call of ``attention`` that determine its engine."""

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
    window: WindowKind = "none"
    softcap: bool = False
    sinks: bool = False
    ragged: bool = False  # lengths or left padding
    lse: bool = False
    deterministic: bool = False
    tf32: bool = True  # whether float32 matmuls may run in TF32
    refusal: str = ""  # why cuDNN itself said that it has no engine

    @property
    def plain(self) -> bool:
        """Return whether MLX's API can express all options."""
        return self.window == "none" and not (self.softcap or self.sinks or self.ragged or self.lse)

    @property
    def masked(self) -> bool:
        """Return whether the mask is an array."""
        return self.mask in {"bool", "additive"}

    @property
    def rows(self) -> int:
        """Return the number of queries that share one read of the keys."""
        return self.q_len * self.heads // max(self.kv_heads, 1)

    @property
    def empty(self) -> bool:
        """Return whether there is nothing to compute."""
        return 0 in (self.batch, self.heads, self.kv_heads, self.q_len, self.k_len, self.head_dim, self.v_head_dim)

    @property
    def dims(self) -> tuple[int, int]:
        """Return the head_dim of q and k, and of v."""
        return self.head_dim, self.v_head_dim

    @property
    def wide(self) -> bool:
        """Return whether a head_dim exceeds those that all kernels support."""
        return max(self.dims) > WIDEST_HEAD


@by_limits(4096)
def choose_attention(case: AttentionCase) -> Choice:
    """Choose the decode kernel for few queries, else cuDNN, else FlashAttention, else MLX's function or the fallback.

    A cuDNN plan is for one number of keys and takes 40 ms to build, as long as hundreds of calls. More keys than queries are usually those
    of a growing cache, and mlx-cuda's kernel needs no plan.
    """
    cudnn, decode, flash = _against_cudnn(case), _against_decode(case), _against_flash(case)
    rows = case.rows if case.q_len >= FEWEST_QUERIES else 1
    if not decode and rows > _most_rows(case, cudnn=not cudnn) and not (cudnn and (flash or case.wide)):
        decode = f"{rows} queries share each key, too many to decode"
    if not decode:
        return Choice("decode", f"up to {MOST_QUERIES} queries read the keys once")
    if not cudnn and not flash and case.q_len != case.k_len and not case.deterministic and _limits(case).chunks == "flash":
        return Choice("flash", "the keys of a growing cache: cuDNN would build a plan for each length")
    if not cudnn:
        return Choice("cudnn", decode)
    if _additive_upstream(case):
        return Choice("mlx", "MLX gives cuDNN the additive mask")
    if not flash:
        return Choice("flash", f"{cudnn}; {decode}")
    return Choice("mlx" if case.plain else "fallback", f"{cudnn}; {decode}; {flash}")


def equal_choice(q_len: int, k_len: int, window_left: int | None, *, asked: bool) -> tuple[int, int]:
    """Return the fewest and the most keys, around ``k_len``, for which an otherwise equal call has the same engine and options.

    The rules only check whether there are keys, whether they are fewer than the queries, as many or more, and whether the window is
    shorter. But cuDNN may refuse any shape: if it supports the call, or would with ``deterministic``, it is queried for each number of
    keys.
    """
    if asked:
        return k_len, k_len
    bounds = (0, 1, q_len, q_len + 1, 2**31, *(() if window_left is None else (window_left + 1,)))
    return max(bound for bound in bounds if bound <= k_len), min(bound for bound in bounds if bound > k_len) - 1


@lru_cache(1024)
def choose_varlen(case: AttentionCase) -> Choice:
    """Choose the FlashAttention kernel for packed sequences; the case holds the largest lengths."""
    flash = _against_flash(case)
    return Choice("fallback", flash) if flash else Choice("flash", "the sequences are read in place")


@lru_cache(1024)
def choose_paged(case: AttentionCase, page_size: int) -> Choice:
    """Choose the decode kernel for a paged KV cache."""
    decode = _against_decode(case)
    if not decode and page_size % PAGE_TILE:
        decode = f"the decode kernel needs pages of a multiple of {PAGE_TILE} keys, not {page_size}"
    return Choice("fallback", decode) if decode else Choice("decode", "the pages are read in place")


@lru_cache(1024)
def choose_update(dtype: str, sizes: tuple[int, ...], dims: tuple[int, int]) -> Choice:
    """Choose the kernel that writes new keys and values into pages."""
    odd = next((dim for dim in dims if dim % 8), None)
    against = against_native(dtype, (*sizes, *dims)) or (f"the kernel needs head_dim a multiple of 8, not {odd}" if odd else "")
    return Choice("fallback", against) if against else Choice("fused", "keys and values are written in one pass")


MOST_PACKED_ROWS = 64  # queries that share a KV head, of the kernel for quantized caches: with more it is faster to dequantize them once
PACKED_DIMS = 32  # which head_dims are a multiple of


def choose_quantized_attention(case: AttentionCase, form: Format, *, page_size: int, same_dtype: bool) -> Choice:
    """Choose the kernel that reads the quantized cache, or attention over the dequantized cache. page_size: 0 without pages."""
    odd = any(dim % PACKED_DIMS for dim in case.dims)
    against = first_reason((
        (case.empty, "a dimension is 0"),
        (case.dtype not in HALF, f"the kernel for quantized caches computes float16 and bfloat16, not {case.dtype}"),
        (case.capability < OLDEST_GPU, f"the kernel for quantized caches needs sm_80 or newer, not {sm(case.capability)}"),
        (case.rows > MOST_PACKED_ROWS, f"{case.rows} queries share each key, too many to decode"),
        (form.bits not in {4, 8}, f"the kernel for quantized caches supports 4 and 8 bits, not {form.bits}"),
        (not same_dtype, "scales and biases are of another type than the queries"),
        (form.mode != "affine" and case.dtype == "float16", f"the kernel for {form.mode} computes bfloat16"),
        (odd, f"the kernel for quantized caches needs head_dim a multiple of {PACKED_DIMS}, not {_dims(case)}"),
        (case.wide, f"the kernel for quantized caches does not support head_dim {_dims(case)}"),
        (page_size % PAGE_TILE != 0, f"the kernel for quantized caches needs pages of a multiple of {PAGE_TILE} keys, not {page_size}"),
        (max(case.batch, case.kv_heads * MOST_PACKED_ROWS) > MOST_BLOCKS, f"a grid has at most {MOST_BLOCKS} blocks in two dimensions"),
    ))  # fmt: skip
    return Choice("fallback", against) if against else Choice("decode", "the quantized cache is read directly")


def _limits(case: AttentionCase) -> Attention:
    return limits(case.capability).attention


def _most_rows(case: AttentionCase, *, cudnn: bool) -> int:
    """Return the most queries that share a KV head for the decode kernel, if another kernel supports the call too."""
    most = _limits(case)
    if not cudnn:
        return most.before_flash
    return most.growing if max(case.dims) <= WIDEST_GROWING and case.q_len < case.k_len else most.decode


def _additive_upstream(case: AttentionCase) -> bool:
    takes = case.dtype in HALF and case.capability >= OLDEST_GPU and max(case.dims) <= WIDEST_UPSTREAM_HEAD
    same = case.head_dim == case.v_head_dim and case.head_dim % 8 == 0 and not case.empty
    return case.mask == "additive" and case.plain and takes and same and _limits(case).additive == "mlx"


def _dims(case: AttentionCase) -> str:
    return str(case.head_dim) if case.head_dim == case.v_head_dim else "/".join(map(str, case.dims))


def _too_wide(case: AttentionCase) -> bool:
    return case.head_dim > WIDEST_HEADS[0] or case.v_head_dim > WIDEST_HEADS[1]


def _against_cudnn(case: AttentionCase) -> str:
    """Return the first rule that excludes cuDNN's fused kernel."""
    widest = WIDEST_HEAD if case.capability >= (9, 0) else WIDEST_HEAD_BEFORE_HOPPER
    not_given = {"a window beyond the causal one": case.window == "sides", "softcap": case.softcap, "lengths or left_padding": case.ragged}
    return first_reason((
        (case.empty, "a dimension is 0"),
        (case.dtype not in HALF, f"cuDNN computes float16 and bfloat16, not {case.dtype}"),
        (case.masked, "cuDNN is given no array masks"),
        (any(not_given.values()), f"cuDNN is not given {', '.join(name for name, wanted in not_given.items() if wanted)}"),
        (case.mask == "causal" and case.q_len > case.k_len, "the first queries see no key"),
        (case.q_len < FEWEST_QUERIES, f"a plan for fewer than {FEWEST_QUERIES} queries does not pay"),
        (any(dim % 8 for dim in case.dims), f"head_dim {_dims(case)} is not a multiple of 8"),
        (max(case.dims) > widest, f"head_dim {_dims(case)} is over {widest}, cuDNN's widest on {sm(case.capability)}"),
        (case.capability < OLDEST_GPU, f"cuDNN's fused attention needs sm_80 or newer, not {sm(case.capability)}"),
        (case.cudnn < OLDEST_CUDNN, f"cuDNN {'.'.join(map(str, case.cudnn))} is older than {'.'.join(map(str, OLDEST_CUDNN))}"),
        (bool(case.refusal), f"cuDNN does not support it: {case.refusal}"),
    ))  # fmt: skip


def _against_decode(case: AttentionCase) -> str:
    """Return the first rule that excludes the decode kernel."""
    return first_reason((
        (case.empty, "a dimension is 0"),
        (case.dtype not in HALF, f"the decode kernel computes float16 and bfloat16, not {case.dtype}"),
        (case.capability < OLDEST_GPU, f"the decode kernel needs sm_80 or newer, not {sm(case.capability)}"),
        (case.q_len > MOST_QUERIES, f"the decode kernel supports up to {MOST_QUERIES} queries"),
        (any(dim % 8 for dim in case.dims), f"the decode kernel needs head_dim a multiple of 8, not {_dims(case)}"),
        (_too_wide(case), f"the decode kernel does not support head_dim {_dims(case)}"),
        (case.wide and case.capability in SMALL_SHARED_MEMORY, f"{sm(case.capability)} has too little memory for head_dim {_dims(case)}"),
        (max(case.batch, case.kv_heads) > MOST_BLOCKS, f"the decode kernel's grid has at most {MOST_BLOCKS} blocks in two dimensions"),
    ))  # fmt: skip


def _against_flash(case: AttentionCase) -> str:
    """Return the first rule that excludes the FlashAttention kernel."""
    float32 = case.dtype == "float32"
    return first_reason((
        (case.empty, "a dimension is 0"),
        (case.dtype not in NATIVE, f"the flash kernel computes {', '.join(NATIVE)}, not {case.dtype}"),
        (float32 and not case.tf32, "MLX_ENABLE_TF32=0 requires float32 matmuls"),
        (float32 and case.q_len < FEWEST_FLOAT32_QUERIES, f"fewer than {FEWEST_FLOAT32_QUERIES} queries in float32 are MLX's"),
        (case.capability < OLDEST_GPU, f"the flash kernel needs sm_80 or newer, not {sm(case.capability)}"),
        (any(dim % 8 for dim in case.dims), f"the flash kernel needs head_dim a multiple of 8, not {_dims(case)}"),
        (_too_wide(case) or (float32 and case.wide), f"the flash kernel does not support head_dim {_dims(case)}"),
        (max(case.batch, case.heads) > MOST_BLOCKS, f"the flash kernel's grid has at most {MOST_BLOCKS} blocks in two dimensions"),
    ))  # fmt: skip
