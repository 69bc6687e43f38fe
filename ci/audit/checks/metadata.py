"""Checks of METADATA, of WHEEL, and of the file name against both."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from packaging.metadata import InvalidMetadata, Metadata
from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet
from packaging.tags import Tag, parse_tag
from packaging.utils import canonicalize_name
from packaging.version import Version

from ...build.description import relative_links
from ..wheel import STAMP, VERSION
from .registry import across, check

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ..policy import Policy
    from ..wheel import Wheel
    from .registry import Differences, Findings

_PACKAGE = re.compile(rb"mlx-cuda==([^\0]*)\0")  # a string in the native module


@check
def tags(wheel: Wheel, policy: Policy) -> Findings:
    """The file name, WHEEL and the policy agree on the tags; the files go where binaries belong."""
    headers = dict[str, list[str]]()
    for line in wheel.information("WHEEL").splitlines():
        key, _, value = line.partition(":")
        headers.setdefault(key.strip(), []).append(value.strip())
    member = f"{wheel.dist_info}/WHEEL"
    try:
        stated: set[Tag] = set().union(*(parse_tag(tag) for tag in headers.get("Tag", [])))
    except ValueError:
        stated = set()
    if stated != wheel.tags:
        yield member, f"has tag {_spell(stated) or 'none'}, expected the file name's {_spell(wheel.tags)}"
    if "Build" in headers:
        yield member, "has a build number, which goes before other wheels of this version, expected none"
    if headers.get("Root-Is-Purelib") != ["false"]:
        yield (
            member,
            f"has Root-Is-Purelib: {', '.join(headers.get('Root-Is-Purelib', ['nothing']))}, expected false: the wheel holds binaries",
        )
    if headers.get("Wheel-Version", [""])[0].split(".")[0] != "1":
        yield member, f"has Wheel-Version: {', '.join(headers.get('Wheel-Version', ['nothing']))}, expected 1.0"
    found = {f"{tag.interpreter}-{tag.abi}" for tag in wheel.tags}
    if found not in ({abi} for abi in policy.abis):
        yield "", f"has the tag {', '.join(sorted(found))}, expected {' or '.join(policy.abis)}"


@check
def metadata(wheel: Wheel, policy: Policy) -> Findings:
    """METADATA is valid by the specification, is about this wheel, and says what an index page needs."""
    member = f"{wheel.dist_info}/METADATA"
    try:
        Metadata.from_email(wheel.information("METADATA"), validate=True)
    # An ExceptionGroup, which Python 3.10 lacks: packaging brings its own there.
    except Exception as group:
        for error in getattr(group, "exceptions", (group,)):
            field = f"{error.field}: " if isinstance(error, InvalidMetadata) else ""
            yield member, f"is not valid core metadata: {field}{error}"
    fields = wheel.metadata
    for name, alike, expected in (
        ("Name", canonicalize_name, policy.project),
        ("Requires-Python", SpecifierSet, policy.requires_python),
    ):
        if not _same(fields.get(name, ""), expected, alike):
            yield member, f"has {name}: {fields.get(name)}, expected {expected}"
    if not fields.get("Summary"):
        yield member, "has no Summary"
    description = str(fields.get("Description") or fields.get_payload())
    if not description.strip():
        yield member, "has no description, expected the README"
    for link in dict.fromkeys(relative_links(description)):
        yield member, f"has a description that links to {link}, which leads nowhere on an index page: expected a whole URL"


def _same(found: str, expected: str, alike: Callable[[str], object]) -> bool:
    try:
        return alike(found) == alike(expected)
    except ValueError:  # which all of packaging's are
        return False


@check
def versions(wheel: Wheel, policy: Policy) -> Findings:
    """The file name, .dist-info, METADATA, the package and each native module spell one version; it is of the MLX that is pinned."""
    expected = str(wheel.version)
    package = policy.libraries_file.split("/", 1)[0]
    stated = STAMP.findall(wheel.members.get(VERSION, b""))
    modules = {member: _PACKAGE.findall(wheel.members[member]) for member in wheel.binaries if policy.module(member)}
    for member, found in (
        (wheel.dist_info, wheel.dist_info.removeprefix(f"{package}-").removesuffix(".dist-info")),
        (f"{wheel.dist_info}/METADATA", ", ".join(wheel.metadata.get_all("Version", []))),
        *((member, b", ".join(each).decode("utf-8", "replace")) for member, each in [(VERSION, stated), *modules.items()]),
    ):
        if found != expected:
            yield member, f"has the version {found or 'none'}, expected the file name's {expected}"
    if not re.fullmatch(rf"{package}-{re.escape(expected)}(-[^-]+){{3}}\.whl", wheel.path.name):
        yield (
            "",
            f"is not named {package}-{expected}-PYTHON-ABI-PLATFORM.whl: another spelling, or a build number, which goes before others",
        )
    if wheel.version.release[:3] != Version(policy.mlx).release:
        yield "", f"has the version {expected}, expected that of MLX, {policy.mlx}, and a number"


@check
def requirements(wheel: Wheel, policy: Policy) -> Findings:
    """Exactly the declared requirements of each extra, with no other marker than the extra."""
    member = f"{wheel.dist_info}/METADATA"
    found: dict[str, set[str]] = {extra: set() for extra in ("", *map(canonicalize_name, wheel.metadata.get_all("Provides-Extra", [])))}
    for line in wheel.metadata.get_all("Requires-Dist", []):
        try:
            requirement = Requirement(line)
        except InvalidRequirement as error:
            yield member, f"has an invalid requirement {line!r}: {error}"
            continue
        extra = extra_of(requirement)
        if extra is None:
            yield (
                member,
                f"has the marker {str(requirement.marker)!r} on {requirement.name}, expected none but the extra",
            )
        found.setdefault(extra or "", set()).add(_canonical(requirement))
    for extra in sorted(found.keys() | policy.requirements.keys()):
        place = f"extra {extra}" if extra else "the requirements"
        if extra not in policy.requirements:
            yield member, f"offers the extra {extra}, expected only {', '.join(filter(None, policy.requirements))}"
            continue
        if extra not in found:
            yield member, f"lacks the extra {extra}"
            continue
        expected = {_canonical(Requirement(each)) for each in policy.requirements[extra]}
        for each in sorted(found[extra] - expected):
            yield member, f"{place}: has {each}, expected {', '.join(sorted(expected))}"
        for each in sorted(expected - found[extra]):
            yield member, f"{place}: lacks {each}"


def extra_of(requirement: Requirement) -> str | None:
    """The extra that a requirement belongs to, "" for none, None if its marker says anything else."""
    if requirement.marker is None:
        return ""
    left, _, right = str(requirement.marker).partition(" == ")
    return canonicalize_name(right.strip("\"'")) if left == "extra" and " " not in right else None


def _canonical(requirement: Requirement) -> str:
    extras = f"[{','.join(sorted(requirement.extras))}]" if requirement.extras else ""
    address = f" @ {requirement.url}" if requirement.url else ""
    return f"{canonicalize_name(requirement.name)}{extras}{requirement.specifier}{address}"


@check
def licence(wheel: Wheel, _: Policy) -> Findings:
    member = f"{wheel.dist_info}/METADATA"
    if not (wheel.metadata.get("License-Expression") or wheel.metadata.get("License")):
        yield member, "names no licence, expected License-Expression"
    files = wheel.metadata.get_all("License-File", [])
    if not files:
        yield member, "has no License-File, expected the licence's text in the wheel"
    for name in files:
        # Metadata 2.4 has them in licenses/; tools before it put them beside METADATA.
        if not any(wheel.information(place).strip() for place in (f"licenses/{name}", name)):
            yield f"{wheel.dist_info}/licenses/{name}", "is missing or empty, but METADATA names it"


@across
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


def _spell(each: set[Tag] | frozenset[Tag]) -> str:
    return ", ".join(sorted(map(str, each)))
