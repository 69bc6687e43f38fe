"""``python -m ci matrix``: the jobs that build and try the wheels, one for each platform, for the workflows.

What is built in a job is cibuildwheel's configuration (pyproject.toml).
"""

from __future__ import annotations

import argparse
import json

from .. import matrix


def jobs(declared: matrix.Matrix | None = None) -> list[dict[str, str]]:
    platforms = (declared or matrix.load()).platforms.values()
    return [{"platform": platform.name, "runner": platform.runner} for platform in platforms]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print the list of jobs as JSON")
    form.add_argument("--github", action="store_true", help="print the output `matrix` for GITHUB_OUTPUT, as strategy.matrix takes it")


def run(args: argparse.Namespace) -> int:
    if args.json:
        print(json.dumps(jobs(), indent=2))
    elif args.github:
        print(f"matrix={json.dumps({'include': jobs()}, separators=(',', ':'))}")
    else:
        print("\n".join(f"{job['platform']:15} {job['runner']}" for job in jobs()))
    return 0
