"""The aarch64 wheel without an Arm machine: imported, its CPU tests run, and every symbol bound, under qemu's user-mode emulation.

It needs a wheel that was built before: ``python -m ci wheel --platform linux-aarch64`` (or MLX_CUDA_WHEEL_AARCH64).
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from ci import matrix

from .emulation_support import Emulated, make

pytestmark = pytest.mark.slow

ARM = matrix.load().platform("linux-aarch64")


@pytest.fixture(scope="module")
def wheel() -> Path:
    if chosen := os.environ.get("MLX_CUDA_WHEEL_AARCH64"):
        return Path(chosen)
    found = sorted((matrix.REPOSITORY / "wheelhouse").glob("*aarch64.whl"), key=lambda path: path.stat().st_mtime)
    if not found:
        pytest.skip("wheelhouse/ has no aarch64 wheel (python -m ci wheel --platform linux-aarch64)")
    return found[-1]


@pytest.fixture(scope="module")
def emulated(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Emulated:
    return make(tmp_path_factory.mktemp("aarch64"))


@pytest.fixture(scope="module")
def site(emulated: Emulated, wheel: Path) -> Path:
    """The wheel with MLX's CPU backend and what the package's tests need."""
    return emulated.install(emulated.folder / "cpu", f"{wheel}[cpu]", "hypothesis", "numpy", "pytest")


def test_it_is_another_machine(emulated: Emulated, site: Path) -> None:
    said = emulated.run("-c", "import platform, numpy; print(platform.machine(), *platform.libc_ver())", site=site)
    machine, libc, version = said.stdout.split()
    assert (machine, libc) == ("aarch64", "glibc")
    assert tuple(map(int, version.split("."))) >= (2, 35), "what MLX's own wheels need"


def test_the_doctor_has_nothing_to_say(emulated: Emulated, site: Path) -> None:
    done = emulated.run("-m", "mlx_cuda", "doctor", "--json", site=site)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not [check for check in json.loads(done.stdout)["checks"] if check["status"] in {"fail", "warn"}]


def test_the_cpu_tests_pass(emulated: Emulated, site: Path) -> None:
    done = emulated.run("-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/package", site=site)
    print(done.stdout[-2000:])
    assert done.returncode == 0
    assert int(re.findall(r"(\d+) passed", done.stdout)[0]) > 300
    assert "failed" not in done.stdout


@pytest.mark.parametrize("cuda", matrix.load().cuda.values(), ids=lambda cuda: cuda.version)
def test_every_symbol_resolves(
    emulated: Emulated, wheel: Path, cuda: matrix.Cuda, installed_root: Callable[[str, matrix.Platform], Path]
) -> None:
    """Against the real aarch64 libraries of the extra, with a stub for the driver, as test_closure.py does for this machine's."""
    stubs = installed_root(cuda.roots[0], ARM) / "lib" / "stubs"
    site = emulated.install(emulated.folder / cuda.extra, f"{wheel}[{cuda.extra}]")
    load = "import ctypes, os, sys; ctypes.CDLL(sys.argv[1], mode=os.RTLD_NOW)"
    module = str(site / "mlx_cuda" / f"{cuda.module}.abi3.so")
    # qemu hands a variable to the emulated program alone: this machine's own loader would refuse a driver of another processor.
    bound = emulated.run("-c", load, module, site=site, QEMU_SET_ENV=f"LD_LIBRARY_PATH={stubs}")
    assert (bound.returncode, bound.stderr) == (0, "")
    without = emulated.run("-c", load, module, site=site)
    assert "libcuda.so.1: cannot open shared object file" in without.stderr, "and a library that is not there is noticed"
