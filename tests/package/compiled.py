"""Parts of the native module that need no GPU, compiled for MLX's CPU backend."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

HERE = Path(__file__).parent
SRC = HERE.parents[1] / "src"
DEFINED = ("NB_BACKEND_MODULE=nanobind_backend", "NB_BACKEND_PYPI=nanobind-backend", "NB_DOMAIN=mlx", "Py_LIMITED_API=0x30a0000")

compiles = pytest.mark.skipif(sys.platform != "linux" or not shutil.which("c++"), reason="compiles with the system's compiler")


def compiled(folder: Path, name: str, sources: Sequence[str]) -> Any:
    """A module of these sources and the one of this name that lies beside the tests and binds them; made by the first worker that asks."""
    nanobind = pytest.importorskip("nanobind")
    python, mlx = Path(sysconfig.get_paths()["include"]), Path(mx.__file__).parent
    if not (python / "Python.h").exists() or not SRC.exists():
        pytest.skip("Python's headers or the sources are not here")
    target = folder / f"{name}.abi3.so"
    files = [HERE / f"{name}.cpp", *(SRC / source for source in sources)]
    flags = ["-std=c++20", "-O0", "-shared", "-fPIC", "-fvisibility=hidden", *(f"-D{each}" for each in DEFINED), f"-I{SRC}"]
    headers = [f"-isystem{path}" for path in (python, nanobind.include_dir(), mlx / "include")]
    link = [f"-L{mlx / 'lib'}", "-lmlx", f"-Wl,-rpath,{mlx / 'lib'}"]
    import fcntl  # which Windows lacks

    with (folder / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            made = folder / f"{name}.so"  # a compiler that is stopped leaves half of it
            whole = folder / f"{name}.cpp"  # as one source: most of the time goes into MLX's headers
            whole.write_text("".join(f'#include "{file}"\n' for file in files))
            subprocess.run(["c++", *flags, *headers, str(whole), "-o", str(made), *link], check=True)
            made.rename(target)
    spec = importlib.util.spec_from_file_location(name, target)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def native(shared_folder: Path) -> Any:
    """The cache of calls, what a model holds, composed attention, and the layouts of gather_mm's operands."""
    sources = ("bindings/call_cache.cpp", "bindings/graph.cpp", "attention/composed.cpp", "matmul/grouped/upstream_layout.cpp")
    return compiled(shared_folder, "native_on_cpu", sources)
