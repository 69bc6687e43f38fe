"""The checks: pure functions of an :class:`Environment`, shared by the doctor and by the loader's error messages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from .._common.errors import BackendError
from .._version import __version__
from . import device_code as _device_code
from .table import FRONTEND, version

if TYPE_CHECKING:
    from collections.abc import Callable

    from .environment import Environment
    from .table import Cuda

Status = Literal["ok", "warn", "fail", "skip"]

ASK_DOCTOR = "python -m mlx_cuda doctor"


@dataclass(frozen=True)
class Check:
    """The outcome of one check; ``cure`` is the line that helps where it is not ok."""

    name: str
    status: Status
    summary: str
    cure: str = ""


def pip_install(extra: str) -> str:
    """The pip line that puts everything an extra pins into place."""
    return f'pip install "mlx-cuda[{extra}]=={__version__}"'


def _dotted(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))


def _suitable(env: Environment) -> Cuda | None:
    """The newest CUDA major that the driver runs; the newest of all where the driver was not asked; ``None`` without a driver."""
    newest_first = sorted(env.table.cuda.values(), key=lambda cuda: -cuda.major)
    if env.driver is None:
        return newest_first[0]
    return next((cuda for cuda in newest_first if env.driver.cuda and env.driver.cuda[0] >= cuda.major), None)


def _install_backend(env: Environment) -> str:
    cuda = _suitable(env)
    if cuda is None:
        return f"{pip_install('cpu')}  (with a GPU: the extra cu13 or cu12)"
    return f"{pip_install(cuda.extra)}  (without a GPU: the extra cpu)"


def _extra(env: Environment) -> str:
    """The extra of the installed backend."""
    if env.cuda:
        return env.cuda.extra
    cuda = _suitable(env)
    return "cpu" if env.backends or cuda is None else cuda.extra


def _without_cuda(env: Environment, name: str) -> Check:
    if env.backends:
        return Check(name, "skip", f"{env.backends[0]} needs none")
    return Check(name, "skip", "no CUDA backend is installed")


def check_python(env: Environment) -> Check:
    """The interpreter is one that the native module's stable ABI covers."""
    if env.free_threaded:
        reason = f"CPython {env.python} is free-threaded: it has no stable ABI, so the native modules do not load"
        return Check("python", "fail", reason, "use the regular interpreter of the same version (python3, not python3t)")
    return Check("python", "ok", f"CPython {env.python} on {env.system}")


def check_glibc(env: Environment) -> Check:
    """The C library is as new as MLX's wheels need, by their platform tag, or by the table when none is installed."""
    if env.system != "linux":
        return Check("glibc", "skip", f"not used on {env.system}")
    tagged = {name: env.distributions[name].glibc for name in (*env.backends, FRONTEND) if name in env.distributions}
    name, needed = max(tagged.items(), key=lambda item: item[1], default=("MLX itself", version(env.table.glibc)))
    cure = f"use a system or container with glibc {_dotted(needed)} or newer (Ubuntu 22.04, Debian 12, RHEL 10)"
    if not env.glibc:
        return Check("glibc", "fail", f"this system's C library is not glibc; {name} needs glibc {_dotted(needed)}", cure)
    if env.glibc < needed:
        return Check("glibc", "fail", f"glibc {_dotted(env.glibc)} is too old: {name} needs {_dotted(needed)}", cure)
    return Check("glibc", "ok", f"glibc {_dotted(env.glibc)}")


def check_mlx(env: Environment) -> Check:
    """The very version of MLX that the native modules were built for is installed: its C++ ABI changes in patch releases."""
    if FRONTEND not in env.distributions:
        return Check("mlx", "fail", "mlx is not installed", _install_backend(env))
    installed = env.distributions[FRONTEND].version
    own_build = env.built_from_source and not env.backends  # its version ends in .dev and a commit
    if version(installed) != version(env.table.mlx) if own_build else installed != env.table.mlx:
        reason = f"mlx {installed} is installed, but mlx-cuda {__version__} was built for mlx {env.table.mlx}"
        return Check("mlx", "fail", reason, pip_install(_extra(env)))
    return Check("mlx", "ok", f"mlx {installed}")


def check_backend(env: Environment) -> Check:
    """Exactly one backend of MLX is installed, in MLX's own version."""
    if env.system == "darwin":
        return Check("backend", "skip", "MLX uses Metal here; the operations compose MLX's own")
    if not env.backends:
        if env.built_from_source:
            return Check("backend", "ok", "MLX brings its own backend (built from source)")
        return Check("backend", "fail", "MLX has no backend: libmlx is missing, so mlx.core cannot be imported", _install_backend(env))
    if len(env.backends) > 1:
        cuda = next((cuda for cuda in (_suitable(env), env.cuda) if cuda and cuda.backend in env.backends), None)
        cure = f"pip uninstall -y {' '.join(env.backends)} && {pip_install(cuda.extra if cuda else 'cpu')}"
        return Check("backend", "fail", f"{' and '.join(env.backends)} are installed together and overwrite each other's libmlx", cure)
    (name,) = env.backends
    installed = env.distributions[name].version
    if installed != env.table.mlx:
        reason = f"{name} {installed} is installed, but mlx-cuda {__version__} was built for {name} {env.table.mlx}"
        return Check("backend", "fail", reason, pip_install(_extra(env)))
    return Check("backend", "ok", f"{name} {installed}")


