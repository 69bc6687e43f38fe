"""cuDNN's attention beyond the plain result: its gradients, the logarithm of the softmax's sum, sinks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import mlx.core as mx
import mlx_cuda
import mlx_cuda._loader.native
import numpy as np
import pytest
from mlx_cuda._attention.options import Options

from . import reference
from .support import TOLERANCE, assert_close, device, host, normal, primitives, relative_error

pytestmark = pytest.mark.gpu

causals = pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])

# One rounding of the result, and those of the probabilities and of their gradient before they are multiplied.
SLACK = 2.0


def native() -> Any:
    engine = mlx_cuda._loader.native.engine(mx.default_stream(mx.gpu))
    assert not isinstance(engine, str), engine
    return engine.module


def attend(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    sinks: mx.array | None = None,
    *,
    scale: float | None = None,
    causal: bool = True,
    window: int = -1,
    lse: bool = False,
    deterministic: bool = False,
) -> list[mx.array]:
    """The results of cuDNN for a case that it takes."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    on = mx.default_stream(mx.gpu)
    options = Options(scale, window=(window, 0 if causal else -1), sinks=sinks, lse=lse, deterministic=deterministic)
    assert native().cudnn_refusal(q, k, v, options, on) == ""
    results: list[mx.array] = native().cudnn_attention(q, k, v, options, on)
    assert len(results) == 1 + lse
    return results


def inputs(rng: np.random.Generator, shape: tuple[int, ...], dtype: mx.Dtype = mx.bfloat16, v_dim: int | None = None) -> list[mx.array]:
    b, h, h_kv, t, s, d = shape
    shapes = (b, h, t, d), (b, h_kv, s, d), (b, h_kv, s, v_dim or d), (b, h, t, v_dim or d)
    return [normal(rng, each, dtype) for each in shapes]


def exact_results(
    q: mx.array, k: mx.array, v: mx.array, *, sinks: mx.array | None = None, causal: bool, window: int = -1
) -> reference.Attended:
    """In float64."""
    bias = reference.bias_of(q.shape[2], k.shape[2], window=(window, 0 if causal else -1))
    extra = None if sinks is None else host(sinks)
    return reference.attend(host(q), host(k), host(v), scale=q.shape[-1] ** -0.5, bias=bias, sinks=extra)


def exact_gradients(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    d_out: mx.array,
    *,
    sinks: mx.array | None = None,
    causal: bool,
    window: int = -1,
    d_lse: mx.array | None = None,
) -> list[reference.Array]:
    """Those of q, k, v and the sinks, in float64."""
    done = exact_results(q, k, v, sinks=sinks, causal=causal, window=window)
    seed = None if d_lse is None else host(d_lse)
    found = reference.attend_vjp(host(q), host(k), host(v), done, host(d_out), scale=q.shape[-1] ** -0.5, lse_cotangent=seed)
    return [found[name][0] for name in ("q", "k", "v", "sinks")]


def check(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    d_out: mx.array,
    *,
    sinks: mx.array | None = None,
    causal: bool = True,
    window: int = -1,
    deterministic: bool = False,
) -> list[mx.array]:
    """The gradients come from cuDNN and are those of float64."""
    arrays = [q, k, v, *([] if sinks is None else [sinks])]
    function = partial(attend, causal=causal, window=window, deterministic=deterministic)
    gradients = mx.vjp(lambda *primals: function(*primals)[0], arrays, [d_out])[1]
    names = primitives(*gradients)
    assert "AttentionBackward" in names
    assert "Softmax" not in names
    exact = exact_gradients(q, k, v, d_out, sinks=sinks, causal=causal, window=window)
    for array, gradient, of_float64 in zip(arrays, gradients, exact, strict=False):
        assert gradient.dtype == array.dtype
        assert_close(gradient, of_float64, tolerance=SLACK * TOLERANCE[q.dtype])
    return gradients


