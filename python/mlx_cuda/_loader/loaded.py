"""The NVIDIA libraries that this process has loaded, and their versions."""

from __future__ import annotations

import ctypes
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

SEARCH = "PATH" if sys.platform == "win32" else "LD_LIBRARY_PATH"
PRELOAD = "LD_PRELOAD"
OURS = re.compile(
    r"(?:lib)?(?:cudnn|cublasLt|nvrtc)(?:[_-][a-z_-]+)?(?=64_|\.so)"
)  # cudnn64_9.dll, libcudnn_graph.so.9, libnvrtc-builtins.so.13.0


class Loaded(NamedTuple):
    """A library's file, its version if known, the installed package's file that it replaces, and the fix."""

    path: str
    version: str = ""
    instead_of: str = ""
    fix: str = ""

    @property
    def name(self) -> str:
        return Path(self.path).name


def libraries(roots: Iterable[Path], variables: Mapping[str, str]) -> list[Loaded]:
    """Return the loaded parts of cuDNN, cuBLASLt and NVRTC; ``roots`` are the directories of installed packages."""
    return [_describe(path, set(roots), variables) for path in mapped() if OURS.match(Path(path).name)]


def mapped() -> list[str]:
    """Return the files of all loaded libraries."""
    if sys.platform == "win32":
        return list(_modules())
    try:
        lines = Path("/proc/self/maps").read_text("utf-8", errors="surrogateescape").splitlines()
    except OSError:  # no Linux
        return []
    paths = (line.split(maxsplit=5)[5] for line in lines if line.count("/"))
    return list(dict.fromkeys(path for path in paths if ".so" in Path(path).name))


def _modules() -> Iterator[str]:
    """Return the loaded libraries on Windows."""
    windll: Any = vars(ctypes)["WinDLL"]
    kernel = windll("kernel32", use_last_error=True)
    kernel.GetCurrentProcess.restype = ctypes.c_void_p
    handles = (ctypes.c_void_p * 4096)()
    needed = ctypes.c_ulong()
    process = ctypes.c_void_p(kernel.GetCurrentProcess())
    if not kernel.K32EnumProcessModules(process, handles, ctypes.sizeof(handles), ctypes.byref(needed)):
        return
    for handle in handles[: needed.value // ctypes.sizeof(ctypes.c_void_p)]:
        name = ctypes.create_unicode_buffer(32768)
        if kernel.GetModuleFileNameW(ctypes.c_void_p(handle), name, len(name)):
            yield name.value


def shadows(roots: Iterable[Path], variables: Mapping[str, str]) -> list[str]:
    """Return files on the search path that precede an installed package's, whether or not they are loaded."""
    folders = [Path(folder) for folder in variables.get(SEARCH, "").split(os.pathsep) if folder]
    found = (path for folder in folders for path in _listed(folder) if OURS.match(path.name))
    return [str(path) for path in found if _passed_over(path, set(roots))]


def _listed(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _describe(path: str, roots: set[Path], variables: Mapping[str, str]) -> Loaded:
    instead_of = _passed_over(Path(path), roots)
    return Loaded(path, version_of(path), instead_of, _fix(Path(path), variables) if instead_of else "")


def _passed_over(path: Path, roots: set[Path]) -> str:
    """Return the file of an installed package with the same name, unless it is this one; empty if no package has one."""
    found = OURS.match(path.name)
    patterns = [f"nvidia/*/{folder}/{found[0]}[.6]*" for folder in ("lib", "bin", "bin/*")] if found else []
    files = [file for root in roots for pattern in patterns for file in root.glob(pattern)]
    same = [
        file for file in files if path.name.startswith(file.name) or file.name.startswith(path.name)
    ]  # libcudnn.so.9, libcudnn.so.9.19.0
    return "" if not same or any(_is_file(file, path) for file in same) else str(same[0])


def _is_file(one: Path, other: Path) -> bool:
    try:
        return one.samefile(other)
    except OSError:
        return False


def take_out(what: object, variable: str = SEARCH) -> str:
    """Return the fix for a variable that names libraries before better ones."""
    return f"take {what} out of {variable}"


def _fix(path: Path, variables: Mapping[str, str]) -> str:
    stem = path.name.partition(".so")[0]
    for folder in variables.get(SEARCH, "").split(os.pathsep):
        if folder and any(file.name.startswith(stem) and _is_file(file, path) for file in _listed(Path(folder))):
            return take_out(folder)
    preloaded = re.split("[ :]", variables.get(PRELOAD, ""))
    named = next((each for each in preloaded if each and _is_file(Path(each), path)), "")
    return take_out(named, PRELOAD) if named else f"find out why the loader searches {path.parent} first"


def version_of(path: str) -> str:
    """Return the version that a library reports."""
    try:
        library = ctypes.CDLL(path)
    except OSError:
        return ""
    for name in ("cudnnGetVersion", "cublasLtGetVersion"):
        if (ask := getattr(library, name, None)) is not None:
            ask.restype = ctypes.c_size_t
            number = ask()
            return f"{number // 10000}.{number % 10000 // 100}.{number % 100}"
    if (ask := getattr(library, "nvrtcVersion", None)) is not None:
        major, minor = ctypes.c_int(), ctypes.c_int()
        if ask(ctypes.byref(major), ctypes.byref(minor)) == 0:
            return f"{major.value}.{minor.value}"
    return ""


def mixed_cudnn(loaded: Iterable[Loaded]) -> str:
    """Return an error if cuDNN's parts, such as libcudnn_graph, are not of its own version."""
    for each in loaded:
        if re.match(r"(?:lib)?cudnn(?:64_|\.so)", each.name):
            check = getattr(ctypes.CDLL(each.path), "cudnnGraphVersionCheck", None)
            if check is not None and check():
                return f"cuDNN {each.version} loads parts of another version"
    return ""
