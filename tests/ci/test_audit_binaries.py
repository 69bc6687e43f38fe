"""The audit's checks of binaries and of where their libraries come from: each passes the good wheel and fires on a bad one."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path, PurePosixPath

import pytest

from ci.__main__ import main
from ci.audit import audit_wheel, providers
from ci.audit.checks import CHECKS
from ci.audit.checks.libraries import Supplier, supplier
from ci.audit.policy import for_wheel
from ci.audit.systems import is_system_library
from ci.errors import EnvironmentProblem
from ci.matrix import REPOSITORY, Platform
from ci.wheelfile.wheel import read

from .audit_support import (
    CU12,
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
    said,
    wheel_file,
    with_module,
    with_sbom,
    write_wheel,
)

MODULE = f"mlx_cuda/{CU13.module}.abi3.so"
NOBODY = "which neither manylinux_2_28_x86_64 nor the wheel nor a declared provider supplies"
NEEDLESS = "expected only directories of libraries that it needs"
GPU_CODE = fatbin([80], [])


# ------------------------------------------------------------------------------------------------------------ each binary by itself


def test_a_newer_glibc(told: Callable[..., list[str]], world: World) -> None:
    script = world.folder / "future.map"
    script.write_text("GLIBC_2.99 { global: future; };")
    libc = world.library(world.folder / "future" / "libc.so.6", "int future(void) { return 1; }", f"-Wl,--version-script={script}")
    source = "int future(void); int use(void) { return future(); }"
    lines = told(with_module(world, source=source, arguments=["-nostdlib", libc]))
    assert lines == [f"{MODULE}: platform-tag: needs GLIBC_2.99 of libc.so.6, expected at most GLIBC_2.28 by manylinux_2_28_x86_64"]


@pytest.mark.parametrize("platform", ["linux_x86_64", "manylinux_2_99_x86_64"])
def test_a_platform_tag_that_no_index_accepts(tmp_path: Path, files: Files, platform: str) -> None:
    path = tmp_path / NAMES["linux"].replace("manylinux_2_28_x86_64", platform)
    message = f"has the platform tag {platform}, expected a manylinux tag: no index accepts any other"
    assert said(path, files, lambda _: None, ("platform-tag",)) == [f"platform-tag: {message}"]


def test_every_tag_of_several_has_to_hold(audited: Callable[..., set[str]], world: World) -> None:
    """memcpy has version 2.14 in glibc, which manylinux_2_5 does not admit."""
    name = NAMES["linux"].replace("manylinux_2_28", "manylinux_2_5_x86_64.manylinux_2_28")
    source = "void *memcpy(void *, const void *, unsigned long); void copy(char *a, char *b, unsigned long n) { memcpy(a, b, n); }"

    def change(files: Files) -> None:
        with_module(world, source=source)(files)
        files[WHEEL] = wheel_file(name).encode()

    assert audited(change, name=name) == {"platform-tag"}
    assert audited(with_module(world, source=source)) == set()


def test_another_machine(tmp_path: Path, files: Files, world: World) -> None:
    path = tmp_path / NAMES["linux"].replace("28_x86_64", "28_aarch64.manylinux_2_31_aarch64")
    message = "machine: is ELF for x86_64, expected ELF for manylinux_2_28_aarch64, manylinux_2_31_aarch64"
    assert said(path, files, lambda _: None, ("machine",)) == [f"{member(world, cuda)}: {message}" for cuda in (CU12, CU13)]


def test_another_system(tmp_path: Path, files: Files, world: World) -> None:
    message = "machine: is ELF for x86_64, expected PE for win_amd64"
    assert said(tmp_path / NAMES["windows"], files, lambda _: None, ("machine",)) == [
        f"{member(world, cuda)}: {message}" for cuda in (CU12, CU13)
    ]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            "void *PyUnicode_AsUTF8(void *), *PyList_Foo(void *); void *g(void *o) { return PyUnicode_AsUTF8(PyList_Foo(o)); }",
            "uses PyList_Foo, PyUnicode_AsUTF8, expected the stable ABI only",
        ),
        (
            "void *PyType_GetName(void *); void *g(void *o) { return PyType_GetName(o); }",
            "uses PyType_GetName, which the stable ABI has since 3.11, expected that of 3.10",
        ),
    ],
    ids=["not stable", "too new"],
)
def test_abi3(tmp_path: Path, files: Files, world: World, source: str, message: str) -> None:
    assert said(tmp_path / NAMES["linux"], files, with_module(world, source=source), ("abi3",)) == [f"{MODULE}: abi3: {message}"]


def test_abi3_needs_its_suffix(tmp_path: Path, files: Files) -> None:
    def change(files: Files) -> None:
        files["mlx_cuda/_cu13.so"] = files.pop(MODULE)

    lines = said(tmp_path / NAMES["linux"], files, change, ("abi3", "modules"))
    assert lines == ["mlx_cuda/_cu13.so: abi3: is not named as a stable-ABI module, expected the suffix .abi3.so"]


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


def test_libpython(tmp_path: Path, files: Files, world: World) -> None:
    python = world.library(world.folder / "made" / "libpython3.12.so.1.0", "int f(void) { return 1; }")
    assert said(tmp_path / NAMES["linux"], files, with_module(world, arguments=[python]), ("abi3", "needed")) == [
        f"{MODULE}: abi3: needs libpython3.12.so.1.0 of one Python version, expected no libpython",
        f"{MODULE}: needed: needs libpython3.12.so.1.0, {NOBODY}",
    ]


@pytest.mark.usefixtures("locked_roots")
@pytest.mark.parametrize(
    ("gpu_code", "message"),
    [
        (GPU_CODE, "holds 1 fatbins (the first at {place:#x}), expected none: they are files"),
        (
            GPU_CODE[:26] + b"\1" + GPU_CODE[27:],
            "has a damaged fatbin at offset {place}: the entry at {entry} runs past the end of its container",
        ),
    ],
    ids=["whole", "damaged"],
)
def test_no_gpu_code_inside(tmp_path: Path, files: Files, world: World, gpu_code: bytes, message: str) -> None:
    changed = dict(files)
    with_module(world, gpu_code=gpu_code)(changed)
    place = changed[MODULE].index(gpu_code)
    lines = said(tmp_path / NAMES["linux"], changed, lambda _: None)
    assert lines == [f"{MODULE}: architectures: {message.format(place=place, entry=place + 16)}"]


def test_gpu_code_behind_what_is_damaged(tmp_path: Path, files: Files, world: World) -> None:
    """In another module."""
    damaged = GPU_CODE[:26] + b"\1" + GPU_CODE[27:]
    others = {
        name: world.module(PurePosixPath(name).name, cuda, gpu_code=code)
        for name, cuda, code in ((member(world, CU12), CU12, damaged), (MODULE, CU13, GPU_CODE))
    }
    lines = said(tmp_path / NAMES["linux"], files, lambda files: files.update(others), ("architectures",))
    assert [line.split()[0] for line in lines] == [f"{name}:" for name in others]


def test_no_gpu_code_inside_what_repair_copied(audited: Callable[..., set[str]], world: World) -> None:
    data = ",".join(map(str, fatbin([80], [])))
    path = world.compile(world.folder / "made" / "libgpu.so", f"const unsigned char code[] = {{{data}}};")
    assert audited(lambda files: files.update({"mlx_cuda.libs/libgpu.so": path.read_bytes()})) == {"architectures", "loader", "modules"}


def test_not_stripped(told: Callable[..., list[str]], world: World) -> None:
    assert told(with_module(world, strip=False)) == [f"{MODULE}: stripped: has .symtab, expected it stripped"]


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
def test_build_path(told: Callable[..., list[str]], world: World, path: str) -> None:
    lines = told(with_module(world, source=f'const char where[] = "{path}";'))
    named = path.removeprefix("-I").removeprefix("old:").replace("\\\\", "\\")
    assert lines == [f"{MODULE}: build-path: holds paths of the build (1), such as {named}, expected none (see -ffile-prefix-map)"]


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


def test_executable_stack(told: Callable[..., list[str]], world: World) -> None:
    message = "has an executable PT_GNU_STACK, which glibc 2.41 refuses to load, expected -Wl,-z,noexecstack"
    lines = told(with_module(world, arguments=["-Wl,-z,execstack"]))
    assert lines == [f"{MODULE}: executable-stack: {message}"]


# ------------------------------------------------------------------------------------------------------------ where libraries come from


def test_a_library_that_nobody_supplies(told: Callable[..., list[str]], world: World) -> None:
    stranger = world.library(world.folder / "made" / "libstranger.so.1", "int f(void) { return 1; }")
    lines = told(with_module(world, arguments=[stranger]))
    assert lines == [f"{MODULE}: needed: needs libstranger.so.1, {NOBODY}"]


@pytest.mark.usefixtures("locked_roots")
def test_a_library_inside_the_wheel(tmp_path: Path, files: Files, world: World) -> None:
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

    path, checks = tmp_path / NAMES["linux"], ("needed", "rpath")
    assert said(path, files, change, checks) == []
    assert said(path, files, unreachable, checks) == [
        f"{MODULE}: rpath: lacks $ORIGIN/../mlx_cuda.libs in its RPATH, the directory of a needed library"
    ]
    assert said(path, files, under_another_name, checks) == [
        f"{MODULE}: needed: needs libfriend.so.1, {NOBODY}",
        f"{MODULE}: rpath: has $ORIGIN/../mlx_cuda.libs in its RPATH, {NEEDLESS}",
    ]


@pytest.mark.parametrize(
    ("library", "expected"),
    [
        ("libcublasLt.so.13", Supplier("package", "nvidia-cublas", "of the extra cu13", "nvidia/cu13/lib")),
        ("libcublas.so.13", Supplier("package", "nvidia-cublas", "of the extra cu13", "nvidia/cu13/lib", needed=False)),
        ("libfriend.so.1", Supplier("inside", "this wheel", "copied in by repair", "mlx_cuda.libs")),
        ("libcuda.so.1", Supplier("driver", "NVIDIA driver", "of the machine")),
        ("libm.so.6", Supplier("system", "every Linux of the tag", "manylinux_2_28_x86_64, manylinux_2_31_x86_64")),
        ("ld-linux-x86-64.so.2", Supplier("system", "every Linux of the tag", "manylinux_2_28_x86_64, manylinux_2_31_x86_64")),
        ("ld-linux-x86-64.so.2.old", Supplier("nobody", "nobody", "not declared, not the system's")),
        ("libstranger.so.1", Supplier("nobody", "nobody", "not declared, not the system's")),
        ("libcublasLt.so.12", Supplier("nobody", "nobody", "not declared, not the system's")),
    ],
)
def test_who_supplies_a_library(tmp_path: Path, files: Files, library: str, expected: Supplier) -> None:
    path = tmp_path / NAMES["linux"].replace(".whl", ".manylinux_2_31_x86_64.whl")
    wheel = read(write_wheel(path, {**files, "mlx_cuda.libs/libfriend.so.1": files[MODULE]}))
    policy = for_wheel(wheel)
    assert supplier(wheel, policy, MODULE, library) == expected
    modules = tuple(replace(each, extra="") for each in policy.modules)
    always = replace(expected, detail="required") if expected.kind == "package" else expected
    assert supplier(wheel, replace(policy, modules=modules), MODULE, library) == always


@pytest.mark.parametrize(
    ("library", "ours"),
    [
        ("ld-linux-x86-64.so.2", True),
        ("ld-linux-aarch64.so.1", False),
        ("ld-linux-evil.so.7", False),
        ("ld-linux/../../../../somewhere/evil.so.1", False),
    ],
)
def test_the_loader_has_one_name(tmp_path: Path, files: Files, library: str, ours: bool) -> None:
    assert is_system_library(read(write_wheel(tmp_path / NAMES["linux"], files)), library) == ours


def test_a_library_declared_as_not_needed(told: Callable[..., list[str]], world: World) -> None:
    cublas = world.site("cuda-13.0") / "nvidia/cu13/lib/libcublas.so.13"
    lines = told(with_module(world, arguments=[cublas]))
    assert lines == [f"{MODULE}: needed: needs libcublas.so.13, which is declared as not needed: no requirement supplies it"]


def test_a_declared_library_that_is_not_needed(told: Callable[..., list[str]], world: World) -> None:
    source = "int libcudart_of_13(void) { return 0; }"
    lines = told(with_module(world, without=["libcudart"], source=source))
    assert lines == [f"{MODULE}: needed: does not need libcudart.so.13, which is declared as needed"]


def test_an_extra_without_the_provider(told: Callable[..., list[str]]) -> None:
    line = 'Requires-Dist: nvidia-cudnn-cu13<10,>=9.19; extra == "cu13"\n'
    absent = "expected the extra cu13 to require nvidia-cudnn-cu13, which supplies it"
    for other, expected in (
        ("", absent),
        (line.replace('cu13"', 'cu12"'), absent),
        (line.replace("<10,>=9.19", ""), "expected a bound on nvidia-cudnn-cu13: a new major renames it"),
    ):
        lines = told(replaced(METADATA, line, other), ("provider",))
        assert lines == [f"{MODULE}: provider: needs libcudnn.so.9, {expected}"]


@pytest.mark.usefixtures("locked_roots")
def test_a_module_that_needs_no_extra(tmp_path: Path, files: Files) -> None:
    """What it needs comes with the requirements that are always installed."""
    wheel = read(write_wheel(tmp_path / NAMES["linux"], files))
    policy = for_wheel(wheel, cuda=["13.0"])
    always = replace(policy, modules=tuple(replace(module, extra="") for module in policy.modules))
    packages = {each.files["linux"]: each.provider for each in CU13.libraries if each.needed}
    messages = {f"needs {file}, expected the requirements to require {each}, which supplies it" for file, each in packages.items()}
    assert set(CHECKS["provider"](wheel, always)) == {(MODULE, message) for message in messages}


def other_roots(world: World, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the roots, to spoil; returns the site-packages of CUDA 13."""
    shutil.copytree(world.folder, folder, symlinks=True, dirs_exist_ok=True)
    monkeypatch.setattr(providers, "site", lambda root, _: folder / root / "site")
    return folder / "cuda-13.0" / "site"


