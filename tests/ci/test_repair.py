"""Repair, with the real auditwheel and delvewheel, on small real wheels."""

from __future__ import annotations

import dataclasses
import os
import sys
from pathlib import Path

import pytest

from ci.audit import audit_wheel, providers
from ci.errors import CheckFailed, EnvironmentProblem
from ci.matrix import Cuda, Library, Matrix, System
from ci.repair import check_excludes, repair
from ci.repair.sbom.archive import source_date_epoch
from ci.wheelfile.wheel import read

from .audit_support import (
    CU12,
    CU13,
    DIST_INFO,
    MATRIX,
    NAMES,
    QUICK,
    Files,
    World,
    device_code,
    good_files,
    make_world,
    member,
    wheel_file,
    with_device,
    write_wheel,
)

BUILT = {"linux": NAMES["linux"].replace("manylinux_2_28", "linux"), "windows": NAMES["windows"]}


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> dict[System, tuple[World, Files]]:
    made = {}
    for system in ("linux", "windows"):
        world = make_world(tmp_path_factory.mktemp(system), system)
        made[system] = (world, good_files(world))
    return made  # type: ignore[return-value]


@pytest.fixture(params=["linux", "windows"])
def system(request: pytest.FixtureRequest) -> System:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture
def world(worlds: dict[System, tuple[World, Files]], system: System, monkeypatch: pytest.MonkeyPatch) -> World:
    world = worlds[system][0]
    monkeypatch.setattr(providers, "site", lambda root, _: world.site(root))
    return world


@pytest.fixture
def files(worlds: dict[System, tuple[World, Files]], system: System) -> Files:
    files = dict(worlds[system][1])
    files[f"{DIST_INFO}/WHEEL"] = wheel_file(BUILT[system]).encode()
    return files


@pytest.fixture
def built(tmp_path: Path, files: Files, system: System) -> Path:
    return write_wheel(tmp_path / "dist" / BUILT[system], files)


def with_library(matrix: Matrix, version: str, name: str, **changes: object) -> Matrix:
    """The matrix with one library of one CUDA version changed."""

    def change(library: Library) -> Library:
        return dataclasses.replace(library, **changes) if library.name == name else library  # type: ignore[arg-type]

    cuda: Cuda = matrix.cuda[version]
    changed = dataclasses.replace(cuda, libraries=tuple(map(change, cuda.libraries)))
    return dataclasses.replace(matrix, cuda={**matrix.cuda, version: changed})


def test_repaired_wheel_passes_the_audit(built: Path, tmp_path: Path, world: World) -> None:
    repaired = repair(built, tmp_path / "wheelhouse")
    violations = audit_wheel(repaired)
    assert [str(each) for each in violations] == []
    assert sorted((tmp_path / "wheelhouse").iterdir()) == [repaired]


