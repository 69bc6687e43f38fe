"""The loader and the dispatch to a native module, with a stand-in module and a stand-in GPU."""

from __future__ import annotations

import ctypes.util
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import mlx.core as mx
import mlx_cuda
import pytest
from mlx_cuda import BackendError
from mlx_cuda._attention.composed import compose
from mlx_cuda._attention.options import Options
from mlx_cuda._attention.varlen import Packing, padded
from mlx_cuda._loader import device_code as _device_code
from mlx_cuda._loader import environment as _environment
from mlx_cuda._loader import native as _native
from mlx_cuda._loader.environment import Environment
from mlx_cuda._loader.module import NativeModule

from .environments import DECLARED, NO_CODE, ROOT, healthy, write_device_code
from .references import assert_close, host, random

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

    def cudnn_attention(self, q: mx.array, k: mx.array, v: mx.array, options: Options, _: mx.Stream) -> list[mx.array]:
        named = " sinks" * (options.sinks is not None) + " lse" * options.lse + " deterministic" * options.deterministic
        self.calls.append(f"attention {q.shape} {options.scale} {options.causal} {options.window[0]}{named}")
        return self._computed(q, k, v, options)

    def decode_attention(
        self, q: mx.array, k: mx.array, v: mx.array, options: Options, _: mx.Stream, table: mx.array | None = None
    ) -> list[mx.array]:
        if table is None:
            return self._own("decode", q, k, v, options)
        scale, softcap, (left, right) = options[:3]
        assert right == 0
        assert options.ends is not None
        self.calls.append(f"paged {q.shape} {table.shape} {options.ends.shape} {scale} {softcap} {left}" + " lse" * options.lse)
        out = mx.ones((*q.shape[:3], v.shape[3]), q.dtype)
        return [out, mx.zeros(out.shape[:3])] if options.lse else [out]

    def flash_attention(self, q: mx.array, k: mx.array, v: mx.array, options: Options, _: mx.Stream) -> list[mx.array]:
        return self._own("flash", q, k, v, options)

    def _own(self, name: str, q: mx.array, k: mx.array, v: mx.array, options: Options) -> list[mx.array]:
        fields = options._asdict().items()
        given = " ".join(f"{name}{value.shape}" for name, value in fields if isinstance(value, mx.array))
        scale, softcap, (left, right) = options[:3]
        self.calls.append(f"{name} {q.shape} {given or None} {scale} {softcap} {left} {right}" + " lse" * options.lse)
        return self._computed(q, k, v, options)

    def _computed(self, q: mx.array, k: mx.array, v: mx.array, options: Options) -> list[mx.array]:
        out, *lse = compose(q.astype(mx.float32), k.astype(mx.float32), v.astype(mx.float32), options)
        return [out.astype(q.dtype), *lse]

    def flash_varlen(self, q: mx.array, k: mx.array, v: mx.array, *rest: Any) -> list[mx.array]:
        """The composed route, without its derivative."""
        *packing, options, _ = rest
        scale, softcap, (left, right) = options[:3]
        self.calls.append(f"varlen {q.shape} {packing[2]} {packing[3]} {scale} {softcap} {left} {right}" + " lse" * options.lse)
        mark = len(self.calls)
        wide = q.astype(mx.float32), k.astype(mx.float32), v.astype(mx.float32)
        results = padded(*wide, Packing(*packing), options, mx.default_stream(mx.cpu))
        del self.calls[mark:]
        return [mx.stop_gradient(results[0]).astype(q.dtype), *results[1:]]

    def attention_kernel(self, engine: str, q: mx.array, k: mx.array, _: mx.array, options: Options, stream: mx.Stream) -> str:
        shape = None if options.mask is None else options.mask.shape
        return f"{engine} {q.shape[2]} {k.shape[2]} {shape} {stream.device.type}"

    def paged_cache_update(self, k_pages: mx.array, v_pages: mx.array, keys: mx.array, *_: Any) -> list[mx.array]:
        self.calls.append(f"update {k_pages.shape} {keys.shape}")
        return [k_pages, v_pages]

    def cudnn_refusal(self, *arguments: Any) -> str:
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
    """Every stream has an engine: an H200 with a capture module."""
    recorder = Recorder()
    monkeypatch.setattr(_native, "engine", lambda _: _native.Engine(cast("NativeModule", recorder), (9, 0), (9, 28, 0)))
    return recorder


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_native, "_outcome", None)
    monkeypatch.setattr(_native, "_engines", {})
    monkeypatch.setattr(_native, "loaded", None)


