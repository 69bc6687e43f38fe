"""``python -m ci reproduce``: build the same commit more than once and compare the wheels byte by byte.

What must not matter is made different on purpose: the folders and their depth, the temporary folder, the path of the toolkits, umask,
locale, time zone, hash seed and the number of parallel jobs. Builds of one environment have to be identical. A build in the container
has another compiler, other headers and another platform tag: it has to be like other builds in the container, and how it differs from
those of the host is only shown.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import matrix, toolkit
from ..build import build
from ..console import stage
from ..errors import CheckFailed, EnvironmentProblem
from ..files import sha256
from . import checkout, container
from .differences import differences, explain

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Mapping, Sequence

# A compiler cache, the store of device code or a folder of it would hand the second build what the first one made.
NO_CACHE = {"CMAKE_CXX_COMPILER_LAUNCHER": "", "CCACHE_DISABLE": "1", "MLX_CUDA_DEVICE_STORE": "off", "MLX_CUDA_DEVICE_CODE": ""}


@dataclass(frozen=True)
class Surroundings:
    """One build, and everything about it that must leave no trace in the wheel."""

    name: str
    folder: str
    container: bool = False
    umask: int = 0o022
    variables: Mapping[str, str] = field(default_factory=dict)
    linked_toolkits: bool = False  # reached by another path


def surroundings(number: int, *, container: bool = False) -> Surroundings:
    """Those of the first or the second build of its kind; later ones are as the second."""
    cores = os.cpu_count() or 1
    first = {"LC_ALL": "C", "TZ": "UTC0", "PYTHONHASHSEED": "1", "CMAKE_BUILD_PARALLEL_LEVEL": str(cores)}
    second = {"LC_ALL": "C.UTF-8", "TZ": "AHEAD-14", "PYTHONHASHSEED": "2", "CMAKE_BUILD_PARALLEL_LEVEL": str(cores + 1)}
    kind = "container" if container else "host"
    name, folder = f"{kind}-{number}", f"{kind}/" + ("a" if number == 1 else f"another-folder/much-deeper/{number}")
    if number == 1:
        return Surroundings(name, folder, container, variables=first)
    # The container's engine mounts the toolkits: a link would lead nowhere in there.
    return Surroundings(name, folder, container, umask=0o077, variables=second, linked_toolkits=not container)


def planned(containers: int, *, against: bool) -> list[Surroundings]:
    """The builds to make: those in the container, which have more ways to fail, and two on the host; with a given wheel, one is enough."""
    hosts = (0 if containers else 1) if against else 2
    builds = [(number, True) for number in range(1, containers + 1)] + [(number, False) for number in range(1, hosts + 1)]
    return [surroundings(number, container=container) for number, container in builds]


@dataclass(frozen=True)
class Built:
    name: str
    path: Path
    seconds: float | None = None  # none for a wheel that was given

    def __str__(self) -> str:
        took = f", {self.seconds:.0f} s" if self.seconds is not None else ""
        return f"{self.name}: {self.path}\n  sha256 {sha256(self.path)}, {self.path.stat().st_size} bytes{took}"


def pairs(built: Sequence[tuple[Surroundings, Built]], against: Built | None) -> Iterator[tuple[Built, Built, bool]]:
    """Each build with the wheel that was given, or else with the first of its kind, as both must be the same; and one of each kind."""
    if against:
        yield from ((against, each, True) for _, each in built)
        return
    hosts, containers = ([each for how, each in built if how.container is container] for container in (False, True))
    for same in (hosts, containers):
        yield from ((same[0], each, True) for each in same[1:])
    if hosts and containers:
        yield hosts[0], containers[0], False


def compare(first: Built, second: Built, *, required: bool) -> bool:
    """Tell how two wheels differ; whether that is a failure."""
    found = differences(first.path, second.path)
    verdict = ("DIFFERENT" if required else "different, as builds of two environments may be") if found else "identical to the byte"
    print("\n  ".join([f"{first.name} and {second.name}: {verdict}", *map(str, found)]), flush=True)
    if found and required:
        explain(first.path, second.path)
    return required and bool(found)


def build_in(tree: Path, how: Surroundings, selection: Sequence[str], output: Path) -> None:
    """Run the tree's own ``python -m ci wheel`` or ``python -m ci container``, each of which builds, repairs and audits."""
    command = ["container", "--build", _selector(), "--load-in"] if how.container else ["wheel"]
    temporary = tree.with_name(f"tmp-{how.name}")
    temporary.mkdir()
    places = {"TMPDIR": str(temporary), "TEMP": str(temporary), "TMP": str(temporary), "MLX_CUDA_TOOLKITS": str(_toolkits(tree, how))}
    variables = {**os.environ, **NO_CACHE, **how.variables, **places}
    arguments = [sys.executable, "-m", "ci", *command, *selection, "--output", str(output)]
    status = subprocess.run(arguments, check=False, cwd=tree, env=variables, umask=how.umask, stdout=sys.stderr).returncode
    if status == EnvironmentProblem.exit_code:
        raise EnvironmentProblem(f"build {how.name} could not be made", cure="its last words are above")
    if status:
        raise CheckFailed(f"build {how.name} failed; its last words are above")


