"""``python -m ci report``: one page that shows what is in the wheels.

A self-contained HTML page about the wheels of a release: GPU architectures, sizes, libraries, audit, and what changed since another. It is
written whatever the audit finds; python -m ci audit is the gate. The same wheels give the same bytes.
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
