"""The three tools of NVIDIA's that make device code: NVRTC, ptxas and nvFatbin, all of one toolkit root."""

from __future__ import annotations

import ctypes
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_void_p
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from .. import matrix, toolkit
from ..errors import CheckFailed, EnvironmentProblem


@dataclass(frozen=True)
class Tools:
    """Their directory."""

    nvrtc: Path
    ptxas: Path
    nvfatbin: Path
    include: Path


def tools() -> Tools:
    """Those of the declared root, for this machine."""
    root = toolkit.root_path(matrix.load().device.root, matrix.host_platform())
    windows = sys.platform == "win32"

    def only(pattern: str) -> Path:
        # NVRTC is next to its builtins, and next to another build of it, "alt".
        found = sorted(path for path in root.glob(pattern) if not re.search("builtins|[.]alt[.]", path.name))
        if not found:
            raise EnvironmentProblem(f"the toolkit root {root} lacks {pattern}", fix="python -m ci toolkit verify")
        return found[0]

    return Tools(
        nvrtc=only("bin/nvrtc*.dll") if windows else only("lib/libnvrtc.so"),
        ptxas=only("site/nvidia/*/bin/ptxas.exe" if windows else "site/nvidia/*/bin/ptxas"),
        nvfatbin=only("bin/nvfatbin*.dll") if windows else only("lib/libnvfatbin.so"),
        include=root / "include",
    )


@cache
def _load(path: Path) -> ctypes.CDLL:
    """Load a library, NVRTC's builtins before it: it opens them by name, which finds what is loaded."""
    for pattern in ("libnvrtc-builtins.so.*", "nvrtc-builtins64_*.dll"):
        for builtins in sorted(path.parent.glob(pattern)):
            ctypes.CDLL(str(builtins))
    return ctypes.CDLL(str(path))


class Nvrtc:
    """The few NVRTC calls that turn a source into PTX."""

    def __init__(self, library: Path) -> None:
        self._lib = _load(library)
        self._lib.nvrtcGetErrorString.restype = c_char_p

    def _check(self, status: int, call: str) -> None:
        if status:
            raise CheckFailed(f"{call}: {self._lib.nvrtcGetErrorString(status).decode()}")

    def _bytes(self, program: c_void_p, kind: str) -> bytes:
        size = c_size_t()
        self._check(getattr(self._lib, f"nvrtcGet{kind}Size")(program, byref(size)), f"nvrtcGet{kind}Size")
        buffer = ctypes.create_string_buffer(size.value)
        self._check(getattr(self._lib, f"nvrtcGet{kind}")(program, buffer), f"nvrtcGet{kind}")
        return buffer.raw

    def compile(self, text: bytes, name: str, options: Sequence[str]) -> bytes:
        """Return the PTX of a source; warnings go to stderr, an error is raised with the compiler's log."""
        program = c_void_p()
        self._check(self._lib.nvrtcCreateProgram(byref(program), text, name.encode(), 0, None, None), "nvrtcCreateProgram")
        try:
            arguments = (c_char_p * len(options))(*(option.encode() for option in options))
            status = self._lib.nvrtcCompileProgram(program, len(options), arguments)
            log = self._bytes(program, "ProgramLog").rstrip(b"\0\n").decode("utf-8", "replace")
            if status:
                raise CheckFailed(log or self._lib.nvrtcGetErrorString(status).decode())
            if log:
                print(log, file=sys.stderr)
            return self._bytes(program, "PTX").rstrip(b"\0")
        finally:
            self._lib.nvrtcDestroyProgram(byref(program))


def compile_ptx(using: Tools, source: Path, architecture: str, own_include: Path, options: Sequence[str]) -> bytes:
    """Compile a source to PTX. A source without kernels for this architecture is an error: its result would never be loaded."""
    includes = [f"--include-path={each}" for each in (own_include, using.include)]
    arguments = [f"--gpu-architecture=compute_{architecture}", *options, *includes]
    ptx = Nvrtc(using.nvrtc).compile(source.read_bytes(), str(source), arguments)
    if b".entry " not in ptx:
        raise CheckFailed(f"{source}: no kernel for compute_{architecture}, which [device] of ci/matrix/matrix.toml declares for it")
    return ptx


def assemble(using: Tools, ptx: bytes, architecture: str, name: str) -> bytes:
    """Turn PTX into the SASS of a GPU."""
    with tempfile.TemporaryDirectory(prefix=f"{matrix.load().name}-ptxas-") as folder:
        source, image = Path(folder, "source.ptx"), Path(folder, "image.cubin")
        source.write_bytes(ptx)
        done = subprocess.run(
            [str(using.ptxas), f"--gpu-name=sm_{architecture}", str(source), "--output-file", str(image)],
            check=False,
            capture_output=True,
            text=True,
        )
        if done.returncode:
            said = done.stderr.strip() or done.stdout.strip() or f"ended with {done.returncode}; is there enough memory?"
            raise CheckFailed(f"{name}: ptxas for sm_{architecture}: {said}")
        return image.read_bytes()


class NvFatbin:
    """The nvFatbin calls that pack SASS and PTX into one fatbin."""

    def __init__(self, library: Path) -> None:
        self._lib = _load(library)
        self._lib.nvFatbinGetErrorString.restype = c_char_p
        self._lib.nvFatbinCreate.argtypes = [POINTER(c_void_p), c_void_p, c_size_t]
        self._lib.nvFatbinAddCubin.argtypes = [c_void_p, c_char_p, c_size_t, c_char_p, c_char_p]
        self._lib.nvFatbinAddPTX.argtypes = [c_void_p, c_char_p, c_size_t, c_char_p, c_char_p, c_char_p]
        self._lib.nvFatbinSize.argtypes = [c_void_p, POINTER(c_size_t)]
        self._lib.nvFatbinGet.argtypes = [c_void_p, c_void_p]

    def _call(self, name: str, *arguments: object) -> None:
        status: int = getattr(self._lib, name)(*arguments)
        if status:
            raise CheckFailed(f"{name}: {self._lib.nvFatbinGetErrorString(c_int(status)).decode()}")

    def pack(self, name: str, sass: dict[str, bytes], ptx: dict[str, bytes]) -> bytes:
        """Pack code by architecture, in this order, uncompressed: `packed` compresses all of it together."""
        # The host option only matters to nvcc's linker; one value makes the fatbin the same on every build machine.
        options = (c_char_p * 3)(b"-64", b"-compress=false", b"-host=linux")
        handle = c_void_p()
        self._call("nvFatbinCreate", byref(handle), options, len(options))
        try:
            for architecture, image in sass.items():
                self._call("nvFatbinAddCubin", handle, image, len(image), architecture.encode(), name.encode())
            for architecture, text in ptx.items():
                ended = text + b"\0"
                self._call("nvFatbinAddPTX", handle, ended, len(ended), architecture.encode(), name.encode(), None)
            size = c_size_t()
            self._call("nvFatbinSize", handle, byref(size))
            buffer = ctypes.create_string_buffer(size.value)
            self._call("nvFatbinGet", handle, buffer)
            return buffer.raw
        finally:
            self._lib.nvFatbinDestroy(byref(handle))