# Each kind of problem (head dimensions, mask, dtype) costs cuDNN a second, each shape a tenth of that: so few kinds and many shapes.
@causals
@pytest.mark.parametrize(
    ("head_dim", "dtype"),
    [(8, mx.float16), (64, mx.bfloat16), (80, mx.float16), (128, mx.bfloat16), (192, mx.bfloat16), (256, mx.float16)],
)
def test_matches_float64(rng: np.random.Generator, head_dim: int, dtype: mx.Dtype, causal: bool) -> None:
    """Lengths that are multiples of cuDNN's tiles and that are not, and more keys than queries."""
    for t, s in (128, 128), (129, 129), (7, 7), (100, 333):
        check(*inputs(rng, (2, 2, 2, t, s, head_dim), dtype), causal=causal)


@causals
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(8, 2, 128), (6, 1, 256)])
def test_grouped_queries(rng: np.random.Generator, heads: int, kv_heads: int, head_dim: int, causal: bool) -> None:
    check(*inputs(rng, (2, heads, kv_heads, 100, 100, head_dim)), causal=causal)


@pytest.mark.parametrize(("head_dim", "v_dim", "causal"), [(192, 128, False), (192, 128, True), (128, 64, True)])
def test_values_of_another_width(rng: np.random.Generator, head_dim: int, v_dim: int, causal: bool) -> None:
    q, k, v, d_out = inputs(rng, (1, 4, 2, 65, 130, head_dim), v_dim=v_dim)
    out, lse = attend(q, k, v, causal=causal, lse=True)
    exact = exact_results(q, k, v, causal=causal)
    assert_close(out, exact.out, tolerance=TOLERANCE[mx.bfloat16])
    assert_close(lse, exact.lse, tolerance=1e-5)
    check(q, k, v, d_out, causal=causal)


@pytest.mark.parametrize("head_dim", [64, 256])
def test_windows(rng: np.random.Generator, head_dim: int) -> None:
    for t, s, window in (200, 200, 0), (200, 200, 50), (100, 300, 17), (130, 130, 129):
        check(*inputs(rng, (1, 4, 2, t, s, head_dim)), window=window)


@pytest.mark.parametrize(
    ("t", "s", "head_dim", "causal", "window"),
    [(64, 64, 64, True, -1), (129, 300, 128, True, 20), (129, 300, 64, False, -1), (65, 65, 256, False, -1)],
)
def test_lse_and_sinks(rng: np.random.Generator, t: int, s: int, head_dim: int, causal: bool, window: int) -> None:
    q, k, v, d_out = inputs(rng, (2, 4, 2, t, s, head_dim))
    for sinks in None, device(np.array([-1.0, 0.0, 3.0, 8.0]), q.dtype):
        exact = exact_results(q, k, v, sinks=sinks, causal=causal, window=window)
        out, lse = attend(q, k, v, sinks, causal=causal, window=window, lse=True)
        assert_close(out, exact.out, tolerance=TOLERANCE[q.dtype])
        assert_close(lse, exact.lse, tolerance=1e-5)
        assert_close(attend(q, k, v, sinks, causal=causal, window=window)[0], exact.out, tolerance=TOLERANCE[q.dtype])
        check(q, k, v, d_out, sinks=sinks, causal=causal, window=window)


@causals
def test_gradient_of_lse(rng: np.random.Generator, causal: bool) -> None:
    """Alone and together with that of the output."""
    q, k, v, d_out = inputs(rng, (2, 4, 2, 70, 130, 64))
    sinks = device(np.array([-1.0, 0.0, 2.0, 4.0]), q.dtype)
    d_lse = normal(rng, (2, 4, 70), mx.float32)
    for of_out in (0.0, 1.0):
        function = partial(attend, causal=causal, lse=True)
        gradients = mx.vjp(function, [q, k, v, sinks], [of_out * d_out, d_lse])[1]
        exact = exact_gradients(q, k, v, of_out * d_out, sinks=sinks, causal=causal, d_lse=d_lse)
        for gradient, of_float64 in zip(gradients, exact, strict=True):
            assert_close(gradient, of_float64, tolerance=SLACK * TOLERANCE[q.dtype])
    gradient = mx.grad(lambda q: (attend(q, k, v, causal=causal, lse=True)[1] * d_lse).sum())(q)
    exact = exact_gradients(q, k, v, 0 * d_out, causal=causal, d_lse=d_lse)
    assert_close(gradient, exact[0], tolerance=SLACK * TOLERANCE[q.dtype])