@pytest.fixture
def digest(package: Path) -> str:
    return write_device_code(package)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """MLX says that there is an H200."""
    monkeypatch.setattr(mx.cuda, "is_available", lambda: True)
    monkeypatch.setattr(_native, "capability", lambda _: (9, 0))
    monkeypatch.setattr(_native, "gpu_name", lambda: "NVIDIA H200")


def install(monkeypatch: pytest.MonkeyPatch, name: str, digest: str) -> ModuleType:
    module = ModuleType(f"mlx_cuda.{name}")
    vars(module)["library_versions"] = lambda: {"cudnn": "9.28.0", "driver": "13.0"}
    vars(module)["build_info"] = lambda: {"device_code": digest, "mlx": "0.32.4"}
    vars(module)["device_figures"] = lambda: {"multiprocessors": 132, "clock_khz": 1980000, "memory_khz": 3201000, "memory_bits": 6144}
    vars(module)["forget_calls"] = lambda: None
    vars(module)["given"] = {}
    vars(module)["add_device_code"] = vars(module)["given"].__setitem__
    monkeypatch.setitem(sys.modules, f"mlx_cuda.{name}", module)
    return module


@pytest.mark.parametrize("major", [12, 13])
def test_the_backend_chooses_the_module_and_it_is_loaded_once(monkeypatch: pytest.MonkeyPatch, gpu: None, digest: str, major: int) -> None:
    taken = []

    def take(*, ask_driver: bool) -> Environment:
        taken.append(ask_driver)
        return healthy(major, driver=None)

    monkeypatch.setattr(_native, "take", take)
    expected = {major: install(monkeypatch, f"_cu{major}", digest) for major in (12, 13)}[major]
    engine = _native.engine(GPU_STREAM)
    assert isinstance(engine, _native.Engine)
    assert engine.module is expected
    assert (engine.capability, engine.cudnn) == ((9, 0), (9, 28, 0))
    assert _native.engine(GPU_STREAM) is engine
    assert taken == [False]


def test_a_second_gpu_reaches_the_memory_of_the_first(monkeypatch: pytest.MonkeyPatch, gpu: None) -> None:
    shared: list[int] = []
    module = SimpleNamespace(library_versions=lambda: {"cudnn": "9.28.0"}, share_memory=lambda: shared.append(1))
    monkeypatch.setattr(_native, "load", lambda: module)
    for index, count in (0, 0), (0, 0), (1, 1), (1, 1):
        stream = SimpleNamespace(device=type("Device", (), {"type": mx.gpu, "__str__": lambda _, index=index: f"Device(gpu, {index})"})())
        assert isinstance(_native.engine(cast("mx.Stream", stream)), _native.Engine)
        assert len(shared) == count


def test_a_failure_warns_once_with_the_fix(monkeypatch: pytest.MonkeyPatch, gpu: None) -> None:
    monkeypatch.setattr(_native, "take", lambda **_: healthy(modules=frozenset(), driver=None))
    with pytest.warns(RuntimeWarning, match=r"(?s)is not active: .*lacks the native module _cu13.*fix: pip install"):
        reason = _native.engine(GPU_STREAM)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert _native.engine(GPU_STREAM) == reason


