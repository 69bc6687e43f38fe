"""From a download to a checked wheel: what is taken, and what is refused with which word."""

from __future__ import annotations

import re
import stat
import struct
import zipfile
from pathlib import Path

import pytest
from packaging.tags import Tag, cpython_tags

from ci.errors import CheckFailed, EnvironmentProblem
from ci.trial import artifacts
from ci.wheelfile import archive

from .audit_support import NAMES, write_wheel
from .trial_support import FILES

LINUX, WINDOWS = NAMES["linux"], NAMES["windows"]
HERE = [*cpython_tags((3, 12), ["cp312"], ["manylinux_2_31_x86_64", "manylinux_2_28_x86_64"]), Tag("py3", "none", "any")]


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    (tmp_path / "dist").mkdir()
    return write_wheel(tmp_path / "dist" / LINUX, dict(FILES))


@pytest.fixture
def unpacked(tmp_path: Path) -> Path:
    return tmp_path / "new" / "unpacked"


def zipped(path: Path, *entries: tuple[str | zipfile.ZipInfo, bytes]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in entries:
            archive.writestr(name, data)
    return path


def test_a_wheel(wheel: Path, unpacked: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert artifacts.obtain(str(wheel), unpacked) == [wheel]
    monkeypatch.chdir(wheel.parent)
    assert artifacts.obtain(wheel.name, unpacked) == [wheel]
    assert not unpacked.exists()


def test_a_folder_and_a_folder_for_each_artifact(wheel: Path, unpacked: Path, tmp_path: Path) -> None:
    assert artifacts.obtain(str(wheel.parent), unpacked) == [wheel]
    assert artifacts.obtain(str(tmp_path), unpacked) == [wheel]


def test_a_zip_gives_its_wheels_and_nothing_else(wheel: Path, unpacked: Path, tmp_path: Path) -> None:
    path = zipped(tmp_path / "artifact.zip", (f"wheelhouse/{LINUX}", wheel.read_bytes()), ("report.html", b"<html>"), ("empty/", b""))
    assert artifacts.obtain(str(path), unpacked) == [unpacked / LINUX]
    assert (unpacked / LINUX).read_bytes() == wheel.read_bytes()
    assert [each.name for each in unpacked.iterdir()] == [LINUX]


def test_wheels_of_others_are_passed_over(wheel: Path, unpacked: Path) -> None:
    other = write_wheel(wheel.with_name("mlx-0.32.4-py3-none-any.whl"), dict(FILES))
    assert artifacts.obtain(str(wheel.parent), unpacked) == [wheel]
    with pytest.raises(CheckFailed, match=f"^{other.name} is no wheel of mlx-cuda$"):
        artifacts.obtain(str(other), unpacked)


@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("../evil.whl", "leaves the folder"),
        ("wheels/../../evil.whl", "leaves the folder"),
        ("..", "leaves the folder"),
        ("/etc/evil.whl", "has an absolute path"),
        ("C:/evil.whl", "a backslash or a drive letter"),
        ("C:evil.whl", "a backslash or a drive letter"),
        ("..\\evil.whl", "a backslash or a drive letter"),
        ("evil\x1b[2J.whl", "not printable ASCII"),
    ],
)
def test_names_that_escape_are_refused(wheel: Path, unpacked: Path, tmp_path: Path, name: str, word: str) -> None:
    path = zipped(tmp_path / "artifact.zip", (LINUX, wheel.read_bytes()), (name, b"x"))
    with pytest.raises(CheckFailed, match=word) as raised:
        artifacts.obtain(str(path), unpacked)
    assert str(raised.value).isprintable()
    assert list(unpacked.iterdir()) == []
    assert not list(tmp_path.rglob("evil*"))


def test_a_name_cut_by_a_nul_is_refused(wheel: Path, unpacked: Path, tmp_path: Path) -> None:
    path = zipped(tmp_path / "artifact.zip", (LINUX, wheel.read_bytes()), ("a.whl-evil", b"x"))
    path.write_bytes(path.read_bytes().replace(b"a.whl-evil", b"a.whl\0evil"))
    with pytest.raises(CheckFailed, match="not printable ASCII"):
        artifacts.obtain(str(path), unpacked)


@pytest.mark.parametrize(("kind", "word"), [(stat.S_IFLNK, "symbolic link"), (stat.S_IFIFO, "no ordinary file")])
def test_links_and_devices_are_refused(unpacked: Path, tmp_path: Path, kind: int, word: str) -> None:
    entry = zipfile.ZipInfo(LINUX)
    entry.external_attr = (kind | 0o777) << 16
    path = zipped(tmp_path / "artifact.zip", (entry, b"/etc/passwd"))
    with pytest.raises(CheckFailed, match=word):
        artifacts.obtain(str(path), unpacked)
    assert list(unpacked.iterdir()) == []


