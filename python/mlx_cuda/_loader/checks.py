"""The checks: pure functions of an :class:`Environment`, shared by the doctor and by the loader's error messages."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import PurePath
from typing import Literal

from .._common.choice import OLDEST_GPU, sm
from .._common.errors import BackendError, quote
from .._common.limits import HOPPER
from .._version import __version__
from . import device_code, load_errors, origin
from .environment import MLX_LM, WSL_DRIVER, Environment
from .loaded import SEARCH, take_out
from .table import FRONTEND, Cuda, version

Status = Literal["ok", "warn", "fail", "skip"]
Outcome = tuple[Status, str] | tuple[Status, str, str]  # a Check without its name

ASK_DOCTOR = "python -m mlx_cuda doctor"
TUNE = "python -m mlx_cuda tune"
FREE_THREADED = (3, 15)  # the first CPython whose free-threaded build has a stable ABI


@dataclass(frozen=True)
class Check:
    """The outcome of one check, with a fix unless it is ok."""

    name: str
    status: Status
    summary: str
    fix: str = ""


def pip_install(env: Environment, extra: str) -> str:
    """Return the pip line that installs everything an extra pins, from the wheel that was installed if it was a file."""
    return f"pip install {origin.requirement(env.origin, extra)}"


def _install(env: Environment, cuda: Cuda | None) -> str:
    """Install the extra of a CUDA major, or the extra cpu. A wheel that was built for another CUDA version has to be built again."""
    if cuda and env.modules and cuda.module not in env.modules:
        return f"build the wheel again without --cuda, then pip install its extra {cuda.extra}"
    return pip_install(env, cuda.extra if cuda else "cpu")


def _replace(env: Environment, backends: Collection[str], cuda: Cuda | None) -> str:
    """Uninstall backends and install one, once pip has found that one."""
    install = _install(env, cuda)
    if not install.startswith("pip install "):
        return f"{install} after {_uninstall(backends)}"
    return _uninstall_first(backends, install)


def _uninstall(packages: Collection[str]) -> str:
    return f"pip uninstall -y {' '.join(packages)}"


def _uninstall_first(packages: Collection[str], install: str) -> str:
    """Uninstall packages and run a pip line, once pip has found everything that the line installs."""
    return f"{install.replace('install', 'install --dry-run', 1)} && {_uninstall(packages)} && {install}"


def reinstall(*packages: str) -> str:
    """Return the pip line that restores the files of installed packages."""
    return f"pip install --force-reinstall --no-deps {' '.join(packages)}"


def _restore(env: Environment, *packages: str) -> str:
    """Reinstall packages in the versions that are installed."""
    return reinstall(*(f"{name}=={env.distributions[name].version}" for name in packages))


def _dotted(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))


def _suitable(env: Environment) -> Cuda | None:
    """Return the newest CUDA major that the driver supports: the newest of all if it was not queried, ``None`` without a driver."""
    newest_first = sorted(env.table.cuda.values(), key=lambda cuda: -cuda.major)
    if env.driver is None:
        return newest_first[0]
    return next((cuda for cuda in newest_first if env.driver.cuda and env.driver.cuda[0] >= cuda.major), None)


def _install_backend(env: Environment) -> str:
    cuda = _suitable(env)
    if cuda is None:
        return f"{pip_install(env, 'cpu')}  (with a GPU: the extra cu13 or cu12)"
    return f"{_install(env, cuda)}  (without a GPU: the extra cpu)"


def _install_extra(env: Environment) -> str:
    """Install the extra of the installed backend."""
    if env.cuda:
        return pip_install(env, env.cuda.extra)
    return _install(env, None if env.backends else _suitable(env))


def build_for(capability: tuple[int, int]) -> str:
    """Return the fix for a wheel without code for a GPU."""
    return f"build the wheel again with --arch {10 * capability[0] + capability[1]}, or without --arch"


def without_cuda(env: Environment) -> str:
    """Return why no CUDA library is needed."""
    return f"{env.backends[0]} needs none" if env.backends else "no CUDA backend is installed"


def _to_cpu(env: Environment) -> str:
    return _replace(env, env.backends, None) if env.backends else pip_install(env, "cpu")


def _of_this_version(env: Environment, name: str, *, own_build: bool = False) -> Outcome:
    """Whether a package of MLX is of the version that this build was made for; that of an own build ends in .dev and a commit."""
    installed, wanted = env.distributions[name].version, env.table.mlx
    if version(installed) == version(wanted) if own_build else installed == wanted:
        return "ok", f"{name} {installed}"
    return "fail", f"{name} {installed} is installed, but mlx-cuda {__version__} was built for {name} {wanted}", _install_extra(env)


def check_python(env: Environment) -> Outcome:
    """The interpreter is one that the native module's stable ABI covers."""
    if env.free_threaded and version(env.python) < FREE_THREADED:
        reason = f"CPython {env.python} is free-threaded, which has a stable ABI only from {_dotted(FREE_THREADED)} on"
        return "fail", reason, f"use the regular interpreter (python3, not python3t), or free-threaded {_dotted(FREE_THREADED)} or newer"
    return "ok", f"{'free-threaded ' if env.free_threaded else ''}CPython {env.python} on {env.system}"


