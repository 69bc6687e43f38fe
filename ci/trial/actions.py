"""The artifacts of a workflow run."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import gh
from ..errors import CheckFailed, EnvironmentProblem
from ..files import sha256
from ..matrix import host_platform
from ..wheelfile.archive import MAX_BYTES

REPOSITORY = r"[A-Za-z0-9][A-Za-z0-9_-]*/(?!\.\.?(?:/|\Z))[A-Za-z0-9_.-]+"
ID = r"[1-9][0-9]{0,18}"  # GitHub counts with 64 bits
_ADDRESS = re.compile(rf"https://(?P<host>[\w.-]+)/(?P<repository>{REPOSITORY})/actions/runs/(?P<run>{ID})(?:[/?#].*)?")


@dataclass(frozen=True)
class Run:
    repository: str
    number: int
    host: str = "github.com"

    @classmethod
    def parse(cls, target: str, repository: str | None = None) -> Run | None:
        """A run's id, or the address of its page; None if it is neither."""
        if found := _ADDRESS.fullmatch(target):
            return cls(found["repository"], int(found["run"]), found["host"])
        if not re.fullmatch(ID, target):
            return None
        named = repository or os.environ.get("GITHUB_REPOSITORY", "")
        if not re.fullmatch(REPOSITORY, named):
            raise EnvironmentProblem(
                f"run {target} has no repository",
                fix="give --repository OWNER/NAME, or the address of the run's page instead of its id",
            )
        return cls(named, int(target))

    def __str__(self) -> str:
        return f"run {self.number} of {self.repository}"


def query(run: Run, path: str, *options: str, into: Path | None = None) -> str:
    """Get this path of a run's repository from GitHub's API; into a file, if one is given."""
    place = f"repos/{run.repository}/actions/{path}"
    return gh.api(run.host, place, *options, into=into, what=str(run), otherwise="or download the artifact yourself and give its zip")


def choose(artifacts: Sequence[dict[str, Any]], run: Run) -> list[dict[str, Any]]:
    """The artifacts to download: those named after this platform if there are any, or else all."""
    named = [each for each in artifacts if host_platform().name in each["name"]] or list(artifacts)
    if not named:
        raise EnvironmentProblem(f"{run} has no artifacts", fix="wait until its jobs are done")
    alive = [each for each in named if not each["expired"]]
    if not alive:
        names = ", ".join(each["name"] for each in named)
        raise EnvironmentProblem(f"the artifacts of {run} have expired: {names}", fix="run the workflow again")
    for each in alive:
        if each["size_in_bytes"] > MAX_BYTES:
            mib = each["size_in_bytes"] / 2**20
            raise CheckFailed(f"artifact {each['name']!r} has {mib:,.0f} MiB, expected at most {MAX_BYTES // 2**20}")
    return alive


def download(run: Run, folder: Path) -> list[Path]:
    """Download a run's artifacts for this platform into a temporary folder; returns their zips, which are as they were uploaded."""
    folder.mkdir(parents=True, exist_ok=True)
    pages = query(run, f"runs/{run.number}/artifacts?per_page=100", "--paginate", "--jq", ".artifacts[]")
    zips = []
    for each in choose([json.loads(line) for line in pages.splitlines()], run):
        path = folder / f"{int(each['id'])}.zip"
        query(run, f"artifacts/{each['id']}/zip", into=path)
        if each.get("digest") and each["digest"] != f"sha256:{sha256(path)}":
            raise CheckFailed(f"artifact {each['name']!r} is not what was uploaded: it has sha256 {sha256(path)}, not {each['digest']}")
        zips.append(path)
    return zips
