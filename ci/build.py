"""``python -m ci build``: compile the wheel for this machine (or cross-build it) from the working tree."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import matrix
from .errors import CheckFailed, EnvironmentProblem

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence


def add_selection(parser: argparse.ArgumentParser) -> None:
    """Add the options that narrow a developer's build."""
    parser.add_argument(
        "--cuda",
        action="append",
        choices=list(matrix.load().cuda),
        metavar="VERSION",
        help=f"build the native module of this CUDA version only, repeatable (default: {', '.join(matrix.load().cuda)})",
    )
    parser.add_argument(
        "--arch",
        nargs="+",
        default=["declared"],
        help="GPU architectures: 'declared' (ci/matrix.toml), 'native' for this machine's GPU, or numbers such as 90",
    )


def selected(args: argparse.Namespace) -> list[str]:
    """Return the CUDA versions that were asked for."""
    return sorted(set(args.cuda)) if args.cuda else list(matrix.load().cuda)


def build_wheel(versions: Sequence[str], architectures: Sequence[str], output: Path, *, verbose: bool = False) -> Path:
    """Build the wheel into ``output`` and return its path; nothing is left there when the build fails.

    The build tree ``build/`` stays, so a second build repeats only what an edit touched. A developer's selection has a tree of its
    own, and does not undo that.
    """
    settings = {
        "cmake.define.MLX_CUDA_VERSIONS": ";".join(versions),
        "cmake.define.MLX_CUDA_ARCHITECTURES": ";".join(architectures),
    }
    if list(versions) != list(matrix.load().cuda) or list(architectures) != ["declared"]:
        name = "-".join([*versions, *architectures])
        settings["build-dir"] = f"build/{{wheel_tag}}-{name}"
    if verbose:
        settings["build.verbose"] = "true"
    output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output, prefix=".partial-") as partial:
        command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", partial]
        command += [f"--config-setting={key}={value}" for key, value in settings.items()]
        status = subprocess.run([*command, str(matrix.REPOSITORY)], check=False, env=_environment(), stdout=sys.stderr).returncode
        if status:
            raise CheckFailed("the build failed; the compiler's words are above")
        (wheel,) = Path(partial).glob("*.whl")
        return Path(shutil.move(wheel, output / wheel.name))


def _environment() -> dict[str, str]:
    """Tools installed beside this interpreter (cmake, ninja) are found first, also when its environment is not activated."""
    scripts = str(Path(sys.executable).parent)
    return os.environ | {"PATH": scripts + os.pathsep + os.environ.get("PATH", "")}


def run(args: argparse.Namespace) -> int:
    if shutil.which("c++") is None and shutil.which("g++") is None and shutil.which("cl") is None and "CXX" not in os.environ:
        raise EnvironmentProblem("no C++ compiler found", cure="install g++ or Visual Studio's C++ tools, or set CXX")
    print(build_wheel(selected(args), args.arch, args.output, verbose=args.verbose))
    return 0


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "build",
        help="build the wheel (not yet repaired) from the working tree",
        description="Compile the wheel from the working tree. The toolkits must be installed: python -m ci toolkit install.",
    )
    add_selection(parser)
    parser.add_argument("-o", "--output", type=Path, default=Path("dist"), help="folder for the wheel (default: dist)")
    parser.add_argument("-v", "--verbose", action="store_true", help="show every command")
    parser.set_defaults(run=run)
