"""Checks of METADATA, of WHEEL, and of the file name against both."""

from __future__ import annotations

from typing import TYPE_CHECKING

from packaging.metadata import InvalidMetadata, Metadata
from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.tags import Tag, parse_tag
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ..policy import Policy
    from ..wheel import Wheel


def tags(wheel: Wheel, policy: Policy) -> Iterator[tuple[str, str]]:
    """The file name, WHEEL and the policy agree on the tags; the files go where binaries belong."""
    headers = dict[str, list[str]]()
    for line in wheel.information("WHEEL").splitlines():
        key, _, value = line.partition(":")
        headers.setdefault(key.strip(), []).append(value.strip())
    member = f"{wheel.dist_info}/WHEEL"
    stated: set[Tag] = set().union(*(parse_tag(tag) for tag in headers.get("Tag", [])))
    if stated != wheel.tags:
        yield member, f"has tag {_spell(stated) or 'none'}, expected the file name's {_spell(wheel.tags)}"
    if headers.get("Root-Is-Purelib") != ["false"]:
        yield (
            member,
            f"has Root-Is-Purelib: {', '.join(headers.get('Root-Is-Purelib', ['nothing']))}, expected false: the wheel holds binaries",
        )
    if headers.get("Wheel-Version", [""])[0].split(".")[0] != "1":
        yield member, f"has Wheel-Version: {', '.join(headers.get('Wheel-Version', ['nothing']))}, expected 1.0"
    if policy.abis:
        found = {f"{tag.interpreter}-{tag.abi}" for tag in wheel.tags}
        if found not in ({abi} for abi in policy.abis):
            yield "", f"has the tag {', '.join(sorted(found))}, expected {' or '.join(policy.abis)}"


def complete(wheel: Wheel, policy: Policy) -> Iterator[tuple[str, str]]:
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
    if canonicalize_name(fields.get("Name", "")) != canonicalize_name(policy.project):
        yield member, f"has Name: {fields.get('Name')}, expected {policy.project}"
    if not _same_version(fields.get("Version", ""), wheel.version):
        yield member, f"has Version: {fields.get('Version')}, expected the file name's {wheel.version}"
    if not _same_specifier(fields.get("Requires-Python", ""), policy.requires_python):
        yield member, f"has Requires-Python: {fields.get('Requires-Python')}, expected {policy.requires_python}"
    if not fields.get("Summary"):
        yield member, "has no Summary"
    if not str(fields.get("Description") or fields.get_payload()).strip():
        yield member, "has no description, expected the README"


def requirements(wheel: Wheel, policy: Policy) -> Iterator[tuple[str, str]]:
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
    if policy.requirements is None:
        return
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
    return f"{canonicalize_name(requirement.name)}{requirement.specifier}"


def licences(wheel: Wheel, _: Policy) -> Iterator[tuple[str, str]]:
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


def same(wheels: Sequence[Wheel]) -> Iterator[tuple[Wheel, str, str]]:
    """Wheels of one release say the same: a resolver reads one of them and takes it for all platforms."""
    for field in ("Requires-Dist", "Provides-Extra", "Requires-Python"):
        first, *others = wheels
        expected = set(first.metadata.get_all(field, []))
        for other in others:
            found = set(other.metadata.get_all(field, []))
            for value in sorted(expected - found):
                yield other, f"{other.dist_info}/METADATA", f"lacks {field}: {value}, expected the same as in {first.path.name}"
            for value in sorted(found - expected):
                yield other, f"{other.dist_info}/METADATA", f"has {field}: {value}, expected the same as in {first.path.name}"


def _same_version(found: str, expected: Version) -> bool:
    try:
        return Version(found) == expected
    except InvalidVersion:
        return False


def _same_specifier(found: str, expected: str) -> bool:
    try:
        return SpecifierSet(found) == SpecifierSet(expected)
    except InvalidSpecifier:
        return False


def _spell(each: set[Tag] | frozenset[Tag]) -> str:
    return ", ".join(sorted(map(str, each)))
