"""A package index in a folder: small wheels that have the shape of the real ones, for tests of ci.toolkit."""

from __future__ import annotations

import base64
import hashlib
import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from ci import __main__ as command_line
from ci import matrix, toolkit
from ci.errors import EnvironmentProblem
from ci.toolkit import lock, roots

TAGS = {"linux-x86_64": "manylinux_2_28_x86_64", "linux-aarch64": "manylinux_2_28_aarch64", "win-amd64": "win_amd64"}
ROOT = "cuda-0.1"
LINUX = matrix.load().platform("linux-x86_64")

CUDA_H = """\
#define cuMemAlloc                          cuMemAlloc_v2
#define CUDA_VERSION 12080
CUresult CUDAAPI cuInit(unsigned int Flags);
CUresult CUDAAPI cuMemAlloc(CUdeviceptr *dptr, size_t bytesize);
    #define cuMemcpy                            __CUDA_API_PTDS(cuMemcpy)
    #define cuLaunchKernel                      __CUDA_API_PTSZ(cuLaunchKernel)
CUresult CUDAAPI cuLaunchKernel(CUfunction f, CUstream hStream);
"""


def write_wheel(folder: Path, name: str, version: str, tag: str, files: dict[str, bytes]) -> Path:
    info = f"{name}-{version}.dist-info"
    files = {
        **files,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n".encode(),
        f"{info}/WHEEL": f"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: false\nTag: py3-none-{tag}\n".encode(),
    }
    record = "".join(f"{file},sha256={_base64_digest(data)},{len(data)}\n" for file, data in files.items()) + f"{info}/RECORD,,\n"
    path = folder / f"{name}-{version}-py3-none-{tag}.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for file, data in {**files, f"{info}/RECORD": record.encode()}.items():
            archive.writestr(file, data)
    return path


def _base64_digest(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


def runtime_files(platform: str) -> dict[str, bytes]:
    shared = {"nvidia/__init__.py": b"", "nvidia/cu/include/cuda.h": CUDA_H.encode(), "nvidia/cu/include/cccl/cub/cub.cuh": b"// cub\n"}
    if platform.startswith("win"):
        return {**shared, "nvidia/cu/lib/x64/cudart.lib": b"!<arch>\n"}
    return {**shared, "nvidia/cu/lib/libcudart.so.1": b"\x7fELF cudart " + platform.encode()}


def blas_files(platform: str) -> dict[str, bytes]:
    shared = {"nvidia/cublas/include/__init__.py": b"", "nvidia/cublas/include/cublasLt.h": b"// cublasLt\n"}
    if platform.startswith("win"):
        return shared
    return {**shared, "nvidia/cublas/lib/libcublasLt.so.1": b"\x7fELF cublasLt " + platform.encode()}


@dataclass(frozen=True)
class Index:
    """The folders of a test: the index, the declared and locked roots, and uv's cache."""

    wheels: Path
    toolkits: Path
    cache: Path
    environment: dict[str, str]

    @property
    def lock_file(self) -> Path:
        return self.toolkits / f"{ROOT}.txt"

    def leftovers(self) -> list[str]:
        return [path.name for path in self.cache.iterdir() if path.name.endswith(".staging")]

    def start(self, code: str, platform: str = "linux-x86_64") -> subprocess.Popen[str]:
        """Another process that runs ``code`` and then installs the root."""
        program = f"""
import os, signal, sys
from pathlib import Path
from ci import matrix
from ci.toolkit import layout, manifest, provision, roots, uv
roots.TOOLKITS = Path({str(self.toolkits)!r})
{code}
print(provision.install({ROOT!r}, matrix.load().platform({platform!r})).cached, flush=True)
"""
        pipe = subprocess.PIPE
        return subprocess.Popen(
            [sys.executable, "-c", program],
            cwd=matrix.REPOSITORY,
            env={**os.environ, **self.environment},
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
            encoding="utf-8",
        )


def index_in(folder: Path) -> Index:
    return Index(
        folder / "wheels",
        folder / "toolkits",
        folder / "cache",
        {
            "UV_FIND_LINKS": str(folder / "wheels"),
            "UV_NO_INDEX": "1",
            "UV_CACHE_DIR": str(folder / "uv"),
            "UV_OFFLINE": "1",
            "MLX_CUDA_TOOLKITS": str(folder / "cache"),
        },
    )


def make_index(folder: Path) -> Index:
    """Two packages for three platforms, and a root of both."""
    index = index_in(folder)
    for path in (index.wheels, index.toolkits, index.cache):
        path.mkdir()
    for platform, tag in TAGS.items():
        write_wheel(index.wheels, "acme_runtime", "1.0", tag, runtime_files(platform))
        write_wheel(index.wheels, "acme_blas", "2.0", tag, blas_files(platform))
    declare(index)
    return index


@contextmanager
def in_force(index: Index) -> Iterator[Index]:
    """Installs ask this index alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(roots, "TOOLKITS", index.toolkits)
        for name, value in index.environment.items():
            patch.setenv(name, value)
        roots.declared.cache_clear()
        yield index
    roots.declared.cache_clear()


def declare(index: Index, extra: str = "", packages: tuple[str, ...] = ("acme-runtime==1.0", "acme-blas==2.0")) -> None:
    text = f'[roots."{ROOT}"]\nabout = "a test"\nunpacked_mib = 1\npackages = {list(packages)!r}\n{extra}\n'
    (index.toolkits / "toolkits.toml").write_text(text, "utf-8")
    roots.declared.cache_clear()


def write_lock(index: Index) -> None:
    index.lock_file.write_text(lock.resolve(roots.find(ROOT)), "utf-8")


def run(*arguments: str) -> int:
    return command_line.main(["toolkit", *arguments])


def problem(*names: str, platform: matrix.Platform = LINUX) -> str:
    with pytest.raises(EnvironmentProblem) as caught:
        toolkit.install(names or [ROOT], platform)
    assert "fix: " in str(caught.value)
    return str(caught.value)
