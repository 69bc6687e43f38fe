"""``release preflight``: problems that would stop a release, found before anything is built.

Reads the checkout, the index and GitHub; `release check` reads the wheels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from packaging.requirements import Requirement
from packaging.version import Version

from ..audit import Violation
from ..console import say
from ..errors import CheckFailed, EnvironmentProblem
from ..files import tomllib
from ..index import Index, named
from ..matrix import REPOSITORY, load
from . import changelog, github
from .dependencies import dependencies, oldest_python
from .standing import against, finding, report
from .version import PROJECT, current

RESUME = "if a run was interrupted over it, “Re-run failed jobs” of that run; otherwise the next number"


def preflight(index: Index | None, *, tag: str | None) -> Version:
    """The version that may be built for this index, None being none; CheckFailed with all that speaks against it.

    A rehearsal, which has no tag, stops where it would stop later too, and tells what only a release would stop at.
    """
    version = current(REPOSITORY)
    real = index is not None and not index.rehearsals
    release = version if real else Version(version.base_version)
    parts: list[tuple[Callable[[], Iterator[Violation]], bool]] = [  # each with whether it stops this run
        (lambda: _tag(version, tag) if real else iter(()), real),
        (lambda: _changelog(version), True),
        (lambda: iter(()) if real else _changelog(release), False),
        (github.runner, index is not None),  # without an index nothing waits for the GPU
        (github.repository, real),
        (github.environments, real),
        (lambda: _index(release, named("pypi")), real),
        (lambda: _index(version, index) if index and not real else iter(()), True),
        (_pins, True),
        (_dependencies, True),
    ]
    found = [(each, needed) for part, needed in parts for each in _tried(part)]
    for each, needed in found:
        if not needed:
            say(f"a release would stop at: {each}")
    report([each for each, needed in found if needed])
    return version


def _tried(part: Callable[[], Iterator[Violation]]) -> Iterator[Violation]:
    """Return the findings of a part; if it cannot run here, the other parts still run."""
    try:
        yield from part()
    except EnvironmentProblem as problem:
        yield finding("unknown", problem.args[0], problem.fix or "run again")


def _tag(version: Version, tag: str | None) -> Iterator[Violation]:
    if tag != f"v{version}":
        fix = "tag the commit with that version; python -m ci release stamp VERSION changes the version"
        yield finding("tag", f"the tag is {tag or 'missing'}, expected v{version}, which pyproject.toml says", fix)


def _changelog(version: Version) -> Iterator[Violation]:
    try:
        changelog.entry(version, changelog.read())
    except CheckFailed as error:
        message, _, fix = str(error).partition("\n  fix: ")
        yield finding("changelog", message, fix)


def _index(version: Version, index: Index) -> Iterator[Violation]:
    files = index.files(load().name, adding=True)
    if any(each.version == version for each in files):
        yield finding("version", f"{version} is on {index.name} already, which accepts no other files under the same names", RESUME)
    yield from against(version, index, files)


def _pins() -> Iterator[Violation]:
    pinned = _project().get("dependencies", [])
    if load().mlx and f"mlx=={load().mlx}" not in pinned:
        message = f"pyproject.toml requires {', '.join(pinned) or 'nothing'}, but ci/matrix/matrix.toml says mlx {load().mlx}"
        yield finding("pins", message, "python -m ci bump --mlx VERSION changes both")


def _dependencies() -> Iterator[Violation]:
    project = _project()
    always = project.get("dependencies", [])
    extras = {extra: list(map(Requirement, [*always, *own])) for extra, own in project.get("optional-dependencies", {}).items()}
    yield from dependencies(extras, oldest_python(project["requires-python"]))


def _project() -> dict[str, Any]:
    project: dict[str, Any] = tomllib.loads((REPOSITORY / PROJECT).read_text("utf-8"))["project"]
    return project