def check_module(env: Environment) -> Check:
    """This build holds the native module of the installed backend."""
    if not env.cuda:
        return _without_cuda(env, "module")
    if env.cuda.module in env.modules:
        return Check("module", "ok", f"{env.cuda.module} is in this build")
    built = ", ".join(sorted(env.modules)) or "none"
    others = [cuda for cuda in env.table.cuda.values() if cuda.module in env.modules]
    change = f", or change the backend: {pip_install(others[0].extra)} after pip uninstall -y {env.cuda.backend}" if others else ""
    reason = f"this build of mlx-cuda lacks the native module {env.cuda.module} that {env.cuda.backend} needs (it holds: {built})"
    return Check("module", "fail", reason, f"pip install --force-reinstall --no-deps mlx-cuda=={__version__}{change}")


def check_libraries(env: Environment) -> Check:
    """Every library that the native module links is there."""
    if not env.cuda:
        return _without_cuda(env, "libraries")
    system = "windows" if env.system == "windows" else "linux"
    missing = [library for library in env.cuda.needed if library.name not in env.libraries]
    if missing:
        names = ", ".join(f"{library.files[system]} (of {library.provider})" for library in missing)
        broken = [library.provider for library in missing if library.provider in env.distributions]
        # A provider that is installed and yet lacks its file is not touched by a plain install.
        cure = f"pip install --force-reinstall --no-deps {' '.join(broken)}" if broken else pip_install(env.cuda.extra)
        return Check("libraries", "fail", f"not found: {names}", cure)
    if "nanobind-backend" not in env.distributions:
        return Check("libraries", "fail", "nanobind-backend is not installed", pip_install(env.cuda.extra))
    return Check("libraries", "ok", ", ".join(library.files[system] for library in env.cuda.needed))


def check_versions(env: Environment) -> Check:
    """The installed NVIDIA packages are ones that the extra accepts, and none overwrites the files of another."""
    if not env.cuda:
        return _without_cuda(env, "versions")
    for name, bounds in env.cuda.requires.items():
        if name in env.distributions and env.distributions[name].version not in bounds:
            reason = f"{name} {env.distributions[name].version} is installed; the extra {env.cuda.extra} asks for {bounds}"
            return Check("versions", "warn", reason, pip_install(env.cuda.extra))
    ours = {(library.directories["linux"], library.files["linux"]): library.provider for library in env.cuda.libraries}
    for other in env.table.cuda.values():
        for library in other.libraries:
            provider = ours.get((library.directories["linux"], library.files["linux"]), library.provider)
            if provider != library.provider and library.provider in env.distributions and not library.provider.startswith(FRONTEND):
                cure = f"pip uninstall -y {library.provider} && pip install --force-reinstall --no-deps {provider}"
                reason = f"{library.provider} (CUDA {other.major}) lies over the same {library.files['linux']} as {provider}"
                return Check("versions", "warn", reason, cure)
    shown = (f"{name} {env.distributions[name].version}" for name in env.cuda.requires if name in env.distributions)
    return Check("versions", "ok", ", ".join(shown))


def check_driver(env: Environment) -> Check:
    """A driver is there, works, and is new enough for the backend's CUDA major."""
    if not env.cuda:
        return _without_cuda(env, "driver")
    if env.driver is None:
        return Check("driver", "skip", "not asked")
    if env.driver.cuda is None:
        install = f"install NVIDIA's driver {env.cuda.driver} or newer (a container must be given the GPUs)"
        return Check("driver", "fail", f"no NVIDIA driver: {env.driver.error}", f"{install}; without a GPU: {_to_cpu(env)}")
    supported = _dotted(env.driver.cuda)
    if env.driver.cuda[0] < env.cuda.major:
        cuda = _suitable(env)
        change = f", or pip uninstall -y {env.cuda.backend} && {pip_install(cuda.extra)}" if cuda else ""
        reason = f"the driver is too old: it runs CUDA {supported}, but {env.cuda.backend} needs CUDA {env.cuda.major}"
        return Check("driver", "fail", reason, f"install NVIDIA's driver {env.cuda.driver} or newer{change}")
    if env.driver.cuda < env.cuda.driver_cuda:
        reason = f"the driver is too old: it runs CUDA {supported}, but the device code needs {_dotted(env.cuda.driver_cuda)} or newer"
        return Check("driver", "fail", reason, f"install NVIDIA's driver {env.cuda.driver} or newer")
    if env.driver.error:
        return Check("driver", "fail", env.driver.error, "see that nvidia-smi works; after an update of the driver, restart")
    return Check("driver", "ok", f"runs CUDA {supported}")


