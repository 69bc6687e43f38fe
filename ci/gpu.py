"""What the driver says about this machine's GPUs, asked without any package."""

from __future__ import annotations

import ctypes
import sys

from .errors import EnvironmentProblem

_MAJOR, _MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, _MINOR


def capabilities() -> tuple[int, ...]:
    """Return the compute capabilities of the GPUs here, such as ``(90,)``, in ascending order and once each."""
    cure = "name the architecture, for example --arch 90"
    try:
        driver = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    except OSError as error:
        raise EnvironmentProblem(f"no NVIDIA driver to ask for the native architecture ({error})", cure=cure) from None
    count = ctypes.c_int()
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)) or count.value == 0:
        raise EnvironmentProblem("the NVIDIA driver sees no GPU", cure=cure)
    found = set()
    for index in range(count.value):
        major, minor = ctypes.c_int(), ctypes.c_int()
        driver.cuDeviceGetAttribute(ctypes.byref(major), _MAJOR, index)
        driver.cuDeviceGetAttribute(ctypes.byref(minor), _MINOR, index)
        found.add(10 * major.value + minor.value)
    return tuple(sorted(found))
