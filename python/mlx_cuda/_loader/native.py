"""The loader: which native module serves a stream, loaded once, or the reason why none does."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import re
import sys
import threading
import warnings
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, cast

import mlx.core as mx

from .._common.choice import Gpu, sm
from .._common.errors import BackendError
from . import checks as _checks
from . import device_code as _device_code
from .environment import Environment, take
from .table import Cuda, Version, dll_directories, library_paths, version

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from .._common.choice import EngineName

P = ParamSpec("P")
CAPABILITY = "MLX_CUDA_CAPABILITY"


class NativeModule(Protocol):
    """What ``_cu12`` and ``_cu13`` offer. Arrays come in checked: equal dtypes, valid shapes, no size of zero."""

    def linear(self, x: mx.array, w: mx.array, bias: mx.array | None, activation: str | None, stream: mx.Stream) -> mx.array:
        """``activation(x @ w.T + bias)``; activation is None, "relu" or "gelu_approx"."""

    def attention(
        self,
        q: mx.array,
        k: mx.array,
        v: mx.array,
        sinks: mx.array | None,
        scale: float,
        causal: bool,
        window_left: int,
        with_lse: bool,
        deterministic: bool,
        stream: mx.Stream,
    ) -> list[mx.array]:
        """cuDNN's fused attention; the causal mask is aligned to the lower right, and a window (-1: none) goes with it.

        Like all that follow, it gives the result and, with_lse, the logarithms of the sums, float32 [B, H, Tq].
        """

    def remembered(self, function: Callable[P, mx.array], /) -> Callable[P, mx.array]:
        """The function, but a call like one before is answered with the graph that it built then.

        Alike are calls whose arguments have the same places and names, shapes, dtypes and values, on the same stream. What that does not
        tell apart, arrays whose gradients may be asked for and results that are no single array go to the function each time.
        """

    def decode_attention(
        self,
        q: mx.array,
        k: mx.array,
        v: mx.array,
        mask: mx.array | None,
        starts: mx.array | None,
        ends: mx.array | None,
        sinks: mx.array | None,
        scale: float,
        softcap: float,
        window_left: int,
        window_right: int,
        with_lse: bool,
        stream: mx.Stream,
    ) -> list[mx.array]:
        """Attention of few queries, which reads keys and values once; windows of -1 see all keys, masks have the scores' shape."""

    def flash_attention(
        self,
        q: mx.array,
        k: mx.array,
        v: mx.array,
        mask: mx.array | None,
        starts: mx.array | None,
        ends: mx.array | None,
        sinks: mx.array | None,
        scale: float,
        softcap: float,
        window_left: int,
        window_right: int,
        with_lse: bool,
        stream: mx.Stream,
    ) -> list[mx.array]:
        """The same for many queries."""

    def flash_varlen(
        self,
        q: mx.array,
        k: mx.array,
        v: mx.array,
        cu_q: mx.array,
        cu_k: mx.array,
        sinks: mx.array | None,
        max_q: int,
        max_k: int,
        scale: float,
        softcap: float,
        window_left: int,
        window_right: int,
        with_lse: bool,
        stream: mx.Stream,
    ) -> list[mx.array]:
        """Sequences packed one after another, [total, H, D]; logarithms [H, total]."""

    def paged_attention(
        self,
        q: mx.array,
        k_pages: mx.array,
        v_pages: mx.array,
        block_table: mx.array,
        lengths: mx.array,
        sinks: mx.array | None,
        scale: float,
        softcap: float,
        window_left: int,
        with_lse: bool,
        stream: mx.Stream,
    ) -> list[mx.array]:
        """decode_attention with keys in pages, causal."""

    def paged_cache_update(
        self,
        k_pages: mx.array,
        v_pages: mx.array,
        keys: mx.array,
        values: mx.array,
        block_table: mx.array,
        lengths: mx.array,
        stream: mx.Stream,
    ) -> list[mx.array]:
        """Both pages with the last keys and values of each sequence written in."""

    def remember_attention(self, engine: EngineName, fewest_keys: int, most_keys: int, *call: Any) -> None:
        """Have ``attention_again`` answer calls that equal this one but for the number of keys, which is within these bounds.

        The call is the arguments of ``attention`` as they came in, in their order, with the stream resolved. Nothing happens where Python
        changes an argument before it hands it to the engine.
        """

    def remember_paged(self, *call: Any) -> None:
        """The same for ``paged_attention``, without force_fused, which the decode kernel computes."""

    def remember_varlen(self, *call: Any) -> None:
        """The same for ``attention_varlen``, without force_fused, which the flash kernel computes."""

    def attention_again(self, *call: Any) -> Any:
        """``attention`` if an equal call was remembered, else None; a TypeError for arguments that it cannot read. Likewise the next."""

    def paged_again(self, *call: Any) -> Any: ...

    def varlen_again(self, *call: Any) -> Any: ...

    def traced(self, arrays: list[mx.array], /) -> bool: ...
    def attention_unsupported(
        self,
        q: mx.array,
        k: mx.array,
        v: mx.array,
        sinks: mx.array | None,
        scale: float,
        causal: bool,
        window_left: int,
        with_lse: bool,
        stream: mx.Stream,
    ) -> str:
        """Why cuDNN does not take this shape; empty when it does."""

    def swiglu(self, gate: mx.array, up: mx.array, stream: mx.Stream) -> mx.array:
        """``silu(gate) * up``."""

    # Matrix products. Affine scales and biases have x's dtype; where nothing else is said, they are differentiable by themselves.
    def quantized_skinny(
        self,
        x: mx.array,
        w: mx.array,
        scales: mx.array,
        biases: mx.array | None,
        lhs_indices: mx.array | None,
        rhs_indices: mx.array | None,
        transpose: bool,
        group_size: int,
        bits: int,
        mode: str,
        small: bool,
        stream: mx.Stream,
    ) -> mx.array:
        """``x [..., K] @ w.T`` with w in 2 dimensions; or, with rhs_indices (uint32 ``[pairs]``), the matrices ``x[lhs[p]] @ w[rhs[p]].T``
        of x ``[batches, M, K]`` and w ``[E, …]``, as ``[pairs, M, N]``; without lhs_indices then ``x[p]``. ``small``: by MLX's kernel,
        where that takes the layouts; there are no indices.
        """

    def quantized_kernel(
        self,
        x: mx.array,
        w: mx.array,
        scales: mx.array,
        biases: mx.array | None,
        lhs_indices: mx.array | None,
        rhs_indices: mx.array | None,
        transpose: bool,
        group_size: int,
        bits: int,
        mode: str,
        small: bool,
        stream: mx.Stream,
    ) -> str:
        """The source and the kernel that quantized_skinny runs for these arguments; empty where it is MLX's."""

    def dequantize_then_gemm(
        self,
        x: mx.array,
        w: mx.array,
        scales: mx.array,
        biases: mx.array | None,
        transpose: bool,
        group_size: int,
        bits: int,
        mode: str,
        stream: mx.Stream,
    ) -> mx.array:
        """``x [..., K] @ w.T`` with w in 2 dimensions, dequantised in tiles; its derivatives are composed in Python."""

    def expert_offsets(self, sorted_indices: mx.array, experts: int, stream: mx.Stream) -> mx.array:
        """Where each expert's rows begin, int32 ``[experts + 1]``, from rising uint32 ``[rows]``."""

    def grouped_matmul(self, x: mx.array, w: mx.array, offsets: mx.array, transpose: bool, stream: mx.Stream) -> mx.array:
        """x ``[M, K]`` in groups by w ``[E, N, K]``, or ``[E, K, N]`` without transpose; zeros beyond the last group.

        A w whose last two dimensions are swapped in memory is read where it lies, and offsets that do not rise are empty groups.
        """

    def gather_mm(
        self,
        x: mx.array,
        w: mx.array,
        lhs_indices: mx.array | None,
        rhs_indices: mx.array,
        transpose: bool,
        sorted_indices: bool,
        stream: mx.Stream,
    ) -> mx.array:
        """The matrices ``x[lhs[p]] @ w[rhs[p]].T`` of x ``[batches, M, K]`` and w ``[E, …]`` for uint32 ``[pairs]``, as ``[pairs, M, N]``.

        Without lhs_indices, each matrix of x in turn has ``pairs / batches`` of them. sorted_indices: rhs_indices rise.
        """

    def grouped_quantized(
        self,
        x: mx.array,
        w: mx.array,
        scales: mx.array,
        biases: mx.array | None,
        offsets: mx.array,
        transpose: bool,
        group_size: int,
        bits: int,
        mode: str,
        stream: mx.Stream,
    ) -> mx.array:
        """grouped_matmul with quantised w; its derivatives are composed in Python."""

    def fp8_matmul(
        self,
        a: mx.array,
        b: mx.array,
        scale_a: mx.array | None,
        scale_b: mx.array | None,
        bias: mx.array | None,
        out_dtype: mx.Dtype,
        stream: mx.Stream,
    ) -> mx.array:
        """e4m3 a ``[..., M, K]`` by b ``[N, K]``; scales are float32, of one element or as quantize_fp8 gives them for a and for b."""

    def quantize_fp8(self, x: mx.array, how: str, stream: mx.Stream) -> tuple[mx.array, mx.array]:
        """Values and scales; how is "tensor", "row", "block128" or "block128x128"."""

    def build_info(self) -> dict[str, Any]:
        """What the module was built with: cuda, mlx, cudnn_headers, and the digest of its device_code."""

    def add_device_code(self, source: str, fatbin: bytes) -> None:
        """Hand over the fatbin of a source."""

    def tuning(self, enabled: bool) -> None:
        """Whether new products are timed."""

    def tuned(self) -> list[tuple[str, str, float, float]]:
        """What is known: a product's name, its algorithm, and the microseconds of that and of the heuristic's choice."""

    def set_tuned(self, tuned: list[tuple[str, str, float, float]]) -> None:
        """Know these instead."""

    def library_versions(self) -> dict[str, Any]:
        """The libraries in use, as dotted versions: cudnn, cublaslt, driver."""


