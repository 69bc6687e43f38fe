"""Functions that fit a screen, and calls whose arguments have names."""

from __future__ import annotations

import ast
from functools import cache

import pytest

from ci.matrix import REPOSITORY

LONGEST, MOST_POSITIONS = 80, 6
OF_OTHERS = {  # whose parameters are those of MLX's, or mlx-lm's
    "python/mlx_cuda/_check/engines.py": {"_gated_delta", "_quantized", "_ssm"},
    "python/mlx_cuda/_check/reference.py": {"gather_qmm", "quantized_matmul"},
    "python/mlx_cuda/_invariant/matmul.py": {"gather_qmm", "quantized_matmul"},
    "python/mlx_cuda/_matmul/batches.py": {"batched_quantized_matmul"},
    "python/mlx_cuda/_matmul/gather.py": {"gather_qmm"},
    "python/mlx_cuda/_matmul/quantized.py": {"quantized_matmul"},
    "python/mlx_cuda/_mlx_lm/places.py": {"attention", "attn", "ops"},
    "python/mlx_cuda/_patch.py": {"_gated_delta_update"},
    "python/mlx_cuda/nn.py": {"__init__"},
}


@cache
def functions(top: str) -> list[tuple[str, ast.FunctionDef]]:
    """With the paths of their files."""
    trees = {path.relative_to(REPOSITORY).as_posix(): ast.parse(path.read_text("utf-8")) for path in (REPOSITORY / top).rglob("*.py")}
    return [(path, node) for path, tree in trees.items() for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]


def positions(function: ast.FunctionDef) -> int:
    names = [each.arg for each in (*function.args.posonlyargs, *function.args.args)]
    return len(names) - (names[:1] in (["self"], ["cls"]))


@pytest.mark.parametrize("top", ["benchmarks", "ci", "python", "tests", "wheel_hooks"])
def test_none_is_longer_than_a_screen(top: str) -> None:
    assert [f"{path}: {each.name}" for path, each in functions(top) if (each.end_lineno or 0) - each.lineno >= LONGEST] == []


@pytest.mark.parametrize("top", ["benchmarks", "ci", "python", "wheel_hooks"])
def test_more_than_a_few_arguments_are_given_by_name(top: str) -> None:
    found: dict[str, set[str]] = {}
    for path, each in functions(top):
        if positions(each) > MOST_POSITIONS:
            found.setdefault(path, set()).add(each.name)
    assert found == {path: names for path, names in OF_OTHERS.items() if path.partition("/")[0] == top}
