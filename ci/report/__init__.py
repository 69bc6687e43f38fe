"""``python -m ci report``: write an HTML page about wheels.

The page needs no other file. It shows GPU architectures, sizes, libraries, audit results, and changes since another release. It is written
whatever the audit finds: to refuse a wheel, use python -m ci audit. The same wheels give the same bytes.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from ..files import whole


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("wheels", metavar="WHEEL", nargs="+", type=Path, help="a finished (repaired) wheel")
    add("-o", "--output", type=Path, default=Path("report.html"), metavar="FILE", help="the page to write (default: %(default)s)")
    add("--against", metavar="WHEEL", nargs="+", type=Path, default=[], help="wheels of an older release, to show what changed")


def run(args: argparse.Namespace) -> int:
    from .model import make
    from .page import render

    page = render(make(args.wheels, against=args.against))
    with whole(args.output, fix="give another file with -o") as part:
        part.write_text(page, "utf-8", newline="\n")
    print(args.output)
    return 0
