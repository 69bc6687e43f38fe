from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, Literal

import mlx.core as mx
import mlx_cuda
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_cuda import attention
from mlx_cuda._attention import composed
from mlx_cuda._attention.attention import most_batches, prepare
from mlx_cuda._attention.composed import on_16_bytes, with_upstream_gradients
from mlx_cuda._attention.options import Options
from mlx_cuda._common.choice import Choice, EngineName
from mlx_cuda._loader import native

from . import references as reference
from .references import DTYPES, assert_close, gradients, host, hosts, random, sliced

MaskName = Literal["none", "causal", "bool", "additive"]
MASKS: tuple[MaskName, ...] = ("none", "causal", "bool", "additive")


def make_mask(name: MaskName, q_len: int, k_len: int, dtype: mx.Dtype) -> tuple[Any, Any]:
    """A mask for the operation and one for the reference; its first row hides every key."""
    if name in ("none", "causal"):
        return (None, None) if name == "none" else (name, name)
    seen = np.random.default_rng(q_len * 100 + k_len).random((q_len, k_len)) < 0.6
    seen[:1] = False
    if name == "bool":
        return mx.array(seen), seen
    additive = np.where(seen, np.round(np.random.default_rng(5).standard_normal((q_len, k_len)), 1), -np.inf)
    rounded = mx.array(additive.astype(np.float32)).astype(dtype)
    return rounded, host(rounded)


def inputs(shape: tuple[int, ...], *, kv_heads: int, k_len: int, v_dim: int, dtype: mx.Dtype = mx.float32) -> list[mx.array]:
    batch, heads, q_len, dim = shape
    shapes = (batch, heads, q_len, dim), (batch, kv_heads, k_len, dim), (batch, kv_heads, k_len, v_dim)
    return [random(shape, dtype, seed=seed) for seed, shape in enumerate(shapes)]


@pytest.mark.parametrize("mask_name", MASKS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@given(
    batch=st.integers(0, 2),
    kv_heads=st.integers(1, 3),
    groups=st.integers(1, 3),
    q_len=st.integers(0, 12),
    k_len=st.integers(0, 12),
    dim=st.sampled_from((1, 8, 20, 64)),
    v_dim=st.sampled_from((0, 8, 20, 64)),
)
def test_matches_float64(
    *, dtype: mx.Dtype, mask_name: MaskName, batch: int, kv_heads: int, groups: int, q_len: int, k_len: int, dim: int, v_dim: int
) -> None:
    arrays = inputs((batch, kv_heads * groups, q_len, dim), kv_heads=kv_heads, k_len=k_len, v_dim=v_dim, dtype=dtype)
    mask, mask64 = make_mask(mask_name, q_len, k_len, dtype)
    result = attention(*arrays, mask=mask)
    assert result.dtype == dtype
    if 0 in (batch, k_len, v_dim, q_len):
        np.testing.assert_array_equal(host(result), np.zeros((batch, kv_heads * groups, q_len, v_dim)))
    else:
        assert_close(result, reference.attention(*hosts(arrays), mask=mask64), slack=2)


@pytest.mark.parametrize("mask_name", MASKS)
def test_head_dim_zero_averages_the_values(mask_name: MaskName) -> None:
    arrays = inputs((1, 2, 3, 0), kv_heads=1, k_len=4, v_dim=8)
    mask, mask64 = make_mask(mask_name, 3, 4, mx.float32)
    assert_close(attention(*arrays, mask=mask), reference.attention(*hosts(arrays), scale=1.0, mask=mask64))


@pytest.mark.parametrize("dim", [64, 80, 128, 192, 256])
@pytest.mark.parametrize("mask_name", MASKS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_head_dims_of_models(dtype: mx.Dtype, mask_name: MaskName, dim: int) -> None:
    arrays = inputs((2, 4, 37, dim), kv_heads=2, k_len=70, v_dim=dim, dtype=dtype)
    mask, mask64 = make_mask(mask_name, 37, 70, dtype)
    assert_close(attention(*arrays, mask=mask), reference.attention(*hosts(arrays), mask=mask64), slack=2)


def test_scale_and_strided_inputs() -> None:
    packed = random((2, 9, 3, 4, 16))  # [B, T, 3, H, D], as one projection gives it
    q, k, v = (packed[:, :, i].transpose(0, 2, 1, 3) for i in range(3))
    assert_close(attention(q, k, v, scale=0.3, mask="causal"), reference.attention(host(q), host(k), host(v), scale=0.3, mask="causal"))


@pytest.mark.parametrize("shape", [(), (1,), (7,), (5, 1), (5, 7), (1, 5, 7), (4, 1, 7), (2, 1, 5, 7), (2, 4, 5, 7)], ids=str)
@pytest.mark.parametrize("kind", ["bool", "additive"])
def test_masks_broadcast(kind: str, shape: tuple[int, ...]) -> None:
    arrays = inputs((2, 4, 5, 8), kv_heads=2, k_len=7, v_dim=8)
    mask = random(shape, seed=9) > 0.3 if kind == "bool" else random(shape, seed=9)
    mask64 = np.array(mask)
    assert_close(attention(*arrays, mask=mask), reference.attention(*hosts(arrays), mask=mask64))


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32], ids=str)
def test_rows_of_the_lowest_number_are_finite(dtype: mx.Dtype) -> None:
    arrays = inputs((1, 1, 2, 8), kv_heads=1, k_len=3, v_dim=8, dtype=dtype)
    arrays[0] = arrays[0] * -50  # scores that overflow when they are added to the lowest float16
    mask = mx.array([[0.0, 0.0, 0.0], [1.0, 1.0, 1.0]]).astype(dtype) * mx.finfo(dtype).min
    # A constant row is no mask at all in exact arithmetic.
    assert_close(attention(*arrays, mask=mask), reference.attention(*hosts(arrays)), slack=2)


