"""What MLX's own gather_mm and gather_qmm are given where they are called: the layouts, and as much at a time as they take."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx_cuda
import numpy as np
import pytest
from mlx_cuda._common.choice import Choice
from mlx_cuda._loader import native
from mlx_cuda._matmul import gather, upstream

from .matmuls import Matmuls
from .references import host, random

pytestmark = pytest.mark.usefixtures("on_the_cpu")

OURS: Any = mlx_cuda


class Calls:
    """MLX's function, and how often it was called with what."""

    def __init__(self, function: Any) -> None:
        self.function = function
        self.seen: list[tuple[Any, ...]] = []

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        shapes = [each.shape if isinstance(each, mx.array) else each for each in arguments]
        self.seen.append((*shapes, options["sorted_indices"]))
        return self.function(*arguments, **options)


@pytest.fixture
def operands(matmuls: Matmuls, monkeypatch: pytest.MonkeyPatch) -> list[tuple[tuple[int, ...], bool]]:
    """What is brought into a layout, and whether as weights."""
    found: list[tuple[tuple[int, ...], bool]] = []

    def operand(matrices: mx.array, weights: bool, _: mx.Stream) -> mx.array:
        found.append((matrices.shape, weights))
        return matrices

    monkeypatch.setattr(matmuls, "upstream_operand", operand)
    return found


@pytest.fixture
def dense(monkeypatch: pytest.MonkeyPatch) -> Calls:
    calls = Calls(upstream.upstream_gather_mm)
    monkeypatch.setattr(upstream, "upstream_gather_mm", calls)
    return calls


def expected(x: mx.array, w: mx.array, lhs: Any, rhs: Any) -> Any:
    return host(x)[lhs] @ host(w)[rhs]


