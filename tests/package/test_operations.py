"""What all operations have in common: one list, and for each a signature with its documentation and what prepares its calls."""

from __future__ import annotations

import inspect
import re
from typing import Any

import mlx.core as mx
import mlx_cuda
import pytest
from mlx_cuda import _patch
from mlx_cuda._explain import EXPLAINED
from mlx_cuda._loader import native
from mlx_cuda._operations import OPERATIONS
from mlx_cuda._tuning.rules import rules

UNCACHED = {"paged_cache_update", "quantize_fp8", "all_sum"}
DOCUMENTED = [each for name, each in OPERATIONS.items() if name != "all_sum"]  # whose arguments and errors are those of MLX's


def test_every_public_operation_is_in_the_list() -> None:
    """Those are operations that run on a stream."""
    functions = {name: getattr(mlx_cuda, name) for name in mlx_cuda.__all__ if inspect.isfunction(getattr(mlx_cuda, name))}
    found = {name for name, function in functions.items() if "stream" in inspect.signature(function).parameters}
    assert found == {operation.__name__ for operation in EXPLAINED} == {*OPERATIONS, "decode_step"}
    assert all(functions[operation.__name__] is operation for operation in EXPLAINED)


@pytest.mark.parametrize("operation", DOCUMENTED, ids=lambda each: each.__name__)
def test_it_says_what_it_takes(operation: Any) -> None:
    """Each argument, its results and its errors."""
    arguments, returns, raises = re.split(r"\n    (?:Returns|Raises):\n", operation.__doc__.partition("\n    Args:\n")[2])
    assert re.findall(r"^        (\w+): ", arguments, re.MULTILINE) == list(inspect.signature(operation).parameters)
    assert "``[" in arguments + returns or "shape" in returns
    assert {*re.findall(r"^        (\w+): ", raises, re.MULTILINE)} == {"ValueError", "TypeError"}


@pytest.mark.parametrize("name", OPERATIONS)
def test_its_calls_are_prepared_and_cached(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    operation = OPERATIONS[name]
    own = inspect.signature(operation.prepare)
    in_parts = name == "quantized_attention"
    assert in_parts or own.parameters == inspect.signature(operation).parameters
    kept: list[Any] = []

    class Module:
        def cached(self, function: Any, *_: Any) -> Any:
            kept.append(function.__name__)
            return lambda *_, **__: "kept"

    monkeypatch.setattr(native, "loaded", Module())
    if name in UNCACHED:
        with pytest.raises(TypeError):
            operation(None)
        assert not kept
    else:
        assert operation(*((1, (2, 3), (4, 5)) if in_parts else ())) == "kept"
        assert kept == ["attend" if in_parts else name]


def test_what_patch_replaces_is_of_the_list() -> None:
    """MLX's functions have their names, but for three."""
    others = {"scaled_dot_product_attention": "attention", "gated_delta_update": "gated_delta", "conv1d": "short_conv"}
    replaced = {others.get(route.name, route.name) for route in (*_patch.ROUTES, *_patch.OTHERS)}
    assert replaced <= set(OPERATIONS)


def test_what_is_tuned_is_of_the_list() -> None:
    assert {rule.operation for rule in rules()} <= set(OPERATIONS)


def test_engines_have_their_former_names_for_one_release() -> None:
    q = mx.ones((1, 1, 2, 8))
    for engine, name, options in ("mlx", "upstream", {}), ("fallback", "composed", {"softcap": 2.0}):
        found = mlx_cuda.explain(q, q, q, stream=mx.cpu, **options).engine
        assert found == engine == mlx_cuda.explain(q, q, q, stream=mx.cpu, **options).engine
        assert hash(found) == hash(engine)
        with pytest.warns(DeprecationWarning, match=f'calls the engine "{engine}", no longer "{name}"'):
            assert found == name
        with pytest.warns(DeprecationWarning, match=name):
            assert not found != name  # noqa: SIM202
        assert found != "flash"


@pytest.mark.parametrize("name", OPERATIONS)
def test_readers_of_types_are_told_of_results(name: str) -> None:
    """And not of the call that is prepared."""
    operation = OPERATIONS[name]
    assert operation.__annotations__["return"] == inspect.signature(operation).return_annotation
    assert "Call" not in operation.__annotations__["return"]