def test_integer_mask_is_additive() -> None:
    arrays = inputs((1, 2, 3, 8), kv_heads=2, k_len=3, v_dim=8)
    mask = mx.array([[0, -2, 1]], mx.int32)
    assert_close(attention(*arrays, mask=mask), reference.attention(*hosts(arrays), mask=np.array([[0.0, -2.0, 1.0]])))


def plain(q: mx.array, k: mx.array, v: mx.array, visible: mx.array) -> mx.array:
    """Attention as plain operations, whose rows without a key are zero and differentiable."""
    groups = q.shape[1] // k.shape[1]
    k, v = mx.repeat(k, groups, axis=1), mx.repeat(v, groups, axis=1)
    scores = mx.where(visible, (q @ k.swapaxes(2, 3)) * q.shape[3] ** -0.5, -1e30)
    weights = mx.where(visible, mx.exp(scores - scores.max(axis=3, keepdims=True)), 0)
    total = weights.sum(axis=3, keepdims=True)
    return (weights / mx.where(total == 0, 1, total)) @ v


@pytest.mark.parametrize("mask_name", MASKS)
@pytest.mark.parametrize(("q_len", "k_len"), [(5, 5), (4, 7), (7, 4)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_vjp(dtype: mx.Dtype, q_len: int, k_len: int, mask_name: MaskName) -> None:
    arrays = inputs((2, 4, q_len, 16), kv_heads=2, k_len=k_len, v_dim=16, dtype=dtype)
    cotangent = random((2, 4, q_len, 16), dtype, seed=7)
    mask, _ = make_mask(mask_name, q_len, k_len, dtype)
    visible = mx.tri(q_len, k_len, k_len - q_len).astype(mx.bool_) if mask_name == "causal" else mx.ones((q_len, k_len), mx.bool_)
    if mask_name == "additive":
        mask = mx.where(mask > -mx.inf, mx.array(0, dtype), mask)
    if mask_name in ("bool", "additive"):
        visible = mask if mask_name == "bool" else mask > -mx.inf
    _, actual = mx.vjp(lambda q, k, v: attention(q, k, v, mask=mask), arrays, [cotangent])
    for got, expected in zip(actual, gradients(lambda q, k, v: plain(q, k, v, visible), arrays, cotangent), strict=True):
        assert_close(got, expected, slack=4)


def test_gradient_of_an_additive_mask_is_finite() -> None:
    arrays = inputs((1, 2, 3, 8), kv_heads=2, k_len=4, v_dim=8)
    mask, _ = make_mask("additive", 3, 4, mx.float32)
    gradient = mx.grad(lambda mask: attention(*arrays, mask=mask).square().sum())(mask)
    assert np.isfinite(host(gradient)).all()
    assert not host(gradient)[0].any()
    assert host(gradient)[1:].any()


def biased(q: mx.array, k: mx.array, v: mx.array, mask: mx.array) -> mx.array:
    """Attention with an additive mask as plain operations."""
    groups = q.shape[1] // k.shape[1]
    k, v = mx.repeat(k, groups, axis=1), mx.repeat(v, groups, axis=1)
    return mx.softmax((q @ k.swapaxes(2, 3)) * q.shape[3] ** -0.5 + mask, axis=3) @ v


def as_on_cuda(q: mx.array, k: mx.array, v: mx.array, *, mask: mx.array, **options: Any) -> mx.array:
    """MLX's own function, which refuses the mask's gradient where it calls cuDNN."""
    held: Any = mx.custom_function(lambda mask: mask)

    @held.vjp  # type: ignore[untyped-decorator]
    def refuse(*_: Any) -> None:
        raise ValueError("[scale_dot_product_attention] Does not support VJP with respect to mask")

    return mx.fast.scaled_dot_product_attention(q, k, v, mask=held(mask), **options)


EVERY = (0, 1, 2, 3)
on_cuda = pytest.mark.parametrize("cuda", [False, True], ids=["as it is", "as on CUDA"])


@on_cuda
@pytest.mark.parametrize("shape", [(), (7,), (5, 1), (5, 7), (4, 1, 7), (2, 1, 5, 7), (2, 4, 5, 7)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients_of_additive_masks(monkeypatch: pytest.MonkeyPatch, dtype: mx.Dtype, shape: tuple[int, ...], cuda: bool) -> None:
    """Of the mask's own shape, and beside them those of q, k and v, by MLX's own function."""
    if cuda:
        monkeypatch.setattr("mlx_cuda._attention.composed.upstream_attention", as_on_cuda)
    arrays = [*inputs((2, 4, 5, 8), kv_heads=2, k_len=7, v_dim=8, dtype=dtype), random(shape, dtype, seed=9)]
    cotangent = random((2, 4, 5, 8), dtype, seed=7)
    _, actual = mx.vjp(lambda q, k, v, mask: attention(q, k, v, mask=mask, stream=mx.cpu), arrays, [cotangent])
    expected = gradients(biased, arrays, cotangent)
    for got, array, right in zip(actual[:3], arrays, expected, strict=False):
        assert got.dtype == array.dtype
        assert_close(got, right, slack=4)
    assert (actual[3].dtype, actual[3].shape) == (dtype, shape)
    # Along keys that share one number, the mask's gradient is a sum that cancels: what is left is as large as its rounding errors.
    whole = gradients(biased, [*arrays[:3], mx.broadcast_to(arrays[3], (2, 4, 5, 7))], cotangent)[3]
    assert np.linalg.norm(host(actual[3]) - expected[3]) <= {mx.float32: 1e-5, mx.float16: 2e-2, mx.bfloat16: 0.1}[dtype] * np.linalg.norm(
        whole
    )


def test_a_kernel_with_an_additive_mask_has_the_gradients_of_upstream() -> None:
    """Whatever the kernel computes, here twice the result: its own gradients are not asked for."""
    arrays = [*inputs((2, 4, 5, 8), kv_heads=2, k_len=7, v_dim=8), random((4, 1, 7), seed=9)]
    cotangent = random((2, 4, 5, 8), seed=7)
    with mx.stream(mx.cpu):
        kernel = with_upstream_gradients(lambda q, k, v, mask: 2 * biased(q, k, v, mask), Options(8**-0.5))
        (result,), actual = mx.vjp(kernel, arrays, [cotangent])
        assert_close(result, 2 * host(biased(*arrays)))
        for got, array, right in zip(actual, arrays, gradients(biased, arrays, cotangent), strict=True):
            assert got.shape == array.shape
            assert_close(got, right, slack=4)


@pytest.mark.parametrize("shape", [(), (1,), (8,), (13,), (5, 1), (5, 9), (2, 1, 5, 15)], ids=str)
def test_rows_of_masks_are_laid_on_16_bytes(shape: tuple[int, ...]) -> None:
    mask = random(shape, mx.bfloat16, seed=9)
    np.testing.assert_array_equal(host(on_16_bytes(mask)), host(mask))


@on_cuda
def test_second_derivatives_with_an_additive_mask(monkeypatch: pytest.MonkeyPatch, cuda: bool) -> None:
    if cuda:
        monkeypatch.setattr("mlx_cuda._attention.composed.upstream_attention", as_on_cuda)
    arrays = [*inputs((1, 4, 5, 8), kv_heads=2, k_len=7, v_dim=8), random((5, 7), seed=9)]
    directions = [random(array.shape, seed=20 + index) for index, array in enumerate(arrays)]

    def curvature(function: Any, arrays: list[mx.array]) -> list[mx.array]:
        def directional(*arrays: mx.array) -> mx.array:
            found = mx.grad(lambda *arrays: function(*arrays).square().sum(), argnums=EVERY)(*arrays)
            return mx.array(sum((each * direction).sum() for each, direction in zip(found, directions, strict=True)))

        return list(mx.grad(directional, argnums=EVERY)(*arrays))

    with mx.stream(mx.cpu):
        wide = curvature(biased, [array.astype(mx.float64) for array in arrays])
        for got, right in zip(curvature(lambda q, k, v, mask: attention(q, k, v, mask=mask), arrays), wide, strict=True):
            assert_close(got, host(right), slack=4)


@on_cuda
def test_transformations_with_an_additive_mask(monkeypatch: pytest.MonkeyPatch, cuda: bool) -> None:
    if cuda:
        monkeypatch.setattr("mlx_cuda._attention.composed.upstream_attention", as_on_cuda)
    arrays = [*inputs((1, 4, 5, 8), kv_heads=2, k_len=7, v_dim=8), random((5, 7), seed=9)]

    def loss(*arrays: mx.array) -> mx.array:
        q, k, v, mask = arrays
        return attention(q, k, v, mask=mask, stream=mx.cpu).square().sum()

    gradient = mx.grad(loss, argnums=EVERY)
    expected = list(map(host, gradient(*arrays)))
    for got, right in zip(mx.compile(gradient)(*arrays), expected, strict=True):
        assert_close(got, right)
    two = [mx.stack([array, array]) for array in arrays]
    for got, right in zip(mx.vmap(gradient)(*two), expected, strict=True):
        assert_close(got, np.stack([right, right]))


@pytest.mark.parametrize("mask", [None, "causal"])
@pytest.mark.parametrize("axes", [(0, 0, 0), (0, None, None), (1, 0, 2)], ids=str)
def test_vmap(axes: tuple[int | None, ...], mask: Literal["causal"] | None) -> None:
    arrays = []
    for array, axis in zip(inputs((2, 4, 6, 8), kv_heads=2, k_len=5, v_dim=8), axes, strict=True):
        arrays.append(array if axis is None else mx.stack([array, array * 2, array - 1], axis=axis))
    rows = [reference.attention(*sliced(arrays, axes, i), mask=mask) for i in range(3)]
    assert_close(mx.vmap(lambda q, k, v: attention(q, k, v, mask=mask), in_axes=axes)(*arrays), np.stack(rows))


@pytest.mark.parametrize("mask_name", MASKS)
def test_compile(mask_name: MaskName) -> None:
    arrays = inputs((1, 2, 6, 8), kv_heads=1, k_len=5, v_dim=8)
    mask, mask64 = make_mask(mask_name, 6, 5, mx.float32)
    compiled = mx.compile(lambda q, k, v: attention(2 * q, k, v, mask=mask))
    assert_close(compiled(*arrays), reference.attention(2 * host(arrays[0]), host(arrays[1]), host(arrays[2]), mask=mask64))


def test_promotion() -> None:
    q = mx.ones((1, 1, 4, 8), mx.float16)
    assert attention(q, q, q).dtype == mx.float16
    assert attention(q, q.astype(mx.bfloat16), q).dtype == mx.float32
    assert attention(q, q, q.astype(mx.float32)).dtype == mx.float32


def test_runs_on_the_cpu_when_asked() -> None:
    arrays = inputs((1, 2, 6, 8), kv_heads=1, k_len=5, v_dim=8)
    assert_close(attention(*arrays, stream=mx.cpu), reference.attention(*hosts(arrays)))


def test_force_fused_says_why_it_cannot() -> None:
    q = mx.ones((1, 1, 4, 8))
    text = r"^\[attention\] force_fused is set, but no fused kernel supports this call: the stream is on the CPU$"
    with pytest.raises(ValueError, match=text):
        attention(q, q, q, force_fused=True, stream=mx.cpu)


@pytest.mark.parametrize(
    ("shapes", "text"),
    [
        (((4, 5, 8), (1, 4, 5, 8), (1, 4, 5, 8)), r"q must have the 4 dimensions \[B, H, T, D\], got \(4,5,8\)\."),
        (((1, 4, 5, 8), (1, 4, 5, 8), (8,)), r"v must have the 4 dimensions \[B, H, T, D\], got \(8,\)\."),
        (((1, 4, 5, 8), (1, 4, 5, 6), (1, 4, 5, 6)), r"q and k must have the same last dimension, got \(1,4,5,8\) and \(1,4,5,6\)\."),
        (((1, 4, 5, 8), (1, 4, 5, 8), (1, 4, 6, 8)), r"k and v must agree in batch, heads and length, got \(1,4,5,8\) and \(1,4,6,8\)\."),
        (((2, 4, 5, 8), (1, 4, 5, 8), (1, 4, 5, 8)), r"q and k must have the same batch size, got \(2,4,5,8\) and \(1,4,5,8\)\."),
        (((1, 3, 5, 8), (1, 2, 5, 8), (1, 2, 5, 8)), r"The heads of q must be a multiple of those of k, got 3 and 2\."),
        (((1, 3, 5, 8), (1, 0, 5, 8), (1, 0, 5, 8)), r"The heads of q must be a multiple of those of k, got 3 and 0\."),
    ],
)
def test_shape_errors(shapes: tuple[tuple[int, ...], ...], text: str) -> None:
    with pytest.raises(ValueError, match=rf"^\[attention\] {text}$"):
        attention(*(mx.ones(shape) for shape in shapes))


def test_other_errors() -> None:
    q = mx.ones((1, 1, 4, 8))
    with pytest.raises(ValueError, match=r"^\[attention\] Only floating point types are supported, got int32 and int32 and int32\.$"):
        attention(*[q.astype(mx.int32)] * 3)
    with pytest.raises(ValueError, match=r"^\[attention\] mask must be None, 'causal' or an array, got 'full'\.$"):
        attention(q, q, q, mask="full")
    with pytest.raises(ValueError, match=r"^\[attention\] mask must broadcast to \[B, H, Tq, Tk\] = \(1,1,4,4\), got \(3,4\)\.$"):
        attention(q, q, q, mask=mx.zeros((3, 4)))
    with pytest.raises(ValueError, match=r"^\[attention\] mask must promote to the result's type float16, got float32\.$"):
        attention(*[q.astype(mx.float16)] * 3, mask=mx.zeros((4, 4)))
    with pytest.raises(TypeError, match=r"^\[attention\] k must be an mlx\.core\.array, got NoneType\.$"):
        attention(q, None, q)  # type: ignore[call-overload]


@pytest.mark.parametrize(("engine", "keys"), [("cudnn", (100, 100)), ("flash", (9, 2**31 - 1))])
def test_for_which_numbers_of_keys_a_graph_holds(engine: EngineName, keys: tuple[int, int]) -> None:
    """cuDNN may refuse one and take another."""
    q, k = mx.zeros((1, 2, 8, 64)), mx.zeros((1, 2, 100, 64))
    assert replace(prepare(q, k, k), choice=Choice(engine, "")).sizes == keys


@pytest.mark.parametrize("mask_name", MASKS)
@pytest.mark.parametrize("lse", [False, True])
def test_more_sequences_and_heads_than_a_grid_holds(monkeypatch: pytest.MonkeyPatch, mask_name: MaskName, lse: bool) -> None:
    """In parts, of whose batch entries and heads each has its own mask, lengths and sinks."""
    arrays = inputs((5, 6, 4, 8), kv_heads=3, k_len=7, v_dim=16)
    mask: Any = mask_name if mask_name == "causal" else None
    if mask_name in {"bool", "additive"}:
        shape = (5, 1, 4, 7) if lse else (1, 6, 4, 7)
        mask = random(shape, mx.float32, seed=9)
        mask = mask > -1 if mask_name == "bool" else mask
    options: dict[str, Any] = {"mask": mask, "sinks": random((6,), mx.float32, seed=8), "lengths": mx.array([7, 6, 5, 7, 4])}
    cases = [{"mask": mask}, options, {"softcap": 2.0, "left_padding": mx.array([0, 1, 2, 0, 3]), **options}]
    ours: Any = attention
    expected = [ours(*arrays, return_lse=lse, **case) for case in cases]
    exact = mx.grad(lambda *each: attention(*each, **options).sum(), argnums=(0, 1, 2))(*arrays)
    mx.eval(expected, exact)
    monkeypatch.setattr("mlx_cuda._attention.attention.MOST_BLOCKS", 4)
    for case, right in zip(cases, expected, strict=True):
        result = ours(*arrays, return_lse=lse, **case)
        for each, wanted in zip(result, right, strict=True) if lse else [(result, right)]:
            assert_close(each, host(wanted))
    found = mx.grad(lambda *each: attention(*each, **options).sum(), argnums=(0, 1, 2))(*arrays)
    for got, wanted in zip(found, exact, strict=True):
        assert_close(got, host(wanted))


def test_in_how_many_parts_it_is_computed() -> None:
    """MLX's kernel for one to three queries of many keys has 32 blocks for each batch entry."""
    q, few, many = (mx.zeros((1, 4, length, 8)) for length in (3, 1024, 1025))
    masked = Options(1.0, mask=mx.ones((1, 1, 3, 1024), mx.bool_))
    assert most_batches("mlx", q, few, Options(1.0)) == most_batches("decode", q, many, masked) == 65535
    assert most_batches("mlx", q, many, Options(1.0)) == 2047
    assert most_batches("mlx", many, many, Options(1.0)) == most_batches("flash", q, many, Options(1.0)) == 65535
    assert most_batches("flash", q, few, masked) == 16383


@pytest.mark.parametrize("patched", [False, True])
def test_patched_calls_are_split_as_well(monkeypatch: pytest.MonkeyPatch, patched: bool) -> None:
    arrays = inputs((5, 4, 1, 8), kv_heads=2, k_len=7, v_dim=8)
    expected = mx.fast.scaled_dot_product_attention(*arrays, scale=0.3)
    monkeypatch.setattr("mlx_cuda._attention.attention.MOST_BLOCKS", 2)
    with mlx_cuda.patch() if patched else nullcontext():
        assert_close(mx.fast.scaled_dot_product_attention(*arrays, scale=0.3), host(expected))


@pytest.mark.parametrize("mask_name", ["none", "causal", "bool", "additive"])
def test_upstreams_gradients_see_whole_tiles_of_keys(monkeypatch: pytest.MonkeyPatch, mask_name: MaskName) -> None:
    """Which cuDNN's backward on Hopper needs (docs/results/upstream-issues.md); a causal mask hides what comes after the keys anyway."""
    arrays = inputs((1, 2, 128, 8), kv_heads=1, k_len=192, v_dim=16, dtype=mx.bfloat16)
    mask, _ = make_mask(mask_name, 128, 192, mx.bfloat16)
    seen: list[int] = []
    theirs = composed.upstream_attention

    def attend(q: mx.array, k: mx.array, v: mx.array, **options: Any) -> mx.array:
        seen.append(k.shape[2])
        return theirs(q, k, v, **options)

    def derived() -> list[mx.array]:
        options = Options(0.3, mask=mask if isinstance(mask, mx.array) else None, window=(-1, 0 if mask == "causal" else -1))
        call = partial(composed.upstream, options=options, force_fused=False)
        return mx.vjp(call, arrays, [random((1, 2, 128, 16), mx.bfloat16, seed=7)])[1]

    monkeypatch.setattr(composed, "upstream_attention", attend)
    monkeypatch.setattr(native, "engine", lambda _: "no GPU")
    expected = derived()
    assert set(seen) == {192}
    engine: Any = SimpleNamespace(capability=(9, 0), module=SimpleNamespace(traced=lambda _: True))
    monkeypatch.setattr(native, "engine", lambda _: engine)
    monkeypatch.setattr(native, "device_capability", lambda _: (9, 0))
    seen.clear()
    found = derived()
    assert set(seen) == {192 if mask_name == "causal" else 256}
    for got, wanted in zip(found, expected, strict=True):
        assert got.shape == wanted.shape
        assert_close(got, host(wanted), slack=4)
