"""What the tests of the device code's build share: the installed toolkits, and a kernel that includes headers."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, NamedTuple

import pytest

from ci import matrix, toolkit
from ci.errors import EnvironmentProblem

if TYPE_CHECKING:
    from pathlib import Path
    from types import ModuleType

SCRIPT = matrix.REPOSITORY / "cmake" / "device_code.py"

KERNEL = """\
#include "kernels/shared.h"
extern "C" __global__ void {name}(float* out) {{ out[threadIdx.x] = scale(out[threadIdx.x]); }}
"""
SHARED = "#pragma once\n__device__ inline float scale(float x) { return 2 * x; }\n"


class Compiler(NamedTuple):
    """NVRTC and its companion in an installed toolkit root."""

    nvrtc: Path
    nvfatbin: Path
    include: Path


def compiler(version: str) -> Compiler:
    """The compiler of a CUDA version; skips the test where its root is not installed."""
    try:
        root = toolkit.root_path(matrix.load().cuda[version].roots[0], matrix.host_platform())
    except EnvironmentProblem as problem:
        pytest.skip(str(problem))
    return Compiler(root / "lib" / "libnvrtc.so", root / "lib" / "libnvfatbin.so", root / "include")


def device_code() -> ModuleType:
    """cmake/device_code.py as a module; its folder is no package."""
    specification = importlib.util.spec_from_file_location("device_code", SCRIPT)
    assert specification
    assert specification.loader
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def write_kernels(src: Path, *names: str) -> None:
    """Write kernels and the header that they share."""
    (src / "kernels").mkdir(parents=True)
    (src / "kernels" / "shared.h").write_text(SHARED, "utf-8")
    for name in names:
        (src / "kernels" / f"{name}.cu").write_text(KERNEL.format(name=name), "utf-8")
