"""Numbers that stand in Python and in C++ alike."""

from __future__ import annotations

import ast
import re

from ci.matrix import REPOSITORY


def _constant(name: str) -> object:
    """Of _dispatch.py, which may not be importable beside another installed version."""
    tree = ast.parse((REPOSITORY / "python/mlx_cuda/_dispatch.py").read_text("utf-8"))
    values = [node.value for node in tree.body if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == name]
    return ast.literal_eval(values[0])


def test_calls_are_remembered_from_the_same_number_of_keys_on() -> None:
    """Below it the choice depends on the number of keys, which remembered calls leave out."""
    source = (REPOSITORY / "src/bindings/module.cpp").read_text("utf-8")
    assert re.findall(r"kManyKeys = (\d+);", source) == [str(_constant("SHORT_CACHE"))]


def test_the_compiled_head_dims_are_those_that_are_chosen() -> None:
    source = (REPOSITORY / "src/kernels/decode.cu").read_text("utf-8")
    compiled = {int(width) for width in re.findall(r"MLX_CUDA_DECODE\(dtype, T, (\d+),", source)}
    rows = _constant("MOST_ROWS")
    assert isinstance(rows, dict)
    assert compiled == set(rows)
