"""The loader: the native module of a stream, loaded once, or the reason why there is none."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import re
import sys
import threading
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, cast

import mlx.core as mx

from .._common import limits
from .._common.choice import Gpu, sm
from .._common.errors import BackendError
from . import checks, device_code, limits_file, load_errors, tuned_file
from . import loaded as loaded_files
from .environment import CAPABILITY, Environment, take
from .module import NativeModule
from .table import Cuda, Version, dll_directories, library_paths, version


@dataclass(frozen=True)
class Engine:
    """A native module, and the properties of its GPU that dispatch rules use."""

    module: NativeModule
    capability: tuple[int, int]
    cudnn: Version


loaded: NativeModule | None = None  # for the operations' short way; set by load()

_lock = threading.Lock()
_outcome: NativeModule | BackendError | None = None
_engines: dict[str, Engine] = {}
_kept: list[Any] = []  # handles of preloaded libraries and DLL directories: both end with their handle


def engine(stream: mx.Stream) -> Engine | str:
    """Return the engine of a stream, or the reason why MLX's operations compute its calls.

    A stream on the CPU, or an MLX without a CUDA GPU, is not an error. If there is a GPU but the native module cannot be used, one
    RuntimeWarning gives the reason and the fix.
    """
    if stream.device.type != mx.gpu:
        return "the stream is on the CPU"
    if not mx.cuda.is_available():
        return "MLX offers no CUDA GPU here"
    module = load()
    if isinstance(module, BackendError):
        return str(module)
    key = str(stream.device)
    if key not in _engines:
        _engines[key] = Engine(module, capability(stream.device), version(str(module.library_versions()["cudnn"])))
        if len(_engines) > 1:  # a second GPU, which MLX hands memory of the first one to
            module.share_memory()
    return _engines[key]


def gpu(stream: mx.Stream) -> Gpu:
    """Return the GPU of a stream, for dispatch rules."""
    found = engine(stream)
    if not isinstance(found, str):
        return Gpu(found.capability)
    on_cuda = stream.device.type == mx.gpu and mx.cuda.is_available()
    return Gpu(capability(stream.device) if on_cuda else (0, 0), found)


def module(stream: mx.Stream) -> NativeModule:
    """Return the module of a stream that has one."""
    found = engine(stream)
    assert not isinstance(found, str)  # noqa: S101  (it was there when the engine was chosen)
    return found.module


def device_capability(device: mx.Device) -> tuple[int, int]:
    """Return the compute capability of a GPU."""
    info = mx.device_info(device)
    return int(info["compute_capability_major"]), int(info["compute_capability_minor"])


def capability(device: mx.Device) -> tuple[int, int]:
    """Return the compute capability of a GPU, or the older one of MLX_CUDA_CAPABILITY, whose code then runs on it.

    An invalid setting raises a ValueError, so that no call falls back because of it.
    """
    real = device_capability(device)
    named = os.environ.get(CAPABILITY)
    if not named:
        return real
    if not re.fullmatch("[1-9][0-9]{1,2}", named):
        raise ValueError(f"{CAPABILITY} is {named!r}, which is no compute capability: write it as 80 or 120, or unset it")
    believed = divmod(int(named), 10)
    if believed > real:
        raise ValueError(f"{CAPABILITY} is {named}, newer than this GPU, which is {sm(real)}: name an older one, or unset it")
    return believed


@cache
def tf32() -> bool:
    """Return whether float32 matmuls may run in TF32, as MLX's own do."""
    with contextlib.suppress(ValueError):  # as atoi gives 0
        return int(os.environ.get("MLX_ENABLE_TF32", "1")) != 0
    return False


def load() -> NativeModule | BackendError:
    """Return the native module of the installed backend, or the error for every call; loading is tried once."""
    global _outcome, loaded  # noqa: PLW0603
    with _lock:
        if _outcome is None:
            try:
                module = _load(take(ask_driver=False), capability(mx.Device(mx.gpu, 0)))
                tuned_file.restore(module)
                restore_limits(module)
                _outcome = loaded = module
            except BackendError as error:
                warnings.warn(f"mlx_cuda is not active: calls run on MLX's operations. {error}", RuntimeWarning, stacklevel=4)
                _outcome = error
        return _outcome


def on_cuda() -> bool:
    """Return whether MLX has a CUDA GPU."""
    return bool(mx.cuda.is_available())


