"""``patch(batch_invariant=True)`` by names: which functions of MLX are decided on, and what follows that was imported by its name."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec

import mlx.core as mx
import pytest
from mlx_cuda import _patch
from mlx_cuda._invariant import refused

of_mlx_lm = pytest.mark.skipif(find_spec("mlx_lm") is None, reason="mlx_lm is not installed")
HANDLED = {"matmul", "addmm", "quantized_matmul", "gather_mm", "gather_qmm", "scaled_dot_product_attention", "vmap"}
# Of what mlx.core has besides, nothing multiplies matrices: rows, elements, data that moves, and what is no operation.
BESIDES = set(
    """
    abs acos acosh add all allclose any arange arccos arccosh arcsin arcsinh arctan arctan2 arctanh argmax argmin argpartition argsort array
    array_equal as_strided asarray asin asinh astype async_eval atan atan2 atanh atleast_1d atleast_2d atleast_3d bartlett
    bitwise_and bitwise_invert bitwise_left_shift bitwise_or bitwise_right_shift bitwise_xor blackman broadcast_arrays broadcast_shapes
    broadcast_to can_cast ceil checkpoint clear_cache clear_streams clip compile concat concatenate conj conjugate contiguous cos cosh
    count_nonzero cummax cummin cumprod cumsum cumulative_prod cumulative_sum custom_function default_device default_stream degrees depends
    dequantize device_count device_info diag diagonal diff disable_compile divide divmod einsum_path empty empty_like enable_compile equal
    erf erfinv eval exp expand_dims expm1 export_function export_to_dot exporter eye finfo flatten flip floor floor_divide from_dlpack
    from_fp8 full full_like get_active_memory get_array_buffer_size get_cache_memory get_memory_limit get_peak_memory get_printoptions grad
    greater greater_equal hadamard_transform hamming hanning identity iinfo imag is_available isclose isdtype isfinite isinf
    isnan isneginf isposinf issubdtype jvp kron left_shift less less_equal linspace load log log10 log1p log2 logaddexp logcumsumexp
    logical_and logical_not logical_or logical_xor logsumexp matrix_norm matrix_transpose max maximum mean median meshgrid min minimum
    minmax moveaxis multiply nan_to_num negative new_stream new_thread_local_stream new_thread_unsafe_stream not_equal ones ones_like outer
    pad partition permute_dims positive pow power printoptions prod put_along_axis quantize radians real reciprocal remainder repeat
    reset_peak_memory reshape result_type right_shift roll round rsqrt save save_gguf save_safetensors savez savez_compressed searchsorted
    set_cache_limit set_default_device set_default_stream set_memory_limit set_printoptions set_wired_limit sigmoid sign sin sinh slice
    slice_update softmax sort split sqrt square squeeze stack std stop_gradient stream subtract sum swapaxes synchronize take
    take_along_axis tan tanh tile to_fp8 topk trace transpose tri tril triu trunc unflatten unique unstack value_and_grad var view vjp where
    zeros zeros_like cross_entropy cuda_kernel layer_norm metal_kernel precompiled_cuda_kernel rms_norm rope
    ArrayAt ArrayIterator ArrayLike Device DeviceType Dtype DtypeCategory FunctionExporter PrintOptions Stream StreamContext
    ThreadLocalStream
    """.split()  # noqa: SIM905
)


def test_every_function_of_mlx_is_decided_on() -> None:
    found = {name for owner in (mx, mx.fast) for name, value in vars(owner).items() if callable(value) and not name.startswith("_")}
    assert found - BESIDES == HANDLED | {name for _, name, _ in refused.PLACES if not name.startswith("_")}
    assert {name for name in dir(mx.distributed) if "sum" in name} == {"all_sum", "sum_scatter"}
    operators = {name for name in dir(mx.array) if "matmul" in name}
    assert operators == {route.name for route in _patch.INVARIANT if route.owner is mx.array}


OTHERS = """
import sys, types
import mlx.core as mx, mlx_cuda
from mlx_cuda import _patch
from mlx_cuda._invariant import mlx_lm
_patch.refusal = lambda: ""
mx.set_default_device(mx.cpu)
vars(sys.modules.setdefault("other", types.ModuleType("other"))).update(
    {name: type(name, (), {method: lambda *_: "theirs"}) for name, (method, _) in mlx_lm.CACHES.items()}
)
def refused(name, method):
    try:
        return getattr(getattr(sys.modules["other"], name)(), method)(1, 2) != "theirs"
    except ValueError as error:
        return str(error).startswith(f"[batch_invariant] {name} ")
