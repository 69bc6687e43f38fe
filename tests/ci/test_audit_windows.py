"""The audit of Windows wheels, on real DLLs made by mingw: what is read from PE and not from ELF."""

from __future__ import annotations

import re
import shutil
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path

import pefile
import pytest

from ci.audit import describe, providers
from ci.audit.checks import CHECKS
from ci.audit.checks.libraries import Supplier, supplier
from ci.audit.policy import for_wheel
from ci.matrix import System
from ci.wheelfile.binary import parse
from ci.wheelfile.wheel import read

from .audit_support import CU13, NAMES, Files, World, fatbin, member, replaced, require, said, with_module, write_wheel
from .pe_support import (
    Spoil,
    by_ordinal,
    directory,
    filled_gap,
    header,
    image,
    imports_of_python,
    moved_header,
    section,
    signed,
    swapped_sections,
    with_thunk,
)


@pytest.fixture(scope="module")
def system() -> System:
    return "windows"


def test_good_wheel(audited: Callable[..., set[str]]) -> None:
    assert audited(checks=tuple(CHECKS)) == set()


def test_facts(tmp_path: Path, files: Files) -> None:
    first, second = describe(write_wheel(tmp_path / NAMES["windows"], files)).modules
    assert (first.member, second.member) == ("mlx_cuda/_cu12.pyd", "mlx_cuda/_cu13.pyd")
    assert {"cudart64_12.dll", "cublasLt64_12.dll", "cudnn64_9.dll", "mlx.dll", "nvcuda.dll", "python3.dll"} <= set(first.needed)
    assert first.rpath == ()


def test_a_damaged_binary(tmp_path: Path, files: Files, world: World) -> None:
    name = member(world, CU13)
    (line,) = said(tmp_path / NAMES["windows"], files, lambda files: files.update({name: files[name][:200]}), ("loader", "modules"))
    assert line.startswith(f"{name}: loader: is not readable as PE: ")


