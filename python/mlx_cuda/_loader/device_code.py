"""The device code of the package: one packed fatbin per source in ``device/``, and a manifest, whose digest the native modules know."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from .._common.errors import BackendError
from .origin import origin, reinstall

FOLDER, MANIFEST = "device", "manifest.json"


@dataclass(frozen=True)
class Fatbin:
    """The targets of one source: SASS such as 80 and 90a, PTX such as 80."""

    sha256: str
    sass: tuple[str, ...]
    ptx: tuple[str, ...]

    def serving(self, capability: tuple[int, int]) -> str:
        """Return the code that a GPU gets: the newest SASS of its family, else PTX, which the driver compiles on first use; else ""."""
        number = 10 * capability[0] + capability[1]
        family = [each for each in self.sass if _number(each) // 10 == capability[0] and _runs(each, number)]
        if family:
            return f"sm_{max(family, key=_number)}"
        older = [each for each in self.ptx if _runs(each, number)]
        return f"compute_{max(older, key=_number)}" if older else ""


def _number(architecture: str) -> int:
    found = re.match(r"\d+", architecture)
    return int(found[0]) if found else 0


def _runs(architecture: str, number: int) -> bool:
    """Return whether a GPU of this family runs the code: the suffix ``a`` binds it to one compute capability."""
    return _number(architecture) == number if architecture.endswith("a") else _number(architecture) <= number


@dataclass(frozen=True)
class DeviceCode:
    """The manifest of a package's device code."""

    digest: str
    fatbins: Mapping[str, Fatbin]

    def serving(self, capability: tuple[int, int]) -> dict[str, tuple[str, ...]]:
        """Return the sources by the code that a GPU gets, such as ``sm_80`` or ``compute_80``; "" for those without code."""
        served: dict[str, list[str]] = {}
        for name, fatbin in sorted(self.fatbins.items()):
            served.setdefault(fatbin.serving(capability), []).append(name)
        return {code: tuple(names) for code, names in sorted(served.items(), reverse=True)}


@cache
def read(package: Path) -> DeviceCode:
    """Return the manifest of an installed package; raise a BackendError if it cannot be read."""
    path = package / FOLDER / MANIFEST
    try:
        text = path.read_bytes()
        data: Any = json.loads(text)
        fatbins = {
            str(name): Fatbin(str(each["sha256"]), tuple(each["sass"]), tuple(each["ptx"])) for name, each in data["fatbins"].items()
        }
    except (OSError, KeyError, TypeError, AttributeError, ValueError) as error:
        raise BackendError(f"the device code's manifest {path} cannot be read: {error}", fix=reinstall(origin())) from error
    return DeviceCode(hashlib.sha256(text).hexdigest(), fatbins)


def load(package: Path, digest: str) -> dict[str, bytes]:
    """Return every packed fatbin by source; raise a BackendError unless all are those with which this native module was built."""
    code = read(package)
    if code.digest != digest:
        raise BackendError(f"the device code in {package / FOLDER} is of another build than the native module", fix=reinstall(origin()))
    found = {}
    for name, fatbin in code.fatbins.items():
        path = package / FOLDER / f"{name}.fatbin.lzma"
        try:
            found[name] = path.read_bytes()
        except OSError as error:
            raise BackendError(f"device code is missing: {error}", fix=reinstall(origin())) from error
        if hashlib.sha256(found[name]).hexdigest() != fatbin.sha256:
            raise BackendError(f"the device code {path} is damaged: its digest is not the manifest's", fix=reinstall(origin()))
    return found
