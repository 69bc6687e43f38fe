"""The audit of Windows wheels, on real DLLs made by mingw: what is read from PE and not from ELF."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pefile
import pytest

from ci.audit import describe, providers
from ci.audit.checks import CHECKS
from ci.audit.checks.libraries import Supplier, supplier
from ci.audit.policy import for_wheel
from ci.wheelfile.wheel import read

from .audit_support import CU13, NAMES, Files, World, fatbin, member, replaced, require, said, with_module, write_wheel

if TYPE_CHECKING:
    from collections.abc import Callable

    from ci.matrix import System


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


def header(**fields: int) -> Callable[[Any], None]:
    def change(image: Any) -> None:
        for name, value in fields.items():
            part = next(each for each in (image.OPTIONAL_HEADER, image.FILE_HEADER, image.sections[0]) if hasattr(each, name))
            setattr(part, name, value)

    return change


def directory(name: str, address: int, size: int) -> Callable[[Any], None]:
    def change(image: Any) -> None:
        there = image.OPTIONAL_HEADER.DATA_DIRECTORY[pefile.DIRECTORY_ENTRY[f"IMAGE_DIRECTORY_ENTRY_{name}"]]
        there.VirtualAddress, there.Size = address, size

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (header(Characteristics=0x22), "is not a DLL of 64 bits (characteristics 0x22, magic 0x20b, subsystem 3), expected one"),
        (header(Magic=0x10B), ""),
        (header(Subsystem=1), "magic 0x20b, subsystem 1), expected one"),
        (header(DllCharacteristics=0x1E0), "has the DLL characteristics 0x1e0, expected none but 0x160 of them"),
        (header(DllCharacteristics=0x100), "has the DLL characteristics 0x100, expected DYNAMIC_BASE (ASLR) among them"),
        (header(DllCharacteristics=0x40), "has the DLL characteristics 0x40, expected NX_COMPAT among them"),
        *(
            (directory(name, *place), f"has a {name} directory, expected none")
            for name in ("SECURITY", "COM_DESCRIPTOR", "COPYRIGHT", "GLOBALPTR", "BOUND_IMPORT")
            for place in ((0x1000, 0), (0, 8))
        ),
        (
            lambda image: setattr(image.sections[0], "Characteristics", 0xE0000020),
            "has the section .text that is writable and executable, expected never both",
        ),
        (
            lambda image: setattr(image.sections[0], "Characteristics", 0x70000020),
            "has the section .text that all processes share, expected none",
        ),
        (
            lambda image: setattr(image.sections[0], "Characteristics", 0x68000020),
            "has the section .text of the flags 0x68000020, expected only those of code and data",
        ),
        (lambda image: setattr(image.sections[-1], "SizeOfRawData", 2**20), "that ends behind the file of "),
    ],
)
def test_what_windows_or_no_linker_takes(tmp_path: Path, files: Files, world: World, change: Callable[[Any], None], message: str) -> None:
    def spoil(files: Files) -> None:
        image = pefile.PE(data=files[member(world, CU13)], fast_load=True)
        change(image)
        files[member(world, CU13)] = bytes(image.write())

    lines = said(tmp_path / NAMES["windows"], files, spoil, ("loader",))
    assert lines
    assert message in lines[0]
    assert all(line.startswith("mlx_cuda/_cu13.pyd: loader: ") for line in lines)


def test_nothing_lies_behind_a_dll(tmp_path: Path, files: Files, world: World) -> None:
    """But the COFF symbols of one that is not stripped, which another check tells of."""
    size = len(files[member(world, CU13)])
    lines = said(
        tmp_path / NAMES["windows"],
        files,
        lambda files: files.update({member(world, CU13): files[member(world, CU13)] + b"x"}),
        ("loader",),
    )
    assert lines == [f"mlx_cuda/_cu13.pyd: loader: has {size + 1} bytes, expected {size}: nothing belongs behind the file's own"]
    assert said(tmp_path / NAMES["windows"], files, with_module(world, strip=False, arguments=["-g"]), ("loader",)) == []


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
    require("x86_64-w64-mingw32-dlltool", "x86_64-w64-mingw32-nm")
    folder = world.folder / "delayed"
    folder.mkdir(exist_ok=True)
    (folder / "stranger.def").write_text("LIBRARY stranger.dll\nEXPORTS\n  f\n")
    dlltool = ["x86_64-w64-mingw32-dlltool", "-d", "stranger.def", "--output-delaylib", "stranger.lib", "-D", "stranger.dll"]
    subprocess.run(dlltool, check=True, cwd=folder, capture_output=True)
    source = "int f(void); int use(void) { return f(); }"
    module = world.module("_cu13.pyd", CU13, source=source, arguments=[folder / "stranger.lib"], strip=False)
    symbols = subprocess.run(
        ["x86_64-w64-mingw32-nm", world.folder / "modules/_cu13.pyd"], check=True, capture_output=True, text=True
    ).stdout
    (address,) = (int(line.split()[0], 16) for line in symbols.splitlines() if "DELAY_IMPORT_DESCRIPTOR" in line)
    image = pefile.PE(data=module, fast_load=True)
    directory = image.OPTIONAL_HEADER.DATA_DIRECTORY[pefile.DIRECTORY_ENTRY["IMAGE_DIRECTORY_ENTRY_DELAY_IMPORT"]]
    directory.VirtualAddress, directory.Size = address - image.OPTIONAL_HEADER.ImageBase, 64
    assert audited(lambda files: files.update({member(world, CU13): bytes(image.write())})) - {"stripped"} == {"needed"}


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


@pytest.mark.usefixtures("locked_roots")
def test_an_elf_file(tmp_path: Path, files: Files, world: World) -> None:
    linux = World(world.folder, "linux")
    shared = linux.compile(world.folder / "made" / "libelf.so", "int f(void) { return 1; }")
    lines = said(tmp_path / NAMES["windows"], files, lambda files: files.update({"mlx_cuda.libs/helper.dll": shared.read_bytes()}))
    assert "mlx_cuda.libs/helper.dll: machine: is ELF for x86_64, expected PE for win_amd64" in lines


@pytest.mark.parametrize(
    ("name", "check"), [("cudart64_12.dll", "nvidia-inside"), ("nvcuda.dll", "driver-inside"), ("mlx.dll", "nvidia-inside")]
)
def test_foreign_dlls_inside(audited: Callable[..., set[str]], world: World, name: str, check: str) -> None:
    path = world.library(world.folder / "made" / name, "int f(void) { return 1; }")
    assert audited(lambda files: files.update({f"mlx_cuda.libs/{name}": path.read_bytes()})) == {check, "modules"}


@pytest.mark.usefixtures("locked_roots")
def test_a_renamed_dll_of_nvidia(tmp_path: Path, files: Files, world: World) -> None:
    """The version resource tells what the file name does not."""
    require("x86_64-w64-mingw32-windres")
    folder = world.folder / "resource"
    folder.mkdir(exist_ok=True)
    translations = ['BLOCK "VarFileInfo"', "BEGIN", 'VALUE "Translation", 0x409, 1252', "END"]
    strings = ['BLOCK "StringFileInfo"', "BEGIN", 'BLOCK "040904E4"', "BEGIN", 'VALUE "CompanyName", "NVIDIA Corporation"', "END", "END"]
    (folder / "version.rc").write_text("\n".join(["1 VERSIONINFO", "BEGIN", *translations, *strings, "END", ""]))
    subprocess.run(["x86_64-w64-mingw32-windres", "version.rc", "version.o"], check=True, cwd=folder, capture_output=True)
    path = world.compile(folder / "helper.dll", "int f(void) { return 1; }", folder / "version.o")
    lines = said(tmp_path / NAMES["windows"], files, lambda files: files.update({"mlx_cuda.libs/helper.dll": path.read_bytes()}))
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
