"""Each fault of the table is found, in wheels of both systems, and nothing else is; the document has the table."""

from __future__ import annotations

import string
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from ci.audit import audit_wheel, providers
from ci.errors import CheckFailed, EnvironmentProblem
from ci.matrix import System
from ci.wheelfile.wheel import read
from tests.by_day import first_of_each

from .attack_support import ANY, DOCUMENT, FAULTS, Fault, document, info, packed, plain, record_of
from .audit_support import NAMES, QUICK, Files, World, good_files, make_world, with_sbom, write_wheel

CHECKS = (*QUICK, "sbom")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[System], tuple[World, Files, Files]]:
    """A world, and the good files in it without and with their SBOM: made once, where parameters of a fixture would for every fault."""

    @cache
    def make(system: System) -> tuple[World, Files, Files]:
        world = make_world(tmp_path_factory.mktemp(system), system)
        files = good_files(world)
        return world, files, dict(read(with_sbom(write_wheel(tmp_path_factory.mktemp("good") / NAMES[system], files))).members)

    return make


@pytest.fixture
def world(request: pytest.FixtureRequest, made: Callable[[System], tuple[World, Files, Files]]) -> World:
    return made(request.param)[0]


@pytest.fixture
def files(world: World, made: Callable[[System], tuple[World, Files, Files]]) -> Files:
    return made(world.system)[1]


@pytest.fixture
def finished(world: World, made: Callable[[System], tuple[World, Files, Files]]) -> Files:
    return made(world.system)[2]


def spoilt(path: Path, fault: Fault, files: Files, finished: Files) -> Path:
    if fault.files:
        finished = dict(files)
        fault.files(finished)
        path.write_bytes(archive(finished, fault))
        if fault.found != "unreadable":
            finished = dict(read(with_sbom(path)).members)
    path.write_bytes(fault.data(archive(finished, fault)))
    return path


def archive(files: Files, fault: Fault) -> bytes:
    folder = next(name for name in files if name.endswith("/METADATA")).partition("/")[0]
    entries = [(info(name), data) for name, data in files.items() if name != f"{folder}/RECORD"]
    if fault.entries:
        fault.entries(entries)
    record = "\n".join([*fault.record(record_of(entries, folder)), ""]).encode()
    return packed([*entries, (info(f"{folder}/RECORD"), record)])


