"""``python -m mlx_cuda``."""

from __future__ import annotations

import argparse
import sys

from . import _doctor, _run
from ._tuning import command
from ._version import __version__


def main(argv: list[str] | None = None) -> int:
    """Run a command and return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m mlx_cuda", description="CUDA kernels for MLX.")
    parser.add_argument("--version", action="version", version=f"mlx-cuda {__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _doctor.add_to(subparsers)
    command.add_to(subparsers)
    _run.add_to(subparsers)
    args = parser.parse_args(argv)
    return int(args.run(args))


if __name__ == "__main__":
    sys.exit(main())