HEADERS: list[tuple[Spoil, str]] = [
    (header(Magic=0x10B), "has the Magic 0x10b, expected 0x20b"),
    (header(Subsystem=1), "has the Subsystem 0x1, expected 0x2 or 0x3"),
    (header(MajorSubsystemVersion=99), "has the MajorSubsystemVersion 0x63, expected 0x5 or 0x6"),
    (header(MinorSubsystemVersion=99), "has the MinorSubsystemVersion 0x63, expected 0x0 or 0x2"),
    (header(SectionAlignment=0), "has the SectionAlignment 0x0, expected 0x1000"),
    (header(FileAlignment=3), "has the FileAlignment 0x3, expected 0x200"),
    (header(NumberOfRvaAndSizes=15), "has the NumberOfRvaAndSizes 0xf, expected 0x10"),
    (header(SizeOfOptionalHeader=0xF8), "has the SizeOfOptionalHeader 0xf8, expected 0xf0"),
    *(
        (header(Characteristics=flags), f"has the Characteristics {flags:#x}, expected 0x2022, and of others only those of 0x20c")
        for flags in (0x22, 0x2020, 0x2002, 0x2023)  # no DLL; no EXECUTABLE_IMAGE; no LARGE_ADDRESS_AWARE; RELOCS_STRIPPED
    ),
    *(
        (header(DllCharacteristics=flags), f"has the DllCharacteristics {flags:#x}, expected 0x140, and of others only those of 0x4020")
        for flags in (0x1E0, 0x100, 0x40)  # FORCE_INTEGRITY; no DYNAMIC_BASE; no NX_COMPAT
    ),
    (header(ImageBase=0x180001000), "has the ImageBase 0x180001000, expected a multiple of 0x10000"),
    (moved_header, "has the e_lfanew 0x400, expected at most 0x200"),
]
PLACES: list[tuple[Spoil, str]] = [
    (header(SizeOfImage=0x1000), "has the SizeOfImage 0x1000, expected "),
    (header(SizeOfHeaders=0x10000), "has the SizeOfHeaders 0x10000, expected 0x400"),
    (section(0, Characteristics=0xE0000020), "has the section .text that is writable and executable, expected never both"),
    (section(0, Characteristics=0x70000020), "has the section .text that all processes share, expected none"),
    (section(0, Characteristics=0x68000020), "has the section .text of the flags 0x68000020, expected only those of code and data"),
    (section(0, VirtualAddress=0x123), "has the section .text at the VirtualAddress 0x123, expected 0x1000"),
    (section(0, PointerToRawData=0x600), "has the section .text at the PointerToRawData 0x600, expected 0x400"),
    (section(0, Misc_VirtualSize=0), "has the section .text of the VirtualSize 0x0 and the SizeOfRawData "),
    (section(-1, SizeOfRawData=2**20), "and the SizeOfRawData 0x100000, expected no more than it needs"),
    (swapped_sections, "has the section .data at the VirtualAddress "),
    (filled_gap(0), "has bytes behind the section .text, expected zeros"),
    (lambda data: data[:1023] + b"x" + data[1024:], "has bytes behind its headers, expected zeros"),
    (lambda data: data[:-512], "nothing belongs behind the file's own"),
]
DIRECTORIES: list[tuple[Spoil, str]] = [
    *(
        (directory(name, *place), f"has a {name} directory, expected none")
        for name in ("SECURITY", "COM_DESCRIPTOR", "COPYRIGHT", "GLOBALPTR", "BOUND_IMPORT", "RESERVED")
        for place in ((0x1000, 0), (0, 8))
    ),
    *((directory(name, 0, 0), f"has no {name} directory, expected one") for name in ("IMPORT", "BASERELOC")),
    (directory("BASERELOC", 0x1000, 0), "has no BASERELOC directory, expected one"),
    (directory("IMPORT", 0x900000, 8), "has the IMPORT directory at 0x900000, of 0x8 bytes, expected it inside a section"),
    (directory("TLS", 0x1000, 0x900000), "has the TLS directory at 0x1000, of 0x900000 bytes, expected it inside a section"),
    (header(AddressOfEntryPoint=0x900000), "has the AddressOfEntryPoint 0x900000, expected it inside a section of code"),
    (section(0, Characteristics=0x40000020), "has the AddressOfEntryPoint 0x"),
    (by_ordinal, "imports #5 of python3.dll by ordinal, expected imports by name: "),
]


@pytest.mark.parametrize(("spoil", "message"), [*HEADERS, *PLACES, *DIRECTORIES])
def test_what_windows_or_no_linker_takes(tmp_path: Path, files: Files, world: World, spoil: Spoil, message: str) -> None:
    name = member(world, CU13)
    lines = said(tmp_path / NAMES["windows"], files, lambda files: files.update({name: spoil(files[name])}), ("loader",))
    assert any(message in line for line in lines), lines
    assert all(line.startswith(f"{name}: loader: ") for line in lines)


def covered_by_symbols(data: bytes) -> bytes:
    """A table of no symbols and the size of its strings, which whoever writes them chooses."""
    return header(PointerToSymbolTable=len(data), NumberOfSymbols=0)(data) + struct.pack("<I", 8) + b"evil"


def covered_by_headers(data: bytes) -> bytes:
    return header(SizeOfHeaders=len(data) + 1)(data) + b"x"


def covered_by_a_section(data: bytes) -> bytes:
    size = pefile.PE(data=data, fast_load=True).sections[-1].SizeOfRawData
    return section(-1, SizeOfRawData=size + 0x200)(data) + b"x" * 0x200


@pytest.mark.parametrize("spoil", [lambda data: data + b"x", covered_by_symbols, covered_by_headers, covered_by_a_section])
def test_nothing_lies_behind_a_dll(tmp_path: Path, files: Files, world: World, spoil: Spoil) -> None:
    name = member(world, CU13)
    lines = said(tmp_path / NAMES["windows"], files, lambda files: files.update({name: spoil(files[name])}), ("loader",))
    assert [line for line in lines if "nothing belongs behind the file's own" in line or "SizeOfRawData" in line]


