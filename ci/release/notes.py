"""``release notes``: what the release page shows beside the wheels."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

from ..audit.wheel import read
from ..errors import CheckFailed, EnvironmentProblem
from ..files import whole
from ..matrix import REPOSITORY, load

if TYPE_CHECKING:
    from pathlib import Path

    from .dist import Dist

CHANGELOG = "CHANGELOG.md"


def write(dist: Dist, output: Path, *, tag: str | None = None, repository: Path = REPOSITORY) -> list[Path]:
    """Write SHA256SUMS, the SBOM of each wheel under the wheel's name, and notes.md into a folder."""
    texts = {"SHA256SUMS": "".join(f"{entry.sha256}  {entry.name}\n" for entry in dist.entries).encode()}
    for path in dist.paths:
        wheel = read(path)
        if wheel.sbom not in wheel.members:
            raise CheckFailed(f"{path.name} has no SBOM, expected the one that python -m ci repair writes")
        texts[f"{path.stem}.cdx.json"] = wheel.members[wheel.sbom]
    texts["notes.md"] = _notes(dist, tag or f"v{dist.version}", repository).encode()
    for name, data in texts.items():
        with whole(output / name, cure="free space, or give another -o") as part:
            part.write_bytes(data)
    return [output / name for name in texts]


def _notes(dist: Dist, tag: str, repository: Path) -> str:
    changes = _section(repository / CHANGELOG, str(dist.version)) or _log(tag, repository)
    rows = "".join(f"| {entry.platform} | {entry.build} | {entry.size / 2**20:.2f} | `{entry.sha256}` |\n" for entry in dist.entries)
    return (
        f"# {load().name} {dist.version}\n\n{changes}\n\n## Files\n\n"
        f"For MLX {load().mlx}. Check downloads with `sha256sum -c --ignore-missing SHA256SUMS`.\n\n"
        f"| platform | build | MiB | sha256 |\n|---|---|---:|---|\n{rows}"
    )


def _section(changelog: Path, version: str) -> str:
    """What the changelog says of a version, if there is one and it does."""
    if not changelog.is_file():
        return ""
    _, _, rest = f"\n{changelog.read_text('utf-8')}".partition(f"\n## {version}")
    return rest.partition("\n## ")[0].partition("\n")[2].strip()


def _log(tag: str, repository: Path) -> str:
    """The commits since the tag before, by their subject lines."""
    head = tag if _git(repository, "rev-parse", "--quiet", "--verify", f"refs/tags/{tag}") else "HEAD"
    before = _git(repository, "describe", "--tags", "--abbrev=0", "--match", "v*", f"{head}^")
    if _git(repository, "rev-parse", "--verify", head) == "":
        raise EnvironmentProblem("git cannot read this repository", cure="run from a clone, with its history and its tags")
    lines = _git(repository, "log", "--no-merges", "--format=- %s (%h)", f"{before}..{head}" if before else head)
    return f"Changes since {before}:\n\n{lines}" if before else f"The first release.\n\n{lines}"


def _git(repository: Path, *arguments: str) -> str:
    """What git says, empty where it cannot."""
    done = subprocess.run(["git", *arguments], cwd=repository, check=False, capture_output=True, text=True)
    return "" if done.returncode else done.stdout.strip()
