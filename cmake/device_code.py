"""Compile CUDA device code with NVRTC and pack it into a fatbin: what the build calls for each ``.cu`` file.

``compile`` makes one cubin (machine code) or PTX from one source for one architecture and writes a depfile, so that an edit
rebuilds what it touches; ``pack`` puts the results into one compressed fatbin and embeds it in a C++ source. Both run without a
GPU and without a CUDA compiler driver: NVRTC and nvFatbin are plain shared libraries of the toolkit root.

Only the standard library is used, because this runs in the isolated environment of any build front end.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import re
import struct
import sys
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_void_p
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*(?:"([^"]+)"|<([^>]+)>|(\w+))', re.MULTILINE)


class DeviceCodeError(Exception):
    """A failure to show as it is, in a compiler's manner."""


def load(path: Path) -> ctypes.CDLL:
    """Load a toolkit library and let it find its siblings (NVRTC opens its builtins by name)."""
    if sys.platform == "win32":
        os.add_dll_directory(str(path.parent))
        return ctypes.CDLL(str(path))
    for builtins in sorted(path.parent.glob("libnvrtc-builtins.so.*")):
        ctypes.CDLL(str(builtins))
    return ctypes.CDLL(str(path))


class Nvrtc:
    """The few NVRTC calls that turn a source into a cubin or PTX."""

    def __init__(self, library: Path) -> None:
        self._lib = load(library)
        self._lib.nvrtcGetErrorString.restype = c_char_p

    def _check(self, status: int, call: str) -> None:
        if status:
            raise DeviceCodeError(f"{call}: {self._lib.nvrtcGetErrorString(status).decode()}")

    def _bytes(self, program: c_void_p, kind: str) -> bytes:
        size = c_size_t()
        self._check(getattr(self._lib, f"nvrtcGet{kind}Size")(program, byref(size)), f"nvrtcGet{kind}Size")
        buffer = ctypes.create_string_buffer(size.value)
        self._check(getattr(self._lib, f"nvrtcGet{kind}")(program, buffer), f"nvrtcGet{kind}")
        return buffer.raw

    def compile(self, text: bytes, name: str, options: Sequence[str], kind: str) -> bytes:
        """Return the ``CUBIN`` or ``PTX`` of a source; warnings go to stderr, an error is raised with the compiler's log."""
        program = c_void_p()
        self._check(self._lib.nvrtcCreateProgram(byref(program), text, name.encode(), 0, None, None), "nvrtcCreateProgram")
        try:
            arguments = (c_char_p * len(options))(*(option.encode() for option in options))
            status = self._lib.nvrtcCompileProgram(program, len(options), arguments)
            log = self._bytes(program, "ProgramLog").rstrip(b"\0\n").decode("utf-8", "replace")
            if status:
                raise DeviceCodeError(log or self._lib.nvrtcGetErrorString(status).decode())
            if log:
                print(log, file=sys.stderr)
            return self._bytes(program, kind)
        finally:
            self._lib.nvrtcDestroyProgram(byref(program))


class NvFatbin:
    """The nvFatbin calls that pack cubins and PTX into one fatbin."""

    def __init__(self, library: Path) -> None:
        self._lib = load(library)
        self._lib.nvFatbinGetErrorString.restype = c_char_p
        self._lib.nvFatbinCreate.argtypes = [POINTER(c_void_p), c_void_p, c_size_t]
        self._lib.nvFatbinAddCubin.argtypes = [c_void_p, c_char_p, c_size_t, c_char_p, c_char_p]
        self._lib.nvFatbinAddPTX.argtypes = [c_void_p, c_char_p, c_size_t, c_char_p, c_char_p, c_char_p]
        self._lib.nvFatbinSize.argtypes = [c_void_p, POINTER(c_size_t)]
        self._lib.nvFatbinGet.argtypes = [c_void_p, c_void_p]

    def _call(self, name: str, *arguments: object) -> None:
        status: int = getattr(self._lib, name)(*arguments)
        if status:
            raise DeviceCodeError(f"{name}: {self._lib.nvFatbinGetErrorString(c_int(status)).decode()}")

    def pack(self, images: Sequence[Path], identifier: str) -> bytes:
        """Pack ``<name>.sm_90a.cubin`` and ``<name>.compute_80.ptx`` files; every entry is compressed for size."""
        # The host option only matters to nvcc's linker; one value makes the fatbin the same on every build machine.
        options = (c_char_p * 3)(b"-64", b"-compress-mode=size", b"-host=linux")
        handle = c_void_p()
        self._call("nvFatbinCreate", byref(handle), options, len(options))
        try:
            for image in images:
                data = image.read_bytes()
                arch = image.suffixes[-2].rpartition("_")[2].encode()
                if image.suffix == ".cubin":
                    self._call("nvFatbinAddCubin", handle, data, len(data), arch, identifier.encode())
                else:
                    self._call("nvFatbinAddPTX", handle, data, len(data), arch, identifier.encode(), None)
            size = c_size_t()
            self._call("nvFatbinSize", handle, byref(size))
            buffer = ctypes.create_string_buffer(size.value)
            self._call("nvFatbinGet", handle, buffer)
            return buffer.raw
        finally:
            self._lib.nvFatbinDestroy(byref(handle))


