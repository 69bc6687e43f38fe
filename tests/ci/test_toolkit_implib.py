"""ci.toolkit.implib: Windows import libraries, as their format says and as linkers read them."""

from __future__ import annotations

import shutil
import struct
import subprocess
from pathlib import Path

import pefile
import pytest

from ci.toolkit import implib, layout
from ci.toolkit.implib import Export

GCC = "x86_64-w64-mingw32-gcc"
DLL = "acmeMath64_12.dll"
LIBRARY_SOURCE = """\
__declspec(dllexport) int acmeAdd(int a, int b) { return a + b; }
__declspec(dllexport) int acmeSub(int a, int b) { return a - b; }
__declspec(dllexport) int acmeVersion = 12;
int DllMainCRTStartup(void *a, unsigned b, void *c) { return 1; }
"""
USER_SOURCE = """\
__declspec(dllimport) int acmeAdd(int, int);
__declspec(dllimport) extern int acmeVersion;
int acmeSub(int, int);
__declspec(dllexport) int use(void) { return acmeAdd(1, 2) + acmeSub(2, 1) + acmeVersion; }
int DllMainCRTStartup(void *a, unsigned b, void *c) { return 1; }
"""


@pytest.mark.parametrize(
    ("dll", "library"),
    [
        ("cublas64_12.dll", "cublas.lib"),
        ("cublasLt64_13.dll", "cublasLt.lib"),
        ("cudart64_12.dll", "cudart.lib"),
        ("cudnn64_9.dll", "cudnn.lib"),
        ("cudnn_ops64_9.dll", "cudnn_ops.lib"),
        ("nvrtc64_120_0.dll", "nvrtc.lib"),
        ("nvfatbin_130_0.dll", "nvfatbin.lib"),
        ("nvrtc64_120_0.alt.dll", None),
        ("nvrtc-builtins64_128.dll", None),
        ("libopenblas.dll", None),
    ],
)
def test_names(dll: str, library: str | None) -> None:
    assert implib.library_name(dll) == library


def members(archive: bytes) -> list[tuple[int, str, bytes]]:
    """(offset, name, content) of each member, as the archive format has it."""
    assert archive[:8] == b"!<arch>\n"
    found, position = [], 8
    while position < len(archive):
        header = archive[position : position + 60].decode()
        assert header.endswith("`\n")
        size = int(header[48:58])
        found.append((position, header[:16].rstrip(), archive[position + 60 : position + 60 + size]))
        position += 60 + size + size % 2
    return found


def test_both_directories_name_every_symbol_and_point_at_its_member() -> None:
    archive = implib.archive(DLL, [Export("acmeAdd"), Export("acmeVersion", data=True)])
    (_, _, first), (_, _, second), (_, longnames, names), *objects = members(archive)
    assert (longnames, names) == ("//", DLL.encode() + b"\0")
    at = {offset: content for offset, _, content in objects}

    (count,) = struct.unpack_from(">I", first)
    offsets = struct.unpack_from(f">{count}I", first, 4)
    symbols = first[4 + 4 * count :].rstrip(b"\0").split(b"\0")
    assert symbols[-3:] == [b"acmeAdd", b"__imp_acmeAdd", b"__imp_acmeVersion"]  # data has no thunk
    for symbol, offset in zip(symbols, offsets, strict=True):
        assert symbol.removeprefix(b"__imp_") in at[offset]

    (members_count,) = struct.unpack_from("<I", second)
    member_offsets = struct.unpack_from(f"<{members_count}I", second, 4)
    assert list(member_offsets) == list(at)
    indices = struct.unpack_from(f"<{count}H", second, 8 + 4 * members_count)
    by_name = second[8 + 4 * members_count + 2 * count :].rstrip(b"\0").split(b"\0")
    assert by_name == sorted(symbols)
    pointed = {(name, member_offsets[index - 1]) for name, index in zip(by_name, indices, strict=True)}
    assert pointed == set(zip(symbols, offsets, strict=True))


def test_short_imports_are_by_name() -> None:
    objects = members(implib.archive(DLL, [Export("acmeAdd"), Export("acmeVersion", data=True)]))[6:]
    for (_, _, content), (name, kind) in zip(objects, [(b"acmeAdd", 0), (b"acmeVersion", 1)], strict=True):
        sig1, sig2, _, machine, _, size, _, flags = struct.unpack_from("<HHHHIIHH", content)
        assert (sig1, sig2, machine, size) == (0, 0xFFFF, 0x8664, len(content) - 20)
        assert (flags & 3, flags >> 2) == (kind, 1)
        assert content[20:] == name + b"\0" + DLL.encode() + b"\0"


