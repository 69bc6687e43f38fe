"""``python -m ci reproduce``: build a commit twice, in different surroundings, and compare the wheels.

The two builds differ in what must not matter: directories and their depth, the temporary directory, the path of the toolkits, umask,
locale, time zone, hash seed and the number of parallel jobs. With --container both builds run in the container; its compiler, headers and
platform tag differ from the host's, so compare its wheels only with each other.

Files that differ are named. diffoscope, if it is installed, shows the differences inside them.

Exit codes: 0 identical, 1 different or a build failed, 2 usage or environment.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from .. import matrix, process, toolkit
from ..build import build
from ..console import stage
from ..errors import CheckFailed, EnvironmentProblem
from ..files import sha256
from . import checkout, container
from .differences import differences, explain

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
    """Those of the first or the second build."""
    cores = os.cpu_count() or 1
    kind = "container" if container else "host"
    if number == 1:
        variables = {"LC_ALL": "C", "TZ": "UTC0", "PYTHONHASHSEED": "1", "CMAKE_BUILD_PARALLEL_LEVEL": str(cores)}
        return Surroundings(f"{kind}-1", f"{kind}/a", container, variables=variables)
    variables = {"LC_ALL": "C.UTF-8", "TZ": "AHEAD-14", "PYTHONHASHSEED": "2", "CMAKE_BUILD_PARALLEL_LEVEL": str(cores + 1)}
    # The container's engine mounts the toolkits: a link would lead nowhere in there.
    folder = f"{kind}/another-folder/much-deeper/2"
    return Surroundings(f"{kind}-2", folder, container, umask=0o077, variables=variables, linked_toolkits=not container)


@dataclass(frozen=True)
class Built:
    name: str
    path: Path
    seconds: float | None = None  # none for a wheel that was given

    def __str__(self) -> str:
        took = f", {self.seconds:.0f} s" if self.seconds is not None else ""
        return f"{self.name}: {self.path}\n  sha256 {sha256(self.path)}, {self.path.stat().st_size} bytes{took}"


def compare(first: Built, second: Built) -> bool:
    """Tell how two wheels differ; whether they are the same."""
    found = differences(first.path, second.path)
    verdict = "DIFFERENT" if found else "byte-identical"
    print("\n  ".join([f"{first.name} and {second.name}: {verdict}", *map(str, found)]), flush=True)
    if found:
        explain(first.path, second.path)
    return not found


def build_in(tree: Path, how: Surroundings, selection: Sequence[str], output: Path) -> None:
    """Run the tree's own ``python -m ci wheel`` or ``python -m ci container``, each of which builds, repairs and audits."""
    command = ["container", "--build", _selector(), "--load-in"] if how.container else ["wheel"]
    temporary = tree.with_name(f"tmp-{how.name}")
    temporary.mkdir()
    places = {"TMPDIR": str(temporary), "TEMP": str(temporary), "TMP": str(temporary), "MLX_CUDA_TOOLKITS": str(_toolkits(tree, how))}
    variables = {**os.environ, **NO_CACHE, **how.variables, **places}
    arguments = [sys.executable, "-m", "ci", *command, *selection, "--output", str(output)]
    status = process.run(arguments, cwd=tree, env=variables, umask=how.umask, show=True).returncode
    if status == EnvironmentProblem.exit_code:
        raise EnvironmentProblem(f"build {how.name} could not be made", fix="its last output is above")
    if status:
        raise CheckFailed(f"build {how.name} failed; its last output is above")


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
    with tempfile.TemporaryDirectory(prefix=f"{matrix.load().name}-reproduce-") as folder:
        tree, made = Path(folder) / how.folder, Path(folder) / "made"
        checkout.export(name, tree, umask=how.umask)
        build_in(tree, how, selection, made)
        wheels = sorted(made.glob("*.whl"))
        if len(wheels) != 1:
            raise EnvironmentProblem(f"build {how.name} left {len(wheels)} wheels instead of one", fix="let CIBW_BUILD choose one")
        seconds = time.monotonic() - start
        kept = output / how.name
        shutil.rmtree(kept, ignore_errors=True)
        kept.mkdir(parents=True)
        return Built(how.name, Path(shutil.copy(wheels[0], kept)), seconds)


def run(args: argparse.Namespace) -> int:
    selection = [*(part for version in args.cuda or () for part in ("--cuda", version))]
    selection += [] if args.arch == ["declared"] else ["--arch", *args.arch]
    if args.container and selection:
        raise EnvironmentProblem("the container builds the whole matrix", fix="omit --cuda and --arch, or --container")
    if args.against and not args.against.is_file():
        raise EnvironmentProblem(f"cannot read {args.against}", fix="check the path")
    if args.container:  # fail at once, and not after the clone
        container.surroundings(None)
    commit = checkout.commit(args.commit)
    given = [Built("given", args.against)] if args.against else []
    made = [make(commit, surroundings(number, container=args.container), selection, args.output) for number in ((1,) if given else (1, 2))]
    first, second = *given, *made
    print(first, second, sep="\n")
    return 0 if compare(first, second) else 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    build.add_selection(parser)
    add = parser.add_argument
    add("--commit", metavar="NAME", help="commit to build (default: the current one, without uncommitted changes)")
    add("--against", type=Path, metavar="WHEEL", help="build once, and compare with this wheel")
    add("--container", action="store_true", help="build in the container, by cibuildwheel, as python -m ci container does")
    add("-o", "--output", type=Path, default=Path("build/reproduce"), metavar="FOLDER", help="output directory (default: %(default)s)")
