"""The inputs of the CMake build from the matrix and the toolkit roots, written as a CMake file.

``python -m ci.build.cmake --output matrix.cmake --platform host --cuda 12.8 13.0`` is called by ``cmake/Toolkit.cmake``
in the isolated environment of any build front end, so it imports no more than ``tomli`` and ``platformdirs``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from .. import matrix, toolkit
from ..errors import EnvironmentProblem, ending
from ..files import write_changed


def _existing(path: Path) -> Path:
    if not path.exists():
        raise EnvironmentProblem(f"the toolkit root lacks {path}", fix="python -m ci toolkit verify")
    return path


def _linkable(root: Path, name: str, system: matrix.System) -> Path:
    if system == "windows":
        return _existing(root / "lib" / f"{name.removeprefix('lib')}.lib")
    return _existing(root / "lib" / f"{name}.so")


def _settings(cuda: matrix.Cuda, platform: matrix.Platform) -> Iterator[tuple[str, str]]:
    cuda_root, mlx_root, frontend_root = (toolkit.root_path(name, platform) for name in cuda.roots)
    driver = "cuda.lib" if platform.system == "windows" else "stubs/libcuda.so"
    yield "MODULE", cuda.module
    yield "RPATH", ";".join(cuda.rpath())
    yield "ROOT", cuda_root.as_posix()
    yield "MLX_ROOT", mlx_root.as_posix()
    yield "CUDNN_FRONTEND", frontend_root.as_posix()
    for name in ("cublasLt", "cudnn", "cudart"):
        yield f"{name.upper()}_LIBRARY", _linkable(cuda_root, f"lib{name}", platform.system).as_posix()
    yield "DRIVER_LIBRARY", _existing(cuda_root / "lib" / driver).as_posix()


def render(versions: Sequence[str], platform: matrix.Platform) -> str:
    """Return the CMake file's text."""
    declared = matrix.load()
    lines = [
        f'set(MLX_CUDA_MLX_VERSION "{declared.mlx}")',
        f'set(MLX_CUDA_TOOLKITS "{toolkit.roots.cache_directory().as_posix()}")',
        f'set(MLX_CUDA_TARGET_PLATFORM "{platform.name}")',
        f'set(MLX_CUDA_HOST_PLATFORM "{matrix.host_platform().name}")',
    ]
    for version in versions:
        if version not in declared.cuda:
            raise EnvironmentProblem(f"unknown CUDA version {version!r}", fix=f"use {' or '.join(declared.cuda)}")
        prefix = f"MLX_CUDA_{version.replace('.', '_')}"
        # In a bracket argument, $ORIGIN and spaces in paths need no escape.
        lines += [f"set({prefix}_{key} [==[{value}]==])" for key, value in _settings(declared.cuda[version], platform)]
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m ci.build.cmake", description=__doc__)
    parser.add_argument("--output", type=Path, required=True, help="the CMake file to write")
    parser.add_argument("--platform", default="host", help="platform of the roots to build against (default: this machine's)")
    parser.add_argument("--cuda", nargs="*", default=[], metavar="VERSION", help=" or ".join(matrix.load().cuda))
    args = parser.parse_args(argv)

    def write() -> int:
        write_changed(args.output, render(args.cuda, matrix.platform(args.platform)).encode())
        return 0

    return ending(write)


if __name__ == "__main__":
    sys.exit(main())
