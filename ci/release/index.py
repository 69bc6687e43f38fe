"""A package index: where twine uploads to, what the simple API says is there, and what of a release is still to be uploaded.

`pypi` and `testpypi` are twine's names. Any other index is a URL, or a name whose two URLs are in the environment.
"""

from __future__ import annotations

import os
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from urllib.parse import urljoin, urlsplit

import requests
from packaging.utils import parse_sdist_filename, parse_wheel_filename
from pypi_simple import (
    PYPI_SIMPLE_ENDPOINT,
    DigestMismatchError,
    NoSuchProjectError,
    PyPISimple,
    UnsupportedContentTypeError,
    UnsupportedRepoVersionError,
)
from requests.adapters import HTTPAdapter
from urllib3 import Retry

from ..errors import CheckFailed, EnvironmentProblem

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from packaging.version import Version
    from pypi_simple import DistributionPackage

    from .dist import Dist, Entry


@dataclass(frozen=True)
class Remote:
    """A file on an index."""

    name: str
    version: Version | None  # None for a name that says none
    sha256: str
    size: int  # 0 where the index does not say, as those with pages of HTML alone
    package: DistributionPackage = field(repr=False)


@dataclass(frozen=True)
class Index:
    name: str
    target: tuple[str, ...]  # twine's arguments
    simple: str
    timeout: float = 30  # of one request
    rehearsals: bool = True  # whether it gets versions that were never tagged

    def files(self, project: str) -> tuple[Remote, ...]:
        """What is there under the project's name: nothing, where the name is free."""
        with self._client() as client:
            try:
                page = client.get_project_page(project, timeout=self.timeout, headers={"Cache-Control": "no-cache"})
            except NoSuchProjectError:
                return ()
        return tuple(map(self._remote, page.packages))

    def fetch(self, remote: Remote, folder: Path) -> Path:
        """Download a file and hold it to the digest that the index gives."""
        with self._client() as client:
            try:
                client.download_package(remote.package, folder / remote.name, timeout=self.timeout)
            except DigestMismatchError as error:
                raise CheckFailed(f"{self.name} serves other bytes of {remote.name} than it lists: {error}") from error
        return folder / remote.name

    @contextmanager
    def _client(self) -> Iterator[PyPISimple]:
        session = requests.Session()
        # A server may ask for a pause of any length, which would make the time of a run unbounded.
        retry = Retry(3, backoff_factor=0.2, status_forcelist=(500, 502, 503, 504), respect_retry_after_header=False)
        for scheme in ("http://", "https://"):
            session.mount(scheme, HTTPAdapter(max_retries=retry))
        try:
            with PyPISimple(self.simple, session=session) as client:
                yield client
        except (requests.RequestException, UnsupportedContentTypeError, UnsupportedRepoVersionError) as error:
            cure = "check the network and the index, then run again"
            raise EnvironmentProblem(f"cannot read the index {self.name}: {error}", cure=cure) from error

    def _remote(self, package: DistributionPackage) -> Remote:
        name, sha256 = package.filename, package.digests.get("sha256")
        if name in {"", ".", ".."} or set(name) & set("/\\"):
            raise EnvironmentProblem(f"{self.name} lists a file that is called {name!r}", cure="do not use this index")
        if sha256 is None:
            raise EnvironmentProblem(f"{self.name} lists {name} without a sha256", cure="use an index that gives one")
        return Remote(name, _version(name), sha256, package.size or 0, package)


def _version(filename: str) -> Version | None:
    """The version in the name of a wheel or an sdist."""
    try:
        return (parse_wheel_filename if filename.endswith(".whl") else parse_sdist_filename)(filename)[1]
    except ValueError:
        return None


def named(name: str) -> Index:
    """The index of this name: one that the environment describes, twine's own, or a URL with the simple API below it."""
    from twine.utils import TEST_REPOSITORY, sanitize_url

    if urlsplit(name).scheme in {"http", "https"}:
        return Index(sanitize_url(name), ("--repository-url", name), f"{name.rstrip('/')}/simple/")
    rehearsals = name != "pypi"
    upload, simple = (f"MLX_CUDA_INDEX_{name.upper().replace('-', '_')}_{use}" for use in ("UPLOAD", "SIMPLE"))
    if upload in os.environ and simple in os.environ:
        return Index(name, ("--repository-url", os.environ[upload]), os.environ[simple], rehearsals=rehearsals)
    if name not in {"pypi", "testpypi"}:
        raise EnvironmentProblem(
            f"unknown index {name!r}", cure=f"use pypi, testpypi, a URL, or set {upload} and {simple} in the environment"
        )
    endpoint = urljoin(TEST_REPOSITORY, "/simple/") if rehearsals else PYPI_SIMPLE_ENDPOINT
    return Index(name, ("--repository", name), endpoint, rehearsals=rehearsals)


@dataclass(frozen=True)
class Plan:
    """What an upload has to do, decided from the bytes that the index has."""

    present: tuple[Entry, ...]  # on the index, the same to the byte
    missing: tuple[Entry, ...]  # in the order in which they go


def plan(dist: Dist, files: Sequence[Remote]) -> Plan:
    """CheckFailed where the index has other bytes under a name of this release, or files of its version that are not part of it."""
    there = {remote.name: remote.sha256 for remote in files}
    problems = [
        f"{entry.name}: the index has other bytes, sha256 {there[entry.name]}, expected {entry.sha256}"
        for entry in dist.entries
        if there.get(entry.name, entry.sha256) != entry.sha256
    ]
    foreign = {remote.name for remote in files if remote.version == dist.version} - {entry.name for entry in dist.entries}
    problems += [f"{name}: is on the index under {dist.version}, but no file of this release" for name in sorted(foreign)]
    if problems:
        cure = "an index never takes other bytes under a name that was used: find out whose files these are, and release a new version"
        raise CheckFailed("\n  ".join([f"version {dist.version} is on the index already, and differs:", *problems, f"cure: {cure}"]))
    present, missing = (tuple(entry for entry in dist.entries if (entry.name in there) is wanted) for wanted in (True, False))
    return Plan(present, missing)
