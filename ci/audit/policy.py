"""What a wheel must be: our own policy, derived from ``ci/matrix/matrix.toml``, and those of ``policies/*.toml`` for other wheels."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from packaging.utils import canonicalize_name

from ..errors import EnvironmentProblem
from ..files import tomllib
from ..matrix import REPOSITORY, Library, Matrix, Platform, Targets, load

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from .wheel import Wheel

OWN = "mlx-cuda"
POLICIES = Path(__file__).parent / "policies"


@dataclass(frozen=True)
class Module:
    """One native module that the wheel must hold. Its file name is the stem and whatever suffix the platform gives it."""

    stem: str  # "mlx_cuda/_cu12"
    extra: str  # whose requirements supply its libraries; "" for those that are always installed
    libraries: tuple[Library, ...]
    roots: tuple[str, ...] = ()  # where the locked provider wheels lie; none: not checked against files
    embedded: Targets | None = None  # what each fatbin inside it holds; None: it holds no fatbin

    def holds(self, member: str) -> bool:
        return member.startswith(f"{self.stem}.")


@dataclass(frozen=True)
class Policy:
    name: str
    project: str
    requires_python: str
    size_budget_mib: int
    driver: str
    modules: tuple[Module, ...]
    requirements: Mapping[str, tuple[str, ...]] | None  # by extra, "" being what is always installed; None: not laid down
    bundled: tuple[str, ...]  # globs of the other binaries that may lie inside
    platform: Platform | None = None
    abis: tuple[str, ...] = ()  # such as "cp310-abi3", any of them; none: no extension modules
    libraries_file: str | None = None  # the member that tells the package where its libraries lie
    libraries: Mapping[str, Any] | None = None  # and what it must say
    symbols: tuple[str, ...] = ()  # globs of symbols that libraries without a locked root supply
    device: Mapping[str, Targets] | None = None  # what the fatbin of each source holds; None: there is no folder of device code
    device_root: str = ""  # of its compilers

    @property
    def roots(self) -> tuple[str, ...]:
        """Those that the wheel was made with."""
        every = [root for module in self.modules for root in module.roots]
        return tuple(dict.fromkeys([*every, self.device_root] if self.device_root else every))

    def module(self, member: str) -> Module | None:
        return next((module for module in self.modules if module.holds(member)), None)


def names() -> tuple[str, ...]:
    return (OWN, *sorted(path.stem for path in POLICIES.glob("*.toml")))


def platform_of(wheel: Wheel, matrix: Matrix) -> Platform:
    """The declared platform that a wheel's tag is for."""
    for platform in matrix.platforms.values():
        if platform.takes(wheel.platforms[0]):
            return platform
    raise EnvironmentProblem(
        f"{wheel.path.name}: nothing is declared for the platform {wheel.platforms[0]}",
        cure=f"give a wheel for {', '.join(matrix.platforms)}",
    )


def for_wheel(
    wheel: Wheel,
    name: str = OWN,
    *,
    cuda: Sequence[str] = (),
    arch: Sequence[str] = (),
) -> Policy:
    """The named policy for this wheel. `cuda` and `arch` narrow the own policy to what a developer's build was asked for."""
    if name == OWN:
        return _own(wheel, load(), cuda, arch)
    if cuda or arch:
        raise EnvironmentProblem(f"--cuda and --arch narrow the policy {OWN!r} only", cure=f"leave them out with --policy {name}")
    return _from_file(wheel, name)


def _own(wheel: Wheel, matrix: Matrix, cuda: Sequence[str], arch: Sequence[str]) -> Policy:
    from ..device import plan
    from ..matrix.package_table import render

    unknown = sorted(set(cuda) - set(matrix.cuda))
    if unknown:
        raise EnvironmentProblem(f"unknown CUDA version {', '.join(unknown)}", cure=f"use {' or '.join(matrix.cuda)}")
    chosen = {version: each for version, each in matrix.cuda.items() if not cuda or version in cuda}
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text("utf-8"))["project"]
    return Policy(
        name=OWN,
        project=matrix.name,
        requires_python=project["requires-python"],
        size_budget_mib=matrix.size_budget_mib,
        driver=matrix.driver[wheel.system],
        modules=tuple(Module(f"{matrix.module}/{each.module}", each.extra, each.libraries, each.roots) for each in chosen.values()),
        requirements={
            "": tuple(project["dependencies"]),
            "cpu": (f"mlx-cpu=={matrix.mlx}",),
            **{each.extra: each.requires for each in matrix.cuda.values()},
        },
        bundled=(f"{matrix.module}.libs/*",),
        platform=platform_of(wheel, matrix),
        abis=tuple(build.abi for build in matrix.builds),
        libraries_file=f"{matrix.module}/_libraries.json",
        libraries=json.loads(render(matrix)),
        device={source.name: source.targets for source in plan.sources(arch or ["declared"])},
        device_root=matrix.device.root,
    )


def _from_file(wheel: Wheel, name: str) -> Policy:
    path = POLICIES / f"{name}.toml"
    if not path.is_file():
        raise EnvironmentProblem(f"unknown policy {name!r}", cure=f"use one of {', '.join(names())}")
    data = tomllib.loads(path.read_text("utf-8"))
    table = data["wheels"].get(canonicalize_name(wheel.project))
    if table is None:
        raise EnvironmentProblem(f"policy {name!r} says nothing of {wheel.project}", cure=f"it is for {', '.join(data['wheels'])}")
    system = wheel.system
    libraries = tuple(Library(**entry) for entry in table["libraries"] if system in entry["files"])
    module = Module(table["stem"][system], "", libraries, embedded=Targets(tuple(table["sass"]), tuple(table["ptx"])))
    return Policy(
        name=name,
        project=wheel.project,
        requires_python=data["requires_python"],
        size_budget_mib=data["size_budget_mib"],
        driver=data["driver"][system],
        modules=(module,),
        requirements=None,
        bundled=tuple(table["bundled"]),
        symbols=tuple(data["symbols"]),
    )
