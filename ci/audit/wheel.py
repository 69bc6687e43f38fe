"""A wheel as the audit reads it: straight from the archive, nothing unpacked, nothing imported."""

from __future__ import annotations

import hashlib
import zipfile
import zlib
from dataclasses import dataclass
from email import message_from_string
from functools import cached_property
from typing import TYPE_CHECKING

from packaging.utils import InvalidWheelFilename, NormalizedName, parse_wheel_filename

from ..errors import EnvironmentProblem
from ..matrix import load
from .binary import Binary, BinaryError, parse

if TYPE_CHECKING:
    from collections.abc import Mapping
    from email.message import Message
    from pathlib import Path

    from packaging.tags import Tag
    from packaging.version import Version

    from ..matrix import System

DEVICE = f"{load().module}/device/"  # the folder of device code, whose files are fatbins
MANIFEST = f"{DEVICE}manifest.json"  # and this one
SBOM = "mlx-cuda.cdx.json"


@dataclass(frozen=True)
class Wheel:
    path: Path
    project: NormalizedName
    version: Version
    tags: frozenset[Tag]
    names: tuple[str, ...]  # of every file in the archive, in order, duplicates included
    members: Mapping[str, bytes]

    @cached_property
    def binaries(self) -> dict[str, Binary]:
        """Every ELF and PE file, told by its contents and not by its name."""
        binaries = {}
        for name, data in self.members.items():
            try:
                binary = parse(data)
            except BinaryError as error:
                raise EnvironmentProblem(
                    f"{self.path.name}: {name}: {error}", cure="build or fetch the wheel again: it is damaged"
                ) from error
            if binary:
                binaries[name] = binary
        return binaries

    @property
    def fatbins(self) -> dict[str, bytes]:
        """The files of device code by the names of their sources, told by their own."""
        names = sorted(name for name in self.members if name.startswith(DEVICE) and name.endswith(".fatbin"))
        return {name.removeprefix(DEVICE).removesuffix(".fatbin"): self.members[name] for name in names}

    @property
    def device_digest(self) -> str:
        """The SHA-256 of the manifest, which native modules know their device code by; "" where there is none."""
        return hashlib.sha256(self.members[MANIFEST]).hexdigest() if MANIFEST in self.members else ""

    @property
    def sbom(self) -> str:
        """Where the SBOM lies, or ought to."""
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
        """The name of the .dist-info folder, spelt as in the archive."""
        folders = {name.split("/", 1)[0] for name in self.names if name.split("/", 1)[0].endswith(".dist-info")}
        if len(folders) != 1:
            raise EnvironmentProblem(f"{self.path.name}: not a wheel: it has {len(folders)} .dist-info folders instead of one")
        return folders.pop()

    def information(self, name: str) -> str:
        """The text of a file in the .dist-info folder, empty where there is none."""
        return self.members.get(f"{self.dist_info}/{name}", b"").decode("utf-8", "replace")

    @cached_property
    def metadata(self) -> Message:
        return message_from_string(self.information("METADATA"))


def read(path: Path) -> Wheel:
    try:
        project, version, _, tags = parse_wheel_filename(path.name)
        with zipfile.ZipFile(path) as archive:
            files = [entry for entry in archive.infolist() if not entry.is_dir()]
            members = {entry.filename: archive.read(entry) for entry in files}
    except InvalidWheelFilename as error:
        raise EnvironmentProblem(str(error), cure="give the path of a .whl file that still has its own name") from error
    except OSError as error:
        raise EnvironmentProblem(f"cannot read {path}: {error.strerror or error}", cure="check the path") from error
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError) as error:
        raise EnvironmentProblem(f"{path} is not a readable wheel: {error}", cure="build or fetch it again: it is damaged") from error
    wheel = Wheel(path, project, version, tags, tuple(entry.filename for entry in files), members)
    _ = wheel.dist_info  # a zip file without one is no wheel
    return wheel
