"""MLX's transformations of every function that ``patch`` replaces, where the rules send its calls to kernels: tests/gpu/transforms.py."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import mlx_cuda
import numpy as np
import pytest
from mlx_cuda import _mlx_lm as mlx_lm
from mlx_cuda._patch import EVERY, EXPORTERS

from tests.gpu.transforms import EXAMPLES, SHAPELESS, TRANSFORMS, Example, check, check_vmap

from .compiled import compiles

if TYPE_CHECKING:
    from pathlib import Path

    from .engines import Engines

pytestmark = [pytest.mark.usefixtures("on_the_cpu"), compiles]

BY_NAME = {f"{name}: {each.form}": each for name, examples in EXAMPLES.items() for each in examples}
LEFT_TO_MLX = {"quantized_matmul: batches"}  # on the CPU
examples = pytest.mark.parametrize("name", BY_NAME)


@pytest.fixture(autouse=True)
def _mlx_lm_s_too(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    """``patch`` on a machine without a GPU leaves out what mlx-lm computes by."""
    patch = mlx_cuda.patch

    def with_mlx_lm_s() -> Any:
        patched = patch()
        mlx_lm.put()
        patched.callback(mlx_lm.take_away)
        return patched

    monkeypatch.setattr(mlx_cuda, "patch", with_mlx_lm_s)


def test_every_function_has_examples() -> None:
    replaced = {route.name for route in EVERY if route not in EXPORTERS}
    computing = {name for _, name in mlx_lm.PLACES} - {"trim_prompt_cache"}
    assert EXAMPLES.keys() == replaced | computing


@examples
def test_the_examples_are_computed_by_kernels(engines: Engines, name: str) -> None:
    example: Example = BY_NAME[name]
    for make in (example.small, example.large):
        with mlx_cuda.patch():
            example.call(*make(np.random.default_rng(0)))
    assert bool(engines.calls) != (name in LEFT_TO_MLX)


@examples
@pytest.mark.parametrize("transform", SHAPELESS)
def test_shapes_that_a_trace_does_not_know_are_left_to_mlx(engines: Engines, tmp_path: Path, name: str, transform: str) -> None:
    check(SHAPELESS[transform], BY_NAME[name], 0, tmp_path)
    assert not engines.calls


@examples
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_other_transformations_give_what_they_give_of_mlx_s(tmp_path: Path, name: str, transform: str) -> None:
    check(TRANSFORMS[transform], BY_NAME[name], 0, tmp_path)


@examples
@pytest.mark.parametrize("size", ["small", "large"])
def test_vmap_over_each_argument(name: str, size: str) -> None:
    check_vmap(BY_NAME[name], size, 0)