def test_a_zip_in_a_zip_is_refused(wheel: Path, unpacked: Path, tmp_path: Path) -> None:
    inner = zipped(tmp_path / "inner.zip", (LINUX, wheel.read_bytes()))
    outer = zipped(tmp_path / "outer.zip", (LINUX, wheel.read_bytes()), ("inner.ZIP", inner.read_bytes()))
    with pytest.raises(CheckFailed, match=r"^outer.zip holds another zip, 'inner.ZIP'\n  fix: look at it"):
        artifacts.obtain(str(outer), unpacked)
    assert list(unpacked.iterdir()) == []


def test_two_wheels_of_one_name_are_refused(wheel: Path, unpacked: Path, tmp_path: Path) -> None:
    path = zipped(tmp_path / "artifact.zip", (f"a/{LINUX}", wheel.read_bytes()), (f"b/{LINUX}", b"another"))
    with pytest.raises(CheckFailed, match=f"^artifact.zip holds '{LINUX}' more than once$"):
        artifacts.obtain(str(path), unpacked)


def test_a_declared_bomb_is_refused_before_it_is_unpacked(unpacked: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive, "MAX_BYTES", 2**20)
    path = zipped(tmp_path / "artifact.zip", (LINUX, bytes(2**19)), ("other", bytes(2**19 + 1)))
    assert path.stat().st_size < 2**13
    with pytest.raises(CheckFailed, match="would unpack to 1 MiB, expected at most 1"):
        artifacts.obtain(str(path), unpacked)
    assert list(unpacked.iterdir()) == []


def test_a_bomb_that_lies_about_its_size_stops_at_what_it_declared(unpacked: Path, tmp_path: Path) -> None:
    path = zipped(tmp_path / "artifact.zip", (LINUX, bytes(2**22)))
    path.write_bytes(path.read_bytes().replace(struct.pack("<I", 2**22), struct.pack("<I", 1000)))
    with pytest.raises(EnvironmentProblem, match=r"is not a readable zip: .*CRC"):
        artifacts.obtain(str(path), unpacked)
    assert (unpacked / LINUX).stat().st_size <= 1000


