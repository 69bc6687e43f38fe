"""What tests share: of repair and audit a good wheel to spoil, of the toolkits an index."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ci import process, toolkit
from ci.audit import audit_wheel, providers
from ci.errors import EnvironmentProblem
from ci.matrix import Platform, System
from ci.release import upload

from . import toolkit_support
from .audit_support import NAMES, QUICK, Change, Files, World, good_files, make_world, said, with_sbom, write_wheel
from .release_support import twine_in_this_process


@pytest.fixture(scope="session")
def at_night(pytestconfig: pytest.Config) -> bool:
    """Whether this is the run that has time for everything (``--place nightly``)."""
    return bool(pytestconfig.getoption("--place", default=None) == "nightly")


@pytest.fixture(scope="session")
def installed_root(request: pytest.FixtureRequest) -> Callable[[str, Platform], Path]:
    """Where a real toolkit root lies; the test is skipped where it is not installed.

    One that `test_real_root` of this run installs is awaited: which comes first, another worker decides.
    """
    tests = (item for item in request.session.items if isinstance(item, pytest.Function) and item.originalname == "test_real_root")
    coming = {(test.callspec.params["name"], test.callspec.params["platform"]) for test in tests}

    def path(name: str, platform: Platform) -> Path:
        try:
            return toolkit.install([name], platform)[0].path if (name, platform.name) in coming else toolkit.root_path(name, platform)
        except EnvironmentProblem as missing:
            pytest.skip(str(missing))

    return path


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Headless Chromium."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if program is None:
        pytest.skip("no Chromium is installed (Debian: apt-get install chromium)")
    with playwright.sync_playwright() as running:
        launched = running.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield launched
        launched.close()


@pytest.fixture(scope="module")
def system() -> System:
    """What the wheels are for; the tests of Windows wheels, and those of both, put theirs in its place."""
    return "linux"


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, system: System) -> World:
    """Roots and a compiler."""
    return make_world(tmp_path_factory.mktemp(system), system)


@pytest.fixture(scope="module")
def files(world: World) -> Files:
    return good_files(world)


@pytest.fixture
def locked_roots(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The made roots stand for the installed ones."""
    monkeypatch.setattr(providers, "site", lambda root, _: world.site(root))


@pytest.fixture
def audited(tmp_path: Path, world: World, files: Files, locked_roots: None) -> Callable[..., set[str]]:
    """Audit the good wheel after a change; returns the checks that fired."""

    def run(change: Change = lambda _: None, *, name: str = NAMES[world.system], checks: tuple[str, ...] = QUICK) -> set[str]:
        changed = dict(files)
        change(changed)
        wheel = write_wheel(tmp_path / name, changed)
        violations = audit_wheel(with_sbom(wheel) if "sbom" in checks else wheel, checks=checks)
        print("\n".join(map(str, violations)))  # shown when a test fails
        return {violation.check for violation in violations}

    return run


@pytest.fixture
def told(tmp_path: Path, world: World, files: Files, locked_roots: None) -> Callable[..., list[str]]:
    """As `said`, of the good wheel."""
    return partial(said, tmp_path / NAMES[world.system], files)


@pytest.fixture
def twine_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uploads run twine in this process."""
    monkeypatch.setattr(upload, "process", SimpleNamespace(run=twine_in_this_process, TookTooLong=process.TookTooLong))


@pytest.fixture(scope="session")
def locked_index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What each test has a copy of: to lock takes longer than most of them."""
    folder = tmp_path_factory.mktemp("index")
    with toolkit_support.in_force(toolkit_support.make_index(folder)) as made:
        toolkit_support.write_lock(made)
    return folder


@pytest.fixture
def index(tmp_path: Path, locked_index: Path) -> Iterator[toolkit_support.Index]:
    """The toolkits' index for one test: what installs asks it, and writes into its folders."""
    shutil.copytree(locked_index, tmp_path, dirs_exist_ok=True)
    with toolkit_support.in_force(toolkit_support.index_in(tmp_path)) as made:
        yield made
