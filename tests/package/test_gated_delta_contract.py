from __future__ import annotations

import itertools
import types
from typing import Any

import mlx.core as mx
import mlx_cuda
import pytest
from mlx_cuda._loader import native as _native
from mlx_cuda._recurrence.composed import composed
from mlx_cuda._recurrence.rules import CHUNKED_KEY, FEWEST_CHUNKED, LARGEST_KEY, Call, LinearCase, choose, choose_linear

from tests.gpu.recurrences import exact, packed

from .environments import put_module
from .references import assert_close, host, random, with_

Arrays = list[mx.array]
UPSTREAM: Any = mx.fast.gated_delta_update


def draw(batch: int = 2, tokens: int = 7, heads: tuple[int, int] = (2, 4), *, channels: bool = False) -> Arrays:
    """q, k, v, g and beta with keys of 8 elements and values of 6."""
    q, k = (random((batch, tokens, heads[0], 8), seed=seed) * 0.5 for seed in (0, 1))
    v = random((batch, tokens, heads[1], 6), seed=2)
    g = mx.sigmoid(random((*v.shape[:3], 8) if channels else v.shape[:3], seed=3))
    return [q, k, v, g, mx.sigmoid(random(v.shape[:3], seed=4))]


@pytest.mark.parametrize("channels", [False, True], ids=["heads", "channels"])
def test_matches_float64(*, channels: bool) -> None:
    arrays, state, mask = draw(channels=channels), random((2, 4, 6, 8)), random((2, 7)) > -0.5
    for given, seen in itertools.product((None, state), (None, mask)):
        y, last = mlx_cuda.gated_delta(*arrays, state=given, mask=seen)
        expected = exact(mlx_cuda.gated_delta, arrays, given, seen)
        assert_close(y, expected[0])
        assert_close(last, expected[1])


def test_masks_of_numbers_are_masks() -> None:
    """Kernels read one byte of each."""
    mask = mlx_cuda.gated_delta.prepare(*draw(), mask=mx.array([[0, 1, 2, 0, 3, 1, 0]] * 2)).arrays.mask
    assert mask is not None
    assert mask.dtype == mx.bool_
    assert mask[0].tolist() == [False, True, True, False, True, True, False]


@pytest.mark.parametrize("cuts", [[0, 7], [0, 1, 1, 5, 7]], ids=str)
def test_packed_sequences(cuts: list[int]) -> None:
    arrays, state = draw(batch=1), random((len(cuts) - 1, 4, 6, 8))
    y, last = mlx_cuda.gated_delta(*arrays, cu_seqlens=mx.array(cuts), state=state)
    expected = packed(arrays, cuts, state)
    assert_close(y, expected[0])
    assert_close(last, expected[1])


def test_tokens_of_no_sequence_give_zeros() -> None:
    y, last = mlx_cuda.gated_delta(*draw(batch=1), cu_seqlens=mx.array([2, 2, 5]))
    assert last.shape == (2, 4, 6, 8)
    outside = host(y)[:, [0, 1, 5, 6]]
    assert not outside.any()
    assert not host(last[0]).any()


@pytest.mark.parametrize(
    ("dtypes", "expected"),
    [
        ((mx.float16, mx.float16, mx.float16), mx.float16),
        ((mx.float16, mx.float16, mx.float32), mx.float32),
        ((mx.int32, mx.int32, mx.int32), mx.float32),
    ],
    ids=str,
)
def test_dtypes(dtypes: tuple[mx.Dtype, ...], expected: mx.Dtype) -> None:
    arrays = draw()
    arrays[:3] = [each.astype(dtype) for each, dtype in zip(arrays, dtypes, strict=False)]
    y, state = mlx_cuda.gated_delta(*arrays, state=random((2, 4, 6, 8)).astype(mx.float16))
    assert (y.dtype, state.dtype) == (expected, mx.float32)


def test_no_token_leaves_the_state() -> None:
    arrays, state = draw(tokens=0), random((2, 4, 6, 8))
    y, last = mlx_cuda.gated_delta(*arrays, state=state)
    assert y.shape == (2, 0, 4, 6)
    assert mx.array_equal(last, state)
    assert last is not state
    assert not mlx_cuda.gated_delta(*arrays)[1].any()


