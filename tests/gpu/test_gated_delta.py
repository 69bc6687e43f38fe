from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import mlx.core as mx
import mlx_cuda
import numpy as np
import pytest
from mlx_cuda._recurrence.composed import composed
from mlx_cuda._recurrence.rules import Call

from . import recurrences
from .mlx_lm_parts import part
from .recurrences import ROUNDINGS, packed, state_tolerance
from .support import DTYPES, GRADIENT_TOLERANCE, TOLERANCE, assert_close, device, has_small_memory, host, normal, poison, primitives

pytestmark = pytest.mark.gpu

UPSTREAM: Any = mx.fast.gated_delta_update
check: Any = partial(recurrences.check, mlx_cuda.gated_delta)
SHAPES = {  # batch, tokens, heads of keys and of values, sizes of a key and of a value
    "one token": (1, 1, 1, 1, 8, 1),
    "one token of Qwen 3 Next": (3, 1, 16, 32, 128, 128),
    "a stage": (1, 16, 2, 2, 32, 32),
    "one more": (2, 17, 2, 4, 64, 33),
    "three stages": (1, 33, 1, 3, 96, 65),
    "no multiple of anything": (2, 61, 3, 6, 104, 7),
    "the rest of a key": (1, 40, 2, 2, 136, 128),
    "long keys": (1, 37, 1, 2, 256, 64),
    "two chunks": (2, 65, 2, 2, 64, 32),
    "whole chunks": (1, 192, 1, 3, 40, 33),
    "a prompt": (1, 300, 4, 8, 128, 128),
    "a prompt with long keys": (1, 100, 1, 2, 192, 40),
}
dtypes = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES.keys())
halves = pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=["float16", "bfloat16"])
gates = pytest.mark.parametrize("channels", [False, True], ids=["heads", "channels"])


def draw(
    rng: np.random.Generator,
    shape: tuple[int, int, int, int, int, int],
    dtype: mx.Dtype,
    *,
    channels: bool = False,
    decay: tuple[float, float] = (0.6, 1.0),
    most: float = 1.0,
) -> list[mx.array]:
    """q, k, v, g and beta, with keys of length 1."""
    batch, tokens, key_heads, value_heads, key, value = shape
    q, k = (rng.standard_normal((batch, tokens, key_heads, key)) for _ in range(2))
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    v = normal(rng, (batch, tokens, value_heads, value), dtype)
    gate_shape = (batch, tokens, value_heads, key) if channels else (batch, tokens, value_heads)
    g = device(rng.uniform(*decay, gate_shape), mx.float32)
    beta = device(rng.uniform(0, most, (batch, tokens, value_heads)), dtype)
    return [device(q * key**-0.5, dtype), device(k, dtype), v, g, beta]


def parts_of(arrays: list[mx.array], begin: int, end: int) -> list[mx.array]:
    return [each[:, begin:end] for each in arrays]


@dtypes
@gates
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_matches_float64(rng: np.random.Generator, dtype: mx.Dtype, shape: tuple[int, int, int, int, int, int], *, channels: bool) -> None:
    batch, tokens, _, heads, key, value = shape
    arrays = draw(rng, shape, dtype, channels=channels)
    state = normal(rng, (batch, heads, value, key), mx.float32)
    mask = mx.array(rng.random((batch, tokens)) > 0.3)
    fused = not (channels and key > 128 and has_small_memory())
    recurrences.check_all(mlx_cuda.gated_delta, arrays, state, mask, fused=fused)


@dtypes
@gates
@pytest.mark.parametrize(
    ("decay", "most"), [((0.0, 0.1), 1.0), ((0.99, 1.0), 1.0), ((0.0, 1.0), 2.0), ((1.0, 1.0), 2.0)], ids=["strong", "weak", "any", "none"]
)
def test_long_sequences(rng: np.random.Generator, dtype: mx.Dtype, decay: tuple[float, float], most: float, *, channels: bool) -> None:
    check(draw(rng, (1, 4000, 1, 2, 64, 40), dtype, channels=channels, decay=decay, most=most))


@gates
def test_longest_sequence(rng: np.random.Generator, *, channels: bool) -> None:
    check(draw(rng, (1, 32768, 1, 2, 64, 32), mx.bfloat16, channels=channels, decay=(0.9, 1.0)))


def test_parts_of_a_sequence_that_is_too_long_for_the_workspace(rng: np.random.Generator) -> None:
    check(draw(rng, (16, 600, 8, 8, 128, 128), mx.float16))