def gpu_name() -> str:
    """Return the name of the first GPU, for its measurements; empty if MLX_CUDA_CAPABILITY is set."""
    return "" if os.environ.get(CAPABILITY) else str(mx.device_info(mx.Device(mx.gpu, 0)).get("device_name", ""))


def gpu_versions(module: NativeModule) -> dict[str, str]:
    """Return the versions for which measurements are valid."""
    return limits_file.versions(str(module.library_versions()["driver"]), str(module.build_info()["mlx"]))


def restore_limits(module: NativeModule) -> None:
    """Apply the first GPU's thresholds: measured ones or conservative defaults; the family's if the driver returns no name."""
    gpu = capability(mx.Device(mx.gpu, 0))
    limits.on_change(module.forget_calls)
    with contextlib.suppress(RuntimeError):
        known = limits_file.measured(gpu_name(), gpu_versions(module), limits_file.default_path())
        limits.put(gpu, known or limits_file.by_data_sheet(gpu, module.device_figures()))


def _load(env: Environment, gpu: tuple[int, int]) -> NativeModule:
    # A library that is not where the table says may still be found by the system's loader, so that check only explains a failed import.
    if failed := checks.first_failure(env, besides=("libraries",)):
        raise BackendError(failed.summary, fix=failed.fix)
    if env.cuda is None:
        raise BackendError(checks.without_cuda(env), fix=checks.pip_install(env, "cu13"))
    if gpu < env.cuda.capability:
        oldest = f"older than {sm(env.cuda.capability)}, the oldest that mlx-cuda runs on"
        raise BackendError(f"the GPU is {sm(gpu)}, {oldest}", fix="pass stream=mx.cpu")
    if sys.platform == "win32":
        _kept.extend(os.add_dll_directory(str(path)) for path in dll_directories(env.cuda, env.roots) if path.is_dir())
        _kept.extend(preload(loaded_by_name(env.cuda, env.roots)))
    else:
        _kept.extend(preload(elsewhere(env.cuda, env)))
    try:
        module = cast("NativeModule", importlib.import_module(f"mlx_cuda.{env.cuda.module}"))
    except ImportError as error:
        if fix := load_errors.fix(str(error), env):
            raise BackendError(str(error), fix=fix) from error
        if missing := checks.first_failure(env):
            raise BackendError(f"{error}; {missing.summary}", fix=missing.fix) from error
        raise BackendError(str(error), fix=checks.ASK_DOCTOR) from error
    for source, packed in device_code.load(env.package, str(module.build_info()["device_code"])).items():
        module.add_device_code(source, packed)
    if set(device_code.read(env.package).serving(gpu)) == {""}:
        raise BackendError(f"this build of mlx-cuda holds no code for {sm(gpu)}", fix=checks.build_for(gpu))
    return module


def elsewhere(cuda: Cuda, env: Environment) -> list[Path]:
    """Return the libraries that RPATH does not reach, because their package is in another site-packages directory."""
    here = env.package.resolve().parent
    return [path for path in library_paths(cuda, "linux", env.roots).values() if not path.is_relative_to(here) and path.is_file()]


def loaded_by_name(cuda: Cuda, roots: Mapping[str, Path]) -> list[Path]:
    """Return the libraries that NVIDIA's libraries load on Windows by a bare name, which finds loaded libraries but no added directory.

    If another package, such as torch, has loaded one of them, the others are loaded from its directory: versions must not be mixed.
    """
    others = [Path(path) for path in loaded_files.mapped()]
    paths: list[Path] = []
    for each in cuda.preload:
        own = roots[each.provider] / each.directory
        folder = next((path.parent for path in others if each.takes(path)), own)
        found = each.found(folder)
        if found and not found[0].match(each.files[0]):
            fix = checks.reinstall(each.provider) if folder == own else f"reinstall the package of {found[0]}"
            raise BackendError(f"{folder} has no {each.files[0]}, which {found[0].name} needs", fix=fix)
        paths += found
    return paths


def preload(paths: Iterable[Path]) -> list[ctypes.CDLL]:
    """Load libraries by path, so that the loader finds their sonames already loaded."""
    return [_load_library(path) for path in paths]


def _load_library(path: Path) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:  # in which Windows does not name the file
        raise BackendError(f"{path} does not load: {error}", fix=checks.ASK_DOCTOR) from error
