"""CHANGELOG.md, in the form of Keep a Changelog: what a release page says is the entry of its version."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import date, datetime, timedelta, timezone
from typing import Any

from packaging.version import Version

from ..errors import CheckFailed
from ..matrix import REPOSITORY

CHANGELOG = REPOSITORY / "CHANGELOG.md"
UNRELEASED = "Unreleased"
_HEADING = re.compile(r"## \[(?P<name>[^]]+)\](?: - (?P<date>\d{4}-\d{2}-\d{2}))?")
_FIRST = timezone(timedelta(hours=14))  # where a day begins first


@dataclass(frozen=True)
class Entry:
    name: str
    date: date | None
    text: str


def read() -> str:
    if not CHANGELOG.is_file():
        raise CheckFailed(f"CHANGELOG.md is missing\n  fix: write one, with `## [{UNRELEASED}]` (https://keepachangelog.com)")
    return CHANGELOG.read_text("utf-8")


def parse(text: str) -> dict[str, Entry]:
    """The entries by their versions, in the order of the file, each with the definitions of the links that it refers to."""
    from markdown_it import MarkdownIt

    found: dict[str, Any] = {}
    tokens, lines = MarkdownIt("commonmark").parse(text, found), text.splitlines()
    starts = [each.map[0] for each in tokens if each.type == "heading_open" and each.markup == "##" and not each.level and each.map]
    # Where the links lead may stand anywhere, and is the same for all entries.
    definitions = {label: each["map"] for label, each in found.get("references", {}).items()}
    defining = {line for each in (*found.get("references", {}).values(), *found.get("duplicate_refs", ())) for line in range(*each["map"])}
    entries = dict[str, Entry]()
    for start, end in zip(starts, [*starts, len(lines)][1:], strict=True):
        entry = _heading(lines[start])
        if entry is None or entry.name in entries:
            raise CheckFailed(
                f"CHANGELOG.md: {lines[start]!r} is no heading of an entry of its own\n  fix: ## [VERSION] - YYYY-MM-DD, once"
            )
        body = "\n".join(lines[number] for number in range(start + 1, end) if number not in defining).strip()
        used = {" ".join(label.split()).upper() for label in re.findall(r"\[((?:[^][\\]|\\.)+)\]", body)}
        links = "\n".join(line for label, place in definitions.items() if label in used for line in lines[slice(*place)])
        entries[entry.name] = Entry(entry.name, entry.date, f"{body}\n\n{links}".strip())
    return entries


def _heading(line: str) -> Entry | None:
    found = _HEADING.fullmatch(line.rstrip())
    try:
        return found and Entry(found["name"], date.fromisoformat(found["date"]) if found["date"] else None, "")
    except ValueError:
        return None


def entry(version: Version, text: str) -> Entry:
    """The changelog's entry of a version; CheckFailed if it is empty.

    Before a release its entry needs no date, and what is unreleased stands for one that is not there.
    """
    entries = parse(text)
    names = [str(version), *[version.base_version, UNRELEASED] * version.is_prerelease]
    found = next((entries[name] for name in names if name in entries), None)
    fix = f"move what is new from [{UNRELEASED}] to `## [{version.base_version}] - YYYY-MM-DD`"
    if found is None or not (found.text or found.name == UNRELEASED):
        raise CheckFailed(f"CHANGELOG.md has no entry for {version}\n  fix: {fix}")
    if found.date is None and not version.is_prerelease:
        raise CheckFailed(f"CHANGELOG.md has no date for {version}\n  fix: ## [{version}] - YYYY-MM-DD")
    if found.date and found.date > (today := datetime.now(_FIRST).date()):
        raise CheckFailed(
            f"CHANGELOG.md dates {found.name} {found.date}, in the future\n  fix: ## [{found.name}] - {today}, or the day of its tag"
        )
    return found
