"""The page itself: one HTML file that needs no network and runs no script."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from markupsafe import Markup, escape

from .. import console
from .contents import KINDS, together
from .model import Report

TEMPLATES = Path(__file__).parent / "templates"
MINUS = "\N{MINUS SIGN}"
UNITS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))


def render(report: Report) -> str:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=visible,
    )
    environment.filters.update(size=size, signed=signed, ratio=ratio, prose=prose, percent=percent)
    environment.globals.update(kinds=KINDS, together=together)
    page = environment.get_template("page.html").render(report=report)
    return re.sub(r"\n\s*\n+", "\n", page) + "\n"


def visible(value: Any) -> Any:
    """Text of a wheel is shown unchanged."""
    return console.visible(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def size(number: int) -> str:
    for unit, name in UNITS:
        if abs(number) >= unit:
            value = number / unit
            return f"{value:.{2 if abs(value) < 10 else 1 if abs(value) < 100 else 0}f} {name}"
    return f"{number} B"


def signed(number: int) -> str:
    return f"{'+' if number > 0 else MINUS if number < 0 else '±'}{size(abs(number))}"


def ratio(percent: float) -> str:
    """A change in percent, as a factor where percent would be a long number."""
    return f"\N{MULTIPLICATION SIGN} {1 + percent / 100:.0f}" if percent >= 1000 else f"{percent:+.1f} %".replace("-", MINUS)


def percent(part: float, whole: float) -> str:
    """A share for CSS, without the last digits that a computer might round otherwise."""
    return f"{100 * part / (whole or 1):.2f}%"


def prose(text: str) -> Markup:
    """A sentence of the documentation as HTML: code, emphasis, and links as their text."""
    text = re.sub(r"\[([^\]]+)\]\([^)]*\)", r"\1", visible(text))
    html = re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text)))
    return Markup(re.sub(r"\*(\w+)\*", r"<em>\1</em>", html))  # noqa: S704  (escaped above)
