"""What the tests of repair and audit share: a good wheel to spoil."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from ci.audit import audit_wheel, providers

from .audit_support import NAMES, QUICK, Change, Files, World, good_files, make_world, with_sbom, write_wheel

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    """Roots and a compiler for Linux; the tests of Windows wheels put theirs in its place."""
    return make_world(tmp_path_factory.mktemp("linux"), "linux")


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
