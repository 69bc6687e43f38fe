"""Which C++ compiler a build takes: a cross compiler where the platform is not this machine's, and none but the declared ones.

A runner's compiler changes without notice, and the error that follows is found late and understood later. So CMake's configure step, before
anything is compiled, has its compiler judged by ``python -m ci.build.compiler ID VERSION PLATFORM``, which needs no more than ``tomli``.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path

from .. import matrix
from ..errors import CheckFailed, EnvironmentProblem, ending

TOOLCHAINS = matrix.REPOSITORY / "cmake" / "toolchains"


def toolchain(platform: matrix.Platform) -> Path | None:
    """The CMake toolchain file that builds for a platform here; none where that is this machine's own."""
    if platform == matrix.host_platform():
        return None
    path = TOOLCHAINS / f"{platform.name}.cmake"
    if not path.is_file():
        raise EnvironmentProblem(f"this machine has no compiler for {platform.name}", fix=f"build on a machine of it ({platform.runner})")
    (name,) = re.findall(r"set\(CMAKE_CXX_COMPILER (\S+)\)", path.read_text("utf-8"))
    if shutil.which(name) is None:
        target, _, language = name.rpartition("-")  # Debian and Ubuntu name a package g++-aarch64-linux-gnu
        fix = f"apt-get install {language}-{target}"
        raise EnvironmentProblem(f"{name} is not installed, which {platform.name} is built with here", fix=fix)
    return path


def tools_first() -> dict[str, str]:
    """The environment in which tools installed beside this interpreter (cmake, ninja) are found first, activated or not."""
    scripts = str(Path(sys.executable).parent)
    return os.environ | {"PATH": scripts + os.pathsep + os.environ.get("PATH", "")}


def judge(identifier: str, version: str, platform: matrix.Platform) -> None:
    """Raise :class:`CheckFailed`, with the fix, unless ci/matrix/matrix.toml declares this compiler, as CMake names and numbers it."""
    declared = matrix.load().compilers[platform.system]
    if identifier == declared.id and version in declared:
        return
    fix = f"install g++ {declared.minimum} or newer, and name it in CXX if it is not the first on PATH"
    if platform.system == "windows":
        fix = f"install Visual Studio {declared.studio} with C++ toolset {declared.toolset}, and build in: python -m ci msvc-env -- COMMAND"
    raise CheckFailed(f"the C++ compiler is {identifier} {version}, expected {declared} for {platform.name}\n  fix: {fix}")


def main(identifier: str, version: str, platform: str) -> int:
    judge(identifier, version, matrix.platform(platform))
    return 0


if __name__ == "__main__":
    sys.exit(ending(lambda: main(*sys.argv[1:])))
