"""``release rehearse``: publish to a real index server on this machine, with everything that can go wrong if asked to."""

from __future__ import annotations

import os
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import EnvironmentProblem
from . import faults, loopback
from .dist import sha256

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from .dist import Dist
    from .faults import Outcome


def rehearse(dist: Dist, *, with_faults: bool = False, say: Callable[[str], None] = lambda _: None) -> list[Outcome]:
    """Publish, download and compare; then play every fault. The release's own folder stays as it is."""
    if with_faults and os.name == "nt":
        raise EnvironmentProblem("the faults kill process groups, which Windows has not", cure="rehearse them on Linux or macOS")
    with tempfile.TemporaryDirectory(prefix="mlx-cuda-rehearsal-") as folder:
        outcomes = [_whole(dist, Path(folder), say)]
        return [*outcomes, *(play_all(dist, Path(folder), say) if with_faults else ())]


def _whole(dist: Dist, folder: Path, say: Callable[[str], None]) -> Outcome:
    from ..matrix import load
    from .publish import publish

    (folder / "downloaded").mkdir()
    with loopback.server(folder / "index") as url:
        index = loopback.index(url)
        publish(dist, index, manifest_path=folder / "release.json", tags=(), limits=faults.LIMITS, say=say)
        fetched = [index.fetch(remote, folder / "downloaded") for remote in index.files(load().name)]
    digests = {path.name: sha256(path) for path in fetched}
    lost = sum(digests.get(entry.name) != entry.sha256 for entry in dist.entries)
    happened = f"{len(dist.entries)} wheels published, downloaded and compared"
    return faults.Outcome("rehearsal", happened, lost, not lost and len(digests) == len(dist.entries))


def play_all(
    dist: Dist, folder: Path, say: Callable[[str], None] = lambda _: None, names: Iterable[str] = tuple(faults.FAULTS)
) -> list[Outcome]:
    """Play faults side by side: most of their time is waiting."""

    def play(numbered: tuple[int, str]) -> Outcome:
        number, name = numbered
        outcome = faults.play(name, dist, folder / f"fault-{number}")
        say(f"{outcome.fault}: {outcome.happened}")
        return outcome

    with ThreadPoolExecutor(max_workers=min(4, 2 * (os.cpu_count() or 1))) as pool:
        return list(pool.map(play, enumerate(names)))


def show(outcomes: list[Outcome]) -> None:
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table

    table = Table(title="Release rehearsal", title_justify="left", title_style="bold", box=SIMPLE, show_footer=True)
    table.add_column("fault", footer=f"{len(outcomes)} tried")
    table.add_column("what happened")
    table.add_column("files lost", justify="right", footer=str(sum(outcome.lost for outcome in outcomes)))
    table.add_column("")
    for outcome in outcomes:
        table.add_row(outcome.fault, outcome.happened, str(outcome.lost), "ok" if outcome.sound else "[bold red]wrong")
    Console().print(table)
