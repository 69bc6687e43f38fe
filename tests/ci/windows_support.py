"""A stub for Visual Studio on Linux: vswhere, vcvarsall.bat and MSVC's programs, as far as a build asks them for anything."""

from __future__ import annotations

import shutil
import stat
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from ci import matrix
from ci.build import msvc_env

WINDOWS = matrix.load().platform("win-amd64")
DECLARED = matrix.load().compilers["windows"]
VERSION = f"{DECLARED.toolset}.35207"

# What the real vswhere does with these options is documented; here it only remembers them.
VSWHERE = '#!/bin/sh\nprintf "%s\\n" "$@" > "{folder}/asked"\ncat "{folder}/answer"\n'
# cmd runs a batch file in its own environment, as bash does with `.`.
VCVARSALL = """\
echo "a banner"
test "$1" = amd64 || return 1
export VCToolsVersion="${{2#-vcvars_ver=}}" VSCMD_ARG_TGT_ARCH=x64
export PATH="{tools}:$PATH"
"""
# The compiler leaves an object file; the linker a module that was made before, and what it was told.
CL = """\
#!/bin/sh
for each; do case "$each" in /Fo*) : > "${each#/Fo}";; esac; done
"""
LINK = """\
#!/bin/sh
case "$1" in @*) set -- "$@" $(cat "${1#@}");; esac
for each; do case "$each" in /out:*) out=${each#/out:};; esac; done
test "$out" || exit 0
printf '%s\\n' "$@" > "$out.told"
cp "$MODULES/$(basename "$out")" "$out"
"""
# CMake knows the compiler by asking it to compile; that of a stub is told.
TOOLCHAIN = """\
set(CMAKE_SYSTEM_NAME Windows)
set(CMAKE_SYSTEM_PROCESSOR AMD64)
set(CMAKE_CXX_COMPILER cl)
set(CMAKE_CXX_COMPILER_ID MSVC)
set(CMAKE_CXX_COMPILER_VERSION {compiler})
set(CMAKE_CXX_COMPILER_ID_RUN TRUE)
set(CMAKE_CXX_COMPILER_FORCED TRUE)
set(CMAKE_CXX_STANDARD_COMPUTED_DEFAULT 14)
set(CMAKE_CXX_SIZEOF_DATA_PTR 8)
set(CMAKE_SIZEOF_VOID_P 8)
set(MSVC_CXX_ARCHITECTURE_ID x64)
foreach(standard 17 20)
    list(APPEND CMAKE_CXX_COMPILE_FEATURES cxx_std_${{standard}})
    set(CMAKE_CXX${{standard}}_COMPILE_FEATURES cxx_std_${{standard}})
endforeach()
set(CMAKE_LINKER link)
set(CMAKE_MT mt)
set(CMAKE_RC_COMPILER rc)
set(CMAKE_RC_COMPILER_WORKS TRUE)
set(Python_LIBRARY "${{CMAKE_CURRENT_LIST_DIR}}/{python}.lib") # Windows' Python has both
set(Python_SABI_LIBRARY "${{CMAKE_CURRENT_LIST_DIR}}/python3.lib")
set(SKBUILD_SOSABI "") # and no abi3 in the names of modules
"""


def program(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, "utf-8")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


@dataclass(frozen=True)
class Studio:
    """Visual Studio's files below ``folder``, one compiler for each of its toolsets."""

    folder: Path

    @classmethod
    def make(cls, folder: Path, monkeypatch: pytest.MonkeyPatch, toolsets: Sequence[str] = (VERSION,)) -> Studio:
        """Install it, so that ``msvc-env`` finds it; skips the test where there is no bash in the place of cmd."""
        if sys.platform != "linux" or not shutil.which("bash"):
            pytest.skip("the stub for Visual Studio is bash on Linux")
        made = cls(folder / "Program Files")
        for each in toolsets:
            for name, text in {"cl.exe": CL, "cl": CL, "link": LINK, "mt": "#!/bin/sh\n", "rc": "#!/bin/sh\n"}.items():
                program(made.tools(each) / name, text)
        program(folder / "x86" / msvc_env.VSWHERE, VSWHERE.format(folder=folder))
        made.answer(f"{made.folder}\n")
        made.batch(VCVARSALL.format(tools=made.tools(max(toolsets, default=VERSION))))
        monkeypatch.setenv("PROGRAMFILES(X86)", str(folder / "x86"))
        monkeypatch.setattr(msvc_env, "cmd", bash)
        return made

    def tools(self, version: str = VERSION) -> Path:
        return (self.folder / "VC/Tools/MSVC" / version / msvc_env.COMPILER).parent

    def answer(self, text: str) -> None:
        """What vswhere prints."""
        (self.folder.parent / "answer").write_text(text, "utf-8")

    def asked(self) -> list[str]:
        return (self.folder.parent / "asked").read_text("utf-8").splitlines()

    def batch(self, text: str) -> None:
        program(self.folder / "VC/Auxiliary/Build/vcvarsall.bat", text)


def bash(line: str) -> str:
    """In the place of cmd, whose quotes, >&2 and && bash has too."""
    return subprocess.run(["bash", "-c", f". {line}"], check=False, stdout=subprocess.PIPE, encoding="utf-8").stdout


def checkout(folder: Path) -> Path:
    """A copy of the tracked files, as they are now; the test is skipped outside of a git checkout."""
    done = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=matrix.REPOSITORY,
        check=False,
        capture_output=True,
        encoding="utf-8",
    )
    if done.returncode:
        pytest.skip("this is no git checkout")
    for name in filter(None, done.stdout.split("\0")):
        source, target = matrix.REPOSITORY / name, folder / name
        if source.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target)
    return folder


def write_toolchain(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    python = "python{}{}".format(*sys.version_info)
    path.write_text(TOOLCHAIN.format(compiler=f"{DECLARED.minimum}.35207.1", python=python), "utf-8")
    for name in (python, "python3"):
        path.with_name(f"{name}.lib").touch()
    return path
