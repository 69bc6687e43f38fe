"""``python -m ci container``: the wheels as the release makes them, by unmodified cibuildwheel in a container, with timings.

The commit is cloned, so that nothing of the working tree takes part. The finished wheel is loaded on an old and on the newest glibc.
Where no registry can be reached, ``--standin`` names a folder whose build.sh makes an image in place of manylinux's and whose env.sh
sets what cibuildwheel needs to use it.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import device, matrix, toolkit
from ..errors import CheckFailed, EnvironmentProblem
from ..trial import load as loading
from . import images

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping, Sequence

IN_CONTAINER = "/root/.cache/mlx-cuda"  # where the factory looks for toolkits and compiled device code in there
# What cibuildwheel says of each build, and of each step before the seconds that it took.
_BUILD = re.compile(r"Building (cp\S+) wheel")
_STEP = re.compile(r"(Running before_all|Building wheel|Repairing wheel|Auditing wheel|Testing wheel)\.\.\.")
_DONE = re.compile(r" +✓ ([0-9.]+)s")
_NAMES = {"Running before_all": "before-all", "Building wheel": "build", "Repairing wheel": "repair"}
_NAMES |= {"Auditing wheel": "audit", "Testing wheel": "test"}


def timings(log: str) -> dict[str, dict[str, float]]:
    """The seconds of each step, by cibuildwheel's build identifier; those before the first build are under ``""``."""
    found: dict[str, dict[str, float]] = {}
    build, step = "", ""
    for line in log.splitlines():
        if match := _BUILD.fullmatch(line):
            build = match[1]
        elif match := _STEP.fullmatch(line):
            step = _NAMES[match[1]]
        elif (match := _DONE.fullmatch(line)) and step:
            found.setdefault(build, {})[step] = float(match[1])
            step = ""
    return found


def surroundings(standin: Path | None) -> dict[str, str]:
    """The environment to run cibuildwheel in: the caller's, and what the stand-in sets, whose image is built first where it is missing."""
    if standin is None:
        return dict(os.environ)
    pythons = {"PYENVS": os.environ.get("PYENVS", "3.10.13 3.13.0")}  # of the builds' oldest CPython, and the newest that there is
    if subprocess.run(["bash", str(standin / "build.sh")], check=False, stdout=sys.stderr, env=os.environ | pythons).returncode:
        raise EnvironmentProblem("the stand-in image could not be built", cure="its last words are above")
    told = subprocess.run(["bash", "-c", '. "$0" && env -0', str(standin / "env.sh")], check=True, capture_output=True, text=True).stdout
    variables = dict(entry.split("=", 1) for entry in told.split("\0") if entry)
    # cibuildwheel fetches virtualenv from a place that cannot be reached either.
    variables["CIBW_DEPENDENCY_VERSIONS"] = "latest"
    seed = ["sh", str(standin / "seed_virtualenv.sh"), sys.executable]
    if subprocess.run(seed, check=False, stdout=sys.stderr, env=variables).returncode:
        raise EnvironmentProblem("virtualenv could not be seeded", cure="run with an interpreter that has pip and cibuildwheel")
    return variables


def build(output: Path, variables: Mapping[str, str], *, mount: bool) -> str:
    """Clone HEAD, run cibuildwheel on it, and return what it said; it is shown as it comes."""
    if mount:
        shared = {"toolkits": toolkit.roots.cache_directory()}
        if variables.get(device.store.VARIABLE) != "off":
            shared["device"] = device.store.chosen(output).folder
        for place in shared.values():
            place.mkdir(parents=True, exist_ok=True)
        volumes = " ".join(f"--volume={place}:{IN_CONTAINER}/{name}" for name, place in shared.items())
        engine = variables.get("CIBW_CONTAINER_ENGINE", "docker; create_args:")
        variables = {**variables, "CIBW_CONTAINER_ENGINE": f"{engine} {volumes}"}
    with tempfile.TemporaryDirectory(prefix="mlx-cuda-container-") as folder:
        tree = Path(folder, "mlx-cuda")
        subprocess.run(["git", "clone", "--quiet", str(matrix.REPOSITORY), str(tree)], check=True)
        command = [sys.executable, "-m", "cibuildwheel", "--platform", "linux", "--output-dir", str(output.resolve())]
        said = []
        with subprocess.Popen(command, cwd=tree, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
            assert process.stdout is not None  # noqa: S101
            for line in process.stdout:
                print(line, end="", file=sys.stderr, flush=True)
                said.append(line)
        if process.returncode:
            raise CheckFailed("cibuildwheel failed; its words are above")
    return "".join(said)


def show(wheels: Sequence[Path], seconds: Mapping[str, Mapping[str, float]], image: float) -> None:
    from rich.console import Console
    from rich.table import Table

    steps = list(_NAMES.values())
    table = Table("build", *(f"{step}, s" for step in steps), title="cibuildwheel in a container", title_justify="left")
    for identifier, taken in seconds.items():
        table.add_row(identifier or "all", *(f"{taken[step]:.1f}" if step in taken else "" for step in steps))
    console = Console()
    console.print(table)
    console.print(f"the image: {image:.0f} s")
    for wheel in wheels:
        console.print(f"{wheel.name}: {wheel.stat().st_size:,} bytes", highlight=False)


def run(args: argparse.Namespace) -> int:
    start = time.monotonic()
    variables = surroundings(args.standin)
    image = time.monotonic() - start
    if args.build:
        variables["CIBW_BUILD"] = args.build
    # podman's configuration, for what is run beside cibuildwheel
    os.environ.update({key: value for key, value in variables.items() if key.startswith("CONTAINERS_")})
    old_and_new = [images.debian(suite) for suite in args.load_in]  # what cannot be made is found out before the build
    args.output.mkdir(parents=True, exist_ok=True)
    before = {path: path.stat().st_mtime_ns for path in args.output.glob("*.whl")}
    seconds = timings(build(args.output, variables, mount=not args.cold))
    wheels = sorted(path for path in args.output.glob("*.whl") if before.get(path) != path.stat().st_mtime_ns)
    if not wheels:
        raise CheckFailed("cibuildwheel left no wheel")
    for wheel in wheels:
        loading.check(wheel, images=old_and_new)
    if args.json:
        print(json.dumps({"wheels": [str(wheel) for wheel in wheels], "seconds": seconds, "image": image}, indent=2))
    else:
        show(wheels, seconds, image)
    return 0


def add_parser(subparsers: Any) -> None:
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "container",
        help="make the Linux wheels of this commit with cibuildwheel, in a container",
        description="Run unmodified cibuildwheel on a clone of this commit, load the wheel on an old and on the newest glibc.",
        epilog="CIBW_* variables hold, for example CIBW_MANYLINUX_X86_64_IMAGE. Needs docker or podman, and the group cibuildwheel.",
    )
    add = parser.add_argument
    add("--standin", type=Path, metavar="FOLDER", help="build.sh makes an image in place of manylinux's, env.sh says how to use it")
    add("--build", metavar="SELECTOR", help="cibuildwheel's builds, such as 'cp310-* cp313-*' (default: those of pyproject.toml)")
    add("--cold", action="store_true", help="mount neither this machine's toolkits nor its store of device code")
    add(
        "--load-in",
        nargs="*",
        default=[images.OLD, images.NEW],
        metavar="SUITE",
        help="Debian suites to load it in, by podman (%(default)s)",
    )
    add("-o", "--output", type=Path, default=Path("wheelhouse"), help="folder for the wheels (default: %(default)s)")
    add("--json", action="store_true", help="print JSON instead of the table")
    parser.set_defaults(run=run)
