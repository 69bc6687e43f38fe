"""``python -m ci release``: check, publish and verify a release.

So that it happens as a whole or can be completed: docs/releasing.md says how a release goes and what each step proves. DIST is a folder
with all wheels of one version.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from ..console import add_command, add_json
from ..errors import EnvironmentProblem

INDEX_HELP = (
    "pypi, testpypi, a URL that takes uploads and has simple/ below it, "
    "or a name for which MLX_CUDA_INDEX_<NAME>_UPLOAD and _SIMPLE are set in the environment"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(dest="release_command", required=True, metavar="COMMAND")
    check, publish, verify, notes = (
        add_command(commands, run.__name__[1:], run.__doc__, run) for run in (_check, _publish, _verify, _notes)
    )
    for each in (check, publish, notes):
        each.add_argument("dist", metavar="DIST", type=Path, help="the folder with all wheels of the release, and nothing else")

    add = check.add_argument
    add("--tag", help="the tag that is released, such as v0.32.4.1: the wheels must be of that version")
    add("--index", metavar="NAME", help=f"also ask this index: {INDEX_HELP}")
    add("--manifest", metavar="FILE", type=Path, help="where all is well, write the manifest that publish will hold the wheels to")
    add("--without-toolkits", action="store_true", help="leave out the audit's checks against the toolkit roots of every platform")

    add = publish.add_argument
    add("--index", metavar="NAME", required=True, help=INDEX_HELP)
    add("--dry-run", action="store_true", help="do all but write the manifest and upload")
    manifest = "which bytes go: written before the first upload, held to if it exists (DIST/release.json)"
    add("--manifest", metavar="FILE", type=Path, help=manifest)
    add("--attestations", action="store_true", help="sign each wheel with the identity of this workflow run and upload the attestations")
    add("--timeout", metavar="SECONDS", type=float, default=600, help="how long one upload may take (default: %(default)s)")

    add = verify.add_argument
    add("version", metavar="VERSION", help="the version, such as 0.32.4.1")
    add("--index", metavar="NAME", required=True, help=INDEX_HELP)
    add("--manifest", metavar="FILE", type=Path, help="the manifest that publish wrote")
    add("--python", action="append", default=[], help="a path or a version (repeatable; default: the oldest supported, and this one)")
    add("--extra", action="append", default=[], help="only this extra (repeatable; default: all)")
    add("--install-all", action="store_true", help="install the CUDA extras too, 2 to 4 GB each, instead of only resolving them")
    add_json(verify, "what was done")

    add = notes.add_argument
    add("-o", "--output", metavar="FOLDER", type=Path, required=True, help="the folder for the files")
    add("--tag", help="the tag that is released: the wheels must be of that version")


def _check(args: argparse.Namespace) -> int:
    """Prove that a folder holds a release that may go out.

    The set is complete, all of one fitting version, METADATA the same to the byte, twine check --strict, SBOM, audit; with --index also:
    the name is ours or free, the version is the newest, what each extra requires is published.
    """
    from ..matrix import load
    from . import check
    from .dist import agree, complete, settle
    from .index import named, plan

    dist = complete(args.dist, tag=args.tag)
    if args.manifest is not None and args.manifest.exists():
        agree(dist, args.manifest)
    findings = [*check.twine(dist), *check.wheels(dist, checks=check.WITHOUT_TOOLKITS if args.without_toolkits else None)]
    if args.index:
        index = named(args.index)
        files = index.files(load().name)
        plan(dist, files)  # what is there already has to be the same
        findings += [*check.against(dist, index, files), *check.dependencies(dist)]
    check.report(findings)
    if args.manifest is not None:
        settle(dist, args.manifest)
    check.show(dist)
    return 0


def _publish(args: argparse.Namespace) -> int:
    """Upload a release, or complete one that was interrupted.

    twine uploads the wheels, the most used last. Files that are there with the same bytes are passed over; other bytes under one of the
    names stop everything before the first upload. Whatever interrupts it, run it again.
    """
    from .dist import complete
    from .index import named
    from .publish import Limits, publish

    dist, index, limits = complete(args.dist), named(args.index), Limits(upload=args.timeout)
    done = publish(dist, index, manifest_path=args.manifest, dry_run=args.dry_run, attestations=args.attestations, limits=limits)
    sent = f"{len(done.missing)} of {len(dist.entries)} wheels"
    if args.dry_run:
        print(f"version {dist.version}: {sent} would be uploaded to {index.name}")
    else:
        print(f"version {dist.version} is whole on {index.name}: {sent} uploaded now")
    return 0


def _verify(args: argparse.Namespace) -> int:
    """Install a published release in fresh environments.

    Download every file and compare it with the manifest; then, in fresh environments, install each extra with uv and with pip, import it
    and run the doctor. Our own package comes from the named index only, everything else from the usual one.
    """
    from packaging.version import InvalidVersion, Version

    from .index import named
    from .verify import verify

    try:
        version = Version(args.version)
    except InvalidVersion as error:
        raise EnvironmentProblem(str(error), cure="give the version as it is in the file names, such as 0.32.4.1") from error
    chosen = {"pythons": args.python, "extras": args.extra, "install_all": args.install_all}
    done = verify(version, named(args.index), manifest_path=args.manifest, **chosen)
    print(json.dumps([asdict(each) for each in done], indent=2) if args.json else "\n".join(map(str, done)))
    return 0


def _notes(args: argparse.Namespace) -> int:
    """Write checksums, SBOMs and notes for the release page.

    SHA256SUMS (as sha256sum -c reads it), the wheels' SBOMs, and notes.md, which gh release create adds the changes to.
    """
    from .dist import complete
    from .notes import write

    for path in write(complete(args.dist, tag=args.tag), args.output):
        print(path)
    return 0
