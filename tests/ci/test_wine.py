"""The package on Windows, as far as Wine goes: the loader with NVIDIA's real DLLs, the doctor, and the tests of tests/package.

A stub for the native module links cuDNN and cuBLASLt as the real one does. The real one needs MSVC to be built, and a driver to do
anything. Wine's loader is no Windows': docs/results/platforms.md says what this cannot show.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from ci import matrix
from ci.device import compilers, plan
from ci.trial.trial import copy_tests

from . import wine_support
from .wine_support import Wine

pytestmark = pytest.mark.slow

# What the loader does with a GPU that it is told of, and what NVIDIA's libraries then say of themselves and of their parts.
LOAD = """\
import ctypes, json, os, sys
from mlx_cuda._loader import loaded, native
from mlx_cuda._loader.environment import take
from mlx_cuda._loader.table import Version
env = take(ask_driver=False)
if "old" in sys.argv:
    native.loaded_by_name = lambda *_: []
else:
    before = [ctypes.CDLL(path) for path in sys.argv[2:]]
module = native._load(env, (9, 0))
versions = module.library_versions()
cudnn = ctypes.CDLL("cudnn64_9.dll", winmode=0)  # by name, as a library that is loaded already
parts = {name: getattr(cudnn, f"cudnn{name}VersionCheck")() for name in ("Graph", "Ops", "Cnn", "Adv")}
nvrtc = ctypes.CDLL(sys.argv[1], winmode=0)
major, minor, program = ctypes.c_int(), ctypes.c_int(), ctypes.c_void_p()
nvrtc.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
source = b'extern "C" __global__ void half(float* x) { x[threadIdx.x] *= 0.5f; }'
nvrtc.nvrtcCreateProgram(ctypes.byref(program), source, b"half.cu", 0, None, None)
compiled = nvrtc.nvrtcCompileProgram(program, 1, (ctypes.c_char_p * 1)(b"-arch=sm_90"))
libraries = [each._asdict() for each in loaded.libraries(env.roots.values(), os.environ)]
print(json.dumps({**versions, "parts": parts, "nvrtc": [major.value, minor.value, compiled], "libraries": libraries}))
"""
# The device code of a source, by the compilers that lie in a folder.
COMPILE = """\
import hashlib, sys
from pathlib import Path
from ci.device import compilers, plan
root = Path(sys.argv[1])
only = lambda pattern: next(root.glob(pattern))
using = compilers.Tools(only("bin/nvrtc64_120_0.dll"), only("site/nvidia/*/bin/ptxas.exe"), only("bin/nvfatbin*.dll"), root / "include")
(source,) = (each for each in plan.sources(["declared"]) if each.name == sys.argv[2])
ptx = compilers.compile_ptx(using, source.path, "80", source.root, plan.OPTIONS)
sass = compilers.assemble(using, ptx, "80", source.path.name)
fatbin = compilers.NvFatbin(using.nvfatbin).pack(source.path.name, {"80": sass}, {"80": ptx})
print(*(hashlib.sha256(each).hexdigest() for each in (ptx, sass, fatbin)))
"""
WITHOUT = {
    "test_random_calls.py": "not program and not processes",  # a ProcessPoolExecutor hangs in Wine 8, whatever it is given
    "test_run.py": "not isolated_interpreter",  # it looks at no PYTHONPATH, by which everything is found here
}
CUDAS = pytest.mark.parametrize("cuda", matrix.load().cuda.values(), ids=lambda cuda: cuda.version)


@pytest.fixture(scope="module")
def wine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Wine]:
    yield from wine_support.make(tmp_path_factory.mktemp("wine"))


@pytest.fixture(scope="module")
def site(wine: Wine) -> Path:
    return wine_support.install(wine)


@pytest.fixture(scope="module")
def package(wine: Wine) -> Path:
    return wine_support.package(wine.folder / "package")[0]


Sites = dict[str, list["Path"]]
_made: dict[str, list[Path]] = {}


@pytest.fixture
def sites(cuda: matrix.Cuda, wine: Wine, site: Path, installed_root: Callable[[str, matrix.Platform], Path]) -> list[Path]:
    """Where Windows' Python finds the package with a stub module, MLX and NVIDIA's packages, which lie in more than one folder."""
    if cuda.extra not in _made:
        cuda_root, backend, *_ = (installed_root(name, wine_support.WINDOWS) for name in cuda.roots)
        # NVRTC of CUDA 12 is that of the compilers of device code; that of CUDA 13 is among the wheels.
        compilers = [installed_root(matrix.load().device.root, wine_support.WINDOWS)] if cuda.major == 12 else []
        target, digest = wine_support.package(wine.folder / f"package-{cuda.extra}")
        wine_support.stand_in(wine, cuda, cuda_root, target, digest)
        linked = wine_support.with_cuda(wine, cuda, site, backend / "site")
        _made[cuda.extra] = [target, linked, *(root / "site" for root in (cuda_root, *compilers))]
    return _made[cuda.extra]


def test_it_is_windows(wine: Wine, site: Path) -> None:
    said = wine.run(
        "-c", "import os, platform, sys, numpy; print(sys.platform, os.sep, *platform.python_compiler().split()[:2])", sites=[site]
    )
    assert said.stdout.split() == ["win32", "\\", "MSC", "v.1942"]


def nvrtc(cuda: matrix.Cuda) -> str:
    (name,) = (each.files[-1] for each in cuda.preload if "nvrtc" in each.provider)
    return name


@CUDAS
def test_the_loader_finds_everything_that_is_asked_for_by_name(wine: Wine, cuda: matrix.Cuda, sites: Sequence[Path]) -> None:
    done = wine.run("-W", "error", "-c", LOAD, nvrtc(cuda), sites=sites)
    assert done.returncode == 0, done.stdout
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    print(json.dumps(found, indent=1))
    assert found["cudnn"] == [9, 19, {12: 0, 13: 1}[cuda.major]]
    assert found["cublaslt"][0] == cuda.major
    assert found["nvrtc"] == [*map(int, cuda.version.split(".")), 0]
    assert found["parts"] == {"Graph": 0, "Ops": 0, "Cnn": 0, "Adv": 0}
    names = {each["path"].rpartition("\\")[2] for each in found["libraries"]}
    assert {"cudnn64_9.dll", "cudnn_graph64_9.dll", "cudnn_engines_precompiled64_9.dll", nvrtc(cuda)} <= names
    assert [each for each in found["libraries"] if each["instead_of"]] == []


@pytest.mark.parametrize("cuda", [matrix.load().cuda["13.0"]], ids=["13.0"])
def test_nvrtc_of_another_cuda_major_is_loaded_already(
    wine: Wine, cuda: matrix.Cuda, sites: Sequence[Path], installed_root: Callable[[str, matrix.Platform], Path]
) -> None:
    """As by torch, which loads all DLLs of its folder."""
    theirs = installed_root(matrix.load().device.root, wine_support.WINDOWS) / "bin"
    before = [wine_support.path(theirs / name) for name in ("nvrtc-builtins64_128.dll", "nvrtc64_120_0.dll")]
    done = wine.run("-c", LOAD, nvrtc(cuda), *before, sites=sites)
    assert done.returncode == 0, done.stdout
    assert json.loads(done.stdout.splitlines()[-1])["nvrtc"] == [13, 0, 0]


@CUDAS
def test_without_it_the_first_call_ends_the_process(wine: Wine, cuda: matrix.Cuda, sites: Sequence[Path]) -> None:
    """As the loader was: it told Windows the directories, and nothing more."""
    done = wine.run("-c", LOAD, nvrtc(cuda), "old", sites=sites)
    assert done.returncode != 0
    assert "Invalid handle. Cannot load symbol cudnnGetVersion" in done.stdout


@CUDAS
def test_the_doctor_with_a_cuda_backend_and_no_driver(wine: Wine, cuda: matrix.Cuda, sites: Sequence[Path]) -> None:
    checks = doctor(wine, sites)
    assert {name for name, check in checks.items() if check["status"] == "fail"} == {"driver"}, checks
    assert "nvcuda.dll" in checks["driver"]["summary"]
    assert checks["libraries"]["status"] == checks["module"]["status"] == checks["backend"]["status"] == "ok"
    assert f"cublasLt64_{cuda.major}.dll, cudnn64_9.dll, mlx.dll" in checks["libraries"]["summary"]


def test_the_compilers_of_device_code(wine: Wine, site: Path, installed_root: Callable[[str, matrix.Platform], Path]) -> None:
    """Windows' NVRTC, ptxas and fatbin packer make what this machine's make, to the byte."""
    name = matrix.load().device.root
    windows, _ = installed_root(name, wine_support.WINDOWS), installed_root(name, matrix.host_platform())
    done = wine.run("-c", COMPILE, wine_support.path(windows), "copy", sites=[site, matrix.REPOSITORY])
    assert done.returncode == 0, done.stdout
    using = compilers.tools()
    (source,) = (each for each in plan.sources(["declared"]) if each.name == "copy")
    ptx = compilers.compile_ptx(using, source.path, "80", source.root, plan.OPTIONS)
    sass = compilers.assemble(using, ptx, "80", source.path.name)
    fatbin = compilers.NvFatbin(using.nvfatbin).pack(source.path.name, {"80": sass}, {"80": ptx})
    assert done.stdout.split() == [hashlib.sha256(each).hexdigest() for each in (ptx, sass, fatbin)]


def test_the_doctor_without_cuda(wine: Wine, package: Path, site: Path) -> None:
    checks = doctor(wine, [package, site])
    assert [check for check in checks.values() if check["status"] in {"fail", "warn"}] == []
    assert checks["python"]["summary"] == "CPython 3.13.2 on windows"


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_tests(tmp_path_factory.mktemp("work"))


@pytest.mark.parametrize("file", sorted(path.name for path in (matrix.REPOSITORY / "tests" / "package").glob("test_*.py")))
def test_the_packages_own_tests(wine: Wine, package: Path, site: Path, work: Path, file: str) -> None:
    """As a row of ci/matrix/matrix.toml runs them: a skip that is not declared for it is a failure. One process for each file."""
    options = ["-q", "--place", "try", "-p", "no:cacheprovider", "-k", WITHOUT.get(file, "")]
    done = wine.run("-m", "pytest", *options, f"tests/package/{file}", sites=[package, site], cwd=work)
    print(done.stdout)
    assert done.returncode in {pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED}
    assert "UNDECLARED SKIP" not in done.stdout


def doctor(wine: Wine, sites: Sequence[Path]) -> dict[str, dict[str, str]]:
    done = wine.run("-m", "mlx_cuda", "doctor", "--json", sites=sites)
    print(done.stdout)
    return {check["name"]: check for check in json.loads(done.stdout[done.stdout.index("{") :])["checks"]}
