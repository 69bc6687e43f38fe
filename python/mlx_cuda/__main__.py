"""``python -m mlx_cuda``."""

from __future__ import annotations

import argparse
import io
import os
import sys

from . import _doctor, _explain_command, _run
from ._check import command as check
from ._tuning import command as tune
from ._version import __version__


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    parser = argparse.ArgumentParser(
        prog="python -m mlx_cuda", description="Run MLX programs with CUDA kernels, and check the installation and the results."
    )
    parser.add_argument("--version", action="version", version=f"mlx-cuda {__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _doctor.add_to(subparsers)
    check.add_to(subparsers)
    _explain_command.add_to(subparsers)
    tune.add_to(subparsers)
    _run.add_to(subparsers)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run a command and return its exit code."""
    args = make_parser().parse_args(argv)
    return int(args.run(args))


def _to_a_reader(argv: list[str]) -> int:
    """Run a command whose reader may stop early, as head does, without a traceback."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # whose code page on Windows may lack characters of a path
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        try:
            return main(argv)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more at its end
        return 1


if __name__ == "__main__":
    command_line = sys.argv[1:]
    # A program that is run has errors of its own.
    sys.exit(main(command_line) if command_line[:1] == ["run"] else _to_a_reader(command_line))