def test_keys_without_numbers_give_zeros() -> None:
    q, k, v, g, beta = draw()
    y, last = mlx_cuda.gated_delta(q[..., :0], k[..., :0], v, g, beta)
    assert (y.shape, last.shape) == (v.shape, (2, 4, 6, 0))
    assert not y.any()


@pytest.mark.parametrize(
    ("arrays", "options", "message"),
    [
        (with_(draw(), 0, mx.zeros((2, 7, 8))), {}, r"q and k must be \[B, T, Hk, Dk\] and v \[B, T, Hv, Dv\], got \(2,7,8\)"),
        (with_(draw(), 1, mx.zeros((2, 7, 4, 8))), {}, "q and k must be"),
        (with_(draw(), 2, mx.zeros((2, 6, 4, 6))), {}, "q and k must be"),
        (draw(heads=(2, 3)), {}, r"multiple of those of q and k, got \(2,7,2,8\) and \(2,7,3,6\)"),
        (with_(draw(), 3, mx.zeros((2, 7, 4, 6))), {}, r"g must be .* got \(2,7,4,6\) and \(2,7,4\)"),
        (with_(draw(), 4, mx.zeros((2, 7, 2))), {}, "beta"),
        (with_(draw(), 0, mx.zeros((2, 7, 2, 8), mx.complex64)), {}, "Only real types are supported, got complex64"),
        (draw(), {"state": mx.zeros((2, 4, 8, 6))}, r"state must have the shape \(2,4,6,8\), got \(2,4,8,6\)"),
        (draw(), {"mask": mx.ones((2, 6), mx.bool_)}, r"mask must have the shape \(2,7\), got \(2,6\)"),
        (draw(), {"cu_seqlens": mx.array([0, 7])}, "cu_seqlens"),
        (draw(batch=1), {"cu_seqlens": mx.array([[0, 7]])}, "cu_seqlens"),
        (draw(batch=1), {"cu_seqlens": mx.array([0, 7]), "state": mx.zeros((2, 4, 6, 8))}, "state must have the shape"),
    ],
    ids=lambda value: "" if isinstance(value, (list, dict)) else str(value)[:24],
)
def test_errors(arrays: Arrays, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=r"^\[gated_delta\] .*" + message):
        mlx_cuda.gated_delta(*arrays, **options)


def test_names_what_is_no_array() -> None:
    with pytest.raises(TypeError, match=r"\[gated_delta\] beta must be an mlx.core.array, got float."):
        mlx_cuda.gated_delta(*draw()[:4], 1.0)  # type: ignore[arg-type, call-arg]


def test_derivatives() -> None:
    arrays = draw(batch=1, tokens=3)
    cotangent = random((1, 3, 4, 6), seed=9)
    ours = mx.vjp(lambda *a: mlx_cuda.gated_delta(*a)[0], arrays, [cotangent])[1]
    packed = mx.vjp(lambda *a: mlx_cuda.gated_delta(*a, cu_seqlens=mx.array([0, 3]))[0], arrays, [cotangent])[1]
    theirs = mx.vjp(lambda *a: UPSTREAM(*a)[0], arrays, [cotangent])[1]
    for each in ours, packed:
        for mine, expected in zip(each, theirs, strict=True):
            assert_close(mine, host(expected), slack=2)


@pytest.mark.parametrize("masked", [False, True], ids=["all tokens", "mask"])
@pytest.mark.parametrize("tokens", [1, 2, 63, 64, 130])
def test_what_derivatives_are_of(tokens: int, *, masked: bool) -> None:
    """The composition of chunks against the loop over time: results, and derivatives of all that is given."""
    arrays, state = draw(tokens=tokens), random((2, 4, 6, 8))
    mask = random((2, tokens)) > -0.5 if masked else None
    cotangents = [random((2, tokens, 4, 6), seed=9), random((2, 4, 6, 8), seed=10)]

    def by_chunks(*a: mx.array) -> list[mx.array]:
        return list(composed(Call(a[0], a[1], a[2], a[3], a[4], a[5], mask, None), delta=True))

    ours = mx.vjp(by_chunks, [*arrays, state], cotangents)
    theirs = mx.vjp(lambda *a: list(UPSTREAM(*a[:5], a[5], mask)), [*arrays, state], cotangents)
    for mine, expected in zip([*ours[0], *ours[1]], [*theirs[0], *theirs[1]], strict=True):
        assert_close(mine, host(expected), slack=20)


