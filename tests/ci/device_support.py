"""What the tests of the device code share: the installed compilers, and kernels that include a header."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ci.device import compilers
from ci.errors import EnvironmentProblem

KERNEL = """\
#include "kernels/shared.h"
extern "C" __global__ void {name}(float* out) {{ out[threadIdx.x] = scale(out[threadIdx.x]); }}
"""
SHARED = "#pragma once\n__device__ inline float scale(float x) { return 2 * x; }\n"


def installed_tools() -> compilers.Tools:
    """The compilers of the root; skips the test where it is not installed."""
    try:
        return compilers.tools()
    except EnvironmentProblem as problem:
        pytest.skip(str(problem))


def write_kernels(src: Path, *names: str) -> Path:
    """Write kernels and the header that they share."""
    (src / "kernels").mkdir(parents=True)
    (src / "kernels" / "shared.h").write_text(SHARED, "utf-8")
    for name in names:
        (src / "kernels" / f"{name}.cu").write_text(KERNEL.format(name=name), "utf-8")
    return src


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text("utf-8")
    assert old in text
    path.write_text(text.replace(old, new), "utf-8")


def reported(text: str) -> set[str]:
    """The steps that a build says it did."""
    found = re.findall(r"^\[ *\d+/\d+\] (.*) \d+\.\d s$", text, re.MULTILINE)
    assert len(found) == len(set(found)), "a step was done twice"
    return set(found)
