"""Replacements of mlx-lm's functions, of other packages' functions of the same names, and of MLX's functions that they hold."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

import mlx.core as mx

from .._loader.replacing import put_in
from .._mlx_lm.copies import known_as, modules_of
from .masks import remembering
from .refused import STATES
from .state import NotInvariant, refusing

ROTATED = "keeps keys in another order than that of the sequence, and drops some: models with sliding windows cannot have it."
QUANTIZED = "has keys and values whose matmuls have a batch of right operands: use KVCache, without kv_bits."
FUNCTIONS = {
    "gated_delta_ops": STATES,
    "gated_delta_kernel": STATES,
    "gated_delta_update": STATES,
    "ssm_attn": STATES,
    "ssm_update": STATES,
    "ssm_update_kernel": STATES,
    "quantized_scaled_dot_product_attention": QUANTIZED,
}
CACHES = {  # by a method that every use of them calls
    "RotatingKVCache": ("update_and_fetch", ROTATED),
    "BatchRotatingKVCache": ("update_and_fetch", ROTATED),
    "ChunkedKVCache": ("update_and_fetch", ROTATED),
    "SlidingWindowCache": ("update_and_fetch", ROTATED),  # mlx-vlm's
    "QuantizedKVCache": ("update_and_fetch", QUANTIZED),
    "BatchQuantizedKVCache": ("update_and_fetch", QUANTIZED),
    "ArraysCache": ("__setitem__", STATES),
    "MambaCache": ("__setitem__", STATES),
}
MASKS = "create_causal_mask"
DYNAMIC = "DynamicNTKScalingRoPE"
NAMES = {MASKS, DYNAMIC, *FUNCTIONS, *CACHES}
# By the names of MLX's functions: each, and what takes its place, also where a module has imported it by its name.
held: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {}
NOT_THEIRS = ("mlx", "mlx_cuda")  # packages
_replaced: list[tuple[Any, str, Any]] = []  # the owner, the name there, and what was there


def within_the_window(call: Callable[..., mx.array]) -> Callable[..., mx.array]:
    """RoPE whose base grows with how far a call reaches, as long as it does not."""

    @wraps(call)
    def checked(self: Any, x: mx.array, offset: int | mx.array = 0) -> mx.array:
        furthest: Any = offset.max().item() if isinstance(offset, mx.array) else offset
        if furthest + max(x.shape[1:-1]) > self.max_position_embeddings:  # InternLM 3 counts heads instead of tokens
            raise NotInvariant(
                f"{DYNAMIC} turns tokens beyond max_position_embeddings ({self.max_position_embeddings}) by how many a call has: "
                "keep sequences shorter."
            )
        return call(self, x, offset)

    return checked


def put() -> None:
    """Replace what has been imported by now."""
    for module, variables in modules_of(""):
        if module.partition(".")[0] not in NOT_THEIRS:
            for name in NAMES & variables.keys():
                _put_one(variables, name, variables[name])
            for name in held.keys() & variables.keys():
                upstream, ours = held[name]
                if variables[name] is upstream:
                    _replace(variables, name, upstream, ours)


def take_away() -> None:
    """Bring their own back."""
    while _replaced:
        put_in(*_replaced.pop())


def originals() -> Iterator[tuple[Any, str, Any]]:
    """Return what is replaced."""
    yield from _replaced


def _put_one(variables: dict[str, Any], name: str, theirs: Any) -> None:
    if isinstance(theirs, type):
        method, why = CACHES.get(name, ("__call__" if name == DYNAMIC else "", ""))
        own = vars(theirs).get(method)
        if own is not None and not hasattr(own, "unpatched"):
            _replace(theirs, method, own, within_the_window(own) if name == DYNAMIC else refusing(own, f"{name} {why}"))
    elif callable(theirs) and not hasattr(theirs, "unpatched"):
        if name in FUNCTIONS:
            _replace(variables, name, theirs, refusing(theirs, f"{theirs.__module__}.{name} {FUNCTIONS[name]}"))
        elif name == MASKS and known_as(theirs) == MASKS:  # others leave attention with a mask that it does not know
            _replace(variables, name, theirs, remembering(theirs))


def _replace(owner: Any, name: str, theirs: Any, ours: Any) -> None:
    vars(ours)["unpatched"] = theirs
    _replaced.append((owner, name, theirs))
    put_in(owner, name, ours)
