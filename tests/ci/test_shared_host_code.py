"""Host code is compiled once, with the headers of the oldest CUDA version, and linked into the modules of all: what makes that right."""

from __future__ import annotations

import filecmp
import re
import zipfile
from pathlib import Path

import pytest

from ci import matrix, toolkit
from ci.errors import EnvironmentProblem
from ci.wheelfile.binary import elf

SRC = matrix.REPOSITORY / "src"
CMAKE = (matrix.REPOSITORY / "CMakeLists.txt").read_text("utf-8")
OWN = set(re.findall(r"src/(\S+\.cpp)", CMAKE.partition("set(own_sources")[2].partition(")")[0]))


def host_files() -> list[Path]:
    return sorted(path for pattern in ("*.cpp", "*.h") for path in SRC.rglob(pattern) if path.relative_to(SRC).as_posix() not in OWN)


def test_what_is_a_modules_own_is_known() -> None:
    assert sorted(OWN) == ["bindings/module.cpp"]
    assert len(host_files()) > 50


@pytest.mark.parametrize("path", host_files(), ids=lambda path: path.name)
def test_shared_code_calls_nothing_of_the_cuda_runtime(path: Path) -> None:
    """Its functions and structures differ between majors under one name; the driver's have a version in theirs."""
    text = re.sub(r"//.*", "", path.read_text("utf-8"))
    assert re.findall(r"\bcuda[A-Z]\w*\s*\(|\bcudaDeviceProp\b", text) == []


def roots(place: int) -> list[Path]:
    """The root at this place of each CUDA version's; the test is skipped where one is not installed."""
    try:
        return [toolkit.root_path(cuda.roots[place], matrix.host_platform()) for cuda in matrix.load().cuda.values()]
    except EnvironmentProblem as problem:
        pytest.skip(str(problem))


def test_cudnn_frontend_reads_of_a_device_only_what_it_is_given() -> None:
    """Of cudaDeviceProp, whose layout differs between majors, plans.cpp fills in one member."""
    for root in roots(2):
        text = "".join(path.read_text("utf-8") for path in (root / "include").rglob("*.h"))
        assert {*re.findall(r"\bcudaDeviceProp\b[ *]+(\w+)", text)} == {"prop"}
        assert {*re.findall(r"\bprop(?:\.|->)(\w+)", text)} == {"major"}
        assert {*re.findall(r"\bcudaGetDeviceProperties\w*", text)} == {"cudaGetDeviceProperties"}


def test_what_cudnn_frontend_calls_of_the_runtime_is_the_same_in_both_majors(tested_wheel: Path) -> None:
    calls: set[str] = set()
    with zipfile.ZipFile(tested_wheel) as wheel:
        for cuda in matrix.load().cuda.values():
            name = f"{matrix.load().module}/{cuda.module}.abi3.so"
            if name in wheel.namelist():
                undefined = elf.described(elf.Elf(wheel.read(name))).undefined
                calls |= {symbol for symbol in undefined if re.match("cuda[A-Z]", symbol)}
    assert "cudaGetDevice" in calls
    headers = [(root / "include" / "cuda_runtime_api.h").read_text("utf-8") for root in roots(0)]
    for call in sorted(calls):
        declared = [set(re.findall(rf"\bCUDARTAPI {call}\(.*", header)) for header in headers]
        assert declared[0], f"{call} is declared"
        assert all(each == declared[0] for each in declared), f"{call} is declared alike"
        assert "struct" not in "".join(declared[0]), f"{call} takes no structure"


def test_both_backends_of_mlx_have_the_same_headers() -> None:
    first, *others = (root / "include" / "mlx" for root in roots(1))
    files = sorted(str(path.relative_to(first)) for path in first.rglob("*") if path.is_file())
    assert len(files) > 100
    for other in others:
        assert sorted(str(path.relative_to(other)) for path in other.rglob("*") if path.is_file()) == files
        assert filecmp.cmpfiles(first, other, files, shallow=False)[1:] == ([], [])
