"""The audit's checks of binaries and of where their libraries come from: each passes the good wheel and fires on a bad one."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest

from ci.audit import audit_wheel, providers
from ci.audit.checks import CHECKS
from ci.errors import EnvironmentProblem
from ci.matrix import REPOSITORY, Platform

from .audit_support import (
    CU13,
    MATRIX,
    METADATA,
    NAMES,
    WHEEL,
    Files,
    World,
    fatbin,
    member,
    replaced,
    wheel_file,
    with_module,
    write_wheel,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


# ------------------------------------------------------------------------------------------------------------ each binary by itself


def test_a_newer_glibc(audited: Callable[..., set[str]], world: World) -> None:
    script = world.folder / "future.map"
    script.write_text("GLIBC_2.99 { global: future; };")
    libc = world.library(world.folder / "future" / "libc.so.6", "int future(void) { return 1; }", f"-Wl,--version-script={script}")
    source = "int future(void); int use(void) { return future(); }"
    assert audited(with_module(world, source=source, arguments=["-nostdlib", libc])) == {"platform-tag"}


@pytest.mark.parametrize("platform", ["linux_x86_64", "manylinux_2_99_x86_64"])
def test_a_platform_tag_that_proves_nothing(audited: Callable[..., set[str]], platform: str) -> None:
    name = NAMES["linux"].replace("manylinux_2_28_x86_64", platform)
    assert "platform-tag" in audited(lambda files: files.update({WHEEL: wheel_file(name).encode()}), name=name)


def test_every_tag_of_several_has_to_hold(audited: Callable[..., set[str]], world: World) -> None:
    """memcpy has version 2.14 in glibc, which manylinux_2_5 does not admit."""
    name = NAMES["linux"].replace("manylinux_2_28", "manylinux_2_5_x86_64.manylinux_2_28")
    source = "void *memcpy(void *, const void *, unsigned long); void copy(char *a, char *b, unsigned long n) { memcpy(a, b, n); }"

    def change(files: Files) -> None:
        with_module(world, source=source)(files)
        files[WHEEL] = wheel_file(name).encode()

    assert audited(change, name=name) == {"platform-tag"}
    assert audited(with_module(world, source=source)) == set()


def test_another_machine(audited: Callable[..., set[str]]) -> None:
    name = NAMES["linux"].replace("x86_64", "aarch64")
    assert "machine" in audited(lambda files: files.update({WHEEL: wheel_file(name).encode()}), name=name)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            "void *PyUnicode_AsUTF8(void *); void *g(void *o) { return PyUnicode_AsUTF8(o); }",
            "PyUnicode_AsUTF8, expected the stable ABI only",
        ),
        (
            "void *PyType_GetName(void *); void *g(void *o) { return PyType_GetName(o); }",
            "PyType_GetName, which the stable ABI has since 3.11",
        ),
    ],
    ids=["not stable", "too new"],
)
def test_abi3(tmp_path: Path, files: Files, world: World, source: str, message: str) -> None:
    changed = dict(files)
    with_module(world, source=source)(changed)
    (violation,) = audit_wheel(write_wheel(tmp_path / NAMES["linux"], changed), checks=("abi3",))
    assert (violation.check, violation.member) == ("abi3", "mlx_cuda/_cu13.abi3.so")
    assert message in violation.message


def test_abi3_needs_its_suffix(audited: Callable[..., set[str]], world: World) -> None:
    def change(files: Files) -> None:
        files["mlx_cuda/_cu13.so"] = files.pop(member(world, CU13))

    assert audited(change, checks=tuple(CHECKS)) == {"abi3"}


def test_free_threaded(audited: Callable[..., set[str]], world: World) -> None:
    """A wheel of the free-threaded stable ABI, and one whose modules are of the other."""
    name = NAMES["linux"].replace("cp310-abi3", "cp315-abi3t")

    def change(files: Files) -> None:
        files[WHEEL] = wheel_file(name).encode()
        for cuda in MATRIX.cuda.values():
            files[f"mlx_cuda/{cuda.module}.abi3t.so"] = files.pop(member(world, cuda))

    assert audited(change, name=name, checks=tuple(CHECKS)) == set()
    assert audited(lambda files: files.update({WHEEL: wheel_file(name).encode()}), name=name, checks=("abi3",)) == {"abi3"}


def test_free_threaded_too_new(tmp_path: Path, files: Files, world: World) -> None:
    """What is no part of the stable ABI is found in a free-threaded wheel too."""
    changed = dict(files)
    with_module(world, source="void *PyList_GetItemFoo(void *); void *g(void *o) { return PyList_GetItemFoo(o); }")(changed)
    name = NAMES["linux"].replace("cp310-abi3", "cp315-abi3t")
    messages = [each.message for each in audit_wheel(write_wheel(tmp_path / name, changed), checks=("abi3",))]
    assert any("PyList_GetItemFoo" in message for message in messages)


def test_libpython(audited: Callable[..., set[str]], world: World) -> None:
    python = world.library(world.folder / "made" / "libpython3.12.so.1.0", "int f(void) { return 1; }")
    assert audited(with_module(world, arguments=[python]), checks=tuple(CHECKS)) == {"abi3", "needed"}


@pytest.mark.parametrize("gpu_code", [fatbin([80], []), fatbin([80], []).replace(b"\x18\0\0\0", b"\x18\0\1\0")], ids=["whole", "damaged"])
def test_no_gpu_code_inside(audited: Callable[..., set[str]], world: World, gpu_code: bytes) -> None:
    assert audited(with_module(world, gpu_code=gpu_code)) == {"architectures"}


def test_no_gpu_code_inside_what_repair_copied(audited: Callable[..., set[str]], world: World) -> None:
    data = ",".join(map(str, fatbin([80], [])))
    path = world.compile(world.folder / "made" / "libgpu.so", f"const unsigned char code[] = {{{data}}};")
    assert audited(lambda files: files.update({"mlx_cuda.libs/libgpu.so": path.read_bytes()})) == {"architectures"}


def test_not_stripped(audited: Callable[..., set[str]], world: World) -> None:
    assert audited(with_module(world, strip=False)) == {"stripped"}


@pytest.mark.parametrize(
    "path",
    [
        "/home/someone/src/mlx-cuda/linear.cpp",
        "/project/src/linear.cpp",
        "/tmp/build-env-abc/overlay/lib/x.h",  # noqa: S108
        "/opt/elsewhere/lib/python3.11/site-packages/nanobind/nb_enum.h",
        "-I/root/src/include",
        "old:/__w/1/s/a.cpp",
        "C:\\\\Users\\\\someone\\\\src\\\\linear.cpp",
        "D:/a/mlx-cuda/mlx-cuda/src/linear.cpp",
        str(REPOSITORY / "src" / "linear.cpp"),
    ],
)
def test_build_path(audited: Callable[..., set[str]], world: World, path: str) -> None:
    assert audited(with_module(world, source=f'const char where[] = "{path}";')) == {"build-path"}


@pytest.mark.parametrize(
    "path",
    [
        "/usr/lib/x86_64-linux-gnu/libc.so.6",
        "/usr/local/cuda/include/cuda.h",
        "/proc/self/maps",
        "/tmp/x",  # noqa: S108
        "src/home/a/b",
        "x/tmp/a/b/c",
        "../project/a/b",
    ],
)
def test_what_is_no_build_path(audited: Callable[..., set[str]], world: World, path: str) -> None:
    assert audited(with_module(world, source=f'const char where[] = "{path}";')) == set()


def test_executable_stack(audited: Callable[..., set[str]], world: World) -> None:
    assert audited(with_module(world, arguments=["-Wl,-z,execstack"])) == {"executable-stack"}


# ------------------------------------------------------------------------------------------------------------ where libraries come from


def test_a_library_that_nobody_supplies(audited: Callable[..., set[str]], world: World) -> None:
    stranger = world.library(world.folder / "made" / "libstranger.so.1", "int f(void) { return 1; }")
    assert audited(with_module(world, arguments=[stranger])) == {"needed"}


def test_a_library_inside_the_wheel(audited: Callable[..., set[str]], world: World) -> None:
    friend = world.library(world.folder / "made" / "libfriend.so.1", "int f(void) { return 1; }")

    def change(files: Files) -> None:
        with_module(world, arguments=[friend], rpath=[*CU13.rpath(), "$ORIGIN/../mlx_cuda.libs"])(files)
        files["mlx_cuda.libs/libfriend.so.1"] = friend.read_bytes()

    def unreachable(files: Files) -> None:
        change(files)
        with_module(world, arguments=[friend])(files)

    def under_another_name(files: Files) -> None:
        change(files)
        files["mlx_cuda.libs/libfriend-0123abcd.so.1"] = files.pop("mlx_cuda.libs/libfriend.so.1")

    assert audited(change) == set()
    assert audited(unreachable) == {"rpath"}
    assert audited(under_another_name) == {"needed", "rpath"}


def test_a_library_declared_as_not_needed(audited: Callable[..., set[str]], world: World) -> None:
    cublas = world.site("cuda-13.0") / "nvidia/cu13/lib/libcublas.so.13"
    assert audited(with_module(world, arguments=[cublas])) == {"needed"}


def test_a_declared_library_that_is_not_needed(audited: Callable[..., set[str]], world: World) -> None:
    source = "int libcudart_of_13(void) { return 0; }"
    assert audited(with_module(world, without=["libcudart"], source=source)) == {"needed"}


def test_an_extra_without_the_provider(audited: Callable[..., set[str]]) -> None:
    line = 'Requires-Dist: nvidia-cudnn-cu13>=9.19,<10; extra == "cu13"\n'
    assert audited(replaced(METADATA, line, "")) == {"provider", "requirements"}
    assert audited(replaced(METADATA, line, line.replace('cu13"', 'cu12"'))) == {"provider", "requirements"}
    assert audited(replaced(METADATA, line, line.replace(">=9.19,<10", ""))) == {"provider", "requirements"}


def other_roots(world: World, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the roots, to spoil; returns the site-packages of CUDA 13."""
    shutil.copytree(world.folder, folder, symlinks=True, dirs_exist_ok=True)
    monkeypatch.setattr(providers, "site", lambda root, _: folder / root / "site")
    return folder / "cuda-13.0" / "site"