@dtypes
def test_zero_decay_forgets(rng: np.random.Generator, dtype: mx.Dtype) -> None:
    """What came before a decay of 0 does not matter, whatever it was."""
    arrays = draw(rng, (1, 50, 2, 2, 64, 64), dtype)
    arrays[3][:, 20] = 0
    y, state = mlx_cuda.gated_delta(*arrays, state=normal(rng, (1, 2, 64, 64), mx.float32))
    after, last = mlx_cuda.gated_delta(*parts_of(arrays, 20, 50))
    assert_close(y[:, 20:], host(after), tolerance=TOLERANCE[dtype])
    assert_close(state, host(last), tolerance=ROUNDINGS)


@dtypes
@pytest.mark.parametrize("most", [1.0, 2.0])
def test_keys_that_are_alike(rng: np.random.Generator, dtype: mx.Dtype, most: float) -> None:
    """Systems of equations whose powers would overflow: each token corrects what the one before it has written.

    So a chunk's results are sums of 64 corrections that cancel, each of which was rounded to 16 bits: half of the root of 64 as far off.
    """
    arrays = draw(rng, (1, 300, 1, 2, 64, 32), dtype, decay=(0.98, 1.0), most=most)
    arrays[1] = mx.broadcast_to(arrays[1][:, :1], arrays[1].shape)
    arrays[4] = mx.full(arrays[4].shape, most, dtype)
    check(arrays, slack=1 if dtype == mx.float32 else 4)


@halves
@pytest.mark.parametrize("tokens", [1000, 4000])
@pytest.mark.parametrize(("different", "beta"), [(1, 2.0), (1, 1.2), (2, 2.0), (8, 2.0)])
def test_keys_that_repeat_in_a_long_sequence(rng: np.random.Generator, dtype: mx.Dtype, tokens: int, different: int, beta: float) -> None:
    """With a beta near 2 and hardly any decay no token mends what is wrong with the state: errors of chunks must not add up."""
    arrays = draw(rng, (1, tokens, 1, 2, 64, 32), dtype, decay=(0.999, 1.0))
    arrays[1] = arrays[1][:, mx.arange(tokens) % different]
    arrays[4] = mx.full(arrays[4].shape, beta, dtype)
    check(arrays)


@halves
@pytest.mark.parametrize("beta", [1e-2, 1e-4, 1e-6])
def test_small_betas(rng: np.random.Generator, dtype: mx.Dtype, beta: float) -> None:
    """Times the inverse of I + A they are subnormal in float16; times large values as well, they are not."""
    arrays = draw(rng, (1, 150, 2, 4, 64, 32), dtype)
    arrays[2] = 1000 * arrays[2]
    arrays[4] = mx.full(arrays[4].shape, beta)
    check(arrays)


@halves
def test_a_large_beta_of_an_empty_key(rng: np.random.Generator, dtype: mx.Dtype) -> None:
    """A key of zeros changes nothing, whatever its beta; 1e5 is infinity in float16."""
    arrays = draw(rng, (1, 150, 2, 4, 64, 32), dtype)
    at = mx.array(np.arange(150) == 10)[None, :, None]
    arrays[1] = mx.where(at[..., None], 0, arrays[1])
    arrays[2] = mx.where(at[..., None], 0.1, arrays[2]).astype(dtype)
    arrays[4] = mx.where(at, 1e5, arrays[4].astype(mx.float32))
    check(arrays)


@dtypes
@gates
def test_any_split_of_a_sequence_gives_the_same(rng: np.random.Generator, dtype: mx.Dtype, *, channels: bool) -> None:
    arrays = draw(rng, (2, 203, 2, 4, 128, 64), dtype, channels=channels)
    whole, last = mlx_cuda.gated_delta(*arrays)
    for cuts in ([1], [16, 100], [64, 65, 202], list(range(1, 203))):
        state, parts = mx.zeros((2, 4, 64, 128)), []
        for begin, end in itertools.pairwise([0, *cuts, 203]):
            y, state = mlx_cuda.gated_delta(*parts_of(arrays, begin, end), state=state)
            parts.append(y)
        assert_close(mx.concatenate(parts, axis=1), host(whole), tolerance=2 * TOLERANCE[dtype], about=cuts)
        assert_close(state, host(last), tolerance=2 * state_tolerance(mlx_cuda.gated_delta, arrays), about=cuts)


