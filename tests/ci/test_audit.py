"""Each check of the audit passes a good wheel and fires on a bad one; the wheels hold real ELF modules."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from ci import audit
from ci.audit import audit_wheel, describe, providers
from ci.audit.checks import CHECKS, SAME_METADATA, binaries
from ci.audit.wheel import read
from ci.errors import EnvironmentProblem
from ci.matrix import REPOSITORY, Platform

from .audit_support import (
    DIST_INFO,
    MATRIX,
    NAMES,
    VERSION,
    Change,
    Files,
    World,
    container,
    digest,
    entry,
    fatbin,
    good_files,
    make_world,
    member,
    replaced,
    wheel_file,
    write_wheel,
)

if TYPE_CHECKING:
    from collections.abc import Callable

CU12, CU13 = MATRIX.cuda["12.8"], MATRIX.cuda["13.0"]
METADATA, WHEEL, RECORD = (f"{DIST_INFO}/{name}" for name in ("METADATA", "WHEEL", "RECORD"))
# abi3audit is a process of its own and takes most of an audit's time: only the tests of that check run it.
QUICK = tuple(identifier for identifier in CHECKS if identifier != "abi3")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(tmp_path_factory.mktemp("linux"), "linux")


@pytest.fixture(scope="module")
def files(world: World) -> Files:
    return good_files(world)


@pytest.fixture(autouse=True)
def locked_roots(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """The made roots stand for the installed ones."""

    def site(root: str, _: Platform) -> Path:
        made: World = request.getfixturevalue("world")
        return made.site(root)

    monkeypatch.setattr(providers, "site", site)


@pytest.fixture
def audited(tmp_path: Path, files: Files) -> Callable[..., set[str]]:
    """Audit the good wheel after a change; returns the checks that fired."""

    def run(change: Change = lambda _: None, *, name: str = NAMES["linux"], checks: tuple[str, ...] = QUICK) -> set[str]:
        changed = dict(files)
        change(changed)
        violations = audit_wheel(write_wheel(tmp_path / name, changed), checks=checks)
        print("\n".join(map(str, violations)))  # shown when a test fails
        return {violation.check for violation in violations}

    return run


def test_good_wheel(audited: Callable[..., set[str]]) -> None:
    assert audited(checks=tuple(CHECKS)) == set()


# ------------------------------------------------------------------------------------------------------------ what lies in the wheel


def library(world: World, name: str, soname: str = "") -> bytes:
    return world.compile(world.folder / "made" / name, "int f(void) { return 1; }", f"-Wl,-soname,{soname or name}").read_bytes()


def test_a_missing_module(audited: Callable[..., set[str]], world: World) -> None:
    assert audited(lambda files: files.pop(member(world, CU13)) and None) == {"modules"}


def test_an_unexpected_binary(audited: Callable[..., set[str]], world: World) -> None:
    assert audited(lambda files: files.update({"mlx_cuda/helper.so": library(world, "helper.so")})) == {"modules"}


@pytest.mark.parametrize(
    ("name", "soname"),
    [("libcudart-1a2b3c4d.so.12", ""), ("libcudnn_graph.so.9", ""), ("libmlx.so", ""), ("libharmless.so", "libcublasLt.so.12")],
)
def test_nvidia_inside(audited: Callable[..., set[str]], world: World, name: str, soname: str) -> None:
    # A name that the modules need is also missing from their RPATH then.
    assert audited(lambda files: files.update({f"mlx_cuda.libs/{name}": library(world, name, soname)})) - {"rpath"} == {"nvidia-inside"}


def test_a_static_library_inside(audited: Callable[..., set[str]]) -> None:
    assert audited(lambda files: files.update({"mlx_cuda/lib/libcudart_static.a": b"!<arch>\n"})) == {"nvidia-inside"}


def test_libcurl_is_not_nvidias(audited: Callable[..., set[str]], world: World) -> None:
    assert audited(lambda files: files.update({"mlx_cuda.libs/libcurl.so.4": library(world, "libcurl.so.4")})) == set()


@pytest.mark.parametrize("name", ["libcuda.so.1", "libcuda-0123abcd.so.580.65", "libnvidia-ml.so.1"])
def test_driver_inside(audited: Callable[..., set[str]], world: World, name: str) -> None:
    assert audited(lambda files: files.update({f"mlx_cuda.libs/{name}": library(world, name)})) - {"rpath"} == {"driver-inside"}


def record_of(files: Files) -> list[str]:
    return [*(f"{name},{digest(data)},{len(data)}" for name, data in files.items()), f"{RECORD},,"]


@pytest.mark.parametrize(
    "spoil",
    [
        lambda lines: lines[1:],
        lambda lines: [*lines, "mlx_cuda/ghost.py,sha256=x,1"],
        lambda lines: [*lines, lines[0]],
        lambda lines: [lines[0].replace("sha256=", "sha256=x"), *lines[1:]],
        lambda lines: [re.sub(r",\d+$", ",999", lines[0]), *lines[1:]],
        lambda lines: [lines[0].split(",")[0] + ",,", *lines[1:]],
        lambda lines: [lines[0].rsplit(",", 1)[0], *lines[1:]],
    ],
    ids=["unlisted", "ghost", "twice", "hash", "size", "no hash", "fields"],
)
def test_record(audited: Callable[..., set[str]], spoil: Callable[[list[str]], list[str]]) -> None:
    assert audited(lambda files: files.update({RECORD: "\n".join(spoil(record_of(files))).encode()})) == {"record"}


def test_size(audited: Callable[..., set[str]]) -> None:
    noise = os.urandom((MATRIX.size_budget_mib + 1) << 20)
    assert audited(lambda files: files.update({"mlx_cuda/noise.bin": noise})) == {"size"}


# ------------------------------------------------------------------------------------------------------------ METADATA and WHEEL


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("manylinux_2_28_x86_64", "manylinux_2_35_x86_64"),
        ("Purelib: false", "Purelib: true"),
        ("Wheel-Version: 1.0", "Wheel-Version: 2.0"),
        ("Tag:", "Gat:"),
    ],
)
def test_wheel_file(audited: Callable[..., set[str]], old: str, new: str) -> None:
    assert audited(replaced(WHEEL, old, new)) == {"tags"}


def test_tag_of_one_python(audited: Callable[..., set[str]]) -> None:
    name = NAMES["linux"].replace("cp310-abi3", "cp312-cp312")
    assert audited(lambda files: files.update({WHEEL: wheel_file(name).encode()}), name=name) == {"tags"}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("Name: mlx-cuda\n", "Name: mlx-kuda\n"),
        (f"Version: {VERSION}", "Version: 0.32.3"),
        (f"Version: {VERSION}", "Version: today"),
        ("Requires-Python: >=3.10", "Requires-Python: >=3.9"),
        ("Requires-Python: >=3.10", "Requires-Python: 3.10 or so"),
        ("Summary: ", "Yrammus: "),
        ("# mlx-cuda", ""),
        ("License-Expression: MIT", "License-Expression: as you like"),
        ("Metadata-Version: 2.4", "Metadata-Version: 2.1"),
    ],
)
def test_metadata(audited: Callable[..., set[str]], old: str, new: str) -> None:
    assert audited(replaced(METADATA, old, new)) == {"metadata"}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('mlx-cpu==0.32.4; extra == "cpu"', 'mlx-cpu==0.32.4; extra == "cpu" and platform_system == "Linux"'),
        ("Requires-Dist: mlx==0.32.4\n", "Requires-Dist: mlx==0.32.4; sys_platform == 'linux'\n"),
        ("Requires-Dist: mlx==0.32.4\n", "Requires-Dist: mlx>=0.32\n"),
        ("Requires-Dist: mlx==0.32.4\n", ""),
        ("Provides-Extra: cu13", "Provides-Extra: cuda13"),
        ("Requires-Dist: mlx==0.32.4\n", "Requires-Dist: mlx==0.32.4\nRequires-Dist: numpy\n"),
        ("mlx-cuda-12==0.32.4", "mlx-cuda-12==0.32.3"),
    ],
)
def test_requirements(audited: Callable[..., set[str]], old: str, new: str) -> None:
    assert "requirements" in audited(replaced(METADATA, old, new))


def test_an_unreadable_requirement(audited: Callable[..., set[str]]) -> None:
    assert audited(replaced(METADATA, "Requires-Dist: mlx==0.32.4\n", "Requires-Dist: mlx = 0.32.4\n")) == {"metadata", "requirements"}


def test_licence_not_in_the_wheel(audited: Callable[..., set[str]]) -> None:
    assert audited(lambda files: files.pop(f"{DIST_INFO}/licenses/LICENSE") and None) == {"licence"}


@pytest.mark.parametrize("line", ["License-File: LICENSE\n", "License-Expression: MIT\n"])
def test_licence_not_named(audited: Callable[..., set[str]], line: str) -> None:
    assert audited(replaced(METADATA, line, "")) == {"licence"}


@pytest.mark.usefixtures("without_abi3audit")
def test_same_metadata(tmp_path: Path, files: Files, capsys: pytest.CaptureFixture[str]) -> None:
    one = write_wheel(tmp_path / NAMES["linux"], files)
    changed = dict(files)
    name = NAMES["linux"].replace("x86_64", "aarch64")
    replaced(METADATA, "Requires-Dist: mlx==0.32.4\n", "")(changed)
    other = write_wheel(tmp_path / name, changed)
    assert main("audit", str(one), str(other)) == 1
    assert (
        f"{name}: {METADATA}: {SAME_METADATA}: lacks Requires-Dist: mlx==0.32.4, expected the same as in {one.name}"
        in capsys.readouterr().out
    )


# ------------------------------------------------------------------------------------------------------------ each binary by itself


def with_module(world: World, **changes: object) -> Change:
    """A change of the CUDA 13 module, built anew."""
    built = world.module("_cu13.abi3.so", CU13, **changes)  # type: ignore[arg-type]
    return lambda files: files.update({member(world, CU13): built})


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
    (violation,) = audit_wheel(write_wheel(tmp_path / NAMES["linux"], changed))
    assert (violation.check, violation.member) == ("abi3", "mlx_cuda/_cu13.abi3.so")
    assert message in violation.message


def test_abi3_needs_its_suffix(audited: Callable[..., set[str]], world: World) -> None:
    def change(files: Files) -> None:
        files["mlx_cuda/_cu13.so"] = files.pop(member(world, CU13))

    assert audited(change, checks=tuple(CHECKS)) == {"abi3"}


def test_libpython(audited: Callable[..., set[str]], world: World) -> None:
    python = world.library(world.folder / "made" / "libpython3.12.so.1.0", "int f(void) { return 1; }")
    assert audited(with_module(world, arguments=[python]), checks=tuple(CHECKS)) == {"abi3", "needed"}


@pytest.mark.parametrize(
    "gpu_code",
    [
        fatbin(set(CU13.sass) - {90}, CU13.ptx),
        fatbin([*CU13.sass, 87], CU13.ptx),
        fatbin([*(set(CU13.sass) - {90}), "90a"], CU13.ptx),
        fatbin(CU13.sass, [*CU13.ptx, 90]),
        fatbin(CU13.sass, []),
        fatbin(CU13.sass, CU13.ptx) + fatbin([90], []),
        container([*(entry(2, str(each)) for each in CU13.sass), *(entry(1, str(each)) for each in CU13.ptx), entry(16, "90")]),
        fatbin(CU13.sass, CU13.ptx).replace(b"\x18\0\0\0", b"\x18\0\1\0"),
        b"",
    ],
    ids=["one missing", "one more", "variant", "more PTX", "no PTX", "second container", "other kind", "damaged", "none"],
)
def test_architectures(audited: Callable[..., set[str]], world: World, gpu_code: bytes) -> None:
    assert audited(with_module(world, gpu_code=gpu_code)) == {"architectures"}


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


@pytest.mark.parametrize("old", ["nvidia/cu13/bin/x86_64", "nvidia-cublas-cu12", "libcudart.so.12", "525.60"])
def test_dll_directories(audited: Callable[..., set[str]], old: str) -> None:
    assert audited(replaced("mlx_cuda/_libraries.json", old, "something-else")) == {"dll-directories"}


@pytest.mark.parametrize("contents", [None, b"not json"])
def test_no_list_of_libraries(audited: Callable[..., set[str]], contents: bytes | None) -> None:
    def change(files: Files) -> None:
        del files["mlx_cuda/_libraries.json"]
        if contents:
            files["mlx_cuda/_libraries.json"] = contents

    assert audited(change) == {"dll-directories"}


def test_unversioned_libc(audited: Callable[..., set[str]], world: World) -> None:
    source = "int future_of_libc(void); int use(void) { return future_of_libc(); }"
    assert audited(with_module(world, source=source)) == {"unversioned-libc"}
    weak = "int future_of_libc(void) __attribute__((weak)); int use(void) { return future_of_libc ? future_of_libc() : 0; }"
    assert audited(with_module(world, source=weak)) == set()


# ------------------------------------------------------------------------------------------------------------ the command


@pytest.fixture
def without_abi3audit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(binaries, "_abi3audit", lambda _: [])


def main(*arguments: str) -> int:
    from ci.__main__ import main as command

    return command(arguments)


def test_command_on_a_good_wheel(tmp_path: Path, files: Files, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_wheel(tmp_path / NAMES["linux"], files)
    assert main("audit", str(path)) == 0
    assert capsys.readouterr().out == f"{path.name}: ok by policy mlx-cuda\n"


@pytest.mark.usefixtures("without_abi3audit")
def test_command_prints_a_line_per_violation(tmp_path: Path, files: Files, capsys: pytest.CaptureFixture[str]) -> None:
    changed = {**files, RECORD: b"\n".join([*(line.encode() for line in record_of(files)), b"ghost.py,sha256=x,1"])}
    path = write_wheel(tmp_path / NAMES["linux"], changed)
    assert main("audit", str(path)) == 1
    assert capsys.readouterr().out == f"{path.name}: ghost.py: record: is in RECORD but not in the archive\n"


@pytest.mark.usefixtures("without_abi3audit")
def test_command_json(tmp_path: Path, files: Files, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_wheel(tmp_path / NAMES["linux"], files)
    assert main("audit", "--json", str(path)) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["violations"] == []
    assert [module["member"] for module in answer["wheels"][0]["modules"]] == ["mlx_cuda/_cu12.abi3.so", "mlx_cuda/_cu13.abi3.so"]


@pytest.mark.usefixtures("without_abi3audit")
def test_a_developers_build(tmp_path: Path, files: Files, world: World, capsys: pytest.CaptureFixture[str]) -> None:
    """One module for one GPU is wrong by the whole matrix, and right by what was asked for."""
    changed = dict(files)
    del changed[member(world, CU12)]
    with_module(world, gpu_code=fatbin([90], []))(changed)
    path = str(write_wheel(tmp_path / NAMES["linux"], changed))
    assert main("audit", path, "--cuda", "13.0", "--arch", "90") == 0
    assert main("audit", path, "--cuda", "13.0", "--arch", "90", "--ptx", "90") == 1
    assert main("audit", path, "--cuda", "13.0") == 1
    assert main("audit", path) == 1
    assert ": modules: is missing" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "contents"),
    [
        ("absent.whl", None),
        ("mlx_cuda-1-cp310-abi3-win_amd64.whl", None),
        ("mlx_cuda-1-cp310-abi3-win_amd64.whl", b"PK\3\4 but no more"),
        ("x.whl", b"PK"),
    ],
)
def test_unreadable_input(tmp_path: Path, name: str, contents: bytes | None, capsys: pytest.CaptureFixture[str]) -> None:
    if contents:
        (tmp_path / name).write_bytes(contents)
    assert main("audit", str(tmp_path / name)) == 2
    assert "error:" in capsys.readouterr().err


def test_a_damaged_binary_is_unreadable_input(tmp_path: Path, files: Files, world: World) -> None:
    changed = {**files, member(world, CU13): files[member(world, CU13)][:200]}
    with pytest.raises(EnvironmentProblem, match="not readable as ELF"):
        audit_wheel(write_wheel(tmp_path / NAMES["linux"], changed), checks=QUICK)


def test_unknown_names(tmp_path: Path, files: Files) -> None:
    path = write_wheel(tmp_path / NAMES["linux"], files)
    for arguments in ({"policy": "nobody"}, {"policy": "upstream-mlx"}, {"cuda": ["11.8"]}, {"policy": "upstream-mlx", "cuda": ["13.0"]}):
        with pytest.raises(EnvironmentProblem):
            audit_wheel(path, **arguments)


def test_describe(tmp_path: Path, files: Files) -> None:
    path = write_wheel(tmp_path / NAMES["linux"], files)
    facts = describe(path)
    assert (facts.file, facts.version, facts.size) == (path.name, VERSION, path.stat().st_size)
    assert facts.tags == ("cp310-abi3-manylinux_2_28_x86_64",)
    first = facts.modules[0]
    assert first.sass == tuple(map(str, CU12.sass))
    assert first.ptx == ("80", "120")
    assert first.rpath == CU12.rpath()
    assert "libcublasLt.so.12" in first.needed
    assert first.fatbins == 1


def test_no_wheel_without_its_folder(tmp_path: Path, files: Files) -> None:
    for name in (METADATA, WHEEL, f"{DIST_INFO}/licenses/LICENSE"):
        files = {key: value for key, value in files.items() if key != name}
    path = write_wheel(tmp_path / NAMES["linux"], {**files, "other-1.dist-info/METADATA": b""})
    with pytest.raises(EnvironmentProblem, match=r"2 \.dist-info folders"):
        read(path)


def test_every_check_is_documented() -> None:
    text = (REPOSITORY / "docs" / "audit.md").read_text("utf-8")
    documented = re.findall(r"^\| `([a-z0-9-]+)` \|", text, re.MULTILINE)
    assert documented == [*CHECKS, SAME_METADATA]


def test_the_command_line_imports_nothing_heavy() -> None:
    """`toolkit path` runs in the build environment, which has none of the audit's libraries."""
    source = Path(audit.__file__).read_text("utf-8")
    top = re.findall(r"^(?:from|import) (\S+)", source, re.MULTILINE)
    assert set(top) <= {"__future__", "json", "dataclasses", "itertools", "pathlib", "typing"}
