"""A package index: where twine uploads to, and what the simple API says is there.

`pypi` and `testpypi` are twine's names. Any other index is a URL, or a name whose two URLs are in the environment.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from urllib.parse import urljoin, urlsplit

from packaging.utils import InvalidSdistFilename, InvalidWheelFilename, parse_sdist_filename, parse_wheel_filename
from packaging.version import InvalidVersion

from ..errors import CheckFailed, EnvironmentProblem

if TYPE_CHECKING:
    from pathlib import Path

    from packaging.version import Version
    from pypi_simple import DistributionPackage, PyPISimple

NAMES = ("pypi", "testpypi")
RETRIES = 3  # of a request that only reads


@dataclass(frozen=True)
class Remote:
    """A file on an index."""

    name: str
    version: Version | None  # None for a name that says none
    sha256: str
    size: int | None  # HTML pages say none
    package: DistributionPackage = field(repr=False)


@dataclass(frozen=True)
class Index:
    name: str
    target: tuple[str, ...]  # twine's arguments
    simple: str
    timeout: float = 30  # of one request

    def files(self, project: str) -> tuple[Remote, ...]:
        """What is there under the project's name: nothing, where the name is free."""
        from pypi_simple import NoSuchProjectError

        with self._client() as client:
            try:
                page = client.get_project_page(project, timeout=self.timeout, headers={"Cache-Control": "no-cache"})
                return tuple(self._remote(package) for package in page.packages)
            except NoSuchProjectError:
                return ()
            except _failures() as error:
                raise self._unreadable(error) from error

    def fetch(self, remote: Remote, folder: Path) -> Path:
        """Download a file and hold it to the digest that the index gives."""
        from pypi_simple import DigestMismatchError

        path = folder / remote.name
        with self._client() as client:
            try:
                client.download_package(remote.package, path, timeout=self.timeout)
            except DigestMismatchError as error:
                raise CheckFailed(f"{self.name} serves other bytes of {remote.name} than it lists: {error}") from error
            except _failures() as error:
                raise self._unreadable(error) from error
        return path

    def size(self, remote: Remote) -> int:
        """The size of a file, asked of the server where the page says none."""
        if remote.size is not None:
            return remote.size
        with self._client() as client:
            try:
                answer = client.s.head(remote.package.url, timeout=self.timeout, allow_redirects=True)
                answer.raise_for_status()
            except _failures() as error:
                raise self._unreadable(error) from error
        return int(answer.headers.get("Content-Length", 0))

    def says(self, remote: Remote) -> str:
        """What a file's metadata says of its origin, for a person to read; empty where the index gives none."""
        import email

        import requests
        from pypi_simple import NoMetadataError

        with self._client() as client:
            try:
                text = client.get_package_metadata_bytes(remote.package, verify=False, timeout=self.timeout).decode("utf-8", "replace")
            except (NoMetadataError, requests.RequestException):
                return ""
        fields = email.message_from_string(text)
        wanted = ("Home-page", "Project-URL", "Author", "Author-email", "Maintainer", "Maintainer-email")
        return ", ".join(f"{name}: {value}" for name in wanted for value in fields.get_all(name, []))

    def _client(self) -> PyPISimple:
        import requests
        from pypi_simple import PyPISimple
        from requests.adapters import HTTPAdapter
        from urllib3 import Retry

        session = requests.Session()
        # A server may ask for a pause of any length, which would make the time of a run unbounded.
        retry = Retry(RETRIES, backoff_factor=0.2, status_forcelist=(500, 502, 503, 504), respect_retry_after_header=False)
        for scheme in ("http://", "https://"):
            session.mount(scheme, HTTPAdapter(max_retries=retry))
        return PyPISimple(self.simple, session=session)

    def _remote(self, package: DistributionPackage) -> Remote:
        if package.filename in {"", ".", ".."} or set(package.filename) & set("/\\"):
            raise EnvironmentProblem(f"{self.name} lists a file that is called {package.filename!r}", cure="do not use this index")
        sha256 = package.digests.get("sha256")
        if sha256 is None:
            raise EnvironmentProblem(f"{self.name} lists {package.filename} without a sha256", cure="use an index that gives one")
        return Remote(package.filename, _version(package.filename), sha256, package.size, package)

    def _unreadable(self, error: Exception) -> EnvironmentProblem:
        return EnvironmentProblem(f"cannot read the index {self.name}: {error}", cure="check the network and the index, then run again")


def _failures() -> tuple[type[Exception], ...]:
    import requests
    from pypi_simple import UnsupportedContentTypeError, UnsupportedRepoVersionError

    return requests.RequestException, UnsupportedContentTypeError, UnsupportedRepoVersionError


def _version(filename: str) -> Version | None:
    """The version in the name of a wheel or an sdist."""
    try:
        return (parse_wheel_filename if filename.endswith(".whl") else parse_sdist_filename)(filename)[1]
    except (InvalidWheelFilename, InvalidSdistFilename, InvalidVersion):
        return None


def named(name: str) -> Index:
    """The index of this name: twine's own, a URL with the simple API below it, or one that the environment describes."""
    from pypi_simple import PYPI_SIMPLE_ENDPOINT
    from twine.utils import TEST_REPOSITORY, sanitize_url

    if name == "pypi":
        return Index(name, ("--repository", name), PYPI_SIMPLE_ENDPOINT)
    if name == "testpypi":
        return Index(name, ("--repository", name), urljoin(TEST_REPOSITORY, "/simple/"))
    if urlsplit(name).scheme in {"http", "https"}:
        return Index(sanitize_url(name), ("--repository-url", name), f"{name.rstrip('/')}/simple/")
    upload, simple = (f"MLX_CUDA_INDEX_{name.upper().replace('-', '_')}_{use}" for use in ("UPLOAD", "SIMPLE"))
    if upload not in os.environ or simple not in os.environ:
        raise EnvironmentProblem(
            f"unknown index {name!r}", cure=f"use {', '.join(NAMES)}, a URL, or set {upload} and {simple} in the environment"
        )
    return Index(name, ("--repository-url", os.environ[upload]), os.environ[simple])
