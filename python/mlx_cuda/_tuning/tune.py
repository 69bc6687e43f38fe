"""Matrix products with the algorithm that was fastest on this machine, found once and kept in a file."""

from __future__ import annotations

import atexit
import os
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType

import mlx.core as mx

from .._loader import native
from .._loader.tuned_file import Tuned, add, default_path, found, restore

_running: list[Tuning] = []


def tune(enabled: bool = True, *, path: str | os.PathLike[str] | None = None) -> Tuning:
    """Time the algorithms of cuBLASLt for each new product of :func:`linear` and :func:`fp8_matmul`, and keep the fastest.

    ::

        with mlx_cuda.tune():
            mx.eval(model(x))

    A product is timed when it is evaluated for the first time, on operands of its own, which takes some milliseconds and, for as long, as
    much memory as the product: everything around it waits. What was found is written to a file at the end, and later processes use it
    without tuning.

    Args:
        enabled: False ends what earlier calls began.
        path: The file. By default that of the variable ``MLX_CUDA_TUNED``, or ``mlx-cuda/tuned.json`` in the user's cache; where the
            variable is empty, none.

    Returns:
        A :class:`Tuning`, whose ``with`` ends it. Without one, it ends with ``tune(False)`` or with the process.

    Nothing is tuned where there is no native module. An algorithm holds for one GPU, one version of cuBLASLt, and one product: its sizes,
    strides, alignments, dtypes, scaling and epilogue.
    """
    if not enabled:
        while _running:
            _running[-1].stop()
        return Tuning(None)
    return Tuning(default_path() if path is None else Path(path)).start()


class Tuning(AbstractContextManager["Tuning"]):
    """A time in which products are tuned."""

    def __init__(self, path: Path | None) -> None:
        self.path = path

    def start(self) -> Tuning:
        """Begin."""
        if mx.cuda.is_available():
            native.load()
        if native.loaded is not None:
            if self.path is not None:
                restore(native.loaded, self.path)
            native.loaded.tuning(True)
        _running.append(self)
        return self

    def stop(self) -> None:
        """End, and write what was found."""
        if self not in _running:
            return
        _running.remove(self)
        if native.loaded is not None:
            native.loaded.tuning(bool(_running))
            if self.path is not None and self.products:
                add(self.path, self.products)

    @property
    def products(self) -> dict[str, Tuned]:
        """All that is known in this process, by the names of the products."""
        return {} if native.loaded is None else found(native.loaded)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()


@atexit.register
def _stop() -> None:
    tune(False)
