"""The arrays and dispatch rules that all forms of linear attention share."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import mlx.core as mx

from .._common.arrays import CACHED_SHAPES, check_array, dtype_text, shape_text
from .._common.choice import NATIVE, OLDEST_GPU, SMALL_SHARED_MEMORY, Choice, dtype_name, first_reason, sm
from .._common.errors import WrongValue
from .._loader import native

LARGEST_KEY = 256  # and its sizes are multiples of 8, so that rows are aligned to 16 bytes
CHUNKED_KEY = 128  # the largest that the kernels for chunks take
FEWEST_CHUNKED = 65  # tokens: more than one chunk
MOST_FEW = 4  # tokens, which need no shared memory


class Call(NamedTuple):
    """The arrays of a call, as kernels and MLX expect them."""

    q: mx.array
    k: mx.array
    v: mx.array
    g: mx.array
    beta: mx.array
    state: mx.array | None
    mask: mx.array | None
    offsets: mx.array | None

    @property
    def sequences(self) -> int:
        return self.v.shape[0] if self.offsets is None else self.offsets.size - 1

    def arrays(self) -> list[mx.array]:
        """Return the arrays that are not None; masks and offsets have no gradients."""
        return [each for each in self if each is not None]

    def with_arrays(self, arrays: Sequence[mx.array]) -> Call:
        """Return the call with other arrays."""
        rest = iter(arrays)
        return Call(*(None if each is None else next(rest) for each in self))  # type: ignore[arg-type]


@lru_cache(CACHED_SHAPES)
def floating(operation: str, *dtypes: mx.Dtype) -> mx.Dtype:
    """Return the dtype to compute in."""
    dtype = mx.result_type(*dtypes)
    if mx.issubdtype(dtype, mx.complexfloating):
        raise WrongValue(f"[{operation}] Only real types are supported, got {dtype_text(*dtypes)}.")
    return dtype if mx.issubdtype(dtype, mx.floating) else mx.float32


def prepared(operation: str, call: Call, dtype: mx.Dtype) -> Call:
    """Check the other shapes, and return a call with q, k and v in this dtype."""
    q, k, v, g, beta, state, mask, _ = call
    if state is not None:
        state = check_array(operation, "state", state, (call.sequences, *v.shape[2:], k.shape[3]), mx.float32)
    if mask is not None:
        if mask.shape != v.shape[:2]:
            raise WrongValue(f"[{operation}] mask must have the shape {shape_text(v.shape[:2])}, got {shape_text(mask.shape)}.")
        mask = mask.astype(mx.bool_)
    q, k, v = (each.astype(dtype) for each in (q, k, v))
    g, beta = (each.astype(floating(operation, each.dtype)) for each in (g, beta))
    return Call(q, k, v, g, beta, state, mask, call.offsets)


class LinearCase(NamedTuple):
    """The properties of a call that determine its engine."""

    tokens: int
    key: int
    value: int
    dtypes: tuple[str, str, str]  # of v, g and beta
    channels: bool  # each has a decay of its own
    packed: bool
    empty: bool
    capability: tuple[int, int]


def choose(call: Call, stream: mx.Stream) -> Choice:
    """Return the engine of a call."""
    engine = native.engine(stream)
    if isinstance(engine, str):
        return Choice("mlx", engine)
    k, v = call.k.shape, call.v.shape
    dtypes = dtype_name(call.v.dtype), dtype_name(call.g.dtype), dtype_name(call.beta.dtype)
    empty = 0 in v or 0 in k or call.sequences == 0
    return choose_linear(LinearCase(v[1], k[3], v[3], dtypes, call.g.ndim == 4, call.offsets is not None, empty, engine.capability))


@lru_cache(1024)
def choose_linear(case: LinearCase) -> Choice:
    """Choose the chunked kernels, else the recurrent ones, else MLX."""
    against = first_reason((
        (case.capability < OLDEST_GPU, f"mlx-cuda's kernels run on {sm(OLDEST_GPU)} and newer"),
        (case.empty, "there is nothing to compute"),
        (not {*case.dtypes} <= {*NATIVE}, f"mlx-cuda's kernel supports {', '.join(NATIVE)}"),
        (case.key % 8 != 0 or case.key > LARGEST_KEY, f"mlx-cuda's kernel supports keys of a multiple of 8 elements, up to {LARGEST_KEY}"),
        (
            case.channels and case.key > CHUNKED_KEY and case.tokens > MOST_FEW and case.capability in SMALL_SHARED_MEMORY,
            f"{sm(case.capability)} has too little memory for decays of channels and keys of {case.key} elements",
        ),
    ))  # fmt: skip
    if against:
        return Choice("mlx", against)
    token_by_token = first_reason((
        (case.dtypes[0] == "float32", "in float32"),
        (case.channels, "each channel has a decay of its own"),
        (case.packed, "the sequences are packed"),
        (case.key > CHUNKED_KEY, f"chunks have keys of {CHUNKED_KEY} elements at most"),
        (case.value % 8 != 0, "chunks have values of a multiple of 8 elements"),
        (case.tokens < FEWEST_CHUNKED, f"there are fewer than {FEWEST_CHUNKED} tokens"),
    ))  # fmt: skip
    if token_by_token:
        return Choice("recurrent", f"token by token: {token_by_token}")
    return Choice("chunked", "chunks of tokens on tensor cores")
