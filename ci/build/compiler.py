"""``python -m ci compiler``: which C++ compiler CMake would use, and whether it is the declared one, before anything is compiled.

A runner's compiler changes without notice, and the error that follows is found late and understood later. CMake itself is asked, with
a project of one line in the environment that the build gets, so that CXX, CMAKE_GENERATOR and its toolset count as they will then. The
configure step of the build judges its own compiler by the same function, which needs no more than the standard library.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import matrix
from ..errors import CheckFailed, CiError, EnvironmentProblem

if TYPE_CHECKING:
    import argparse

TOOLCHAINS = matrix.REPOSITORY / "cmake" / "toolchains"
PROBE = """\
cmake_minimum_required(VERSION 3.28)
project(probe LANGUAGES CXX)
file(WRITE "${CMAKE_BINARY_DIR}/compiler" "${CMAKE_CXX_COMPILER_ID}\\n${CMAKE_CXX_COMPILER_VERSION}\\n${CMAKE_CXX_COMPILER}")
"""


@dataclass(frozen=True)
class Compiler:
    """A compiler as CMake names it: MSVC's 19.44 is the toolset 14.44."""

    id: str
    version: str
    path: str = ""

    def __str__(self) -> str:
        return f"{self.id} {self.version}" + (f" ({self.path})" if self.path else "")


def toolchain(platform: matrix.Platform) -> Path | None:
    """The CMake toolchain file that builds for a platform here; none where that is this machine's own."""
    if platform == matrix.host_platform():
        return None
    path = TOOLCHAINS / f"{platform.name}.cmake"
    if not path.is_file():
        raise EnvironmentProblem(f"nothing here compiles for {platform.name}", cure=f"build on a machine of it ({platform.runner})")
    (name,) = re.findall(r"set\(CMAKE_CXX_COMPILER (\S+)\)", path.read_text("utf-8"))
    if shutil.which(name) is None:
        raise EnvironmentProblem(
            f"{name} is not installed, which {platform.name} is built with here", cure=f"apt-get install {package(name)}"
        )
    return path


def package(compiler: str) -> str:
    """The Debian and Ubuntu package of a cross compiler: ``g++-aarch64-linux-gnu`` has ``aarch64-linux-gnu-g++``."""
    target, _, language = compiler.rpartition("-")
    return f"{language}-{target}"


def used(platform: matrix.Platform) -> Compiler:
    """Let CMake choose a compiler as it will for the build."""
    file = toolchain(platform)
    with tempfile.TemporaryDirectory(prefix="mlx-cuda-compiler-") as folder:
        Path(folder, "CMakeLists.txt").write_text(PROBE, "utf-8")
        command = ["cmake", "-S", folder, "-B", f"{folder}/build", *([f"-DCMAKE_TOOLCHAIN_FILE={file}"] if file else [])]
        environment = tools_first()
        program = shutil.which(command[0], path=environment["PATH"])
        if program is None:
            raise EnvironmentProblem("cmake is not installed", cure="install the dependency group 'factory' of pyproject.toml")
        done = subprocess.run([program, *command[1:]], check=False, capture_output=True, text=True, env=environment)
        if done.returncode:
            raise EnvironmentProblem(f"CMake finds no working C++ compiler:\n{done.stderr.strip()}", cure=_cure(platform))
        return Compiler(*Path(folder, "build", "compiler").read_text("utf-8").splitlines())


def tools_first() -> dict[str, str]:
    """The environment in which tools installed beside this interpreter (cmake, ninja) are found first, activated or not."""
    scripts = str(Path(sys.executable).parent)
    return os.environ | {"PATH": scripts + os.pathsep + os.environ.get("PATH", "")}


def judge(compiler: Compiler, platform: matrix.Platform) -> None:
    """Raise :class:`CheckFailed`, with the cure, unless ci/matrix/matrix.toml declares this compiler for the platform's system."""
    declared = matrix.load().compilers[platform.system]
    if compiler.id == declared.id and compiler.version in declared:
        return
    raise CheckFailed(f"the C++ compiler is {compiler}, expected {declared} for {platform.name}\n  cure: {_cure(platform)}")


def check(platform: matrix.Platform) -> Compiler:
    """Return the compiler that the build will use, if it is a declared one."""
    compiler = used(platform)
    judge(compiler, platform)
    return compiler


def _cure(platform: matrix.Platform) -> str:
    declared = matrix.load().compilers[platform.system]
    if platform.system == "windows":
        chosen = f"CMAKE_GENERATOR={declared.generator} and CMAKE_GENERATOR_TOOLSET={declared.toolset}"
        return f"install Visual Studio 2022 with its C++ tools, and set {chosen}"
    return f"install g++ {declared.minimum} or newer, and name it in CXX if it is not the first on PATH"


def run(args: argparse.Namespace) -> int:
    platform = matrix.load().platform(args.platform) if args.platform else matrix.host_platform()
    compiler = used(platform)
    problem = None
    try:
        judge(compiler, platform)
    except CheckFailed as failure:
        problem = failure
    if args.json:
        declared = asdict(matrix.load().compilers[platform.system])
        print(json.dumps({"platform": platform.name, "compiler": asdict(compiler), "declared": declared, "ok": problem is None}, indent=2))
        return 1 if problem else 0
    if problem:
        raise problem
    print(f"{compiler}: as declared for {platform.name} ({matrix.load().compilers[platform.system]})")
    return 0


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "compiler",
        help="check that the C++ compiler is the declared one",
        description="Ask CMake which C++ compiler it would use, and compare it with the declared one, as the build's configure step does.",
        epilog="Exit codes: 0 as declared, 1 another one, 2 none found.",
    )
    parser.add_argument("--platform", choices=list(matrix.load().platforms), help="what to compile for (default: this machine's platform)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def main(argv: list[str]) -> int:
    """``python -m ci.build.compiler ID VERSION PLATFORM``: what CMake's configure step calls."""
    identifier, version, name = argv
    try:
        platform = matrix.host_platform() if name == "host" else matrix.load().platform(name)
        judge(Compiler(identifier, version), platform)
    except CiError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
