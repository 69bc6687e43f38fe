"""``python -m ci``: the command line of the wheel factory."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from . import console
from .errors import ending

# The module of each command, in the order in which a wheel flows. Its docstring is the help, `add_arguments(parser)` adds the arguments
# or commands of its own, and `run`, or what those set, is a function (Namespace) -> exit code.
COMMANDS = {
    "matrix": "matrix.jobs",
    "toolkit": "toolkit.cli",
    "device": "device",
    "prompt": "build.prompt",
    "build": "build.build",
    "repair": "repair",
    "audit": "audit",
    "wheel": "wheel",
    "load": "trial.load",
    "origin": "trial.origin",
    "try": "trial.trial",
    "release": "release",
    "nightly": "nightly",
    "report": "report",
    "summary": "report.summary",
    "container": "maintain.container",
    "reproduce": "maintain.reproduce",
    "bump": "maintain.bump",
    "prerelease": "maintain.prerelease",
    "pins": "maintain.pins",
    "resources": "maintain.resources",
    "variants": "maintain.variants",
}


class OneLineEach(argparse.HelpFormatter):
    """Wide enough for a command's line; argparse leaves the indentation of commands out of its reckoning."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=16, width=100)
        self._action_max_length = 14


def make_parser(only: str | None = None) -> argparse.ArgumentParser:
    """The parser of all commands, or of one, whose module alone is imported: what publishes runs next to nothing else."""
    parser = argparse.ArgumentParser(
        prog="python -m ci",
        description="Build, repair and prove the wheels of mlx-cuda.",
        epilog="Exit codes: 0 ok, 1 the check failed, 2 usage or environment.",
        formatter_class=OneLineEach,
    )
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, place in COMMANDS.items() if only is None else [(only, COMMANDS[only])]:
        module = importlib.import_module(f"{__package__}.{place}")
        module.add_arguments(console.add_command(subparsers, name, module.__doc__, getattr(module, "run", None)))
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    given = sys.argv[1:] if argv is None else argv

    def command() -> int:
        args = make_parser(next(filter(COMMANDS.__contains__, given[:1]), None)).parse_args(given)
        return int(args.run(args))

    return ending(command)


if __name__ == "__main__":
    sys.exit(main())