VIEWS: dict[str, Callable[[mx.array], mx.array]] = {
    "heads before tokens": lambda a: mx.contiguous(a.swapaxes(1, 2)).swapaxes(1, 2),
    "part of a longer row": lambda a: mx.concatenate([a, a], axis=-1)[..., : a.shape[-1]],
    "not on 16 bytes": lambda a: mx.concatenate([a[..., :1], a], axis=-1)[..., 1:],
    "elements apart": lambda a: mx.repeat(a, 2, axis=-1)[..., ::2],
    "backwards": lambda a: mx.contiguous(a[:, ::-1])[:, ::-1],
    "one batch for all": lambda a: mx.broadcast_to(a[:1], a.shape),
}


@dtypes
@gates
@pytest.mark.parametrize("tokens", [2, 35, 70])
@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS.keys())
def test_views(rng: np.random.Generator, dtype: mx.Dtype, view: Callable[[mx.array], mx.array], tokens: int, *, channels: bool) -> None:
    arrays = [view(each) for each in draw(rng, (2, tokens, 2, 2, 64, 48), dtype, channels=channels)]
    mask, state = view(mx.array(rng.random((2, tokens, 1, 1)) > 0.2)), view(normal(rng, (2, 2, 48, 64), mx.float32))
    mx.eval(arrays, mask, state)
    check(arrays, mask=mask[:, :, 0, 0], state=state)


tokens = pytest.mark.parametrize("tokens", [3, 30, 90])


@dtypes
@tokens
def test_writes_all_of_its_output(rng: np.random.Generator, dtype: mx.Dtype, tokens: int) -> None:
    arrays = draw(rng, (2, tokens, 2, 2, 64, 40), dtype)
    nan = [mx.full(each.shape, float("nan"), each.dtype) for each in arrays]
    poison(lambda: mlx_cuda.gated_delta(*nan)[0], (2, tokens, 2, 40), dtype)
    poison(lambda: mlx_cuda.gated_delta(*nan)[1], (2, 2, 40, 64), mx.float32)
    check(arrays)


@dtypes
@tokens
def test_what_is_masked_is_not_read(rng: np.random.Generator, dtype: mx.Dtype, tokens: int) -> None:
    arrays = draw(rng, (1, tokens, 2, 2, 64, 40), dtype)
    seen = np.arange(tokens) % 3 > 0
    clean = mlx_cuda.gated_delta(*arrays, mask=mx.array(seen[None]))
    for each in arrays:
        each[:, mx.array(np.flatnonzero(~seen))] = float("nan")
    dirty = mlx_cuda.gated_delta(*arrays, mask=mx.array(seen[None]))
    assert all(mx.array_equal(a, b).item() for a, b in zip(clean, dirty, strict=True))


def test_nan_stays_in_its_head(rng: np.random.Generator) -> None:
    arrays = draw(rng, (1, 30, 2, 2, 64, 40), mx.float16)
    arrays[2][0, 10, 1, 3] = float("nan")
    nan = np.isnan(host(mlx_cuda.gated_delta(*arrays)[0]))
    assert nan[0, 10:, 1, 3].all()
    assert nan.sum() == 20


@tokens
def test_a_state_that_is_kept_is_not_written_to(rng: np.random.Generator, tokens: int) -> None:
    arrays, state = draw(rng, (1, tokens, 2, 2, 64, 64), mx.float16), normal(rng, (1, 2, 64, 64), mx.float32)
    before = np.array(state)
    first = mlx_cuda.gated_delta(*arrays, state=state)
    mx.eval(first)
    assert np.array_equal(np.array(state), before)
    again = mlx_cuda.gated_delta(*arrays, state=state + 0)  # which nobody keeps
    assert all(mx.array_equal(a, b).item() for a, b in zip(first, again, strict=True))


CUTS = pytest.mark.parametrize("cuts", [[0, 70], [0, 1, 1, 20, 36, 70], [3, 3, 50, 60]], ids=str)


@dtypes
@gates
@CUTS
def test_packed_sequences(rng: np.random.Generator, dtype: mx.Dtype, cuts: list[int], *, channels: bool) -> None:
    arrays = draw(rng, (1, 70, 2, 4, 64, 40), dtype, channels=channels)
    for state in None, normal(rng, (len(cuts) - 1, 4, 40, 64), mx.float32):
        for mask in None, mx.array(rng.random((1, 70)) > 0.3):
            y, last = mlx_cuda.gated_delta(*arrays, cu_seqlens=mx.array(cuts), state=state, mask=mask)
            expected = packed(arrays, cuts, state, mask)
            assert_close(y, expected[0], tolerance=TOLERANCE[dtype])
            assert_close(last, expected[1], tolerance=ROUNDINGS)