def check_glibc(env: Environment) -> Outcome:
    """The C library is as new as MLX's wheels need, by their platform tag, or by the table when none is installed."""
    if env.system != "linux":
        return "skip", f"not used on {env.system}"
    tagged = {name: env.distributions[name].glibc for name in (*env.backends, FRONTEND) if name in env.distributions}
    name, needed = max(tagged.items(), key=lambda item: item[1], default=("MLX itself", version(env.table.glibc)))
    fix = f"use a system or container with glibc {_dotted(needed)} or newer (Ubuntu 22.04, Debian 12, RHEL 10)"
    if not env.glibc:
        return "fail", f"this system's C library is not glibc; {name} needs glibc {_dotted(needed)}", fix
    if env.glibc < needed:
        return "fail", f"glibc {_dotted(env.glibc)} is too old: {name} needs {_dotted(needed)}", fix
    return "ok", f"glibc {_dotted(env.glibc)}"


def check_mlx(env: Environment) -> Outcome:
    """The very version of MLX that the native modules were built for is installed: its C++ ABI changes in patch releases."""
    if FRONTEND not in env.distributions:
        return "fail", "mlx is not installed", _install_backend(env)
    return _of_this_version(env, FRONTEND, own_build=env.built_from_source and not env.backends)


def check_backend(env: Environment) -> Outcome:
    """Exactly one backend of MLX is installed, in MLX's own version."""
    if env.system == "darwin":
        return "skip", "MLX uses Metal here; every function runs on MLX's operations"
    if not env.backends:
        if env.built_from_source:
            return "ok", "MLX brings its own backend (built from source)"
        return "fail", "MLX has no backend: libmlx is missing, so mlx.core cannot be imported", _install_backend(env)
    if len(env.backends) > 1:
        cuda = next((cuda for cuda in (_suitable(env), env.cuda) if cuda and cuda.backend in env.backends), None)
        reason = f"{' and '.join(env.backends)} are installed together and overwrite each other's libmlx"
        return "fail", reason, _replace(env, env.backends, cuda)
    return _of_this_version(env, env.backends[0])


def check_driver(env: Environment, cuda: Cuda) -> Outcome:
    """A driver is there, works, and is new enough for the backend's CUDA major."""
    if env.driver is None:
        return "skip", "not queried"
    if env.driver.stub:
        return "fail", f"no NVIDIA driver: {env.driver.path}: {env.driver.error}", _without_stub(env, cuda)
    install = "update NVIDIA's driver on Windows" if env.wsl else f"install NVIDIA's driver {cuda.driver} or newer"
    if env.driver.cuda is None:
        return "fail", f"no NVIDIA driver: {env.driver.error}", f"{_get_driver(env, install)}; without a GPU: {_to_cpu(env)}"
    supported = _dotted(env.driver.cuda)
    if env.driver.cuda[0] < cuda.major:
        older = _suitable(env)
        change = f", or {_replace(env, [cuda.backend], older)}" if older else ""
        reason = f"the driver is too old: it runs CUDA {supported}, but {cuda.backend} needs CUDA {cuda.major}"
        return "fail", reason, install + change
    if env.driver.cuda < cuda.driver_cuda:
        reason = f"the driver is too old: it runs CUDA {supported}, but the device code needs {_dotted(cuda.driver_cuda)} or newer"
        return "fail", reason, install
    if env.driver.error:
        fix = "check that nvidia-smi works; after a driver update, restart"
        return "fail", env.driver.error, _restart_wsl(env.driver.path) if env.wsl else fix
    return "ok", f"runs CUDA {supported}"


