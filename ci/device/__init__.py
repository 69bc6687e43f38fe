"""``python -m ci device``: compile the device code, for the wheels of all platforms.

Compiles each kernel ahead of time for the declared GPUs. The output directory gets a packed fatbin for each source, and a manifest of
SHA-256 digests. A build with MLX_CUDA_DEVICE_CODE set to that directory uses it instead of compiling.

Compiled code is kept in the user's cache; MLX_CUDA_DEVICE_STORE names another directory, or 'off'. CMAKE_BUILD_PARALLEL_LEVEL sets the
number of parallel compilers.

Exit codes: 0 success, 1 a source does not compile, 2 usage or environment.
"""

# NVRTC turns a source into PTX, ptxas turns that into the SASS of each GPU, nvFatbin packs both. All three are of one locked root
# and run without a GPU. The result does not depend on the platform or on the CUDA major of the module that loads it, so it is made once.
# The CMake build calls ``python -m ci.device`` in the isolated environment of any build front end, so this package imports no more than
# ``tomli`` and ``platformdirs``.

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from .. import console
from ..errors import EnvironmentProblem
from ..files import write_changed
from ..toolkit.roots import PREBUILT
from . import manifest, plan, store
from .build import build


def make(
    output: Path, requested: Sequence[str], *, only: Sequence[str] = (), header: Path | None = None, depfile: Path | None = None
) -> manifest.Manifest:
    """Write the device code of the working tree into ``output``: compiled, or copied from the folder that ``PREBUILT`` names."""
    sources = plan.sources(requested)
    if unknown := {*only} - {each.name for each in sources}:
        known = ", ".join(each.name for each in sources)
        raise EnvironmentProblem(f"no source for these GPUs is called {', '.join(sorted(unknown))}", fix=f"use one of {known}")
    sources = [each for each in sources if not only or each.name in only]
    given = os.environ.get(PREBUILT)
    made = manifest.take(Path(given), sources, output) if given else build(sources, output, store.chosen(output))
    if header:
        write_changed(header, f'#define MLX_CUDA_DEVICE_CODE "{made.digest}"\n'.encode())
    if depfile:
        names = [str(path).replace("\\", "/").replace(" ", "\\ ") for path in plan.files(sources)]
        target = (output / manifest.NAME).as_posix().replace(" ", "\\ ")
        write_changed(depfile, f"{target}: {' '.join(names)}\n".encode())
    return made


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    arch = "GPUs: compute capabilities such as 80,90, compute_80 for PTX, 'native', or 'declared' (default)"
    add("--arch", action=console.Architectures, nargs="+", default=["declared"], help=arch)
    add("--source", nargs="+", default=(), metavar="NAME", help="only these sources, such as flash, to test that they compile")
    add("-o", "--output", type=Path, default=Path("build/device"), help="output directory (default: %(default)s)")
    add("--header", type=Path, help="also write a C++ header with the manifest's digest")
    add("--depfile", type=Path, help="also write a dependency file for the build system")


def run(args: argparse.Namespace) -> int:
    made = make(args.output, args.arch, only=args.source, header=args.header, depfile=args.depfile)
    size = sum(each.size for each in made.fatbins.values()) / 2**20
    print(f"device code: {len(made.fatbins)} fatbins, {size:.2f} MiB, {made.digest[:12]}")
    return 0