def said(path: Path) -> str:
    """The checks that found something, or the error."""
    try:
        violations = audit_wheel(path, checks=CHECKS)
    except CheckFailed as error:
        return str(error)
    except EnvironmentProblem as error:
        return f"unreadable: {error}"
    print("\n".join(map(str, violations)))  # shown when a test fails
    return ", ".join(sorted({violation.check for violation in violations}))


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize(
    ("world", "fault"),
    [
        case
        for system in ANY
        for case in first_of_each(
            (fault for fault in FAULTS if system in fault.systems),
            lambda fault: fault.found,
            lambda fault, system=system: f"{system}: {fault.what}",  # type: ignore[misc]
            system,
        )
    ],
    indirect=["world"],
)
def test_fault(tmp_path: Path, world: World, files: Files, finished: Files, fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(providers, "site", lambda root, _: world.site(root))
    found = said(spoilt(tmp_path / fault.name(NAMES[world.system]), fault, files, finished))
    assert fault.found in found if " " in fault.found.replace(", ", "") or fault.found == "unreadable" else fault.found == found, found
    assert found.isprintable() or found.startswith("unreadable")


LIBRARIES = {
    "nvidia-inside": [
        *("libcudart-1a2b3c4d.so.12", "libcublas.so.13", "libcublasLt.so.13", "libcudnn_graph.so.9", "libcufft.so.12", "libcufile.so.0"),
        *("libcupti.so.13", "libcurand.so.10", "libcusolver.so.12", "libcusparse.so.12", "libnccl.so.2", "libnppc.so.13", "libnvrtc.so.13"),
        *("cudart64_12.dll", "cublas64_13.dll", "cudnn64_9.dll", "cufft64_12.dll", "cupti64_2025.dll", "curand64_10.dll"),
        *("cusolver64_12.dll", "cusparse64_12.dll", "nccl.dll", "nppc64_13.dll", "nvrtc64_130_0.dll", "cudart.lib", "libcudart_static.a"),
        *("libmlx.so", "libmlx-1a2b3c4d.so", "mlx.dll", "mlx-1a2b3c4d.dll", "LIBCUBLAS.so"),
    ],
    "driver-inside": [
        *("libcuda.so.1", "libcuda-0123abcd.so.580.65", "libnvidia-ml.so.1", "libcudadebugger.so.1"),
        *("nvcuda.dll", "nvcuda-1a2b3c4d.dll", "nvcuda64.dll", "nvcudadebugger.dll"),
    ],
    "": ["libcurl.so.4", "libmlxcuda.so", "nvidia.txt", "cudart.py", "libcuda.txt", "mlx.py"],
}


@pytest.mark.parametrize("world", ["linux"], indirect=True)
def test_libraries_of_others_by_their_names(tmp_path: Path, world: World, files: Files) -> None:
    """Each name by itself, whatever is in the file."""
    names = [name for each in LIBRARIES.values() for name in each]
    path = write_wheel(tmp_path / NAMES["linux"], {**files, **{f"mlx_cuda.libs/{name}": b"" for name in names}})
    found = audit_wheel(path, checks=("nvidia-inside", "driver-inside"))
    expected = [(check, f"mlx_cuda.libs/{name}") for check, each in LIBRARIES.items() if check for name in each]
    assert [(each.check, each.member) for each in found] == expected


BASE64 = f"{string.ascii_letters}{string.digits}+/"
PATHS = (
    *("/home/me/src/x.cpp", "/Users/me/src/x.cpp", "/root/src/x.cpp", "/tmp/src/x.cpp", "/var/tmp/src/x.cpp", "/project/src/x.cpp"),  # noqa: S108
    *("/build/src/x.cpp", "/io/src/x.cpp", "/ws/src/x.cpp", "/workspace/src/x.cpp", "/__w/src/x.cpp", "/__e/src/x.cpp"),
    *("/github/workspace/src/x.cpp", "/opt/_internal/src/x.cpp", "/opt/python/cp312/x.h", "/srv/a-b/lib/site-packages/nanobind/x.h"),
    *("/usr/lib/python3/dist-packages/nanobind/x.h", "C:\\Users\\me\\x.cpp", "D:/a/mlx-cuda/x.cpp", "d:\\b\\src\\x.cpp", "C:/src/a/x.cpp"),
    *("C:/build/src/x.cpp", "C:/projects/src/x.cpp", "C:/actions-runner/src/x.cpp", "/home/me~1/a+b/x@2/~x_y.cpp"),
    *(
        "/homes/a/b",
        "/site-packages/a/b",
        "C:/srv/a/b",
        "/builds/group/x.cpp",
        "/mnt/data/x.cpp",
        "/var/lib/jenkins/x.cpp",
        "/opt/acme/x.h",
    ),
    *("/w/x/y.cpp", "/b/workspace/src/y.cpp", "/1/s/src/y.cpp", "/.cache/a/b.cpp", "/libs/a/b.cpp", "/a+b/src/y.cpp"),
    *("C:\\ProgramData\\chocolatey\\lib\\x.cpp", "C:\\WindowsBuild\\a\\x.cpp", "C:\\Program\\src\\x.cpp", "D:\\w\\a\\x.cpp"),
    *("C:\\Users\\Jane Doe\\x.cpp", "D:/my build/src/x.cpp", "C:\\\\Users\\\\me\\\\x.cpp"),
    *("\\\\server\\share\\src\\x.cpp", "\\\\10.0.0.1\\my share\\src\\x.cpp"),
)
NO_PATHS = (
    *(
        "/usr/lib/x86_64-linux-gnu/libc.so.6",
        "/usr/local/cuda/include/cuda.h",
        "/proc/self/maps",
        "/tmp/x",  # noqa: S108
        "C:/Windows/a/b",
        "src/home/a/b",
    ),
    *("../project/a/b", "x/tmp/a/b", "$HOME/build/a/b", "CD:/a/b", "C:/a/b"),
    *("C:\\WINDOWS\\system32\\x.dll", "C:\\Program Files\\CMake\\bin\\cmake.exe", "C:/Program Files (x86)/a/b", "/lib/a/b"),
    *("/../a/bc/d", "/0/9/G/O/X/d", "\\\\d\\w\\s\\b", "\\\\.\\pipe\\a\\bc", "\\\\server\\share\\x", "/TRANSLI/ZOS_UNI//TRANSL"),
    "".join(f"{letter}{each}" for letter in BASE64 for each in BASE64),
)


@pytest.mark.parametrize("world", ["linux"], indirect=True)
def test_paths_of_builds(tmp_path: Path, world: World, files: Files) -> None:
    """Each by itself, between other text."""
    members = {f"mlx_cuda.libs/{number:02}.so": each for number, each in enumerate((*PATHS, *NO_PATHS))}
    libraries = {name: plain(files) + f"\0{each}\0text".encode() for name, each in members.items()}
    found = audit_wheel(write_wheel(tmp_path / NAMES["linux"], {**files, **libraries}), checks=("build-path",))
    message = "holds paths of the build (1), such as {}, expected none (see -ffile-prefix-map)"
    assert [(each.member, each.message) for each in found] == [
        (name, message.format(each)) for name, each in members.items() if each in PATHS
    ]


@pytest.mark.parametrize("world", ANY, indirect=True)
def test_the_good_wheel(tmp_path: Path, world: World, files: Files, finished: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(providers, "site", lambda root, _: world.site(root))
    assert said(spoilt(tmp_path / NAMES[world.system], Fault("nothing", ""), files, finished)) == ""


def test_the_document_has_the_table() -> None:
    text = DOCUMENT.read_text("utf-8")
    assert document(text) == text, "python -m tests.ci.attack_support writes it"