def test_operands_and_gradients_are_laid_out(matmuls: Matmuls, operands: list[Any], dense: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    x, w = random((6, 2, 16)), random((4, 16, 9))
    result = OURS.gather_mm(x, w, rhs_indices=mx.array([0, 1, 1, 2, 3, 3]))
    assert np.allclose(host(result), expected(x, w, np.arange(6), [0, 1, 1, 2, 3, 3]), atol=1e-5)
    assert operands == [((6, 2, 16), False), ((4, 16, 9), True)]
    monkeypatch.setattr(matmuls, "traced", lambda _: True)
    OURS.gather_mm(x, w, rhs_indices=mx.array([0, 1, 1, 2, 3, 3]))
    assert operands[2:] == [((6, 2, 16), False), ((4, 16, 9), True), ((6, 2, 9), False)]
    assert len(dense.seen) == 2


@pytest.mark.parametrize(("shape", "weights", "indices", "ordered"), [
    ((6, 1, 16), (4, 16, 9), (6,), True),
    ((6, 2, 16), (4, 16, 9), (6,), False),  # more than a row
    ((6, 1, 1, 16), (4, 16, 9), (6, 2), False),  # each row twice: the kernel would take as many rows as pairs
    ((6, 1, 16), (1025, 16, 9), (6,), False),  # more matrices than the kernel takes
], ids=str)  # fmt: skip
def test_when_it_is_told_that_indices_rise(
    operands: list[Any], dense: Calls, shape: tuple[int, ...], weights: tuple[int, ...], indices: tuple[int, ...], ordered: bool
) -> None:
    x, w = random(shape), random(weights)
    rhs = np.sort(np.random.default_rng(0).integers(0, 4, indices), axis=None).reshape(indices)
    result = OURS.gather_mm(x, w, rhs_indices=mx.array(rhs), sorted_indices=True)
    assert np.allclose(host(result), host(x) @ host(w)[rhs], atol=1e-5)
    assert [call[-1] for call in dense.seen] == [ordered]
    assert operands


def test_not_where_it_would_count_too_far(operands: list[Any], dense: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upstream, "MOST_COUNTED", 4 * 16 * 9 * 4 - 1)
    OURS.gather_mm(random((6, 1, 16)), random((4, 16, 9)), rhs_indices=mx.array([0, 0, 1, 1, 2, 3]), sorted_indices=True)
    assert [call[-1] for call in dense.seen] == [False]
    assert operands


@pytest.mark.parametrize(("batch", "left", "right"), [
    ((10,), None, (10,)), ((5,), (11,), (11,)), ((3, 1), None, (3, 4)), ((6,), (4, 3), None), ((6,), (2, 1), (3,)),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("rows", [1, 3])
def test_more_pairs_than_a_grid_holds(
    operands: list[Any], dense: Calls, monkeypatch: pytest.MonkeyPatch, batch: tuple[int, ...], left: Any, right: Any, rows: int
) -> None:
    monkeypatch.setattr(upstream, "MOST_MATMULS", 4)
    rng = np.random.default_rng(0)
    x, w = random((*batch, rows, 16)), random((3, 16, 9))
    lhs = None if left is None else rng.integers(0, np.prod(batch), left)
    rhs = None if right is None else rng.integers(0, 3, right)
    given = {"lhs_indices": None if lhs is None else mx.array(lhs), "rhs_indices": None if rhs is None else mx.array(rhs)}
    result = OURS.gather_mm(x, w, **given)
    first = np.arange(np.prod(batch)).reshape(batch) if lhs is None else lhs
    first, second = np.broadcast_arrays(first, np.arange(3) if rhs is None else rhs)
    assert np.allclose(host(result), host(x).reshape(-1, rows, 16)[first] @ host(w)[second], atol=1e-5)
    assert all(call[2][0] <= 4 for call in dense.seen)
    assert len(dense.seen) == -(-first.size // 4)
    assert operands


def test_a_stack_in_several_dimensions(operands: list[Any], dense: Calls) -> None:
    """Is one of three, which is all that it sees the steps of."""
    x, w = random((4, 2, 16)), random((2, 3, 9, 16)).swapaxes(-1, -2)
    for lhs, rhs in (None, [5, 0, 3, 4]), ([0, 1, 3], None):
        given = {"lhs_indices": None if lhs is None else mx.array(lhs), "rhs_indices": None if rhs is None else mx.array(rhs)}
        result = OURS.gather_mm(x, w, **given)
        stack = host(w).reshape(6, 16, 9)
        right = stack[rhs] if rhs is not None else stack.reshape(2, 3, 16, 9)
        assert np.allclose(host(result), host(x)[range(4) if lhs is None else lhs] @ right, atol=1e-5)
    assert all(call[1] == (6, 16, 9) for call in dense.seen)
    assert operands


def test_quantized_experts_in_parts(operands: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls(upstream.upstream_gather_qmm)
    monkeypatch.setattr(upstream, "upstream_gather_qmm", calls)
    monkeypatch.setattr(upstream, "MOST_MATMULS", 40)
    x, rhs = random((100, 1, 64)), np.arange(100) % 3
    parts = mx.quantize(random((3, 9, 64)), group_size=64, bits=4)
    result = OURS.gather_qmm(x, *parts, rhs_indices=mx.array(rhs))
    assert np.allclose(host(result), host(x) @ host(mx.dequantize(*parts))[rhs].swapaxes(1, 2), atol=1e-4)
    assert [call[4][0] for call in calls.seen] == [40, 40, 20]
    assert operands == [((100, 1, 64), False), *((part.shape, False) for part in parts)]


def test_which_patched_calls_reach_mlx_by_way_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a GPU that name matrices."""
    a, b, rhs = random((3, 1, 16)), random((4, 16, 9)), mx.array([0, 3, 1])
    call = gather.gather_mm.prepare(a, b, rhs_indices=rhs)
    plain = gather.gather_mm.prepare(a, b[:3])
    assert call.choice.engine == plain.choice.engine == "mlx"
    monkeypatch.setattr(native, "on_cuda", lambda: True)
    assert not gather.misread_by_mlx(call)
    on_a_gpu: Any = SimpleNamespace(device=mx.Device(mx.gpu, 0))
    for each, wanted in (call, True), (plain, False), (replace(call, choice=Choice("small_m", "")), False):
        assert gather.misread_by_mlx(replace(each, stream=on_a_gpu)) == wanted