def test_the_descriptor_refers_to_the_lookup_table_the_name_and_the_address_table() -> None:
    """The linker does not notice when the two tables are exchanged; a debugger and a bound image would."""
    _, _, content = members(implib.archive(DLL, [Export("acmeAdd")]))[3]
    symbols_at, symbols_count = struct.unpack_from("<II", content, 8)
    names = [content[symbols_at + 18 * index :][:8].rstrip(b"\0") for index in range(symbols_count)]
    (relocations_at,) = struct.unpack_from("<I", content, 20 + 24)
    relocations = [struct.unpack_from("<IIH", content, relocations_at + 10 * index) for index in range(3)]
    assert {offset: names[symbol] for offset, symbol, _ in relocations} == {0: b".idata$4", 12: b".idata$6", 16: b".idata$5"}


def test_equal_input_gives_equal_bytes(tmp_path: Path) -> None:
    implib.write(tmp_path / "a.lib", DLL, [Export("acmeSub"), Export("acmeAdd")])
    implib.write(tmp_path / "b.lib", DLL, [Export("acmeAdd"), Export("acmeSub")])
    assert (tmp_path / "a.lib").read_bytes() == (tmp_path / "b.lib").read_bytes()


@pytest.fixture
def dll(tmp_path: Path) -> Path:
    if not shutil.which(GCC):
        pytest.skip(f"needs {GCC}")
    (tmp_path / "library.c").write_text(LIBRARY_SOURCE)
    (tmp_path / "user.c").write_text(USER_SOURCE)
    compile_with = [GCC, "-nostdlib", "-e", "DllMainCRTStartup"]
    subprocess.run([*compile_with, "-shared", str(tmp_path / "library.c"), "-o", str(tmp_path / DLL)], check=True)
    subprocess.run([GCC, "-c", str(tmp_path / "user.c"), "-o", str(tmp_path / "user.o")], check=True)
    return tmp_path / DLL


def test_exports_tell_functions_from_data(dll: Path) -> None:
    assert implib.exports(dll) == [Export("acmeAdd"), Export("acmeSub"), Export("acmeVersion", data=True)]


@pytest.mark.parametrize("linker", ["x86_64-w64-mingw32-ld", "lld-link"])
def test_linkers_read_it(dll: Path, tmp_path: Path, linker: str) -> None:
    if not shutil.which(linker):
        pytest.skip(f"needs {linker}")
    implib.write(tmp_path / "acmeMath.lib", dll.name, implib.exports(dll))
    inputs = [str(tmp_path / "user.o"), str(tmp_path / "acmeMath.lib")]
    output = tmp_path / "user.dll"
    microsoft, gnu = ["/dll", "/entry:DllMainCRTStartup", f"/out:{output}"], ["-shared", "-e", "DllMainCRTStartup", "-o", str(output)]
    subprocess.run([linker, *(microsoft if linker == "lld-link" else gnu), *inputs], check=True)
    with pefile.PE(str(output)) as pe:
        imported = {entry.dll.decode(): {symbol.name.decode() for symbol in entry.imports} for entry in pe.DIRECTORY_ENTRY_IMPORT}
    assert imported == {DLL: {"acmeAdd", "acmeSub", "acmeVersion"}}


def test_a_library_of_another_machine_is_refused(tmp_path: Path, dll: Path) -> None:
    image = bytearray(dll.read_bytes())
    (header,) = struct.unpack_from("<I", image, 0x3C)
    image[header + 4 : header + 6] = struct.pack("<H", 0xAA64)
    (tmp_path / "arm.dll").write_bytes(image)
    with pytest.raises(ValueError, match="not a 64 bit x86"):
        implib.exports(tmp_path / "arm.dll")


def test_a_library_that_was_shipped_is_replaced_and_the_wheels_file_kept(dll: Path, tmp_path: Path) -> None:
    """CUDA 13's cudart.lib is code that loads the runtime, not an import library."""
    root = tmp_path / "root"
    for folder in ("bin", "lib", "site"):
        (root / folder).mkdir(parents=True)
    shutil.copy(dll, root / "bin" / DLL)
    (root / "site" / "acmeMath.lib").write_bytes(b"a loader")
    (root / "lib" / "acmeMath.lib").hardlink_to(root / "site" / "acmeMath.lib")
    layout._make_import_libraries(root, "nvcuda.dll", ["cuInit"])
    assert b"__imp_acmeAdd" in (root / "lib" / "acmeMath.lib").read_bytes()
    assert b"__imp_cuInit" in (root / "lib" / "cuda.lib").read_bytes()
    assert (root / "site" / "acmeMath.lib").read_bytes() == b"a loader"