def test_a_locked_wheel_of_another_layout(tmp_path: Path, files: Files, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    site = other_roots(world, tmp_path / "roots", monkeypatch)
    (site / "nvidia/cu13/lib/libcublasLt.so.13").rename(site / "nvidia/libcublasLt.so.13")
    file = "nvidia/cu13/lib/libcublasLt.so.13"
    roots = "cuda-13.0 or mlx-cu13 or cudnn-frontend"
    assert said(tmp_path / NAMES["linux"], files, lambda _: None) == [
        f"{MODULE}: provider: needs {file}, but no locked wheel of {roots} installs it, expected nvidia-cublas to",
        f"{MODULE}: symbols: has the undefined symbol libcublasLt_of_13 without a version, expected a needed library to export it",
    ]


def test_a_locked_wheel_of_another_package(tmp_path: Path, files: Files, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    site = other_roots(world, tmp_path / "roots", monkeypatch)
    (information,) = site.glob("nvidia_cublas-*.dist-info")
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: nvidia-cublas-nightly\nVersion: 13.0.1\n")
    message = "needs nvidia/cu13/lib/libcublasLt.so.13, which nvidia-cublas-nightly installs, expected nvidia-cublas"
    assert said(tmp_path / NAMES["linux"], files, lambda _: None) == [f"{MODULE}: provider: {message}"]


def test_a_locked_wheel_that_the_extra_excludes(tmp_path: Path, files: Files, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    site = other_roots(world, tmp_path / "roots", monkeypatch)
    (information,) = site.glob("nvidia_cudnn_cu13-*.dist-info")
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: nvidia-cudnn-cu13\nVersion: 9.18.0\n")
    message = "needs nvidia/cudnn/lib/libcudnn.so.9 of nvidia-cudnn-cu13, locked at 9.18.0, expected a version in <10,>=9.19"
    assert said(tmp_path / NAMES["linux"], files, lambda _: None) == [f"{MODULE}: provider: {message}"]


def test_a_root_that_is_not_installed(tmp_path: Path, audited: Callable[..., set[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    def site(root: str, _: Platform) -> Path:
        raise EnvironmentProblem(f"{root} is not installed", fix=f"python -m ci toolkit install {root}")

    monkeypatch.setattr(providers, "site", site)
    assert audited(lambda files: files.update({"evil.pth": b""})) == {"members", "provider", "symbols"}, "the others still look"
    (path,) = tmp_path.glob("*.whl")
    (found,) = audit_wheel(path, checks=("provider",))
    assert str(found) == f"{path.name}: provider: cannot look: cuda-12.8 is not installed\n    fix: python -m ci toolkit install cuda-12.8"
    assert main(["audit", str(path)]) == 1
    audited(lambda _: None)
    assert main(["audit", str(with_sbom(path))]) == 2, "nothing is wrong, as far as could be seen"


@pytest.mark.parametrize("data", [b"", b"\x7fELF"], ids=["empty", "cut off"])
def test_a_root_that_is_damaged(tmp_path: Path, files: Files, world: World, monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    library = other_roots(world, tmp_path / "roots", monkeypatch) / "nvidia/cu13/lib/libcublasLt.so.13"
    library.write_bytes(data)
    found = audit_wheel(write_wheel(tmp_path / NAMES["linux"], files), checks=("loader", "symbols"))
    assert [each.check for each in found if each.unseen] == ["symbols"]
    assert f"cannot look: cannot read {library}: " in found[0].message
    assert "python -m ci toolkit install" in found[0].fix


BELOW = "in its RPATH, expected entries relative to $ORIGIN and below site-packages"


@pytest.mark.parametrize(
    ("rpath", "messages"),
    [
        ([*CU13.rpath(), "/opt/cuda/lib64"], [f"has /opt/cuda/lib64 {BELOW}"]),
        ([*CU13.rpath(), ""], [f"has an empty entry {BELOW}"]),
        ([*CU13.rpath(), "$ORIGIN/../../lib"], [f"has $ORIGIN/../../lib {BELOW}"]),
        ([*CU13.rpath(), "$ORIGIN/../nvidia/cublas/lib"], [f"has $ORIGIN/../nvidia/cublas/lib in its RPATH, {NEEDLESS}"]),
        ([*CU13.rpath(), "lib"], [f"has lib {BELOW}"]),
        ([*CU13.rpath(), "$ORIGIN/$LIB"], [f"has $ORIGIN/$LIB {BELOW}"]),
        ([each.replace("$ORIGIN", "${ORIGIN}") for each in CU13.rpath()], []),
        ([*CU13.rpath(), "$ORIGIN"], []),
        (CU13.rpath()[1:], [f"lacks {CU13.rpath()[0]} in its RPATH, the directory of a needed library"]),
        ([], [f"lacks {each} in its RPATH, the directory of a needed library" for each in sorted(CU13.rpath())]),
    ],
    ids=["absolute", "empty", "outside", "of nothing needed", "relative", "of the loader", "braces", "its own", "one missing", "none"],
)
def test_rpath(told: Callable[..., list[str]], world: World, rpath: list[str], messages: list[str]) -> None:
    assert told(with_module(world, rpath=rpath), ("rpath",)) == [f"{MODULE}: rpath: {message}" for message in messages]


LIBRARIES = "mlx_cuda/_libraries.json"


@pytest.mark.parametrize(("old", "key"), [("nvidia/cu13/bin/x86_64", "13"), ("nvidia-cublas-cu12", "12"), ("550.54", "12")])
def test_dll_directories(tmp_path: Path, files: Files, old: str, key: str) -> None:
    lines = said(tmp_path / NAMES["linux"], files, replaced(LIBRARIES, old, "something-else"), ("dll-directories",))
    message = f"differs from ci/matrix/matrix.toml in {key!r}, expected the output of python -m ci.matrix.package_table"
    assert lines == [f"{LIBRARIES}: dll-directories: {message}"]


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        (None, "is missing, expected the list of libraries that the package reads at import"),
        (b"not json", "is no table in JSON: Expecting value: line 1 column 1 (char 0)"),
        (b"[1]", "is no table in JSON: 'list' object has no attribute 'keys'"),
        (b"[" * 100_000, "is no table in JSON: "),
    ],
)
def test_no_list_of_libraries(tmp_path: Path, files: Files, contents: bytes | None, message: str) -> None:
    def change(files: Files) -> None:
        del files[LIBRARIES]
        if contents:
            files[LIBRARIES] = contents

    (line,) = said(tmp_path / NAMES["linux"], files, change, ("dll-directories",))
    assert line.startswith(f"{LIBRARIES}: dll-directories: {message}")


def test_a_module_without_its_entry_point(tmp_path: Path, files: Files) -> None:
    def change(files: Files) -> None:
        files[MODULE] = files[MODULE].replace(b"PyInit__cu13\0", b"PyInit__cu31\0")

    message = f"{MODULE}: abi3: does not export PyInit__cu13, expected it: Python imports a module by calling it"
    assert said(tmp_path / NAMES["linux"], files, change, ("abi3",)) == [message]
