"""``python -m ci report``: one page that shows what is in the wheels of a release, and what changed since another."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import EnvironmentProblem

if TYPE_CHECKING:
    import argparse


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
    add("--policy", default="mlx-cuda", help="what the wheels must be: %(default)s (default), or a file of ci/audit/policies")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from .model import make
    from .page import render

    write(args.output, render(make(args.wheels, against=args.against, policy=args.policy)))
    print(args.output)
    return 0


def write(path: Path, text: str) -> None:
    """Write beside, then rename: nobody sees half a page, and a failure leaves an older page as it was."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            part.write_text(text, "utf-8", newline="\n")
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)
    except OSError as error:
        raise EnvironmentProblem(f"cannot write {path}: {error.strerror}", cure="give another file with -o") from error