def test_same_wheel_same_bytes(built: Path, tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SOURCE_DATE_EPOCH", raising=False)
    first = repair(built, tmp_path / "one")
    before = os.umask(0o077)
    try:
        second = repair(built, tmp_path / "two")
    finally:
        os.umask(before)
    assert first.read_bytes() == second.read_bytes()


def test_time_stamp_comes_from_the_environment_or_the_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_wheel(tmp_path / NAMES["linux"], {f"{DIST_INFO}/METADATA": b""})
    monkeypatch.delenv("SOURCE_DATE_EPOCH", raising=False)
    assert source_date_epoch(path) == "1767323046"  # 2026-01-02 03:04:06 UTC
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    assert source_date_epoch(path) == "1700000000"


def test_a_wheel_with_one_module(tmp_path: Path, files: Files, world: World, system: System) -> None:
    del files[member(world, CU12)]
    with_device(files, device_code(["90"]))
    repaired = repair(write_wheel(tmp_path / BUILT[system], files), tmp_path / "wheelhouse")
    assert [str(each) for each in audit_wheel(repaired, cuda=["13.0"], arch=["90"], checks=QUICK)] == []


def test_repairing_twice_changes_nothing_that_matters(built: Path, tmp_path: Path, world: World) -> None:
    once = repair(built, tmp_path / "wheelhouse")
    twice = repair(once, tmp_path / "wheelhouse")
    assert audit_wheel(twice, checks=QUICK) == []


def test_an_exclude_that_matches_nothing(built: Path, tmp_path: Path, world: World, system: System) -> None:
    misspelt = {"linux": "libcublaslt.so.13", "windows": "cublasLt_13.dll"}
    matrix = with_library(MATRIX, "13.0", "libcublasLt", files=misspelt)
    with pytest.raises(CheckFailed, match=f"CUDA 13.0: {misspelt[system]} is declared as needed, but _cu13 does not need it"):
        repair(built, tmp_path / "wheelhouse", matrix=matrix)
    assert not (tmp_path / "wheelhouse").exists()


def test_a_guard_that_matches_nothing(built: Path, tmp_path: Path, world: World, system: System) -> None:
    misspelt = {"linux": "libcublas.so", "windows": "cublas64.dll"}
    matrix = with_library(MATRIX, "12.8", "libcublas", files=misspelt)
    with pytest.raises(CheckFailed, match=rf"CUDA 12.8: nvidia/cublas/\w+/{misspelt[system]} is declared, but no locked wheel"):
        repair(built, tmp_path / "wheelhouse", matrix=matrix)


def test_guards_need_installed_roots_to_be_proved(built: Path, tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def site(root: str, _: object) -> Path:
        raise EnvironmentProblem(f"{root} is not installed")

    monkeypatch.setattr(providers, "site", site)
    matrix = with_library(MATRIX, "12.8", "libcublas", files={"linux": "libcublas.so", "windows": "cublas64.dll"})
    assert repair(built, tmp_path / "wheelhouse", matrix=matrix).is_file()


def test_a_driver_that_nothing_needs(built: Path, world: World) -> None:
    matrix = dataclasses.replace(MATRIX, driver={"linux": "libcuda.so", "windows": "nvcuda64.dll"})
    with pytest.raises(CheckFailed, match=r"driver: .* is needed by no native module"):
        check_excludes(read(built), matrix)


def test_a_wheel_without_modules(tmp_path: Path, files: Files, world: World, system: System) -> None:
    for cuda in MATRIX.cuda.values():
        del files[member(world, cuda)]
    with pytest.raises(CheckFailed, match="holds no native module"):
        repair(write_wheel(tmp_path / BUILT[system], files), tmp_path / "wheelhouse")


def test_a_failure_leaves_the_old_wheel(built: Path, tmp_path: Path, files: Files, world: World, system: System) -> None:
    """A library that is nowhere to be found fails the tools; what lay in the output folder stays."""
    if system == "linux":
        stranger = world.library(world.folder / "made" / "libstranger.so.1", "int f(void) { return 1; }")
        arguments, source = [str(stranger)], ""
    else:
        stranger = world.library(world.folder / "made" / "stranger.dll", "int f(void) { return 1; }")
        arguments, source = [f"{stranger}.lib"], "__declspec(dllimport) int f(void); int use(void) { return f(); }"
    files[member(world, CU13)] = world.module(Path(member(world, CU13)).name, CU13, source=source, arguments=arguments)
    output = tmp_path / "wheelhouse"
    old = repair(built, output)
    before = old.read_bytes()
    with pytest.raises(CheckFailed, match="refuses the wheel"):
        repair(write_wheel(tmp_path / "bad" / BUILT[system], files), output)
    assert [path.name for path in output.iterdir()] == [old.name]
    assert old.read_bytes() == before


def test_replaces_an_old_wheel(built: Path, tmp_path: Path, world: World) -> None:
    repaired = repair(built, tmp_path / "wheelhouse")
    repaired.write_bytes(b"an old one")
    assert repair(built, tmp_path / "wheelhouse").read_bytes()[:2] == b"PK"


def test_output_that_is_no_folder(built: Path, tmp_path: Path, world: World) -> None:
    (tmp_path / "wheelhouse").write_text("in the way")
    with pytest.raises(EnvironmentProblem, match="cannot write"):
        repair(built, tmp_path / "wheelhouse")


@pytest.mark.parametrize("system", ["linux"])
def test_a_tag_that_the_wheel_does_not_earn(built: Path, tmp_path: Path, files: Files, world: World) -> None:
    source = "void *memcpy(void *, const void *, unsigned long); void copy(char *a, char *b, unsigned long n) { memcpy(a, b, n); }"
    files[member(world, CU13)] = world.module("_cu13.abi3.so", CU13, source=source)
    path = write_wheel(tmp_path / "new" / BUILT["linux"], files)
    with pytest.raises(CheckFailed, match="manylinux_2_5_x86_64"):
        repair(path, tmp_path / "wheelhouse", plat="manylinux_2_5_x86_64")
    assert "manylinux_2_28_x86_64" in repair(path, tmp_path / "wheelhouse", plat="manylinux_2_28_x86_64").name


@pytest.mark.parametrize("system", ["windows"])
def test_a_dll_that_is_in_the_wheel_already(tmp_path: Path, files: Files, world: World) -> None:
    friend = world.library(world.folder / "made" / "friend.dll", "int f(void) { return 1; }")
    source = "__declspec(dllimport) int f(void); int use(void) { return f(); }"
    files[member(world, CU13)] = world.module("_cu13.pyd", CU13, source=source, arguments=[f"{friend}.lib"])
    files["mlx_cuda/friend.dll"] = friend.read_bytes()
    repaired = repair(write_wheel(tmp_path / BUILT["windows"], files), tmp_path / "wheelhouse")
    assert [name for name in read(repaired).members if "friend" in name] == ["mlx_cuda/friend.dll"]


@pytest.mark.parametrize("system", ["windows"])
def test_a_linux_tag_for_windows(built: Path, tmp_path: Path, world: World) -> None:
    with pytest.raises(EnvironmentProblem, match="is for Windows"):
        repair(built, tmp_path / "wheelhouse", plat="manylinux_2_28_x86_64")


def test_a_tool_that_is_not_installed(built: Path, tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    empty = tmp_path / "python"
    empty.write_text(f'#!/bin/sh\nexec {sys.executable} -S -E "$@"\n')
    empty.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(empty))
    with pytest.raises(EnvironmentProblem, match="is not installed"):
        repair(built, tmp_path / "wheelhouse")


def test_command(built: Path, tmp_path: Path, world: World, capsys: pytest.CaptureFixture[str]) -> None:
    from ci.__main__ import main

    assert main(["repair", str(built), "-o", str(tmp_path / "wheelhouse")]) == 0
    (repaired,) = (tmp_path / "wheelhouse").iterdir()
    assert capsys.readouterr().out == f"{repaired}\n"
    assert main(["repair", str(tmp_path / "absent-1-py3-none-any.whl")]) == 2
