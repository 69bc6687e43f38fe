"""``python -m ci nightly``: write the site of the nightly index, a static package index.

The site has the new wheels and those of the nights before that are on the published site, except the oldest. It consists of files only, so
any web server can serve it. docs/factory/nightly.md shows how to install from it. The nightly index does not exist yet.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from ..build.description import address
from ..errors import CheckFailed, EnvironmentProblem

if TYPE_CHECKING:
    from .wheels import Nightly

KEEP = 7  # nights
LIMIT_MIB = 900  # of all wheels: GitHub Pages takes a site of 1 GB


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("dist", metavar="DIST", type=Path, help="directory with the new wheels, of all platforms or some")
    add("-o", "--output", metavar="FOLDER", type=Path, required=True, help="output directory, which must not exist")
    add("--docs", action="store_true", help="link to the documentation in docs/: build it afterwards, with nox -s docs -- FOLDER/docs")
    url = os.environ.get("MLX_CUDA_NIGHTLY") or pages()
    add("--url", default=url, help="URL of the site (default: MLX_CUDA_NIGHTLY, or this repository's Pages)")
    add("--history", choices=["keep", "new"], default="keep", help="new: start without the wheels of the published site (default: keep)")
    add("--keep", metavar="N", type=int, default=KEEP, help="number of nights in the site (default: %(default)s)")


def pages() -> str:
    """The address of this repository's GitHub Pages."""
    owner, name = urlsplit(address()).path.strip("/").split("/")
    return f"https://{owner}.github.io/{name}/"


def tonight(dist: Path, folder: Path) -> list[Nightly]:
    """Copy the new wheels into the folder; CheckFailed if one is not a nightly wheel."""
    from .wheels import examine

    paths = sorted(dist.glob("*.whl"))
    if not paths:
        raise EnvironmentProblem(f"there is no wheel in {dist}", fix="give the directory with the new wheels")
    found = [examine(Path(shutil.copyfile(path, folder / path.name))) for path in paths]
    if len(versions := sorted({each.version for each in found})) > 1:
        raise CheckFailed(f"{dist} has wheels of {', '.join(map(str, versions))}\n  fix: give wheels of one version")
    if sum(each.size for each in found) > LIMIT_MIB << 20:
        raise CheckFailed(f"the new wheels alone have more than {LIMIT_MIB} MiB\n  fix: make them smaller, or leave some out")
    return found


def run(args: argparse.Namespace) -> int:
    from . import previous, site

    output: Path = args.output
    if args.keep < 1:
        raise EnvironmentProblem(f"--keep {args.keep} leaves nothing", fix="give 1 or more")
    if output.exists():
        raise EnvironmentProblem(f"{output} exists already", fix="remove it, or give another directory")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=output.parent, prefix=".partial-") as name:
            made = Path(name) / "site"
            wheels = site.wheels(made)
            wheels.mkdir(parents=True)
            files = tonight(args.dist, wheels)
            if args.history == "keep":
                space = (LIMIT_MIB << 20) - sum(each.size for each in files)
                files += previous.nights(args.url, wheels, before=files[0].version, most=args.keep - 1, space=space)
            site.write(made, files, args.url, docs=args.docs)
            made.rename(output)
    except OSError as error:
        raise EnvironmentProblem(f"cannot write {output}: {error.strerror or error}", fix="free space, or give another folder") from error
    for version in sorted({each.version for each in files}, reverse=True):
        print(f"{version}: {sum(each.version == version for each in files)} wheels")
    return 0
