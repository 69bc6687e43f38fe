"""``release verify``: what a user gets from the index, in fresh environments.

Our package comes only from the named index, everything else from this machine's default index: on an index where
anyone may register names, a stranger's `mlx` would otherwise be installed. uv pins the package to its index; pip cannot, so it downloads
our wheel alone and installs that file.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from email.message import Message
from pathlib import Path
from typing import Literal

from packaging.requirements import Requirement
from packaging.version import Version

from ..console import say
from ..errors import CheckFailed, EnvironmentProblem
from ..files import sha256
from ..index import Index
from ..matrix import load
from ..trial.fresh import Fresh
from ..wheelfile.wheel import read
from .dependencies import oldest_python, resolve
from .dist import complete, read_manifest
from .standing import refuse_yanked

Tool = Literal["uv", "pip"]
# Variables that could make pip use another index for mlx-cuda's wheel. pip ignores empty values.
_PIP_ALONE = {
    "PIP_CONFIG_FILE": os.devnull,
    **dict.fromkeys(("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "PIP_NO_INDEX", "PIP_CONSTRAINT"), ""),
}
# Things that the doctor may miss if a CUDA extra is installed on a machine without a GPU.
_HARDWARE = {"driver", "gpu"}


@dataclass(frozen=True)
class Verified:
    python: str
    tool: Tool
    extra: str
    how: Literal["installed", "resolved"]

    def __str__(self) -> str:
        said = "installed, imported, the doctor is content" if self.how == "installed" else "resolves to the published wheels"
        return f"CPython {self.python}, {self.tool}, [{self.extra}]: {said}"


def verify(
    version: Version,
    index: Index,
    *,
    manifest_path: Path | None = None,
    pythons: Sequence[str] | None = None,
    extras: Sequence[str] = (),
    install_all: bool = False,
) -> list[Verified]:
    """Download and compare every file, then resolve or install each extra on each interpreter; CheckFailed at the first that fails.

    The interpreters are by default the oldest supported and this one.
    """
    with tempfile.TemporaryDirectory(prefix=f"{load().name}-verify-") as name:
        folder = Path(name)
        digests, metadata = _compare(version, index, manifest_path, folder / "downloaded")
        say(f"{len(digests)} files of {version} on {index.name} are the published ones")
        offered = metadata.get_all("Provides-Extra", [])
        unknown = sorted(set(extras) - set(offered))
        if unknown:
            raise EnvironmentProblem(f"there is no extra {', '.join(unknown)}", fix=f"use {', '.join(offered)}")
        done = []
        for number, python in enumerate(pythons or _pythons(metadata)):
            job = _Job(version, index, digests, python, folder / str(number))
            for extra in extras or offered:
                done += job.verify(extra, install=install_all or not _large(extra))
        return done


def _compare(version: Version, index: Index, manifest_path: Path | None, folder: Path) -> tuple[dict[str, str], Message]:
    """The sha256 by name of every file of the version, each downloaded; and their METADATA."""
    files = index.files(load().name)
    there = {remote.name: remote for remote in files if remote.version == version}
    refuse_yanked(version, files)
    if not there:
        raise CheckFailed(f"{index.name} has no file of {version}")
    if manifest_path is None:
        expected = {name: remote.sha256 for name, remote in there.items()}
    else:
        written, entries = read_manifest(manifest_path)
        if written != version:
            raise EnvironmentProblem(f"{manifest_path} is of version {written}, not {version}", fix="give the manifest of this version")
        expected = {entry.name: entry.sha256 for entry in entries}
    if differing := sorted(expected.keys() ^ there.keys()):
        raise CheckFailed(f"{index.name} and {manifest_path} list different files: {', '.join(differing)}")
    for name, digest in expected.items():
        if sha256(index.fetch(there[name], folder)) != digest:
            raise CheckFailed(f"{index.name} gives {name} with other bytes than the manifest's {digest}")
    return expected, read(complete(folder).paths[0]).metadata


def _pythons(metadata: Message) -> list[str]:
    """The oldest supported Python, and this one."""
    return [oldest_python(metadata.get("Requires-Python", "")), sys.executable]


def _large(extra: str) -> bool:
    return extra in {cuda.extra for cuda in load().cuda.values()}


@dataclass(frozen=True)
class _Job:
    """One interpreter's share."""

    version: Version
    index: Index
    digests: dict[str, str]
    python: str
    folder: Path

    def verify(self, extra: str, *, install: bool) -> list[Verified]:
        done = []
        for how in (self._with_uv, self._with_pip) if install else (self._resolve,):
            done.append(how(extra))
            say(str(done[-1]))
        return done

    def _project(self, extra: str) -> Path:
        """A project that requires our package of this index alone."""
        folder = self.folder / f"project-{extra}"
        folder.mkdir(parents=True, exist_ok=True)
        name = load().name
        (folder / "pyproject.toml").write_text(
            f'[project]\nname = "verification"\nversion = "0"\ndependencies = ["{name}[{extra}]=={self.version}"]\n'
            f'[tool.uv.sources]\n{name} = {{ index = "published" }}\n'
            f'[[tool.uv.index]]\nname = "published"\nurl = {json.dumps(self.index.simple)}\nexplicit = true\n',
            "utf-8",
        )
        return folder / "pyproject.toml"

    def _resolve(self, extra: str) -> Verified:
        """Resolve for every platform without installing."""
        project = self._project(extra)
        fresh = Fresh.make(project.parent / "environment", python=self.python)
        for platform in load().platforms.values():
            options = ["--no-header", "--no-annotate", "--generate-hashes", "--refresh-package", load().name]
            try:
                compiled = resolve(platform, project.parent, *options, "--python", str(fresh.python), str(project))
            except CheckFailed as error:
                raise CheckFailed(f"[{extra}] does not resolve on {platform.name}, CPython {fresh.version}:\n{error}") from error
            self._same_hashes(compiled, extra)
        return Verified(fresh.version, "uv", extra, "resolved")

    def _same_hashes(self, compiled: str, extra: str) -> None:
        """The lines of our package have exactly the published hashes."""
        lines = compiled.replace("\\\n", " ").splitlines()
        ours = next((line for line in lines if Requirement(line.split(" --hash")[0]).name == load().name), "")
        found = {part.removeprefix("--hash=sha256:") for part in ours.split() if part.startswith("--hash=")}
        if found != set(self.digests.values()):
            raise CheckFailed(f"uv resolves [{extra}] to {ours or 'nothing of this project'}, expected the published hashes")

    def _with_uv(self, extra: str) -> Verified:
        project = self._project(extra)
        hashes = project.with_name("published.txt")  # whatever uv installs has one of them
        hashes.write_text(f"{load().name}=={self.version} {' '.join(f'--hash=sha256:{each}' for each in self.digests.values())}\n")
        fresh = Fresh.make(self.folder / f"uv-{extra}", python=self.python)
        options = ["--quiet", "--refresh-package", load().name, "--constraints", str(hashes), "--requirements", str(project)]
        fresh.install(options=options)
        return self._works(fresh, "uv", extra)

    def _with_pip(self, extra: str) -> Verified:
        fresh = Fresh.make(self.folder / f"pip-{extra}", python=self.python)
        if fresh.run(
            "-m", "ensurepip", installs=True
        ).returncode:  # the pip that comes with this Python, or where a system took it out, the newest
            fresh.install("pip", options=["--quiet"])
        wheels = self.folder / f"wheels-{extra}"
        ours = ["--no-deps", "--only-binary", ":all:", "--no-cache-dir", "--index-url", self.index.simple, "--dest", str(wheels)]
        self._pip(fresh, "download", *ours, f"{load().name}=={self.version}", environment=_PIP_ALONE)
        (wheel,) = wheels.iterdir()
        if sha256(wheel) != self.digests.get(wheel.name):
            raise CheckFailed(f"pip downloads {wheel.name} with other bytes than the published ones")
        self._pip(fresh, "install", "--only-binary", ":all:", f"{load().name}[{extra}] @ {wheel.as_uri()}")
        return self._works(fresh, "pip", extra)

    def _pip(self, fresh: Fresh, *arguments: str, environment: dict[str, str] | None = None) -> None:
        done = fresh.run("-m", "pip", "--no-input", "--disable-pip-version-check", *arguments, env=environment, installs=True)
        if done.returncode:
            raise CheckFailed(f"pip {arguments[0]} failed: {(done.stderr or done.stdout).strip()}")

    def _works(self, fresh: Fresh, tool: Tool, extra: str) -> Verified:
        report = fresh.doctor()
        if report[load().module] != str(self.version):
            raise CheckFailed(f"[{extra}] from {tool} is {report[load().module]}, expected {self.version}")
        failed = {check["name"]: check["summary"] for check in report["checks"] if check["status"] == "fail"}
        without_gpu = _large(extra) and bool(failed) and failed.keys() <= _HARDWARE
        if failed and not without_gpu:
            raise CheckFailed(f"[{extra}] from {tool}: the doctor finds {'; '.join(map(': '.join, failed.items()))}")
        done = fresh.run("-c", f"import {load().module}")
        if done.returncode and not without_gpu:
            raise CheckFailed(f"[{extra}] from {tool} cannot be imported: {done.stderr.strip()}")
        return Verified(fresh.version, tool, extra, "installed")
