"""Gradients of linear attention with one decay for each head, written out by chunks of 64 tokens.

In a chunk, with T the logarithm of the decay from its beginning to each token, e = exp(T), f the decay from each token to its end, and D
the decay from one token to a later one::

    U = M diag(beta) (V - diag(e) K S^T),  M = (I + tril(diag(beta) D K K^T, -1))^-1      (without the delta rule U = diag(beta) V)
    Y = tril(D Q K^T) U + diag(e) Q S^T,   S' = e[end] S + U^T diag(f) K

Only the state S goes from chunk to chunk, and back its gradient R: `Scan` is what is known after both. All the rest is matmuls of all
chunks at once: with X = M^T dU, the gradient of M's right operand, that of M's inverse is -X U^T, and that of K S^T is
-diag(beta e) X.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import mlx.core as mx

from .composed import LEAST_DECAY, TOKENS, log_decay
from .rules import Call

MEMORY = 1 << 30  # bytes that a call's chunks take at most at once, if a head of the keys and those that share it take no more
CHUNK = 177 << 10  # bytes of one, of a head of the values and 128 of its elements


class Chunks(NamedTuple):
    """A call split into chunks, the last of which is padded: ``[B, Hv, chunks, tokens of a chunk, ...]``."""

    q: mx.array
    k: mx.array
    v: mx.array
    dy: mx.array
    beta: mx.array  # float32 [..., tokens]
    total: mx.array  # float32 [..., tokens]: T

    @property
    def until(self) -> mx.array:
        return mx.exp(self.total)[..., None]

    @property
    def onwards(self) -> mx.array:
        return mx.exp(self.total[..., -1:] - self.total)[..., None]

    @property
    def between(self) -> mx.array:
        """Return the decay from each token (column) to each later one (row)."""
        lower = mx.tri(self.total.shape[-1], dtype=mx.bool_)
        return mx.exp(mx.where(lower, self.total[..., None] - self.total[..., None, :], -mx.inf))


class Scan(NamedTuple):
    """The states and gradients between chunks: ``[B, Hv, chunks, ...]`` in the dtype of the values."""

    states: mx.array  # S^T, [key, value]: as a chunk finds it
    changes: mx.array  # U
    gradients: mx.array  # R^T: of what a chunk leaves
    change_gradients: mx.array  # dU
    first: mx.array  # float32 [B, Hv, Dv, Dk]: the gradient of the initial state
    solve: mx.array | None = None  # M^T


def gradients(call: Call, cotangents: Sequence[mx.array], module: Any, stream: mx.Stream, *, delta: bool) -> list[mx.array] | None:
    """Return the gradients of all arrays of a `chunked` call, by kernels; the last one has a fallback for GPUs with less shared memory.

    None without the kernels before that.
    """
    with mx.stream(stream):
        dy, last = cotangents[0].astype(call.v.dtype), cotangents[1].astype(mx.float32)
        batch, tokens, heads, shared = *call.v.shape[:2], call.k.shape[2], call.v.shape[2] // call.k.shape[2]
        most = max(MEMORY // (CHUNK * -(-call.v.shape[3] // 128) * -(-tokens // TOKENS) * batch * shared), 1)
        groups: list[list[mx.array]] = []
        for first in range(0, heads, most):
            of_keys, of_values = slice(first, first + most), slice(first * shared, (first + most) * shared)
            q, k, v, g, beta = (each[:, :, own] for each, own in zip(call[:5], (of_keys, of_keys, *[of_values] * 3), strict=True))
            state, own_dy = None if call.state is None else call.state[:, of_values], dy[:, :, of_values]
            if groups:  # one after the other, so that they take each other's memory
                own_dy = mx.where(mx.isnan(groups[-1][4][:1, :1, :1, None]), own_dy, own_dy)
            of_group = _of_heads(
                call._replace(q=q, k=k, v=v, g=g, beta=beta, state=state), own_dy, last[:, of_values], module, stream, delta
            )
            if of_group is None:
                return None
            groups.append(of_group)
        joined = [mx.concatenate(list(each), axis=1 if i == 5 else 2) for i, each in enumerate(zip(*groups, strict=True))]
        return [*joined, *([] if call.mask is None else [mx.zeros_like(call.mask)])]


def _of_heads(call: Call, dy: mx.array, last: mx.array, module: Any, stream: mx.Stream, delta: bool) -> list[mx.array] | None:
    """Return the gradients of q, k, v, g, beta and the state, if there is one."""
    found = module.linear_attention_scan(*call, dy, last, delta, stream)
    if found is None:
        return None
    own = module.linear_attention_gradients(*call, dy, found, stream)
    if own is None:
        wide = Chunks(*(each.astype(mx.float32) for each in by_chunks(call, dy)))
        gradients = rest(call, wide, Scan(*(each.astype(mx.float32) for each in found)))
    else:
        q, k, v, g, beta = own
        gradients = [q, k, v, g.astype(call.g.dtype), beta.astype(call.beta.dtype)]
    return gradients if call.state is None else [*gradients, found[4]]


def by_chunks(call: Call, dy: mx.array) -> Chunks:
    """Transpose to heads before tokens; masked tokens are zeros without decay."""
    heads, missing = call.v.shape[2], -call.v.shape[1] % TOKENS
    seen = None if call.mask is None else call.mask[:, :, None]

    def chunks(array: mx.array, nothing: float = 0) -> mx.array:
        if seen is not None:
            array = mx.where(seen.reshape(*seen.shape, *[1] * (array.ndim - 3)), array, mx.array(nothing, array.dtype))
        if missing:
            array = mx.pad(array, [(0, missing) if axis == 1 else (0, 0) for axis in range(array.ndim)], constant_values=nothing)
        if array.shape[2] != heads:
            array = mx.repeat(array, heads // array.shape[2], axis=2)
        return mx.contiguous(array.reshape(array.shape[0], -1, TOKENS, *array.shape[2:]).moveaxis(3, 1))

    logs = log_decay(chunks(call.g.astype(mx.float32), 1))
    q, k, v, dy, beta = map(chunks, (call.q, call.k, call.v, dy, call.beta.astype(mx.float32)))
    return Chunks(q, k, v, dy, beta, mx.cumsum(logs, axis=3))


def rest(call: Call, parts: Chunks, found: Scan) -> list[mx.array]:
    """Return the gradients of q, k, v, g and beta: matmuls of all chunks at once."""
    q, k, v, dy, beta, _ = parts
    dtype, until, onwards, between, beta = v.dtype, parts.until, parts.onwards, parts.between, beta[..., None]
    target = found.change_gradients if found.solve is None else found.solve @ found.change_gradients  # X
    right, seen_states = found.changes.swapaxes(3, 4), found.states.swapaxes(3, 4)
    scores = (between * (dy @ right)).astype(dtype)
    q_gradient = until * (dy @ seen_states) + scores @ k
    kept = onwards * (found.changes @ found.gradients.swapaxes(3, 4))  # of k, by the state that a chunk leaves
    earlier = scores.swapaxes(3, 4) @ q + kept  # of k as what later tokens meet
    corrected = mx.zeros_like(q_gradient)  # by beta: of k as what corrects
    scaled = (beta * k).astype(call.k.dtype).astype(dtype)  # the same in both sums below, whose terms cancel
    if found.solve is not None:
        system = -mx.tril(between * (target @ right), -1)
        corrected = system.astype(dtype) @ k - until * (target @ seen_states)
        earlier = earlier + system.astype(dtype).swapaxes(3, 4) @ scaled
    decay = _sum(q_gradient * q) - _sum(earlier * k) + _sum(corrected * scaled)  # the gradient of T
    whole = _sum(kept * k).sum(axis=3) + until[..., -1, 0] * _sum(_sum(found.states.astype(mx.float32) * found.gradients))
    g_gradient = mx.cumsum(decay, axis=3, reverse=True) + whole[..., None]
    beta_gradient = _sum(target * v.astype(mx.float32)) + _sum(corrected * k)
    return _as_given(call, [q_gradient, earlier + beta * corrected, beta * target, g_gradient, beta_gradient])


def _as_given(call: Call, gradients: list[mx.array]) -> list[mx.array]:
    """Transpose to tokens before heads, summed over heads that share a query and a key, and convert the gradient of log(g) to that of g."""
    length = call.v.shape[1]
    q, k, v, g, beta = (each.flatten(2, 3)[:, :, :length].swapaxes(1, 2) for each in gradients)
    q, k = (each.reshape(*call.q.shape[:3], -1, call.q.shape[3]).sum(axis=3) for each in (q, k))
    decay = call.g.astype(mx.float32)
    counts = mx.logical_not(decay <= LEAST_DECAY)  # NaN does
    counts = counts if call.mask is None else mx.logical_and(counts, call.mask[:, :, None])
    g = mx.where(counts, g / mx.maximum(decay, LEAST_DECAY), 0)
    return [gradient.astype(each.dtype) for gradient, each in zip((q, k, v, g, beta), call[:5], strict=True)]


def _sum(array: mx.array) -> mx.array:
    """Sum over the last axis, in float32."""
    return array.astype(mx.float32).sum(axis=-1)