def check_gpu(env: Environment) -> Check:
    """There is a GPU, and none is older than the oldest one that code was built for."""
    if not env.cuda:
        return _without_cuda(env, "gpu")
    if env.driver is None or env.driver.cuda is None or env.driver.error:
        return Check("gpu", "skip", "needs a working driver")
    if not env.driver.gpus:
        return Check("gpu", "fail", "the driver offers no GPU", "see that CUDA_VISIBLE_DEVICES does not hide it, or " + _to_cpu(env))
    old = [gpu for gpu in env.driver.gpus if gpu.capability < env.cuda.capability]
    if old:
        oldest = "".join(map(str, env.cuda.capability))
        names = ", ".join(f"{gpu.name} (sm_{gpu.capability[0]}{gpu.capability[1]})" for gpu in old)
        cure = "hide it with CUDA_VISIBLE_DEVICES" if len(old) < len(env.driver.gpus) else _to_cpu(env)
        return Check("gpu", "fail", f"older than sm_{oldest}, the oldest GPU that MLX and mlx-cuda run on: {names}", cure)
    return Check("gpu", "ok", ", ".join(f"{gpu.name} (sm_{gpu.capability[0]}{gpu.capability[1]})" for gpu in env.driver.gpus))


def check_code(env: Environment) -> Check:
    """The package's device code is whole enough to be read, and serves every GPU here."""
    if not env.cuda:
        return _without_cuda(env, "code")
    try:
        code = _device_code.read(env.package)
    except BackendError as error:
        return Check("code", "fail", str(error).partition("\n")[0], error.cure)
    if env.driver is None or not env.driver.gpus:
        return Check("code", "skip", "needs a GPU")
    told = []
    for gpu in dict.fromkeys(each.capability for each in env.driver.gpus):
        served = code.serving(gpu)
        lacking = served.pop("", ())
        name = f"sm_{gpu[0]}{gpu[1]}"
        if not served:
            cure = f"{_device_code.REINSTALL} (this build was made for other GPUs)"
            return Check("code", "fail", f"this build of mlx-cuda holds no code for {name}", cure)
        shares = ", ".join(f"{each} of {', '.join(names) if len(names) < 4 else f'{len(names)} sources'}" for each, names in served.items())
        told.append(f"{name}: {shares}" + (f"; not for this GPU: {', '.join(lacking)}" if lacking else ""))
    return Check("code", "ok", "; ".join(told))


def check_headers(env: Environment) -> Check:
    """The CUDA headers that MLX compiles its run-time kernels with are of the backend's major."""
    if not env.cuda:
        return _without_cuda(env, "headers")
    if env.headers is None or env.headers.cuda[0] == env.cuda.major:
        shown = f"CUDA {_dotted(env.headers.cuda)} in {env.headers.path}" if env.headers else f"those of the extra {env.cuda.extra}"
        return Check("headers", "ok", shown)
    runtime = next(library for library in env.cuda.libraries if library.name == "libcudart")
    root = env.roots[runtime.provider]
    right = root.joinpath(*runtime.directories["linux"].split("/")[:2])
    reason = (
        f"{env.headers.source} ({env.headers.path}) holds CUDA {_dotted(env.headers.cuda)}; MLX's run-time kernels need {env.cuda.major}"
    )
    set_variable = "set" if env.system == "windows" else "export"
    return Check("headers", "warn", reason, f"{set_variable} CUDA_HOME={right}")


def check_probe(env: Environment) -> Check:
    """The native module loads and one operation on the GPU gives the right result."""
    if not env.cuda:
        return _without_cuda(env, "run")
    if env.probe is None:
        return Check("run", "skip", "needs the checks above")
    if env.probe.error:
        return Check("run", "fail", env.probe.error, f"report it with the output of {ASK_DOCTOR} --json")
    return Check("run", "ok", env.probe.details)


def _to_cpu(env: Environment) -> str:
    return f"pip uninstall -y {' '.join(env.backends)} && {pip_install('cpu')}" if env.backends else pip_install("cpu")


# In the order in which a failure explains those after it.
CHECKS: tuple[Callable[[Environment], Check], ...] = (
    check_python,
    check_glibc,
    check_mlx,
    check_backend,
    check_driver,
    check_gpu,
    check_libraries,
    check_versions,
    check_headers,
    check_module,
    check_code,
    check_probe,
)


def run(env: Environment) -> list[Check]:
    """Every check, in order."""
    return [check(env) for check in CHECKS]


def first_failure(env: Environment) -> Check | None:
    """The failed check that explains the others, if any failed."""
    return next((check for check in run(env) if check.status == "fail"), None)


def explain(error: ImportError, env: Environment) -> BackendError:
    """Why ``import mlx.core`` failed, in terms of what is installed."""
    failed = [check for check in run(env) if check.status == "fail" and check.name not in ("module", "code")]  # MLX needs nothing of ours
    if failed:
        return BackendError(f"mlx.core cannot be imported: {failed[0].summary}", cure=failed[0].cure)
    return BackendError(f"mlx.core cannot be imported: {error}", cure=f"{pip_install(_extra(env))}; or see {ASK_DOCTOR}")