def test_symbols_behind_a_dll(tmp_path: Path, files: Files, world: World) -> None:
    change = with_module(world, strip=False, arguments=["-g"])
    assert len(said(tmp_path / NAMES["windows"], files, change, ("loader",))) == 1


def test_a_warning_of_pefile(tmp_path: Path, files: Files, world: World) -> None:
    """Of resources in the place of code, say, of which nothing else tells."""
    name = member(world, CU13)
    lines = said(
        tmp_path / NAMES["windows"], files, lambda files: files.update({name: directory("RESOURCE", 0x1000, 16)(files[name])}), ("loader",)
    )
    assert len(lines) == 1
    assert lines[0].startswith(f"{name}: loader: is strange to pefile: ")


def test_imports_that_pefile_passes_over(files: Files, world: World) -> None:
    """A function of odd letters, and a DLL of which nothing is asked but which Windows loads."""
    data = files[member(world, CU13)]
    odd = parse(data.replace(b"PyModule_Create2\0", b"PyModule-Create2\0"))
    assert odd
    assert "PyModule-Create2" in odd.used
    for place in imports_of_python(data):
        data = with_thunk(data, place, 0)
    unused = parse(data)
    assert unused
    assert "python3.dll" in unused.needed


def test_the_size_of_the_imports_is_not_asked(files: Files, world: World) -> None:
    """Windows reads on until an empty descriptor."""
    data = files[member(world, CU13)]
    good, short = parse(data), parse(image(lambda image: setattr(image.OPTIONAL_HEADER.DATA_DIRECTORY[1], "Size", 20))(data))
    assert good
    assert short
    assert len(good.needed) > 1
    assert short.needed == good.needed


def test_exports(files: Files, world: World) -> None:
    binary = parse(files[member(world, CU13)])
    assert binary
    assert binary.exports == {"PyInit__cu13", "gpu_code", "device_code", "package"}


def test_a_function_of_another_dll(tmp_path: Path, files: Files, world: World) -> None:
    """Whoever asks for it loads the other DLL, which stands in no list of imports."""
    (definitions := tmp_path / "forward.def").write_text("EXPORTS\n  PyInit__cu13\n  other = stranger.f\n")
    lines = said(tmp_path / NAMES["windows"], files, with_module(world, arguments=[definitions]), ("loader",))
    assert lines == ["mlx_cuda/_cu13.pyd: loader: exports other, which stranger.f has, expected functions of its own"]


def test_gpu_code_inside(audited: Callable[..., set[str]], world: World) -> None:
    assert audited(with_module(world, gpu_code=fatbin([75, 80, 120], [80]))) == {"architectures"}


@pytest.mark.parametrize("name", ["stranger.dll", "msvcp140.dll", "cublas64_13.dll"])
def test_a_dll_that_nobody_supplies(audited: Callable[..., set[str]], world: World, name: str) -> None:
    """The C++ run-time is none of Windows' own; cuBLAS is declared as not needed."""
    world.library(world.folder / "made" / name, "int f(void) { return 1; }")
    source = "__declspec(dllimport) int f(void); int use(void) { return f(); }"
    assert audited(with_module(world, source=source, arguments=[f"{world.folder / 'made' / name}.lib"])) == {"needed"}


