"""What the linker will look for on Windows is there: in mlx.dll as MSVC made it, and in the import libraries of the toolkit root.

Neither MSVC nor a linker that knows MLX's objects is needed. The native modules call the same functions on both systems, so what a
built Linux module leaves undefined says what the Windows one will: each MLX function has to be among mlx.dll's exports under its name
by MSVC's rules, and each function of CUDA, cuBLAS and cuDNN among those of its DLL.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import pefile
import pytest

from ci import matrix
from ci.matrix import Cuda, Platform
from ci.wheelfile.binary import elf

WINDOWS = matrix.load().platform("win-amd64")
VERSIONS = list(matrix.load().cuda.values())


@pytest.fixture
def root(installed_root: Callable[[str, Platform], Path]) -> Callable[[Cuda, str], Path]:
    """The toolkit root of MLX or of CUDA; the test is skipped where it is not installed."""
    return lambda cuda, kind: installed_root(next(name for name in cuda.roots if name.startswith(kind)), WINDOWS)


def exports(dll: Path) -> set[str]:
    with pefile.PE(str(dll), fast_load=True) as image:
        image.parse_data_directories(directories=[pefile.DIRECTORY_ENTRY["IMAGE_DIRECTORY_ENTRY_EXPORT"]])
        return {symbol.name.decode() for symbol in image.DIRECTORY_ENTRY_EXPORT.symbols if symbol.name}


def undefined(cuda: Cuda) -> frozenset[str]:
    """What the native module of the newest Linux wheel asks of others."""
    wheelhouse = sorted((matrix.REPOSITORY / "wheelhouse").glob("*linux*.whl"), key=lambda path: path.stat().st_mtime)
    wheels = [Path(os.environ["MLX_CUDA_WHEEL"])] if "MLX_CUDA_WHEEL" in os.environ else wheelhouse
    for wheel in reversed(wheels):
        with zipfile.ZipFile(wheel) as archive:
            name = f"{matrix.load().module}/{cuda.module}.abi3.so"
            if name in archive.namelist():
                return elf.described(elf.Elf(archive.read(name))).undefined
    pytest.skip(f"no built wheel holds {cuda.module} (python -m ci wheel)")


def demangled(symbols: Iterable[str]) -> list[str]:
    if not shutil.which("c++filt"):
        pytest.skip("c++filt is not installed (it comes with gcc)")
    done = subprocess.run(["c++filt"], input="\n".join(symbols), check=True, capture_output=True, text=True)
    return [re.sub(r"\[abi:\w+\]", "", line) for line in done.stdout.splitlines()]


class Function(NamedTuple):
    """A function or variable of MLX's: ``mlx::core::array::data`` is ``("data", ["array", "core", "mlx"])``."""

    name: str
    scopes: list[str]

    @classmethod
    def of(cls, symbol: str) -> Function:
        qualified = re.sub(r"\(.*", "", symbol.removeprefix("vtable for "), flags=re.DOTALL)
        *scopes, name = (
            qualified.split("::") if "operator" not in qualified else [*qualified.split("::operator")[0].split("::"), "operator"]
        )
        if symbol.startswith("vtable for "):
            return cls("vtable", [name, *reversed(scopes)])
        if name == scopes[-1] and len(scopes) > 1 and scopes[-1] != "allocator":
            return cls("constructor", list(reversed(scopes)))
        return cls("destructor", list(reversed(scopes))) if name.startswith("~") else cls(name, list(reversed(scopes)))

    def pattern(self) -> re.Pattern[str]:
        """The beginning of its name by MSVC's rules, in which a name that comes again is a digit."""
        codes = {"constructor": r"\?\?0", "destructor": r"\?\?1", "vtable": r"\?\?_7", "operator": r"\?\?B"}
        parts, known = [], [] if self.name in codes else [self.name]
        for scope in self.scopes:
            plain, _, arguments = scope.partition("<")
            if arguments:
                parts.append(rf"\?\${plain}@\w+@")
            elif plain in known:
                parts.append(str(known.index(plain)))
            else:
                known.append(plain)
                parts.append(f"{plain}@")
        return re.compile(codes.get(self.name, rf"\?{self.name}@") + "".join(parts) + "@")


