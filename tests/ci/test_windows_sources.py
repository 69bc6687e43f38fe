"""The C++ sources as Windows compiles them, by mingw-w64: its headers and type sizes are Windows', so POSIX-isms and `long`s show.

Only the syntax is checked. MLX's C++ interface on Windows is MSVC's, which GCC cannot link with; test_windows_link.py looks at that side.
MLX's headers, most of the time that a file takes, are parsed once for all files. At night (``--place nightly``) each file is checked by
itself: it has to include what it uses.
"""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from ci import matrix
from ci.build import compiler
from ci.matrix import Platform

SOURCES = matrix.REPOSITORY / "src"
GXX = "x86_64-w64-mingw32-g++-posix"
TOOLCHAIN = f"set(CMAKE_SYSTEM_NAME Windows)\nset(CMAKE_SYSTEM_PROCESSOR AMD64)\nset(CMAKE_CXX_COMPILER {GXX})\n"
# Most sources include them.
COMMON = ("algorithm", "mlx/ops.h", "mlx/primitives.h", "mlx/transforms.h", "mlx/backend/cuda/device.h", "mlx/backend/cuda/utils.h")
# What Windows' own pyconfig.h says, as far as Python.h asks: it is not in the headers of another system's Python.
PYCONFIG = """\
#define MS_WINDOWS
#define MS_WIN32
#define MS_WIN64
#define NT_THREADS
#define WITH_THREAD
#define HAVE_DECLSPEC_DLL
#define Py_ENABLE_SHARED
#define HAVE_STDINT_H 1
#define HAVE_STDDEF_H 1
#define SIZEOF_SHORT 2
#define SIZEOF_INT 4
#define SIZEOF_LONG 4
#define SIZEOF_LONG_LONG 8
#define SIZEOF_FLOAT 4
#define SIZEOF_DOUBLE 8
#define SIZEOF_VOID_P 8
#define SIZEOF_SIZE_T 8
#define SIZEOF_WCHAR_T 2
#define SIZEOF_TIME_T 8
#define SIZEOF_FPOS_T 8
#define ALIGNOF_MAX_ALIGN_T 8
#define HAVE_PY_SSIZE_T 1
#define PY_SSIZE_T_MAX 0x7fffffffffffffffLL
typedef long long Py_ssize_t;
"""


