"""Every check, in an environment where it is ok and in those where it is not."""

from __future__ import annotations

import re
import shlex
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from mlx_cuda import BackendError, __version__
from mlx_cuda._check.processes import fix_of
from mlx_cuda._common.errors import quote
from mlx_cuda._loader import checks, origin
from mlx_cuda._loader.checks import Check
from mlx_cuda._loader.driver import Driver, Gpu
from mlx_cuda._loader.environment import Distribution, Environment, Headers, Probe
from mlx_cuda._loader.loaded import SEARCH, Loaded

from .environments import CUDNN, H200, NO_CODE, ROOT, RUN, TABLE, distributions, healthy, with_slashes

V100 = Gpu("Tesla V100", (7, 0))
NO_DRIVER = Driver(error="libcuda.so.1: cannot open shared object file: No such file or directory")
STUBS = "/usr/local/cuda/lib64/stubs"
LINUX_DRIVER = "/usr/lib/x86_64-linux-gnu/libcuda.so.580.65"
STUB = Driver(error="libcuda.so.1 is a stub", path=f"{STUBS}/libcuda.so", stub=True)
CU13, CU12, CPU = (f"pip install {quote(f'mlx-cuda[{extra}]=={__version__}')}" for extra in ("cu13", "cu12", "cpu"))


def found(env: Environment, name: str) -> Check:
    return next(check for check in checks.run(env) if check.name == name)


@pytest.mark.parametrize("major", [12, 13])
def test_a_healthy_machine_passes_every_check(major: int) -> None:
    statuses = [check.status for check in checks.run(replace(healthy(major), probe=RUN))]
    assert statuses == ["ok"] * len(statuses)
    assert checks.first_failure(healthy(major)) is None


def test_the_oldest_driver_that_reads_the_device_code() -> None:
    assert found(healthy(12, driver=Driver(cuda=(12, 4), gpus=(H200,))), "driver").status == "ok"


def test_a_cpu_backend_needs_no_gpu() -> None:
    env = healthy(distributions=distributions("mlx", "mlx-cpu"), driver=NO_DRIVER, libraries={}, modules=frozenset())
    assert {check.status for check in checks.run(env)} == {"ok", "skip"}


def test_free_threaded_interpreters_with_a_stable_abi() -> None:
    assert {check.status for check in checks.run(healthy(free_threaded=True, python="3.15.0"))} <= {"ok", "skip"}


def test_macos_is_skipped() -> None:
    env = healthy(system="darwin", distributions=distributions("mlx"), driver=NO_DRIVER, libraries={}, modules=frozenset(), glibc=())
    assert {check.status for check in checks.run(env)} == {"ok", "skip"}