@dtypes
@gates
@pytest.mark.parametrize("tokens", [9, 80])
def test_gradients(rng: np.random.Generator, dtype: mx.Dtype, tokens: int, *, channels: bool) -> None:
    arrays = draw(rng, (1, tokens, 2, 4, 32, 16), dtype, channels=channels)
    state, offsets = normal(rng, (1, 4, 16, 32), mx.float32), mx.array([0, tokens])
    cotangents = [normal(rng, (1, tokens, 4, 16), dtype), normal(rng, (1, 4, 16, 32), mx.float32)]
    own = partial(recurrences.check_gradients, theirs=UPSTREAM, arrays=[*arrays, state], cotangents=cotangents)
    own(lambda *a: list(mlx_cuda.gated_delta(*a[:5], state=a[5])), tolerance=GRADIENT_TOLERANCE[dtype])
    own(lambda *a: list(mlx_cuda.gated_delta(*a[:5], state=a[5], cu_seqlens=offsets)), tolerance=GRADIENT_TOLERANCE[dtype])


GRADIENT_SHAPES = {  # of SHAPES' kind, that chunks take
    "one token more than a chunk": (1, 65, 1, 1, 8, 8),
    "no multiple of a tile": (2, 100, 2, 4, 104, 40),
    "a prompt": (1, 300, 2, 6, 128, 128),
    "whole chunks": (2, 192, 2, 2, 64, 32),
    "long values": (1, 130, 1, 2, 64, 200),
}


def check_gradients(rng: np.random.Generator, arrays: list[mx.array], *, more: bool, about: object = None, compare: bool = True) -> None:
    """All of them, against what MLX derives of the composition in float32; ``more`` is with a state and a mask."""
    batch, tokens, heads, value, key = *arrays[2].shape, arrays[1].shape[3]
    options: dict[str, Any] = {"mask": mx.array(rng.random((batch, tokens)) > 0.3)} if more else {}
    assert mlx_cuda.explain(mlx_cuda.gated_delta, *arrays, **options).engine == "chunked"
    given = [*arrays, normal(rng, (batch, heads, value, key), mx.float32)] if more else arrays
    cotangents = [normal(rng, (batch, tokens, heads, value), arrays[2].dtype), normal(rng, (batch, heads, value, key), mx.float32)]

    def ours(*a: mx.array) -> list[mx.array]:
        return list(mlx_cuda.gated_delta(*a[:5], state=a[5] if more else None, **options))

    def theirs(*a: mx.array) -> list[mx.array]:
        return list(composed(Call(a[0], a[1], a[2], a[3], a[4], a[5] if more else None, options.get("mask"), None), delta=True))

    if compare:
        recurrences.check_gradients(ours, theirs, given, cotangents, GRADIENT_TOLERANCE[arrays[2].dtype], about)
    else:
        mx.eval(mx.vjp(ours, given, cotangents)[1])


@halves
@pytest.mark.parametrize("more", [False, True], ids=["from nothing", "with state and mask"])
@pytest.mark.parametrize("shape", GRADIENT_SHAPES.values(), ids=GRADIENT_SHAPES.keys())
def test_gradients_by_chunks(rng: np.random.Generator, dtype: mx.Dtype, shape: tuple[int, int, int, int, int, int], *, more: bool) -> None:
    check_gradients(rng, draw(rng, shape, dtype), more=more)


@halves
@pytest.mark.parametrize(
    ("decay", "most"),
    [((0.01, 0.1), 1.0), ((0.99, 1.0), 1.0), ((0.05, 1.0), 2.0), ((1.0, 1.0), 1.0)],
    ids=["strong", "weak", "any", "none"],
)
def test_gradients_of_many_chunks(rng: np.random.Generator, dtype: mx.Dtype, decay: tuple[float, float], most: float) -> None:
    check_gradients(rng, draw(rng, (1, 1000, 1, 2, 64, 40), dtype, decay=decay, most=most), more=False)


