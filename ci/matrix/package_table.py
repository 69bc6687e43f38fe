"""``python -m ci.matrix.package_table``: write the package's copy of the matrix, ``_libraries.json``.

The installed package needs to know at run time which libraries its native modules link, where they are and which package supplies
them. ``ci/matrix/matrix.toml`` is the one place that says so; the wheel carries this extract of it.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from typing import Any

from packaging.requirements import Requirement

from . import REPOSITORY, Cuda, Library, Matrix, capability, load

PATH = REPOSITORY / "python" / load().module / "_libraries.json"

_BOUNDS = {">=": "minimum", "<": "below", "==": "exactly"}


def _bounds(requirement: str) -> tuple[str, dict[str, str]]:
    parsed = Requirement(requirement)
    return parsed.name, {_BOUNDS[part.operator]: part.version for part in sorted(parsed.specifier, key=str)}


def _cuda(cuda: Cuda) -> dict[str, Any]:
    return {
        "module": cuda.module,
        "extra": cuda.extra,
        "driver": cuda.driver,
        "driver_cuda": [int(part) for part in cuda.driver_cuda.split(".")],
        "capability": list(divmod(min(map(capability, load().device.sass)), 10)),
        "requires": dict(_bounds(requirement) for requirement in cuda.requires),
        "preload": list(map(asdict, cuda.preload)),
        "libraries": list(map(_library, cuda.libraries)),
    }


def _library(library: Library) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for system, kind in (("linux", "soname"), ("windows", "dll")):
        if system in library.files:
            found[system] = {kind: library.files[system], "dir": library.directories[system]}
    return {"name": library.name, "provider": library.provider, "needed": library.needed, **found}


def _glibc(matrix: Matrix) -> str:
    """The glibc that upstream's own wheels need, as the platforms' uv names declare it."""
    versions = {match.groups() for platform in matrix.platforms.values() if (match := re.search(r"manylinux_(\d+)_(\d+)$", platform.uv))}
    return ".".join(max(versions, key=lambda version: tuple(map(int, version))))


def render(matrix: Matrix | None = None) -> str:
    """The text of ``_libraries.json``: the run-time part of the matrix, keyed by CUDA major."""
    matrix = matrix or load()
    table: dict[str, Any] = {"mlx": matrix.mlx, "glibc": _glibc(matrix)}
    table |= {str(cuda.major): _cuda(cuda) for cuda in sorted(matrix.cuda.values(), key=lambda cuda: cuda.major)}
    return json.dumps(table, indent=2) + "\n"


if __name__ == "__main__":
    PATH.write_text(render(), encoding="utf-8", newline="\n")
    print(PATH)
