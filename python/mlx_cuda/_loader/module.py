"""What the native modules offer, as types."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeAlias

    import mlx.core as mx

    Array: TypeAlias = mx.array
    Stream: TypeAlias = mx.Stream

P = ParamSpec("P")
R = TypeVar("R")


class NativeModule(Protocol):
    """What ``_cu12`` and ``_cu13`` offer. Arrays come in checked: equal dtypes, valid shapes, no size of zero."""

    def cached(self, function: Callable[P, R], growing: list[tuple[int, str, int]], /) -> Callable[P, R]:
        """The function, which gives an array or a tuple of them, but a call like one before is given the graph that it built then.

        Alike are calls whose arguments have the same places and names, shapes, dtypes and values, on the same stream. Growing are an
        argument's place, its name and an axis, whose size may be any that the function has named by ``valid_for``. What that does not tell
        apart goes to the function each time; so do arrays under a transformation, unless all of the graph is primitives of the module.
        """

    def valid_for(self, fewest: int, most: int, /) -> None:
        """Say, within a cached function, for which sizes of its growing axes it would build the same graph."""

    # Attention, with the Options of _attention/options.py: the result and, if asked for, the logarithms of the sums, float32 [B, H, Tq].
    def cudnn_attention(self, q: mx.array, k: mx.array, v: mx.array, options: Any, stream: mx.Stream) -> list[mx.array]:
        """cuDNN's fused attention; a causal mask is aligned to the lower right, and a window on the left goes with it."""

    def cudnn_refusal(self, q: mx.array, k: mx.array, v: mx.array, options: Any, stream: mx.Stream) -> str:
        """Why cuDNN does not take these shapes; empty when it does."""

    def decode_attention(
        self, q: mx.array, k: mx.array, v: mx.array, options: Any, stream: mx.Stream, block_table: mx.array | None = None
    ) -> list[mx.array]:
        """Attention of few queries, which reads keys and values once; masks have the scores' shape. With a table, k and v are pages."""

    def flash_attention(self, q: mx.array, k: mx.array, v: mx.array, options: Any, stream: mx.Stream) -> list[mx.array]:
        """The same for many queries."""

    def flash_varlen(
        self,
        q: mx.array,
        k: mx.array,
        v: mx.array,
        cu_q: mx.array,
        cu_k: mx.array,
        max_q: int,
        max_k: int,
        options: Any,
        stream: mx.Stream,
    ) -> list[mx.array]:
        """Sequences packed one after another, [total, H, D]; logarithms [H, total]."""

    def paged_cache_update(
        self,
        k_pages: mx.array,
        v_pages: mx.array,
        keys: mx.array,
        values: mx.array,
        block_table: mx.array,
        lengths: mx.array,
        stream: mx.Stream,
    ) -> list[mx.array]:
        """Both pages with the last keys and values of each sequence written in."""

    def traced(self, arrays: list[mx.array], /) -> bool:
        """Whether derivatives of a function of these may be asked for, or other transformations."""

    def swiglu(self, gate: mx.array, up: mx.array, stream: mx.Stream) -> mx.array:
        """``silu(gate) * up``."""

    # Matrix products. Affine scales and biases have x's dtype; where nothing else is said, they are differentiable by themselves.
    # Long ones have a line for their arrays and a line for the rest.
    # fmt: off
    def linear(self, x: Array, w: Array, bias: Array | None, activation: str | None, stream: Stream) -> Array:
        """``activation(x @ w.T + bias)``; activation is None, "relu" or "gelu_approx"."""

    def quantized_few(
        self, x: Array, w: Array, scales: Array, biases: Array | None, lhs_indices: Array | None, rhs_indices: Array | None,
        transpose: bool, group_size: int, bits: int, mode: str, small: bool, stream: Stream,
    ) -> Array:
        """``x [..., K] @ w.T`` with w in 2 dimensions; or, with rhs_indices (uint32 ``[pairs]``), the matrices ``x[lhs[p]] @ w[rhs[p]].T``
        of x ``[batches, M, K]`` and w ``[E, …]``, as ``[pairs, M, N]``; without lhs_indices then ``x[p]``. ``small``: by MLX's kernel,
        where that takes the layouts; there are no indices.
        """

    def quantized_many(
        self, x: Array, w: Array, scales: Array, biases: Array | None,
        transpose: bool, group_size: int, bits: int, mode: str, stream: Stream,
    ) -> Array:
        """``x [..., K] @ w.T`` with w in 2 dimensions, dequantised in tiles; its derivatives are composed in Python."""

    def expert_offsets(self, sorted_indices: Array, experts: int, stream: Stream) -> Array:
        """Where each expert's rows begin, int32 ``[experts + 1]``, from rising uint32 ``[rows]``."""

    def grouped_matmul(self, x: Array, w: Array, offsets: Array, transpose: bool, stream: Stream) -> Array:
        """x ``[M, K]`` in groups by w ``[E, N, K]``, or ``[E, K, N]`` without transpose; zeros beyond the last group.

        A w whose last two dimensions are swapped in memory is read where it lies, and offsets that do not rise are empty groups.
        """

    def grouped_quantized(
        self, x: Array, w: Array, scales: Array, biases: Array | None, offsets: Array,
        transpose: bool, group_size: int, bits: int, mode: str, stream: Stream,
    ) -> Array:
        """grouped_matmul with quantised w; its derivatives are composed in Python."""

    def gather_mm(
        self, x: Array, w: Array, lhs_indices: Array | None, rhs_indices: Array,
        transpose: bool, sorted_indices: bool, stream: Stream,
    ) -> Array:
        """The matrices ``x[lhs[p]] @ w[rhs[p]].T`` of x ``[batches, M, K]`` and w ``[E, …]`` for uint32 ``[pairs]``, as ``[pairs, M, N]``.

        Without lhs_indices, each matrix of x in turn has ``pairs / batches`` of them. sorted_indices: rhs_indices rise.
        """

    def fp8_matmul(
        self, a: Array, b: Array, scale_a: Array | None, scale_b: Array | None, bias: Array | None,
        out_dtype: mx.Dtype, stream: Stream,
    ) -> Array:
        """e4m3 a ``[..., M, K]`` by b ``[N, K]``; scales are float32, of one element or as quantize_fp8 gives them for a and for b."""

    # fmt: on
    def quantize_fp8(self, x: Array, how: str, stream: Stream) -> tuple[Array, Array]:
        """Values and scales; how is "tensor", "row", "block128" or "block128x128"."""

    def build_info(self) -> dict[str, Any]:
        """What the module was built with: cuda, mlx, cudnn_headers, and the digest of its device_code."""

    def add_device_code(self, source: str, fatbin: bytes) -> None:
        """Hand over the fatbin of a source."""

    def tuning(self, enabled: bool) -> None:
        """Whether new products are timed."""

    def tuned(self) -> list[tuple[str, str, float, float]]:
        """What is known: a product's name, its algorithm, and the microseconds of that and of the heuristic's choice."""

    def set_tuned(self, tuned: list[tuple[str, str, float, float]]) -> None:
        """Know these instead."""

    def library_versions(self) -> dict[str, Any]:
        """The libraries in use, as dotted versions: cudnn, cublaslt, driver."""
