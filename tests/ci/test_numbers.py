"""Numbers that stand in Python and in C++ alike."""

from __future__ import annotations

import ast
import re

from ci.matrix import REPOSITORY

FLASH = "attention/flash/flash.cu"


def _constant(name: str) -> object:
    """Of _dispatch.py, which may not be importable beside another installed version."""
    tree = ast.parse((REPOSITORY / "python/mlx_cuda/_attention/rules.py").read_text("utf-8"))
    values = [node.value for node in tree.body if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == name]
    return ast.literal_eval(values[0])


def _source(path: str) -> str:
    return " ".join((REPOSITORY / "src" / path).read_text("utf-8").split())


def test_hopper_kernels_are_those_that_are_chosen() -> None:
    kernels, choosing = _source("attention/flash/flash_sm90.cu"), _source("attention/flash/plan_sm90.cpp")
    compiled = re.findall(r"MLX_CUDA_FLASH\(dtype, T, (\d+), (\d+), (\d+)\)", kernels)
    variants = re.search(r"kVariants\{\{(.*?)\}\};", choosing)
    assert variants
    assert compiled
    assert compiled == re.findall(r"\{(\d+), (\d+), (\d+)\}", variants[1])
    biased = re.findall(r"MLX_CUDA_FLASH_BIASED\(dtype, T, (\d+), (\d+), (\d+)\)", kernels)
    widest = re.search(r"kWidestBiased = (\d+);", choosing)
    assert widest
    assert widest[1] == str(_constant("WIDEST_UPSTREAM_HEAD"))
    assert biased == [variant for variant in compiled if int(variant[0]) <= int(widest[1])]


def test_flash_kernels_are_those_that_are_chosen() -> None:
    """Widths, tiles and stages, by name; the 16-bit ones are compiled for two dtypes."""
    number = r"(\d+)"
    compiled = re.findall(
        rf"MLX_CUDA_FLASH\((dtype##|float32)_(\w+), \d+, \w+, {', '.join([number] * 7)}, \w+, (true|false)\)",
        _source("attention/flash/flash.cu"),
    )
    sizes = {"dtype##": "2", "float32": "4"}
    kernels = {(sizes[dtype], name): (general, *numbers) for dtype, name, *numbers, general in compiled}
    variants = re.findall(rf'\{{"(\w+)", (\d), (true|false), {", ".join([number] * 7)}\}}', _source("attention/flash/primitive.cpp"))
    chosen = {(size, name): (general, *numbers) for name, size, general, *numbers in variants}
    assert chosen == kernels
    assert len(kernels) > 15


def test_the_widest_heads_are_those_of_the_kernels() -> None:
    plans = _source("attention/decode/plans.cpp")
    assert f"kWidestNarrow = {_constant('WIDEST_HEAD')};" in plans
    assert f"kWidestSm90 = {_constant('WIDEST_DECODE_ON_HOPPER')};" in plans