def test_too_large_a_file_and_too_many_entries_are_refused(
    wheel: Path, unpacked: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = zipped(tmp_path / "artifact.zip", ("a", b""), ("b", b""), (LINUX, wheel.read_bytes()))
    monkeypatch.setattr(archive, "MAX_ENTRIES", 2)
    with pytest.raises(CheckFailed, match="has 3 entries, expected at most 2"):
        artifacts.obtain(str(path), unpacked)
    monkeypatch.setattr(archive, "MAX_BYTES", 100)
    with pytest.raises(CheckFailed, match="expected at most 0"):
        artifacts.obtain(str(wheel), unpacked)


def test_a_zip_that_is_encrypted_or_oddly_compressed_is_refused(unpacked: Path, tmp_path: Path) -> None:
    path = tmp_path / "artifact.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_LZMA) as archive:
        archive.writestr(LINUX, b"data")
    with pytest.raises(CheckFailed, match="neither stored nor deflated"):
        artifacts.obtain(str(path), unpacked)
    zipped(path, (LINUX, b"data"))
    data = bytearray(path.read_bytes())
    data[data.index(b"PK\x01\x02") + 8] |= 1
    path.write_bytes(data)
    with pytest.raises(CheckFailed, match="is encrypted"):
        artifacts.obtain(str(path), unpacked)


@pytest.mark.parametrize(("name", "kind"), [("artifact.zip", "zip"), (LINUX, "wheel")])
def test_a_page_instead_of_a_download(unpacked: Path, tmp_path: Path, name: str, kind: str) -> None:
    (tmp_path / name).write_text("<html>Sign in</html>")
    with pytest.raises(EnvironmentProblem, match=f"is not a readable {kind}: .*\n  fix: download or build it again"):
        artifacts.obtain(str(tmp_path / name), unpacked)


def test_a_damaged_zip(wheel: Path, unpacked: Path, tmp_path: Path) -> None:
    path = tmp_path / "artifact.zip"
    with zipfile.ZipFile(path, "w") as archive:  # stored, as artifacts hold what is compressed already
        archive.writestr(LINUX, wheel.read_bytes())
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0xFF
    path.write_bytes(data)
    with pytest.raises(EnvironmentProblem, match="is not a readable zip: Bad CRC-32"):
        artifacts.obtain(str(path), unpacked)


def test_a_wheel_that_is_not_what_its_record_says(wheel: Path, unpacked: Path) -> None:
    with zipfile.ZipFile(wheel, "a") as archive:
        archive.writestr("mlx_cuda/added.py", "print('hello')")
    with pytest.raises(CheckFailed, match=r"not what its RECORD says:\n.*mlx_cuda/added.py: record: is not in RECORD"):
        artifacts.obtain(str(wheel), unpacked)


def test_a_wheel_whose_entries_escape(wheel: Path, unpacked: Path) -> None:
    write_wheel(wheel, {**FILES, "../../evil.pth": b"import os"})
    with pytest.raises(CheckFailed, match="leaves the folder"):
        artifacts.obtain(str(wheel), unpacked)


def test_a_damaged_wheel(wheel: Path, unpacked: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(wheel, "w") as archive:  # stored, so that the text is found
        for name, data in files.items():
            archive.writestr(name, data)
    wheel.write_bytes(wheel.read_bytes().replace(b"Name: mlx-cuda", b"Name: mlx-cudb"))
    with pytest.raises(EnvironmentProblem, match=r"not a readable wheel: Bad CRC-32.*\n  fix: "):
        artifacts.obtain(str(wheel), unpacked)


def test_nothing_to_try(unpacked: Path, tmp_path: Path) -> None:
    with pytest.raises(EnvironmentProblem, match=r"holds no wheel\n  fix: give a .whl file"):
        artifacts.obtain(str(tmp_path), unpacked)
    with pytest.raises(EnvironmentProblem, match="holds no wheel"):
        artifacts.obtain(str(zipped(tmp_path / "artifact.zip", ("readme", b""))), unpacked)
    with pytest.raises(EnvironmentProblem, match=r"there is no .*nowhere\n  fix: check the path"):
        artifacts.obtain(str(tmp_path / "nowhere"), unpacked)
    with pytest.raises(EnvironmentProblem, match="there is no "):
        artifacts.obtain(str(tmp_path / LINUX), unpacked)


def test_a_full_disk_has_a_fix(wheel: Path, unpacked: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("ci.trial.artifacts.shutil.copyfileobj", full)
    path = zipped(tmp_path / "artifact.zip", (LINUX, wheel.read_bytes()))
    with pytest.raises(EnvironmentProblem, match=rf"^cannot unpack {re.escape(str(path))}: No space left on device\n  fix: free space"):
        artifacts.obtain(str(path), unpacked)


def named(*middles: str) -> list[Path]:
    from pathlib import Path

    return [Path(f"mlx_cuda-{middle}.whl") for middle in middles]


@pytest.mark.parametrize(
    ("offered", "taken"),
    [
        (["1.0-cp310-abi3-win_amd64", "1.0-cp310-abi3-manylinux_2_28_x86_64"], 1),
        (["1.0-cp310-abi3-manylinux_2_28_x86_64", "1.0-cp315-abi3t-manylinux_2_28_x86_64"], 0),
        (["1.0-cp310-abi3-manylinux_2_28_x86_64", "1.0-cp310-abi3-manylinux_2_31_x86_64"], 1),
        (["1.10-cp310-abi3-manylinux_2_28_x86_64", "1.9-cp310-abi3-manylinux_2_31_x86_64"], 0),
        (["1.0-cp310-abi3-manylinux_2_27_x86_64.manylinux_2_28_x86_64"], 0),
    ],
)
def test_the_wheel_that_an_installer_would_take(offered: list[str], taken: int) -> None:
    wheels = named(*offered)
    assert artifacts.choose(wheels, HERE, "3.12.1") == wheels[taken]


@pytest.mark.parametrize(
    ("offered", "what"),
    [
        ("1.0-cp310-abi3-win_amd64", "platform"),
        ("1.0-cp310-abi3-manylinux_2_28_aarch64", "platform"),
        ("1.0-cp310-abi3-manylinux_2_34_x86_64", "platform"),
        ("1.0-cp313-cp313-manylinux_2_28_x86_64", "Python"),
        ("1.0-cp313-cp313-manylinux_2_28_x86_64.manylinux_2_34_x86_64", "Python"),
    ],
)
def test_no_wheel_for_this_machine(offered: str, what: str) -> None:
    with pytest.raises(CheckFailed) as raised:
        artifacts.choose(named(offered), HERE, "3.12.1")
    compiled, _, platforms = offered.removeprefix("1.0-").rpartition("-")
    assert str(raised.value) == (
        f"no wheel for this {what}\n  there is: {', '.join(f'{compiled}-{each}' for each in platforms.split('.'))}\n"
        "  Python 3.12.1 here takes: cp312-cp312, cp312-abi3, cp312-none, cp311-abi3, cp310-abi3, …"
        " on manylinux_2_31_x86_64, manylinux_2_28_x86_64, any, …"
    )