# What is wrong, the check that finds it first, and a part of what it says and of its fix.
FAILURES = {
    "free-threaded": (healthy(free_threaded=True, python="3.14.10"), "python", "CPython 3.14.10 is free-threaded", "use the regular"),
    "glibc too old": (healthy(glibc=(2, 31)), "glibc", "glibc 2.31 is too old: mlx-cuda-13 needs 2.35", "glibc 2.35 or newer"),
    "musl": (healthy(glibc=()), "glibc", "C library is not glibc", "glibc 2.35 or newer"),
    "glibc too old to install": (healthy(glibc=(2, 28), distributions={}), "glibc", "MLX itself needs 2.35", "Ubuntu 22.04"),
    "no mlx": (healthy(distributions={}), "mlx", "mlx is not installed", CU13),
    "wrong mlx": (
        healthy(distributions=distributions("mlx-cuda-13", mlx="0.33.0")),
        "mlx",
        f"mlx 0.33.0 is installed, but mlx-cuda {__version__} was built for mlx {TABLE.mlx}",
        CU13,
    ),
    "no backend": (healthy(distributions=distributions("mlx")), "backend", "MLX has no backend", CU13),
    "no backend, older driver": (
        healthy(distributions=distributions("mlx"), driver=Driver(cuda=(12, 8), gpus=(H200,))),
        "backend",
        "MLX has no backend",
        CU12,
    ),
    "no backend, no driver": (healthy(distributions=distributions("mlx"), driver=NO_DRIVER), "backend", "MLX has no backend", CPU),
    "wrong backend version": (
        healthy(distributions=distributions("mlx", mlx_cuda_13="0.32.3")),
        "backend",
        "mlx-cuda-13 0.32.3 is installed",
        CU13,
    ),
    "both majors": (
        healthy(distributions=distributions("mlx", "mlx-cuda-12", "mlx-cuda-13")),
        "backend",
        "mlx-cuda-12 and mlx-cuda-13 are installed together",
        f"{CU13.replace('install', 'install --dry-run')} && pip uninstall -y mlx-cuda-12 mlx-cuda-13 && {CU13}",
    ),
    "both majors, older driver": (
        healthy(distributions=distributions("mlx", "mlx-cuda-12", "mlx-cuda-13"), driver=Driver(cuda=(12, 4))),
        "backend",
        "installed together",
        f"&& {CU12}",
    ),
    "cpu beside cuda": (
        healthy(distributions=distributions("mlx", "mlx-cpu", "mlx-cuda-12"), driver=NO_DRIVER),
        "backend",
        "mlx-cuda-12 and mlx-cpu are installed together",
        f"&& {CU12}",
    ),
    "no driver": (healthy(driver=NO_DRIVER), "driver", "no NVIDIA driver: libcuda.so.1", "driver 580.65 or newer"),
    "a stub on the search path": (
        healthy(driver=STUB, search=("/opt/lib", str(Path(STUBS)))),
        "driver",
        f"no NVIDIA driver: {STUBS}/libcuda.so: libcuda.so.1 is a stub",
        f"take {STUBS} out of {SEARCH}; if no driver is found then, install NVIDIA's driver 580.65 or newer",
    ),
    "a stub elsewhere": (
        healthy(driver=STUB),
        "driver",
        "is a stub",
        f"take {STUBS} off the loader's path (/etc/ld.so.conf.d, LD_PRELOAD)",
    ),
    "WSL without a driver": (
        healthy(driver=NO_DRIVER, wsl=True),
        "driver",
        "no NVIDIA driver: libcuda.so.1",
        "update NVIDIA's driver on Windows, none inside WSL, then in PowerShell: wsl --update; wsl --shutdown",
    ),
    "WSL's driver is not found": (
        healthy(driver=NO_DRIVER, wsl=True, wsl_driver=True),
        "driver",
        "no NVIDIA driver: libcuda.so.1",
        f"export {SEARCH}=/usr/lib/wsl/lib, or for good: echo /usr/lib/wsl/lib | sudo tee /etc/ld.so.conf.d/wsl.conf &&",
    ),
    "a Linux driver inside WSL": (
        healthy(driver=Driver(cuda=(13, 0), error="error 100", path=LINUX_DRIVER), wsl=True, wsl_driver=True),
        "driver",
        "error 100",
        "remove the Linux driver, which hides that of Windows (/usr/lib/x86_64-linux-gnu/libcuda.so.580.65)",
    ),
    "WSL's driver fails": (
        healthy(driver=Driver(cuda=(13, 0), error="error 999", path="/usr/lib/wsl/lib/libcuda.so.1.1"), wsl=True, wsl_driver=True),
        "driver",
        "error 999",
        "in PowerShell: wsl --update; wsl --shutdown; then check that nvidia-smi works",
    ),
    "WSL's driver is too old": (
        healthy(driver=Driver(cuda=(12, 8), gpus=(H200,)), wsl=True),
        "driver",
        "it runs CUDA 12.8",
        "update NVIDIA's driver on Windows, or pip install --dry-run",
    ),
    "driver too old": (
        healthy(driver=Driver(cuda=(12, 8), gpus=(H200,))),
        "driver",
        "it runs CUDA 12.8, but mlx-cuda-13 needs CUDA 13",
        f"driver 580.65 or newer, or {CU12.replace('install', 'install --dry-run')} && pip uninstall -y mlx-cuda-13 && {CU12}",
    ),
    "driver too old for any": (
        healthy(12, driver=Driver(cuda=(11, 8))),
        "driver",
        "it runs CUDA 11.8, but mlx-cuda-12 needs CUDA 12",
        "driver 550.54 or newer",
    ),
    "driver too old for the device code": (
        healthy(12, driver=Driver(cuda=(12, 3), gpus=(H200,))),
        "driver",
        "the driver is too old: it runs CUDA 12.3, but the device code needs 12.4 or newer",
        "install NVIDIA's driver 550.54 or newer",
    ),
    "driver broken": (healthy(driver=Driver(cuda=(13, 0), error="cuInit failed with error 803")), "driver", "error 803", "nvidia-smi"),
    "no gpu": (healthy(driver=Driver(cuda=(13, 0))), "gpu", "the driver offers no GPU", "CUDA_VISIBLE_DEVICES"),
    "gpu too old": (healthy(driver=Driver(cuda=(13, 0), gpus=(V100,))), "gpu", "older than sm_75, .*Tesla V100 (sm_70)", CPU),
    "one gpu too old": (healthy(driver=Driver(cuda=(13, 0), gpus=(H200, V100))), "gpu", "Tesla V100 (sm_70)", "hide it with CUDA_VISIBLE"),
    "library's package missing": (
        healthy(
            distributions=distributions("mlx", "mlx-cuda-13", "nanobind-backend"),
            libraries=dict.fromkeys(("libmlx", "libcudart", "libcublasLt"), "somewhere"),
        ),
        "libraries",
        "not found: libcudnn.so.9 (of nvidia-cudnn-cu13)",
        CU13,
    ),
    "library's file missing": (
        healthy(libraries=dict.fromkeys(("libmlx", "libcudart", "libcudnn"), "somewhere")),
        "libraries",
        "not found: libcublasLt.so.13 (of nvidia-cublas)",
        "pip install --force-reinstall --no-deps nvidia-cublas==13.10.0.20",
    ),
    "library missing on Windows": (
        healthy(12, system="windows", libraries={}),
        "libraries",
        "cudart64_12.dll (of nvidia-cuda-runtime-cu12), cublasLt64_12.dll",
        "--force-reinstall",
    ),
    "no nanobind-backend": (
        healthy(distributions=distributions("mlx", "mlx-cuda-13")),
        "libraries",
        "nanobind-backend is not installed",
        CU13,
    ),
    "other major's module only": (
        healthy(modules=frozenset(("_cu12",))),
        "module",
        "lacks the native module _cu13 that mlx-cuda-13 needs (it holds: _cu12)",
        CU12,
    ),
    "no module": (healthy(modules=frozenset()), "module", "(it holds: none)", "pip install --force-reinstall --no-deps "),
    "imported from an archive": (
        healthy(archive=Path("/home/me/mlx_cuda.whl"), modules=frozenset()),
        "module",
        "mlx_cuda is imported from the archive /home/me/mlx_cuda.whl, from which no native module can be loaded",
        f"pip install {quote(Path('/home/me/mlx_cuda.whl'))}, and take it off PYTHONPATH".replace("\\", "/"),
    ),
    "no device code": (healthy(package=NO_CODE), "code", "the device code's manifest .* cannot be read: .*No such", "--force-reinstall"),
    "wrong result": (healthy(probe=Probe(error="a wrong result")), "run", "a wrong result", "doctor --json"),
}


