"""``python -m ci matrix``: the jobs that build and try the wheels, for the workflows: one for each platform, all its builds in it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from . import matrix

if TYPE_CHECKING:
    import argparse


@dataclass(frozen=True)
class Job:
    """A platform, the runner that has it, and what cibuildwheel builds there (its CIBW_BUILD)."""

    platform: str
    runner: str
    build: str


def jobs(declared: matrix.Matrix | None = None) -> list[Job]:
    declared = declared or matrix.load()
    return [
        Job(platform.name, platform.runner, " ".join(identifier(build, platform) for build in declared.builds))
        for platform in declared.platforms.values()
    ]


def identifier(build: matrix.Build, platform: matrix.Platform) -> str:
    """What cibuildwheel calls a build on a platform, such as ``cp310-manylinux_x86_64``."""
    return f"{build.identifier}-{'win' if platform.system == 'windows' else 'manylinux'}_{platform.machine}"


def add_parser(subparsers: Any) -> None:
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "matrix",
        help="the jobs that build the wheels, for the workflows",
        description="Print the jobs of the declared matrix: platform, runner, and the builds as cibuildwheel names them.",
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print the list of jobs as JSON")
    form.add_argument("--github", action="store_true", help='print the output "matrix" for GITHUB_OUTPUT, as strategy.matrix takes it')
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    rows = [asdict(job) for job in jobs()]
    if args.json:
        print(json.dumps(rows, indent=2))
    elif args.github:
        print(f"matrix={json.dumps({'include': rows}, separators=(',', ':'))}")
    else:
        for row in rows:
            print(f"{row['platform']:15} {row['runner']:18} {row['build']}")
    return 0