@dataclass(frozen=True)
class Engine:
    """A native module and what the dispatch rules ask of the GPU it runs on."""

    module: NativeModule
    capability: tuple[int, int]
    cudnn: Version


loaded: NativeModule | None = None  # for the operations' short way; set by load()

_lock = threading.Lock()
_outcome: NativeModule | BackendError | None = None
_engines: dict[str, Engine] = {}
_kept: list[Any] = []  # handles of preloaded libraries and DLL directories: both end with their handle


def engine(stream: mx.Stream) -> Engine | str:
    """The engine for a stream, or in words why the operation is composed of MLX's own instead.

    A stream on the CPU, or an MLX without a CUDA GPU, is no failure. Where a GPU is there and the native module cannot be used, one
    RuntimeWarning says why and names the cure.
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
    return _engines[key]


def gpu(stream: mx.Stream) -> Gpu:
    """Where the matrix products of a stream run."""
    found = engine(stream)
    if not isinstance(found, str):
        return Gpu(found.capability)
    on_cuda = stream.device.type == mx.gpu and mx.cuda.is_available()
    return Gpu(capability(stream.device) if on_cuda else (0, 0), found)


def module(stream: mx.Stream) -> NativeModule:
    """The module for a stream that has one."""
    found = engine(stream)
    assert not isinstance(found, str)  # noqa: S101  (it was there when the engine was chosen)
    return found.module


def capability(device: mx.Device) -> tuple[int, int]:
    """The compute capability of a GPU, or the older one that MLX_CUDA_CAPABILITY names, whose code is to run on it.

    A setting that cannot be meant is a ValueError, so that no call is composed because of it.
    """
    info = mx.device_info(device)
    real = int(info["compute_capability_major"]), int(info["compute_capability_minor"])
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
    """Whether float32 products may run in TF32, as MLX's own do."""
    with contextlib.suppress(ValueError):  # as atoi gives 0
        return int(os.environ.get("MLX_ENABLE_TF32", "1")) != 0
    return False


