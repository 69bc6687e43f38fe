"""The tables of kernels that the host chooses from (src/runtime/kernel_table.h), and the kernels of the fatbins: the same."""

from __future__ import annotations

import io
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path

import pytest
from elftools.elf.elffile import ELFFile

from ci.matrix import REPOSITORY
from ci.wheelfile import wheel
from ci.wheelfile.binary import fatbin

SOURCES = REPOSITORY / "src"
TABLES = Path(__file__).with_name("kernel_tables.h")
TABLE = re.compile(r'\bTABLE "(\w+)"([\s\w+!]*);')
WHOLE = re.compile(r'\bfunction\(\s*"(\w+)"\s*\)')  # on the host: a name that no table is needed for
PASTED = re.compile(r'\bfunction\([^;{]*?"\s*\+')
ENTRY = re.compile(rb"^\.visible \.entry (\w+)\(", re.MULTILINE)
CONSTANTS = ".nv.constant0."  # what a kernel takes, and no other function of a cubin


@cache
def tables() -> dict[str, list[tuple[str, str]]]:
    """By source: a mark, and the name of a kernel."""
    if not (compiler := shutil.which("c++")):
        pytest.skip("needs a C++ compiler")
    told = subprocess.run([compiler, "-std=c++20", "-E", "-P", f"-I{SOURCES}", TABLES], check=True, capture_output=True, text=True).stdout
    return {source: re.findall(r"([+!]) (\w+)", rows) for source, rows in TABLE.findall(told)}


def listed(source: str, architecture: str) -> set[str]:
    return {name for mark, name in tables().get(source, []) if mark == "+" or architecture != "90a"}


def host_code() -> list[str]:
    return [path.read_text("utf-8") for path in SOURCES.rglob("*.cpp")]


def kernels(data: bytes, entry: fatbin.Entry) -> set[str]:
    _, header, *_ = fatbin.ENTRY.unpack_from(data, entry.offset)
    code = data[entry.offset + header : entry.offset + entry.size]
    if entry.kind == "ptx":
        return {name.decode() for name in ENTRY.findall(code)}
    names = [section.name for section in ELFFile(io.BytesIO(code)).iter_sections()]
    return {name.removeprefix(CONSTANTS) for name in names if name.startswith(CONSTANTS)}


def test_no_name_stands_twice() -> None:
    for source, rows in tables().items():
        names = [name for _, name in rows]
        assert len(names) == len(set(names)) > 0, source


def test_names_are_of_tables_or_whole() -> None:
    """So a search for a kernel finds who launches it."""
    assert [match[0] for text in host_code() for match in PASTED.finditer(text)] == []


def test_tables_are_of_sources() -> None:
    assert set(tables()) <= {path.stem for path in SOURCES.rglob("*.cu")}


def test_fatbins_have_the_kernels_of_the_tables(tested_wheel: Path) -> None:
    others: set[str] = set()
    for source, data in wheel.read(tested_wheel).unpacked.items():
        for entry in fatbin.only(data).entries:
            found, expected = kernels(data, entry), listed(source, entry.architecture)
            assert expected <= found, f"{source} of {entry.kind} {entry.architecture}"
            others |= found - expected
    whole = {name for text in host_code() for name in WHOLE.findall(text)}
    assert others == whole
