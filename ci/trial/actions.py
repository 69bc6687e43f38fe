"""The artifacts of a workflow run, through GitHub's API.

The token comes from the environment (GITHUB_TOKEN or GH_TOKEN) and goes to the API's own address alone: the API answers a download with
a redirect to a storage service, which must never see it. The API's address is GITHUB_API_URL, which Actions sets on every server.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import requests
from requests.adapters import HTTPAdapter
from requests.auth import AuthBase
from urllib3.util import Retry

from ..errors import CheckFailed, EnvironmentProblem
from ..matrix import host_platform
from .limits import MAX_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

API = "https://api.github.com"
TIMEOUT = (10, 60)  # seconds to connect, and between two pieces of an answer
_ADDRESS = re.compile(r"https://[^/]+/(?P<repository>[^/]+/[^/]+)/actions/runs/(?P<run>\d+)(?:[/?#].*)?")
_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True)
class Run:
    repository: str
    number: int

    @classmethod
    def parse(cls, target: str, repository: str | None = None) -> Run | None:
        """A run's id, or the address of its page; None if it is neither."""
        if found := _ADDRESS.fullmatch(target):
            return cls(found["repository"], int(found["run"]))
        if not re.fullmatch(r"[0-9]{1,20}", target):
            return None
        named = repository or os.environ.get("GITHUB_REPOSITORY", "")
        if not _REPOSITORY.fullmatch(named):
            raise EnvironmentProblem(
                f"run {target} of which repository?",
                cure="give --repository OWNER/NAME, or the address of the run's page instead of its id",
            )
        return cls(named, int(target))


@dataclass(frozen=True)
class Artifact:
    number: int
    name: str
    size: int
    expired: bool
    digest: str  # "sha256:…", "" where the server gives none


class _Token(AuthBase):
    """The token as requests' own kind of credentials, which it drops on a redirect to another host; ~/.netrc does not replace it."""

    def __init__(self, token: str) -> None:
        self.token = token

    def __call__(self, request: requests.PreparedRequest) -> requests.PreparedRequest:
        request.headers["Authorization"] = f"Bearer {self.token}"
        return request


class Api:
    """A session with the API."""

    def __init__(self) -> None:
        self.base = os.environ.get("GITHUB_API_URL", API).rstrip("/")
        parts = urlsplit(self.base)
        if parts.scheme != "https" and parts.hostname not in {"127.0.0.1", "localhost", "::1"}:
            raise EnvironmentProblem(f"GITHUB_API_URL is {self.base!r}, expected an https address", cure="correct it, or unset it")
        token = os.environ.get("GITHUB_TOKEN") or os.environ.get("GH_TOKEN")
        if not token:
            raise EnvironmentProblem(
                "artifacts can be downloaded with a token only",
                cure='set GH_TOKEN, for example GH_TOKEN="$(gh auth token)", or download the artifact by hand and give its zip',
            )
        self.session = requests.Session()
        self.session.auth = _Token(token)
        self.session.headers["Accept"] = "application/vnd.github+json"
        self.session.headers["X-GitHub-Api-Version"] = "2022-11-28"
        # A rate limit is told to the user, not slept out.
        logging.getLogger("urllib3.connectionpool").setLevel(logging.ERROR)  # it warns of repeated requests with their addresses, see _kind
        retry = Retry(3, status_forcelist=(500, 502, 503, 504), backoff_factor=0.5, raise_on_status=False, respect_retry_after_header=False)
        self.session.mount("https://", HTTPAdapter(max_retries=retry))
        self.session.mount("http://", HTTPAdapter(max_retries=retry))

    def about(self, run: Run) -> dict[str, Any]:
        """What the API says of a run itself."""
        address = f"{self.base}/repos/{run.repository}/actions/runs/{run.number}"
        with self._get(address, f"run {run.number} of {run.repository}") as answer:
            try:
                return dict(answer.json())
            except (ValueError, TypeError) as error:
                raise EnvironmentProblem(f"{self.base} does not answer as GitHub's API does", cure="check GITHUB_API_URL") from error

    def artifacts(self, run: Run) -> Iterator[Artifact]:
        """All artifacts of a run, page after page."""
        address = f"{self.base}/repos/{run.repository}/actions/runs/{run.number}/artifacts?per_page=100"
        while address:
            with self._get(address, f"run {run.number} of {run.repository}") as answer:
                try:
                    for each in answer.json()["artifacts"]:
                        yield _artifact(each)
                except (ValueError, KeyError, TypeError) as error:
                    raise EnvironmentProblem(f"{self.base} does not answer as GitHub's API does", cure="check GITHUB_API_URL") from error
                address = answer.links.get("next", {}).get("url", "")
                if address and urlsplit(address)[:2] != urlsplit(self.base)[:2]:
                    raise EnvironmentProblem(
                        f"{self.base} sends on to another host, {urlsplit(address).netloc}", cure="check GITHUB_API_URL"
                    )

    def download(self, run: Run, artifact: Artifact, path: Path) -> Path:
        """Download an artifact's zip, within the size bound and with the sum that the server names."""
        address = f"{self.base}/repos/{run.repository}/actions/artifacts/{artifact.number}/zip"
        digest, size = hashlib.sha256(), 0
        with self._get(address, f"artifact {artifact.name!r}", stream=True) as answer, path.open("wb") as sink:
            try:
                for piece in answer.iter_content(2**20):
                    size += len(piece)
                    if size > MAX_BYTES:
                        raise _too_large(artifact, size)
                    digest.update(piece)
                    sink.write(piece)
            except requests.RequestException as error:
                raise EnvironmentProblem(f"the download of {artifact.name!r} broke off ({_kind(error)})", cure="try again") from error
        if artifact.digest.startswith("sha256:") and artifact.digest != f"sha256:{digest.hexdigest()}":
            raise CheckFailed(
                f"artifact {artifact.name!r} is not what was uploaded: it has sha256 {digest.hexdigest()}, not {artifact.digest}"
            )
        return path

    def _get(self, address: str, what: str, *, stream: bool = False) -> requests.Response:
        try:
            answer = self.session.get(address, stream=stream, timeout=TIMEOUT)
        except requests.RequestException as error:
            raise EnvironmentProblem(
                f"{what}: {self.base} cannot be reached ({_kind(error)})", cure="check the network, and HTTPS_PROXY behind a proxy"
            ) from error
        if answer.ok:
            return answer
        with answer:
            raise _refusal(answer, what)


