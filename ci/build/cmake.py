"""Write what the CMake build needs of the matrix and the toolkit roots, as a CMake file.

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
    cuda_root, *others = (toolkit.root_path(name, platform) for name in cuda.roots)
    driver = "cuda.lib" if platform.system == "windows" else "stubs/libcuda.so"
    yield "MODULE", cuda.module
    yield "RPATH", ";".join(cuda.rpath())
    yield "ROOT", cuda_root.as_posix()
    yield from zip(("MLX_ROOT", "CUDNN_FRONTEND"), (root.as_posix() for root in others), strict=False)
    for library in cuda.libraries:
        if library.needed and library.name != "libmlx":  # which is in a root of its own, or the user's
            name = library.name.removeprefix("lib")
            yield f"{name.upper()}_LIBRARY", _linkable(cuda_root, library.name, platform.system).as_posix()
    yield "DRIVER_LIBRARY", _existing(cuda_root / "lib" / driver).as_posix()


def render(versions: Sequence[str], platform: matrix.Platform) -> str:
    """Return the CMake file's text."""
    declared = matrix.load()
    if declared.cuda and not versions:
        known = ";".join(declared.cuda)
        fix = f'give it one version or more, as in -DMLX_CUDA_VERSIONS="{known}", or omit it to build for all'
        raise EnvironmentProblem("MLX_CUDA_VERSIONS is empty: the wheel would have no native module", fix=fix)
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
