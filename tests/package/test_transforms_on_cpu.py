"""MLX's transformations of every function that ``patch`` replaces, where the rules send its calls to kernels: tests/gpu/transforms.py."""

from __future__ import annotations

from pathlib import Path

import mlx_cuda
import numpy as np
import pytest

from tests.gpu.transforms import (
    EXAMPLES,
    FUNCTIONS,
    OF_MLX_LM,
    SHAPELESS,
    TRANSFORMS,
    Example,
    check,
    check_gradient_graphs,
    check_vmap,
    every_example,
)  # fmt: skip

from .engines import Engines, both_ways, natively_by_day, traced_by_mlx

pytestmark = pytest.mark.usefixtures("on_the_cpu")


def left_to_mlx(example: Example) -> bool:
    """On the CPU, but not on a GPU."""
    return example.form == "batches"


def test_every_function_has_examples() -> None:
    assert EXAMPLES.keys() == FUNCTIONS | OF_MLX_LM


@both_ways
@every_example
def test_the_examples_are_computed_by_kernels(engines: Engines, example: Example) -> None:
    for make in (example.small, example.large):
        with mlx_cuda.patch():
            example.call(*make(np.random.default_rng(0)))
    assert bool(engines.calls) != left_to_mlx(example)


@natively_by_day
@every_example
@pytest.mark.parametrize(
    "transform", [pytest.param(each, marks=traced_by_mlx if each.startswith("shapeless") else ()) for each in SHAPELESS]
)
def test_shapes_that_a_trace_does_not_know_are_left_to_mlx(engines: Engines, tmp_path: Path, example: Example, transform: str) -> None:
    check(SHAPELESS[transform], example, 0, tmp_path)
    assert not engines.calls


@traced_by_mlx
@both_ways
@every_example
def test_nor_do_its_gradients_come_from_kernels(engines: Engines, example: Example) -> None:
    check_gradient_graphs(example, 0)
    assert not engines.calls


@every_example
@pytest.mark.usefixtures("engines")
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_other_transformations_give_what_they_give_of_mlx_s(tmp_path: Path, example: Example, transform: str) -> None:
    check(TRANSFORMS[transform], example, 0, tmp_path)


@every_example
@pytest.mark.usefixtures("engines")
@pytest.mark.parametrize("size", ["small", "large"])
def test_vmap_over_each_argument(example: Example, size: str) -> None:
    check_vmap(example, size, 0)
