"""Numbers that stand in Python and in C++ alike."""

from __future__ import annotations

import ast
import re

from ci.matrix import REPOSITORY


def _constant(name: str) -> object:
    """Of _dispatch.py, which may not be importable beside another installed version."""
    tree = ast.parse((REPOSITORY / "python/mlx_cuda/_attention/rules.py").read_text("utf-8"))
    values = [node.value for node in tree.body if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == name]
    return ast.literal_eval(values[0])


def _source(path: str) -> str:
    return " ".join((REPOSITORY / "src" / path).read_text("utf-8").split())


def test_the_widest_kernels_with_tiles_of_a_mask_are_those_that_are_chosen() -> None:
    table = _source("attention/flash/kernels.h").partition("#define MLX_CUDA_FLASH_SM90(BIASED, UNBIASED)")[2]
    biased, others = ([int(dim) for dim in re.findall(rf"\b{rows}\((\d+),", table)] for rows in ("BIASED", "UNBIASED"))
    assert max(biased) == _constant("WIDEST_UPSTREAM_HEAD")
    assert min(others) > max(biased)


def test_the_widest_heads_are_those_of_the_kernels() -> None:
    plans = _source("attention/decode/plans.cpp")
    assert f"kWidestNarrow = {_constant('WIDEST_HEAD')};" in plans
    assert f"kWidestSm90 = {_constant('WIDEST_DECODE_ON_HOPPER')};" in plans