def test_a_gpu_that_the_build_has_no_code_for_is_refused(monkeypatch: pytest.MonkeyPatch, digest: str) -> None:
    install(monkeypatch, "_cu13", digest)
    monkeypatch.setattr(_device_code.DeviceCode, "serving", lambda *_: {"": ("decode", "flash")})
    with pytest.raises(BackendError, match=r"holds no code for sm_90\n  fix: "):
        _native._load(healthy(13, driver=None), (9, 0))


def test_an_old_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BackendError, match=r"the GPU is sm_70, older than sm_75"):
        _native._load(healthy(driver=None), (7, 0))


@pytest.mark.parametrize(
    ("named", "believed"), [(None, (9, 0)), ("", (9, 0)), ("75", (7, 5)), ("80", (8, 0)), ("89", (8, 9)), ("90", (9, 0))]
)
def test_another_gpu_is_believed_in(monkeypatch: pytest.MonkeyPatch, named: str | None, believed: tuple[int, int]) -> None:
    monkeypatch.setattr(mx, "device_info", lambda _: {"compute_capability_major": 9, "compute_capability_minor": 0})
    monkeypatch.delenv("MLX_CUDA_CAPABILITY", raising=False)
    if named is not None:
        monkeypatch.setenv("MLX_CUDA_CAPABILITY", named)
    assert _native.capability(mx.Device(mx.gpu, 0)) == believed


@pytest.mark.parametrize(
    ("named", "message"),
    [
        *((wrong, "no compute capability: write it as 80 or 120") for wrong in ("8.9", "8", "sm_80", "90a", "080", "-80", "8000")),
        ("100", "newer than this GPU, which is sm_90: name an older one"),
    ],
)
def test_a_wrong_setting_is_no_reason_to_compose(monkeypatch: pytest.MonkeyPatch, named: str, message: str) -> None:
    monkeypatch.setattr(mx.cuda, "is_available", lambda: True)
    monkeypatch.setattr(mx, "device_info", lambda _: {"compute_capability_major": 9, "compute_capability_minor": 0})
    monkeypatch.setattr(_native, "take", lambda **_: healthy(driver=None))
    monkeypatch.setenv("MLX_CUDA_CAPABILITY", named)
    for _ in range(2):
        with pytest.raises(ValueError, match=message):
            _native.gpu(GPU_STREAM)


def test_a_library_that_the_import_misses_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlx_cuda._cu13", None)  # the import fails
    env = healthy(driver=None, libraries={"libmlx": "", "libcudart": "", "libcublasLt": ""})
    with pytest.raises(BackendError, match=r"not found: libcudnn\.so\.9 \(of nvidia-cudnn-cu13\)"):
        _native._load(env, (9, 0))
    with pytest.raises(BackendError, match=r"fix: python -m mlx_cuda doctor"):
        _native._load(healthy(driver=None), (9, 0))


def test_a_missing_library_may_be_found_by_the_loader(monkeypatch: pytest.MonkeyPatch, digest: str) -> None:
    module = install(monkeypatch, "_cu13", digest)
    assert _native._load(healthy(driver=None, libraries={}), (9, 0)) is module
    assert vars(module)["given"] == {name: name.encode() for name in DECLARED}


def test_a_module_gets_no_device_code_but_its_own(monkeypatch: pytest.MonkeyPatch, gpu: None) -> None:
    module = install(monkeypatch, "_cu13", "another")
    monkeypatch.setattr(_native, "take", lambda **_: healthy(driver=None))
    with pytest.warns(RuntimeWarning, match=r"(?s)is not active: .*is of another build than the native module\n  fix: pip install"):
        assert isinstance(_native.engine(GPU_STREAM), str)
    assert vars(module)["given"] == {}


