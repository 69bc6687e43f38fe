"""``python -m ci release``: check, rehearse, publish and verify a release, so that it happens as a whole or can be completed.

docs/releasing.md says how a release goes and what each step proves.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import EnvironmentProblem

if TYPE_CHECKING:
    import argparse

INDEX_HELP = (
    "pypi, testpypi, a URL that takes uploads and has simple/ below it, "
    "or a name for which MLX_CUDA_INDEX_<NAME>_UPLOAD and _SIMPLE are set in the environment"
)


def add_parser(subparsers: Any) -> None:
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "release",
        help="check, rehearse, publish and verify a release",
        description="Check, rehearse, publish and verify a release. DIST is a folder with all wheels of one version.",
    )
    commands = parser.add_subparsers(dest="release_command", required=True, metavar="COMMAND")
    for add in (_add_check, _add_rehearse, _add_publish, _add_verify, _add_notes):
        add(commands)


def _parser(commands: Any, name: str, summary: str, description: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(name, help=summary, description=description)
    return parser


def _add_dist(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("dist", metavar="DIST", type=Path, help="the folder with all wheels of the release, and nothing else")


def _add_check(commands: Any) -> None:
    parser = _parser(
        commands,
        "check",
        "prove that a folder holds a release that may go out",
        "The set is complete, all of one fitting version, METADATA the same to the byte, twine check --strict, SBOM, audit; "
        "with --index also: the name is ours or free, the version is the newest, there is room, what each extra requires is published.",
    )
    _add_dist(parser)
    add = parser.add_argument
    add("--tag", help="the tag that is released, such as v0.32.4.1: the wheels must be of that version")
    add("--index", metavar="NAME", help=f"also ask this index: {INDEX_HELP}")
    add("--manifest", metavar="FILE", type=Path, help="where all is well, write the manifest that publish will hold the wheels to")
    add("--without-toolkits", action="store_true", help="leave out the audit's checks against the toolkit roots of every platform")
    add("--json", action="store_true", help="print files, sizes and findings as JSON")
    parser.set_defaults(run=_check)


def _add_publish(commands: Any) -> None:
    parser = _parser(
        commands,
        "publish",
        "upload a release, or complete one that was interrupted",
        "Upload the wheels with twine, the most used last. Files that are there with the same bytes are passed over; "
        "other bytes under one of the names stop everything before the first upload. Whatever interrupts it, run it again.",
    )
    _add_dist(parser)
    add = parser.add_argument
    add("--index", metavar="NAME", required=True, help=INDEX_HELP)
    add("--dry-run", action="store_true", help="do all but write the manifest and upload")
    add(
        "--manifest",
        metavar="FILE",
        type=Path,
        help="which bytes go: written before the first upload, held to if it exists (DIST/release.json)",
    )
    add("--attestations", action="store_true", help="sign each wheel with the identity of this workflow run and upload the attestations")
    add("--timeout", metavar="SECONDS", type=float, default=600, help="how long one upload may take (default: %(default)s)")
    parser.set_defaults(run=_publish)


def _add_verify(commands: Any) -> None:
    parser = _parser(
        commands,
        "verify",
        "install a published release in fresh environments",
        "Download every file and compare it with the manifest; then, in fresh environments, install each extra with uv and with pip, "
        "import it and run the doctor. Our own package comes from the named index only, everything else from the usual one.",
    )
    add = parser.add_argument
    add("version", metavar="VERSION", help="the version, such as 0.32.4.1")
    add("--index", metavar="NAME", required=True, help=INDEX_HELP)
    add("--manifest", metavar="FILE", type=Path, help="the manifest that publish wrote")
    add(
        "--python",
        action="append",
        default=[],
        metavar="PYTHON",
        help="a path or a version (repeatable; default: oldest and newest)",
    )
    add("--extra", action="append", default=[], metavar="EXTRA", help="only this extra (repeatable; default: all)")
    add("--install-all", action="store_true", help="install the CUDA extras too, 2 to 4 GB each, instead of only resolving them")
    add("--json", action="store_true", help="print what was done as JSON")
    parser.set_defaults(run=_verify)


def _add_rehearse(commands: Any) -> None:
    parser = _parser(
        commands,
        "rehearse",
        "publish to a real index server on this machine",
        "Start an index server on the loopback, publish the release there as it would be published, download it and compare. "
        "With --faults, also kill, tamper with and break the network in every way that is declared, and count the files lost.",
    )
    _add_dist(parser)
    parser.add_argument("--faults", action="store_true", help="run the fault table too (minutes)")
    parser.add_argument("--json", action="store_true", help="print the outcomes as JSON")
    parser.set_defaults(run=_rehearse)


def _add_notes(commands: Any) -> None:
    parser = _parser(
        commands,
        "notes",
        "checksums, SBOMs and notes for the release page",
        "Write SHA256SUMS (as sha256sum -c reads it), the wheels' SBOMs and notes.md, the changes since the tag before.",
    )
    _add_dist(parser)
    parser.add_argument("-o", "--output", metavar="FOLDER", type=Path, required=True, help="the folder for the files")
    parser.add_argument("--tag", help="the tag that is released (default: v<version>)")
    parser.set_defaults(run=_notes)


def _say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def _check(args: argparse.Namespace) -> int:
    from ..matrix import load
    from . import check, manifest
    from .dist import complete
    from .index import named

    dist = complete(args.dist, tag=args.tag)
    if args.manifest is not None and args.manifest.exists():
        manifest.agree(dist, args.manifest)
    findings = list(check.wheels(dist, checks=check.without_toolkits() if args.without_toolkits else None))
    room = None
    if args.index:
        from . import plan

        index = named(args.index)
        files = index.files(load().name)
        plan.make(dist, files)
        findings += [*check.against(dist, index, files), *check.dependencies(dist, _say)]
        room = check.forecast(dist, index, files)
    if args.manifest is not None and not findings:
        manifest.settle(dist, args.manifest)
    if args.json:
        facts = {"version": str(dist.version), "files": [asdict(entry) for entry in dist.entries], "forecast": room and asdict(room)}
        print(json.dumps({**facts, "findings": [asdict(finding) for finding in findings]}, indent=2))
        return bool(findings)
    check.report(findings)
    check.show(dist, room, args.index)
    return 0


def _publish(args: argparse.Namespace) -> int:
    from .dist import complete
    from .index import named
    from .publish import Limits, publish

    dist, index = complete(args.dist), named(args.index)
    done = publish(
        dist,
        index,
        manifest_path=args.manifest,
        dry_run=args.dry_run,
        attestations=args.attestations,
        limits=Limits(upload=args.timeout),
        say=_say,
    )
    sent = f"{len(done.missing)} of {len(dist.entries)} wheels"
    print(
        f"version {dist.version}: {sent} would be uploaded to {index.name}"
        if args.dry_run
        else f"version {dist.version} is whole on {index.name}: {sent} uploaded now"
    )
    return 0


def _verify(args: argparse.Namespace) -> int:
    from packaging.version import InvalidVersion, Version

    from .index import named
    from .verify import verify

    try:
        version = Version(args.version)
    except InvalidVersion as error:
        raise EnvironmentProblem(str(error), cure="give the version as it is in the file names, such as 0.32.4.1") from error
    done = verify(
        version,
        named(args.index),
        manifest_path=args.manifest,
        pythons=args.python,
        extras=args.extra,
        install_all=args.install_all,
        say=_say,
    )
    print(json.dumps([asdict(each) for each in done], indent=2) if args.json else "\n".join(map(str, done)))
    return 0


def _rehearse(args: argparse.Namespace) -> int:
    from .dist import complete
    from .rehearse import rehearse, show

    outcomes = rehearse(complete(args.dist), with_faults=args.faults, say=_say)
    if args.json:
        print(json.dumps([asdict(outcome) for outcome in outcomes], indent=2))
    else:
        show(outcomes)
    return not all(outcome.sound for outcome in outcomes)


def _notes(args: argparse.Namespace) -> int:
    from .dist import complete
    from .notes import write

    for path in write(complete(args.dist, tag=args.tag), args.output, tag=args.tag):
        print(path)
    return 0
