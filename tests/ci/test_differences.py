"""What ``ci.maintain.differences`` says of two wheels that differ in one thing."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import zipfile
from pathlib import Path

import pytest

from ci.errors import EnvironmentProblem
from ci.maintain.differences import differences, explain

DATE = (2026, 1, 2, 3, 4, 6)


def wheel(path: Path, entries: dict[str, bytes], **attributes: object) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in entries.items():
            information = zipfile.ZipInfo(name, DATE)
            for key, value in attributes.items():
                setattr(information, key, value)
            archive.writestr(information, data)
    return path


def described(data: bytes) -> str:
    return f"{len(data)} bytes, sha256 {hashlib.sha256(data).hexdigest()[:16]}"


def test_equal_wheels_have_no_difference(tmp_path: Path) -> None:
    assert differences(wheel(tmp_path / "1.whl", {"a": b"1"}), wheel(tmp_path / "2.whl", {"a": b"1"})) == []


def test_each_member_that_differs_is_named_with_sizes_and_digests(tmp_path: Path) -> None:
    first = wheel(tmp_path / "1.whl", {"same": b"", "changed": b"one", "gone": b""})
    second = wheel(tmp_path / "2.whl", {"same": b"", "changed": b"other", "new": b""})
    empty = f"{described(b'')}, ?rw-------, 2026-01-02 03:04:06"
    assert [str(each) for each in differences(first, second)] == [
        f"changed: {empty.replace(described(b''), described(b'one'))} against {empty.replace(described(b''), described(b'other'))}",
        f"gone: {empty} against absent",
        f"new: absent against {empty}",
    ]


@pytest.mark.parametrize(
    ("attributes", "expected"),
    [({"date_time": (2026, 1, 2, 3, 4, 8)}, "2026-01-02 03:04:08"), ({"external_attr": 0o100664 << 16}, "-rw-rw-r--")],
)
def test_what_the_archive_says_of_a_member(tmp_path: Path, attributes: dict[str, object], expected: str) -> None:
    plain, other = wheel(tmp_path / "1.whl", {"a": b""}), wheel(tmp_path / "2.whl", {"a": b""}, **attributes)
    (difference,) = differences(plain, other)
    assert difference.member == "a"
    assert [expected in side for side in difference.sides] == [False, True]


def test_order_and_bytes_outside_the_members(tmp_path: Path) -> None:
    first, second = wheel(tmp_path / "1.whl", {"a": b"", "b": b""}), wheel(tmp_path / "2.whl", {"b": b"", "a": b""})
    third = tmp_path / "3.whl"
    third.write_bytes(b"junk" + first.read_bytes())
    for other in (second, third):
        expected = f"the archive: {described(first.read_bytes())} against {described(other.read_bytes())}"
        assert [str(each) for each in differences(first, other)] == [expected]


@pytest.mark.parametrize("data", [None, b"PK no zip", b""], ids=["absent", "damaged", "empty"])
def test_what_is_no_wheel_is_refused(tmp_path: Path, data: bytes | None) -> None:
    plain, other = wheel(tmp_path / "1.whl", {"a": b""}), tmp_path / "2.whl"
    if data is not None:
        other.write_bytes(data)
    with pytest.raises(EnvironmentProblem, match=r"2\.whl"):
        differences(plain, other)


@pytest.mark.parametrize("installed", [True, False])
def test_diffoscope_explains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], installed: bool) -> None:
    commands: list[list[str]] = []
    monkeypatch.setattr(shutil, "which", lambda name: name if installed else None)
    monkeypatch.setattr(subprocess, "run", lambda command, **_: commands.append(command))
    explain(tmp_path / "1.whl", tmp_path / "2.whl")
    wheels = [str(tmp_path / "1.whl"), str(tmp_path / "2.whl")]
    assert commands == ([["diffoscope", *wheels]] if installed else [])
    assert (f"diffoscope {' '.join(wheels)}" in capsys.readouterr().out) is not installed
