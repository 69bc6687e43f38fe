"""Checks of METADATA, of WHEEL, and of the file name against both."""

from __future__ import annotations

import re
from collections.abc import Sequence

from packaging.version import Version

from ...matrix import load
from ...wheelfile.wheel import STAMP, VERSION, Wheel
from ..expected import differences, wheel_file
from ..policy import Policy
from .registry import Differences, Findings, across, check

_PACKAGE = re.compile(rb"%s==([^\0]*)\0" % re.escape(load().name).encode())  # a string in the native module


@check("build it again: wheel.py-api of pyproject.toml and ci/matrix/matrix.toml decide the tags")
def tags(wheel: Wheel, policy: Policy) -> Findings:
    """WHEEL is what the build writes for the tags of the file name, byte by byte; the policy has those tags."""
    for wrong in differences(wheel.information("WHEEL"), wheel_file(wheel)):
        yield f"{wheel.dist_info}/WHEEL", wrong
    found = {f"{tag.interpreter}-{tag.abi}" for tag in wheel.tags}
    if found not in ({abi} for abi in policy.abis):
        yield "", f"has the tag {', '.join(sorted(found))}, expected {' or '.join(policy.abis)}"


@check("build it again from this checkout: pyproject.toml, README.md and ci/build/description.py decide METADATA")
def metadata(wheel: Wheel, policy: Policy) -> Findings:
    """METADATA is what this checkout's pyproject.toml and README.md give, byte by byte."""
    for wrong in differences(wheel.information("METADATA"), policy.metadata):
        yield f"{wheel.dist_info}/METADATA", wrong


@check("build it again; python -m ci release stamp writes the version into all files")
def versions(wheel: Wheel, policy: Policy) -> Findings:
    """The file name, .dist-info, METADATA, the package and each native module spell one version; it is of the MLX that is pinned."""
    expected = str(wheel.version)
    package = load().module
    stated = STAMP.findall(wheel.members.get(VERSION, b""))
    modules = {member: _PACKAGE.findall(wheel.members[member]) for member in wheel.binaries if policy.module(member)}
    for member, found in (
        (wheel.dist_info, wheel.dist_info.removeprefix(f"{package}-").removesuffix(".dist-info")),
        (f"{wheel.dist_info}/METADATA", ", ".join(wheel.metadata.get_all("Version", []))),
        *((member, b", ".join(each).decode(errors="replace")) for member, each in [(VERSION, stated), *modules.items()]),
    ):
        if found != expected:
            yield member, f"has the version {found or 'none'}, expected the file name's {expected}"
    if not re.fullmatch(rf"{package}-{re.escape(expected)}(-[^-]+){{3}}\.whl", wheel.path.name):
        yield (
            "",
            f"is not named {package}-{expected}-PYTHON-ABI-PLATFORM.whl: another spelling, or a build number, which goes before others",
        )
    if policy.mlx and wheel.version.release[:3] != Version(policy.mlx).release:
        yield "", f"has the version {expected}, expected that of MLX, {policy.mlx}, and a number"


@across("build all wheels of a release from one commit")
def same_metadata(wheels: Sequence[Wheel]) -> Differences:
    """Wheels of one release say the same: a resolver reads one of them and takes it for all platforms."""
    first, *others = wheels
    for field in ("Requires-Dist", "Provides-Extra", "Requires-Python"):
        expected = set(first.metadata.get_all(field, []))
        for other in others:
            found = set(other.metadata.get_all(field, []))
            for verb, values in (("lacks", expected - found), ("has", found - expected)):
                for value in sorted(values):
                    yield other, f"{other.dist_info}/METADATA", f"{verb} {field}: {value}, expected the same as in {first.path.name}"