@pytest.mark.parametrize(("env", "name", "summary", "fix"), FAILURES.values(), ids=FAILURES.keys())
def test_failure_is_found_and_fixed(env: Environment, name: str, summary: str, fix: str) -> None:
    check = checks.first_failure(env)
    assert check is not None
    assert check.name == name
    assert re.search(summary.replace("(", r"\(").replace(")", r"\)"), with_slashes(check.summary)), check.summary
    assert fix in with_slashes(check.fix)


def test_fixes_name_the_wheel_that_was_installed() -> None:
    wheel = "/home/me/wheelhouse/mlx_cuda-1-cp310-abi3-linux_x86_64.whl"
    old = healthy(driver=Driver(cuda=(12, 8), gpus=(H200,)), origin=wheel)
    install = quote(f"{wheel}[cu12]")
    check = found(old, "driver")
    assert check.fix.endswith(f"or pip install --dry-run {install} && pip uninstall -y mlx-cuda-13 && pip install {install}")
    assert found(replace(old, modules=frozenset(("_cu13",))), "driver").fix.endswith(
        "or build the wheel again without --cuda, then pip install its extra cu12 after pip uninstall -y mlx-cuda-13"
    )
    assert found(replace(old, modules=frozenset()), "module").fix == f"pip install --force-reinstall --no-deps {quote(wheel)}"