def test_a_package_without_device_code_is_refused_before_its_module_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlx_cuda._cu13", None)  # the import would fail
    with pytest.raises(BackendError, match=r"the device code's manifest .* cannot be read"):
        _native._load(healthy(driver=None, package=NO_CODE), (9, 0))


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
    with pytest.raises(BackendError, match=r"libcudart\.so\.13 does not load: "):
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
    q, k = random((1, 4, 100, 64), mx.float16), random((1, 2, 100, 64), mx.float16)
    mlx_cuda.attention(q, k, k)
    mlx_cuda.attention(q, k, k, mask="causal", scale=1.0, window_size=9, deterministic=True)
    mlx_cuda.attention(q, k, k[..., :32], mask="causal", sinks=mx.ones(4), return_lse=True)
    mlx_cuda.attention(q[..., :60], k[..., :60], k)  # no multiple of 8
    assert native.calls == [
        "attention (1, 4, 100, 64) 0.125 False -1",
        "attention (1, 4, 100, 64) 1.0 True 9 deterministic",
        "attention (1, 4, 100, 64) 0.125 True -1 sinks lse",
    ]
    options = native.asked[0]
    assert (options.scale, options.window, options.lse) == (0.125, (-1, 0), True)
    mlx_cuda.attention(q[:, :, :90], k, k)  # a cache
    assert native.calls[3:] == ["flash (1, 4, 90, 64) None 0.125 0.0 -1 -1"]


def test_what_cudnn_does_not_take_goes_to_the_flash_kernel(native: Recorder) -> None:
    q, k = random((1, 4, 100, 64), mx.float16), random((1, 2, 60, 64), mx.float16)
    mlx_cuda.attention(q, k, k, mask="causal")  # the first 40 queries see no key
    mlx_cuda.attention(q, k, k, mask=mx.ones((100, 60), mx.bool_), scale=-1.0)
    mlx_cuda.attention(q.astype(mx.float32), k, k, window_size=(9, 3), return_lse=True)
    mlx_cuda.attention(q, k, k, mask="causal", softcap=2.0, lengths=mx.array([7]), left_padding=mx.array([3]))
    mlx_cuda.attention(q, k, k, mask=mx.zeros((60,), mx.float16), sinks=mx.ones(4))
    assert native.calls == [
        "flash (1, 4, 100, 64) None 0.125 0.0 -1 0",
        "flash (1, 4, 100, 64) mask(1, 4, 100, 60) 1.0 0.0 -1 -1",
        "flash (1, 4, 100, 64) None 0.125 0.0 9 3 lse",
        "flash (1, 4, 100, 64) starts(1,) ends(1,) 0.125 2.0 -1 0",
        "flash (1, 4, 100, 64) mask(1, 4, 100, 60) sinks(4,) 0.125 0.0 -1 -1",
    ]


def test_few_queries_go_to_the_decode_kernel(native: Recorder) -> None:
    q, k = random((1, 4, 3, 64), mx.float16), random((1, 2, 300, 64), mx.float16)
    mlx_cuda.attention(q, k, k)
    mlx_cuda.attention(q, k, k, mask="causal", scale=1.0, window_size=7, softcap=2.0, return_lse=True)
    mlx_cuda.attention(q, k, k, mask=mx.ones((300,), mx.bool_), scale=-1.0)
    assert native.calls == [
        "decode (1, 4, 3, 64) None 0.125 0.0 -1 -1",
        "decode (1, 4, 3, 64) None 1.0 2.0 7 0 lse",
        "decode (1, 4, 3, 64) mask(1, 4, 3, 300) 1.0 0.0 -1 -1",
    ]


def test_explain_names_the_kernel(native: Recorder) -> None:
    q, k = random((1, 4, 3, 64), mx.float16), random((1, 2, 300, 64), mx.float16)
    mask = mx.ones((300,), mx.bool_)
    assert mlx_cuda.explain(q, k, k, mask=mask, stream=mx.cpu).kernel == f"decode 3 300 (1, 4, 3, 300) {mx.cpu}"
    assert mlx_cuda.explain(k, k, k, softcap=2.0, stream=mx.cpu).kernel == f"flash 300 300 None {mx.cpu}"
    assert not mlx_cuda.explain(k, k, k).kernel  # cuDNN's


