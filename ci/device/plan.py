"""The sources that are compiled for each GPU, and the keys of the results: pure functions of the tree, the matrix and the lock."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from .. import matrix
from ..errors import CheckFailed, EnvironmentProblem
from ..matrix import gpu
from ..toolkit import roots

SRC = matrix.REPOSITORY / "src"
OPTIONS = ("--std=c++20", "--device-as-default-execution-space")  # of NVRTC
MAKER = Path(__file__).with_name("compilers.py").read_text("utf-8")  # part of every key: the compilers' options
PACKER = Path(__file__).with_name("packed.py").read_text("utf-8")  # part of a fatbin's key

_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*(?:"([^"]+)"|<([^>]+)>|(\w+))', re.MULTILINE)


def key(*parts: str) -> str:
    return hashlib.sha256("\0".join((MAKER, *parts)).encode()).hexdigest()


@dataclass(frozen=True)
class Source:
    """A ``.cu`` file with the project's headers that it includes, and what it is compiled for."""

    path: Path
    root: Path  # src/, below which includes are looked for
    headers: tuple[Path, ...]
    targets: matrix.Targets
    fronts: dict[str, str]  # of each GPU's SASS: the PTX that it is assembled from
    tools: str  # the lock of the compilers and of the toolkit's headers

    @property
    def name(self) -> str:
        return self.path.stem

    @cached_property
    def inputs(self) -> str:
        # Headers are known by their place below src/, whatever the checkout's own is.
        places = sorted((Path(os.path.relpath(path, self.root)).as_posix(), path) for path in self.headers)
        files = [f"{place}\n{path.read_text('utf-8')}" for place, path in places]
        return key(self.tools, *OPTIONS, self.path.name, self.path.read_text("utf-8"), *files)

    def ptx_key(self, architecture: str) -> str:
        return key("ptx", self.inputs, architecture)

    def sass_key(self, architecture: str) -> str:
        return key("sass", self.ptx_key(self.fronts[architecture]), architecture)

    @property
    def fatbin_key(self) -> str:
        return key("fatbin", PACKER, *map(self.sass_key, self.targets.sass), *map(self.ptx_key, self.targets.ptx))


def sources(requested: Sequence[str], folder: Path | None = None) -> list[Source]:
    """Every source that has code for what is requested: ``["declared"]``, ``["native"]``, or names such as 90, 90a and compute_80."""
    device = matrix.load().device
    if list(requested) == ["native"]:
        requested = [name for capability in gpu.capabilities() for name in device.native(capability)]
    if not device.root:
        return []
    tools = roots.lock_text(roots.find(device.root))
    root = (folder or SRC).resolve()
    found: list[Source] = []
    for path in sorted(root.rglob("*.cu")):
        if any(path.stem == each.name for each in found):
            raise CheckFailed(f"{path}: another source has this name too, and a fatbin is named after its source")
        declared = device.declared(path.stem)
        try:
            targets = declared if list(requested) == ["declared"] else device.narrowed(path.stem, requested)
        except ValueError:
            names = " ".join(requested)
            fix = "use 'declared', 'native', numbers such as 90, or compute_80 for PTX"
            raise EnvironmentProblem(f"unknown architectures {names!r}", fix=fix) from None
        if targets.sass or targets.ptx:
            fronts = {architecture: declared.front(architecture) for architecture in targets.sass}
            found.append(Source(path, root, tuple(own_headers(path, [root])), targets, fronts, tools))
    if not found:
        raise EnvironmentProblem(f"no kernel is for {' '.join(requested)}", fix="see [device] in ci/matrix/matrix.toml")
    return found


def own_headers(source: Path, directories: Sequence[Path]) -> list[Path]:
    """The project's headers that a source includes, directly or not; the toolkit's are known by its lock.

    Conditional compilation is ignored, so the list may be too long but never too short.
    """
    found: dict[Path, None] = {}
    pending = [source]
    while pending:
        current = pending.pop()
        for quoted, angled, computed in _INCLUDE.findall(current.read_text("utf-8")):
            if computed:
                raise CheckFailed(f"{current}: error: #include {computed}: a computed include hides a dependency from the build")
            places = [current.parent, *directories] if quoted else directories
            header = next((path for place in places if (path := (place / (quoted or angled)).resolve()).is_file()), None)
            if header is not None and header not in found:
                found[header] = None
                pending.append(header)
    return list(found)


def files(chosen: Iterable[Source]) -> list[Path]:
    """Everything of the tree that the result depends on."""
    return sorted({path for source in chosen for path in (source.path, *source.headers)})
