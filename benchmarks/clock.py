"""The clock of the GPU's multiprocessors, from the driver's management library: a program to ask would cost more than a batch."""

from __future__ import annotations

import ctypes
from functools import cache

LIBRARY = "libnvidia-ml.so.1"
SM_CLOCK = 1  # NVML_CLOCK_SM


def read_clock() -> int | None:
    """MHz of the first GPU at this moment, where the library is there and tells it."""
    known = _library()
    if known is None:
        return None
    nvml, device = known
    clock = ctypes.c_uint()
    return None if nvml.nvmlDeviceGetClockInfo(device, SM_CLOCK, ctypes.byref(clock)) else clock.value


@cache
def _library() -> tuple[ctypes.CDLL, ctypes.c_void_p] | None:
    device = ctypes.c_void_p()
    try:
        nvml = ctypes.CDLL(LIBRARY)
    except OSError:
        return None
    return None if nvml.nvmlInit_v2() or nvml.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(device)) else (nvml, device)