def _without_stub(env: Environment, cuda: Cuda) -> str:
    """A stub that is found before the driver, or in its place."""
    assert env.driver is not None  # noqa: S101
    folder = PurePath(env.driver.path).parent
    if str(folder) in env.search:
        return f"{take_out(folder)}; if no driver is found then, install NVIDIA's driver {cuda.driver} or newer"
    return f"install NVIDIA's driver {cuda.driver} or newer, and take {folder} off the loader's path (/etc/ld.so.conf.d, LD_PRELOAD)"


def _get_driver(env: Environment, install: str) -> str:
    if env.wsl and env.wsl_driver:
        return f"export {SEARCH}={WSL_DRIVER}, or for good: echo {WSL_DRIVER} | sudo tee /etc/ld.so.conf.d/wsl.conf && sudo ldconfig"
    if env.wsl:
        return f"{install}, none inside WSL, then in PowerShell: wsl --update; wsl --shutdown (WSL 2 alone has GPUs: wsl -l -v)"
    return f"{install} (in a container: docker run --gpus all)"


def _restart_wsl(driver: str) -> str:
    if driver and not driver.startswith(WSL_DRIVER):
        return f"remove the Linux driver, which hides that of Windows ({driver}): sudo apt-get remove --purge '^libnvidia-.*' '^nvidia-.*'"
    return "in PowerShell: wsl --update; wsl --shutdown; then check that nvidia-smi works"


def check_gpu(env: Environment, cuda: Cuda) -> Outcome:
    """There is a GPU, and none is older than the oldest one that code was built for."""
    if env.driver is None or env.driver.cuda is None or env.driver.error:
        return "skip", "needs a working driver"
    if not env.driver.gpus:
        return "fail", "the driver offers no GPU", "check that CUDA_VISIBLE_DEVICES does not hide it, or " + _to_cpu(env)
    old = [gpu for gpu in env.driver.gpus if gpu.capability < cuda.capability]
    named = ", ".join(f"{gpu.name} ({sm(gpu.capability)})" for gpu in old or env.driver.gpus)
    if not old:
        return "ok", named
    fix = "hide it with CUDA_VISIBLE_DEVICES" if len(old) < len(env.driver.gpus) else _to_cpu(env)
    return "fail", f"older than {sm(cuda.capability)}, the oldest GPU that MLX and mlx-cuda run on: {named}", fix


def check_libraries(env: Environment, cuda: Cuda) -> Outcome:
    """Every library that the native module links is there."""
    system = "windows" if env.system == "windows" else "linux"
    missing = [library for library in cuda.needed if library.name not in env.libraries]
    if missing:
        names = ", ".join(f"{library.files[system].name} (of {library.provider})" for library in missing)
        broken = [library.provider for library in missing if library.provider in env.distributions]
        return "fail", f"not found: {names}", _restore(env, *broken) if broken else pip_install(env, cuda.extra)
    if "nanobind-backend" not in env.distributions:
        return "fail", "nanobind-backend is not installed", pip_install(env, cuda.extra)
    return "ok", ", ".join(library.files[system].name for library in cuda.needed)