@halves
@pytest.mark.parametrize("decay", [1e-2, 1e-3, 1e-4])
def test_gradients_of_a_small_decay_among_weak_ones(rng: np.random.Generator, dtype: mx.Dtype, decay: float) -> None:
    """What is divided by it is a sum in which large terms cancel."""
    arrays = draw(rng, (1, 256, 1, 2, 64, 64), dtype, decay=(0.95, 1.0))
    arrays[3][:, 100] = decay
    check_gradients(rng, arrays, more=False)


@halves
def test_gradients_of_views(rng: np.random.Generator, dtype: mx.Dtype) -> None:
    for name, view in VIEWS.items():
        arrays = [view(each) for each in draw(rng, (2, 70, 2, 2, 64, 48), dtype)]
        mx.eval(arrays)
        check_gradients(rng, arrays, more=True, about=name)


def test_a_decay_of_nothing_has_no_gradient(rng: np.random.Generator) -> None:
    q, k, v, decay, beta = draw(rng, (1, 80, 1, 2, 64, 40), mx.bfloat16)
    decay[:, 20] = 0
    g = mx.grad(lambda g: mlx_cuda.gated_delta(q, k, v, g, beta)[0].astype(mx.float32).sum())(decay)
    assert np.isfinite(host(g)).all()
    assert not host(g[:, 20]).any()
    assert host(g[:, 30]).any()


@halves
def test_gradients_do_not_read_what_is_masked(rng: np.random.Generator, dtype: mx.Dtype) -> None:
    q, k, v, g, beta = draw(rng, (1, 90, 2, 2, 64, 40), dtype)
    seen = np.arange(90) % 3 > 0
    hidden = mx.array(np.flatnonzero(~seen))

    def gradients(*arrays: mx.array) -> list[mx.array]:
        cotangents = [mx.ones(v.shape, dtype), mx.ones((1, 2, 40, 64))]
        mask = mx.array(seen[None])
        return mx.vjp(lambda q, k, v, g, beta: list(mlx_cuda.gated_delta(q, k, v, g, beta, mask=mask)), list(arrays), cotangents)[1]

    clean = gradients(q, k, v, g, beta)
    for each in q, k, v, g, beta:
        each[:, hidden] = float("nan")
    for mine, expected in zip(gradients(q, k, v, g, beta), clean, strict=True):
        assert not host(mine[:, hidden]).any()
        assert mx.array_equal(mine, expected)


@halves
def test_gradients_write_all_of_their_output(rng: np.random.Generator, dtype: mx.Dtype) -> None:
    arrays = draw(rng, (2, 90, 2, 2, 64, 40), dtype)
    check_gradients(rng, [mx.full(each.shape, float("nan"), each.dtype) for each in arrays], more=False, compare=False)
    check_gradients(rng, arrays, more=False)


def test_gradients_where_there_is_vmap_or_compile(rng: np.random.Generator) -> None:
    arrays = draw(rng, (3, 100, 2, 2, 32, 16), mx.float16)

    def gradients(*a: mx.array) -> list[mx.array]:
        cotangents = [a[2], mx.ones((a[2].shape[0], 2, 16, 32))]
        return mx.vjp(lambda q, k, v, g, beta: list(mlx_cuda.gated_delta(q, k, v, g, beta)), list(a), cotangents)[1]

    whole = gradients(*arrays)
    each = mx.vmap(lambda *a: [own[0] for own in gradients(*(one[None] for one in a))])(*arrays)
    for mine, compiled, expected in zip(each, mx.compile(gradients)(*arrays), whole, strict=True):
        assert_close(mine, host(expected), tolerance=1e-3)
        assert_close(compiled, host(expected), tolerance=1e-3)


def test_second_derivatives(rng: np.random.Generator) -> None:
    arrays = draw(rng, (1, 70, 1, 1, 32, 16), mx.float16)

    def sharpness(function: Callable[..., Any], of: list[mx.array]) -> Any:
        def gradient(k: mx.array) -> Any:
            return mx.grad(lambda own: mx.square(function(of[0], own, *of[2:])[0].astype(mx.float32)).sum())(k)

        return mx.grad(lambda k: mx.square(gradient(k).astype(mx.float32)).sum())(of[1])

    ours = sharpness(mlx_cuda.gated_delta, arrays)
    with mx.stream(mx.cpu):
        wide = [each.astype(mx.float32) for each in arrays]
        theirs = sharpness(lambda *a: composed(Call(a[0], a[1], a[2], a[3], a[4], None, None, None), delta=True), wide)
    assert_close(ours, host(theirs), tolerance=2e-2)


