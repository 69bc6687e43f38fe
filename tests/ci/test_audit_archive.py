"""What the judge of archives admits, up to its limits; what it refuses is in the table of faults."""

from __future__ import annotations

import stat
import struct
import zipfile
from pathlib import Path
from typing import Any

import pytest

from ci.errors import CheckFailed, EnvironmentProblem
from ci.wheelfile import archive

from .attack_support import NN, central, end, field, info, inserted, packed, put

FOLDER = stat.S_IFDIR | 0o755


def made(name: str = NN, data: bytes = b"data", mode: int = stat.S_IFREG | 0o644, **fields: Any) -> tuple[zipfile.ZipInfo, bytes]:
    entry = info(name, mode)
    for key, value in fields.items():
        setattr(entry, key, value)
    return entry, data


def members(path: Path, *entries: tuple[zipfile.ZipInfo, bytes]) -> dict[str, bytes]:
    path.write_bytes(packed(entries))
    return archive.read(path)[0]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "some.whl"


@pytest.mark.parametrize("mode", [0o600, 0o644, 0o664, 0o755, 0o775])
def test_modes_of_tools(path: Path, mode: int) -> None:
    assert members(path, made(mode=stat.S_IFREG | mode), made("empty", b"", mode)) == {NN: b"data", "empty": b""}


@pytest.mark.parametrize("mode", [0, 0o640, 0o700, 0o666, 0o777, 0o2755, 0o4755, 0o1755])
def test_other_modes(path: Path, mode: int) -> None:
    with pytest.raises(
        CheckFailed, match=f"'{NN}' has the mode {mode:04o}, expected one of 0600, 0644, 0664, 0755, 0775; nothing was unpacked"
    ):
        members(path, made(mode=stat.S_IFREG | mode))


@pytest.mark.parametrize("mode", [0, 0o666, 0o777])
def test_windows_has_no_modes(path: Path, mode: int) -> None:
    attributes = (stat.S_IFREG | mode) << 16 | 0x21  # to be archived, and not to be written to
    assert members(path, made(external_attr=attributes, create_system=0)) == {NN: b"data"}


def test_two_names() -> None:
    """Newer CPythons give an entry the name of an extra field."""
    entry, _ = made()
    entry.orig_filename = "other"
    assert archive.wrong(entry) == f"has an extra field that gives it another name, {NN!r}"


def test_folders_and_both_compressions(path: Path) -> None:
    entries = [
        made("mlx_cuda/", b"", FOLDER),
        made("mlx_cuda/deep/", b"", FOLDER),
        made(compress_type=zipfile.ZIP_STORED),
        made("mlx_cuda/deep/x"),
    ]
    assert members(path, *entries) == {NN: b"data", "mlx_cuda/deep/x": b"data"}


def test_another_order_in_the_directory(path: Path) -> None:
    """Each entry is where the directory says; the order there is nobody's matter."""
    path.write_bytes(packed([made("a", b"1"), made("b", b"2")]))
    data = path.read_bytes()
    first, second = central(data, "a"), central(data, "b")
    assert (first, second) == (second - 47, first + 47)
    path.write_bytes(data[:first] + data[second : second + 47] + data[first:second] + data[second + 47 :])
    assert archive.read(path)[0] == {"b": b"2", "a": b"1"}


def test_flags_that_mean_nothing(path: Path) -> None:
    path.write_bytes(field(8, "<H", 0x806)(packed([made()])))
    assert archive.read(path)[0] == {NN: b"data"}


@pytest.mark.parametrize("flag", [0x8, 0x10, 0x20, 0x80, 0x100, 0x1000, 0x4000])
def test_flags_that_mean_something(path: Path, flag: int) -> None:
    path.write_bytes(field(8, "<H", flag)(packed([made()])))
    with pytest.raises((CheckFailed, EnvironmentProblem), match=rf"has the flags {flag:#x}|not a readable wheel"):
        archive.read(path)[0]


@pytest.mark.parametrize("flag", [0x1, 0x40, 0x2000])
def test_encryption(flag: int) -> None:
    entry = zipfile.ZipInfo(NN)
    entry.external_attr, entry.flag_bits = 0o644 << 16, flag
    assert archive.wrong(entry) == "is encrypted"


@pytest.mark.parametrize("name", ["con.py", "PRN", "aux.tar.gz", "x/nul", "x/com1.txt", "lpt9", "COM0", "conin$", "conout$", "con .py"])
def test_devices_of_windows(name: str) -> None:
    assert archive.misnamed(name) == "has a name that Windows reserves for a device"


@pytest.mark.parametrize("name", ["mlx_cuda/.hidden", "a/b/", "console.py", "com10.txt", "x.con", "X", "a b", "-", "~", "a" * 240])
def test_names_of_no_harm(name: str) -> None:
    assert archive.misnamed(name) == ""


@pytest.mark.parametrize("name", ["", "/", "a//", "a//b", ".", "a/./b", "a/.../b", "a/"[1:]])
def test_names_with_nothing_in_them(name: str) -> None:
    assert archive.misnamed(name) in {"has an empty part in its name", "has an absolute path"}


@pytest.mark.parametrize("name", [" a", "a/ b", "a ", "a.", "a./b", *(f"a{each}b" for each in '<>"|?*')])
def test_names_that_windows_changes(name: str) -> None:
    assert archive.misnamed(name) == "has a name that Windows changes or forbids"


def test_a_name_is_bounded() -> None:
    assert archive.misnamed("a" * 241) == "has a name of 241 characters, expected at most 240"


