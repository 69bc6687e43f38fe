"""What the native modules offer, as types."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ParamSpec, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeAlias

    import mlx.core as mx

    from .._common.choice import EngineName

    Array: TypeAlias = mx.array
    Stream: TypeAlias = mx.Stream

P = ParamSpec("P")


class NativeModule(Protocol):
    """What ``_cu12`` and ``_cu13`` offer. Arrays come in checked: equal dtypes, valid shapes, no size of zero."""

    def attention(
        self,
        q: mx.array,
        k: mx.array,
        v: mx.array,
        sinks: mx.array | None,
        scale: float,
        causal: bool,
        window_left: int,
        with_lse: bool,
        deterministic: bool,
        stream: mx.Stream,
    ) -> list[mx.array]:
        """cuDNN's fused attention; the causal mask is aligned to the lower right, and a window (-1: none) goes with it.

        Like all that follow, it gives the result and, with_lse, the logarithms of the sums, float32 [B, H, Tq].
        """

    def remembered(self, function: Callable[P, mx.array], /) -> Callable[P, mx.array]:
        """The function, but a call like one before is answered with the graph that it built then.

        Alike are calls whose arguments have the same places and names, shapes, dtypes and values, on the same stream. What that does not
        tell apart, arrays whose gradients may be asked for and results that are no single array go to the function each time.
        """

    def decode_attention(
        self,
        q: mx.array,
        k: mx.array,
        v: mx.array,
        mask: mx.array | None,
        starts: mx.array | None,
        ends: mx.array | None,
        sinks: mx.array | None,
        scale: float,
        softcap: float,
        window_left: int,
        window_right: int,
        with_lse: bool,
        stream: mx.Stream,
    ) -> list[mx.array]:
        """Attention of few queries, which reads keys and values once; windows of -1 see all keys, masks have the scores' shape."""

    def flash_attention(
        self,
        q: mx.array,
        k: mx.array,
        v: mx.array,
        mask: mx.array | None,
        starts: mx.array | None,
        ends: mx.array | None,
        sinks: mx.array | None,
        scale: float,
        softcap: float,
        window_left: int,
        window_right: int,
        with_lse: bool,
        stream: mx.Stream,
    ) -> list[mx.array]:
        """The same for many queries."""

    def flash_varlen(
        self,
        q: mx.array,
        k: mx.array,
        v: mx.array,
        cu_q: mx.array,
        cu_k: mx.array,
        sinks: mx.array | None,
        max_q: int,
        max_k: int,
        scale: float,
        softcap: float,
        window_left: int,
        window_right: int,
        with_lse: bool,
        stream: mx.Stream,
    ) -> list[mx.array]:
        """Sequences packed one after another, [total, H, D]; logarithms [H, total]."""

    def paged_attention(
        self,
        q: mx.array,
        k_pages: mx.array,
        v_pages: mx.array,
        block_table: mx.array,
        lengths: mx.array,
        sinks: mx.array | None,
        scale: float,
        softcap: float,
        window_left: int,
        with_lse: bool,
        stream: mx.Stream,
    ) -> list[mx.array]:
        """decode_attention with keys in pages, causal."""

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

    def remember_attention(self, engine: EngineName, fewest_keys: int, most_keys: int, *call: Any) -> None:
        """Have ``attention_again`` answer calls that equal this one but for the number of keys, which is within these bounds.

        The call is the arguments of ``attention`` as they came in, in their order, with the stream resolved. Nothing happens where Python
        changes an argument before it hands it to the engine.
        """

    def remember_paged(self, *call: Any) -> None:
        """The same for ``paged_attention``, without force_fused, which the decode kernel computes."""

    def remember_varlen(self, *call: Any) -> None:
        """The same for ``attention_varlen``, without force_fused, which the flash kernel computes."""

    def attention_again(self, *call: Any) -> Any:
        """``attention`` if an equal call was remembered, else None; a TypeError for arguments that it cannot read. Likewise the next."""

    def paged_again(self, *call: Any) -> Any: ...

    def varlen_again(self, *call: Any) -> Any: ...

    def traced(self, arrays: list[mx.array], /) -> bool: ...
    def attention_unsupported(
        self,
        q: mx.array,
        k: mx.array,
        v: mx.array,
        sinks: mx.array | None,
        scale: float,
        causal: bool,
        window_left: int,
        with_lse: bool,
        stream: mx.Stream,
    ) -> str:
        """Why cuDNN does not take this shape; empty when it does."""

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
