"""``python -m ci prerelease``: print the next pre-release of MLX, for the workflows.

That is the newest version after the pinned one that all of MLX's packages have for all platforms, if it is a pre-release. To test it, pin
it in a checkout with `python -m ci bump --mlx VERSION`.
"""

from __future__ import annotations

import argparse

from packaging.version import Version

from .. import matrix
from ..console import say
from . import bump


def coming(pinned: str, versions: set[Version]) -> str:
    """The newest version where it is a pre-release, "" where the pinned one or another release is the newest."""
    best = max({*versions, Version(pinned)})
    return str(best) if best.is_prerelease and best != Version(pinned) else ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--github", action="store_true", help="print the output `mlx` for GITHUB_OUTPUT, empty if there is no pre-release")


def run(args: argparse.Namespace) -> int:
    old, packages = bump.pinned(matrix.REPOSITORY)
    mlx = coming(old, bump.common(packages, matrix.load().platforms, bump.on_index))
    if not mlx:
        say(f"no pre-release of mlx is newer than {old} and than any release: nothing to build")
    if args.github or mlx:
        print(f"mlx={mlx}" if args.github else mlx)
    return 0
