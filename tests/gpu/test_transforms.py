"""MLX's transformations of every function that ``patch`` replaces, and wrong calls of it: as without the patch."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import mlx_cuda
import numpy as np
import pytest

from .support import primitives
from .transforms import (
    CASES,
    SHAPELESS,
    TRANSFORMS,
    Arrays,
    Example,
    check,
    check_gradient_graphs,
    check_vmap,
    compiled,
    each_in_turn,
    every_example,
    listed,
    outcome,
)
from .wrong_calls import calls, differences, every_call

pytestmark = pytest.mark.gpu

ALONE = [each for each in CASES if not str(each.id).startswith("all_sum")]  # which one process leaves to MLX


def graphs(example: Example, *, patched: bool) -> list[set[str]]:
    """The primitives of the small call, and of the large one."""
    found: list[set[str]] = []
    for make in (example.small, example.large):
        arrays = make(np.random.default_rng(0))
        work = partial(lambda arrays: listed(example.call(*arrays)), arrays)
        results = outcome(work, patched=patched, evaluated=False)
        found.append({type(results).__name__} if isinstance(results, Exception) else primitives(*results))
    return found


@pytest.mark.parametrize("example", ALONE)
def test_the_examples_are_ours(example: Example) -> None:
    assert graphs(example, patched=True) != graphs(example, patched=False)


@every_example
def test_a_trace_for_any_shape_has_mlx_s_operations(example: Example) -> None:
    for make in (example.small, example.large):
        seen: list[set[str]] = []

        def call(*arrays: Any, seen: list[set[str]] = seen) -> Any:
            results = example.call(*arrays)
            seen.append(primitives(*listed(results)))
            return results

        arrays: Arrays = make(np.random.default_rng(0))
        for patched in (False, True):
            outcome(partial(each_in_turn, compiled(partial(call), shapeless=True), arrays), patched=patched)
        assert seen[:1] == seen[1:]


@every_example
@pytest.mark.parametrize("transform", SHAPELESS)
def test_shapes_that_a_trace_does_not_know(tmp_path: Path, example: Example, transform: str) -> None:
    check(SHAPELESS[transform], example, 0, tmp_path)


@every_example
def test_gradients_of_shapes_that_a_trace_does_not_know(example: Example) -> None:
    check_gradient_graphs(example, 0)


@every_example
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_other_transformations(tmp_path: Path, example: Example, transform: str) -> None:
    check(TRANSFORMS[transform], example, 0, tmp_path)


@every_example
@pytest.mark.parametrize("size", ["small", "large"])
def test_vmap_over_each_argument(example: Example, size: str) -> None:
    check_vmap(example, size, 0)


@every_call
def test_what_mlx_raises_for_is_raised_for(index: int) -> None:
    assert differences(calls(np.random.default_rng(0))[index]) == []


def test_names_are_those_of_mlx() -> None:
    with mlx_cuda.patch():
        for route in mlx_cuda._patch.EVERY:
            function = getattr(route.owner, route.name)
            assert function is not route.upstream
            assert (function.__name__, function.__doc__) == (route.name, route.upstream.__doc__)