class Command(NamedTuple):
    """How CMake compiles one file for Windows."""

    file: Path
    folder: Path
    arguments: list[str]

    def of(self, *sources: str) -> list[str]:
        """The same for other files, and without an object file."""
        rest = list(self.arguments)
        rest.remove("-c")
        del rest[rest.index("-o") : rest.index("-o") + 2]
        rest.remove(str(self.file))
        return [*rest, "-Wpedantic", *sources]


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory, installed_root: Callable[[str, Platform], Path]) -> list[Command]:
    """The commands of the project's real configure step, for Windows and the newest CUDA version."""
    if sys.platform != "linux" or not shutil.which(GXX):
        pytest.skip(f"{GXX} is not installed (Debian: apt-get install g++-mingw-w64-x86-64-posix)")
    cuda = list(matrix.load().cuda.values())[-1]
    for root in cuda.roots:
        installed_root(root, matrix.load().platform("win-amd64"))
    folder = tmp_path_factory.mktemp("windows-sources")
    (folder / "mingw.cmake").write_text(TOOLCHAIN)
    headers = folder / "include"
    shutil.copytree(sysconfig.get_path("include"), headers)
    (headers / "pyconfig.h").write_text(PYCONFIG)
    # CMake wants Python's import libraries to exist; nothing links here.
    libraries = {"Python_SABI_LIBRARY": folder / "python3.lib", "Python_LIBRARY": folder / f"python3{sys.version_info.minor}.lib"}
    for path in libraries.values():
        path.touch()
    definitions = {
        "CMAKE_TOOLCHAIN_FILE": folder / "mingw.cmake",
        "CMAKE_EXPORT_COMPILE_COMMANDS": "ON",
        "MLX_CUDA_PLATFORM": "win-amd64",
        "MLX_CUDA_VERSIONS": cuda.version,
        "MLX_CUDA_ARCHITECTURES": "90",
        "MLX_CUDA_ANY_COMPILER": "ON",
        "Python_EXECUTABLE": sys.executable,
        "Python_INCLUDE_DIR": headers,
        **libraries,
    }
    configure = ["cmake", "-G", "Ninja", "-S", str(matrix.REPOSITORY), "-B", str(folder / "build")]
    configure += [f"-D{name}={value}" for name, value in definitions.items()]
    done = subprocess.run(configure, env=compiler.tools_first(), check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    header = folder / "build" / "include" / "mlx_cuda_device_code.h"  # what the build's first step writes
    header.parent.mkdir()
    header.write_text('#define MLX_CUDA_DEVICE_CODE "0123"\n')
    entries = json.loads((folder / "build" / "compile_commands.json").read_text("utf-8"))
    return [Command(Path(entry["file"]), Path(entry["directory"]), shlex.split(entry["command"])) for entry in entries]


def own(commands: list[Command]) -> list[Command]:
    return [command for command in commands if command.file.is_relative_to(matrix.REPOSITORY / "src")]


class Common(NamedTuple):
    """A header of those that most sources include, beside what the compiler made of it, and the options that this holds for."""

    header: Path
    options: list[str]


@pytest.fixture(scope="module")
def common(commands: list[Command], tmp_path_factory: pytest.TempPathFactory, at_night: bool) -> Common | None:
    if at_night:
        return None
    header = tmp_path_factory.mktemp("common") / "common.h"
    header.write_text("".join(f"#include <{name}>\n" for name in COMMON))
    ((options, count),) = Counter(tuple(command.of()) for command in own(commands)).most_common(1)
    assert count > len(own(commands)) - 5, "the header is parsed for most sources"
    subprocess.run([*options, "-x", "c++-header", str(header)], cwd=commands[0].folder, check=True)
    return Common(header, list(options))


def check(command: Command, source: Path, common: Common | None = None) -> str:
    """What the compiler says of a file, compiled as that command does."""
    included = ["-Winvalid-pch", "-include", str(common.header)] if common and command.of() == common.options else []
    arguments = command.of("-fsyntax-only", *included, str(source))
    return subprocess.run(arguments, cwd=command.folder, check=False, capture_output=True, text=True).stderr


def test_every_source_is_compiled(commands: list[Command]) -> None:
    assert sorted(command.file for command in own(commands)) == sorted((matrix.REPOSITORY / "src").rglob("*.cpp"))


@pytest.mark.parametrize("name", sorted(str(path.relative_to(SOURCES)) for path in SOURCES.rglob("*.cpp")))
def test_sources_hold_on_windows(commands: list[Command], common: Common | None, name: str) -> None:
    """Neither an error nor a warning of -Wall -Wextra -Wpedantic: MSVC has none of the extensions of GCC either."""
    (command,) = (each for each in own(commands) if each.file == SOURCES / name)
    assert check(command, command.file, common) == ""


def test_what_windows_lacks_would_be_noticed(commands: list[Command], common: Common | None, tmp_path: Path) -> None:
    command = next(each for each in own(commands) if not common or each.of() == common.options)
    (tmp_path / "posix.cpp").write_text("#include <dlfcn.h>\n")
    assert "dlfcn.h: No such file" in check(command, tmp_path / "posix.cpp", common)
    (tmp_path / "long.cpp").write_text("static_assert(sizeof(long) == 8);\n")
    assert "static assertion failed" in check(command, tmp_path / "long.cpp", common)
    (tmp_path / "gnu.cpp").write_text("int f(int n) { return ({ n; }); }\n")
    assert "forbids braced-groups" in check(command, tmp_path / "gnu.cpp", common)