def test_packed_sequences_call_the_module(native: Recorder) -> None:
    q, k, ends = random((30, 4, 16), mx.float16), random((30, 2, 16), mx.float16), mx.array([0, 10, 10, 25])
    arguments: dict[str, Any] = {"max_seqlen_q": 20, "max_seqlen_k": 15, "mask": "causal", "softcap": 2.0}
    out = mlx_cuda.attention_varlen(q, k, k, ends, ends, window_size=99, force_fused=True, **arguments)
    assert native.calls == ["varlen (30, 4, 16) 20 15 0.25 2.0 -1 0"]
    assert out.shape == q.shape
    native.calls.clear()
    mlx_cuda.attention_varlen(q[..., :12], k[..., :12], k, ends, ends, **arguments)  # no multiple of 8
    assert not native.calls


@pytest.mark.parametrize("sinks", [None, mx.array([0.5, -0.5])], ids=("no sinks", "sinks"))
def test_packed_sequences_have_gradients(native: Recorder, sinks: mx.array | None) -> None:
    """Those of the padded ones, through the logarithms too; the kernel itself has none."""
    q, k, ends = random((9, 2, 8), mx.bfloat16), random((9, 1, 8), mx.bfloat16), mx.array([0, 4, 4, 8])
    arrays = [q, k, k * 2, *([] if sinks is None else [sinks.astype(mx.bfloat16)])]

    def loss(*arrays: mx.array) -> mx.array:
        q, k, v, *rest = arrays
        out, lse = mlx_cuda.attention_varlen(
            q, k, v, ends, ends, max_seqlen_q=5, max_seqlen_k=5, mask="causal", sinks=rest[0] if rest else None, return_lse=True
        )
        return (out.astype(mx.float32) ** 2).sum() + mx.where(lse > -mx.inf, lse, 0).sum()

    which = list(range(len(arrays)))
    actual = mx.grad(loss, argnums=which)(*arrays)
    assert native.calls
    expected = mx.grad(loss, argnums=which)(*(each.astype(mx.float32) for each in arrays))
    for got, exact in zip(actual, expected, strict=True):
        assert got.dtype == mx.bfloat16
        assert_close(got, host(exact), slack=2)


def test_pages_call_the_module(native: Recorder) -> None:
    q, pages, table = random((2, 4, 1, 16), mx.float16), random((5, 2, 16, 16), mx.float16), mx.array([[0, 1], [3, 4]])
    lengths = mx.array([17, 30])
    out, lse = mlx_cuda.paged_attention(q, pages, pages, table, lengths, window_size=20, softcap=3.0, return_lse=True)
    assert (out.shape, lse.shape) == ((2, 4, 1, 16), (2, 4, 1))
    new = random((2, 2, 3, 16), mx.float32)
    mlx_cuda.paged_cache_update(pages, pages, new, new, table, lengths)
    assert native.calls == ["paged (2, 4, 1, 16) (2, 2) (2,) 0.25 3.0 20 lse", "update (5, 2, 16, 16) (2, 2, 3, 16)"]
    native.calls.clear()
    mlx_cuda.paged_attention(mx.repeat(q, 33, axis=2), pages, pages, table, lengths)  # the pages in order, and then as ever
    assert native.calls == ["flash (2, 4, 33, 16) ends(2,) 0.25 0.0 -1 0"]


def test_attention_asks_whether_cudnn_takes_the_shape(native: Recorder) -> None:
    native.unsupported = "no engine for this graph"
    q = random((1, 4, 100, 64), mx.float16)
    mlx_cuda.attention(q, q, q, mask="causal", scale=0.5, stream=mx.cpu)
    assert native.asked == (Options(0.5, window=(-1, 0)), mx.default_stream(mx.cpu))
    assert native.calls == ["flash (1, 4, 100, 64) None 0.5 0.0 -1 0"]


def test_the_package_is_where_the_loader_looks() -> None:
    assert Path(mlx_cuda.__file__).parent == _environment.PACKAGE
    assert healthy().package == ROOT / "mlx_cuda"
