"""``release notes``: what the release page shows beside the wheels."""

from __future__ import annotations

from pathlib import Path

from ..build.description import absolute, address
from ..errors import CheckFailed
from ..files import whole
from ..matrix import load
from ..wheelfile.wheel import read
from . import changelog
from .dist import Dist


def write(dist: Dist, output: Path) -> list[Path]:
    """Write notes.md into a folder, which need not be there, and into its folder files what is offered beside the wheels.

    That is SHA256SUMS, and the SBOM of each wheel under the wheel's name. Links of the notes lead into the tag: on a release page there is
    nothing beside them.
    """
    news = changelog.entry(dist.version, changelog.read()).text
    news = absolute(news, address(), "HEAD" if dist.version.is_devrelease else f"v{dist.version}")
    texts = {"files/SHA256SUMS": "".join(f"{entry.sha256}  {entry.name}\n" for entry in dist.entries).encode()}
    for path in dist.paths:
        wheel = read(path)
        if wheel.sbom not in wheel.members:
            raise CheckFailed(f"{path.name} has no SBOM, expected the one that python -m ci repair writes")
        texts[f"files/{path.stem}.cdx.json"] = wheel.members[wheel.sbom]
    rows = "".join(f"| {entry.platform} | {entry.build} | {entry.size / 2**20:.2f} | `{entry.sha256}` |\n" for entry in dist.entries)
    texts["notes.md"] = (
        f"{news}\n\n{f'For MLX {load().mlx}. ' if load().mlx else ''}Check downloads with `sha256sum -c --ignore-missing SHA256SUMS`.\n\n"
        f"| platform | build | MiB | sha256 |\n|---|---|---:|---|\n{rows}"
    ).encode()
    for name, data in sorted(texts.items(), reverse=True):  # notes.md first
        with whole(output / name, fix="free space, or give another -o") as part:
            part.write_bytes(data)
    return [output / name for name in texts]
