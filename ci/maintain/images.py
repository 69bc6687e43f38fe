"""Debian systems as container images, made with debootstrap: the oldest and the newest glibc that a wheel meets."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from ..errors import EnvironmentProblem

OLD, NEW = "bullseye", "sid"  # glibc 2.31, and the newest there is


def debian(suite: str, engine: str = "podman") -> str:
    """The name of an image with ``suite`` and its python3, made first where it is missing (about a minute)."""
    if shutil.which(engine) is None:
        raise EnvironmentProblem(f"{engine} is needed to run Debian {suite}", cure=f"install {engine}, or give --load-in without a suite")
    name = f"localhost/debian-{suite}-python:1"
    if subprocess.run([engine, "image", "exists", name], check=False).returncode == 0:
        return name
    if shutil.which("debootstrap") is None:
        raise EnvironmentProblem(f"debootstrap is needed to make {name}", cure="apt-get install debootstrap, and run as root")
    with tempfile.TemporaryDirectory(prefix="mlx-cuda-image-") as folder:
        root, archive = Path(folder, "root"), Path(folder, "root.tar")
        packages = "python3,python3-venv,python3-pip,ca-certificates"
        for command in (
            ["debootstrap", "--variant=minbase", f"--include={packages}", suite, str(root)],
            ["tar", "-C", str(root), "--exclude=./var/cache/apt/archives/*.deb", "-cf", str(archive), "."],
            [engine, "import", str(archive), name],
        ):
            done = subprocess.run(command, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            if done.returncode:
                print("\n".join(done.stdout.splitlines()[-20:]), file=sys.stderr)
                raise EnvironmentProblem(f"{command[0]} could not make {name}", cure="its last words are above")
    return name
