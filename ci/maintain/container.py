"""``python -m ci container``: build the Linux wheels of this commit with cibuildwheel, in a container.

Builds as the release workflow does: with unmodified cibuildwheel, from a clone of the commit, without uncommitted changes. Then loads the
wheel on an old and on the newest glibc. CIBW_* variables are honored.

Needs docker or podman, and the dependency group cibuildwheel.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from .. import console, device, matrix, process, toolkit
from ..errors import CheckFailed, EnvironmentProblem
from ..trial import load as loading
from . import checkout

IN_CONTAINER = f"/root/.cache/{matrix.load().name}"  # where the factory looks for toolkits and compiled device code in there
OLD, NEW = "bullseye", "sid"  # Debian with glibc 2.31, and with the newest there is


def surroundings(image: str | None) -> dict[str, str]:
    """The environment for cibuildwheel: the caller's, with this image; an EnvironmentProblem where no container can be started in it."""
    variable = f"CIBW_MANYLINUX_{matrix.host_platform().machine.upper()}_IMAGE"
    variables = os.environ | ({variable: image} if image else {})
    if not find_spec("cibuildwheel"):
        raise EnvironmentProblem("cibuildwheel is not installed", fix="install the dependency group 'cibuildwheel' of pyproject.toml")
    engine = variables.get("CIBW_CONTAINER_ENGINE", "docker").partition(";")[0].strip()
    if not shutil.which(engine):
        raise EnvironmentProblem(f"the container engine {engine} is not installed", fix="install it, or set CIBW_CONTAINER_ENGINE=podman")
    # The image of pyproject.toml is fetched by cibuildwheel; one of the caller's own may be local, and is worth a look.
    given = variables.get(variable, "")
    if "/" in given and process.run([engine, "image", "inspect", given]).returncode:
        raise EnvironmentProblem(f"{engine} has no image {given}", fix=f"{engine} pull {given}, build it, or name another")
    return dict(variables)


def build(output: Path, variables: Mapping[str, str], *, mount: bool) -> None:
    """Clone HEAD and run cibuildwheel on it."""
    if mount:
        shared = {"toolkits": toolkit.roots.cache_directory()}
        if variables.get(device.store.VARIABLE) != "off":
            shared["device"] = device.store.chosen(output).folder
        for place in shared.values():
            place.mkdir(parents=True, exist_ok=True)
        volumes = " ".join(f"--volume={place}:{IN_CONTAINER}/{name}" for name, place in shared.items())
        engine = variables.get("CIBW_CONTAINER_ENGINE", "docker; create_args:")
        variables = {**variables, "CIBW_CONTAINER_ENGINE": f"{engine} {volumes}"}
    with tempfile.TemporaryDirectory(prefix=f"{matrix.load().name}-container-") as folder:
        tree = Path(folder, matrix.load().name)
        checkout.export("HEAD", tree)
        command = [sys.executable, "-m", "cibuildwheel", "--platform", "linux", "--output-dir", str(output.resolve())]
        if process.run(command, cwd=tree, env=variables, show=True).returncode:
            raise CheckFailed("cibuildwheel failed; its output is above")


def debian(suite: str) -> str:
    """The name of an image with a Debian system and its python3, made with debootstrap where it is missing (about a minute)."""
    if shutil.which("podman") is None:
        raise EnvironmentProblem(f"podman is needed to run Debian {suite}", fix="install podman, or give --load-in without a suite")
    name = f"localhost/debian-{suite}-python:1"
    if process.run(["podman", "image", "exists", name]).returncode == 0:
        return name
    if shutil.which("debootstrap") is None:
        raise EnvironmentProblem(f"debootstrap is needed to make {name}", fix="apt-get install debootstrap, and run as root")
    with tempfile.TemporaryDirectory(prefix=f"{matrix.load().name}-image-") as folder:
        root, archive = Path(folder, "root"), Path(folder, "root.tar")
        packages = "python3,python3-venv,python3-pip,ca-certificates"
        for command in (
            ["debootstrap", "--variant=minbase", f"--include={packages}", suite, str(root)],
            ["tar", "-C", str(root), "--exclude=./var/cache/apt/archives/*.deb", "-cf", str(archive), "."],
            ["podman", "import", str(archive), name],
        ):
            done = process.run(command, stderr=subprocess.STDOUT)
            if done.returncode:
                console.say("\n".join(done.stdout.splitlines()[-20:]))
                raise EnvironmentProblem(f"{command[0]} could not make {name}", fix="its last output is above")
    return name


def run(args: argparse.Namespace) -> int:
    variables = surroundings(args.image) | ({"CIBW_BUILD": args.build} if args.build else {})
    old_and_new = [debian(suite) for suite in args.load_in]  # what cannot be made is found out before the build
    args.output.mkdir(parents=True, exist_ok=True)
    before = {path: path.stat().st_mtime_ns for path in args.output.glob("*.whl")}
    build(args.output, variables, mount=not args.cold)
    wheels = sorted(path for path in args.output.glob("*.whl") if before.get(path) != path.stat().st_mtime_ns)
    if not wheels:
        raise CheckFailed("cibuildwheel left no wheel")
    for wheel in wheels:
        loading.check(wheel, images=old_and_new)
        print(wheel)
    return 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--image", metavar="NAME", help="container image (default: that of pyproject.toml)")
    add("--build", metavar="SELECTOR", help="CIBW_BUILD, such as 'cp310-* cp313-*' (default: that of pyproject.toml)")
    add("--cold", action="store_true", help="do not mount this machine's toolkits and cache of device code")
    add("--load-in", nargs="*", default=[OLD, NEW], metavar="SUITE", help=f"Debian suites that podman loads it in (default: {OLD} {NEW})")
    add("-o", "--output", type=Path, default=Path("wheelhouse"), help="output directory (default: %(default)s)")
