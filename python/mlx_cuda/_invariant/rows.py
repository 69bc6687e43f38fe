"""Matmuls in calls of a fixed number of tokens."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx

ROWS = 64  # of each matmul with one matrix: more read the weights more rarely, fewer compute less for nothing where one token is decoded
PAIRS = 64  # of a row and its expert, of each matmul with several


def in_fixed_rows(x: mx.array, multiply: Callable[[mx.array], mx.array]) -> mx.array:
    """Apply ``multiply`` to all tokens ``[M, K]``, in calls of exactly ROWS.

    Its argument is always a copy: kernels use wider loads if an array happens to have a larger alignment.
    """
    count, width = x.shape
    missing = -count % ROWS
    x = mx.concatenate([x, mx.zeros((missing, width), x.dtype)] if missing else [x[:1], x[1:]])
    return _joined([multiply(part) for part in _parts(x, ROWS)], count)


def in_fixed_pairs(x: mx.array, experts: mx.array, multiply: Callable[[mx.array, mx.array], mx.array]) -> mx.array:
    """Apply ``multiply`` to tokens ``[P, K]``, which are a copy, and the matrix of each, in calls of exactly PAIRS.

    The padding of the last call names the expert of the last token, whose weights are read anyway.
    """
    count, width = x.shape
    missing = -count % PAIRS
    if missing:
        x = mx.concatenate([x, mx.zeros((missing, width), x.dtype)])
        experts = mx.concatenate([experts, mx.broadcast_to(experts[-1:], (missing,))])
    parts = zip(_parts(x[:, None], PAIRS), _parts(experts, PAIRS), strict=True)
    return _joined([multiply(*part) for part in parts], count)


def _parts(x: mx.array, size: int) -> list[mx.array]:
    return [x] if x.shape[0] == size else list(mx.split(x, x.shape[0] // size))


def _joined(results: list[mx.array], count: int) -> mx.array:
    joined = results[0] if len(results) == 1 else mx.concatenate(results)
    return joined if joined.shape[0] == count else joined[:count]
