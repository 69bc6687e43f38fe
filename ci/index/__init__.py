"""A package index: where twine uploads to, and what the simple API says is there.

`pypi` and `testpypi` are twine's names. Any other index is a URL, or a name whose two URLs are in the environment.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urljoin, urlsplit

from packaging.utils import canonicalize_name, parse_sdist_filename, parse_wheel_filename
from packaging.version import Version
from pypi_simple import PYPI_SIMPLE_ENDPOINT, DistributionPackage, ProjectStatus

from ..console import visible
from ..errors import CheckFailed, EnvironmentProblem
from ..files import sha256, whole
from .client import Client


@dataclass(frozen=True)
class Remote:
    """A file on an index."""

    name: str
    version: Version | None  # None for a name that says none, or of another project
    sha256: str
    size: int  # 0 where the index does not say, as those with pages of HTML alone
    url: str = field(default="", repr=False)
    yanked: bool = False  # withdrawn: installers skip it unless its version is requested


@dataclass(frozen=True)
class Index:
    name: str
    target: tuple[str, ...]  # twine's arguments
    simple: str
    timeout: float = 30  # seconds without a byte
    rehearsals: bool = True  # whether it gets versions that were never tagged
    patience: float = 300  # seconds for which it is queried again while it fails

    def files(self, project: str, *, adding: bool = False) -> tuple[Remote, ...]:
        """The files under the project's name: none, if the index itself says that it has none. `adding`: to upload more."""
        if (page := self._client().page(project)) is None:
            return ()
        if page.status is ProjectStatus.QUARANTINED or (adding and page.status is ProjectStatus.ARCHIVED):
            said = f"{self.name} has {page.status} {project}{': ' * bool(page.status_reason)}{visible(page.status_reason or '')[:300]}"
            raise EnvironmentProblem(f"{said}; it takes no file of it", fix="find out why, and have its owner or the index end it")
        files = tuple(self._remote(package, project) for package in page.packages)
        for name, count in Counter(each.name for each in files).items():
            if count > 1:
                fix = "ask its owner which one is right; do not use it until then"
                raise EnvironmentProblem(f"{self.name} lists {name} {count} times", fix=fix)
        return files

    def fetch(self, remote: Remote, folder: Path) -> Path:
        """Download a file and hold it to the digest that the index gives."""
        with whole(folder / remote.name) as part:
            with part.open("wb") as stream:
                self._client().download(remote.url, stream)
            if (found := sha256(part)) != remote.sha256:
                said = f"sha256 {found} instead of {remote.sha256}"
                raise CheckFailed(f"{self.name} serves other bytes of {remote.name} than it lists: {said}")
        return folder / remote.name

    def _client(self) -> Client:
        return Client(self.name, self.simple, self.timeout, self.patience)

    def _remote(self, package: DistributionPackage, project: str) -> Remote:
        name, digest = package.filename, package.digests.get("sha256", "").lower()  # hexadecimal: the case does not count
        if name in {"", ".", ".."} or set(name) & set("/\\") or not name.isprintable():
            raise EnvironmentProblem(f"{self.name} lists a file that is called {name!r}", fix="do not use this index")
        if not digest:
            raise EnvironmentProblem(f"{self.name} lists {name} without a sha256", fix="use an index that gives one")
        if not re.fullmatch("[0-9a-f]{64}", digest):
            raise EnvironmentProblem(f"{self.name} lists {name} with the sha256 {digest!r}", fix="use an index that gives one")
        return Remote(name, _version(name, project), digest, package.size or 0, package.url, package.is_yanked)


def _version(filename: str, project: str) -> Version | None:
    """The version in the name of a wheel or an sdist of the project: installers pass over what is another's."""
    try:
        name, version = (parse_wheel_filename if filename.endswith(".whl") else parse_sdist_filename)(filename)[:2]
    except ValueError:
        return None
    return version if name == canonicalize_name(project) else None


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
            f"unknown index {name!r}", fix=f"use pypi, testpypi, a URL, or set {upload} and {simple} in the environment"
        )
    endpoint = urljoin(TEST_REPOSITORY, "/simple/") if rehearsals else PYPI_SIMPLE_ENDPOINT
    return Index(name, ("--repository", name), endpoint, rehearsals=rehearsals)