def check_versions(env: Environment, cuda: Cuda) -> Outcome:
    """The installed NVIDIA packages are ones that the extra accepts, and none overwrites the files of another."""
    installed = {name: env.distributions[name].version for name in cuda.requires if name in env.distributions}
    for name, found in installed.items():
        if found not in cuda.requires[name]:
            reason = f"{name} {found} is installed; the extra {cuda.extra} requires {cuda.requires[name]}"
            return "warn", reason, pip_install(env, cuda.extra)
    ours = {library.files["linux"]: library.provider for library in cuda.libraries}
    for other in env.table.cuda.values():
        for library in other.libraries:
            name, provider = library.provider, ours.get(library.files["linux"], library.provider)
            if provider != name and name in env.distributions and not name.startswith(FRONTEND):
                reason = f"{name} (CUDA {other.major}) installs the same {library.files['linux'].name} as {provider}"
                install = _restore(env, provider) if provider in env.distributions else pip_install(env, cuda.extra)
                return "warn", reason, _uninstall_first([name], install)
    return "ok", ", ".join(f"{name} {found}" for name, found in installed.items())


def check_headers(env: Environment, cuda: Cuda) -> Outcome:
    """The CUDA headers that MLX compiles its run-time kernels with are of the backend's major."""
    if env.headers is None:
        return "ok", f"those of the extra {cuda.extra}"
    held = f"CUDA {_dotted(env.headers.cuda)}"
    if env.headers.cuda[0] == cuda.major:
        return "ok", f"{held} in {env.headers.path}"
    runtime = next(library for library in cuda.libraries if library.name == "libcudart")
    right = env.roots[runtime.provider].joinpath(*runtime.files["linux"].parts[:2])
    reason = f"{env.headers.source} ({env.headers.path}) holds {held}; MLX's run-time kernels need {cuda.major}"
    return "warn", reason, f"set CUDA_HOME={right}" if env.system == "windows" else f"export CUDA_HOME={quote(right)}"


def check_module(env: Environment, cuda: Cuda) -> Outcome:
    """This build holds the native module of the installed backend."""
    if env.archive:
        reason = f"mlx_cuda is imported from the archive {env.archive}, from which no native module can be loaded"
        return "fail", reason, f"pip install {quote(env.archive)}, and take it off PYTHONPATH"
    if cuda.module in env.modules:
        return "ok", f"{cuda.module} is in this build"
    built = ", ".join(sorted(env.modules)) or "none"
    others = [other for other in env.table.cuda.values() if other.module in env.modules]
    reason = f"this build of mlx-cuda lacks the native module {cuda.module} that {cuda.backend} needs (it holds: {built})"
    if not others:
        return "fail", reason, origin.reinstall(env.origin)
    return "fail", reason, f"build the wheel again without --cuda, or change the backend: {_replace(env, [cuda.backend], others[0])}"


def check_code(env: Environment, _: Cuda) -> Outcome:
    """The package's device code is whole enough to be read, and serves every GPU here."""
    try:
        code = device_code.read(env.package)
    except BackendError as error:
        return "fail", str(error).partition("\n")[0], error.fix
    if env.driver is None or not env.driver.gpus:
        return "skip", "needs a GPU"
    told = []
    for capability in dict.fromkeys(gpu.capability for gpu in env.driver.gpus):
        served = code.serving(capability)
        lacking = served.pop("", ())
        if not served:
            return "fail", f"this build of mlx-cuda holds no code for {sm(capability)}", build_for(capability)
        shares = ", ".join(f"{each} of {', '.join(names) if len(names) < 4 else f'{len(names)} sources'}" for each, names in served.items())
        told.append(f"{sm(capability)}: {shares}" + (f"; not for this GPU: {', '.join(lacking)}" if lacking else ""))
    return "ok", "; ".join(told)


def check_limits(env: Environment, _: Cuda) -> Outcome:
    """The dispatch thresholds were tuned for the first GPU."""
    if env.driver is None or not env.driver.gpus:
        return "skip", "needs a GPU"
    gpu = env.driver.gpus[0]
    if gpu.capability < OLDEST_GPU:
        return "skip", f"no kernel of mlx-cuda runs on {sm(gpu.capability)}"
    if env.measured:
        return "ok", f"the dispatch thresholds were {env.measured}"
    if gpu.capability[0] == HOPPER:
        return "ok", f"the thresholds of an H200 are used; {TUNE} measures {gpu.name}"
    return "warn", f"no tuned thresholds for {gpu.name}: data-sheet defaults are used", f"{TUNE}  (two minutes)"