@pytest.mark.usefixtures("on_the_cpu")
def test_patched_calls_that_no_kernel_takes_are_upstreams() -> None:
    arrays = draw()
    theirs = UPSTREAM(*arrays)
    with mlx_cuda.patch():
        assert mx.fast.gated_delta_update is not UPSTREAM
        patched: Any = mx.fast.gated_delta_update
        ours = patched(*arrays)
        with pytest.raises(ValueError, match="stack"):
            patched(*draw(tokens=0))
    assert mx.fast.gated_delta_update is UPSTREAM
    assert all(mx.array_equal(a, b) for a, b in zip(ours, theirs, strict=True))


LINEAR = LinearCase(
    FEWEST_CHUNKED, 64, 64, ("bfloat16", "float32", "float32"), channels=False, packed=False, empty=False, capability=(9, 0)
)


@pytest.mark.parametrize(
    ("case", "engine", "reason"),
    [
        ({}, "chunked", ""),
        ({"dtypes": ("float16", "float16", "float16")}, "chunked", ""),
        ({"tokens": FEWEST_CHUNKED - 1}, "recurrent", "fewer than"),
        ({"dtypes": ("float32", "float32", "float32")}, "recurrent", "in float32"),
        ({"channels": True}, "recurrent", "a decay of its own"),
        ({"packed": True}, "recurrent", "packed"),
        ({"key": CHUNKED_KEY + 8}, "recurrent", "chunks have keys of"),
        ({"value": 60}, "recurrent", "chunks have values of a multiple of 8"),
        ({"capability": (7, 5)}, "mlx", "sm_80 and newer"),
        ({"empty": True}, "mlx", "nothing to compute"),
        ({"dtypes": ("bfloat16", "int32", "float32")}, "mlx", "mlx-cuda's kernel supports float16"),
        ({"key": 60}, "mlx", "a multiple of 8 elements"),
        ({"key": LARGEST_KEY + 8}, "mlx", f"up to {LARGEST_KEY}"),
    ],
    ids=str,
)
def test_who_computes_linear_attention(case: dict[str, Any], engine: str, reason: str) -> None:
    found = choose_linear(LINEAR._replace(**case))
    assert (found.engine, reason in found.reason) == (engine, True)


def test_gpus_with_little_shared_memory_leave_the_widest_keys_to_mlx(monkeypatch: pytest.MonkeyPatch) -> None:
    def engine(capability: tuple[int, int], tokens: int, key: int, *, channels: bool = True) -> str:
        there: Any = types.SimpleNamespace(capability=capability)
        monkeypatch.setattr(_native, "engine", lambda _: there)
        q, v = mx.zeros((1, tokens, 2, key)), mx.zeros((1, tokens, 2, 64))
        g = mx.zeros((1, tokens, 2, key) if channels else (1, tokens, 2))
        return choose(Call(q, q, v, g, mx.zeros((1, tokens, 2)), None, None, None), mx.default_stream(mx.cpu)).engine

    assert engine((8, 6), 5, 192) == engine((12, 0), 5, 192) == "mlx"
    assert engine((9, 0), 5, 192) == engine((8, 0), 5, 192) == engine((8, 6), 4, 192) == engine((8, 6), 5, 128) == "recurrent"
    assert engine((8, 6), 5, 192, channels=False) == "recurrent"


@pytest.fixture
def their_module(monkeypatch: pytest.MonkeyPatch) -> Any:
    return put_module(monkeypatch, "mlx_lm.models.gated_delta", gated_delta_ops=lambda *arrays: ("theirs", *arrays))


def test_mlx_lm_s_function_is_replaced_and_comes_back(their_module: Any) -> None:
    from mlx_cuda._mlx_lm import places as mlx_lm

    theirs = their_module.gated_delta_ops
    mlx_lm.put()
    ours = their_module.gated_delta_ops
    mlx_lm.put()
    assert their_module.gated_delta_ops is ours is not theirs
    with mx.stream(mx.cpu):
        arrays = draw()
        assert ours(*arrays) == ("theirs", *arrays)
        assert ours(*arrays[:4], "no array") == ("theirs", *arrays[:4], "no array")
    mlx_lm.take_away()
    assert their_module.gated_delta_ops is theirs
    mlx_lm.take_away()
    assert their_module.gated_delta_ops is theirs
