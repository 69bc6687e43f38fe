"""Symbol closure: the native modules of the built wheel find every library and every symbol in a real installation of their extra.

The linker leaves Python's symbols undefined, and so cannot tell a mistake from them. Here the wheel is installed with its extra, and
its native modules are loaded with every symbol bound at once. There need be no GPU and no driver: a stub stands for the latter.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import NamedTuple

import platformdirs
import pytest

from ci import matrix, toolkit
from ci.matrix import Cuda
from ci.toolkit import uv
from ci.wheelfile.binary import elf

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="ELF modules can be loaded on Linux only")]

LOAD = "import ctypes, os, sys; ctypes.CDLL(sys.argv[1], mode=os.RTLD_NOW)"
UNRESOLVED = re.compile(r"undefined symbol: (\S+)|symbol (\S+) version \S+ not defined|symbol (\S+), version \S+ not defined")


class Installed(NamedTuple):
    """A native module in an installation, and the folder of the stub driver."""

    cuda: Cuda
    site: Path
    stubs: Path

    @property
    def module(self) -> Path:
        return self.site / member(self.cuda)

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a program that finds the stub driver; all other libraries are found by RPATH or not at all."""
        environment = {**os.environ, "LD_LIBRARY_PATH": str(self.stubs)}
        return subprocess.run(command, env=environment, capture_output=True, encoding="utf-8", check=False)

    def load(self) -> str:
        """Load the module with RTLD_NOW in a process of its own; returns what the loader complains of."""
        return self.run(sys.executable, "-I", "-c", LOAD, str(self.module)).stderr

    def ldd(self) -> str:
        """Let the loader list every library and every symbol that it cannot resolve."""
        if shutil.which("ldd") is None:
            pytest.skip("there is no ldd here")
        done = self.run("ldd", "-r", str(self.module))
        return done.stdout + done.stderr

    def beside(self, folder: Path, *, without: str = "") -> Installed:
        """The same installation seen through links in ``folder``, its package apart, so that it can be spoilt."""
        for path in self.site.iterdir():
            if path.name not in {"mlx_cuda", without}:
                (folder / path.name).symlink_to(path)
        (folder / "mlx_cuda").mkdir()
        shutil.copy2(self.module, folder / "mlx_cuda")
        return self._replace(site=folder)


def member(cuda: Cuda) -> str:
    return f"{matrix.load().module}/{cuda.module}.abi3.so"


@pytest.fixture(scope="module", params=matrix.load().cuda)
def installed(request: pytest.FixtureRequest, tested_wheel: Path) -> Installed:
    cuda = matrix.load().cuda[request.param]
    with zipfile.ZipFile(tested_wheel) as archive:
        if member(cuda) not in archive.namelist():
            pytest.skip(f"{tested_wheel.name} was built without {member(cuda)}")
    stubs = toolkit.root_path(cuda.roots[0], matrix.host_platform()) / "lib" / "stubs"
    return Installed(cuda, install(tested_wheel, cuda.extra), stubs)


def install(wheel: Path, extra: str) -> Path:
    """Install the wheel with its extra, unless the last run has done it: the folder is named after the wheel's contents."""
    cache = Path(platformdirs.user_cache_dir("mlx-cuda")) / "closure"
    python = f"cp{sys.version_info.major}{sys.version_info.minor}"
    site = cache / f"{extra}-{python}-{hashlib.sha256(wheel.read_bytes()).hexdigest()[:12]}"
    if not site.is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        for old in cache.glob(f"{extra}-*"):  # each is gigabytes
            shutil.rmtree(old)
        with tempfile.TemporaryDirectory(dir=cache, prefix=".partial-") as partial:
            target = Path(partial) / "site"
            uv.run("pip", "install", "--python", sys.executable, "--target", str(target), f"{wheel}[{extra}]", cwd=cache)
            target.rename(site)
    return site


def test_every_symbol_resolves(installed: Installed) -> None:
    assert installed.load() == ""


def test_only_python_is_left_undefined(installed: Installed) -> None:
    """``ldd`` loads no interpreter, so Python's symbols are what has to be missing, and nothing else."""
    said = installed.ldd()
    assert "not found" not in said
    names = [next(filter(None, groups)) for groups in UNRESOLVED.findall(said)]
    assert any(name.startswith("Py") for name in names), f"ldd checked no symbols:\n{said}"
    assert [name for name in names if not name.startswith(("Py", "_Py"))] == []


def test_libraries_come_from_the_installation(installed: Installed) -> None:
    """The RPATH leads to the extra's own libraries, not to others that this machine may have."""
    found = dict(re.findall(r"(\S+) => (\S+)", installed.ldd()))
    assert {lib.name: Path(found[lib.files["linux"]]).resolve() for lib in installed.cuda.libraries if lib.needed} == {
        lib.name: (installed.site / lib.directories["linux"] / lib.files["linux"]).resolve()
        for lib in installed.cuda.libraries
        if lib.needed
    }


def test_a_symbol_that_no_library_has_is_noticed(installed: Installed, tmp_path: Path) -> None:
    spoilt = installed.beside(tmp_path)
    data = spoilt.module.read_bytes()
    symbol = min(name for name in elf.described(elf.Elf(data)).undefined if name.startswith("_ZN3mlx")).encode()
    unknown = b"_ZN3Mlx" + symbol[7:]
    assert data.count(b"\0" + symbol + b"\0") == 1
    spoilt.module.write_bytes(data.replace(b"\0" + symbol + b"\0", b"\0" + unknown + b"\0"))
    assert f"undefined symbol: {unknown.decode()}" in spoilt.load()
    assert f"undefined symbol: {unknown.decode()}" in spoilt.ldd()


def test_a_library_that_is_not_installed_is_noticed(installed: Installed, tmp_path: Path) -> None:
    assert "libmlx.so: cannot open shared object file" in installed.beside(tmp_path, without="mlx").load()