def test_a_delay_loaded_dll(audited: Callable[..., set[str]], world: World) -> None:
    """GNU ld links the descriptor but, unlike MSVC's linker, leaves it out of the header: that is made up for here."""
    require(*(f"x86_64-w64-mingw32-{tool}" for tool in ("dlltool", "nm", "strip")))
    folder = world.folder / "delayed"
    folder.mkdir(exist_ok=True)
    (folder / "stranger.def").write_text("LIBRARY stranger.dll\nEXPORTS\n  f\n")
    dlltool = ["x86_64-w64-mingw32-dlltool", "-d", "stranger.def", "--output-delaylib", "stranger.lib", "-D", "stranger.dll"]
    subprocess.run(dlltool, check=True, cwd=folder, capture_output=True)
    source = "int f(void); int use(void) { return f(); }"
    world.module("_cu13.pyd", CU13, source=source, arguments=[folder / "stranger.lib"], strip=False)
    symbols = subprocess.run(
        ["x86_64-w64-mingw32-nm", world.folder / "modules/_cu13.pyd"], check=True, capture_output=True, text=True
    ).stdout
    (address,) = (int(line.split()[0], 16) for line in symbols.splitlines() if "DELAY_IMPORT_DESCRIPTOR" in line)
    subprocess.run(["x86_64-w64-mingw32-strip", world.folder / "modules/_cu13.pyd"], check=True)
    image = pefile.PE(data=(world.folder / "modules/_cu13.pyd").read_bytes(), fast_load=True)
    directory = image.OPTIONAL_HEADER.DATA_DIRECTORY[pefile.DIRECTORY_ENTRY["IMAGE_DIRECTORY_ENTRY_DELAY_IMPORT"]]
    directory.VirtualAddress, directory.Size = address - image.OPTIONAL_HEADER.ImageBase, 32
    assert audited(lambda files: files.update({member(world, CU13): bytes(image.write())})) == {"needed"}


RUN_TIME = f"MSVCP140-{'0a' * 16}.dll"


@pytest.mark.parametrize(
    ("name", "found"),
    [(RUN_TIME, set()), ("Friend.dll", {"modules"}), (f"Friend-{'0a' * 16}.dll", {"modules"})],
    ids=["run-time", "other", "like it"],
)
def test_a_dll_inside_the_wheel(audited: Callable[..., set[str]], world: World, name: str, found: set[str]) -> None:
    """What the compiler's run-time needs may lie inside, whatever the case of its letters; nothing else may."""
    path = world.library(world.folder / "made" / name, "int f(void) { return 1; }")
    source = "__declspec(dllimport) int f(void); int use(void) { return f(); }"

    def change(files: Files) -> None:
        with_module(world, source=source, arguments=[f"{path}.lib"])(files)
        files[f"mlx_cuda.libs/{name}"] = path.read_bytes()

    assert audited(change) == found


def test_the_run_time_as_it_was_signed(audited: Callable[..., set[str]], world: World) -> None:
    """It names the place where Microsoft built it. Where a byte differs from what was signed, that is told."""
    path = world.library(world.folder / "made" / RUN_TIME, 'const char *f(void) { return "D:\\\\a\\\\_work\\\\1\\\\msvcp140.pdb"; }')
    source = "__declspec(dllimport) int f(void); int use(void) { return f(); }"
    good = with_module(world, source=source, arguments=[f"{path}.lib"])
    finished = signed(path.read_bytes())

    def copy(data: bytes) -> Callable[[Files], None]:
        def change(files: Files) -> None:
            good(files)
            files[f"mlx_cuda.libs/{RUN_TIME}"] = data

        return change

    assert audited(copy(path.read_bytes())) == {"build-path"}
    assert audited(copy(finished)) == set()
    for damaged in (
        finished[:0x500] + b"x" + finished[0x501:],
        finished + bytes(8),
        finished[:-48] + struct.pack("<IHH", 56, 0x200, 2) + finished[-40:],
        finished[:-48] + struct.pack("<IHH", 48, 0x100, 2) + finished[-40:],
    ):
        assert audited(copy(damaged)) == {"build-path", "loader"}


def test_a_module_of_ours_that_is_signed(tmp_path: Path, files: Files, world: World) -> None:
    module = member(world, CU13)
    lines = said(tmp_path / NAMES["windows"], files, lambda files: files.update({module: signed(files[module])}), ("loader",))
    assert lines == [f"{module}: loader: has a certificate, expected none: our builds do not sign"]


