"""``python -m mlx_cuda tune``: measure dispatch thresholds, tune GEMMs by their sizes, or show the stored results."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from .._common.errors import BackendError
from .._loader import limits_file, tuned_file
from .._loader.tuned_file import Tuned

if TYPE_CHECKING:
    from .calibrate import Calibration

DTYPES = ("bfloat16", "float16", "float32")
BAR = 30


def sizes(text: str) -> tuple[int, int, int]:
    """Parse M, N and K of ``8192x16384x4096``."""
    match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)x([1-9]\d*)", text)
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form 8192x16384x4096 (M, N and K)")
    m, n, k = map(int, match.groups())
    return m, n, k


def add_to(subparsers: Any) -> None:
    """Add the command to the package's command line."""
    parser = subparsers.add_parser(
        "tune",
        help="measure the dispatch thresholds of this GPU",
        description="Without sizes, measure the dispatch thresholds of the first GPU, and store them for later processes. Nothing else "
        "should run on that GPU. With sizes, time the cuBLASLt algorithms of activation(x @ w.T + bias) for x [M, K] and w [N, K], and "
        "store the fastest.",
        epilog="Exit codes: 0 done, 1 no usable GPU, 2 usage error.",
    )
    about = "sizes of matmuls; M = 1 needs --bias or --activation, because MLX computes a plain matmul of one row"
    parser.add_argument("sizes", nargs="*", type=sizes, metavar="MxNxK", help=about)
    parser.add_argument("--show", action="store_true", help="show the stored results")
    parser.add_argument("--reset", action="store_true", help="delete the stored results of this GPU")
    parser.add_argument("--seconds", type=float, default=110.0, help="time limit of the measurement (default: %(default)s)")
    parser.add_argument("--dtype", choices=DTYPES, default=DTYPES[0], help="dtype of x and w (default: %(default)s)")
    parser.add_argument("--bias", action="store_true", help="add a bias")
    parser.add_argument("--activation", choices=("relu", "gelu_approx"), help="activation function (default: none)")
    parser.add_argument("--file", type=Path, default=None, help=f"file of the results (default: {tuned_file.VARIABLE} or the user's cache)")
    parser.set_defaults(run=run)


def render(matmuls: Iterable[tuple[str, Tuned]]) -> str:
    """Return one line for each tuned GEMM."""
    lines = [f"{each.first_microseconds:10.1f} us -> {each.microseconds:10.1f} us  {key}" for key, each in matmuls]
    return "\n".join(lines) or "no tuned matmul algorithms"


def render_limits(entries: limits_file.Entries) -> str:
    """Return the stored thresholds of each GPU."""
    lines = []
    for name, entry in entries.items():
        lines.append(f"{name} ({', '.join(f'{what} {version}' for what, version in entry.get('versions', {}).items())})")
        parts = {**entry["limits"]["matmul"], "attention": entry["limits"]["attention"]}
        lines += [f"  {part}: {', '.join(f'{field} {value}' for field, value in of.items())}" for part, of in parts.items()]
    return "\n".join(lines) or "no tuned thresholds"


def render_calibration(found: Calibration) -> str:
    """Return what changed, the speedups, and what was not measured."""
    rows = [(each.name, f"{each.before} -> {each.now}", f"{each.gain:.2f}x") for each in found.changes]
    widths = [max((len(row[column]) for row in rows), default=0) for column in range(2)]
    lines = [f"  {name:<{widths[0]}}  {change:<{widths[1]}}  up to {gain}" for name, change, gain in rows]
    lines += [f"  {name}: not measured, {reason}" for name, reason in found.unmeasured.items()]
    changed = f"{len(rows)} thresholds changed" if rows else "no threshold changed"
    return "\n".join([f"{found.gpu}: {changed}, in {found.seconds:.0f} s", *lines])


def bar(stream: TextIO) -> Callable[[float, str], None]:
    """Return a progress callback: a bar on a terminal, else a line for each threshold."""

    def show(share: float, name: str) -> None:
        if stream.isatty():
            done = round(share * BAR)
            stream.write(f"\r[{'#' * done}{'.' * (BAR - done)}] {share:4.0%}  {name:<28}" + ("\n" if share == 1 else ""))
        elif name:
            stream.write(f"{share:4.0%}  {name}\n")
        stream.flush()

    return show


def run(args: argparse.Namespace) -> int:
    """Measure, tune, show or delete."""
    matmuls = args.file or tuned_file.default_path()
    limits = limits_file.beside(matmuls) if matmuls else None
    if args.show:
        print(render(sorted((tuned_file.read(matmuls) or {}).items()) if matmuls else ()))
        print(render_limits((limits_file.read(limits) if limits else None) or {}))
        return 0
    try:
        if args.reset:
            return _reset(limits)
        return _tune(args, matmuls) if args.sizes else _calibrate(args.seconds, limits)
    except (BackendError, ValueError) as error:
        print(error)
        return 1


def _reset(path: Path | None) -> int:
    from .._loader import native

    name = native.gpu_name() if native.on_cuda() else ""
    removed = bool(path and name and limits_file.remove(path, name))
    print(f"the stored results of {name} are deleted" if removed else "no stored results of this GPU")
    return 0


def _calibrate(seconds: float, path: Path | None) -> int:
    from .calibrate import calibrate

    print(render_calibration(calibrate(seconds=seconds, progress=bar(sys.stderr), path=path)))
    return 0


def _tune(args: argparse.Namespace, path: Path | None) -> int:
    import mlx.core as mx

    from .._loader import native
    from .._operations import OPERATIONS
    from .tune import tune

    engine = native.engine(mx.default_stream(mx.gpu)) if native.on_cuda() else "MLX offers no CUDA GPU here"
    if isinstance(engine, str):
        print(engine)
        return 1
    before = dict(tuned_file.found(engine.module))
    with tune(path=path) as tuning:
        for m, n, k in args.sizes:
            x, w, bias = (mx.random.normal(shape).astype(getattr(mx, args.dtype)) for shape in ((m, k), (n, k), (n,)))
            mx.eval(OPERATIONS["linear"](x, w, bias if args.bias else None, activation=args.activation, stream=mx.gpu))
        print(render((key, each) for key, each in tuning.matmuls.items() if before.get(key) != each))
    return 0
