"""Arrange what the wheels unpack to (``site/``) as a toolkit: ``include/``, ``lib/``, on Windows ``bin/``.

Files are hard-linked, which takes no space and works alike for a Linux and a Windows root on any host (symbolic links need a
privilege on Windows); where the file system has no hard links they are copied.
"""

from __future__ import annotations

import filecmp
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from ci import matrix
from ci.errors import CheckFailed

from . import implib, stub

# Where the wheels put things, relative to site-packages: CUDA 12 a folder per library, CUDA 13 one for all; auditwheel's *.libs.
_INCLUDES = ("nvidia/*/include", "nvidia/*/include/cccl", "mlx/include", "include")
_LIBRARIES = {
    "linux": ("nvidia/*/lib", "nvidia/*/nvvm/lib64", "mlx/lib", "*.libs"),
    "windows": ("nvidia/*/lib/x64", "mlx/lib"),
}
_DLLS = ("nvidia/*/bin", "nvidia/*/bin/x86_64", "nvidia/*/nvvm/bin", "mlx")

_VERSIONED = re.compile(r"(lib.+?\.so)\.[\d.]+")


def arrange(root: Path, platform: matrix.Platform) -> None:
    """Make ``root``'s include/, lib/ and bin/ from ``root/site``."""
    site = root / "site"
    for pattern in _INCLUDES:
        for folder in sorted(site.glob(pattern)):
            _link_tree(folder, root / "include")
    for pattern in _LIBRARIES[platform.system]:
        for file in _files(site, pattern, ("*.so", "*.so.*", "*.a", "*.lib")):
            _link(file, root / "lib" / file.name)
    header, driver = root / "include" / "cuda.h", matrix.load().driver[platform.system]
    functions = stub.driver_functions(header) if header.is_file() else []
    if platform.system == "linux":
        _link_unversioned(root / "lib")
        if functions:
            stub.write(root / "lib" / "stubs", platform.machine, driver, functions)
    else:
        for pattern in _DLLS:
            for file in _files(site, pattern, ("*.dll",)):
                _link(file, root / "bin" / file.name)
        _make_import_libraries(root, driver, functions)


def _files(site: Path, folders: str, names: tuple[str, ...]) -> Iterator[Path]:
    for folder in sorted(site.glob(folders)):
        yield from sorted(file for name in names for file in folder.glob(name) if file.is_file())


def _link_unversioned(lib: Path) -> None:
    """Give ``libX.so.N`` the name ``libX.so`` that the linker looks for; the wheels ship only the former."""
    for file in sorted(lib.glob("lib*.so.*")):
        if (match := _VERSIONED.fullmatch(file.name)) and not (lib / match[1]).exists():
            _link(file, lib / match[1])


def _make_import_libraries(root: Path, driver: str, functions: list[str]) -> None:
    """Make an import library for each DLL, and the driver's, whose DLL is in no wheel.

    Most wheels have none. Where CUDA 13's do, for the runtime and the driver, they are no import libraries: code in them finds the
    functions at run time, in what the driver brings, and a module that links them says nothing of what it needs.
    """
    from . import implib  # needs pefile, which a Linux root does without

    for dll in sorted((root / "bin").glob("*.dll")):
        if name := implib.library_name(dll.name):
            _replace(root / "lib" / name, dll.name, implib.exports(dll))
    if functions:
        _replace(root / "lib" / "cuda.lib", driver, [implib.Export(name) for name in functions])


def _replace(library: Path, dll: str, symbols: list[implib.Export]) -> None:
    """Write an import library that replaces a shipped one, which is a link to the wheel's own file."""
    from . import implib

    library.unlink(missing_ok=True)
    implib.write(library, dll, symbols)


def _link_tree(source: Path, target: Path) -> None:
    for folder, _, files in os.walk(source):
        into = target / Path(folder).relative_to(source)
        for file in files:
            if file != "__init__.py":  # the wheels make packages of their include folders
                _link(Path(folder, file), into / file)


def _link(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        target.hardlink_to(source)
    except FileExistsError:
        if not filecmp.cmp(source, target, shallow=False):
            raise CheckFailed(f"two wheels of one root disagree about {target.name}: {source} and {target}") from None
    except OSError:
        shutil.copy2(source, target)
