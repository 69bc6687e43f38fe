"""``python -m ci reproduce``: build the same commit more than once and compare the wheels byte by byte.

What must not matter is made different on purpose: the folders and their depth, the temporary folder, the path of the toolkits, umask,
locale, time zone, hash seed and the number of parallel jobs. Builds of one environment have to be identical. A build in the container
has another compiler, other headers and another platform tag: it has to be like other builds in the container, and how it differs from
those of the host is only shown.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import matrix, toolkit
from ..build import build
from ..errors import CheckFailed, EnvironmentProblem

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Mapping, Sequence

    from .differences import Difference

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
    bytes: int
    sha256: str
    environment: dict[str, str]
    seconds: float | None = None  # none for a wheel that was given

    @classmethod
    def of(cls, name: str, path: Path, seconds: float | None = None) -> Built:
        from .differences import environment

        known = environment(path)
        data = path.read_bytes()
        return cls(name, path, len(data), hashlib.sha256(data).hexdigest(), known, seconds)


@dataclass(frozen=True)
class Comparison:
    first: str
    second: str
    required: bool  # to be identical
    differences: list[Difference]
    environments: dict[str, tuple[str, str]]  # in what the two environments differ

    @property
    def failed(self) -> bool:
        return self.required and bool(self.differences)


def compare(first: Built, second: Built, *, required: bool) -> Comparison:
    from .differences import differences

    environments = {key: (value, second.environment[key]) for key, value in first.environment.items() if value != second.environment[key]}
    return Comparison(first.name, second.name, required, differences(first.path, second.path), environments)


def comparisons(built: Sequence[tuple[Surroundings, Built]], against: Built | None) -> Iterator[Comparison]:
    """Each build with the wheel that was given, or else with the first of its kind, and the first of each kind for information."""
    if against:
        yield from (compare(against, each, required=True) for _, each in built)
        return
    hosts, containers = ([each for how, each in built if how.container is container] for container in (False, True))
    for same in (hosts, containers):
        yield from (compare(same[0], each, required=True) for each in same[1:])
    if hosts and containers:
        yield compare(hosts[0], containers[0], required=False)


# ----------------------------------------------------------------------------------------------------------------- the commit
def commit(name: str | None) -> str:
    """The full name of the commit to build. Without a name it is the one that is checked out, and nothing may have been changed since."""
    resolved = _git("rev-parse", "--verify", "--quiet", "--end-of-options", f"{name or 'HEAD'}^{{commit}}")
    changes = "" if name else _git("status", "--porcelain")
    if changes:
        raise EnvironmentProblem(
            f"the working tree differs from the commit in {len(changes.splitlines())} files, which no build of the commit would have",
            cure="commit first, or add --commit HEAD to build the commit without the changes",
        )
    return resolved.strip()


def export(name: str, folder: Path, *, umask: int = -1) -> None:
    """Clone a commit into a new folder. Its files bear the time of now and the modes that the umask leaves."""
    _git("clone", "--quiet", "--no-checkout", str(matrix.REPOSITORY), str(folder), umask=umask)
    _git("-C", str(folder), "checkout", "--quiet", "--detach", name, umask=umask)


def _git(*arguments: str, umask: int = -1) -> str:
    command = ["git", *arguments]
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True, cwd=matrix.REPOSITORY, umask=umask).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        said = (getattr(error, "stderr", "") or str(error)).strip()
        raise EnvironmentProblem(f"git failed: {said}", cure="start from a git checkout, and name a commit of it") from error


# ----------------------------------------------------------------------------------------------------------------- the builds
def build_in(tree: Path, how: Surroundings, selection: Sequence[str], output: Path) -> None:
    """Run the tree's own ``python -m ci wheel`` or ``python -m ci container``, each of which builds, repairs and audits."""
    command = ["container", "--build", _selector(), "--load-in"] if how.container else ["wheel"]
    temporary = tree.with_name(f"tmp-{how.name}")
    temporary.mkdir()
    places = {"TMPDIR": str(temporary), "TEMP": str(temporary), "TMP": str(temporary), "MLX_CUDA_TOOLKITS": str(_toolkits(tree, how))}
    variables = {**os.environ, **NO_CACHE, **how.variables, **places}
    arguments = [sys.executable, "-m", "ci", *command, *selection, "--output", str(output), "--json"]
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


def require_container() -> None:
    """Fail at once, and not after two builds on the host, where no container can be started."""
    from importlib.util import find_spec

    if not find_spec("cibuildwheel"):
        raise EnvironmentProblem("cibuildwheel is not installed", cure="install the dependency group 'cibuildwheel' of pyproject.toml")
    engine = os.environ.get("CIBW_CONTAINER_ENGINE", "docker").partition(";")[0].strip()
    if not shutil.which(engine):
        raise EnvironmentProblem(f"the container engine {engine} is not installed", cure="install it, or set CIBW_CONTAINER_ENGINE=podman")
    variable = f"CIBW_MANYLINUX_{matrix.host_platform().machine.upper()}_IMAGE"
    image = os.environ.get(variable, "")
    # The image of pyproject.toml is fetched by cibuildwheel; one of the caller's own may be local, and is worth a look.
    if "/" in image and subprocess.run([engine, "image", "inspect", image], check=False, capture_output=True).returncode:
        raise EnvironmentProblem(f"{engine} has no image {image}", cure=f"{engine} pull {image}, build it, or unset {variable}")


