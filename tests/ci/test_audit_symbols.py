"""The symbols that a module needs are those of the system's libraries, of the locked ones, or of the wheel."""

from __future__ import annotations

import platform
import struct
import sys
from collections.abc import Callable
from pathlib import Path, PurePosixPath

import pytest

from ci.audit import providers, systems
from ci.wheelfile.binary.symbols import elf_hash
from ci.wheelfile.wheel import read

from .audit_support import CU13, NAMES, Files, World, said, with_module, write_wheel

MODULE = f"mlx_cuda/{CU13.module}.abi3.so"


@pytest.mark.usefixtures("locked_roots")
def test_symbols(tmp_path: Path, files: Files, world: World) -> None:
    source = "int future_of_libc(void); int use(void) { return future_of_libc(); }"
    message = "has the undefined symbol future_of_libc without a version, expected a needed library to export it"
    path = tmp_path / NAMES["linux"]
    assert said(path, files, with_module(world, source=source)) == [f"{MODULE}: symbols: {message}"]
    weak = "int future_of_libc(void) __attribute__((weak)); int use(void) { return future_of_libc ? future_of_libc() : 0; }"
    assert said(path, files, with_module(world, source=weak)) == []


@pytest.mark.parametrize("name", ["PyLong_FromLong", "_Py_Dealloc", "_PyFuture"])
def test_symbols_of_python(told: Callable[..., list[str]], world: World, name: str) -> None:
    """No library that a module needs has them: `abi3` looks at their names."""
    source = f"int {name}(void); int use(void) {{ return {name}(); }}"
    assert told(with_module(world, source=source), ("symbols",)) == []


@pytest.mark.skipif(sys.platform != "linux" or platform.machine() != "x86_64", reason="the library is for Linux on x86_64")
def test_which_library_is_asked(tmp_path: Path, world: World, files: Files) -> None:
    """The one that is named, and no other that is loaded; only of a wheel for this machine."""
    (tmp_path / "map").write_text("LIBRARY_1 { global: one; local: *; };")
    library = str(world.library(tmp_path / "libone.so", "int one(void) { return 1; }", f"-Wl,--version-script={tmp_path / 'map'}"))
    assert systems._has(library, "LIBRARY_1", "one")
    assert not systems._has(library, "LIBRARY_1", "two")
    assert not systems._has(library, "LIBRARY_2", "one")
    assert not systems._has("libc.so.6", "LIBRARY_1", "one")
    assert not systems._has(f"{library}.1", "LIBRARY_1", "one")
    for machine, lacks in (("x86_64", True), ("aarch64", False)):
        wheel = read(write_wheel(tmp_path / NAMES["linux"].replace("x86_64", machine), files))
        assert systems.lacks(wheel, library, "LIBRARY_1", "two") == lacks
        assert not systems.lacks(wheel, library, "LIBRARY_1", "one")
        assert not systems.lacks(wheel, library, "LIBRARY_2", "two"), "it is too old to know the version"


TWO_OF_LIBC = "int atoi(const char *); int clock(void); int use(void) { return atoi(0) + clock(); }"


@pytest.mark.usefixtures("locked_roots")
@pytest.mark.skipif(platform.machine() != "x86_64", reason="the modules are for x86_64")
def test_symbols_that_the_system_does_not_have(tmp_path: Path, files: Files, world: World) -> None:
    """A name, and a version, that are another's."""
    good = world.module(PurePosixPath(MODULE).name, CU13, source=TWO_OF_LIBC)
    path = tmp_path / NAMES["linux"]
    assert said(path, files, lambda files: files.update({MODULE: good}), ("symbols",)) == []
    renamed = good.replace(b"\0atoi\0", b"\0atox\0")
    message = "needs atox of GLIBC_2.2.5, expected a symbol that libc.so.6 has: the loader refuses it"
    assert said(path, files, lambda files: files.update({MODULE: renamed}), ("symbols",)) == [f"{MODULE}: symbols: {message}"]
    old, new = (struct.pack("<I", elf_hash(f"GLIBC_2.{each}")) for each in ("2.5", "3.4"))
    newer = good.replace(b"GLIBC_2.2.5\0", b"GLIBC_2.3.4\0").replace(old, new)
    assert "needs atoi of GLIBC_2.3.4, expected a symbol that libc.so.6 has: the loader refuses it" in "".join(
        said(path, files, lambda files: files.update({MODULE: newer}), ("symbols",))
    )


@pytest.mark.usefixtures("locked_roots")
def test_symbols_of_what_nobody_can_ask(tmp_path: Path, files: Files, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another machine's loader, and a version that this one does not know."""
    renamed = world.module(PurePosixPath(MODULE).name, CU13, source=TWO_OF_LIBC).replace(b"\0atoi\0", b"\0atox\0")
    unknown = renamed.replace(b"GLIBC_2.2.5\0", b"GLIBC_2.0.5\0")
    path = tmp_path / NAMES["linux"]
    assert said(path, files, lambda files: files.update({MODULE: unknown}), ("symbols",)) == []
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    assert said(path, files, lambda files: files.update({MODULE: renamed}), ("symbols",)) == []


@pytest.mark.usefixtures("locked_roots")
def test_a_symbol_that_its_library_has_in_a_version(tmp_path: Path, files: Files, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the module asks for without."""
    library = world.site(CU13.roots[0]) / "versioned.so"
    (tmp_path / "map").write_text("LIBRARY_1 { global: libcublasLt_of_13; local: *; };")
    world.library(library, "int libcublasLt_of_13(void) { return 1; }", f"-Wl,--version-script={tmp_path / 'map'}")
    versioned = providers.exports(library)
    assert versioned["libcublasLt_of_13"]
    exports = providers.exports
    monkeypatch.setattr(providers, "exports", lambda path: versioned if "libcublasLt" in path.name else exports(path))
    message = "needs libcublasLt_of_13 of no version, expected that which libcublasLt.so.13 has it in"
    assert f"{MODULE}: symbols: {message}" in said(tmp_path / NAMES["linux"], files, lambda _: None, ("symbols",))
