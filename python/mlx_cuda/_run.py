"""``python -m mlx_cuda run``: run a Python program after :func:`patch`."""

from __future__ import annotations

import argparse
import importlib.util
import runpy
import sys
import traceback
from pathlib import Path
from typing import Any


def add_to(subparsers: Any) -> None:
    """Add the command to the package's command line."""
    parser = subparsers.add_parser(
        "run",
        help="run a module or script after patch()",
        usage="python -m mlx_cuda run [-h] [--kv-bits N] [--batch-invariant] (-m MODULE | SCRIPT) [ARGUMENT ...]",
        description="Call mlx_cuda.patch(), and then run a Python module or script.",
        epilog="Example: python -m mlx_cuda run -m mlx_lm server --model NAME. Exit codes: those of the program; 2 usage error.",
    )
    parser.add_argument("-m", dest="module", action="store_true", help="run a module, as python -m does")
    parser.add_argument("--kv-bits", type=int, choices=(4, 8), help="quantize the KV cache of batches, such as those of mlx-lm's server")
    parser.add_argument(
        "--batch-invariant",
        action="store_const",
        const=True,
        help="make results independent of the batch, or raise an error (docs/guides/batch-invariance.md)",
    )
    parser.add_argument("words", nargs=argparse.REMAINDER, metavar="MODULE or SCRIPT and its arguments", help="the program to run")
    parser.set_defaults(run=lambda args: run(parser, args))


def run(parser: argparse.ArgumentParser, args: argparse.Namespace) -> int:
    words = args.words[1:] if args.words[:1] == ["--"] else args.words
    if not words:
        parser.error("name a module after -m, or a script")
    name, *_ = words
    if not args.module and not Path(name).is_file():
        parser.error(f"there is no script {name}" + (f"; for the module: -m {name}" if _is_module(name) else ""))
    package = importlib.import_module(str(__package__))
    try:
        package.patch(kv_bits=args.kv_bits, batch_invariant=args.batch_invariant)  # imports mlx.core, which --help must not
    except ValueError as error:
        parser.error(str(error))
    sys.argv = list(words)
    # As the interpreter does, which does not change the path with -I and -P.
    if not getattr(sys.flags, "safe_path", sys.flags.isolated):
        sys.path[0] = str(Path.cwd() if args.module else Path(name).resolve().parent)
    return _module(name) if args.module else _script(name)


def _script(name: str) -> int:
    runpy.run_path(name, run_name="__main__")
    return 0


def _module(name: str) -> int:
    try:
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    except ImportError as error:
        *_, raised_in = traceback.walk_tb(error.__traceback__)
        if raised_in[0].f_globals.get("__name__") != "runpy":  # by the program
            raise
        print(f"{sys.executable}: {error}", file=sys.stderr)
        return 1
    return 0


def _is_module(name: str) -> bool:
    package = name.partition(".")[0]
    return package.isidentifier() and importlib.util.find_spec(package) is not None
