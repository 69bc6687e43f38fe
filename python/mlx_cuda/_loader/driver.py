"""Queries of the NVIDIA driver through ctypes, which need neither CUDA nor MLX."""

from __future__ import annotations

import ctypes
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import loaded

LIBRARY = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"

_CAPABILITY = (75, 76)  # major and minor as CUdevice_attribute
_STUB = 34  # CUDA_ERROR_STUB_LIBRARY


@dataclass(frozen=True)
class Gpu:
    """A GPU of the driver, and its compute capability."""

    name: str
    capability: tuple[int, int]


@dataclass(frozen=True)
class Driver:
    """The driver: the newest CUDA version that it supports (``None``: no driver), its GPUs, and the error of the query."""

    cuda: tuple[int, int] | None = None
    gpus: tuple[Gpu, ...] = ()
    error: str = ""
    path: str = field(default="", compare=False)  # of the driver's library, where it was loaded
    stub: bool = False  # that is none: a toolkit's, to link against


class _StubError(OSError):
    pass


def _call(library: Any, name: str, *arguments: Any) -> None:
    code = getattr(library, name)(*arguments)
    if code == _STUB:
        raise _StubError(f"{LIBRARY} is a stub, which a toolkit brings to link against")
    if code:
        text = ctypes.c_char_p()
        library.cuGetErrorString(code, ctypes.byref(text))
        raise OSError(f"{name} failed with error {code}" + (f" ({text.value.decode()})" if text.value else ""))


def _integer(library: Any, name: str, *arguments: Any) -> int:
    """Return the integer that a function writes to its first argument."""
    number = ctypes.c_int()
    _call(library, name, ctypes.byref(number), *arguments)
    return number.value


def _gpu(library: Any, ordinal: int) -> Gpu:
    device, name = _integer(library, "cuDeviceGet", ordinal), ctypes.create_string_buffer(256)
    _call(library, "cuDeviceGetName", name, len(name), device)
    major, minor = (_integer(library, "cuDeviceGetAttribute", attribute, device) for attribute in _CAPABILITY)
    return Gpu(name.value.decode(errors="replace"), (major, minor))


def query(library_name: str = LIBRARY) -> Driver:
    """Query the driver; errors are part of the result."""
    cuda = None
    try:
        library = ctypes.CDLL(library_name)
        number = _integer(library, "cuDriverGetVersion")
        cuda = number // 1000, number % 1000 // 10
        _call(library, "cuInit", 0)
        return Driver(cuda, tuple(_gpu(library, ordinal) for ordinal in range(_integer(library, "cuDeviceGetCount"))), path=_path())
    except (OSError, AttributeError) as error:  # AttributeError: the library lacks a function
        return Driver(cuda, error=str(error), path=_path(), stub=isinstance(error, _StubError))


def _path() -> str:
    name = LIBRARY.partition(".")[0]
    return next((path for path in loaded.mapped() if Path(path).name.lower().partition(".")[0] == name), "")
