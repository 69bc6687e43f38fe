"""The declared contents of a wheel, from ``ci/matrix/matrix.toml`` and ``pyproject.toml``."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import Any

from ..errors import EnvironmentProblem
from ..files import tomllib
from ..matrix import REPOSITORY, Compilers, Library, Matrix, Platform, Targets, load
from ..wheelfile.wheel import Wheel
from . import expected


@dataclass(frozen=True)
class Module:
    """One native module that the wheel must hold. Its file name is the stem and whatever suffix the platform gives it."""

    stem: str  # "mlx_cuda/_cu12"
    extra: str  # whose requirements supply its libraries; "" for those that are always installed
    libraries: tuple[Library, ...]
    roots: tuple[str, ...]  # the roots of the locked provider wheels

    def holds(self, member: str) -> bool:
        return member.startswith(f"{self.stem}.") and "/" not in member.removeprefix(self.stem)


@dataclass(frozen=True)
class Policy:
    mlx: str
    size_budget_mib: int
    sources: Mapping[str, Path]  # the members that the checkout has: the package, and the licenses
    made: frozenset[str]  # those that the build, the packaging and the repair add, binaries and device code apart
    platform: Platform
    driver: str
    abis: tuple[str, ...]  # such as "cp310-abi3", any of them
    modules: tuple[Module, ...]
    bundled: str  # a glob of the other binaries that are allowed
    libraries_file: str  # the member with the package's list of libraries
    libraries: Mapping[str, Any]  # and what it must say
    metadata: str  # the text of METADATA
    compiler: Compilers  # of the host code
    nanobind: str  # the version that it is built with, "" for none
    platforms: tuple[str, ...]  # where it may have been built
    device: Mapping[str, Targets]  # what the fatbin of each source holds
    device_inputs: str  # the key of all that they are made from
    device_root: str  # of its compilers

    def copied(self, wheel: Wheel, member: str) -> bool:
        """Whether its name is that of a library that repair copies into the wheel."""
        return fnmatch(wheel.key(member), self.bundled) and member.count("/") == self.bundled.count("/")

    def module(self, member: str) -> Module | None:
        return next((module for module in self.modules if module.holds(member)), None)


def platform_of(wheel: Wheel, matrix: Matrix) -> Platform:
    """The declared platform that a wheel's tag is for."""
    for platform in matrix.platforms.values():
        if platform.takes(wheel.platforms[0]):
            return platform
    raise EnvironmentProblem(
        f"{wheel.path.name}: ci/matrix/matrix.toml does not declare the platform {wheel.platforms[0]}",
        fix=f"give a wheel for {', '.join(matrix.platforms)}",
    )


def _package(matrix: Matrix) -> dict[str, Path]:
    python = REPOSITORY / "python"
    files = (path for path in (python / matrix.module).rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {path.relative_to(python).as_posix(): path for path in files}


@cache  # of a checkout, which does not change while it audits
def _device(arch: tuple[str, ...]) -> tuple[dict[str, Targets], str]:
    from ..device import manifest, plan

    code = plan.sources(arch)
    return {source.name: source.targets for source in code}, manifest.inputs(code)


def _pinned(requirements: Sequence[str], name: str) -> str:
    return next((each.removeprefix(f"{name}==") for each in requirements if each.startswith(f"{name}==")), "")


def for_wheel(wheel: Wheel, *, cuda: Sequence[str] = (), arch: Sequence[str] = ()) -> Policy:
    """The policy for this wheel. `cuda` and `arch` are the options of a developer's build."""
    from ..matrix.package_table import render

    matrix = load()
    device, inputs = _device(tuple(arch or ["declared"]))
    if unknown := sorted(set(cuda) - set(matrix.cuda)):
        raise EnvironmentProblem(f"unknown CUDA version {', '.join(unknown)}", fix=f"use {' or '.join(matrix.cuda)}")
    chosen = [each for version, each in matrix.cuda.items() if not cuda or version in cuda]
    built = [each for each in (*chosen, matrix.cpu) if each.module]
    pyproject = tomllib.loads((REPOSITORY / "pyproject.toml").read_text("utf-8"))
    project = pyproject["project"]
    return Policy(
        mlx=matrix.mlx,
        sources={**_package(matrix), **{f"{wheel.dist_info}/licenses/{name}": REPOSITORY / name for name in project["license-files"]}},
        made=frozenset(
            {f"{matrix.module}/_build.json", wheel.sbom, *(f"{wheel.dist_info}/{name}" for name in ("METADATA", "WHEEL", "RECORD"))}
        ),
        size_budget_mib=matrix.size_budget_mib,
        platform=platform_of(wheel, matrix),
        driver=matrix.driver.get(wheel.system, ""),
        abis=tuple(build.abi for build in matrix.builds),
        modules=tuple(Module(f"{matrix.module}/{each.module}", each.extra, each.libraries, each.roots) for each in built),
        # delvewheel's copies of Microsoft's C++ run-time, named after what it copied: no Linux wheel needs a copy of anything.
        bundled=f"{matrix.module}.libs/msvcp140*-{32 * '[0-9a-f]'}.dll" if wheel.system == "windows" else "",
        libraries_file=f"{matrix.module}/_libraries.json",
        libraries=json.loads(render()),
        metadata=expected.metadata(project, str(wheel.version)),
        compiler=matrix.compilers[wheel.system],
        nanobind=_pinned(pyproject["build-system"]["requires"], "nanobind"),
        platforms=tuple(matrix.platforms),
        device=device,
        device_inputs=inputs,
        device_root=matrix.device.root,
    )
