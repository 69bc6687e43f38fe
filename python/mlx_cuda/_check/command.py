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
        description="Run a model of mlx-lm with and without mlx_cuda.patch(), in separate processes. Compare perplexity, greedy tokens, "
        "speed and memory, distinguish rounding from errors by the same model in fp32, and print which kernels ran. Nothing else should "
        "run on the GPU.",
        epilog="Exit codes: 0 no result is wrong, 1 a result is wrong, 2 usage error, or the model cannot be loaded.",
    )
    parser.add_argument("model", metavar="MODEL", help="a model folder, or a name on Hugging Face, as mlx-lm loads it")
    parser.add_argument("--quick", action="store_true", help="use shorter texts and fewer prompts, and time each speed once")
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the results as a table or JSON; return 1 if one is wrong."""
    try:
        found = check(args.model, quick=args.quick, progress=bar(sys.stderr))
    except (ImportError, ValueError, RuntimeError) as error:
        print(str(error).removeprefix("[check] "), file=sys.stderr)
        return 2
    print(show.as_json(found) if args.json else show.render(found))
    return int(not found.ok)
