"""Each fault of the table is found, in wheels of both systems, and nothing else is; the document has the table."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from ci.audit import audit_wheel, providers
from ci.audit.wheel import read
from ci.errors import CheckFailed, EnvironmentProblem

from .attack_support import ANY, DOCUMENT, FAULTS, Fault, document, info, packed, record_of
from .audit_support import NAMES, QUICK, Files, World, good_files, make_world, with_sbom, write_wheel

if TYPE_CHECKING:
    from pathlib import Path

CHECKS = (*QUICK, "sbom")


@pytest.fixture(scope="module")
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(tmp_path_factory.mktemp("world"), request.param)


@pytest.fixture(scope="module")
def files(world: World) -> Files:
    return good_files(world)


@pytest.fixture(scope="module")
def finished(world: World, files: Files, tmp_path_factory: pytest.TempPathFactory) -> Files:
    """With its SBOM."""
    return dict(read(with_sbom(write_wheel(tmp_path_factory.mktemp("good") / NAMES[world.system], files))).members)


def spoilt(path: Path, fault: Fault, files: Files, finished: Files) -> Path:
    if fault.files:
        finished = dict(files)
        fault.files(finished)
        path.write_bytes(archive(finished, fault))
        if fault.found not in {"unreadable", "is not UTF-8"}:
            finished = dict(read(with_sbom(path)).members)
    path.write_bytes(fault.data(archive(finished, fault)))
    return path


def archive(files: Files, fault: Fault) -> bytes:
    folder = next(name for name in files if name.endswith("/METADATA")).partition("/")[0]
    entries = [(info(name), data) for name, data in files.items() if name != f"{folder}/RECORD"]
    if fault.entries:
        fault.entries(entries)
    record = "\n".join([*fault.record(record_of(entries, folder)), ""]).encode()
    return packed([*entries, (info(f"{folder}/RECORD"), record)])


def said(path: Path) -> str:
    """The checks that found something, or the error."""
    try:
        violations = audit_wheel(path, checks=CHECKS)
    except CheckFailed as error:
        return str(error)
    except EnvironmentProblem as error:
        return f"unreadable: {error}"
    print("\n".join(map(str, violations)))  # shown when a test fails
    return ", ".join(sorted({violation.check for violation in violations}))


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize(
    ("world", "fault"),
    [pytest.param(system, fault, id=f"{system}: {fault.what}") for system in ANY for fault in FAULTS if system in fault.systems],
    indirect=["world"],
)
def test_fault(tmp_path: Path, world: World, files: Files, finished: Files, fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(providers, "site", lambda root, _: world.site(root))
    found = said(spoilt(tmp_path / fault.name(NAMES[world.system]), fault, files, finished))
    assert fault.found in found if " " in fault.found.replace(", ", "") or fault.found == "unreadable" else fault.found == found, found
    assert found.isprintable() or found.startswith("unreadable")


@pytest.mark.parametrize("world", ANY, indirect=True)
def test_the_good_wheel(tmp_path: Path, world: World, files: Files, finished: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(providers, "site", lambda root, _: world.site(root))
    assert said(spoilt(tmp_path / NAMES[world.system], Fault("nothing", ""), files, finished)) == ""


def test_the_document_has_the_table() -> None:
    text = DOCUMENT.read_text("utf-8")
    assert document(text) == text, "python -m tests.ci.attack_support writes it"