def test_a_locked_wheel_of_another_layout(
    audited: Callable[..., set[str]], world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = other_roots(world, tmp_path / "roots", monkeypatch)
    (site / "nvidia/cu13/lib/libcublasLt.so.13").rename(site / "nvidia/libcublasLt.so.13")
    assert audited() == {"provider", "unversioned-libc"}


def test_a_locked_wheel_of_another_package(
    audited: Callable[..., set[str]], world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = other_roots(world, tmp_path / "roots", monkeypatch)
    (information,) = site.glob("nvidia_cublas-*.dist-info")
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: nvidia-cublas-nightly\nVersion: 13.0.1\n")
    assert audited() == {"provider"}


def test_a_locked_wheel_that_the_extra_excludes(
    audited: Callable[..., set[str]], world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = other_roots(world, tmp_path / "roots", monkeypatch)
    (information,) = site.glob("nvidia_cudnn_cu13-*.dist-info")
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: nvidia-cudnn-cu13\nVersion: 9.18.0\n")
    assert audited() == {"provider"}


def test_a_root_that_is_not_installed(audited: Callable[..., set[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    def site(root: str, _: Platform) -> Path:
        raise EnvironmentProblem(f"{root} is not installed", cure=f"python -m ci toolkit install {root}")

    monkeypatch.setattr(providers, "site", site)
    with pytest.raises(EnvironmentProblem, match="toolkit install"):
        audited()


@pytest.mark.parametrize(
    "rpath",
    [
        [*CU13.rpath(), "/opt/cuda/lib64"],
        [*CU13.rpath(), ""],
        [*CU13.rpath(), "$ORIGIN/../../lib"],
        [*CU13.rpath(), "$ORIGIN/../nvidia/cublas/lib"],
        [*CU13.rpath(), "lib"],
        CU13.rpath()[1:],
        [],
    ],
    ids=["absolute", "empty", "outside", "of nothing needed", "relative", "one missing", "none"],
)
def test_rpath(audited: Callable[..., set[str]], world: World, rpath: list[str]) -> None:
    assert audited(with_module(world, rpath=rpath)) == {"rpath"}


@pytest.mark.parametrize("old", ["nvidia/cu13/bin/x86_64", "nvidia-cublas-cu12", "libcudart.so.12", "550.54"])
def test_dll_directories(audited: Callable[..., set[str]], old: str) -> None:
    assert audited(replaced("mlx_cuda/_libraries.json", old, "something-else")) == {"dll-directories", "sources"}


@pytest.mark.parametrize("contents", [None, b"not json", b"[1]", b"[[null, null]]"])
def test_no_list_of_libraries(audited: Callable[..., set[str]], contents: bytes | None) -> None:
    def change(files: Files) -> None:
        del files["mlx_cuda/_libraries.json"]
        if contents:
            files["mlx_cuda/_libraries.json"] = contents

    assert audited(change) == {"dll-directories", "sources"}


def test_unversioned_libc(audited: Callable[..., set[str]], world: World) -> None:
    source = "int future_of_libc(void); int use(void) { return future_of_libc(); }"
    assert audited(with_module(world, source=source)) == {"unversioned-libc"}
    weak = "int future_of_libc(void) __attribute__((weak)); int use(void) { return future_of_libc ? future_of_libc() : 0; }"
    assert audited(with_module(world, source=weak)) == set()
