"""What the NVIDIA driver says of itself and of the GPUs, asked through ctypes so that it needs neither CUDA nor MLX."""

from __future__ import annotations

import ctypes
import sys
from dataclasses import dataclass
from typing import Any

LIBRARY = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"

_CAPABILITY_MAJOR, _CAPABILITY_MINOR = 75, 76  # CUdevice_attribute


@dataclass(frozen=True)
class Gpu:
    """A GPU that the driver offers, and its compute capability."""

    name: str
    capability: tuple[int, int]


@dataclass(frozen=True)
class Driver:
    """The driver: the newest CUDA version it runs (``None``: no driver), its GPUs, and what went wrong in asking."""

    cuda: tuple[int, int] | None = None
    gpus: tuple[Gpu, ...] = ()
    error: str = ""


class _CallError(Exception):
    """A driver call returned an error code."""


def _call(library: Any, name: str, *arguments: Any) -> None:
    code = getattr(library, name)(*arguments)
    if code:
        text = ctypes.c_char_p()
        library.cuGetErrorString(code, ctypes.byref(text))
        raise _CallError(f"{name} failed with error {code}" + (f" ({text.value.decode()})" if text.value else ""))


def _gpu(library: Any, ordinal: int) -> Gpu:
    device, name = ctypes.c_int(), ctypes.create_string_buffer(256)
    major, minor = ctypes.c_int(), ctypes.c_int()
    _call(library, "cuDeviceGet", ctypes.byref(device), ordinal)
    _call(library, "cuDeviceGetName", name, len(name), device)
    _call(library, "cuDeviceGetAttribute", ctypes.byref(major), _CAPABILITY_MAJOR, device)
    _call(library, "cuDeviceGetAttribute", ctypes.byref(minor), _CAPABILITY_MINOR, device)
    return Gpu(name=name.value.decode(errors="replace"), capability=(major.value, minor.value))


def query(library_name: str = LIBRARY) -> Driver:
    """Ask the driver; every failure is an answer, none is raised."""
    try:
        library = ctypes.CDLL(library_name)
    except OSError as error:
        return Driver(error=str(error))
    cuda: tuple[int, int] | None = None
    try:
        number, count = ctypes.c_int(), ctypes.c_int()
        _call(library, "cuDriverGetVersion", ctypes.byref(number))
        cuda = number.value // 1000, number.value % 1000 // 10
        _call(library, "cuInit", 0)
        _call(library, "cuDeviceGetCount", ctypes.byref(count))
        return Driver(cuda=cuda, gpus=tuple(_gpu(library, ordinal) for ordinal in range(count.value)))
    except (_CallError, AttributeError) as error:
        return Driver(cuda=cuda, error=str(error))