def test_limits(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is what is still admitted."""
    entries = [made("a", bytes(1000)), made("b", bytes(1000))]
    size = len(packed(entries))
    for name, limit, said in (
        ("MAX_ENTRIES", 2, "has 2 entries, expected at most 1"),
        ("MAX_RATIO", -(-2000 // size), f"would unpack to {2000 / size:,.0f} times its size, expected at most {-(-2000 // size) - 1}"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(archive, name, limit)
            assert len(members(path, *entries)) == 2
            patch.setattr(archive, name, limit - 1)
            with pytest.raises(CheckFailed, match=f"some.whl {said}"):
                archive.read(path)[0]
    with zipfile.ZipFile(path) as opened:
        monkeypatch.setattr(archive, "MAX_BYTES", 2000)
        assert len(archive.judged(path, opened)) == 2
        monkeypatch.setattr(archive, "MAX_BYTES", 1999)
        with pytest.raises(CheckFailed, match="would unpack to 0 MiB, expected at most 0"):
            archive.judged(path, opened)
    monkeypatch.setattr(archive, "MAX_BYTES", size)
    archive.opened(path).close()
    monkeypatch.setattr(archive, "MAX_BYTES", size - 1)
    with pytest.raises(CheckFailed, match="has 0 MiB, expected at most 0"):
        archive.opened(path)


def test_what_limits_are_told(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive, "MAX_BYTES", 2 * 2**20)
    path.write_bytes(field(24, "<I", 3 * 2**20)(packed([made()])))
    with pytest.raises(CheckFailed, match=r"would unpack to 3 MiB, expected at most 2"):
        archive.read(path)[0]
    path.write_bytes(bytes(3 * 2**20))
    with pytest.raises(CheckFailed, match=r"has 3 MiB, expected at most 2"):
        archive.read(path)[0]


def test_the_limits_themselves() -> None:
    assert (archive.MAX_BYTES, archive.MAX_ENTRIES, archive.MAX_RATIO, archive.LONGEST) == (512 * 2**20, 10_000, 50, 240)


@pytest.mark.parametrize("change", [end(4, "<H", 1), end(6, "<H", 1), end(8, "<H", 2), end(10, "<H", 2), end(8, "<H", 0)])
def test_what_the_end_counts(path: Path, change: Any) -> None:
    path.write_bytes(change(packed([made()])))
    with pytest.raises(CheckFailed, match="is a multi-disk archive"):
        archive.read(path)[0]


def test_no_byte_of_a_header_differs(path: Path) -> None:
    """All that stands twice is compared: version, flags, method, time, sum, sizes, name."""
    good = packed([made()])
    start = good.index(b"PK\3\4")
    for place in (*range(start, start + 30 + len(NN)),):
        path.write_bytes(put(good, place, "<B", good[place] ^ 0x40))
        with pytest.raises((CheckFailed, EnvironmentProblem), match="differs from its local header"):
            archive.read(path)[0]


def test_another_directory_in_a_comment(path: Path) -> None:
    """What stands before the end leads to a directory of its own, which does not have the comment that all this stands in."""
    good = packed([made()])
    place, size = central(good), 46 + len(NN)
    large = struct.pack("<4sQ2H2I4Q", b"PK\6\6", 44, 45, 45, 0, 0, 1, 1, size, place) + struct.pack("<4sIQI", b"PK\6\7", 0, place + size, 1)
    path.write_bytes(inserted(put(good, place + 32, "<H", len(large)), place + size, large, grows=1))
    with pytest.raises((CheckFailed, EnvironmentProblem), match=r"is a multi-disk archive|not a readable wheel"):
        archive.read(path)[0]


def test_a_broken_stream(path: Path) -> None:
    data = packed([made()])
    path.write_bytes(put(data, data.index(NN.encode()) + len(NN), "<B", 0xFF))
    with pytest.raises(EnvironmentProblem, match=rf"not a readable wheel: {NN}: Error -3"):
        archive.read(path)[0]


def test_data_behind_the_directory(path: Path) -> None:
    """The end counts these bytes as the directory's."""
    data = packed([made()])
    path.write_bytes(inserted(data, len(data) - 22, b"PK\5\5\0\0", grows=1))
    with pytest.raises((CheckFailed, EnvironmentProblem), match=r"around its directory|not a readable wheel"):
        archive.read(path)[0]


def test_a_stream_that_is_cut_off(path: Path) -> None:
    data = packed([made(data=b"some data of more than a few bytes")])
    size = struct.unpack_from("<I", data, central(data) + 20)[0]
    offset = data.index(NN.encode()) + len(NN) + size - 1
    cut = field(20, "<I", size - 1)(inserted(data, offset + 1, b""))
    removed = cut[:offset] + cut[offset + 1 :]
    path.write_bytes(end(16, "<I", struct.unpack_from("<I", cut, len(cut) - 6)[0] - 1)(removed))
    with pytest.raises(CheckFailed, match="has more or less data than is declared"):
        archive.read(path)[0]


def test_not_there_and_no_archive(path: Path) -> None:
    with pytest.raises(EnvironmentProblem, match=r"cannot read .*some.whl: No such file or directory\n  fix: check the path"):
        archive.read(path)[0]
    for name, kind in (("some.whl", "wheel"), ("some.zip", "zip")):
        path.with_name(name).write_bytes(b"<html>")
        with pytest.raises(EnvironmentProblem, match=rf"is not a readable {kind}: File is not a zip file\n  fix: download"):
            archive.opened(path.with_name(name))
