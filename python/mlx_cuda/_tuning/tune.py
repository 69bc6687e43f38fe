"""Tuned cuBLASLt algorithms: measured once per GEMM and stored in a file."""

from __future__ import annotations

import atexit
import os
import warnings
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType

import mlx.core as mx

from .._loader import native
from .._loader.tuned_file import Tuned, add, default_path, found, restore

_running: list[Tuning] = []


def tune(enabled: bool = True, *, path: str | os.PathLike[str] | None = None) -> Tuning:
    """Time the cuBLASLt algorithms of each new GEMM of :func:`linear` and :func:`fp8_matmul`, and use the fastest.

    ::

        with mlx_cuda.tune():
            mx.eval(model(x))

    A GEMM is timed when it is first evaluated, on operands of its own. That takes some milliseconds and, meanwhile, as much memory as the
    GEMM; everything else waits. Results are written to a file at the end, and later processes read it.

    Args:
        enabled: False ends tuning that an earlier call began.
        path: File of the results; default: ``MLX_CUDA_TUNED``, or ``mlx-cuda/tuned.json`` in the user's cache. If the variable is empty,
            nothing is stored.

    Returns:
        A :class:`Tuning`, whose ``with`` ends tuning. Without ``with``, ``tune(False)`` or the end of the process ends it.

    Without a native module nothing is tuned. A result is valid for one GPU, one cuBLASLt version and one GEMM: sizes, strides, alignments,
    dtypes, scaling and epilogue.
    """
    if not enabled:
        while _running:
            _running[-1].stop()
        return Tuning(None)
    return Tuning(default_path() if path is None else Path(path)).start()


class Tuning(AbstractContextManager["Tuning"]):
    """The context manager that :func:`tune` returns. GEMMs are tuned until it ends."""

    def __init__(self, path: Path | None) -> None:
        self.path = path

    def start(self) -> Tuning:
        """Start tuning."""
        if mx.cuda.is_available():
            native.load()
        if native.loaded is not None:
            if self.path is not None:
                restore(native.loaded, self.path)
            native.loaded.tuning(True)
        _running.append(self)
        return self

    def stop(self) -> None:
        """Stop tuning and write the results."""
        if self not in _running:
            return
        _running.remove(self)
        if native.loaded is not None:
            native.loaded.tuning(bool(_running))
            if self.path is not None and self.matmuls:
                add(self.path, self.matmuls)

    @property
    def matmuls(self) -> dict[str, Tuned]:
        """Return the tuned GEMMs of this process by their keys."""
        return {} if native.loaded is None else found(native.loaded)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()

    def __getattr__(self, name: str) -> dict[str, Tuned]:
        if name != "products":
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)
        warnings.warn("`Tuning.products` is deprecated: use `Tuning.matmuls`", DeprecationWarning, stacklevel=2)
        return self.matmuls


@atexit.register
def _stop() -> None:
    tune(False)
