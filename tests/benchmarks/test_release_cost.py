"""The comparison of what a release costs, without its builds."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from benchmarks import release_cost
from benchmarks.release_cost import builds, make_usual, measure, table
from ci import matrix
from ci.errors import CheckFailed, EnvironmentProblem
from ci.maintain import checkout

if TYPE_CHECKING:
    from collections.abc import Sequence

PROVENANCE = {"platform": "linux-x86_64", "compiler": "g++ 12", "cores": 2, "date": "2026-11-21T00:00:00+00:00", "commit": "0" * 40}


def cost(way: str, python: str, cuda: str, size: int, seconds: float) -> dict[str, object]:
    return {
        "way": way,
        "python": python,
        "cuda": [cuda],
        "wheel": "w.whl",
        "bytes": size,
        "cpu_seconds": seconds,
        "wall_seconds": 1.0,
        "device_compilations": 10,
        "load_before": 0.0,
    }


RESULTS = {
    "provenance": PROVENANCE,
    "wheels": [
        cost("ours", "3.9.1", "13.0", 3000, 50.4),
        cost("usual", "3.10.1", "13.0", 1000, 30.0),
        cost("usual", "3.9.1", "13.0", 1500, 40.2),
    ],
}


def test_the_edits_still_fit_the_project(tmp_path: Path) -> None:
    for name in release_cost.USUAL:
        shutil.copy(matrix.REPOSITORY / name, tmp_path)
    make_usual(tmp_path)
    cmake, project = ((tmp_path / name).read_text() for name in ("CMakeLists.txt", "pyproject.toml"))
    assert "STABLE_ABI" not in cmake
    assert "BACKEND_MODULE" not in cmake
    assert 'wheel.py-api = "cp310"' not in project
    with pytest.raises(EnvironmentProblem, match="is not there once"):
        make_usual(tmp_path)


def test_each_python_and_each_cuda_version_once(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    assert list(builds([old, new])) == [
        ("ours", old, ["12.8", "13.0"]),
        ("usual", old, ["12.8"]),
        ("usual", old, ["13.0"]),
        ("usual", new, ["12.8"]),
        ("usual", new, ["13.0"]),
    ]


def test_table_has_the_sums() -> None:
    ours, usual = table(RESULTS).splitlines()[2:4]
    assert ours == "| ours: one wheel for all | 1 | 3,000 | 50 | 10 | 3,000 |"
    assert usual == "| usual: one for each CPython and CUDA major | 2 | 2,500 | 70 | 20 | 1,000 to 1,500 |"
    assert "CPython 3.9, 3.10," in table(RESULTS)


def test_a_build_is_measured_with_all_its_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for the factory: its build leaves a wheel of 100 bytes and two compilations, its repair copies, and both take time."""
    text = """
import pathlib, shutil, subprocess, sys
output = pathlib.Path(sys.argv[sys.argv.index("--output") + 1])
output.mkdir()
subprocess.run([sys.executable, "-c", "import time\\nwhile time.process_time() < 0.3: pass"], check=True)
if sys.argv[1] == "build":
    (output / "w.whl").write_bytes(b"x" * 100)
    for name in ("device/a.fatbin", "device-objects/0a/0a1", "device-objects/0a/0a2", "device-objects/f0/f01", "c.o"):
        path = pathlib.Path("build/tree", name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
else:
    shutil.copy(sys.argv[2], output)
"""

    def export(commit: str, folder: Path) -> None:
        (folder / "ci").mkdir(parents=True)
        (folder / "ci/__main__.py").write_text(text)

    monkeypatch.setattr(checkout, "export", export)
    measured = measure("ours", Path(sys.executable), ["13.0"], "commit", tmp_path / "out")
    assert (measured.wheel, measured.bytes, measured.device_compilations) == ("w.whl", 100, 2)
    assert measured.cpu_seconds >= 0.6
    monkeypatch.setattr(checkout, "export", lambda _, folder: folder.mkdir())
    with pytest.raises(CheckFailed, match="failed"):
        measure("ours", Path(sys.executable), ["13.0"], "commit", tmp_path / "again")


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def no_build(*_: object, **__: object) -> Sequence[str]:
        raise AssertionError("--table measures nothing")

    monkeypatch.setattr(subprocess, "run", no_build)
    results = tmp_path / "results.json"
    results.write_text(json.dumps(RESULTS))
    assert release_cost.main(["--table", str(results)]) == 0
    assert capsys.readouterr().out == f"{table(RESULTS)}\n"
    assert release_cost.main(["--table", str(tmp_path / "absent.json")]) == 2
