"""Output and options that several commands share."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from inspect import cleandoc
from typing import TYPE_CHECKING, Any

from .matrix import load

if TYPE_CHECKING:
    from rich.table import Table


def say(message: str) -> None:
    """Print progress to stderr; results go to stdout."""
    print(message, file=sys.stderr, flush=True)


def visible(text: str) -> str:
    """Untrusted text, with control characters and bidirectional marks as escapes."""
    return "".join(each if each.isprintable() else each.encode("unicode_escape", "backslashreplace").decode() for each in text)


def stage(name: str) -> None:
    """Begin a stage of a long command."""
    from rich.console import Console
    from rich.markup import escape

    Console(stderr=True).rule(f"[bold]{escape(name)}", align="left")


def table(*columns: str, title: str | None = None, **options: Any) -> Table:
    """An empty table in the style of all."""
    from rich.table import Table

    return Table(*columns, title=title, title_justify="left", title_style="bold", **options)


def show(table: Table) -> None:
    from rich.console import Console

    Console().print(table)


class Help(argparse.HelpFormatter):
    """Fills each paragraph of a text, where argparse would make one of all."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return "\n\n".join(super(Help, self)._fill_text(part, width, indent) for part in text.split("\n\n"))


def described(name: str, text: str | None) -> tuple[str, str, str]:
    """The parts of a command's docstring: its first line, its paragraphs, and its exit codes."""
    about, _, details = cleandoc(text or "").replace("``", "").partition("\n")
    details, _, codes = details.partition("\n\nExit codes: ")
    return about.removeprefix(f"python -m ci {name}: ").rstrip("."), details.strip(), f"Exit codes: {codes}" if codes else ""


def add_command(
    subparsers: Any, name: str, text: str | None, run: Callable[[argparse.Namespace], int] | None, *, listed: bool = True
) -> argparse.ArgumentParser:
    """Add a command whose help is a docstring. `listed`: argparse lists it, which can make one list only."""
    about, details, codes = described(name, text)
    shown: dict[str, Any] = {"help": about} if listed else {}
    shown |= {"description": f"{about[0].upper()}{about[1:]}.\n\n{details}", "epilog": codes or None}
    parser: argparse.ArgumentParser = subparsers.add_parser(name, formatter_class=Help, **shown)
    parser.set_defaults(run=run)
    return parser


class Architectures(argparse.Action):
    """The names of GPUs, separated by spaces or commas."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, _: str | None = None) -> None:
        names = [name for value in values for name in value.replace(";", ",").split(",") if name]
        if not names:
            parser.error(f"argument {'/'.join(self.option_strings)}: no GPU is named; use numbers such as 80 90, or declared")
        setattr(namespace, self.dest, names)


def add_platform(parser: argparse.ArgumentParser, what: str = "the platform") -> None:
    parser.add_argument("--platform", metavar="PLATFORM", help=f"{what}: {', '.join(load().platforms)} (default: this machine's)")


def add_json(parser: argparse.ArgumentParser, what: str = "the result") -> None:
    parser.add_argument("--json", action="store_true", help=f"print {what} as JSON")
