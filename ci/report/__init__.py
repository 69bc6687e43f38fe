"""``python -m ci report``: one page that shows what is in the wheels of a release, and what changed since another."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ..files import whole


def add_parser(subparsers: Any) -> None:
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "report",
        help="one page that shows what is in the wheels",
        description="Write one self-contained HTML page about the wheels of a release: GPU architectures, sizes, libraries, audit, change.",
        epilog="The page is written whatever the audit finds; python -m ci audit is the gate. The same wheels give the same bytes.",
    )
    add = parser.add_argument
    add("wheels", metavar="WHEEL", nargs="+", type=Path, help="a finished (repaired) wheel")
    add("-o", "--output", type=Path, default=Path("report.html"), metavar="FILE", help="the page to write (default: %(default)s)")
    add("--against", metavar="WHEEL", nargs="+", type=Path, default=[], help="wheels of an older release, to show what changed")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from .model import make
    from .page import render

    page = render(make(args.wheels, against=args.against))
    with whole(args.output, cure="give another file with -o") as part:
        part.write_text(page, "utf-8", newline="\n")
    print(args.output)
    return 0