VIEWS: dict[str, Callable[[mx.array], mx.array]] = {
    "from [B, T, H, D]": lambda a: a.transpose(0, 2, 1, 3),
    "from [T, B, H, D]": lambda a: a.transpose(1, 2, 0, 3),
    "from [B, T, D, H]": lambda a: a.transpose(0, 3, 1, 2),
    "every other head": lambda a: a[:, ::2],
    "backwards": lambda a: a[:, :, ::-1],
    "one batch for all": lambda a: mx.broadcast_to(a[:1], (3, *a.shape[1:])),
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS.keys())
def test_views(rng: np.random.Generator, view: Callable[[mx.array], mx.array]) -> None:
    q, k, v, d_out = (view(normal(rng, (5, 8, 96, 128), mx.bfloat16)) for _ in range(4))
    mx.eval(q, k, v, d_out)
    check(q, k, v, d_out)
    plain = [normal(rng, q.shape, q.dtype) for _ in range(4)]
    check(plain[0], plain[1], plain[2], d_out)
    check(q, k, v, plain[3])


def test_misaligned_data(rng: np.random.Generator) -> None:
    q, k, v, d_out = (normal(rng, (2, 2, 33, 72), mx.float16)[..., 4:68] for _ in range(4))
    mx.eval(q, k, v, d_out)
    check(q, k, v, d_out)


def test_results_lie_as_their_inputs_do(rng: np.random.Generator) -> None:
    """[B, T, H, D] as projections leave it, so that neither the next matmul nor a projection's gradient needs a copy."""
    q, k, v, d_out = (normal(rng, (2, 50, 4, 64), mx.float16).transpose(0, 2, 1, 3) for _ in range(4))
    mx.eval(q, k, v, d_out)
    for result in attend(q, k, v) + mx.vjp(lambda *primals: attend(*primals)[0], [q, k, v], [d_out])[1]:
        mx.eval(result)
        buffer: Any = result
        strides = memoryview(buffer).strides
        assert strides == tuple(2 * stride for stride in (50 * 4 * 64, 64, 4 * 64, 1))


@pytest.mark.parametrize("head_dim", [128, 256])
def test_deterministic(rng: np.random.Generator, head_dim: int) -> None:
    arrays = inputs(rng, (2, 8, 2, 600, 600, head_dim))
    first, second = (check(*arrays, deterministic=True) for _ in range(2))
    for one, other in zip(first, second, strict=True):
        assert mx.array_equal(one, other)


@causals
def test_what_has_no_backward_is_composed(rng: np.random.Generator, causal: bool) -> None:
    """One query and one key: cuDNN has no backward."""
    q, k, v, d_out = inputs(rng, (2, 2, 2, 1, 1, 64), mx.float16)
    gradients = mx.vjp(lambda *primals: attend(*primals, causal=causal)[0], [q, k, v], [d_out])[1]
    assert "AttentionBackward" not in primitives(*gradients)
    exact = reference.attention_vjp(*map(host, (q, k, v, d_out)), scale=0.125, causal=causal)
    for gradient, of_float64 in zip(gradients, exact, strict=True):
        assert_close(gradient, of_float64, tolerance=5e-3, size=host(d_out))


