"""This machine's GPUs, queried from the driver without any package."""

from __future__ import annotations

import ctypes
import sys

from ..errors import CiError, EnvironmentProblem
from . import Row, load, numbers

_VERSION_BYTES = 80  # NVML_SYSTEM_DRIVER_VERSION_BUFFER_SIZE
_MAJOR, _MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, _MINOR


def _driver(fix: str) -> ctypes.CDLL:
    """Return the driver's library, initialized and with at least one GPU."""
    try:
        driver = ctypes.CDLL(load().driver["windows" if sys.platform == "win32" else "linux"])
    except OSError as error:
        raise EnvironmentProblem(f"no NVIDIA driver here ({error})", fix=fix) from None
    count = ctypes.c_int()
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)) or count.value == 0:
        raise EnvironmentProblem("the NVIDIA driver sees no GPU", fix=fix)
    return driver


def extra() -> str:
    """Return the extra of the wheel that fits this machine: of the newest CUDA major that its driver runs, or ``cpu``."""
    try:
        driver = _driver("")
    except (CiError, KeyError):  # no driver here, or none declared
        return load().cpu.extra
    version = ctypes.c_int()
    driver.cuDriverGetVersion(ctypes.byref(version))
    fitting = [cuda for cuda in load().cuda.values() if cuda.major <= version.value // 1000]
    return max(fitting, key=lambda cuda: cuda.major).extra if fitting else load().cpu.extra


def capabilities(fix: str = "name the architecture, for example --arch 90") -> tuple[int, ...]:
    """Return the compute capabilities of the GPUs here, such as ``(90,)``, in ascending order and once each."""
    driver = _driver(fix)
    count = ctypes.c_int()
    driver.cuDeviceGetCount(ctypes.byref(count))
    found = set()
    for index in range(count.value):
        major, minor = ctypes.c_int(), ctypes.c_int()
        driver.cuDeviceGetAttribute(ctypes.byref(major), _MAJOR, index)
        driver.cuDeviceGetAttribute(ctypes.byref(minor), _MINOR, index)
        found.add(10 * major.value + minor.value)
    return tuple(sorted(found))


def driver_version() -> str:
    """Return the driver's own version, such as ``580.65.06``."""
    name = "nvml.dll" if sys.platform == "win32" else "libnvidia-ml.so.1"
    try:
        nvml = ctypes.CDLL(name)
    except OSError as error:
        raise EnvironmentProblem(f"the driver's version cannot be queried ({error})", fix=f"install {name}, a part of the driver") from None
    version = ctypes.create_string_buffer(_VERSION_BYTES)
    if nvml.nvmlInit_v2() or nvml.nvmlSystemGetDriverVersion(version, _VERSION_BYTES):
        raise EnvironmentProblem("the driver does not report its version", fix="check that nvidia-smi works")
    return version.value.decode()


def fits(row: Row) -> None:
    """Refuse a machine whose GPUs or driver are not what a row of the matrix asks for."""
    wanted = f"run the row {row.name} on a machine with a GPU of the family {row.gpu} and the driver {row.driver} or newer"
    others = [each for each in capabilities(wanted) if each not in load().gpus[row.gpu]]
    if others:
        raise EnvironmentProblem(f"a GPU here has the compute capability {others[0] / 10}, which is not of {row.gpu}", fix=wanted)
    if numbers(version := driver_version()) < numbers(row.driver):
        raise EnvironmentProblem(f"the driver here is {version}", fix=wanted)


if __name__ == "__main__":
    print(extra())
