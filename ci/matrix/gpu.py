"""What the driver says about this machine's GPUs, asked without any package."""

from __future__ import annotations

import ctypes
import sys

from ..errors import CiError, EnvironmentProblem
from . import load

_MAJOR, _MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, _MINOR


def _driver(cure: str) -> ctypes.CDLL:
    """Return the driver's library, initialised and with at least one GPU."""
    try:
        driver = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    except OSError as error:
        raise EnvironmentProblem(f"no NVIDIA driver here ({error})", cure=cure) from None
    count = ctypes.c_int()
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)) or count.value == 0:
        raise EnvironmentProblem("the NVIDIA driver sees no GPU", cure=cure)
    return driver


def extra() -> str:
    """Return the extra of the wheel that fits this machine: of the newest CUDA major that its driver runs, or ``cpu``."""
    try:
        driver = _driver("")
    except CiError:
        return "cpu"
    version = ctypes.c_int()
    driver.cuDriverGetVersion(ctypes.byref(version))
    fitting = [cuda for cuda in load().cuda.values() if cuda.major <= version.value // 1000]
    return max(fitting, key=lambda cuda: cuda.major).extra if fitting else "cpu"


def capabilities() -> tuple[int, ...]:
    """Return the compute capabilities of the GPUs here, such as ``(90,)``, in ascending order and once each."""
    driver = _driver("name the architecture, for example --arch 90")
    count = ctypes.c_int()
    driver.cuDeviceGetCount(ctypes.byref(count))
    found = set()
    for index in range(count.value):
        major, minor = ctypes.c_int(), ctypes.c_int()
        driver.cuDeviceGetAttribute(ctypes.byref(major), _MAJOR, index)
        driver.cuDeviceGetAttribute(ctypes.byref(minor), _MINOR, index)
        found.add(10 * major.value + minor.value)
    return tuple(sorted(found))


if __name__ == "__main__":
    print(extra())