def test_a_copy_that_no_module_needs(audited: Callable[..., set[str]], world: World) -> None:
    path = world.library(world.folder / "made" / RUN_TIME, "int f(void) { return 1; }")
    for name in (RUN_TIME, f"a/{RUN_TIME}"):
        assert audited(lambda files, name=name: files.update({f"mlx_cuda.libs/{name}": path.read_bytes()})) == {"modules"}


@pytest.mark.parametrize(
    ("library", "expected"),
    [
        ("CUBLASLT64_13.DLL", Supplier("package", "nvidia-cublas", "of the extra cu13", "nvidia/cu13/bin/x86_64")),
        ("Friend.dll", Supplier("inside", "this wheel", "copied in by repair", "mlx_cuda.libs")),
        ("NVCUDA.dll", Supplier("driver", "NVIDIA driver", "of the machine")),
        *(
            (name, Supplier("system", "Windows and Python", "win_amd64"))
            for name in (
                "KERNEL32.dll",
                "VCRUNTIME140.dll",
                "vcruntime140_1.dll",
                "python3.dll",
                "python312.dll",
                "api-ms-win-crt-math-l1-1-0.dll",
            )
        ),
        *((name, Supplier("nobody", "nobody", "not declared, not the system's")) for name in ("MSVCP140.dll", "stranger.dll")),
    ],
)
def test_who_supplies_a_library(tmp_path: Path, files: Files, world: World, library: str, expected: Supplier) -> None:
    module = member(world, CU13)
    wheel = read(write_wheel(tmp_path / NAMES["windows"], {**files, "mlx_cuda.libs/friend.DLL": files[module]}))
    assert supplier(wheel, for_wheel(wheel), module, library) == expected


def test_a_module_of_one_python(tmp_path: Path, files: Files, world: World) -> None:
    python = world.library(world.folder / "made" / "python312.dll", "int PyLong_AsInt(void *o) { return o != 0; }")
    source = "int PyLong_AsInt(void *); int use(void *o) { return PyLong_AsInt(o); }"
    lines = said(tmp_path / NAMES["windows"], files, with_module(world, source=source, arguments=[f"{python}.lib"]), ("abi3", "needed"))
    assert lines == [
        "mlx_cuda/_cu13.pyd: abi3: needs python312.dll of one Python version, expected python3.dll",
        "mlx_cuda/_cu13.pyd: abi3: uses PyLong_AsInt, which the stable ABI has since 3.13, expected that of 3.10",
    ]


def test_a_suffix_of_one_python(tmp_path: Path, files: Files, world: World) -> None:
    def change(files: Files) -> None:
        files["mlx_cuda/_cu13.cp312-win_amd64.pyd"] = files.pop(member(world, CU13))

    lines = said(tmp_path / NAMES["windows"], files, change, ("abi3",))
    assert lines == ["mlx_cuda/_cu13.cp312-win_amd64.pyd: abi3: is not named as a stable-ABI module, expected the suffix .pyd"]


def test_not_stripped(tmp_path: Path, files: Files, world: World) -> None:
    (line,) = said(tmp_path / NAMES["windows"], files, with_module(world, strip=False, arguments=["-g"]), ("stripped",))
    sections = r"(\.debug_\w+, )*\.debug_info(, \.debug_\w+)*"
    assert re.fullmatch(rf"mlx_cuda/_cu13\.pyd: stripped: has COFF symbol table, {sections}, expected it stripped", line)
    (line,) = said(tmp_path / NAMES["windows"], files, with_module(world, strip=False, arguments=["-Wl,--strip-debug"]), ("stripped",))
    assert line == "mlx_cuda/_cu13.pyd: stripped: has COFF symbol table, expected it stripped"


