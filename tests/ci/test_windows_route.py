"""The way of a Windows wheel from the developer prompt to the audit, on Linux: the real CMake, Ninja, scikit-build-core and delvewheel.

Only the programs of Visual Studio are stubs (windows_support.py): the compiler leaves empty objects, the linker modules by mingw-w64.
Folders have spaces and letters outside of ASCII in their names.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from ci import matrix
from ci.audit import audit_wheel, providers
from ci.audit.checks import CHECKS
from ci.build import compiler, msvc_env
from ci.device import manifest, plan
from ci.matrix import Platform
from ci.repair import repair
from ci.toolkit import roots
from ci.wheelfile.wheel import MANIFEST

from .audit_support import DEVICE_CODE, NAMES, World, make_world
from .windows_support import DECLARED, WINDOWS, Studio, checkout, program, write_toolchain

VERSIONS = list(matrix.load().cuda.values())


TREE = "cp310-abi3-win_amd64"
RUNNER = "D:\\a\\mlx-cuda\\mlx-cuda\\build\\cp315-abi3t-win_amd64\\"  # where a runner of GitHub's builds, the longest of the trees
MAX_PATH = 260  # with the zero at the end; what is longer, many of Windows' programs cannot open


class Built(NamedTuple):
    folder: Path
    wheel: Path
    tree: Path  # CMake's
    said: str
    world: World
    environment: dict[str, str]


def device_code(folder: Path) -> str:
    """Finished device code of the working tree, by its inputs; returns its digest."""
    sources = plan.sources(["declared"])
    return manifest.write(folder, sources, {each.name: DEVICE_CODE[f"mlx_cuda/device/{each.name}.fatbin.lzma"] for each in sources}).digest


def modules(folder: Path, world: World, digest: str) -> None:
    """What the linker will leave: modules that need the declared libraries and know the device code."""
    folder.mkdir()
    known = hashlib.sha256(DEVICE_CODE[MANIFEST]).hexdigest()
    for cuda in VERSIONS:
        name = f"{cuda.module}.pyd"
        (folder / name).write_bytes(world.module(name, cuda).replace(known.encode(), digest.encode()))


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory, installed_root: Callable[[str, Platform], Path]) -> Built:
    """A build of the working tree by ``python -m ci build`` in a developer prompt, with a compiler cache."""
    for cuda in VERSIONS:
        for root in cuda.roots:
            installed_root(root, WINDOWS)
    folder = tmp_path_factory.mktemp("a Prüfung")
    world = make_world(folder / "world", "windows")
    modules(folder / "modules", world, device_code(folder / "device ü"))
    (folder / "toolkits ü").symlink_to(roots.cache_directory())
    tree = checkout(folder / "mlx cuda ü")
    write_toolchain(tree / "cmake/toolchains/win-amd64.cmake")
    with pytest.MonkeyPatch.context() as patch:
        Studio.make(folder / "visual studio", patch)
        environment = msvc_env.developer(DECLARED)
    environment |= {
        "CMAKE_CXX_COMPILER_LAUNCHER": str(program(folder / "cache", '#!/bin/sh\necho x >> "$0.used"\nexec "$@"\n')),
        "MLX_CUDA_TOOLKITS": str(folder / "toolkits ü"),
        "MODULES": str(folder / "modules"),
        roots.PREBUILT: str(folder / "device ü"),
    }
    command = [sys.executable, "-m", "ci", "build", "--platform", WINDOWS.name, "-o", "dist ü", "-v"]
    done = subprocess.run(command, cwd=tree, env=environment, check=False, capture_output=True, encoding="utf-8")
    assert done.returncode == 0, done.stdout + done.stderr
    return Built(folder, tree / done.stdout.strip(), tree / "build" / TREE, done.stderr, world, environment)


def compilations(built: Built) -> list[str]:
    return [line for line in built.said.splitlines() if " /nologo /TP " in line]


def test_scikit_build_core_takes_the_prompts_generator(built: Built) -> None:
    """Its own choice on Windows would be Visual Studio's, and a platform for that, which Ninja does not take."""
    cache = (built.tree / "CMakeCache.txt").read_text("utf-8")
    assert "CMAKE_GENERATOR:INTERNAL=Ninja\n" in cache
    assert "CMAKE_GENERATOR_PLATFORM:INTERNAL=\n" in cache
    assert "CMAKE_GENERATOR_TOOLSET:INTERNAL=\n" in cache


