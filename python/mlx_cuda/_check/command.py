"""``python -m mlx_cuda check``."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from .._tuning.command import bar
from . import show
from .check import check


def add_to(subparsers: Any) -> None:
    """Add the command to the package's command line."""
    parser = subparsers.add_parser(
        "check",
        help="compare a model with and without patch(): results, speed, memory",
        description="Run a model of mlx-lm with and without mlx_cuda.patch(), in processes of their own, one after the other. Compare "
        "perplexity, greedy tokens, speed and memory, decide by float32 which differences are rounding, and say which kernels ran. "
        "Nothing else should run on the GPU meanwhile.",
        epilog="Exit codes: 0 nothing is wrong, 1 something is, 2 usage, or a model that cannot be loaded.",
    )
    parser.add_argument("model", metavar="MODEL", help="the folder of a model, or a name, as mlx-lm loads it")
    parser.add_argument("--quick", action="store_true", help="measure less")
    parser.add_argument("--json", action="store_true", help="print what is found as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the table, or the same for a machine; 1 when something is wrong."""
    try:
        found = check(args.model, quick=args.quick, progress=bar(sys.stderr))
    except (ImportError, ValueError, RuntimeError) as error:
        print(str(error).removeprefix("[check] "), file=sys.stderr)
        return 2
    print(show.as_json(found) if args.json else show.render(found))
    return int(not found.ok)
