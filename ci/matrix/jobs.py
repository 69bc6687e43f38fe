"""``python -m ci matrix``: the jobs that build and try the wheels, for the workflows: one for each platform.

What is built in a job is cibuildwheel's configuration (pyproject.toml).
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from .. import matrix


def jobs(declared: matrix.Matrix | None = None) -> list[dict[str, str]]:
    platforms = (declared or matrix.load()).platforms.values()
    return [{"platform": platform.name, "runner": platform.runner} for platform in platforms]


def add_parser(subparsers: Any) -> None:
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "matrix",
        help="the jobs that build the wheels, for the workflows",
        description="Print the platforms that wheels are built for, each with the label of its runner.",
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print the list of jobs as JSON")
    form.add_argument("--github", action="store_true", help="print the output `matrix` for GITHUB_OUTPUT, as strategy.matrix takes it")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if args.json:
        print(json.dumps(jobs(), indent=2))
    elif args.github:
        print(f"matrix={json.dumps({'include': jobs()}, separators=(',', ':'))}")
    else:
        print("\n".join(f"{job['platform']:15} {job['runner']}" for job in jobs()))
    return 0
