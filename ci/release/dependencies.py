"""Whether what a release requires can be had.

A release whose sibling is not published yet cannot be installed by anybody, and no look at the wheels shows it.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from email.message import Message
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from .. import console, process
from ..audit import Violation
from ..errors import CheckFailed
from ..matrix import Platform, load
from ..toolkit import uv
from .standing import finding


def of_wheel(metadata: Message) -> dict[str, list[Requirement]]:
    """The requirements of each extra, with what is always installed."""
    requirements = [Requirement(line) for line in metadata.get_all("Requires-Dist", [])]
    return {
        extra: [each for each in requirements if each.marker is None or each.marker.evaluate({"extra": extra})]
        for extra in metadata.get_all("Provides-Extra", [])
    }


def dependencies(extras: Mapping[str, Sequence[Requirement]], python: str) -> Iterator[Violation]:
    """The requirements of each extra exist as wheels, on each platform, in the index that this machine's uv uses."""
    for extra, wanted in extras.items():
        lines = "".join(f"{each.name}{each.specifier}\n" for each in wanted)
        for platform in load().platforms.values() if wanted else ():
            console.say(f"resolving the extra {extra} for {platform.name}")
            try:
                with tempfile.TemporaryDirectory() as folder:  # away from this project's own settings of uv
                    resolve(platform, Path(folder), "--python-version", python, "--python", sys.executable, "-", lines=lines)
            except CheckFailed as error:
                message = f"the extra {extra} cannot be installed on {platform.name}, CPython {python}: {' '.join(str(error).split())}"
                yield finding("dependencies", message, "wait until they are published, or pin versions that are: python -m ci bump")


def oldest_python(requires_python: str) -> str:
    return min((each.version for each in SpecifierSet(requires_python) if each.operator == ">="), default="3.10")


def resolve(platform: Platform, folder: Path, *arguments: str, lines: str | None = None) -> str:
    """uv's resolution for a platform; CheckFailed if there is no solution."""
    command = [uv.executable(), "pip", "compile", "--quiet", "--no-build", "--python-platform", platform.uv, *arguments]
    done = process.run(command, cwd=folder, input=lines)
    if done.returncode and "No solution found" not in done.stderr:
        sys.stderr.write(done.stderr)
        raise uv.explain(done.stderr, done.returncode)
    if done.returncode:
        raise CheckFailed(done.stderr.strip())
    return done.stdout
