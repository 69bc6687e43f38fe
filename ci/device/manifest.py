"""``manifest.json`` beside the fatbins: what they are, what they were made from, and their digests."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .. import matrix
from ..errors import EnvironmentProblem
from ..files import write_changed
from ..toolkit import roots
from . import plan
from .packed import SUFFIX

NAME = "manifest.json"


@dataclass(frozen=True)
class Fatbin:
    """One file, ``<source>.fatbin.lzma``."""

    sha256: str
    size: int
    sass: tuple[str, ...]
    ptx: tuple[str, ...]


@dataclass(frozen=True)
class Manifest:
    inputs: str  # the key of everything that it was made from
    packages: tuple[str, ...]  # the locked compilers
    fatbins: dict[str, Fatbin]

    @property
    def text(self) -> str:
        return json.dumps(asdict(self), indent=1, sort_keys=True) + "\n"

    @property
    def digest(self) -> str:
        """The SHA-256 that a native module contains."""
        return hashlib.sha256(self.text.encode()).hexdigest()


def parse(text: str) -> Manifest:
    """Read a manifest; a ValueError where it is none."""
    try:
        data: dict[str, Any] = json.loads(text)
        fatbins = {
            str(name): Fatbin(str(each["sha256"]), int(each["size"]), tuple(each["sass"]), tuple(each["ptx"]))
            for name, each in data["fatbins"].items()
        }
        return Manifest(str(data["inputs"]), tuple(data["packages"]), fatbins)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"not a manifest of device code: {error}") from error


def inputs(sources: Sequence[plan.Source]) -> str:
    return plan.key("all", *(f"{source.name} {source.fatbin_key}" for source in sources))


def write(output: Path, sources: Sequence[plan.Source], fatbins: Mapping[str, bytes]) -> Manifest:
    """Write these fatbins into the folder, each completely or not at all, and remove all others."""
    output.mkdir(parents=True, exist_ok=True)
    told = {
        source.name: Fatbin(hashlib.sha256(data).hexdigest(), len(data), source.targets.sass, source.targets.ptx)
        for source, data in ((source, fatbins[source.name]) for source in sources)
    }
    made = Manifest(inputs(sources), roots.find(matrix.load().device.root).packages, told)
    for name, data in fatbins.items():
        write_changed(output / f"{name}{SUFFIX}", data)
    for old in set(output.glob(f"*{SUFFIX}")) - {output / f"{name}{SUFFIX}" for name in fatbins}:
        old.unlink()
    write_changed(output / NAME, made.text.encode())
    return made


def take(folder: Path, sources: Sequence[plan.Source], output: Path) -> Manifest:
    """Take finished device code from another build, after a check that it is complete and of this tree."""
    fix = "compile it from this commit (python -m ci device), or unset MLX_CUDA_DEVICE_CODE"
    try:
        given = parse((folder / NAME).read_text("utf-8"))
        if given.inputs != inputs(sources) or set(given.fatbins) != {source.name for source in sources}:
            raise EnvironmentProblem(f"the device code in {folder} was made from other sources, compilers or for other GPUs", fix=fix)
        fatbins = {name: (folder / f"{name}{SUFFIX}").read_bytes() for name in given.fatbins}
    except (OSError, ValueError) as error:
        raise EnvironmentProblem(f"{folder} holds no device code: {error}", fix=fix) from None
    for name, data in fatbins.items():
        if hashlib.sha256(data).hexdigest() != given.fatbins[name].sha256:
            raise EnvironmentProblem(f"{folder / name}{SUFFIX} is damaged: its digest is not the manifest's", fix=fix)
    return write(output, sources, fatbins)