def make(name: str, how: Surroundings, selection: Sequence[str], output: Path) -> Built:
    """Build the commit once; the wheel goes into a folder of its own under ``output``."""
    from rich.console import Console

    Console(stderr=True).rule(f"[bold]reproduce: {how.name}", align="left")
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mlx-cuda-reproduce-") as folder:
        tree, made = Path(folder) / how.folder, Path(folder) / "made"
        export(name, tree, umask=how.umask)
        build_in(tree, how, selection, made)
        wheels = sorted(made.glob("*.whl"))
        if len(wheels) != 1:
            raise EnvironmentProblem(f"build {how.name} left {len(wheels)} wheels instead of one", cure="let CIBW_BUILD choose one")
        seconds = time.monotonic() - start
        kept = output / how.name
        shutil.rmtree(kept, ignore_errors=True)
        kept.mkdir(parents=True)
        return Built.of(how.name, Path(shutil.copy(wheels[0], kept)), seconds)


# --------------------------------------------------------------------------------------------------------------- the command
def show(built: Sequence[Built], compared: Sequence[Comparison]) -> None:
    from .differences import lines, summary

    for wheel in built:
        took = f", {wheel.seconds:.0f} s" if wheel.seconds is not None else ""
        print(f"{wheel.name}: {wheel.path}\n  sha256 {wheel.sha256}, {wheel.bytes} bytes{took}")
    for each in compared:
        pair = f"{each.first} and {each.second}"
        if not each.differences:
            print(f"{pair}: identical to the byte")
            continue
        print(f"{pair}: {'DIFFERENT' if each.required else 'different, as builds of two environments may be'}")
        for key, sides in each.environments.items():
            print(f"  {key}: {' against '.join(sides)}")
        for line in (lines if each.required else summary)(each.differences):
            print(f"  {line}")


def run(args: argparse.Namespace) -> int:
    selection = [*(part for version in args.cuda or () for part in ("--cuda", version))]
    selection += [] if args.arch == ["declared"] else ["--arch", *args.arch]
    standin = ["--standin", str(args.standin.resolve())] if args.standin else []
    if args.compare and (args.against or args.container or args.commit or selection):
        raise EnvironmentProblem("--compare builds nothing", cure="leave the other options out")
    if standin and not args.container:
        raise EnvironmentProblem("--standin is for the container", cure="add --container")
    if args.container and selection:
        raise EnvironmentProblem("the container builds the whole matrix", cure="leave --cuda and --arch out, or --container")
    known: dict[str, Any] = {}
    if args.compare:
        built = [Built.of(name, path) for name, path in zip("AB", args.compare, strict=True)]
        compared = [compare(*built, required=True)]
    else:
        against = Built.of("given", args.against) if args.against else None
        if args.container and not standin:
            require_container()
        known["commit"] = commit(args.commit)
        plan = planned(args.container, against=bool(against))
        made = [(how, make(known["commit"], how, standin if how.container else selection, args.output)) for how in plan]
        built = [*([against] if against else []), *(each for _, each in made)]
        compared = list(comparisons(made, against))
    failed = any(each.failed for each in compared)
    if args.json:
        known |= {
            "reproducible": not failed,
            "wheels": [asdict(each) for each in built],
            "comparisons": [asdict(each) for each in compared],
        }
        print(json.dumps(known, indent=2, default=str))
    else:
        show(built, compared)
    return int(failed)


def add_parser(subparsers: Any) -> None:
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "reproduce",
        help="build a commit twice, in different surroundings, and compare the wheels",
        description="Build, repair and audit one commit twice in different folders, with another umask, locale, time zone, path of the "
        "toolkits and number of jobs, and compare the wheels byte by byte. A difference is named down to the section, the GPU "
        "architecture or the line.",
        epilog="Exit codes: 0 identical, 1 different or a build failed, 2 usage or environment.",
    )
    build.add_selection(parser)
    add = parser.add_argument
    add("--commit", metavar="NAME", help="the commit to build (default: the one that is checked out, which must have no changes)")
    add("--against", type=Path, metavar="WHEEL", help="build once only, and compare with this wheel")
    add("--compare", type=Path, nargs=2, metavar=("A", "B"), help="build nothing, and compare these two wheels")
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
    add("--standin", type=Path, metavar="FOLDER", help="as with python -m ci container: an image in place of manylinux's")
    add("-o", "--output", type=Path, default=Path("build/reproduce"), metavar="FOLDER", help="keeps the wheels (default: %(default)s)")
    add("--json", action="store_true", help="print wheels, comparisons and verdict as JSON")
    parser.set_defaults(run=run)
