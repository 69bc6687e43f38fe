"""What MLX raises for is raised for under ``patch``, by MLX, and an error of ours is told: where the rules send calls to kernels."""

from __future__ import annotations

from typing import Any

import mlx_cuda
import numpy as np
import pytest
from mlx_cuda._loader import native

from tests.gpu.transforms import FUNCTIONS, OF_MLX_LM
from tests.gpu.wrong_calls import NAMES, Call, calls, differences, every_call

from .engines import Engines, both_ways

pytestmark = pytest.mark.usefixtures("on_the_cpu")

BATCHES = 3  # which are MLX's on the CPU


def each_call() -> list[Call]:
    return calls(np.random.default_rng(0))


def test_every_function_has_a_call() -> None:
    assert set(NAMES) == FUNCTIONS | OF_MLX_LM


@both_ways
@every_call
def test_what_mlx_raises_for_is_raised_for(engines: Engines, index: int) -> None:
    assert differences(each_call()[index]) == []
    assert bool(engines.calls) != (index == BATCHES)


@both_ways
@every_call
@pytest.mark.parametrize("kind", [TypeError, ValueError, AttributeError])
def test_an_error_of_ours_is_no_slower_way(engines: Engines, index: int, kind: type[Exception]) -> None:
    if index == BATCHES:
        return
    call, text = each_call()[index], "kernel(): incompatible function arguments (a fault of ours)"

    def broken() -> Any:
        raise kind(text)

    assert isinstance(call.outcome(), list) or call.name == "gather_mm"  # which MLX has not in 16 bits on the CPU
    engines.broken = broken
    with mlx_cuda.patch():
        assert call.outcome() == (kind, text)


@every_call
@pytest.mark.parametrize("kind", [TypeError, ValueError, AttributeError])
def test_nor_is_one_in_what_checks_the_arguments(
    engines: Engines, monkeypatch: pytest.MonkeyPatch, index: int, kind: type[Exception]
) -> None:
    call, text = each_call()[index], "engine(): incompatible function arguments (a fault of ours)"

    def broken(_: object) -> Any:
        raise kind(text)

    theirs = call.outcome()
    monkeypatch.setattr(native, "engine", broken)
    with mlx_cuda.patch():
        assert call.outcome() == ((kind, text) if isinstance(theirs, list) else theirs)