def check_loaded(env: Environment, _: Cuda) -> Outcome:
    """NVIDIA's libraries that were loaded are those of the installed packages."""
    if env.probe is None or not env.probe.libraries:
        return "skip", "needs the checks above"
    told = ", ".join(f"{each.path} ({each.version})" for each in env.probe.libraries if each.version)
    others = [each for each in env.probe.libraries if each.instead_of]
    if not others:
        return "ok", told
    fixes = dict.fromkeys(each.fix for each in others)
    return "warn", f"{others[0].path} is loaded instead of {others[0].instead_of}; in all: {told}", "; ".join(fixes)


def check_run(env: Environment, _: Cuda | None) -> Outcome:
    """MLX can be imported; the native module loads and one operation on the GPU gives the right result."""
    if env.probe is None:
        return "skip", "needs the checks above"
    if env.probe.error:
        fix = load_errors.fix(env.probe.error, env) or next((each.fix for each in env.probe.libraries if each.fix), "")
        return "fail", env.probe.error, fix or f"report it with the output of {ASK_DOCTOR} --json"
    return "ok", env.probe.details


def check_decoding(env: Environment, cuda: Cuda) -> Outcome:
    """Decode steps of mlx-lm's models can be captured."""
    if env.probe is None or env.probe.error or env.driver is None:
        return "skip", "needs the checks above"
    if not env.graphs:
        return "warn", "MLX_USE_CUDA_GRAPHS is set to 0: decode steps cannot be captured", "unset MLX_USE_CUDA_GRAPHS"
    if env.probe.capture:
        fix = reinstall(f"{FRONTEND}=={env.table.mlx}", f"{cuda.backend}=={env.table.mlx}")
        return "warn", f"decode steps are not captured: {env.probe.capture}", fix
    if MLX_LM not in env.distributions:
        return "skip", "mlx-lm is not installed (pip install mlx-lm)"
    gpus = ", ".join(dict.fromkeys(sm(gpu.capability) for gpu in env.driver.gpus))
    return "ok", f"decode steps of mlx-lm {env.distributions[MLX_LM].version} are captured as CUDA graphs on {gpus}"


# In the order in which a failure explains those after it.
CHECKS: tuple[Callable[[Environment], Outcome], ...] = (check_python, check_glibc, check_mlx, check_backend)
CHECKS_OF_CUDA: tuple[Callable[[Environment, Cuda], Outcome], ...] = (
    check_driver, check_gpu, check_libraries, check_versions, check_headers, check_module, check_code, check_limits, check_loaded,
    check_run, check_decoding,
)  # fmt: skip


def run(env: Environment) -> list[Check]:
    """Every check, in order."""
    outcomes: dict[Callable[..., Outcome], Outcome] = {check: check(env) for check in CHECKS}
    for check in CHECKS_OF_CUDA:
        outcomes[check] = check(env, env.cuda) if env.cuda else ("skip", without_cuda(env))
    if env.cuda is None and env.probe is not None:
        outcomes[check_run] = check_run(env, None)
    return [Check(check.__name__.removeprefix("check_"), *outcome) for check, outcome in outcomes.items()]


def first_failure(env: Environment, *, besides: Collection[str] = ()) -> Check | None:
    """The failed check that explains the others, if any failed, besides those of these names."""
    return next((check for check in run(env) if check.status == "fail" and check.name not in besides), None)


def explain(error: ImportError, env: Environment) -> BackendError:
    """Return why ``import mlx.core`` failed, with a fix."""
    if fix := load_errors.fix(str(error), env):
        return BackendError(f"mlx.core cannot be imported: {error}", fix=fix)
    failed = first_failure(env, besides=("module", "code"))  # MLX does not need them
    if failed:
        return BackendError(f"mlx.core cannot be imported: {failed.summary}", fix=failed.fix)
    return BackendError(f"mlx.core cannot be imported: {error}", fix=f"{_install_extra(env)}; or see {ASK_DOCTOR}")