def _selector() -> str:
    """One build of cibuildwheel's: the stable ABI's."""
    return os.environ.get("CIBW_BUILD") or f"{matrix.load().builds[0].identifier}-manylinux_{matrix.host_platform().machine}"


def _toolkits(tree: Path, how: Surroundings) -> Path:
    """The toolkits that are installed already, by their own path or by another."""
    toolkits = toolkit.roots.cache_directory()
    if not how.linked_toolkits:
        return toolkits
    link = tree.with_name("toolkits-by-another-path")
    try:
        toolkits.mkdir(parents=True, exist_ok=True)
        link.symlink_to(toolkits, target_is_directory=True)
    except OSError:  # Windows gives links only to those who may make them
        return toolkits
    return link


def make(name: str, how: Surroundings, selection: Sequence[str], output: Path) -> Built:
    """Build the commit once; the wheel goes into a folder of its own under ``output``."""
    stage(f"reproduce: {how.name}")
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mlx-cuda-reproduce-") as folder:
        tree, made = Path(folder) / how.folder, Path(folder) / "made"
        checkout.export(name, tree, umask=how.umask)
        build_in(tree, how, selection, made)
        wheels = sorted(made.glob("*.whl"))
        if len(wheels) != 1:
            raise EnvironmentProblem(f"build {how.name} left {len(wheels)} wheels instead of one", cure="let CIBW_BUILD choose one")
        seconds = time.monotonic() - start
        kept = output / how.name
        shutil.rmtree(kept, ignore_errors=True)
        kept.mkdir(parents=True)
        return Built(how.name, Path(shutil.copy(wheels[0], kept)), seconds)


def run(args: argparse.Namespace) -> int:
    selection = [*(part for version in args.cuda or () for part in ("--cuda", version))]
    selection += [] if args.arch == ["declared"] else ["--arch", *args.arch]
    if args.container and selection:
        raise EnvironmentProblem("the container builds the whole matrix", cure="leave --cuda and --arch out, or --container")
    if args.against and not args.against.is_file():
        raise EnvironmentProblem(f"cannot read {args.against}", cure="check the path")
    against = Built("given", args.against) if args.against else None
    if args.container:  # fail at once, and not after two builds on the host
        container.surroundings(None)
    commit = checkout.commit(args.commit)
    made = [(how, make(commit, how, selection, args.output)) for how in planned(args.container, against=bool(against))]
    for each in (against, *(each for _, each in made)):
        if each:
            print(each)
    failures = [compare(first, second, required=required) for first, second, required in pairs(made, against)]
    return int(any(failures))


def add_parser(subparsers: Any) -> None:
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "reproduce",
        help="build a commit twice, in different surroundings, and compare the wheels",
        description="Build, repair and audit one commit twice in different folders, with another umask, locale, time zone, path of the "
        "toolkits and number of jobs, and compare the wheels byte by byte. The members that differ are named; what differs inside "
        "them is shown by diffoscope, where it is installed.",
        epilog="Exit codes: 0 identical, 1 different or a build failed, 2 usage or environment.",
    )
    build.add_selection(parser)
    add = parser.add_argument
    add("--commit", metavar="NAME", help="the commit to build (default: the one that is checked out, which must have no changes)")
    add("--against", type=Path, metavar="WHEEL", help="build once only, and compare with this wheel")
    add(
        "--container",
        type=int,
        nargs="?",
        const=1,
        default=0,
        metavar="N",
        help="also build N times (default: 1) in the container, by cibuildwheel. Such builds must be like each other; how they differ from "
        "those of the host is shown. With --against: only in the container",
    )
    add("-o", "--output", type=Path, default=Path("build/reproduce"), metavar="FOLDER", help="keeps the wheels (default: %(default)s)")
    parser.set_defaults(run=run)
