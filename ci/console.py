"""Common parts of the commands: output, and options of several."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .matrix import load

if TYPE_CHECKING:
    from rich.table import Table


def say(message: str) -> None:
    """Tell what is going on, beside the result on stdout."""
    print(message, file=sys.stderr, flush=True)


def visible(text: str) -> str:
    """Text of a stranger's, with control characters and marks that turn the text around as escapes."""
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


def described(name: str, text: str | None) -> tuple[str, str]:
    """A command's docstring: its first line, for a list of commands, and the rest."""
    about, _, details = (text or "").replace("``", "").partition("\n")
    return about.removeprefix(f"python -m ci {name}: ").rstrip("."), details


def add_command(
    subparsers: Any, name: str, text: str | None, run: Callable[[argparse.Namespace], int] | None, *, listed: bool = True
) -> argparse.ArgumentParser:
    """A command whose help is a docstring. `listed`: by argparse, which knows one list alone."""
    about, details = described(name, text)
    shown = {"help": about} if listed else {}
    parser: argparse.ArgumentParser = subparsers.add_parser(name, description=f"{about[0].upper()}{about[1:]}. {details}", **shown)
    parser.set_defaults(run=run)
    return parser


def add_platform(parser: argparse.ArgumentParser, what: str = "the platform") -> None:
    parser.add_argument("--platform", metavar="PLATFORM", help=f"{what}: {', '.join(load().platforms)} (default: this machine's)")


def add_json(parser: argparse.ArgumentParser, what: str = "the result") -> None:
    parser.add_argument("--json", action="store_true", help=f"print {what} as JSON")