@pytest.mark.skipif(sys.platform == "win32", reason="the shell is POSIX's")
@pytest.mark.parametrize("folder", ["/home/me/$HOME", "/home/me/my wheels", "/home/me/it's `here`"])
def test_a_shell_reads_the_paths_of_fixes(folder: str) -> None:
    env = healthy(12, origin=f"{folder}/mlx_cuda.whl", distributions={})
    root = {"nvidia-cuda-runtime-cu12": Distribution("12.9.79", Path(folder))}
    headers = Headers("CUDA_HOME", Path("/usr/local/cuda-13.0"), (13, 0))
    assert shlex.split(found(env, "mlx").fix)[:3] == ["pip", "install", f"{folder}/mlx_cuda.whl[cu13]"]
    archive = replace(healthy(12), archive=Path(folder, "mlx_cuda.whl"))
    assert shlex.split(found(archive, "module").fix.partition(", and")[0]) == ["pip", "install", f"{folder}/mlx_cuda.whl"]
    other = healthy(12, distributions=dict(healthy(12).distributions) | root, headers=headers)
    assert shlex.split(found(other, "headers").fix) == ["export", f"CUDA_HOME={folder}/nvidia/cuda_runtime"]
    assert shlex.split(fix_of(folder, "unknown").partition(": ")[2])[-1] == folder


def test_the_former_name_of_a_fix() -> None:
    with pytest.warns(DeprecationWarning, match=r"BackendError\.fix"):
        assert BackendError("broken", fix="repair it").cure == "repair it"


