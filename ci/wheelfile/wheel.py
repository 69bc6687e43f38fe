"""A wheel, straight from its archive."""

from __future__ import annotations

import hashlib
import re
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from email import message_from_string
from email.message import Message
from functools import cached_property
from pathlib import Path

from packaging.requirements import Requirement
from packaging.tags import Tag
from packaging.utils import InvalidWheelFilename, NormalizedName, canonicalize_name, parse_wheel_filename
from packaging.version import Version

from ..device import packed
from ..errors import CheckFailed, EnvironmentProblem
from ..matrix import System, load
from . import archive
from .binary import Binary, BinaryError, parse

DEVICE = f"{load().module}/device/"  # the folder of device code, whose files are packed fatbins
MANIFEST = f"{DEVICE}manifest.json"  # and this one
SBOM = f"{load().name}.cdx.json"
VERSION = f"{load().module}/_version.py"
STAMP = re.compile(rb'^__version__ = "([\w.+!]*)"$', re.MULTILINE)  # in that file


@dataclass(frozen=True)
class Wheel:
    path: Path
    project: NormalizedName
    version: Version
    tags: frozenset[Tag]
    members: Mapping[str, bytes]  # in the archive's order
    entries: Mapping[str, zipfile.ZipInfo] = field(default_factory=dict)  # what the archive says of them, and of folders

    @cached_property
    def _parsed(self) -> dict[str, Binary | BinaryError]:
        found = {name: _parsed(data) for name, data in self.members.items()}
        return {name: each for name, each in found.items() if each is not None}

    @cached_property
    def binaries(self) -> dict[str, Binary]:
        """Every ELF and PE file that can be read, recognized by its contents, not by its name."""
        return {name: each for name, each in self._parsed.items() if isinstance(each, Binary)}

    @cached_property
    def unreadable(self) -> dict[str, BinaryError]:
        """Those that cannot, and why."""
        return {name: each for name, each in self._parsed.items() if isinstance(each, BinaryError)}

    def readable(self) -> None:
        """Raise what is wrong with a binary that cannot be read: for those who work on the wheel and do not judge it."""
        for name, error in self.unreadable.items():
            raise EnvironmentProblem(f"{self.path.name}: {name}: {error}", fix="build or fetch the wheel again: it is damaged")

    @property
    def fatbins(self) -> dict[str, bytes]:
        """The files of device code, packed, by the names of their sources."""
        names = sorted(name for name in self.members if name.startswith(DEVICE) and name.endswith(packed.SUFFIX))
        return {name.removeprefix(DEVICE).removesuffix(packed.SUFFIX): self.members[name] for name in names}

    @property
    def unpacked(self) -> dict[str, bytes]:
        """Their fatbins, empty where one is damaged: for those who describe, and leave it to the audit to judge."""
        return {name: _unpacked(data) for name, data in self.fatbins.items()}

    @property
    def device_digest(self) -> str:
        """The SHA-256 of the manifest, which native modules know their device code by; "" where there is none."""
        return hashlib.sha256(self.members[MANIFEST]).hexdigest() if MANIFEST in self.members else ""

    @property
    def sbom(self) -> str:
        """The path of the SBOM."""
        return f"{self.dist_info}/sboms/{SBOM}"

    @property
    def platforms(self) -> tuple[str, ...]:
        return tuple(sorted({tag.platform for tag in self.tags}))

    @property
    def system(self) -> System:
        return "windows" if self.platforms[0].startswith("win") else "linux"

    def key(self, library: str) -> str:
        """A library's name, to compare with: Windows makes no difference between upper and lower case."""
        return library.lower() if self.system == "windows" else library

    @cached_property
    def dist_info(self) -> str:
        """The name of the .dist-info folder, spelled as in the archive."""
        folders = {top for name in self.members if (top := name.partition("/")[0]).endswith(".dist-info")}
        if len(folders) != 1:
            raise EnvironmentProblem(f"{self.path.name}: not a wheel: it has {len(folders)} .dist-info folders instead of one")
        return folders.pop()

    def information(self, name: str) -> str:
        """The text of a file in the .dist-info folder, empty where there is none."""
        try:
            return self.members.get(f"{self.dist_info}/{name}", b"").decode()
        except UnicodeDecodeError as error:
            raise CheckFailed(f"{self.path.name}: {self.dist_info}/{name} is not UTF-8: {error}") from error

    @cached_property
    def metadata(self) -> Message:
        return message_from_string(self.information("METADATA"))


def extra_of(requirement: Requirement) -> str | None:
    """The extra that a requirement belongs to, "" for none, None if its marker says anything else."""
    if requirement.marker is None:
        return ""
    left, _, right = str(requirement.marker).partition(" == ")
    return canonicalize_name(right.strip("\"'")) if left == "extra" and " " not in right else None


def _unpacked(data: bytes) -> bytes:
    try:
        return packed.unpack(data)
    except ValueError:
        return b""


def _parsed(data: bytes) -> Binary | BinaryError | None:
    try:
        return parse(data)
    except BinaryError as error:
        return error


def read(path: Path) -> Wheel:
    try:
        project, version, _, tags = parse_wheel_filename(path.name)
    except InvalidWheelFilename as error:
        raise EnvironmentProblem(str(error), fix="give the path of a .whl file that still has its own name") from error
    wheel = Wheel(path, project, version, tags, *archive.read(path))
    _ = wheel.dist_info  # a zip file without one is no wheel
    return wheel
