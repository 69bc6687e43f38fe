"""What is different from another set of wheels: sizes, libraries, requirements."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from .contents import Contents


@dataclass(frozen=True)
class Difference:
    """One size, before and after; None where there was none."""

    name: str
    kind: str
    before: int | None
    after: int | None

    @property
    def delta(self) -> int:
        return (self.after or 0) - (self.before or 0)

    @property
    def percent(self) -> float | None:
        return 100 * self.delta / self.before if self.before and self.after is not None else None


@dataclass(frozen=True)
class Change:
    """One wheel against the one for the same platform and Python in the other set."""

    after: Contents
    before: Contents
    members: tuple[Difference, ...]  # only those that differ, the largest difference first
    parts: tuple[Difference, ...]  # of the device code and the native modules, likewise
    added: tuple[str, ...]  # libraries, RPATH entries, requirements that are new
    removed: tuple[str, ...]

    @property
    def download(self) -> Difference:
        return Difference("download", "download", self.before.size, self.after.size)

    @property
    def unpacked(self) -> Difference:
        return Difference("unpacked", "unpacked", self.before.unpacked, self.after.unpacked)

    @property
    def same_bytes(self) -> bool:
        return self.before.sha256 == self.after.sha256


@dataclass(frozen=True)
class Changes:
    pairs: tuple[Change, ...]
    added: tuple[Contents, ...]  # wheels without a partner
    removed: tuple[Contents, ...]

    @property
    def versions(self) -> tuple[str, ...]:
        return tuple(sorted({each.version for each in [*(pair.before for pair in self.pairs), *self.removed]}))


def compare(after: Sequence[Contents], before: Sequence[Contents]) -> Changes:
    old = {_key(each): each for each in before}
    new = {_key(each): each for each in after}
    return Changes(
        pairs=tuple(_change(each, old[key]) for key, each in new.items() if key in old),
        added=tuple(each for key, each in new.items() if key not in old),
        removed=tuple(each for key, each in old.items() if key not in new),
    )


def _key(each: Contents) -> tuple[str, str, str]:
    """What makes two wheels the same one of two releases: not the version, and not how old a Linux it runs on."""
    return each.project, each.platform, each.python


def _change(after: Contents, before: Contents) -> Change:
    old, new = list(_statements(before)), list(_statements(after))
    return Change(
        after=after,
        before=before,
        members=_differences(_members(before), _members(after)),
        parts=_differences(_parts(before), _parts(after)),
        added=tuple(each for each in new if each not in old),
        removed=tuple(each for each in old if each not in new),
    )


def _differences(before: Mapping[tuple[str, str], int], after: Mapping[tuple[str, str], int]) -> tuple[Difference, ...]:
    keys = dict.fromkeys([*after, *before])
    found = [Difference(name, kind, before.get((name, kind)), after.get((name, kind))) for name, kind in keys]
    return tuple(sorted((each for each in found if each.before != each.after), key=lambda each: (-abs(each.delta), each.name)))


def _members(contents: Contents) -> dict[tuple[str, str], int]:
    """Sizes by member; the version in the .dist-info folder's name and in a library's hash suffix would hide what stays the same."""
    return {(re.sub(r"^[^/]*\.dist-info/", ".dist-info/", member.name), "member"): member.size for member in contents.members}


def _parts(contents: Contents) -> dict[tuple[str, str], int]:
    return {(f"{code.name}: {part.label.name}", part.label.kind): part.size for code in contents.code for part in code.parts}


def _statements(contents: Contents) -> Iterator[str]:
    """What a wheel asks of the world, one line each."""
    for module in contents.modules:
        yield f"{module.name} for {contents.platform}"
        yield from (f"{module.name} needs {library}" for library in module.needed)
        yield from (f"{module.name} looks in {entry}" for entry in module.facts.rpath)
        yield from (f"{module.name} needs {family}_{version}" for family, version in module.versions.items())
    yield from (f"requires {requirement}" for requirement in contents.requirements)
    yield from (f"tagged {tag}" for tag in contents.tags)