def _kind(error: Exception) -> str:
    """Such as ConnectTimeout. The message stays out: it can hold a storage address with its signature, which is a credential."""
    return type(error).__name__


def _artifact(each: Any) -> Artifact:
    return Artifact(int(each["id"]), str(each["name"]), int(each["size_in_bytes"]), bool(each["expired"]), str(each.get("digest") or ""))


def _too_large(artifact: Artifact, size: int) -> CheckFailed:
    return CheckFailed(f"artifact {artifact.name!r} has {size / 2**20:,.0f} MiB or more, expected at most {MAX_BYTES // 2**20}")


def _refusal(answer: requests.Response, what: str) -> EnvironmentProblem:
    code = answer.status_code
    if code == 429 or (code == 403 and (answer.headers.get("X-RateLimit-Remaining") == "0" or "Retry-After" in answer.headers)):
        return EnvironmentProblem(f"{what}: the token's rate limit is used up", cure=f"try again {_when(answer)}, or use another token")
    cures = {
        401: ("the token is not valid", 'make a new one, or GH_TOKEN="$(gh auth token)"'),
        403: (
            "the token may not read it",
            "give the token the permission to read Actions in this repository (and its organisation's sign-on)",
        ),
        404: ("not found", "check the id and the repository; for a private one the token needs access to it"),
        410: ("expired", "run the workflow again: artifacts are kept 30 days"),
    }
    said, cure = cures.get(code, (f"the server answers {code}", "try again; githubstatus.com says whether GitHub is ill"))
    return EnvironmentProblem(f"{what}: {said} ({code})", cure=cure)


def _when(answer: requests.Response) -> str:
    import datetime as dt

    if (seconds := answer.headers.get("Retry-After", "")).isdigit():
        return f"in {seconds} s"
    if (reset := answer.headers.get("X-RateLimit-Reset", "")).isdigit():
        return f"after {dt.datetime.fromtimestamp(int(reset), tz=dt.timezone.utc):%H:%M} UTC"
    return "later"


def choose(artifacts: Sequence[Artifact], run: Run) -> list[Artifact]:
    """The artifacts to download: those named after this platform if there are any, or else all."""
    named = [each for each in artifacts if host_platform().name in each.name] or list(artifacts)
    if not named:
        raise EnvironmentProblem(f"run {run.number} of {run.repository} has no artifacts", cure="wait until its jobs are done")
    alive = [each for each in named if not each.expired]
    if not alive:
        raise EnvironmentProblem(
            f"the artifacts of run {run.number} have expired: {', '.join(each.name for each in named)}", cure="run the workflow again"
        )
    for each in alive:
        if each.size > MAX_BYTES:
            raise _too_large(each, each.size)
    return alive


def download(run: Run, folder: Path) -> list[Path]:
    """Download a run's artifacts for this platform into a temporary folder; returns their zips."""
    api = Api()
    folder.mkdir(parents=True, exist_ok=True)
    return [api.download(run, each, folder / f"{each.number}.zip") for each in choose(list(api.artifacts(run)), run)]
