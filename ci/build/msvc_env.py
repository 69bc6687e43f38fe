"""``python -m ci msvc-env``: run a command in an environment in which CMake finds the declared C++ compiler.

On Windows, that is a developer prompt of Visual Studio with the declared toolset and with Ninja, which compiles on all cores. On other
systems the command runs unchanged. Exits with the command's exit code. Example: python -m ci msvc-env -- python -m cibuildwheel
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from .. import matrix, process
from ..errors import EnvironmentProblem

VSWHERE = "Microsoft Visual Studio/Installer/vswhere.exe"  # below Program Files (x86), which is where every Visual Studio puts it
TOOLS = "Microsoft.VisualStudio.Component.VC.Tools.x86.x64"
COMPILER = "bin/Hostx64/x64/cl.exe"
TELL = "import json, os; print(json.dumps({name.upper(): value for name, value in os.environ.items()}))"  # the same in every code page


def studio(declared: matrix.Compilers) -> Path:
    """The newest installed Visual Studio of the declared major version that has the C++ tools, whatever its edition."""
    program = Path(os.environ.get("PROGRAMFILES(X86)", "C:/Program Files (x86)"), VSWHERE)
    query = ["-latest", "-products", "*", "-version", f"[{declared.studio},{declared.studio + 1})", "-requires", TOOLS]
    fix = f"install Visual Studio {declared.studio}, or its Build Tools, with the component {TOOLS}"
    said = "Visual Studio cannot be queried"
    path = process.output([program, *query, "-property", "installationPath", "-utf8"], said=said, fix=fix, missing=fix).strip()
    if not path:
        raise EnvironmentProblem(f"no Visual Studio {declared.studio} with C++ tools is installed", fix=fix)
    return Path(path)


def toolset(folder: Path, declared: matrix.Compilers) -> str:
    """The full version of the newest toolset of the declared one; vcvarsall.bat does not say what else there is."""
    found = sorted((path.parents[3].name for path in folder.glob(f"VC/Tools/MSVC/*/{COMPILER}")), key=matrix.numbers)
    fitting = [name for name in found if name.startswith(f"{declared.toolset}.")]
    if not fitting:
        raise EnvironmentProblem(
            f"{folder} has no C++ toolset {declared.toolset}, but {', '.join(found) or 'none'}",
            fix=f"add the MSVC build tools v{declared.toolset} for x64 with the Visual Studio Installer",
        )
    return fitting[-1]


def cmd(line: str) -> str:
    """Return the output of Windows' shell. A list of arguments would be quoted by rules that cmd does not have."""
    return subprocess.run(f'cmd /d /s /c "{line}"', check=False, stdout=subprocess.PIPE, encoding="utf-8").stdout


def developer(declared: matrix.Compilers) -> dict[str, str]:
    """The environment of a developer prompt with the declared toolset, in which CMake takes that compiler and Ninja."""
    folder = studio(declared)
    version = toolset(folder, declared)
    batch = folder / "VC/Auxiliary/Build/vcvarsall.bat"
    told = cmd(f'"{batch}" amd64 -vcvars_ver={version} >&2 && "{sys.executable}" -I -c "{TELL}"')
    environment: dict[str, str] = json.loads(told or "{}")
    if (found := environment.get("VCTOOLSVERSION", "none")) != version:
        raise EnvironmentProblem(f"{batch} has set up toolset {found}, expected {version}", fix="start outside of any developer prompt")
    # By name: a g++ that stands on PATH too is not CMake's first choice then, whatever their order.
    return environment | {"CMAKE_GENERATOR": "Ninja", "CXX": "cl"}


def run(args: argparse.Namespace) -> int:
    environment = developer(matrix.load().compilers["windows"]) if matrix.host_platform().system == "windows" else dict(os.environ)
    name, *arguments = args.line
    program = shutil.which(name, path=environment.get("PATH"))  # of the prompt: Windows would look in this process's
    if program is None:
        raise EnvironmentProblem(f"{name} is not found", fix="give a program that is on PATH, after --")
    return subprocess.run([program, *arguments], check=False, env=environment).returncode


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("line", nargs="+", metavar="COMMAND", help="the command and its arguments, after --")
