"""``python -m ci``: the command line of the wheel factory."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from .errors import ending

# One module per command, in the order in which a wheel flows.
# Each offers `add_parser(subparsers)`, which sets the default `run`, a function (Namespace) -> exit code.
COMMANDS = (
    "matrix.jobs",
    "toolkit",
    "device",
    "build.build",
    "repair",
    "audit",
    "wheel",
    "trial.load",
    "trial.origin",
    "trial.trial",
    "release",
    "report",
    "report.summary",
    "maintain.container",
    "maintain.reproduce",
    "maintain.bump",
)


class OneLineEach(argparse.HelpFormatter):
    """Wide enough for a command's line; argparse leaves the indentation of commands out of its reckoning."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=16, width=100)
        self._action_max_length = 14


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m ci",
        description="Build, repair and prove the wheels of mlx-cuda.",
        epilog="Exit codes: 0 ok, 1 the check failed, 2 usage or environment.",
        formatter_class=OneLineEach,
    )
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in COMMANDS:
        importlib.import_module(f"{__package__}.{command}").add_parser(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    args = make_parser().parse_args(argv)
    return ending(lambda: args.run(args))


if __name__ == "__main__":
    sys.exit(main())
