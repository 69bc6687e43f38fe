"""SVGs that read on light and dark pages: what the pictures that are written by hand have in common."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape


def text(kind: str, x: float, y: float, said: str) -> str:
    return f'<text class="{kind}" x="{x:g}" y="{y:g}">{escape(said)}</text>'


def picture(size: str, title: str, style: str, parts: Iterable[str]) -> str:
    """Of the width and height that ``size`` has."""
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size}" role="img" aria-labelledby="title">'
    lines = (f'<title id="title">{title}</title>', f"<style>{style}  </style>", *parts)
    return "\n".join((head, *(f"  {line}" for line in lines), "</svg>\n"))
