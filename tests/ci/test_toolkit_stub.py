"""ci.toolkit.stub: the stub for libcuda.so.1, for the linker and for the loader."""

from __future__ import annotations

import ctypes
import io
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from elftools.elf.elffile import ELFFile

from ci.toolkit import stub
from tests.ci import toolkit_support as support

FUNCTIONS = ["cuInit", "cuLaunchKernel", "cuLaunchKernel_ptsz", "cuMemAlloc", "cuMemAlloc_v2", "cuMemcpy", "cuMemcpy_ptds"]
SONAME = "libcuda.so.1"

runs_here = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() not in {"x86_64", "aarch64"}, reason="needs a Linux that the stub is made for"
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    stub.write(tmp_path, platform.machine(), SONAME, FUNCTIONS)
    return tmp_path


def test_functions_under_all_their_names(tmp_path: Path) -> None:
    (tmp_path / "cuda.h").write_text(support.CUDA_H, "utf-8")
    assert stub.driver_functions(tmp_path / "cuda.h") == FUNCTIONS


@pytest.mark.parametrize(("machine", "e_machine"), [("x86_64", "EM_X86_64"), ("aarch64", "EM_AARCH64")])
def test_the_file_is_a_shared_object(machine: str, e_machine: str) -> None:
    elf: Any = ELFFile(io.BytesIO(stub.shared_object(machine, SONAME, FUNCTIONS)))
    assert (elf["e_type"], elf["e_machine"]) == ("ET_DYN", e_machine)
    dynamic = elf.get_section_by_name(".dynamic")
    assert [tag.soname for tag in dynamic.iter_tags("DT_SONAME")] == [SONAME]
    # What the loader reads, by way of the segments alone.
    segment = next(segment for segment in elf.iter_segments() if segment["p_type"] == "PT_DYNAMIC")
    assert {symbol.name for symbol in segment.iter_symbols() if symbol.name} == set(FUNCTIONS)
    (code,) = {symbol["st_value"] for symbol in segment.iter_symbols() if symbol.name}
    text = elf.get_section_by_name(".text")
    assert (code, text["sh_addr"]) == (text["sh_offset"], text["sh_offset"])
    assert (dynamic["sh_addr"], dynamic["sh_offset"]) == (segment["p_vaddr"], segment["p_offset"])
    hashes = elf.get_section_by_name(".hash")
    assert all(hashes.get_symbol(name).name == name for name in FUNCTIONS)
    assert hashes.get_symbol("cuNothing") is None
    for load in (segment for segment in elf.iter_segments() if segment["p_type"] == "PT_LOAD"):
        assert (load["p_vaddr"] - load["p_offset"]) % load["p_align"] == 0
    assert not next(segment for segment in elf.iter_segments() if segment["p_type"] == "PT_GNU_STACK")["p_flags"] & 1


def test_the_instructions_return_the_error() -> None:
    """As assembled by GNU as; that of this machine is run below."""
    assert stub.ERROR == 0x22
    code: dict[str, Any] = {
        machine: ELFFile(io.BytesIO(stub.shared_object(machine, SONAME, FUNCTIONS))) for machine in ("x86_64", "aarch64")
    }
    assert code["x86_64"].get_section_by_name(".text").data() == bytes.fromhex("b822000000 c3")
    assert code["aarch64"].get_section_by_name(".text").data() == bytes.fromhex("40048052 c0035fd6")


@runs_here
def test_the_loader_loads_it_and_every_function_fails(folder: Path) -> None:
    library = ctypes.CDLL(str(folder / SONAME))
    assert {getattr(library, name)(0) for name in FUNCTIONS} == {stub.ERROR}
    with pytest.raises(AttributeError):
        _ = library.cuNothing


@runs_here
@pytest.mark.parametrize("linker", ["bfd", "gold", "lld", "mold"])
def test_programs_link_with_it(folder: Path, linker: str) -> None:
    compiler = shutil.which("gcc")
    if not compiler or not shutil.which(f"ld.{linker}"):
        pytest.skip(f"needs gcc and ld.{linker}")
    source, program = folder / "main.c", folder / "main"
    source.write_text("int cuInit(unsigned), cuMemAlloc_v2(void*, long); int main(void) { return cuMemAlloc_v2(0, 1) + cuInit(0) - 34; }\n")
    subprocess.run([compiler, f"-fuse-ld={linker}", str(source), "-o", str(program), f"-L{folder}", "-lcuda"], check=True)
    environment = {"LD_LIBRARY_PATH": str(folder), "LD_BIND_NOW": "1"}
    assert subprocess.run([str(program)], env=environment, check=False).returncode == stub.ERROR
    with program.open("rb") as file:
        elf: Any = ELFFile(file)
        needed = [tag.needed for tag in elf.get_section_by_name(".dynamic").iter_tags("DT_NEEDED")]
    assert SONAME in needed


@runs_here
def test_a_function_that_it_lacks_is_a_link_error(folder: Path) -> None:
    compiler = shutil.which("gcc")
    if not compiler:
        pytest.skip("needs gcc")
    (folder / "main.c").write_text("int cuNothing(void); int main(void) { return cuNothing(); }\n")
    command = [compiler, str(folder / "main.c"), "-o", str(folder / "main"), f"-L{folder}", "-lcuda"]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", check=False)
    assert done.returncode != 0
    assert "cuNothing" in done.stderr
