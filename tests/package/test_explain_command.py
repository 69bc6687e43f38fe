"""``python -m mlx_cuda explain``: shapes and options of a command line become the call that explain is asked for."""

from __future__ import annotations

import json
import sys
from typing import Any

import mlx.core as mx
import pytest
from mlx_cuda import Choice, __main__, _explain, _explain_command
from mlx_cuda._operations import OPERATIONS


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """The calls that explain is asked for, each of which is refused nothing."""
    calls: list[tuple[Any, ...]] = []

    def explain(operation: Any, *arguments: Any, **options: Any) -> Choice:
        calls.append((operation, arguments, options))
        return Choice("flash", "the rule", kernel="flash: a kernel")

    monkeypatch.setattr(_explain, "explain", explain)
    return calls


def test_shapes_options_and_what_is_printed(asked: list[tuple[Any, ...]], capsys: pytest.CaptureFixture[str]) -> None:
    options = ["mask=causal", "window_size=64,0", "sinks=4:float32", "scale=0.5", "return_lse=true", "softcap=none"]
    assert __main__.main(["explain", "attention", "1x4x8x64", "1x2x9x64:float16", "1x2x9x64", *options]) == 0
    assert capsys.readouterr().out == "engine  flash\nkernel  flash: a kernel\nreason  the rule\n"
    ((operation, arrays, named),) = asked
    assert operation is OPERATIONS["attention"]
    assert [(each.shape, each.dtype) for each in arrays] == [
        ((1, 4, 8, 64), mx.bfloat16),
        ((1, 2, 9, 64), mx.float16),
        ((1, 2, 9, 64), mx.bfloat16),
    ]
    sinks = named.pop("sinks")
    assert (sinks.shape, sinks.dtype) == ((4,), mx.float32)
    assert named == {"mask": "causal", "window_size": (64, 0), "scale": 0.5, "return_lse": True, "softcap": None}


@pytest.mark.parametrize(
    ("spelled", "options", "parts"),
    [("q4", {"bits": 4}, 3), ("q8", {"bits": 8}, 3), ("mxfp4", {"mode": "mxfp4"}, 2), ("mxfp8", {"mode": "mxfp8"}, 2)],
)
def test_quantized_arrays(asked: list[tuple[Any, ...]], spelled: str, options: dict[str, Any], parts: int) -> None:
    """In the parts that mx.quantize gives: one by one, or as a tuple where the operation takes one."""
    assert __main__.main(["explain", "quantized_matmul", "1x128", f"64x128:{spelled}"]) == 0
    assert __main__.main(["explain", "quantized_attention", "1x2x1x128", *[f"1x2x8x128:{spelled}"] * 2]) == 0
    (_, apart, named), (_, together, same) = asked
    assert len(apart) == 1 + parts
    assert apart[1].dtype == mx.uint32
    assert [len(each) for each in together[1:]] == [parts, parts]
    assert named == same == options


def test_the_group_size_is_the_one_that_is_given(asked: list[tuple[Any, ...]]) -> None:
    assert __main__.main(["explain", "quantized_matmul", "1x128", "64x128:q4", "group_size=32"]) == 0
    assert asked[0][1][2].shape == (64, 4)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nope", "1x2"], "OPERATION must be one of attention, "),
        (["attention", "1x2"], "missing 2 required positional arguments"),
        (["linear", "8xa", "4x4"], "SHAPE must look like 1x32x4096x128 or 8:int32, got '8xa'"),
        (["linear", "8x4:core", "4x4"], "'core' is not a dtype of MLX"),
        (["linear", "8x4", "4x4", "--dtype", "nope"], "--dtype must be a dtype of MLX, got 'nope'"),
        (["linear", "8x4", "4x4", "activation=nope"], "[linear] Activation must be None or one of"),
    ],
)
def test_what_is_wrong_is_said(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert __main__.main(["explain", *arguments]) == 2
    out, err = capsys.readouterr()
    assert said in err
    assert not out


@pytest.mark.parametrize("example", [line.split()[4:] for line in _explain_command.EPILOG.splitlines() if line.startswith("  python")])
def test_the_examples_of_the_help_run(example: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert __main__.main(["explain", *example, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["engine"] in {"mlx", "fallback"}


def test_without_mlx_it_says_why(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "mlx.core", None)
    assert __main__.main(["explain", "linear", "8x4", "4x4"]) == 2
    assert "mlx.core" in capsys.readouterr().err
