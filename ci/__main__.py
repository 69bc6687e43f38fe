"""``python -m ci``: the command line of the wheel factory."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from . import console
from .errors import ending
from .matrix import load

# The module of each command, by task. Its docstring is the help, `add_arguments(parser)` adds its arguments or commands, and `run`, or the
# function that a command sets, is (Namespace) -> exit code.
GROUPS = {
    "build": {
        "wheel": "wheel",
        "toolkit": "toolkit.cli",
        "device": "device",
        "build": "build.build",
        "repair": "repair",
        "audit": "audit",
        "container": "maintain.container",
        "report": "report",
    },
    "try": {"try": "trial.trial", "load": "trial.load"},
    "release": {"release": "release"},
    "maintain": {
        "bump": "maintain.bump",
        "pins": "maintain.pins",
        "reproduce": "maintain.reproduce",
        "resources": "maintain.resources",
        "variants": "maintain.variants",
    },
    "for workflows": {
        "matrix": "matrix.jobs",
        "msvc-env": "build.msvc_env",
        "origin": "trial.origin",
        "summary": "report.summary",
        "nightly": "nightly",
        "prerelease": "maintain.prerelease",
    },
}
COMMANDS = {name: place for group in GROUPS.values() for name, place in group.items()}


def make_parser(only: str | None = None) -> argparse.ArgumentParser:
    """The parser of all commands, or of one. Then only its module is imported, so that the job that publishes runs little other code."""
    parser = argparse.ArgumentParser(
        prog="python -m ci",
        usage="python -m ci COMMAND ...",
        description=f"Build, repair, check and publish the wheels of {load().name}.",
        epilog="python -m ci COMMAND --help lists the options of a command.\n"
        "Exit codes: 0 success, 1 a check failed, 2 usage or environment.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", prog=parser.prog, help=argparse.SUPPRESS)
    for title, group in GROUPS.items():
        lines = []
        for name, place in group.items():
            if only in {None, name}:
                module = importlib.import_module(f"{__package__}.{place}")
                module.add_arguments(console.add_command(commands, name, module.__doc__, getattr(module, "run", None), listed=False))
                lines.append(f"{name:<11} {console.described(name, module.__doc__)[0]}")
        parser.add_argument_group(title, "\n".join(lines))
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    given = sys.argv[1:] if argv is None else argv

    def command() -> int:
        args = make_parser(given[0] if given and given[0] in COMMANDS else None).parse_args(given)
        return int(args.run(args))

    return ending(command)


if __name__ == "__main__":
    sys.exit(main())
