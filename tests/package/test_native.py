"""The loader and the dispatch to a native module, with a stand-in module and a stand-in GPU."""

from __future__ import annotations

import ctypes.util
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import mlx.core as mx
import mlx_cuda
import pytest
from mlx_cuda import BackendError, _environment, _native

from .environments import ROOT, healthy
from .references import random

if TYPE_CHECKING:
    from mlx_cuda._environment import Environment

GPU_STREAM: Any = SimpleNamespace(device=SimpleNamespace(type=mx.gpu))


class Recorder:
    """A native module that computes with MLX and remembers what it was asked."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.unsupported = ""
        self.asked: tuple[Any, ...] = ()

    def linear(self, x: mx.array, w: mx.array, bias: mx.array | None, activation: str | None, stream: mx.Stream) -> mx.array:
        self.calls.append(f"linear {x.dtype} {activation} {bias is not None} {stream}")
        return x @ w.T

    def attention(self, q: mx.array, k: mx.array, v: mx.array, *settings: Any) -> mx.array:
        scale, causal, window, _ = settings
        self.calls.append(f"attention {q.shape} {scale} {causal} {window}")
        return mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask="causal" if causal else None)

    def decode_attention(self, q: mx.array, k: mx.array, v: mx.array, mask: mx.array | None, *settings: Any) -> mx.array:
        *_, scale, softcap, left, right, _ = settings
        self.calls.append(f"decode {q.shape} {None if mask is None else mask.shape} {scale} {softcap} {left} {right}")
        return mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask=mask)

    def attention_unsupported(self, *arguments: Any) -> str:
        self.asked = arguments[3:]
        return self.unsupported

    def swiglu(self, gate: mx.array, up: mx.array, _stream: mx.Stream) -> mx.array:
        self.calls.append(f"swiglu {gate.dtype} {up.dtype}")
        return gate

    def build_info(self) -> dict[str, Any]:
        return {}

    def library_versions(self) -> dict[str, Any]:
        return {"cudnn": "9.28.0"}


@pytest.fixture
def native(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    """Every stream has an engine: an H200 with a recording module."""
    recorder = Recorder()
    monkeypatch.setattr(_native, "engine", lambda _: _native.Engine(cast("_native.NativeModule", recorder), (9, 0), (9, 28, 0)))
    return recorder


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_native, "_outcome", None)
    monkeypatch.setattr(_native, "_engines", {})
    monkeypatch.setattr(_native, "loaded", None)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """MLX says that there is an H200."""
    monkeypatch.setattr(mx.cuda, "is_available", lambda: True)
    monkeypatch.setattr(_native, "capability", lambda _: (9, 0))


def install(monkeypatch: pytest.MonkeyPatch, name: str) -> ModuleType:
    module = ModuleType(f"mlx_cuda.{name}")
    vars(module)["library_versions"] = lambda: {"cudnn": "9.28.0"}
    monkeypatch.setitem(sys.modules, f"mlx_cuda.{name}", module)
    return module


@pytest.mark.parametrize("major", [12, 13])
def test_the_backend_chooses_the_module_and_it_is_loaded_once(monkeypatch: pytest.MonkeyPatch, gpu: None, major: int) -> None:
    taken = []

    def take(*, ask_driver: bool) -> Environment:
        taken.append(ask_driver)
        return healthy(major, driver=None)

    monkeypatch.setattr(_native, "take", take)
    expected = {major: install(monkeypatch, f"_cu{major}") for major in (12, 13)}[major]
    engine = _native.engine(GPU_STREAM)
    assert isinstance(engine, _native.Engine)
    assert engine.module is expected
    assert (engine.capability, engine.cudnn) == ((9, 0), (9, 28, 0))
    assert _native.engine(GPU_STREAM) is engine
    assert taken == [False]


def test_a_failure_warns_once_with_the_cure(monkeypatch: pytest.MonkeyPatch, gpu: None) -> None:
    monkeypatch.setattr(_native, "take", lambda **_: healthy(modules=frozenset(), driver=None))
    with pytest.warns(RuntimeWarning, match=r"(?s)composes MLX's own.*lacks the native module _cu13.*cure: pip install"):
        reason = _native.engine(GPU_STREAM)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert _native.engine(GPU_STREAM) == reason


def test_an_old_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BackendError, match=r"the GPU is sm_70, older than sm_75"):
        _native._load(healthy(driver=None), (7, 0))


def test_a_library_that_the_import_misses_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlx_cuda._cu13", None)  # the import fails
    env = healthy(driver=None, libraries={"libmlx": "", "libcudart": "", "libcublasLt": ""})
    with pytest.raises(BackendError, match=r"not found: libcudnn\.so\.9 \(of nvidia-cudnn-cu13\)"):
        _native._load(env, (9, 0))
    with pytest.raises(BackendError, match=r"cure: python -m mlx_cuda doctor"):
        _native._load(healthy(driver=None), (9, 0))


def test_a_missing_library_may_be_found_by_the_loader(monkeypatch: pytest.MonkeyPatch) -> None:
    module = install(monkeypatch, "_cu13")
    assert _native._load(healthy(driver=None, libraries={}), (9, 0)) is module


def test_streams_on_the_cpu_are_no_failure() -> None:
    assert _native.engine(mx.default_stream(mx.cpu)) == "the stream is on the CPU"


def test_libraries_in_another_site_packages_are_preloaded(tmp_path: Path) -> None:
    env = healthy(driver=None)
    elsewhere = replace(env.distributions["nvidia-cuda-runtime"], root=tmp_path)
    env = replace(env, package=tmp_path / "here" / "mlx_cuda", distributions={**env.distributions, "nvidia-cuda-runtime": elsewhere})
    here = replace(env.distributions["nvidia-cudnn-cu13"], root=tmp_path / "here")
    env = replace(env, distributions={**env.distributions, "nvidia-cudnn-cu13": here})
    assert env.cuda is not None
    assert _native.elsewhere(env.cuda, env) == []  # no file exists
    library, reached = tmp_path / "nvidia/cu13/lib/libcudart.so.13", tmp_path / "here/nvidia/cudnn/lib/libcudnn.so.9"
    for path in (library, reached):
        path.parent.mkdir(parents=True)
        path.touch()
    assert _native.elsewhere(env.cuda, env) == [library]  # RPATH reaches the other
    with pytest.raises(BackendError, match=r"does not load: .*libcudart\.so\.13"):
        _native.preload([library])


@pytest.mark.skipif(sys.platform != "linux", reason="loads a Linux library")
def test_preload_keeps_the_handles() -> None:
    (handle,) = _native.preload([Path(ctypes.util.find_library("m") or "libm.so.6")])
    assert handle.cos


def test_linear_calls_the_module(native: Recorder) -> None:
    x, w = random((3, 8), mx.float16), random((4, 8), mx.float32)
    mlx_cuda.linear(x, w, mx.ones(4), activation="relu", stream=mx.cpu)
    mlx_cuda.linear(x, x, stream=mx.cpu)
    stream = mx.default_stream(mx.cpu)
    assert native.calls == [f"linear {mx.float32} relu True {stream}", f"linear {mx.float16} None False {stream}"]
    mlx_cuda.linear(x.astype(mx.complex64), x, stream=mx.cpu)
    mlx_cuda.linear(x[:0], x)
    assert len(native.calls) == 2


def test_swiglu_calls_the_module(native: Recorder) -> None:
    x = random((3, 8), mx.float16)
    mlx_cuda.swiglu(x, x.astype(mx.bfloat16))
    assert native.calls == [f"swiglu {mx.float32} {mx.float32}"]
    mlx_cuda.swiglu(x, x[:1])
    mlx_cuda.swiglu(x[:0], x[:0])
    assert len(native.calls) == 1


def test_attention_calls_the_module(native: Recorder) -> None:
    q, k = random((1, 4, 100, 64), mx.float16), random((1, 2, 60, 64), mx.float16)
    mlx_cuda.attention(q, k, k)
    mlx_cuda.attention(q, k, k, mask="causal", scale=1.0)  # the first 40 queries see no key
    assert native.calls == ["attention (1, 4, 100, 64) 0.125 False -1", "attention (1, 4, 60, 64) 1.0 True -1"]
    mlx_cuda.attention(q[:, :, :50], k, k, mask="causal", window_size=9)
    assert native.calls.pop() == "attention (1, 4, 50, 64) 0.125 True 9"
    mlx_cuda.attention(q, k, k, mask=mx.ones((100, 60), mx.bool_))
    mlx_cuda.attention(q, k, k, window_size=9)
    mlx_cuda.attention(q, k, k, mask="causal", softcap=2.0)
    mlx_cuda.attention(q.astype(mx.float32), k, k)
    assert len(native.calls) == 2


def test_few_queries_go_to_the_decode_kernel(native: Recorder) -> None:
    q, k = random((1, 4, 3, 64), mx.float16), random((1, 2, 300, 64), mx.float16)
    mlx_cuda.attention(q, k, k)
    mlx_cuda.attention(q, k, k, mask="causal", scale=1.0, window_size=7, softcap=2.0)
    mlx_cuda.attention(q, k, k, mask=mx.ones((300,), mx.bool_), scale=-1.0)
    assert native.calls == [
        "decode (1, 4, 3, 64) None 0.125 0.0 -1 -1",
        "decode (1, 4, 3, 64) None 1.0 2.0 7 0",
        "decode (1, 4, 3, 64) (1, 4, 3, 300) 1.0 0.0 -1 -1",
    ]


def test_attention_asks_whether_cudnn_takes_the_shape(native: Recorder) -> None:
    native.unsupported = "no engine for this graph"
    q = random((1, 4, 100, 64), mx.float16)
    mlx_cuda.attention(q, q, q, mask="causal", scale=0.5, stream=mx.cpu)
    assert not native.calls
    assert native.asked == (0.5, True, -1, mx.default_stream(mx.cpu))
    with pytest.raises(ValueError, match=r"no fused kernel takes this case: cuDNN does not take it: no engine for this graph$"):
        mlx_cuda.attention(q, q, q, force_fused=True, stream=mx.cpu)


def test_the_package_is_where_the_loader_looks() -> None:
    assert Path(mlx_cuda.__file__).parent == _environment.PACKAGE
    assert healthy().package == ROOT / "mlx_cuda"
