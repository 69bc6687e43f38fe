"""Numbers that stand in Python and in C++ alike."""

from __future__ import annotations

import ast
import re

from ci.matrix import REPOSITORY


def _constant(name: str) -> object:
    """Of the rules of attention, which may not be importable beside another installed version."""
    tree = ast.parse((REPOSITORY / "python/mlx_cuda/_attention/rules.py").read_text("utf-8"))
    values = [node.value for node in tree.body if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == name]
    return ast.literal_eval(values[0])


def _source(path: str) -> str:
    return " ".join((REPOSITORY / "src" / path).read_text("utf-8").split())


def _of(source: str, struct: str, name: str) -> int:
    """A constant of a struct."""
    found = re.search(rf"{name} = (\d+);", source[source.index(f"struct {struct} ") :])
    assert found
    return int(found[1])


def test_the_widest_kernels_with_tiles_of_a_mask_are_those_that_are_chosen() -> None:
    table = _source("attention/flash/kernels.h").partition("#define MLX_CUDA_FLASH_SM90_KERNELS(EACH)")[2]
    biased, others = ({int(dim) for dim in re.findall(rows, table)} for rows in (r"_KIND\(EACH, (\d+), biased", r"_UNBIASED\(EACH, (\d+)"))
    assert max(biased) == _constant("WIDEST_UPSTREAM_HEAD")
    assert min(others - biased) > max(biased)


def test_the_rules_know_what_the_decode_kernels_take() -> None:
    """The kernels and their planner have these numbers from one header."""
    traits = _source("attention/decode/traits.h")
    assert _of(traits, "NarrowTraits", "kWidest") == _constant("WIDEST_HEAD")
    assert _of(traits, "NarrowTraits", "kTileKeys") == _constant("PAGE_TILE")
    assert _of(traits, "Sm90Traits", "kWidest") == _constant("WIDEST_GROWING")
    assert (_of(traits, "WideTraits", "kWidest"), _of(traits, "WideTraits", "kWidestValues")) == _constant("WIDEST_HEADS")
