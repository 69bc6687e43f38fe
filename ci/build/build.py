"""``python -m ci build``: build the wheel (not yet repaired) from the working tree.

The toolkits must be installed: python -m ci toolkit install.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from .. import console, device, matrix, process, toolkit
from ..errors import CheckFailed
from . import compiler


def add_selection(parser: argparse.ArgumentParser) -> None:
    """Add the options that narrow a developer's build."""
    parser.add_argument(
        "--cuda",
        action="append",
        choices=list(matrix.load().cuda),
        metavar="VERSION",
        help=f"build only the native module of this CUDA version (repeatable; default: {', '.join(matrix.load().cuda)})",
    )
    parser.add_argument(
        "--arch",
        action=console.Architectures,
        nargs="+",
        default=["declared"],
        help="GPUs: compute capabilities such as 80,90, compute_80 for PTX, 'native' for this machine's GPU, or 'declared' for those of "
        "ci/matrix/matrix.toml (default)",
    )
    console.add_platform(parser, "build for another platform, with the cross compiler of cmake/toolchains/")


def selected(args: argparse.Namespace) -> list[str]:
    """Return the CUDA versions to build for."""
    return sorted(set(args.cuda)) if args.cuda else list(matrix.load().cuda)


def build_wheel(
    versions: Sequence[str],
    architectures: Sequence[str],
    output: Path,
    *,
    platform: matrix.Platform | None = None,
    verbose: bool = False,
) -> Path:
    """Build the wheel into ``output`` and return its path; nothing is left there when the build fails.

    The build tree ``build/`` stays, so a second build repeats only what an edit touched. A developer's selection has a tree of its
    own, and does not undo that; so has each platform, by the wheel's tag.
    """
    settings = {
        "cmake.define.MLX_CUDA_VERSIONS": ";".join(versions),
        "cmake.define.MLX_CUDA_ARCHITECTURES": ";".join(architectures),
    }
    if list(versions) != list(matrix.load().cuda) or list(architectures) != ["declared"]:
        name = "-".join([*versions, *architectures])
        settings["build-dir"] = f"build/{{wheel_tag}}-{name}"
    environment = compiler.tools_first()
    for variable in (toolkit.roots.PREBUILT, device.store.VARIABLE):  # CMake runs elsewhere
        if (given := environment.get(variable)) and given != "off":
            environment[variable] = str(Path(given).absolute())
    if platform and (toolchain := compiler.toolchain(platform)):
        settings["cmake.define.CMAKE_TOOLCHAIN_FILE"] = str(toolchain)
        settings["cmake.define.MLX_CUDA_PLATFORM"] = platform.name
        # Python's own name for the variable: its sysconfig, and with it the wheel's tag, speak of the target.
        environment["_PYTHON_HOST_PLATFORM"] = platform.name
    if verbose:
        settings["build.verbose"] = "true"
    output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output, prefix=".partial-") as partial:
        command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", partial]
        command += [f"--config-setting={key}={value}" for key, value in settings.items()]
        status = process.run([*command, matrix.REPOSITORY], env=environment, show=True).returncode
        if status:
            raise CheckFailed("the build failed; the compiler's output is above")
        (wheel,) = Path(partial).glob("*.whl")
        return Path(shutil.move(wheel, output / wheel.name))


def run(args: argparse.Namespace) -> int:
    platform = matrix.platform(args.platform)
    device.plan.sources(args.arch)
    print(build_wheel(selected(args), args.arch, args.output, platform=platform, verbose=args.verbose))
    return 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_selection(parser)
    parser.add_argument("-o", "--output", type=Path, default=Path("dist"), help="output directory (default: dist)")
    parser.add_argument("-v", "--verbose", action="store_true", help="show every command")
