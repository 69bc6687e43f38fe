"""``python -m ci release``: prepare, check, publish and verify a release.

DIST is a directory with all wheels of one version. An interrupted upload can be continued. docs/factory/releasing.md describes the steps.
"""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from ..console import add_command, add_json
from ..matrix import load

if TYPE_CHECKING:
    from packaging.version import Version

NONE = "none"  # no index
INDEX_HELP = (
    "pypi, testpypi, the base URL of an index (uploads go to the URL, the simple API is at simple/), "
    "or a name for which MLX_CUDA_INDEX_<NAME>_UPLOAD and _SIMPLE are set in the environment"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(required=True, metavar="COMMAND", title="commands")
    stamp, preflight, check, publish, verify, notes = (
        add_command(commands, run.__name__[1:], run.__doc__, run) for run in (_stamp, _preflight, _check, _publish, _verify, _notes)
    )
    for each in (check, publish, notes):
        each.add_argument("dist", metavar="DIST", type=Path, help="directory with all wheels of the release, and no other file")

    mlx, add = load().mlx, stamp.add_argument
    add("version", metavar="VERSION", type=_stamped, help=f"such as {mlx}.2, {mlx}.2rc1 or {mlx}.2.dev1; or dev, for a development version")
    add("--github", action="store_true", help="print it in the form of GITHUB_OUTPUT")

    add = preflight.add_argument
    add("--index", metavar="NAME", required=True, help=f"index that the release is for: none, {INDEX_HELP}")
    tag = os.environ.get("GITHUB_REF_NAME") if os.environ.get("GITHUB_REF_TYPE") == "tag" else None
    add("--tag", default=tag, help=f"tag of the release, such as v{mlx}.1 (default: the tag that the workflow runs for)")

    add = check.add_argument
    add("--index", metavar="NAME", default=NONE, help=f"also query this index: none (default), {INDEX_HELP}")
    add("--manifest", metavar="FILE", type=Path, help="on success, write the manifest that publish compares the wheels with")
    add("--github", action="store_true", help="print the SHA-256 of the manifest in the form of GITHUB_OUTPUT")
    add("--without-toolkits", action="store_true", help="skip the audit's checks that need the toolkit roots of every platform")

    add = publish.add_argument
    add("--index", metavar="NAME", required=True, help=INDEX_HELP)
    add("--dry-run", action="store_true", help="write no manifest and upload nothing")
    manifest = "manifest that check wrote (default: DIST/release.json, written before the first upload if it is missing)"
    add("--manifest", metavar="FILE", type=Path, help=manifest)
    add(
        "--sha256",
        metavar="DIGEST",
        help="SHA-256 of the manifest, as `ci release check` printed it; the manifest could be replaced together with the wheels",
    )
    add("--attestations", action="store_true", help="sign each wheel with the identity of this workflow run and upload the attestations")
    add("--timeout", metavar="SECONDS", type=float, default=600, help="time limit of one upload (default: %(default)s)")

    add = verify.add_argument
    add("version", metavar="VERSION", type=_version, help=f"the version, such as {mlx}.1")
    add("--index", metavar="NAME", required=True, help=INDEX_HELP)
    add("--manifest", metavar="FILE", type=Path, help="manifest that publish wrote")
    add("--python", action="append", help="a path or a version (repeatable; default: the oldest supported, and this one)")
    add("--extra", action="append", default=[], help="only this extra (repeatable; default: all)")
    add("--install-all", action="store_true", help="install the CUDA extras (2 to 4 GB each), instead of only resolving them")
    add_json(verify, "the results")

    add = notes.add_argument
    add("-o", "--output", metavar="FOLDER", type=Path, required=True, help="output directory")
    add("--github", action="store_true", help="print version, prerelease and latest in the form of GITHUB_OUTPUT")


def _stamped(text: str) -> Version | None:
    return None if text == "dev" else _version(text)


def _version(text: str) -> Version:
    from packaging.version import InvalidVersion, Version

    try:
        return Version(text)
    except InvalidVersion as error:
        raise argparse.ArgumentTypeError(f"{error}, expected one such as {load().mlx}.1") from error


def _stamp(args: argparse.Namespace) -> int:
    """Write a version into the checkout, and print it.

    Use it for a rehearsal, a nightly build or the next release. `dev` means <mlx>.<n>.dev<time of the commit in UTC>, where <n> is the
    number in the checkout, or the next one if that was released before this commit. The checkout must have all tags.
    """
    from ..matrix import REPOSITORY
    from .version import development, stamp

    version = args.version or development(REPOSITORY)
    stamp(REPOSITORY, version)
    print(f"{'version=' * args.github}{version}")
    return 0


def _preflight(args: argparse.Namespace) -> int:
    """Find what would stop a release, before anything is built.

    Reads the checkout: version, tag, MLX pin, changelog. Queries the index: whether the name belongs to this project, whether the version
    is new, and whether the requirements of the extras are available. Queries GitHub with gh: environments, and the variable
    MLX_CUDA_GPU_RUNNER, which must also be set in the environment. Takes seconds and prints all problems at once.

    With --index pypi, any problem is an error. With any other index it is a rehearsal, where problems that stop only a release
    are warnings.
    """
    from ..index import named
    from .preflight import preflight

    version = preflight(None if args.index == NONE else named(args.index), tag=args.tag)
    print(f"version {version} may be built")
    return 0


def _check(args: argparse.Namespace) -> int:
    """Check that a directory is a complete release.

    All wheels must be there, have the version of the checkout, the same METADATA and an SBOM, and pass twine check --strict and the audit.
    With --index, the name must also belong to this project or be free, the version must be the newest, and the requirements of each extra
    must be published.
    """
    from ..files import sha256
    from ..index import named
    from ..matrix import REPOSITORY, load
    from ..wheelfile.wheel import read
    from . import check
    from .dependencies import dependencies, of_wheel, oldest_python
    from .dist import agree, complete, settle
    from .standing import against, report
    from .upload import plan
    from .version import current

    dist = complete(args.dist, expected=current(REPOSITORY))
    if args.manifest is not None and args.manifest.exists():
        agree(dist, args.manifest)
    findings = [*check.twine(dist), *check.wheels(dist, checks=check.WITHOUT_TOOLKITS if args.without_toolkits else None)]
    if args.index != NONE:
        index = named(args.index)
        files = index.files(load().name, adding=True)
        plan(dist, files)  # what is there already has to be the same
        metadata = read(dist.paths[0]).metadata  # the same in all
        findings += against(dist.version, index, files)
        findings += dependencies(of_wheel(metadata), oldest_python(metadata.get("Requires-Python", "")))
    report(findings)
    if args.manifest is not None:
        settle(dist, args.manifest)
    if args.github and args.manifest is not None:
        print(f"manifest={sha256(args.manifest)}")
    else:
        check.show(dist)
    return 0


def _publish(args: argparse.Namespace) -> int:
    """Upload a release, or complete an interrupted upload.

    twine uploads the wheels, the most used one last. Files that are on the index with the same bytes are skipped. If the index has other
    bytes under one of the names, the command stops before the first upload. After an interruption, run the command again.
    """
    from ..index import named
    from .dist import complete
    from .publish import publish
    from .upload import Limits

    dist, index, limits = complete(args.dist), named(args.index), Limits(upload=args.timeout)
    held = {"manifest_path": args.manifest, "digest": args.sha256}
    done = publish(dist, index, **held, dry_run=args.dry_run, attestations=args.attestations, limits=limits)
    sent = f"{len(done.missing)} of {len(dist.entries)} wheels"
    if args.dry_run:
        print(f"version {dist.version}: {sent} would be uploaded to {index.name}")
    else:
        print(f"version {dist.version} is complete on {index.name}: {sent} uploaded now")
    return 0


def _verify(args: argparse.Namespace) -> int:
    """Install a published release in fresh environments.

    Downloads every file and compares it with the manifest. Then installs each extra with uv and with pip in fresh environments, imports the
    package and runs the doctor. This project's package comes only from the named index, all others from the default index.
    """
    from ..index import named
    from .verify import verify

    chosen = {"pythons": args.python, "extras": args.extra, "install_all": args.install_all}
    done = verify(args.version, named(args.index), manifest_path=args.manifest, **chosen)
    print(json.dumps([asdict(each) for each in done], indent=2) if args.json else "\n".join(map(str, done)))
    return 0


def _notes(args: argparse.Namespace) -> int:
    """Write checksums, SBOMs and notes for the release page.

    Writes notes.md, with the changelog's entry, and the directory files/ to publish, with SHA256SUMS (for sha256sum -c) and the wheels'
    SBOMs. With --github, also prints the arguments of gh release create: a release candidate is a pre-release, and never the latest.
    """
    from ..matrix import REPOSITORY
    from .dist import complete
    from .notes import write
    from .version import current

    dist = complete(args.dist, expected=current(REPOSITORY))
    written = write(dist, args.output)
    if args.github:
        candidate = dist.version.is_prerelease
        print(f"version={dist.version}\nprerelease={str(candidate).lower()}\nlatest={str(not candidate).lower()}")
    else:
        print(*written, sep="\n")
    return 0
