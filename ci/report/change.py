"""The differences from another set of wheels: sizes, libraries, requirements."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from .contents import Contents


@dataclass(frozen=True)
class Difference:
    """One size, before and after; None where there was none."""

    kind: str
    name: str
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
    """One wheel against the one of its slot in the other set."""

    after: Contents
    before: Contents

    @property
    def download(self) -> Difference:
        return Difference("", "download", self.before.size, self.after.size)

    @property
    def unpacked(self) -> Difference:
        return Difference("", "unpacked", self.before.unpacked, self.after.unpacked)

    @property
    def same_bytes(self) -> bool:
        return self.before.sha256 == self.after.sha256

    @property
    def members(self) -> list[Difference]:
        """Only those that differ, the largest difference first."""
        return _differences(_members(self.before), _members(self.after))

    @property
    def parts(self) -> list[Difference]:
        """The same of the device code and the native modules."""
        return _differences(_parts(self.before), _parts(self.after))

    @property
    def added(self) -> list[str]:
        """Libraries, RPATH entries, requirements that are new."""
        old = set(_statements(self.before))
        return [each for each in _statements(self.after) if each not in old]

    @property
    def removed(self) -> list[str]:
        return Change(self.before, self.after).added


@dataclass(frozen=True)
class Changes:
    pairs: tuple[Change, ...]
    added: tuple[Contents, ...]  # wheels without a partner
    removed: tuple[Contents, ...]

    @property
    def versions(self) -> tuple[str, ...]:
        return tuple(sorted({each.facts.version for each in [*(pair.before for pair in self.pairs), *self.removed]}))


def compare(after: Sequence[Contents], before: Sequence[Contents]) -> Changes:
    old, new = ({each.slot: each for each in wheels} for wheels in (before, after))
    return Changes(
        pairs=tuple(Change(each, old[slot]) for slot, each in new.items() if slot in old),
        added=tuple(each for slot, each in new.items() if slot not in old),
        removed=tuple(each for slot, each in old.items() if slot not in new),
    )


def _differences(before: Mapping[tuple[str, str], int], after: Mapping[tuple[str, str], int]) -> list[Difference]:
    found = [Difference(*key, before.get(key), after.get(key)) for key in dict.fromkeys([*after, *before])]
    return sorted((each for each in found if each.before != each.after), key=lambda each: (-abs(each.delta), each.name))


def _members(contents: Contents) -> dict[tuple[str, str], int]:
    """Sizes by member; the version in the .dist-info folder's name would hide what stays the same."""
    return {("member", re.sub(r"^[^/]*\.dist-info/", ".dist-info/", each.filename)): each.file_size for each in contents.members}


def _parts(contents: Contents) -> dict[tuple[str, str], int]:
    return {(label.kind, f"{code.name}: {label.name}"): size for code in contents.code for label, size in code.parts.items()}


def _statements(contents: Contents) -> Iterator[str]:
    """Return the requirements of a wheel, one line each."""
    for module in contents.modules:
        yield f"{module.name} for {contents.slot.platform}"
        if module.facts:
            yield from (f"{module.name} needs {library}" for library in module.facts.needed)
            yield from (f"{module.name} looks in {entry}" for entry in module.facts.rpath)
        yield from (f"{module.name} needs {family}_{version}" for family, version in module.versions.items())
    yield from (f"requires {requirement}" for requirement in contents.requirements)
    yield from (f"tagged {tag}" for tag in contents.facts.tags)