@pytest.mark.parametrize(
    ("path", "found"),
    [("C:\\mlx\\_cu13.pdb", True), ("d:_cu13.pdb", True), ("\\x\\_cu13.pdb", True), ("/_cu13.pdb", True), ("_cu13.pdb", False)],
)
def test_debug_database(tmp_path: Path, files: Files, world: World, path: str, found: bool) -> None:
    """GNU ld writes the name of the database as it was given: one of this length is replaced in place."""
    name = "x" * len(path)
    change = with_module(world, arguments=[f"-Wl,--pdb={name}"])
    Path(name).unlink(missing_ok=True)

    def renamed(files: Files) -> None:
        change(files)
        module = member(world, CU13)
        assert name.encode() in files[module]
        files[module] = files[module].replace(name.encode(), path.encode())

    message = f"names the debug database {path}, expected none or a file name without its folder (/PDBALTPATH:%_PDB%)"
    lines = said(tmp_path / NAMES["windows"], files, renamed, ("stripped",))
    assert lines == ([f"mlx_cuda/_cu13.pyd: stripped: {message}"] if found else [])


def test_an_elf_file(told: Callable[..., list[str]], world: World) -> None:
    linux = World(world.folder, "linux")
    shared = linux.compile(world.folder / "made" / "libelf.so", "int f(void) { return 1; }")
    lines = told(lambda files: files.update({"mlx_cuda.libs/helper.dll": shared.read_bytes()}))
    assert "mlx_cuda.libs/helper.dll: machine: is ELF for x86_64, expected PE for win_amd64" in lines


@pytest.mark.parametrize(
    ("name", "check"), [("cudart64_12.dll", "nvidia-inside"), ("nvcuda.dll", "driver-inside"), ("mlx.dll", "nvidia-inside")]
)
def test_foreign_dlls_inside(audited: Callable[..., set[str]], world: World, name: str, check: str) -> None:
    path = world.library(world.folder / "made" / name, "int f(void) { return 1; }")
    assert audited(lambda files: files.update({f"mlx_cuda.libs/{name}": path.read_bytes()})) == {check, "modules"}


def test_a_renamed_dll_of_nvidia(told: Callable[..., list[str]], world: World) -> None:
    """The version resource tells what the file name does not."""
    require("x86_64-w64-mingw32-windres")
    folder = world.folder / "resource"
    folder.mkdir(exist_ok=True)
    translations = ['BLOCK "VarFileInfo"', "BEGIN", 'VALUE "Translation", 0x409, 1252', "END"]
    strings = ['BLOCK "StringFileInfo"', "BEGIN", 'BLOCK "040904E4"', "BEGIN", 'VALUE "CompanyName", "NVIDIA Corporation"', "END", "END"]
    (folder / "version.rc").write_text("\n".join(["1 VERSIONINFO", "BEGIN", *translations, *strings, "END", ""]))
    subprocess.run(["x86_64-w64-mingw32-windres", "version.rc", "version.o"], check=True, cwd=folder, capture_output=True)
    path = world.compile(folder / "helper.dll", "int f(void) { return 1; }", folder / "version.o")
    lines = told(lambda files: files.update({"mlx_cuda.libs/helper.dll": path.read_bytes()}))
    assert lines[1:] == ["mlx_cuda.libs/helper.dll: nvidia-inside: is made by NVIDIA Corporation, expected nothing of NVIDIA's inside"]


def test_dll_directories(audited: Callable[..., set[str]]) -> None:
    assert audited(replaced("mlx_cuda/_libraries.json", "nvidia/cublas/bin", "nvidia/cublas/lib")) == {"dll-directories", "sources"}


def test_a_locked_wheel_without_the_dll(
    audited: Callable[..., set[str]], world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The directory of the DLL moved between releases, as it did in CUDA 13."""
    shutil.copytree(world.folder, tmp_path / "roots")
    (tmp_path / "roots/cuda-13.0/site/nvidia/cu13/bin/x86_64/cublasLt64_13.dll").unlink()
    monkeypatch.setattr(providers, "site", lambda root, _: tmp_path / "roots" / root / "site")
    assert audited() == {"provider"}
