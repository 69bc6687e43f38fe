"""CHANGELOG.md, in the form of Keep a Changelog: what a release page says is the entry of its version."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import date
from typing import TYPE_CHECKING

from ..errors import CheckFailed
from ..matrix import REPOSITORY

if TYPE_CHECKING:
    from packaging.version import Version

CHANGELOG = REPOSITORY / "CHANGELOG.md"
UNRELEASED = "Unreleased"
_HEADING = re.compile(r"## \[(?P<name>[^]]+)\](?: - (?P<date>\d{4}-\d{2}-\d{2}))?")
_REFERENCE = re.compile(r"\[[^]]+\]: ")  # where the headings lead; below the last entry


@dataclass(frozen=True)
class Entry:
    name: str
    date: date | None
    text: str


def parse(text: str) -> dict[str, Entry]:
    """The entries by their versions, in the order of the file."""
    entries = dict[str, Entry]()
    for heading, *lines in map(str.splitlines, re.split(r"^(?=## )", text, flags=re.MULTILINE)[1:]):
        found = _HEADING.fullmatch(heading.rstrip())
        try:
            day = date.fromisoformat(found["date"]) if found and found["date"] else None
        except ValueError:
            found = None
        if not found or found["name"] in entries:
            raise CheckFailed(f"CHANGELOG.md: {heading!r} is no heading of an entry of its own\n  cure: ## [VERSION] - YYYY-MM-DD, once")
        body = "\n".join(line for line in lines if not _REFERENCE.match(line)).strip()
        entries[found["name"]] = Entry(found["name"], day, body)
    return entries


def entry(version: Version, text: str) -> Entry:
    """What there is to say of a version; CheckFailed where that is nothing.

    Before a release its entry needs no date, and what is unreleased stands for one that is not there.
    """
    entries = parse(text)
    names = [str(version), *[version.base_version, UNRELEASED] * version.is_prerelease]
    found = next((entries[name] for name in names if name in entries), None)
    cure = f"move what is new from [{UNRELEASED}] to `## [{version.base_version}] - YYYY-MM-DD`"
    if found is None or not (found.text or found.name == UNRELEASED):
        raise CheckFailed(f"CHANGELOG.md says nothing of {version}\n  cure: {cure}")
    if found.date is None and not version.is_prerelease:
        raise CheckFailed(f"CHANGELOG.md has no date of {version}\n  cure: ## [{version}] - YYYY-MM-DD")
    return found
