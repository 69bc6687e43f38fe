"""Each damage of the table is refused, by a sentence that names it: to a small wheel, and at night to a real one, of MLX_CUDA_WHEEL."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from ci.audit import audit_wheel, describe, providers
from ci.errors import CiError
from ci.files import record_digest
from ci.repair import sbom
from ci.wheelfile.wheel import read
from tests.by_day import first_of_each

from .audit_support import NAMES, Files, World, with_sbom, write_wheel
from .damage_support import DAMAGES, Damage


@pytest.fixture(scope="module")
def real(at_night: bool) -> Path | None:
    """A finished Linux wheel of this checkout, of which an audit takes several times as long (``--place nightly``)."""
    path = os.environ.get("MLX_CUDA_WHEEL")
    return Path(path) if path and at_night else None


@pytest.fixture(scope="module")
def name(real: Path | None) -> str:
    return real.name if real else NAMES["linux"]


@pytest.fixture(scope="module")
def good(real: Path | None, files: Files, tmp_path_factory: pytest.TempPathFactory) -> Files:
    """The files of a finished wheel."""
    path = real or with_sbom(write_wheel(tmp_path_factory.mktemp("good") / NAMES["linux"], files))
    return dict(read(path).members)


@pytest.fixture(scope="module")
def arch(real: Path | None) -> Sequence[str]:
    """The GPUs that it was built for, where that is not all of the declared ones."""
    if not real or not audit_wheel(real):
        return ()
    code = describe(real).device
    return (*code.sass, *(f"compute_{each}" for each in code.ptx))


@pytest.fixture
def roots(real: Path | None, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    if not real:
        monkeypatch.setattr(providers, "site", lambda root, _: world.site(root))


def write(path: Path, files: Files, damage: Damage, method: int = zipfile.ZIP_DEFLATED) -> None:
    """As repair does, but for the damage."""
    record = next(name for name in files if name.endswith(".dist-info/RECORD"))
    rows = [f"{name},{record_digest(data)},{len(data)}\n" for name, data in files.items() if name != record]
    written = {
        **{name: data for name, data in files.items() if name != record},
        record: damage.record("".join([*rows, f"{record},,\n"])).encode(),
    }
    if "first" in written:  # RECORD before another file
        written["mlx_cuda/nn.py"] = written.pop("mlx_cuda/nn.py")
        del written["first"]
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in written.items():
            entry = zipfile.ZipInfo(name, (2026, 1, 2, 3, 4, 6))
            entry.create_system, entry.external_attr = 3, 0o100644 << 16
            entry.compress_type = zipfile.ZIP_STORED if name.endswith(".fatbin.lzma") else method  # which is compressed already
            if damage.entry and name == "mlx_cuda/nn.py":
                damage.entry(entry)
            archive.writestr(entry, data, compresslevel=1)
    path.write_bytes(damage.wheel(path.read_bytes()))


def damaged(path: Path, good: Files, damage: Damage) -> Path:
    files = dict(good)
    if damage.files:
        damage.files(files)
    write(path, files, Damage("", ""), zipfile.ZIP_STORED)  # the SBOM is made of what it holds, compressed or not
    sbom.embed(path)
    files = dict(read(path).members)
    if damage.finished:
        damage.finished(files)
    write(path, files, damage)
    return path


def said(path: Path, arch: Sequence[str]) -> list[str]:
    try:
        return [str(each) for each in audit_wheel(path, arch=arch)]
    except CiError as error:
        return [str(error)]


@pytest.mark.usefixtures("roots")
@pytest.mark.parametrize("damage", first_of_each(DAMAGES, lambda damage: tuple(damage.words.split()[:2]), lambda damage: damage.what))
def test_damage(tmp_path: Path, name: str, good: Files, arch: Sequence[str], damage: Damage) -> None:
    found = said(damaged(tmp_path / name, good, damage).rename(tmp_path / damage.name(name)), arch)
    print("\n".join(found))
    assert [each for each in found if damage.words in each]
    assert all("\n    fix: " in each for each in found)


@pytest.mark.usefixtures("roots")
def test_no_damage(tmp_path: Path, name: str, good: Files, arch: Sequence[str]) -> None:
    assert said(damaged(tmp_path / name, good, Damage("", "")), arch) == []
