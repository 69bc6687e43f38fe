"""The cases that are measured, by operation."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from . import (
    attention,
    backward,
    decode,
    experts,
    extra,
    fp8,
    growing,
    linear,
    linear_attention,
    paged,
    quantized,
    quantized_cache,
    swiglu,
    varlen,
)
from .base import Case

GROUPS: dict[str, Callable[..., Sequence[Case]]] = {
    "attention": attention.cases,
    "masks": attention.mask_cases,
    "window": attention.window_cases,
    "softcap": attention.softcap_cases,
    "sinks": extra.sinks_and_lse,
    "decode": decode.cases,
    "paged": paged.cases,
    "varlen": varlen.cases,
    "backward": backward.cases,
    "mla": extra.latent,
    "float32": attention.float32_cases,
    "small": extra.small,
    "growing": growing.cases,
    "linear": linear.cases,
    "swiglu": swiglu.cases,
    "quantized": quantized.cases,
    "experts": experts.cases,
    "fp8": fp8.cases,
    "linear_attention": linear_attention.cases,
    "quantized_cache": quantized_cache.cases,
}

__all__ = ["GROUPS", "Case"]