with mlx_cuda.patch(batch_invariant=True):
    print(sorted(name for name, (method, _) in mlx_lm.CACHES.items() if refused(name, method)))
print(any(refused(name, method) for name, (method, _) in mlx_lm.CACHES.items()))
"""


def test_caches_of_other_packages_raise_too() -> None:
    done = subprocess.run([sys.executable, "-c", OTHERS], capture_output=True, text=True, check=False)
    names = sorted(["RotatingKVCache", "BatchRotatingKVCache", "ChunkedKVCache", "SlidingWindowCache", "QuantizedKVCache",
                    "BatchQuantizedKVCache", "ArraysCache", "MambaCache"])  # fmt: skip
    assert done.stdout == f"{names}\nFalse\n", done.stderr


ROPES = {
    "rope_utils": "cls(16, max_position_embeddings=40, traditional=False, base=1e4, factor=2.0)",
    "internlm3": "cls(16, max_position_embeddings=40, base=1e4, scale=2.0)",
}
DYNAMIC = """
import sys
import mlx.core as mx, mlx_cuda
from mlx_cuda import _patch
_patch.refusal = lambda: ""
mx.set_default_device(mx.cpu)
from tests.gpu.mlx_lm_parts import part
cls = part(f"models.{sys.argv[1]}").DynamicNTKScalingRoPE
rope, x = eval(sys.argv[2]), mx.random.normal((1, 2, 38, 16))
whole, other = rope(x), rope(x[:, :, :4], offset=37)
with mlx_cuda.patch(batch_invariant=True):
    assert mx.array_equal(rope(x), whole)
    for offset in (37, mx.array([37])):
        try:
            rope(x[:, :, :4], offset=offset)
        except ValueError as error:
            print(str(error)[:40])
assert mx.array_equal(rope(x[:, :, :4], offset=37), other)
"""


@of_mlx_lm
@pytest.mark.parametrize("name", ROPES)
def test_rope_that_depends_on_the_length_of_a_call_raises_beyond_the_window(name: str) -> None:
    done = subprocess.run([sys.executable, "-c", DYNAMIC, name, ROPES[name]], capture_output=True, text=True, check=False)
    assert done.stdout == 2 * "[batch_invariant] DynamicNTKScalingRoPE \n", done.stderr
    assert done.returncode == 0, done.stderr


LATER = """
import mlx.core as mx, mlx_cuda
from mlx_cuda import _patch
from mlx_cuda._invariant import masks
_patch.refusal = lambda: ""
mx.set_default_device(mx.cpu)
mlx_cuda.patch(batch_invariant=True)
from tests.gpu.mlx_lm_parts import part
part("models.qwen3")
cache = part("models.cache")
mask = cache.BatchKVCache([1, 0]).make_mask(3)
mx.ones((2, 2)) @ mx.ones((2, 2))
print(masks.seen_by(mask)[:3], hasattr(cache.RotatingKVCache.update_and_fetch, "unpatched"))
"""


@of_mlx_lm
def test_models_that_are_imported_later_are_known() -> None:
    done = subprocess.run([sys.executable, "-c", LATER], capture_output=True, text=True, check=False)
    assert done.stdout == "(3, 0, None) True\n", done.stderr
