"""A wheel's members and what its names say (ci/wheelfile/wheel.py)."""

from __future__ import annotations

from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import parse_wheel_filename

from ci.errors import CheckFailed, EnvironmentProblem
from ci.wheelfile import wheel
from ci.wheelfile.wheel import DEVICE, MANIFEST, STAMP, Wheel, extra_of

from .audit_support import DIST_INFO, NAMES


def made(members: dict[str, bytes], name: str = NAMES["linux"]) -> Wheel:
    project, version, _, tags = parse_wheel_filename(name)
    return Wheel(Path(name), project, version, tags, members)


def test_names() -> None:
    assert (DEVICE, MANIFEST) == ("mlx_cuda/device/", "mlx_cuda/device/manifest.json")
    assert (wheel.SBOM, wheel.VERSION) == ("mlx-cuda.cdx.json", "mlx_cuda/_version.py")
    assert made({f"{DIST_INFO}/x": b""}).sbom == f"{DIST_INFO}/sboms/mlx-cuda.cdx.json"


@pytest.mark.parametrize(
    ("text", "stamps"),
    [
        (b'__version__ = "1.2+a!3"\n', [b"1.2+a!3"]),
        (b'x\n__version__ = ""\n__version__ = "2"\n', [b"", b"2"]),
        (b' __version__ = "1"\n', []),
        (b'__version__ = "1" \n', []),
        (b'__version__ = "1 2"\n', []),
    ],
)
def test_the_stamp_of_a_version(text: bytes, stamps: list[bytes]) -> None:
    assert STAMP.findall(text) == stamps


@pytest.mark.parametrize(
    ("line", "extra"),
    [
        ("a", ""),
        ("a>=1", ""),
        ('a; extra == "cu13"', "cu13"),
        ('a; extra == "CU_13"', "cu-13"),
        ('a; extra == "cu13" and python_version > "3"', None),
        ('a; python_version > "3" and extra == "cu13"', None),
        ('a; python_version == "3"', None),
        ('a; extra != "cu13"', None),
    ],
)
def test_extras(line: str, extra: str | None) -> None:
    assert extra_of(Requirement(line)) == extra


def test_device_code() -> None:
    """Fatbins by their sources, whatever lies beside them."""
    names = (f"{DEVICE}b.fatbin.lzma", f"{DEVICE}a.fatbin.lzma", f"{DEVICE}a.txt", "mlx_cuda/c.fatbin.lzma", MANIFEST)
    found = made({name: name.encode() for name in names})
    assert list(found.fatbins.items()) == [(name, f"{DEVICE}{name}.fatbin.lzma".encode()) for name in ("a", "b")]
    assert len(found.device_digest) == 64
    assert made({}).device_digest == ""


@pytest.mark.parametrize(
    ("platforms", "system", "key"),
    [("win_amd64", "windows", "a.dll"), ("manylinux_2_28_x86_64", "linux", "A.dll"), ("b.win_arm64", "linux", "A.dll")],
)
def test_systems(platforms: str, system: str, key: str) -> None:
    """Of several tags the first decides."""
    found = made({}, NAMES["windows"].replace("win_amd64", platforms))
    assert (found.platforms, found.system, found.key("A.dll")) == (tuple(platforms.split(".")), system, key)


@pytest.mark.parametrize("members", [[], ["a.dist-info/x", "b.dist-info/x"], ["dist-info/x"], ["x/a.dist-info/y"]], ids=repr)
def test_folders_of_information(members: list[str]) -> None:
    count = sum(each[1:].startswith(".dist-info") for each in members)
    with pytest.raises(EnvironmentProblem, match=rf"not a wheel: it has {count} \.dist-info folders instead of one"):
        _ = made(dict.fromkeys(members, b"")).dist_info
    assert made({"a.dist-info/x/y": b"", "a.dist-info/z": b""}).dist_info == "a.dist-info"


def test_information() -> None:
    found = made({"a.dist-info/X": "\u00e9".encode(), "a.dist-info/Y": b"\xff"})
    assert (found.information("X"), found.information("Z")) == ("\u00e9", "")
    with pytest.raises(CheckFailed, match=r"whl: a\.dist-info/Y is not UTF-8: "):
        found.information("Y")


def test_what_cannot_be_read() -> None:
    found = made({"one": b"\x7fELF", "two": b"text", "three": b"MZ"})
    assert (list(found.binaries), list(found.unreadable)) == ([], ["one", "three"])
    with pytest.raises(
        EnvironmentProblem, match=r"whl: one: not readable as ELF: .*\n  fix: build or fetch the wheel again: it is damaged"
    ):
        found.readable()
    made({"two": b"text"}).readable()
