"""Names, lengths, line ends and odd letters, as far as Windows is stricter about them; each is looked at here on any system."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path, PurePosixPath

import pytest

from ci import matrix
from ci.build import compiler
from ci.device import manifest as device_manifest
from ci.device import plan
from ci.matrix import Platform
from ci.toolkit import manifest, roots

from .windows_support import WINDOWS, checkout

MAX_PATH = 260
RESERVED = {"con", "prn", "aux", "nul", *(f"{name}{number}" for name in ("com", "lpt") for number in range(1, 10))}


def git(*arguments: str, cwd: Path = matrix.REPOSITORY) -> str:
    done = subprocess.run(["git", *arguments], cwd=cwd, check=False, capture_output=True, encoding="utf-8")
    if done.returncode:
        pytest.skip(f"git {arguments[0]}: {done.stderr}")
    return done.stdout


def refused(names: Iterable[str]) -> set[str]:
    """What Windows cannot have, or not at once: reserved names and letters, and names that differ in case only."""
    paths = {parent.as_posix() for name in names for parent in (PurePosixPath(name), *PurePosixPath(name).parents)} - {"."}
    places = Counter(path.casefold() for path in paths)
    last = {path: path.rpartition("/")[2] for path in paths}
    return {
        path
        for path, name in last.items()
        if places[path.casefold()] > 1
        or name.partition(".")[0].casefold() in RESERVED
        or name.endswith((".", " "))
        or any(letter in '<>:"\\|?*' or ord(letter) < 32 for letter in name)
    }


def test_every_tracked_name_is_one_for_windows() -> None:
    names = git("ls-files", "-z").split("\0")[:-1]
    assert len(names) > 300
    assert refused(names) == set()
    assert max(len("D:\\a\\mlx-cuda\\mlx-cuda\\" + name) for name in names) < MAX_PATH


def test_a_name_that_is_none() -> None:
    good = ["src/a.cpp", "src/console.h", "nul/a", "auxiliary"]
    bad = ["A/x", "a/y", "src/Aux.h", "docs/what?", "end.", "space ", "src/a:b", "tab\t"]
    assert refused(good + bad) == {"nul", "A", "a", *bad} - {"A/x", "a/y"}


# ------------------------------------------------------------------------------------------------------------ line ends

AUTOCRLF = ("-c", "core.autocrlf=true", "-c", "core.eol=crlf")  # as Git for Windows asks for, and stricter


def line_ends(folder: Path) -> Counter[str]:
    """How many files have which line ends, in the repository and on disk."""
    return Counter(line.split("attr/")[0].strip() for line in git("ls-files", "--eol", cwd=folder).splitlines())


def test_a_windows_checkout_has_the_same_bytes(tmp_path: Path) -> None:
    """So locks, licenses, test data and whatever else is hashed or put into the wheel are the same."""
    git("clone", "--quiet", "--no-hardlinks", *AUTOCRLF, str(matrix.REPOSITORY), str(tmp_path / "clone"))
    found = line_ends(tmp_path / "clone")
    assert found.total() > 300
    kinds = {" ".join(kind.split()) for kind in found}
    assert kinds <= {"i/lf w/lf", "i/none w/none", "i/-text w/-text"}, "a file with CRLF in the repository or on disk"


def test_a_checkout_that_does_change_bytes_is_seen(tmp_path: Path) -> None:
    git("init", "--quiet", str(tmp_path / "origin"))
    (tmp_path / "origin" / "a.txt").write_bytes(b"one\ntwo\n")
    who = ("-c", "user.name=x", "-c", "user.email=x@example.invalid")
    git("add", "a.txt", cwd=tmp_path / "origin")
    git(*who, "commit", "--quiet", "-m", "x", cwd=tmp_path / "origin")
    git("clone", "--quiet", *AUTOCRLF, str(tmp_path / "origin"), str(tmp_path / "clone"))
    assert [" ".join(kind.split()) for kind in line_ends(tmp_path / "clone")] == ["i/lf w/crlf"]


def test_device_code_is_known_by_its_text(tmp_path: Path) -> None:
    """Sources that came another way than by git, with CRLF, are still those that finished device code was made from."""
    shutil.copytree(plan.SRC, tmp_path / "src")
    for path in (tmp_path / "src").rglob("*.*"):
        path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    inputs = device_manifest.inputs(plan.sources(["declared"]))
    assert device_manifest.inputs(plan.sources(["declared"], tmp_path / "src")) == inputs
    kernel = next((tmp_path / "src").rglob("*.cu"))
    kernel.write_bytes(kernel.read_bytes() + b"// another\r\n")
    assert device_manifest.inputs(plan.sources(["declared"], tmp_path / "src")) != inputs


# ------------------------------------------------------------------------------------------------------------ lengths


@pytest.mark.parametrize("name", sorted(roots.declared()))
def test_the_longest_path_of_a_root(name: str, installed_root: Callable[[str, Platform], Path]) -> None:
    """While it is installed, in the cache of a user whose name is as long as Windows lets it be."""
    root = installed_root(name, WINDOWS)
    files = manifest.read(root)
    assert files
    staging = f"C:\\Users\\{'u' * 20}\\AppData\\Local\\mlx-cuda\\mlx-cuda\\Cache\\toolkits\\.{root.name}.12345678.staging\\"
    assert [file for file in files if len(staging + file) >= MAX_PATH] == []


# ------------------------------------------------------------------------------------------------------------ odd letters


@pytest.mark.nightly
@pytest.mark.skipif(sys.platform != "linux" or not shutil.which("g++"), reason="compiles with g++ on Linux")
def test_folders_with_spaces_and_letters_outside_of_ascii(tmp_path: Path, installed_root: Callable[[str, Platform], Path]) -> None:
    """Of the checkout, the build, the toolkits and the device code; test_windows_route.py has the same for Windows' compiler."""
    cuda = list(matrix.load().cuda.values())[-1]
    for root in cuda.roots:
        installed_root(root, matrix.host_platform())
    folder = tmp_path / "eine Prüfung"
    tree = checkout(folder / "mlx cuda")
    (folder / "tool kits").symlink_to(roots.cache_directory())
    sources = plan.sources(["declared"])
    device_manifest.write(folder / "device code", sources, dict.fromkeys((each.name for each in sources), b"code"))
    places = {"MLX_CUDA_TOOLKITS": str(folder / "tool kits"), roots.PREBUILT: str(folder / "device code")}
    environment = compiler.tools_first() | places
    configure = ["-S", str(tree), "-B", str(folder / "a build"), "-G", "Ninja", f"-DMLX_CUDA_VERSIONS={cuda.version}"]
    unit = "CMakeFiles/host_code.dir/src/runtime/device_code.cpp.o"
    for arguments in ([*configure, f"-DPython_EXECUTABLE={sys.executable}"], ["--build", str(folder / "a build"), "--target", unit]):
        done = subprocess.run(["cmake", *arguments], env=environment, check=False, capture_output=True, encoding="utf-8")
        assert done.returncode == 0, done.stdout + done.stderr
    assert "Prüfung".encode() not in (folder / "a build" / unit).read_bytes()
    assert (folder / "a build" / "device" / "flash.fatbin.lzma").read_bytes() == b"code"
    again = subprocess.run(["cmake", *arguments, "--verbose"], env=environment, check=True, capture_output=True, encoding="utf-8")
    assert "no work to do" in again.stdout, "the dependencies of both compilers are found again"
    assert os.fsencode(tree) not in (folder / "a build" / "_build.json").read_bytes()
