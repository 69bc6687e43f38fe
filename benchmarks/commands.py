"""``python -m benchmarks.commands`` fills docs/reference/cli.md from the parsers of ``python -m mlx_cuda`` and ``python -m ci``."""

from __future__ import annotations

import argparse
import re
from itertools import groupby
from pathlib import Path
from textwrap import dedent, fill
from typing import TYPE_CHECKING

from .cells import WIDTH, markdown
from .table import fill_blocks

if TYPE_CHECKING:
    from collections.abc import Iterator

DOCUMENT = Path(__file__).parents[1] / "docs" / "reference" / "cli.md"


def blocks() -> dict[str, str]:
    """Return the reference of each program."""
    from mlx_cuda.__main__ import make_parser as package

    from ci.__main__ import make_parser as factory

    return {name: "\n\n".join(_sections(parser)) for name, parser in (("mlx_cuda", package()), ("ci", factory()))}


def _sections(parser: argparse.ArgumentParser) -> Iterator[str]:
    """Return a section for each command that has no commands of its own: what it does, its arguments, its exit codes."""
    commands = next((action for action in parser._actions if isinstance(action, argparse._SubParsersAction)), None)
    if commands:
        for each in dict.fromkeys(commands.choices.values()):
            yield from _sections(each)
        return
    rows = [_row(parser, action) for action in parser._actions if action.dest != "help"]
    about, epilog = (_paragraphs(parser, text or "") for text in (parser.description, parser.epilog))
    yield "\n\n".join(filter(None, [f"### `{parser.prog}`", about, markdown([["argument", "meaning"], *rows]) if rows else "", epilog]))


def _row(parser: argparse.ArgumentParser, action: argparse.Action) -> list[str]:
    """Return an argument's names with its value, as ``--output``, ``-o FOLDER``, and its help."""
    value = action.metavar or (f"{{{','.join(map(str, action.choices))}}}" if action.choices else action.dest.upper())
    value = f"{value}{' …' if action.nargs in {'*', '+', argparse.REMAINDER} else ''}"
    named = [*action.option_strings] or [value]
    if action.option_strings and action.nargs != 0:
        named[-1] += f" {value}"
    return [", ".join(f"`{each}`" for each in named), _text(parser._get_formatter()._expand_help(action) if action.help else "")]


def _paragraphs(parser: argparse.ArgumentParser, text: str) -> str:
    """Return a description as Markdown; indented lines of one that is printed as written become code blocks."""
    parts, raw = [], parser.formatter_class is argparse.RawDescriptionHelpFormatter
    lines = (text if raw else "\n\n".join(" ".join(part.split()) for part in text.split("\n\n"))).splitlines()
    for indented, each in groupby(lines, lambda line: raw and line.startswith("  ")):
        block = "\n".join(each)
        filled = [fill(_text(each), WIDTH, break_on_hyphens=False) for each in block.split("\n\n") if each.strip()]
        parts += [f"```text\n{dedent(block)}\n```"] if indented else filled
    return "\n\n".join(parts)


def _text(text: str | None) -> str:
    """Return a help text as Markdown."""
    return re.sub(r"([*<|])", r"\\\1", " ".join((text or "").split()))


def main() -> None:
    DOCUMENT.write_text(fill_blocks(DOCUMENT.read_text("utf-8"), blocks()), "utf-8")


if __name__ == "__main__":
    main()
