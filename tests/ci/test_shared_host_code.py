"""Host code is compiled once, with the headers of the oldest CUDA version, and linked into the modules of all: what makes that right."""

from __future__ import annotations

import filecmp
import re
from pathlib import Path

import pytest

from ci import matrix, toolkit
from ci.errors import EnvironmentProblem

SRC = matrix.REPOSITORY / "src"
CMAKE = (matrix.REPOSITORY / "CMakeLists.txt").read_text("utf-8")
OWN = set(re.findall(r"src/(\S+\.cpp)", CMAKE.partition("set(own_sources")[2].partition(")")[0]))


def host_files() -> list[Path]:
    return sorted(path for pattern in ("*.cpp", "*.h") for path in SRC.rglob(pattern) if path.relative_to(SRC).as_posix() not in OWN)


def test_what_is_a_modules_own_is_known() -> None:
    assert sorted(OWN) == ["attention/cudnn/plans.cpp", "bindings/module.cpp"]
    assert len(host_files()) > 50


@pytest.mark.parametrize("path", host_files(), ids=lambda path: path.name)
def test_shared_code_calls_nothing_of_the_cuda_runtime(path: Path) -> None:
    """Its functions and structures differ between majors under one name; the driver's have a version in theirs."""
    text = re.sub(r"//.*", "", path.read_text("utf-8"))
    assert re.findall(r"\bcuda[A-Z]\w*\s*\(|\bcudaDeviceProp\b", text) == []


def test_both_backends_of_mlx_have_the_same_headers() -> None:
    try:
        installed = [toolkit.root_path(cuda.roots[1], matrix.host_platform()) for cuda in matrix.load().cuda.values()]
    except EnvironmentProblem as problem:
        pytest.skip(str(problem))
    first, *others = (root / "include" / "mlx" for root in installed)
    files = sorted(str(path.relative_to(first)) for path in first.rglob("*") if path.is_file())
    assert len(files) > 100
    for other in others:
        assert sorted(str(path.relative_to(other)) for path in other.rglob("*") if path.is_file()) == files
        assert filecmp.cmpfiles(first, other, files, shallow=False)[1:] == ([], [])
