"""Fixtures of the package's tests: with a GPU, too, those of what calls mean ask MLX's CPU kernels, and Python's rules each time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import pytest
from mlx_cuda._common import limits
from mlx_cuda._loader import device_code as _device_code
from mlx_cuda._loader import native as _native
from mlx_cuda._mlx_lm import in_pages

from .compiled import native
from .engines import engines
from .environments import ROOT, write_device_code
from .matmuls import matmuls
from .sessions_on_cpu import decoding, model

__all__ = ["decoding", "engines", "forgetful", "matmuls", "model", "native", "on_the_cpu", "package"]


@pytest.fixture(scope="session")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with made-up device code."""
    folder = tmp_path_factory.mktemp("package")
    write_device_code(folder)
    return folder


@pytest.fixture(autouse=True)
def _limits_of_the_family() -> Iterator[None]:
    """Whatever a test has put in force."""
    yield
    for capability in list(limits._in_force):
        limits.put(capability, None)


@pytest.fixture(autouse=True)
def _classes_of_caches() -> Iterator[None]:
    """Those that captured steps have adapted."""
    yield
    in_pages.restore()


@pytest.fixture(autouse=True)
def _made_up_device_code(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package of a made-up environment has it too, though its path is but a name."""

    def real(path: Path) -> Path:
        return package if path == ROOT / "mlx_cuda" else path

    read, load = _device_code.read, _device_code.load
    monkeypatch.setattr(_device_code, "read", lambda path: read(real(path)))
    monkeypatch.setattr(_device_code, "load", lambda path, digest: load(real(path), digest))


@pytest.fixture(scope="module")
def on_the_cpu() -> Iterator[None]:
    """Everything without a stream of its own: MLX's CUDA kernels for quantised weights compile for a minute, and round otherwise."""
    before = mx.default_device()
    mx.set_default_device(mx.cpu)
    yield
    mx.set_default_device(before)


@pytest.fixture
def forgetful(monkeypatch: pytest.MonkeyPatch) -> None:
    """As without a native module, whose memory answers calls that are equal to earlier ones."""
    if mx.cuda.is_available():
        _native.load()  # now, as it is loaded once: it would be taken for unloaded ever after, or be brought back
    monkeypatch.setattr(_native, "loaded", None)
