"""Cases that several kinds of call share: what sinks and log-sum-exps cost, latent attention, and very small calls."""

from __future__ import annotations

from .attention import TINY as TINY_ATTENTION
from .attention import AttentionCase
from .base import Case
from .decode import TINY as TINY_DECODE
from .decode import DecodeCase


def sinks_and_lse(*, quick: bool) -> list[Case]:
    if quick:
        return [
            TINY_ATTENTION(64, "causal", 96, sinks=True),
            TINY_ATTENTION(64, "causal", 96, lse=True),
            TINY_DECODE(sinks=True),
            TINY_DECODE(lse=True),
        ]
    return [
        AttentionCase(128, "causal", 8192, sinks=True),
        AttentionCase(128, "causal", 8192, lse=True),
        AttentionCase(64, "causal", 8192, window=128, kv_heads=4, sinks=True),
        DecodeCase(8, 8192, sinks=True),
        DecodeCase(8, 8192, lse=True),
    ]


def latent(*, quick: bool) -> list[Case]:
    """Multi-head latent attention ("DeepSeek-V2", arXiv:2405.04434), and heads of 512."""
    if quick:
        return [TINY_DECODE(head_dim=72, latent=64, kv_heads=1), TINY_ATTENTION(48, "causal", 96, v_head_dim=32)]
    return [
        *(DecodeCase(batch, 8192, head_dim=576, latent=512, heads=heads, kv_heads=1) for batch, heads in ((8, 16), (8, 128), (64, 16))),
        DecodeCase(8, 8192, head_dim=512, heads=16),
        AttentionCase(192, "causal", 4096, v_head_dim=128),
        AttentionCase(512, "causal", 4096),
    ]


def small(*, quick: bool) -> list[Case]:
    """So small that launching is most of the time."""
    if quick:
        return [TINY_DECODE()]
    return [
        *(DecodeCase(1, length) for length in (128, 256, 512)),
        *(AttentionCase(head_dim, "causal", 128, batch=1, heads=8, kv_heads=8) for head_dim in (64, 128)),
        AttentionCase(128, None, 16, batch=1, heads=8, kv_heads=8),
    ]
