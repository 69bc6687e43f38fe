"""``python -m mlx_cuda explain``: the engine of a call of these shapes on this GPU, and the reason."""

from __future__ import annotations

import argparse
import inspect
import json
import re
import sys
from typing import TYPE_CHECKING, Any

from ._loader.checks import explain as fault
from ._loader.environment import take

if TYPE_CHECKING:
    from collections.abc import Iterable

SHAPE = re.compile(r"(\d+(?:x\d+)*)(?::(\w+))?")
WORDS = {"none": None, "true": True, "false": False}
DESCRIPTION = """\
Print which engine and which kernel compute a call, and why. Nothing is computed or allocated.

  SHAPE       an array, such as 1x32x4096x128; :DTYPE sets its dtype, as in 8:int32. A quantized array is its shape before
              quantization and the bits or mode: 4096x14336:q4, :q8, :mxfp4, :mxfp8 or :nvfp4.
  NAME=VALUE  a keyword argument: a number, true, false, none, a string, a tuple (values with commas) or an array
              (mask=1x1x8x4096:bool; a vector needs a dtype: sinks=32:float32)."""
EPILOG = """\
Examples:
  python -m mlx_cuda explain attention 1x32x4096x128 1x8x4096x128 1x8x4096x128 mask=causal
  python -m mlx_cuda explain quantized_matmul 1x4096 14336x4096:q4
  python -m mlx_cuda explain gather_mm 8x1x1x2048 128x2048x768 rhs_indices=8x8:uint32

Exit codes: 0 done, 2 usage error or invalid arguments of the operation."""


def add_to(subparsers: Any) -> None:
    """Add the command to the package's command line."""
    parser = subparsers.add_parser(
        "explain",
        help="print which engine computes a call of these shapes, and why",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("operation", metavar="OPERATION", help="a function of mlx_cuda, such as attention")
    parser.add_argument("arguments", nargs="+", metavar="SHAPE|NAME=VALUE", help="positional arguments, then keyword arguments")
    parser.add_argument("--dtype", default="bfloat16", help="dtype of arrays without :DTYPE (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.set_defaults(run=run)


def array(text: str, dtype: str, options: dict[str, Any]) -> Any:
    """Return zeros of this shape; quantized, the tuple of ``mx.quantize``, whose format is added to the options."""
    import mlx.core as mx

    match = SHAPE.fullmatch(text)
    if not match:
        raise ValueError(f"SHAPE must look like 1x32x4096x128 or 8:int32, got {text!r}")
    shape, suffix = [int(size) for size in match[1].split("x")], match[2] or dtype
    bits = re.fullmatch(r"q([2-8])", suffix)
    if bits or suffix in {"mxfp4", "mxfp8", "nvfp4"}:
        quantized = {"bits": int(bits[1])} if bits else {"mode": suffix}
        options.update(quantized)
        return mx.quantize(mx.zeros(shape, getattr(mx, dtype)), group_size=options.get("group_size"), **quantized)
    if not isinstance(getattr(mx, suffix, None), mx.Dtype):
        raise ValueError(f"{suffix!r} is not a dtype of MLX, got {text!r}")
    return mx.zeros(shape, getattr(mx, suffix))


def value(text: str, dtype: str, options: dict[str, Any]) -> Any:
    """Parse the value of a keyword argument."""
    if "," in text:
        return tuple(value(each, dtype, options) for each in text.split(","))
    if text.lower() in WORDS:
        return WORDS[text.lower()]
    if re.fullmatch(r"\d+(x\d+)+(:\w+)?|\d+:\w+", text):
        return array(text, dtype, options)
    if re.fullmatch(r"[+-]?\d+", text):
        return int(text)
    if re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", text.lower()):
        return float(text)
    return text


def call_of(operation: Any, arguments: Iterable[str], dtype: str) -> tuple[list[Any], dict[str, Any]]:
    """Return the positional and keyword arguments of a call."""
    named = [each for each in arguments if "=" in each]
    options: dict[str, Any] = {}
    for name, _, text in (each.partition("=") for each in named):
        options[name] = value(text, dtype, options)
    apart = "scales" in inspect.signature(operation).parameters  # the operation takes the parts of a quantized array one by one
    places: list[Any] = []
    for each in (array(text, dtype, options) for text in arguments if "=" not in text):
        places += each if apart and isinstance(each, (tuple, list)) else [each]
    return places, options


def run(args: argparse.Namespace) -> int:
    """Print the choice; return 2 if the arguments are invalid."""
    try:
        import mlx.core as mx
    except ImportError as error:
        print(fault(error, take(ask_driver=True)), file=sys.stderr)
        return 2
    if not mx.cuda.is_available():
        print("MLX has no CUDA GPU here: this is the engine on the CPU, whatever MLX_CUDA_CAPABILITY says", file=sys.stderr)
    from ._explain import explain
    from ._operations import OPERATIONS

    try:
        if args.operation not in OPERATIONS:
            raise ValueError(f"OPERATION must be one of {', '.join(OPERATIONS)}, got {args.operation!r}")
        if not isinstance(getattr(mx, args.dtype, None), mx.Dtype):
            raise ValueError(f"--dtype must be a dtype of MLX, got {args.dtype!r}")
        operation = OPERATIONS[args.operation]
        places, options = call_of(operation, args.arguments, args.dtype)
        choice = explain(operation, *places, **options)
    except (ValueError, TypeError, OverflowError, RuntimeError) as error:
        print(error, file=sys.stderr)
        return 2
    found = {"engine": str(choice.engine), "kernel": choice.kernel, "reason": choice.reason}
    print(json.dumps(found, indent=2) if args.json else "\n".join(f"{name:8}{text}" for name, text in found.items() if text))
    return 0
