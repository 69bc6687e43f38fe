"""What the CMake build needs of the matrix and the toolkit roots, written as a CMake file.

``python -m ci.cmake --output matrix.cmake --platform host --cuda 12.8 13.0 --arch declared`` is called by ``cmake/Toolkit.cmake``
in the isolated environment of any build front end, so it imports no more than ``tomli`` and ``platformdirs``.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from . import gpu, matrix, toolkit
from .errors import CiError, EnvironmentProblem

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

Architectures = tuple[tuple[str, ...], tuple[str, ...]]


def architectures(cuda: matrix.Cuda, requested: Sequence[str]) -> Architectures:
    """Return the architectures to build as machine code and as PTX: the declared ones, this machine's, or a list."""
    if list(requested) == ["declared"]:
        return cuda.sass, cuda.ptx
    if list(requested) == ["native"]:
        requested = [str(capability) for capability in gpu.capabilities()]
    try:
        return cuda.machine_code(requested), ()
    except ValueError:
        names = " ".join(requested)
        raise EnvironmentProblem(f"unknown architectures {names!r}", cure="use 'declared', 'native', or numbers such as 90") from None


def label(architectures: Architectures) -> str:
    """Return architectures in a form to show, such as ``sm_80 sm_90 + compute_80``."""
    sass, ptx = architectures
    machine = " ".join(f"sm_{architecture}" for architecture in sass)
    return f"{machine} + {' '.join(f'compute_{architecture}' for architecture in ptx)}" if ptx else machine


def _existing(path: Path) -> Path:
    if not path.exists():
        raise EnvironmentProblem(f"the toolkit root lacks {path}", cure="python -m ci toolkit verify")
    return path


def _only(candidates: Iterable[Path], what: str) -> Path:
    found = sorted(candidates)
    if not found:
        raise EnvironmentProblem(f"the toolkit root lacks {what}", cure="python -m ci toolkit verify")
    return found[0]


def _linkable(root: Path, name: str, system: matrix.System) -> Path:
    if system == "windows":
        return _existing(root / "lib" / f"{name.removeprefix('lib')}.lib")
    return _existing(root / "lib" / f"{name}.so")


def _loadable(root: Path, name: str) -> Path:
    """Return a library that the running interpreter can load."""
    if sys.platform == "win32":
        return _only((path for path in (root / "bin").glob(f"{name.removeprefix('lib')}*.dll") if "builtins" not in path.name), name)
    return _existing(root / "lib" / f"{name}.so")


def _version(root: Path, package: str) -> str:
    """Return the version of a locked package, whose name may end in the CUDA major."""
    found = _only((root / "site").glob(f"{package}*.dist-info"), f"the metadata of {package}")
    return found.name.split("-")[1].removesuffix(".dist")


def _settings(cuda: matrix.Cuda, platform: matrix.Platform, host: matrix.Platform, requested: Sequence[str]) -> Iterator[tuple[str, str]]:
    cuda_root, mlx_root, frontend_root = (toolkit.root_path(name, platform) for name in cuda.roots)
    host_root = toolkit.root_path(cuda.roots[0], host)
    built = architectures(cuda, requested)
    driver = "cuda.lib" if platform.system == "windows" else "stubs/libcuda.so"
    yield "MODULE", cuda.module
    yield "SASS", ";".join(built[0])
    yield "PTX", ";".join(built[1])
    yield "LABEL", label(built)
    yield "RPATH", ";".join(cuda.rpath())
    yield "ROOT", cuda_root.as_posix()
    yield "HOST_ROOT", host_root.as_posix()
    yield "MLX_ROOT", mlx_root.as_posix()
    yield "CUDNN_FRONTEND", frontend_root.as_posix()
    yield "NVRTC", _loadable(host_root, "libnvrtc").as_posix()
    yield "NVFATBIN", _loadable(host_root, "libnvfatbin").as_posix()
    yield "NVRTC_VERSION", _version(host_root, "nvidia_cuda_nvrtc")
    yield "NVFATBIN_VERSION", _version(host_root, "nvidia_nvfatbin")
    for name in ("cublasLt", "cudnn", "cudart"):
        yield f"{name.upper()}_LIBRARY", _linkable(cuda_root, f"lib{name}", platform.system).as_posix()
    yield "DRIVER_LIBRARY", _existing(cuda_root / "lib" / driver).as_posix()


def render(versions: Sequence[str], platform: matrix.Platform, requested: Sequence[str]) -> str:
    """Return the CMake file's text."""
    declared = matrix.load()
    host = matrix.host_platform()
    lines = [
        f'set(MLX_CUDA_MLX_VERSION "{declared.mlx}")',
        f'set(MLX_CUDA_TOOLKITS "{toolkit.roots.cache_directory().as_posix()}")',
        f'set(MLX_CUDA_TARGET_PLATFORM "{platform.name}")',
        f'set(MLX_CUDA_HOST_PLATFORM "{host.name}")',
    ]
    for version in versions:
        if version not in declared.cuda:
            raise EnvironmentProblem(f"unknown CUDA version {version!r}", cure=f"use {' or '.join(declared.cuda)}")
        prefix = f"MLX_CUDA_{version.replace('.', '_')}"
        # A bracket argument takes the text as it is: $ORIGIN and spaces in paths need no escape.
        lines += [f"set({prefix}_{key} [==[{value}]==])" for key, value in _settings(declared.cuda[version], platform, host, requested)]
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m ci.cmake", description=__doc__)
    parser.add_argument("--output", type=Path, required=True, help="the CMake file to write")
    parser.add_argument("--platform", default="host", help="platform of the roots to build against (default: this machine's)")
    parser.add_argument("--cuda", nargs="+", required=True, metavar="VERSION", help=" or ".join(matrix.load().cuda))
    parser.add_argument("--arch", nargs="+", required=True, help="'declared', 'native', or numbers such as 90")
    args = parser.parse_args(argv)
    try:
        platform = matrix.host_platform() if args.platform == "host" else matrix.load().platform(args.platform)
        text = render(args.cuda, platform, args.arch)
    except CiError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    # An unchanged file keeps its time, so that nothing is configured or built again for it.
    if not args.output.exists() or args.output.read_text("utf-8") != text:
        args.output.write_text(text, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
