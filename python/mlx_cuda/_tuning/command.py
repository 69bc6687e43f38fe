"""``python -m mlx_cuda tune``: tune products by their sizes, or show what is known."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .._loader import tuned_file

if TYPE_CHECKING:
    from collections.abc import Iterable

    from .._loader.tuned_file import Tuned

DTYPES = ("bfloat16", "float16", "float32")


def sizes(text: str) -> tuple[int, int, int]:
    """M, N and K of ``8192x16384x4096``."""
    match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)x([1-9]\d*)", text)
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form 8192x16384x4096 (M, N and K)")
    m, n, k = map(int, match.groups())
    return m, n, k


def add_to(subparsers: Any) -> None:
    """Add the command to the package's command line."""
    parser = subparsers.add_parser(
        "tune",
        help="time matrix products and keep the fastest algorithms",
        description="Time cuBLASLt's algorithms for activation(x @ w.T + bias) with x [M, K] and w [N, K]; without sizes, show the file.",
        epilog="Exit codes: 0 done, 1 there is nothing to tune with, 2 usage.",
    )
    parser.add_argument("sizes", nargs="*", type=sizes, metavar="MxNxK", help="sizes of products")
    parser.add_argument("--dtype", choices=DTYPES, default=DTYPES[0])
    parser.add_argument("--bias", action="store_true", help="with a bias")
    parser.add_argument("--activation", choices=("relu", "gelu_approx"))
    parser.add_argument("--file", type=Path, default=None, help=f"instead of {tuned_file.VARIABLE} or the one in the user's cache")
    parser.set_defaults(run=run)


def render(products: Iterable[tuple[str, Tuned]]) -> str:
    """One line for each product."""
    lines = [f"{each.first_microseconds:10.1f} us -> {each.microseconds:10.1f} us  {key}" for key, each in products]
    return "\n".join(lines) or "no product is tuned"


def run(args: argparse.Namespace) -> int:
    """Tune, or show."""
    path = args.file or tuned_file.default_path()
    if not args.sizes:
        print(render(sorted((tuned_file.read(path) or {}).items()) if path else ()))
        return 0
    import mlx.core as mx

    from .._loader import native
    from .._matmul.linear import linear
    from .tune import tune

    engine = native.engine(mx.default_stream(mx.gpu)) if mx.cuda.is_available() else "MLX offers no CUDA GPU here"
    if isinstance(engine, str):
        print(engine)
        return 1
    before = dict(tuned_file.found(engine.module))
    with tune(path=path) as tuning:
        for m, n, k in args.sizes:
            x, w, bias = (mx.random.normal(shape).astype(getattr(mx, args.dtype)) for shape in ((m, k), (n, k), (n,)))
            mx.eval(linear(x, w, bias if args.bias else None, activation=args.activation, stream=mx.gpu))
        print(render((key, each) for key, each in tuning.products.items() if before.get(key) != each))
    return 0