@pytest.mark.parametrize(("text", "source"), [
    ('{"url": "file:///a%20b/mlx_cuda.whl", "archive_info": {}}', "/a b/mlx_cuda.whl"),
    ('{"url": "https://example.org/mlx_cuda.whl", "archive_info": {}}', ""),
    ("{", ""),
    (None, ""),
])  # fmt: skip
def test_the_origin_of_the_installed_package(text: str | None, source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Installed:
        def read_text(self, name: str) -> str | None:
            return text if name == "direct_url.json" else None

    monkeypatch.setattr("importlib.metadata.distribution", lambda _: Installed())
    assert with_slashes(origin.origin()) == source


WARNINGS = {
    "nvidia package too old": (
        healthy(distributions=distributions("mlx", "nanobind-backend", "mlx-cuda-13", nvidia_cudnn_cu13="9.10.2.21")),
        "versions",
        "nvidia-cudnn-cu13 9.10.2.21 is installed; the extra cu13 requires >=9.19,<10",
        CU13,
    ),
    "both cudnn packages": (
        healthy(distributions=dict(healthy().distributions) | distributions("nvidia-cudnn-cu12")),
        "versions",
        "nvidia-cudnn-cu12 (CUDA 12) installs the same libcudnn.so.9 as nvidia-cudnn-cu13",
        "pip install --dry-run --force-reinstall --no-deps nvidia-cudnn-cu13==9.28.0.42 && pip uninstall -y nvidia-cudnn-cu12 && "
        "pip install --force-reinstall --no-deps nvidia-cudnn-cu13==9.28.0.42",
    ),
    "the other major's cudnn package alone": (
        healthy(distributions=distributions("mlx", "nanobind-backend", "mlx-cuda-13", "nvidia-cublas", "nvidia-cudnn-cu12")),
        "versions",
        "nvidia-cudnn-cu12 (CUDA 12) installs the same libcudnn.so.9 as nvidia-cudnn-cu13",
        f"{CU13.replace('install', 'install --dry-run')} && pip uninstall -y nvidia-cudnn-cu12 && {CU13}",
    ),
    "headers of the other major": (
        healthy(12, headers=Headers("CUDA_HOME", Path("/usr/local/cuda-13.0"), (13, 0))),
        "headers",
        "CUDA_HOME (/usr/local/cuda-13.0) holds CUDA 13.0; MLX's run-time kernels need 12",
        f"export CUDA_HOME={ROOT}/nvidia/cuda_runtime",
    ),
    "headers of the other major, CUDA 13": (
        healthy(13, headers=Headers("the system's toolkit", Path("/usr/local/cuda"), (12, 4))),
        "headers",
        "the system's toolkit (/usr/local/cuda) holds CUDA 12.4; MLX's run-time kernels need 13",
        f"export CUDA_HOME={ROOT}/nvidia/cu13",
    ),
}


@pytest.mark.parametrize(("env", "name", "summary", "fix"), WARNINGS.values(), ids=WARNINGS.keys())
def test_warning_is_found_and_fixed(env: Environment, name: str, summary: str, fix: str) -> None:
    check = found(env, name)
    assert (check.status, with_slashes(check.summary), with_slashes(check.fix)) == ("warn", summary, with_slashes(fix))
    assert checks.first_failure(env) is None


@pytest.mark.parametrize(("env", "status", "summary", "fix"), [
    (healthy(probe=RUN), "ok", "decode steps of mlx-lm 0.32.2 are captured as CUDA graphs on sm_90", ""),
    (
        healthy(probe=RUN, graphs=False),
        "warn", "MLX_USE_CUDA_GRAPHS is set to 0: decode steps cannot be captured", "unset MLX_USE_CUDA_GRAPHS",
    ),
    (
        healthy(probe=replace(RUN, capture="this MLX is another inside")),
        "warn", "decode steps are not captured: this MLX is another inside",
        "pip install --force-reinstall --no-deps mlx==0.32.4 mlx-cuda-13==0.32.4",
    ),
    (
        healthy(probe=RUN, distributions={name: it for name, it in healthy().distributions.items() if name != "mlx-lm"}),
        "skip", "mlx-lm is not installed (pip install mlx-lm)", "",
    ),
    (healthy(probe=Probe(error="a wrong result")), "skip", "needs the checks above", ""),
    (healthy(driver=NO_DRIVER), "skip", "needs the checks above", ""),
])  # fmt: skip
def test_whether_decoding_steps_are_replayed(env: Environment, status: str, summary: str, fix: str) -> None:
    check = found(env, "decoding")
    assert (check.status, check.summary, check.fix) == (status, summary, fix)
    assert checks.run(env)[-1] == check


def test_which_libraries_were_loaded() -> None:
    check = found(healthy(probe=RUN), "loaded")
    assert (check.status, check.summary) == ("ok", f"{CUDNN.path} (9.28.0)")
    part = Loaded("/old/libcudnn_graph.so.9.1.0", "", f"{ROOT}/nvidia/cudnn/lib/libcudnn_graph.so.9", f"take /old out of {SEARCH}")
    check = found(healthy(probe=replace(RUN, libraries=(CUDNN, part, part))), "loaded")
    assert (check.status, check.fix) == ("warn", part.fix)
    assert check.summary == f"{part.path} is loaded instead of {part.instead_of}; in all: {CUDNN.path} (9.28.0)"
    mixed = Probe(error="cuDNN 9.28.0 loads parts of another version", libraries=(CUDNN, part))
    assert (found(healthy(probe=mixed), "run").status, found(healthy(probe=mixed), "run").fix) == ("fail", part.fix)
    for probe in (None, Probe(error="it crashed")):
        assert found(healthy(probe=probe), "loaded").status == "skip"


def test_without_cuda_it_is_asked_whether_mlx_can_be_imported() -> None:
    cpu = healthy(distributions=distributions("mlx", "mlx-cpu"), driver=NO_DRIVER, libraries={}, modules=frozenset())
    assert found(cpu, "run").status == "skip"
    assert found(replace(cpu, probe=Probe(details="mlx.core is imported")), "run").summary == "mlx.core is imported"
    failed = found(replace(cpu, probe=Probe(error="ImportError: libstdc++.so.6: cannot open shared object file")), "run")
    assert (failed.status, failed.fix) == ("fail", "apt-get install libstdc++6  (Fedora, RHEL: dnf install libstdc++)")


@pytest.mark.parametrize(("gpu", "measured", "status", "summary"), [
    (Gpu("NVIDIA H200", (9, 0)), "measured here on NVIDIA H200", "ok", "the dispatch thresholds were measured here on NVIDIA H200"),
    (Gpu("NVIDIA GH200", (9, 0)), "", "ok", "the thresholds of an H200 are used; python -m mlx_cuda tune measures NVIDIA GH200"),
    (Gpu("NVIDIA L4", (8, 9)), "", "warn", "no tuned thresholds for NVIDIA L4: data-sheet defaults are used"),
    (Gpu("Tesla T4", (7, 5)), "", "skip", "no kernel of mlx-cuda runs on sm_75"),
])  # fmt: skip
def test_how_engines_are_chosen(gpu: Gpu, measured: str, status: str, summary: str) -> None:
    check = found(healthy(driver=Driver(cuda=(13, 0), gpus=(gpu,)), measured=measured), "limits")
    assert (check.status, check.summary) == (status, summary)


def test_an_mlx_built_from_source_takes_the_only_module() -> None:
    env = healthy(distributions=distributions("mlx", "nanobind-backend"), built_from_source=True, modules=frozenset(("_cu12",)))
    assert env.cuda is TABLE.cuda[12]
    assert found(env, "backend").status == "ok"
    assert found(replace(env, distributions=distributions(mlx=f"{TABLE.mlx}.dev20261120+abc")), "mlx").status == "ok"
    assert found(replace(env, distributions=distributions(mlx="99.0.dev20261120+abc")), "mlx").status == "fail"
    assert replace(env, modules=frozenset(("_cu12", "_cu13"))).cuda is None


def test_explaining_a_failed_import_of_mlx() -> None:
    reason = ImportError("libcuda.so.1: cannot open shared object file")
    explained = checks.explain(reason, healthy(driver=NO_DRIVER, modules=frozenset()))
    assert isinstance(explained, BackendError)
    assert str(explained).startswith("mlx.core cannot be imported: no NVIDIA driver: libcuda.so.1")
    assert "\n  fix: install NVIDIA's driver" in str(explained)
    ours = checks.explain(reason, healthy(package=Path("/nowhere")))  # whose device code lacks its manifest
    assert str(ours).startswith("mlx.core cannot be imported: libcuda.so.1")
    old = checks.explain(ImportError("/opt/lib/libstdc++.so.6: version `GLIBCXX_3.4.30' not found"), healthy(driver=NO_DRIVER))
    assert str(old).startswith("mlx.core cannot be imported: /opt/lib/libstdc++.so.6: version")  # which the driver does not explain
    assert "libstdc++6" in old.fix
    unknown = checks.explain(ImportError("libnccl.so.2: cannot open shared object file"), healthy(modules=frozenset()))
    assert str(unknown).startswith("mlx.core cannot be imported: libnccl.so.2")
    assert CU13 in unknown.fix
