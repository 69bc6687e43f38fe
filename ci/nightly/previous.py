"""The previous nights, from the current site. Nothing there is trusted: names, digests and METADATA have to agree."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

from packaging.version import Version

from ..console import say
from ..errors import CiError, EnvironmentProblem
from ..index import Index, Remote
from ..matrix import load
from .wheels import Nightly, examine, named


def nights(url: str, folder: Path, *, before: Version, most: int, space: int) -> list[Nightly]:
    """Fetch the newest `most` nights that were before a version, as many as fit; a file that is not as it should be is left out."""
    kept: list[Nightly] = []
    for version, remotes in sorted(_listed(url, before).items(), reverse=True)[:most]:
        files = list(filter(None, (_fetched(url, remote, folder) for remote in remotes)))
        space -= sum(each.size for each in files)
        if space < 0:
            for each in files:
                (folder / each.name).unlink()
            say(f"{version} and older versions do not fit")
            break
        kept += files
    return kept


def _index(url: str) -> Index:
    return Index(url, (), f"{url.rstrip('/')}/simple/")


def _listed(url: str, before: Version) -> dict[Version, list[Remote]]:
    fix = "run again; for a new channel, or to start it again, add --history new"
    try:
        remotes = _index(url).files(load().name)
    except EnvironmentProblem as error:
        raise EnvironmentProblem(str(error).partition("\n")[0], fix=fix) from error
    if not remotes:
        raise EnvironmentProblem(f"{url} has no wheel of {load().name}", fix=fix)
    found: dict[Version, list[Remote]] = defaultdict(list)
    for remote in remotes:
        if (version := _version(remote.name, before)) is not None:
            found[version].append(remote)
    return found


def _version(name: str, before: Version) -> Version | None:
    try:
        version = named(name)[0]
        if version >= before:
            raise ValueError(f"is not older than {before}")
    except ValueError as error:
        say(f"left out: {name!r} {error}")
        return None
    return version


def _fetched(url: str, remote: Remote, folder: Path) -> Nightly | None:
    try:
        return examine(_index(url).fetch(remote, folder))
    except CiError as error:
        (folder / remote.name).unlink(missing_ok=True)
        say(f"left out: {error}")
        return None