def load() -> NativeModule | BackendError:
    """The native module of the installed backend, or the error that every call is answered with; tried once."""
    global _outcome, loaded  # noqa: PLW0603
    with _lock:
        if _outcome is None:
            try:
                module = _load(take(ask_driver=False), capability(mx.Device(mx.gpu, 0)))
                _restore_tuned(module)
                _outcome = loaded = module
            except BackendError as error:
                warnings.warn(f"mlx_cuda composes MLX's own operations, which are slower. {error}", RuntimeWarning, stacklevel=4)
                _outcome = error
        return _outcome


def _load(env: Environment, gpu: tuple[int, int]) -> NativeModule:
    # A library that is not where the table says may still be found by the system's loader, so that check only explains a failed import.
    failed = [check for check in _checks.run(env) if check.status == "fail" and check.name != "libraries"]
    if failed:
        raise BackendError(failed[0].summary, cure=failed[0].cure)
    if env.cuda is None:
        raise BackendError(_checks.check_module(env).summary, cure=_checks.pip_install("cu13"))
    if gpu < env.cuda.capability:
        oldest = f"older than {sm(env.cuda.capability)}, the oldest that mlx-cuda runs on"
        raise BackendError(f"the GPU is {sm(gpu)}, {oldest}", cure="pass stream=mx.cpu")
    if sys.platform == "win32":
        _kept.extend(os.add_dll_directory(str(path)) for path in dll_directories(env.cuda, env.roots) if path.is_dir())
    else:
        _kept.extend(preload(elsewhere(env.cuda, env)))
    try:
        module = cast("NativeModule", importlib.import_module(f"mlx_cuda.{env.cuda.module}"))
    except ImportError as error:
        missing = _checks.check_libraries(env)
        if missing.status == "fail":
            raise BackendError(f"{error}; {missing.summary}", cure=missing.cure) from error
        raise BackendError(str(error), cure=_checks.ASK_DOCTOR) from error
    for source, fatbin in _device_code.load(env.package, str(module.build_info()["device_code"])).items():
        module.add_device_code(source, fatbin)
    if set(_device_code.read(env.package).serving(gpu)) == {""}:
        raise BackendError(f"this build of mlx-cuda holds no code for {sm(gpu)}", cure="install a build that was made for it")
    return module


def _restore_tuned(module: NativeModule) -> None:
    from .._tuning import tune as _tune  # which imports this module

    _tune.restore(module)


def elsewhere(cuda: Cuda, env: Environment) -> list[Path]:
    """The libraries that RPATH does not reach, because their package lies in another site-packages directory than this one."""
    here = env.package.resolve().parent
    return [path for path in library_paths(cuda, "linux", env.roots).values() if not path.is_relative_to(here) and path.is_file()]


def preload(paths: Iterable[Path]) -> list[ctypes.CDLL]:
    """Load libraries by path: the loader then meets their sonames as already loaded, wherever they lie."""
    try:
        return [ctypes.CDLL(str(path)) for path in paths]
    except OSError as error:
        raise BackendError(f"a library of the NVIDIA packages does not load: {error}", cure=_checks.ASK_DOCTOR) from error
