"""Rows in calls of one size."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx

ROWS = 64  # of each matmul with one matrix: more read the weights more rarely, fewer compute less for nothing where one token is decoded
PAIRS = 64  # of a row and its expert, of each matmul with several


def in_fixed_rows(x: mx.array, product: Callable[[mx.array], mx.array]) -> mx.array:
    """``product`` of all rows of ``[M, K]``, by calls of exactly ROWS.

    What it is given is always a copy: kernels read wider where an array happens to begin at a multiple of more bytes.
    """
    count, width = x.shape
    missing = -count % ROWS
    x = mx.concatenate([x, mx.zeros((missing, width), x.dtype)] if missing else [x[:1], x[1:]])
    return _joined([product(part) for part in _parts(x, ROWS)], count)


def in_fixed_pairs(x: mx.array, experts: mx.array, product: Callable[[mx.array, mx.array], mx.array]) -> mx.array:
    """``product`` of rows ``[P, K]``, which are a copy, and of the matrix that each is multiplied by, in calls of exactly PAIRS.

    Those that fill the last call up name the expert of the last row, which is read anyway.
    """
    count, width = x.shape
    missing = -count % PAIRS
    if missing:
        x = mx.concatenate([x, mx.zeros((missing, width), x.dtype)])
        experts = mx.concatenate([experts, mx.broadcast_to(experts[-1:], (missing,))])
    parts = zip(_parts(x[:, None], PAIRS), _parts(experts, PAIRS), strict=True)
    return _joined([product(*part) for part in parts], count)


def _parts(x: mx.array, size: int) -> list[mx.array]:
    return [x] if x.shape[0] == size else list(mx.split(x, x.shape[0] // size))


def _joined(results: list[mx.array], count: int) -> mx.array:
    joined = results[0] if len(results) == 1 else mx.concatenate(results)
    return joined if joined.shape[0] == count else joined[:count]
