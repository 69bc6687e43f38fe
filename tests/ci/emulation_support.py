"""An aarch64 Linux to run a wheel in, under qemu's user-mode emulation: Debian's Python, unpacked into a folder and never installed.

The packages are those of the machine's own release of Debian, for the other processor.
"""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from ci import matrix
from ci.toolkit import uv

PACKAGES = ("python3-minimal", "libpython3-stdlib", "libgomp1", "libstdc++6")
SOURCES = (Path("/etc/apt/sources.list.d/debian.sources"), Path("/etc/apt/sources.list"))
COMPILER = "aarch64-linux-gnu-g++"


@dataclass(frozen=True)
class Emulated:
    """The unpacked system, and how its Python is started."""

    folder: Path
    qemu: str

    @property
    def root(self) -> Path:
        return self.folder / "root"

    @property
    def python(self) -> Path:
        return self.root / "usr" / "bin" / "python"

    @property
    def version(self) -> str:
        """The version of Python, such as 3.11."""
        (interpreter,) = (self.root / "usr" / "bin").glob("python3.*")
        return interpreter.name.removeprefix("python")

    def install(self, site: Path, *requirements: str) -> Path:
        """Install wheels for aarch64 into a folder; uv resolves and unpacks for any platform."""
        uv_platform = matrix.load().platform("linux-aarch64").uv
        target = ["--target", str(site), "--python", sys.executable, "--python-platform", uv_platform, "--python-version", self.version]
        uv.run("pip", "install", "--only-binary", ":all:", *target, *requirements, cwd=self.folder)
        return site

    def run(self, *arguments: str, site: Path, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run Python with these arguments. MLX compiles CPU kernels with `g++`: it finds the cross compiler under that name."""
        (self.folder / "tmp").mkdir(exist_ok=True)
        path = f"{self.folder / 'tools'}{os.pathsep}{os.environ['PATH']}"
        given = {"PYTHONPATH": str(site), "PATH": path, "TMPDIR": str(self.folder / "tmp"), "PYTHONDONTWRITEBYTECODE": "1", **environment}
        command = [str(self.python), *arguments]
        return subprocess.run(command, cwd=matrix.REPOSITORY, env=os.environ | given, check=False, capture_output=True, text=True)


def make(folder: Path) -> Emulated:
    """Unpack the system; the test is skipped, and says why, where that cannot be done."""
    qemu = shutil.which("qemu-aarch64-static") or shutil.which("qemu-aarch64")
    lacking = [tool for tool in ("apt-get", "dpkg-deb", COMPILER) if not shutil.which(tool)]
    sources = next((path for path in SOURCES if path.is_file()), None)
    if sys.platform != "linux" or not qemu or lacking or not sources or not Path("/etc/debian_version").is_file():
        pytest.skip("needs Debian with qemu (apt-get install qemu-user-static g++-aarch64-linux-gnu)")
    emulated = Emulated(folder, qemu)
    for package in _download(folder / "apt", sources):
        subprocess.run(["dpkg-deb", "--extract", str(package), str(emulated.root)], check=True)
    # sys.executable is this script, so that programs which start Python again start it under emulation too.
    _executable(emulated.python, f'exec {qemu} -L {emulated.root} -0 "$0" {emulated.root}/usr/bin/python{emulated.version} "$@"')
    _executable(folder / "tools" / "g++", f'exec {shutil.which(COMPILER)} "$@"')
    return emulated


def _executable(path: Path, line: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{line}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def _download(folder: Path, sources: Path) -> list[Path]:
    """Let apt resolve and fetch for aarch64, with a state of its own: nothing of this system is read or changed."""
    for part in ("lists/partial", "cache/archives/partial", "etc/preferences.d", "etc/apt.conf.d"):
        (folder / part).mkdir(parents=True)
    (folder / "status").touch()
    settings = {
        "APT::Architecture": "arm64",
        "APT::Architectures": "arm64",
        "APT::Install-Recommends": "0",
        "APT::Sandbox::User": "",
        "Dir::Cache": folder / "cache",
        "Dir::Etc": folder / "etc",
        "Dir::Etc::sourcelist": sources,
        "Dir::Etc::sourceparts": os.devnull,
        "Dir::Etc::trustedparts": "/etc/apt/trusted.gpg.d",
        "Dir::State": folder,
        "Dir::State::status": folder / "status",
        "Debug::NoLocking": "1",
    }
    apt = ["apt-get", "--quiet", *(f"-o{name}={value}" for name, value in settings.items())]
    for command in (["update"], ["install", "--yes", "--download-only", *PACKAGES]):
        done = subprocess.run([*apt, *command], check=False, capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"apt-get {command[0]} for arm64 does not work here: {done.stderr.strip()[-300:]}")
    return sorted((folder / "cache/archives").glob("*.deb"))