def own_headers(source: Path, directories: Sequence[Path]) -> list[Path]:
    """Return the project's headers that a source includes, directly or not.

    NVRTC writes no depfile. Conditional compilation is ignored, so the list may be too long but never too short; the toolkit's
    headers need no entry, because its folder is named after its content.
    """
    found: dict[Path, None] = {}
    pending = [source]
    while pending:
        current = pending.pop()
        for quoted, angled, computed in INCLUDE.findall(current.read_text("utf-8")):
            if computed:
                raise DeviceCodeError(f"{current}: error: #include {computed}: a computed include hides a dependency from the build")
            places = [current.parent, *directories] if quoted else directories
            header = next((path for place in places if (path := (place / (quoted or angled)).resolve()).is_file()), None)
            if header is not None and header not in found:
                found[header] = None
                pending.append(header)
    return list(found)


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file so that an interrupted build leaves the old one or none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    partial.write_bytes(data)
    partial.replace(path)


def as_cpp(fatbin: bytes, symbol: str, source: str) -> str:
    """Return a C++ source that defines ``symbol`` as an array of 64-bit words (eight times fewer tokens than bytes)."""
    padded = fatbin + bytes(-len(fatbin) % 8)
    words = [f"{word:#x}u" for (word,) in struct.iter_unpack("<Q", padded)]
    lines = "\n".join(",".join(words[i : i + 8]) + "," for i in range(0, len(words), 8))
    return (
        f"// Device code of {source}, generated by the build.\n#include <cstdint>\n"
        f"extern const std::uint64_t {symbol}[];\nalignas(16) const std::uint64_t {symbol}[] = {{\n{lines}\n}};\n"
    )


def run_compile(args: argparse.Namespace) -> None:
    source: Path = args.source
    kind = "CUBIN" if args.arch.startswith("sm_") else "PTX"
    options = [
        f"--gpu-architecture={args.arch}",
        "--std=c++20",
        "--device-as-default-execution-space",
        *(f"--define-macro={macro}" for macro in args.define),
        *(f"--include-path={directory}" for directory in [*args.own_include, *args.include]),
    ]
    image = Nvrtc(args.nvrtc).compile(source.read_bytes(), str(source), options, kind)
    headers = [str(path).replace("\\", "/").replace(" ", "\\ ") for path in [source.resolve(), *own_headers(source, args.own_include)]]
    write_atomically(args.depfile, f"{args.output.as_posix()}: {' '.join(headers)}\n".encode())
    write_atomically(args.output, image)


def run_pack(args: argparse.Namespace) -> None:
    fatbin = NvFatbin(args.nvfatbin).pack(args.images, args.name)
    write_atomically(args.output, as_cpp(fatbin, args.symbol, args.name).encode())


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    compile_ = commands.add_parser("compile", help="compile one source for one architecture")
    compile_.add_argument("--nvrtc", type=Path, required=True, help="the NVRTC library")
    compile_.add_argument("--arch", required=True, help="sm_90a for machine code, compute_80 for PTX")
    compile_.add_argument("--include", type=Path, action="append", default=[], help="a toolkit's include directory")
    compile_.add_argument("--own-include", type=Path, action="append", default=[], help="an include directory to take dependencies from")
    compile_.add_argument("--define", action="append", default=[], help="NAME[=VALUE]")
    compile_.add_argument("--depfile", type=Path, required=True)
    compile_.add_argument("source", type=Path)
    compile_.add_argument("output", type=Path)
    compile_.set_defaults(run=run_compile)
    pack = commands.add_parser("pack", help="pack cubins and PTX into a fatbin inside a C++ source")
    pack.add_argument("--nvfatbin", type=Path, required=True, help="the nvFatbin library")
    pack.add_argument("--symbol", required=True, help="the array's name in C++")
    pack.add_argument("--name", required=True, help="the source's name, to show")
    pack.add_argument("output", type=Path)
    pack.add_argument("images", type=Path, nargs="+")
    pack.set_defaults(run=run_pack)
    args = parser.parse_args(argv)
    try:
        args.run(args)
    except DeviceCodeError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
