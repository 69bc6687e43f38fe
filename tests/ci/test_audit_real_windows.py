"""The reader of PE on modules that MSVC has linked, which the small ones of the other tests, of mingw, are not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path, PurePosixPath

import pytest

from ci.matrix import load
from ci.wheelfile.binary import parse
from ci.wheelfile.wheel import read

pytestmark = [pytest.mark.slow, pytest.mark.nightly]  # these wheels change with the pins only


@pytest.mark.parametrize("requirement", ["nanobind-backend==1.0.0", f"mlx=={load().mlx}", "numpy==2.5.5"])
def test_modules_of_msvc(tmp_path: Path, requirement: str) -> None:
    """None has a fault; each exports what Python looks for."""
    pip = ["uv", "tool", "run", "pip", "download", "--no-deps", "--only-binary=:all:", "--python-version", "3.12", "--quiet"]
    where = ["--platform", "win_amd64", "--dest", str(tmp_path)]
    subprocess.run([sys.executable, "-m", *pip, *where, requirement], check=True)
    wheel = read(next(tmp_path.glob("*.whl")))
    assert not wheel.unreadable
    assert {member: binary.faults for member, binary in wheel.binaries.items() if binary.faults} == {}
    modules = {member: binary for member, binary in wheel.binaries.items() if member.endswith(".pyd")}
    assert modules
    for member, binary in modules.items():
        assert f"PyInit_{PurePosixPath(member).name.partition('.')[0]}" in binary.exports
        assert "python312.dll" in binary.needed
    for member, binary in wheel.binaries.items():
        assert binary.signed == ("msvcp140" in member)
        if binary.signed:
            data = wheel.members[member]
            changed = parse(data[:0x1000] + bytes([data[0x1000] ^ 1]) + data[0x1001:])
            assert changed
            assert changed.faults[-1] == "has a SECURITY directory, expected none"