@pytest.mark.parametrize(("t", "s"), [(130, 70), (300, 299)])
def test_more_queries_than_keys(rng: np.random.Generator, t: int, s: int) -> None:
    q, k, v, d_out = inputs(rng, (1, 4, 2, t, s, 64), mx.float16)
    gradients = mx.vjp(partial(mlx_cuda.attention, mask="causal"), [q, k, v], [d_out])[1]
    exact = reference.attention_vjp(*map(host, (q, k, v, d_out)), scale=0.125, causal=True)
    for gradient, of_float64 in zip(gradients, exact, strict=True):
        assert_close(gradient, of_float64, tolerance=SLACK * TOLERANCE[mx.float16])
    assert (host(gradients[0])[:, :, : t - s] == 0).all()


def test_all_of_the_gradients_is_written(rng: np.random.Generator) -> None:
    """Also where MLX's memory held NaN before."""
    for t in 65, 130:
        q, k, v, d_out = inputs(rng, (2, 2, 2, t, t, 64))
        mx.eval(mx.vjp(lambda *primals: attend(*primals)[0], [q, k, v], [mx.full(d_out.shape, float("nan"), d_out.dtype)])[1])
        check(q, k, v, d_out)


def loss(q: mx.array, k: mx.array, v: mx.array, sinks: mx.array) -> mx.array:
    return mx.square(attend(q, k, v, sinks)[0].astype(mx.float32)).sum()


def plain_loss(q: mx.array, k: mx.array, v: mx.array, sinks: mx.array) -> mx.array:
    """The same from MLX's operations, in float32."""
    q, k, v = (a.astype(mx.float32) for a in (q, k, v))
    scores = q.shape[-1] ** -0.5 * (q @ k.swapaxes(2, 3))
    seen = reference.bias_of(q.shape[2], k.shape[2], window=(-1, 0)) == 0
    scores = mx.where(mx.array(seen), scores, -mx.inf)
    column = mx.broadcast_to(sinks.astype(mx.float32).reshape(1, -1, 1, 1), (*q.shape[:3], 1))
    weights = mx.softmax(mx.concatenate([scores, column], axis=3), axis=3)[..., :-1]
    return mx.square(weights @ v).sum()


@pytest.fixture
def case(rng: np.random.Generator) -> list[mx.array]:
    return [*inputs(rng, (2, 2, 2, 70, 90, 64), mx.float16)[:3], normal(rng, (2,), mx.float16)]


def close(actual: list[mx.array], expected: list[mx.array]) -> None:
    for ours, theirs in zip(actual, expected, strict=True):
        assert relative_error(ours, host(theirs)) <= 5e-3


EVERY = [0, 1, 2, 3]


def test_value_and_grad(case: list[mx.array]) -> None:
    value, gradients = mx.value_and_grad(loss, argnums=EVERY)(*case)
    exact, exact_gradients = mx.value_and_grad(plain_loss, argnums=EVERY)(*case)
    close([value, *gradients], [exact, *exact_gradients])


def test_compile(case: list[mx.array]) -> None:
    gradient = mx.grad(loss, argnums=EVERY)
    compiled = mx.compile(gradient)
    close(compiled(*case), mx.grad(plain_loss, argnums=EVERY)(*case))
    other = [case[0] * 2, *case[1:]]
    close(compiled(*other), mx.grad(plain_loss, argnums=EVERY)(*other))
    close([mx.compile(loss)(*case)], [plain_loss(*case)])
    close(mx.grad(mx.compile(loss), argnums=EVERY)(*case), mx.grad(plain_loss, argnums=EVERY)(*case))


def test_checkpoint(case: list[mx.array]) -> None:
    close(mx.grad(mx.checkpoint(loss), argnums=EVERY)(*case), mx.grad(plain_loss, argnums=EVERY)(*case))


def test_an_evaluation_before_the_gradient(case: list[mx.array]) -> None:
    def of_prefixes(*arrays: mx.array) -> mx.array:
        result = attend(*arrays)[0]
        mx.eval(result)
        return mx.square(result.astype(mx.float32)).sum()

    close(mx.grad(of_prefixes, argnums=EVERY)(*case), mx.grad(plain_loss, argnums=EVERY)(*case))