def test_every_source_is_read_once(built: Built) -> None:
    """Each module has one of its own; CMake does not look for C++ modules, which would be a run of the compiler more for each."""
    sources = [path.relative_to(matrix.REPOSITORY).as_posix() for path in (matrix.REPOSITORY / "src").rglob("*.cpp")]
    read = [source for line in compilations(built) for source in re.findall(r"/(src/[\w/]+\.cpp)", line.rpartition(" -c ")[2])]
    assert sorted(read) == sorted([*sources, "src/bindings/module.cpp"])
    assert "-scanDependencies" not in built.said
    estimate = (matrix.REPOSITORY / "docs" / "results" / "platforms.md").read_text("utf-8")
    assert f"A wheel has {len(read)} translation units: {len(read) - 1} take g++" in estimate


def test_the_compiler_cache_is_taken(built: Built) -> None:
    assert len((built.folder / "cache.used").read_text("utf-8").split()) == len(compilations(built))


def test_a_release_build_without_debug_information(built: Built) -> None:
    """A cache cannot keep what goes into one database for all (/Zi), nor does Python's own C library go with that of Debug (/MDd)."""
    for line in compilations(built):
        options = line.split()
        assert {"-MD", "/O2", "/Brepro", "/utf-8", "/permissive-", "-std:c++20", "/EHsc"} <= {*options}
        assert not {"-MDd", "/Od", "/RTC1", "-Zi", "/Zi", "-Z7", "-ZI", "/GL"} & {*options}


def test_cmake_alone_makes_a_release_build_too(built: Built, tmp_path: Path) -> None:
    """For MSVC its own choice is Debug."""
    tree = built.folder / "mlx cuda ü"
    toolchain = tree / "cmake/toolchains/win-amd64.cmake"
    options = {"CMAKE_TOOLCHAIN_FILE": toolchain, "MLX_CUDA_PLATFORM": WINDOWS.name, "Python_EXECUTABLE": sys.executable}
    command = ["cmake", "-S", str(tree), "-B", str(tmp_path), *(f"-D{name}={value}" for name, value in options.items())]
    path = compiler.tools_first()["PATH"]
    environment = built.environment | {"PATH": f"{built.environment['PATH']}{os.pathsep}{path}"}
    done = subprocess.run(command, env=environment, check=False, capture_output=True, encoding="utf-8")
    assert done.returncode == 0, done.stderr
    assert " -MD " in (tmp_path / "build.ninja").read_text("utf-8")
    assert "-MDd" not in (tmp_path / "build.ninja").read_text("utf-8")


@pytest.mark.parametrize("cuda", VERSIONS, ids=lambda cuda: cuda.version)
def test_what_is_linked(built: Built, cuda: matrix.Cuda) -> None:
    """Import libraries of the declared roots for Windows, and of this module's CUDA version alone."""
    told = (built.tree / f"{cuda.module}.pyd.told").read_text("utf-8").splitlines()
    declared = {library.name.removeprefix("lib") for library in cuda.libraries if library.needed} | {"cuda"}
    found = [Path(each) for each in told if "toolkits ü" in each]
    assert sorted(path.name for path in found) == sorted(f"{name}.lib" for name in declared)
    assert {path.parents[1].name.rpartition("-win-amd64-")[0] for path in found} == {*cuda.roots[:2]}
    assert all(path.is_file() for path in found)
    assert len([each for each in told if each.endswith(".obj")]) == len(compilations(built)) - 2
    assert {"/INCREMENTAL:NO", "/Brepro"} <= {*told}
    assert "/debug" not in told


def test_what_is_in_the_wheel(built: Built) -> None:
    assert built.wheel.name == NAMES["windows"]
    with zipfile.ZipFile(built.wheel) as archive:
        names = archive.namelist()
        facts = json.loads(archive.read("mlx_cuda/_build.json"))
    assert {f"mlx_cuda/{cuda.module}.pyd" for cuda in VERSIONS} == {name for name in names if name.endswith((".pyd", ".dll", ".so"))}
    assert {*DEVICE_CODE} <= {*names}
    assert (facts["generator"], facts["platform"], facts["compiler"]["id"]) == ("Ninja", "win-amd64", "MSVC")


def test_repaired_and_audited(built: Built, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the real delvewheel and every check of the audit, but that libraries come from the made roots."""
    monkeypatch.setattr(providers, "site", lambda root, _: built.world.site(root))
    repaired = repair(built.wheel, tmp_path / "wheel house ü")
    assert repaired.name == NAMES["windows"]
    assert [str(each) for each in audit_wheel(repaired, checks=tuple(CHECKS))] == []


def test_no_path_of_the_build_is_too_long(built: Built) -> None:
    names = [path.relative_to(built.tree).as_posix() for path in built.tree.rglob("*") if path.is_file()]
    assert len([name for name in names if name.endswith(".obj")]) == len(compilations(built))
    assert [name for name in names if len(RUNNER + name) >= MAX_PATH] == []
