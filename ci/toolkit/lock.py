"""The locked requirement files: one per root, holding the wheels of all platforms.

A lock is a plain requirement file with hashes (pip and uv read it), in which a comment line names each wheel: the platform it is
for, its size, its sha256 and its file name. These comments are what tells that a lock lacks a platform, and how much will be fetched.
"""

from __future__ import annotations

import hashlib
import re
import sys
import tempfile
import urllib.error
import urllib.parse
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from ci import matrix
from ci.errors import EnvironmentProblem
from ci.files import tomllib

from . import roots, uv

# Wheels that are built per CPython (cudnn-frontend's) are locked and unpacked for this one, whichever interpreter runs the factory.
PYTHON = "3.11"

_HEADER = """\
# Written by `python -m ci toolkit lock` from toolkits.toml; do not edit.
# Below each requirement: one line per wheel, with its platform, bytes, sha256 and file name.
"""
_REQUIREMENT = re.compile(r"(\S+==\S+) \\")
_WHEEL = re.compile(r"# (\S+) (\d+) sha256:([0-9a-f]{64}) (\S+\.whl)")


@dataclass(frozen=True)
class Wheel:
    requirement: str
    platform: str
    size: int
    sha256: str
    file: str


def parse(text: str) -> list[Wheel]:
    wheels, requirement = [], ""
    for line in text.splitlines():
        if match := _REQUIREMENT.fullmatch(line):
            requirement = match[1]
        elif match := _WHEEL.fullmatch(line):
            wheels.append(Wheel(requirement, match[1], int(match[2]), match[3], match[4]))
    return wheels


def render(wheels: list[Wheel]) -> str:
    blocks = [_HEADER]
    for requirement, group in groupby(wheels, key=lambda wheel: wheel.requirement):
        members = list(group)
        hashes = [f"    --hash=sha256:{digest}" for digest in sorted({wheel.sha256 for wheel in members})]
        lines = [f"# {wheel.platform} {wheel.size} sha256:{wheel.sha256} {wheel.file}" for wheel in members]
        blocks.append(" \\\n".join([requirement, *hashes]) + "\n" + "\n".join(lines) + "\n")
    return "\n".join(blocks)


def wheels_for(root: roots.Root, platform: matrix.Platform) -> list[Wheel]:
    """The wheels of a root on a platform, or an :class:`EnvironmentProblem` if the lock does not cover it."""
    wheels = parse(roots.lock_text(root))
    chosen = [wheel for wheel in wheels if wheel.platform == platform.name]
    if lacking := set(root.packages) - {wheel.requirement for wheel in chosen}:
        raise EnvironmentProblem(
            f"the lock {root.lock_file} lacks the platform {platform.name}: it holds no wheel of {', '.join(sorted(lacking))} for it",
            fix=f"let `platforms` of {root.name} in ci/toolkit/locks/toolkits.toml cover it; `python -m ci toolkit lock {root.name}`",
        )
    return chosen


def resolve(root: roots.Root) -> str:
    """Query the package index for the wheels of a root on each of its platforms, and return the lock's text."""
    found = [wheel for name in root.platforms for wheel in _resolve(root, matrix.load().platform(name))]
    order = {requirement: place for place, requirement in enumerate(root.packages)}
    return render(sorted(found, key=lambda wheel: order[wheel.requirement]))


def _resolve(root: roots.Root, platform: matrix.Platform) -> list[Wheel]:
    with tempfile.TemporaryDirectory() as folder:
        requirements, result = Path(folder, "requirements.in"), Path(folder, "pylock.toml")
        requirements.write_text("\n".join(root.packages) + "\n", "utf-8")
        uv.run(
            "pip", "compile", "--quiet", "--no-deps", "--only-binary", ":all:", "--generate-hashes", "--format", "pylock.toml",
            "--python", sys.executable, "--python-version", PYTHON, "--python-platform", platform.uv,
            str(requirements), "--output-file", str(result), cwd=Path(folder),
        )  # fmt: skip
        packages = tomllib.loads(result.read_text("utf-8"))["packages"]
        with ThreadPoolExecutor(8) as pool:
            return list(pool.map(lambda package: _wheel(package, platform, Path(folder)), packages))


def _wheel(package: dict[str, Any], platform: matrix.Platform, folder: Path) -> Wheel:
    """The one wheel to lock of a package of a ``pylock.toml``: the first, where several would do."""
    requirement = f"{package['name']}=={package['version']}"
    if not package.get("wheels"):
        raise EnvironmentProblem(
            f"{requirement} has no wheel for {platform.name}",
            fix="choose another version, or restrict `platforms` of the root, in toolkits.toml",
        )
    entry = package["wheels"][0]
    location = entry.get("url") or (folder / entry["path"]).resolve().as_uri()
    size = entry.get("size") or _size(location)
    file = urllib.parse.unquote(urllib.parse.urlsplit(location).path).rsplit("/", 1)[-1]
    sha256 = entry.get("hashes", {}).get("sha256") or _digest(location)
    return Wheel(requirement, platform.name, size, sha256, file)


def _size(location: str) -> int:
    """The size of a wheel, queried from the server, since not every index has sizes."""
    request = urllib.request.Request(location, method="HEAD")  # noqa: S310 - a location that uv resolved
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:  # noqa: S310
            return int(answer.headers["Content-Length"])
    except (urllib.error.URLError, TypeError, ValueError) as error:
        raise EnvironmentProblem(f"the size of {location} cannot be queried: {error}", fix="check the network, then lock again") from error


def _digest(location: str) -> str:
    with urllib.request.urlopen(location) as answer:  # noqa: S310 - a wheel in a local folder, which has no hash written beside it
        return hashlib.sha256(answer.read()).hexdigest()