@pytest.mark.parametrize(
    ("symbol", "mangled"),
    [
        ("mlx::core::add(mlx::core::array const&)", "?add@core@mlx@@YA?AVarray@12@AEBV312@@Z"),
        ("mlx::core::allocator::allocator()", "?allocator@0core@mlx@@YAAEAVAllocator@012@XZ"),
        ("mlx::core::array::ArrayDesc::ArrayDesc(int)", "??0ArrayDesc@array@core@mlx@@QEAA@XZ"),
        ("mlx::core::array::ArrayDesc::~ArrayDesc()", "??1ArrayDesc@array@core@mlx@@QEAA@XZ"),
        ("mlx::core::TypeToDtype<float>::operator mlx::core::Dtype()", "??B?$TypeToDtype@M@core@mlx@@QEAA?AUDtype@12@XZ"),
        ("vtable for mlx::core::Primitive", "??_7Primitive@core@mlx@@6B@"),
    ],
)
def test_names(symbol: str, mangled: str) -> None:
    assert Function.of(symbol).pattern().match(mangled)
    assert not Function.of(symbol).pattern().match(mangled.replace("core", "Core"))


def lacking(symbols: Iterable[str], exported: set[str]) -> list[str]:
    """The functions that no exported name belongs to. Type information is not exported: each module has its own."""
    found = []
    for symbol in symbols:
        if not symbol.startswith("typeinfo "):
            pattern = Function.of(symbol).pattern()
            if not any(pattern.match(name) for name in exported):
                found.append(symbol)
    return found


@pytest.mark.parametrize("cuda", VERSIONS, ids=lambda cuda: cuda.version)
def test_mlx_exports_what_the_module_calls(cuda: Cuda, root: Callable[[Cuda, str], Path]) -> None:
    exported = exports(root(cuda, "mlx") / "bin" / "mlx.dll")
    called = demangled(sorted(name for name in undefined(cuda) if "3mlx4core" in name))
    assert len(called) > 30
    assert lacking(called, exported) == []
    unknown = "mlx::core::cu::CommandEncoder::CaptureContext::~CaptureContext()"  # in libmlx.so, and not in mlx.dll
    assert lacking([unknown], exported) == [unknown]


@pytest.mark.parametrize("cuda", VERSIONS, ids=lambda cuda: cuda.version)
def test_nvidias_dlls_export_what_the_module_calls(cuda: Cuda, root: Callable[[Cuda, str], Path]) -> None:
    folder = root(cuda, "cuda")
    exported: set[str] = set()
    for library in cuda.libraries:
        if library.needed and library.name != "libmlx":
            exported |= exports(folder / "bin" / library.files["windows"])
    driver = (folder / "lib" / "cuda.lib").read_bytes()
    called = {name for name in undefined(cuda) if re.match(r"cu[A-Z]|cuda[A-Z]|cublas|cudnn[A-Z]", name)}
    assert len(called) > 30
    assert sorted(name for name in called - exported if b"\0__imp_" + name.encode() + b"\0" not in driver) == []


PROGRAM = """\
int cudaGetDevice(int *), cublasLtCreate(void **), cudnnCreate(void **), cuInit(unsigned);
__declspec(dllexport) int use(void) { int d; void *h; return cudaGetDevice(&d) + cublasLtCreate(&h) + cudnnCreate(&h) + cuInit(0); }
int DllMainCRTStartup(void *a, unsigned b, void *c) { return 1; }
"""


@pytest.mark.parametrize("linker", ["x86_64-w64-mingw32-ld", "lld-link"])
@pytest.mark.parametrize("cuda", VERSIONS, ids=lambda cuda: cuda.version)
def test_import_libraries_link(cuda: Cuda, linker: str, root: Callable[[Cuda, str], Path], tmp_path: Path) -> None:
    """Those of the real root, shipped or generated, name the declared DLLs."""
    gcc = "x86_64-w64-mingw32-gcc"
    for tool in (gcc, linker):
        if sys.platform != "linux" or not shutil.which(tool):
            pytest.skip(f"{tool} is not installed (Debian: apt-get install g++-mingw-w64-x86-64-posix lld)")
    libraries = [str(root(cuda, "cuda") / "lib" / f"{name}.lib") for name in ("cudart", "cublasLt", "cudnn", "cuda")]
    (tmp_path / "program.c").write_text(PROGRAM)
    subprocess.run([gcc, "-c", "-fno-stack-protector", str(tmp_path / "program.c"), "-o", str(tmp_path / "program.o")], check=True)
    output = tmp_path / "program.dll"
    microsoft, gnu = ["/dll", "/entry:DllMainCRTStartup", f"/out:{output}"], ["-shared", "-e", "DllMainCRTStartup", "-o", str(output)]
    subprocess.run([linker, *(microsoft if linker == "lld-link" else gnu), str(tmp_path / "program.o"), *libraries], check=True)
    with pefile.PE(str(output)) as image:
        imported = {entry.dll.decode().lower() for entry in image.DIRECTORY_ENTRY_IMPORT}
    declared = {library.files["windows"].lower() for library in cuda.libraries if library.needed and library.name != "libmlx"}
    assert imported == declared | {matrix.load().driver["windows"]}
