"""Verifying a published release with real uv and real pip, on machines whose settings lead elsewhere."""

from __future__ import annotations

import json
import os
import shutil
import sys
from email.message import Message
from typing import TYPE_CHECKING

import pytest
from packaging.version import Version

from ci import __main__ as cli
from ci.errors import CheckFailed, EnvironmentProblem
from ci.release.dist import MANIFEST, complete, settle
from ci.release.verify import Verified, _Job, _pythons, verify

from . import index_support
from .release_support import EXTRAS, MATRIX, VERSION, make_dist, metadata, wheel_name, write_innocent, write_wheel

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from ci.release.index import Index

HERE = sys.executable
REQUIRING = {"METADATA": metadata(requires="innocent==1.0")}


@pytest.fixture(autouse=True)
def plain_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No setting of this machine's user reaches pip and uv; a network is not needed."""
    for name in os.environ:
        if name.startswith(("PIP_", "UV_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("UV_NO_CONFIG", "1")
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "uv-cache"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """What was published, with its manifest."""
    folder = make_dist(tmp_path / "dist", changes=REQUIRING)
    settle(complete(folder), folder / MANIFEST)
    return folder


@pytest.fixture
def store(tmp_path: Path, folder: Path) -> Path:
    """What the index holds: the wheels, and a dependency's name that a stranger took."""
    shutil.copytree(folder, tmp_path / "store", ignore=shutil.ignore_patterns(MANIFEST))
    write_innocent(tmp_path / "store", "a stranger's")
    return tmp_path / "store"


@pytest.fixture
def index(store: Path) -> Iterator[Index]:
    with index_support.server(store) as url:
        yield index_support.index(url)


@pytest.fixture
def usual(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The index that the machine uses for everything else, with another mlx-cuda of the same version."""
    folder = make_dist(tmp_path / "usual", changes={**REQUIRING, "licenses/LICENSE": "another\n"})
    write_innocent(folder, "ours")
    with index_support.server(folder) as url:
        monkeypatch.setenv("PIP_INDEX_URL", f"{url}simple/")
        monkeypatch.setenv("UV_DEFAULT_INDEX", f"{url}simple/")
        yield folder


def test_both_tools_get_our_wheel_and_no_strangers_dependency(folder: Path, index: Index, usual: Path) -> None:
    done = verify(Version(VERSION), index, manifest_path=folder / MANIFEST, pythons=[HERE])
    python = f"{sys.version_info.major}.{sys.version_info.minor}.{sys.version_info.micro}"
    installed = [Verified(python, "uv", "cpu", "installed"), Verified(python, "pip", "cpu", "installed")]
    assert done == [*installed, *(Verified(python, "uv", extra, "resolved") for extra in EXTRAS[1:])]


def test_found_files_do_not_come_in_between(
    folder: Path, index: Index, usual: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A folder of wheels in the user's settings, with one that fits this machine better: a developer's own build."""
    libc = os.confstr("CS_GNU_LIBC_VERSION") if sys.platform == "linux" else None
    if libc is None:
        pytest.skip("made for systems with glibc")
    own = wheel_name(MATRIX.platforms["linux-x86_64"], MATRIX.builds[0]).replace("2_28", libc.split()[1].replace(".", "_"))
    write_wheel(usual / own, changes=REQUIRING)
    configuration = tmp_path / "pip.conf"
    configuration.write_text(f"[global]\nfind-links = {usual}\n")
    monkeypatch.setenv("PIP_CONFIG_FILE", str(configuration))
    monkeypatch.setenv("PIP_FIND_LINKS", str(usual))
    monkeypatch.setenv("UV_FIND_LINKS", str(usual))
    done = verify(Version(VERSION), index, manifest_path=folder / MANIFEST, pythons=[HERE], extras=["cpu"])
    assert [each.tool for each in done] == ["uv", "pip"]


def test_both_tools_are_held_to_the_published_bytes(index: Index, usual: Path, tmp_path: Path) -> None:
    """Whatever was compared before, what they install is compared too."""
    job = _Job(Version(VERSION), index, dict.fromkeys(index_support.held(tmp_path / "store"), "0" * 64), HERE, tmp_path / "job")
    with pytest.raises(CheckFailed, match="Hash mismatch"):
        job._with_uv("cpu")
    with pytest.raises(CheckFailed, match="other bytes than the published ones"):
        job._with_pip("cpu")


def test_install_all(folder: Path, index: Index, usual: Path) -> None:
    done = verify(Version(VERSION), index, pythons=[HERE], extras=["cu12"], install_all=True)
    assert [(each.extra, each.tool, each.how) for each in done] == [("cu12", "uv", "installed"), ("cu12", "pip", "installed")]


def test_a_dependency_that_nobody_published(index: Index, usual: Path, folder: Path) -> None:
    (usual / "innocent-1.0-py3-none-any.whl").unlink()
    with pytest.raises(CheckFailed, match="innocent"):
        verify(Version(VERSION), index, pythons=[HERE], extras=["cu12"])
    with pytest.raises(CheckFailed, match="innocent"):
        verify(Version(VERSION), index, pythons=[HERE], extras=["cpu"])


def test_a_doctor_that_finds_something(index: Index, usual: Path) -> None:
    write_innocent(usual, "somebody else's")
    with pytest.raises(CheckFailed, match="the doctor finds origin: somebody else's"):
        verify(Version(VERSION), index, pythons=[HERE], extras=["cpu"])


def test_other_bytes_than_the_manifests(folder: Path, store: Path, index: Index) -> None:
    name = complete(folder).entries[2].name
    write_wheel(store / name, changes={**REQUIRING, "licenses/LICENSE": "another\n"})
    with pytest.raises(CheckFailed, match=f"gives {name} with other bytes"):
        verify(Version(VERSION), index, manifest_path=folder / MANIFEST, pythons=[HERE])


def test_a_missing_file(folder: Path, store: Path, index: Index) -> None:
    name = complete(folder).entries[2].name
    (store / name).unlink()
    with pytest.raises(CheckFailed, match=f"have not the same files: {name}"):
        verify(Version(VERSION), index, manifest_path=folder / MANIFEST, pythons=[HERE])
    with pytest.raises(CheckFailed, match="is not a complete release"):
        verify(Version(VERSION), index, pythons=[HERE])


def test_nothing_there(folder: Path, index: Index) -> None:
    with pytest.raises(CheckFailed, match=r"has no file of 9\.9"):
        verify(Version("9.9"), index, pythons=[HERE])


def test_an_extra_that_is_not_offered(index: Index) -> None:
    with pytest.raises(EnvironmentProblem, match="there is no extra cu11"):
        verify(Version(VERSION), index, pythons=[HERE], extras=["cu11"])


def test_the_command(folder: Path, index: Index, usual: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    url = index.simple.removesuffix("simple/")
    arguments = ["--index", url, "--manifest", str(folder / MANIFEST), "--python", HERE, "--extra", "cu13", "--json"]
    assert cli.main(["release", "verify", VERSION, *arguments]) == 0
    (each,) = json.loads(capsys.readouterr().out)
    assert (each["extra"], each["how"]) == ("cu13", "resolved")
    with pytest.raises(SystemExit, match="2"):
        cli.main(["release", "verify", "not-a-version", *arguments])
    assert "Invalid version: 'not-a-version', expected one such as" in capsys.readouterr().err


def test_the_default_pythons_are_the_oldest_and_this_one() -> None:
    fields = Message()
    fields["Requires-Python"] = ">=3.10,!=3.11.0"
    assert _pythons(fields) == ["3.10", sys.executable]