def test_jvp(case: list[mx.array], rng: np.random.Generator) -> None:
    tangents = [normal(rng, array.shape, array.dtype) for array in case]
    close(mx.jvp(loss, case, tangents)[1], mx.jvp(plain_loss, case, tangents)[1])


def test_second_derivative(case: list[mx.array], rng: np.random.Generator) -> None:
    directions = [normal(rng, array.shape, mx.float32) for array in case]

    def curvature(function: Callable[..., mx.array], *arrays: mx.array) -> list[mx.array]:
        def directional(*arrays: mx.array) -> mx.array:
            total = mx.array(0.0)
            for gradient, direction in zip(mx.grad(function, argnums=EVERY)(*arrays), directions, strict=True):
                total = total + (gradient.astype(mx.float32) * direction).sum()
            return total

        return list(mx.grad(directional, argnums=EVERY)(*arrays))

    for ours, theirs in zip(curvature(loss, *case), curvature(plain_loss, *case), strict=True):
        assert relative_error(ours, host(theirs)) <= 1e-2


def test_vmap_of_the_gradient(rng: np.random.Generator) -> None:
    q, k, v = (normal(rng, (3, 2, 2, 40, 64), mx.float16) for _ in range(3))
    sinks = normal(rng, (2,), mx.float16)

    def gradient(function: Callable[..., mx.array]) -> Callable[..., Any]:
        return mx.grad(lambda q, k, v: function(q, k, v, sinks), argnums=[0, 1, 2])

    single = [gradient(plain_loss)(q[i], k[i], v[i]) for i in range(3)]
    exact = [mx.stack([each[i] for each in single]) for i in range(3)]
    close(mx.vmap(gradient(loss))(q, k, v), exact)
    several = mx.grad(lambda q, k, v: mx.vmap(loss, in_axes=(0, 0, 0, None))(q, k, v, sinks).sum(), argnums=[0, 1, 2])
    close(several(q, k, v), exact)
    lse = mx.vmap(lambda q, k, v: attend(q, k, v, sinks, lse=True)[1])(q, k, v)
    close([lse], [mx.stack([attend(q[i], k[i], v[i], sinks, lse=True)[1] for i in range(3)])])


def test_training_a_block(rng: np.random.Generator) -> None:
    """A projection, attention and a projection back, as models have them."""
    x = normal(rng, (2, 77, 128), mx.float32)
    weights = {"in": normal(rng, (256, 128), mx.float32, 0.1), "out": normal(rng, (128, 128), mx.float32, 0.1)}
    results = []
    for attention, dtype in (mlx_cuda.attention, mx.bfloat16), (mx.fast.scaled_dot_product_attention, mx.float32):

        def cost(
            weights: dict[str, mx.array], x: mx.array, attention: Callable[..., mx.array] = attention, dtype: mx.Dtype = dtype
        ) -> mx.array:
            weights = {name: weight.astype(dtype) for name, weight in weights.items()}
            packed = mx.split(x.astype(dtype) @ weights["in"].T, [128, 192], axis=-1)
            q, k, v = (a.reshape(*a.shape[:2], -1, 32).transpose(0, 2, 1, 3) for a in packed)
            result = attention(q, k, v, scale=32**-0.5, mask="causal").transpose(0, 2, 1, 3).reshape(x.shape)
            return mx.square((result @ weights["out"].T).astype(mx.float32)).mean()

        value, gradients = mx.value_and_grad(cost)(weights, x)
        results.append([value, gradients["in"], gradients["out"]])
    assert "AttentionBackward" in primitives(*results[0])
    for ours, theirs in zip(*results, strict=True):
        assert relative_error(ours, host(theirs)) <= 3e-2


def test_plans_are_counted_and_kept(rng: np.random.Generator) -> None:
    arrays = inputs(rng, (1, 2, 2, 72, 72, 64), mx.float16)
    before = native().attention_plans()
    check(*arrays)
    built = native().attention_plans() - before
    assert 1 <= built <= 2
    check(*arrays)
    assert native().attention_plans() == before + built