def test_vmap_and_compile(rng: np.random.Generator) -> None:
    arrays = draw(rng, (3, 20, 2, 2, 32, 16), mx.float32)
    whole = mlx_cuda.gated_delta(*arrays)[0]
    each = mx.vmap(lambda *a: mlx_cuda.gated_delta(*(one[None] for one in a))[0][0])(*arrays)
    assert_close(each, host(whole), tolerance=1e-4)
    compiled = mx.compile(mlx_cuda.gated_delta)(*arrays)[0]
    assert mx.array_equal(compiled, whole)
    mask = mx.array(rng.random((3, 20)) > 0.3)
    each = mx.vmap(lambda m, *a: mlx_cuda.gated_delta(*(one[None] for one in a), mask=m[None])[0][0])(mask, *arrays)
    assert_close(each, host(mlx_cuda.gated_delta(*arrays, mask=mask)[0]), tolerance=1e-4)


@pytest.mark.parametrize("tokens", [1, 20, 80])
def test_a_state_from_an_odd_place(rng: np.random.Generator, tokens: int) -> None:
    """Vectors of 16 bytes are not read from it."""
    arrays = draw(rng, (1, tokens, 2, 2, 64, 32), mx.bfloat16)
    memory = normal(rng, (1 + 2 * 32 * 64,), mx.float32)
    mx.eval(memory)
    check(arrays, state=memory[1:].reshape(1, 2, 32, 64))


@pytest.mark.parametrize(
    ("shape", "dtype", "why"),
    [
        ((1, 5, 1, 1, 36, 8), mx.float32, "multiple of 8"),
        ((1, 5, 1, 1, 264, 8), mx.float32, "up to 256"),
        ((1, 0, 1, 1, 64, 8), mx.float16, "nothing"),
    ],
    ids=["odd keys", "longer keys", "no token"],
)
def test_what_no_kernel_takes(rng: np.random.Generator, shape: tuple[int, int, int, int, int, int], dtype: mx.Dtype, why: str) -> None:
    arrays = draw(rng, shape, dtype)
    choice = mlx_cuda.explain(mlx_cuda.gated_delta, *arrays)
    assert choice.engine == "mlx"
    assert why in choice.reason
    check(arrays, fused=False)


def test_patched_results_have_the_types_of_those_they_replace(rng: np.random.Generator) -> None:
    q, k, v, g, beta = draw(rng, (1, 3, 2, 4, 64, 32), mx.bfloat16)
    state = normal(rng, (1, 4, 32, 64), mx.bfloat16)
    g, beta = g.astype(mx.bfloat16), beta.astype(mx.bfloat16)
    try:
        theirs_of_mlx_lm = part("models.gated_delta").gated_delta_ops
    except ImportError as error:
        pytest.skip(f"mlx_lm.models.gated_delta cannot be imported: {error}")
    for own in (q, k, v, g, beta), (q, k, v.astype(mx.float32), g, beta), (q, k, v, g.astype(mx.float32), beta):
        for given in None, state, state.astype(mx.float32):
            wanted = [UPSTREAM(*own, given), theirs_of_mlx_lm(*own, given)]
            with mlx_cuda.patch():
                found = [mx.fast.gated_delta_update(*own, given), part("models.gated_delta").gated_delta_ops(*own, given)]
            for ours, theirs in zip(found, wanted, strict=True):
                assert [each.dtype for each in ours] == [each.dtype for each in theirs]
                assert_close(ours[0], host(theirs[0]), tolerance=2e-2)


@gates
def test_patched(rng: np.random.Generator, *, channels: bool) -> None:
    arrays, state = draw(rng, (2, 40, 2, 4, 64, 32), mx.bfloat16, channels=channels), normal(rng, (2, 4, 32, 64), mx.float32)
    mask = mx.array(rng.random((2, 40)) > 0.3)
    theirs = UPSTREAM(*arrays, state, mask)
    with mlx_cuda.patch():
        patched: Any = mx.fast.gated_delta_update
        ours = patched(*arrays, initial_state=state, mask=mask)
        assert "LinearAttention" in primitives(ours[0])
        with pytest.raises(TypeError):
            patched(*arrays[:4])
        bad = partial(patched, *arrays[:2], *(each[:, :, :3] for each in arrays[2:]))
        with pytest.raises(ValueError, match="broadcast"):
            bad()
    assert isinstance(ours, list)
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.dtype == other.dtype
        assert_close(mine, host(other), tolerance=1e-2)
