"""``patch(batch_invariant=True)`` on the CPU, with a stand-in for the kernel of attention: what goes where, what raises, what comes back.

Matmuls here are MLX's own in 16 bits, whose CPU kernel computes each row alike wherever it stands in a call of one shape.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx_cuda
import numpy as np
import pytest
from mlx_cuda import _patch
from mlx_cuda._attention.options import Options
from mlx_cuda._invariant import attention, grouped, masks, rows
from mlx_cuda._invariant import matmul as invariant_matmul
from mlx_cuda._invariant.state import NotInvariant, setting
from mlx_cuda._loader import native as _native
from mlx_cuda._matmul.formats import Format
from mlx_cuda._replay import packing

from tests.gpu.mlx_lm_parts import make_model, part

from .references import random

pytestmark = pytest.mark.usefixtures("on_the_cpu", "forgetful")
HALF = mx.bfloat16
flash, matmul = attention.flash, mx.matmul  # as a program that imports the latter by its name


def of_mlx_lm(name: str) -> Any:
    """A module of mlx-lm's, which is not installed where most tests run."""
    if find_spec("mlx_lm") is None:
        pytest.skip("mlx_lm is not installed")
    return part(name)


def by_rows(q: mx.array, k: mx.array, v: mx.array, options: Options, _: mx.Stream) -> mx.array:
    """Each query by its own keys alone, one after another."""
    queries, keys, values = (np.array(each.astype(mx.float32)) for each in (q, k, v))
    starts = np.zeros(q.shape[0], int) if options.starts is None else np.array(options.starts)
    groups, (left, right) = q.shape[1] // k.shape[1], options.window
    out = np.zeros((*q.shape[:3], v.shape[3]), np.float32)
    for b, h, t in np.ndindex(*q.shape[:3]):
        place = t + k.shape[2] - q.shape[2]
        seen = slice(max(starts[b], place - left if left >= 0 else 0), place + right + 1 if right >= 0 else None)
        scores = keys[b, h // groups, seen] @ queries[b, h, t] * options.scale
        if scores.size:
            weights = np.exp(scores - scores.max())
            out[b, h, t] = weights @ values[b, h // groups, seen] / weights.sum()
    return mx.array(out).astype(q.dtype)


@pytest.fixture(autouse=True)
def _stand_ins(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(_patch, "refusal", lambda: "")
    monkeypatch.setattr(attention, "flash", by_rows)
    yield
    mlx_cuda.unpatch()
    assert not setting.on


def of_groups(x: mx.array, w: mx.array, offsets: mx.array, transpose: bool, _: mx.Stream) -> mx.array:
    """Each row by a matmul of its own: to OpenBLAS, which MLX has on Windows, a row's place in a matrix makes a difference."""
    bounds: Any = offsets.tolist()
    experts = w.swapaxes(1, 2) if transpose else w
    of_rows = [expert for first, last, expert in zip(bounds[:-1], bounds[1:], experts, strict=True) for _ in range(first, last)]
    return mx.concatenate([invariant_matmul.upstream_matmul(x[i : i + 1], expert) for i, expert in enumerate(of_rows)])


@pytest.fixture(params=["calls of one shape", "one kernel"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who computes matmuls: as where the kernel of groups takes none, or a stand-in for it."""
    if request.param == "one kernel":

        def unpacked(x: mx.array, experts: Any, offsets: mx.array, stream: mx.Stream) -> mx.array:
            assert x.dtype == experts.scales.dtype == experts.biases.dtype  # the kernel reads one
            scales, biases = (each.astype(mx.float32) for each in (experts.scales, experts.biases))  # as MLX's kernel for the CPU
            w = mx.dequantize(experts.w, scales, biases, *experts.form)
            return of_groups(x.astype(mx.float32), w, offsets, experts.transpose, stream).astype(x.dtype)

        monkeypatch.setattr(grouped, "takes", lambda *_: True)
        monkeypatch.setattr(grouped, "grouped_gemm", of_groups)
        monkeypatch.setattr(grouped, "grouped_quantized", unpacked)


def functions() -> list[Any]:
    return [getattr(route.owner, route.name) for route in (*_patch.EVERY, *_patch.INVARIANT)]


def same(one: mx.array, other: mx.array) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and bool(mx.array_equal(one, other, equal_nan=True))


W, BIAS = random((48, 128), HALF, seed=2), random((48,), HALF, seed=3)
PACKED, SCALES, BIASES = mx.quantize(random((48, 128), HALF, seed=1), group_size=32, bits=4)
MATMULS: dict[str, Callable[[mx.array], mx.array]] = {
    "@": lambda x: x @ W.T,
    "matmul": lambda x: mx.matmul(x, W.T),
    "matmul of a vector": lambda x: mx.matmul(x, W[0]),
    "addmm": lambda x: mx.addmm(BIAS, x, W.T),
    "addmm of rows": lambda x: mx.addmm(mx.zeros((*x.shape[:-1], 48), HALF), x, W.T, 2.0, 3.0),
    "quantized": lambda x: mx.quantized_matmul(x, PACKED, SCALES, BIASES, True, 32, 4),
    "not transposed": lambda x: mx.quantized_matmul(x[..., :48], PACKED, SCALES, BIASES, False, 32, 4),
}


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("name", MATMULS)
def test_rows_of_matmuls_know_nothing_of_each_other(name: str) -> None:
    x = random((700, 128), HALF)
    theirs = MATMULS[name](x)
    with mlx_cuda.patch(batch_invariant=True):
        whole = MATMULS[name](x)
        assert (whole.shape, whole.dtype) == (theirs.shape, theirs.dtype)
        ours, right = (np.array(each.astype(mx.float32)) for each in (whole, theirs))
        assert np.linalg.norm(ours - right) < 0.02 * np.linalg.norm(right)  # for the CPU MLX sums packed weights in 16 bits
        for first, count in ((0, 1), (699, 1), (3, 5), (70, 64), (1, 65), (13, 300)):
            assert same(MATMULS[name](x[first : first + count]), whole[first : first + count]), (first, count)
        assert same(MATMULS[name](x[5]), whole[5])
        assert same(MATMULS[name](x.reshape(7, 100, 128)), whole.reshape(7, 100, *whole.shape[1:]))
        assert same(MATMULS[name](mx.contiguous(x.T).T), whole)


def test_each_call_has_one_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes, own = set(), mx.matmul

    def matmul(a: mx.array, b: mx.array) -> mx.array:
        shapes.add((a.shape, b.shape))
        return own(a, b)

    monkeypatch.setattr(invariant_matmul, "upstream_matmul", matmul)
    with mlx_cuda.patch(batch_invariant=True):
        for count in (1, 2, 63, 64, 65, 128, 700):
            assert (random((count, 128)) @ random((128, 9))).shape == (count, 9)
    assert shapes == {((rows.ROWS, 128), (128, 9))}


def experts(x: mx.array, indices: mx.array, quantized: bool, **options: Any) -> mx.array:
    w = random((4, 48, 128), seed=4)
    if not quantized:
        return mx.gather_mm(x, w.swapaxes(-1, -2), rhs_indices=indices, **options)
    return mx.gather_qmm(x, *mx.quantize(w, group_size=32), rhs_indices=indices, group_size=32, **options)


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("quantized", [False, True])
def test_pairs_know_nothing_of_each_other(quantized: bool) -> None:
    x, indices = random((90, 1, 1, 128)), mx.array(np.random.default_rng(0).integers(0, 4, (90, 3)))
    theirs = experts(x, indices, quantized)
    with mlx_cuda.patch(batch_invariant=True):
        whole = experts(x, indices, quantized)
        assert same(whole.astype(theirs.dtype), whole)
        assert mx.allclose(whole, theirs, rtol=1e-4, atol=1e-4)
        assert all(same(experts(x[i : i + n], indices[i : i + n], quantized), whole[i : i + n]) for i, n in ((0, 1), (50, 1), (7, 30)))
        order = mx.argsort(indices.reshape(-1))
        in_order = experts(x.reshape(90, 1, 128)[order // 3], indices.reshape(-1)[order], quantized, sorted_indices=True)
        assert same(in_order[mx.argsort(order)].reshape(whole.shape), whole)


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("quantized", [False, True])
def test_indices_mean_what_they_mean_to_mlx(quantized: bool) -> None:
    w = random((2, 3, 48, 128), seed=4)
    calls: list[Callable[..., mx.array]] = [lambda x, **to: mx.gather_mm(x, w.swapaxes(-1, -2), **to)]
    if quantized:
        packed = mx.quantize(w, group_size=32)
        calls = [lambda x, **to: mx.gather_qmm(x, *packed, group_size=32, **to)]
    x = random((3, 5, 128))
    for given in ({"rhs_indices": mx.array([[5], [0]])}, {"lhs_indices": mx.array([1, 2])[:, None, None]}, {"lhs_indices": mx.array([2]),
                   "rhs_indices": mx.array([4])}, {"rhs_indices": mx.zeros((0, 3), mx.uint32)}):  # fmt: skip
        theirs = calls[0](x, **given)
        with mlx_cuda.patch(batch_invariant=True):
            ours = calls[0](x, **given)
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
        assert mx.allclose(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("dtype", [mx.int8, mx.uint8, mx.uint32])
def test_indices_count_further_than_their_dtype(dtype: mx.Dtype) -> None:
    x, w = random((100, 3, 16)), random((127, 16, 8), seed=1)
    numbers = [(mx.array(each).astype(dtype)) for each in ([99, 0, 45], [126, 125, 0])]
    theirs = x[mx.array([99, 0, 45])] @ w[mx.array([126, 125, 0])]
    with mlx_cuda.patch(batch_invariant=True):
        assert mx.allclose(mx.gather_mm(x, w, *numbers), theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("integer", ["x", "scales", "biases"])
def test_integers_are_promoted_as_by_mlx(integer: str) -> None:
    given = {"x": random((70, 128), HALF), "scales": SCALES, "biases": BIASES}
    given[integer] = (given[integer] * 9).astype(mx.int32)
    x, scales, biases = given.values()
    calls: list[Callable[[], mx.array]] = [
        lambda: mx.quantized_matmul(x, PACKED, scales, biases, True, 32, 4),
        lambda: mx.gather_qmm(x, PACKED[None], scales[None], biases[None], rhs_indices=mx.array([0]), group_size=32, bits=4),
    ]
    for call in calls:
        theirs = call()
        with mlx_cuda.patch(batch_invariant=True):
            ours = call()
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
        assert mx.linalg.norm((ours - theirs).astype(mx.float32)) <= 0.02 * mx.linalg.norm(theirs.astype(mx.float32))


def test_weights_that_the_kernel_of_groups_cannot_unpack_are_left_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grouped, "chosen", lambda *_, **__: SimpleNamespace(engine="grouped"))
    for bits in (1, 4):
        form = Format(32, bits, "affine")
        assert grouped.takes(HALF, 5, 128, 48, form) is (bits == 4)
    assert grouped.takes(HALF, 5, 128, 48)
    assert grouped.takes(HALF, 5, 128, 48, Format(32, 4, "mxfp4"))


def test_outer_matmuls_are_one_multiplication() -> None:
    a, b = random((2, 7, 1)), random((2, 1, 9), seed=1)
    with mlx_cuda.patch(batch_invariant=True):
        assert same(a @ b, a * b)


SHORT = mx.ones((1, 2, 3, 8))
WRONG: dict[str, Callable[[], object]] = {
    "sizes": lambda: mx.ones((3, 4)) @ mx.ones((5, 6)),
    "dtypes": lambda: mx.matmul(mx.ones((3, 4), mx.int32), mx.ones((4, 6), mx.int32)),
    "outer dtypes": lambda: mx.matmul(mx.ones((3, 1), mx.int32), mx.ones((1, 6), mx.int32)),
    "no array": lambda: mx.matmul(mx.ones((3, 4)), 3),  # type: ignore[arg-type]
    "no array of @": lambda: mx.ones((3, 4)) @ 3.0,  # type: ignore[operator]
    "no dimension": lambda: mx.ones((3, 4)) @ mx.array(2.0),
    "addmm": lambda: mx.addmm(mx.ones((7, 3, 9)), mx.ones((3, 4)), mx.ones((4, 6))),
    "quantized": lambda: mx.quantized_matmul(mx.ones((3, 4)), PACKED, SCALES, BIASES, True, 32),
    "options": lambda: mx.quantized_matmul(mx.ones((3, 128)), PACKED, SCALES, BIASES, True, 7),
    "indices": lambda: mx.gather_mm(mx.ones((3, 1, 4)), mx.ones((2, 4, 6)), None, mx.ones((3,))),
    "attention": lambda: mx.fast.scaled_dot_product_attention(SHORT, SHORT, mx.ones((1, 2, 4, 8)), scale=1.0),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_have_mlx_s_errors(name: str) -> None:
    with pytest.raises((ValueError, TypeError)) as theirs:
        WRONG[name]()
    with mlx_cuda.patch(batch_invariant=True), pytest.raises(theirs.type) as ours:
        WRONG[name]()
    assert str(ours.value) == str(theirs.value)


def attend(q: mx.array, k: mx.array, mask: Any = None, dtype: mx.Dtype = HALF, **options: Any) -> mx.array:
    q, k = q.astype(dtype), k.astype(dtype)
    return mx.fast.scaled_dot_product_attention(q, k, k, scale=0.1, mask=mask, **options)


def created(*arguments: Any, **options: Any) -> mx.array:
    mask: mx.array = of_mlx_lm("models.base").create_causal_mask(*arguments, **options)
    return mask


Q, K = random((2, 4, 6, 16), HALF), random((2, 2, 20, 16), HALF, seed=1)
PADDING = mx.array([3, 0])
MASKS: dict[str, Callable[[], Any]] = {
    "none": lambda: None,
    "causal": lambda: "causal",
    "array": lambda: created(6, 14),
    "window": lambda: created(6, 14, window_size=5),
    "padding": lambda: created(6, 14, left_padding=PADDING),
    "padding and window": lambda: created(6, 14, window_size=5, left_padding=PADDING),
}


@pytest.mark.parametrize("name", MASKS)
def test_masks_of_mlx_lm_are_known(name: str) -> None:
    with mlx_cuda.patch(batch_invariant=True):
        of_mlx_lm("models.cache")
        _patch._install_invariant()  # as a model of mlx-lm does when it is imported
        mask = MASKS[name]()
        ours = attend(Q, K, mask)
    theirs = attend(Q.astype(mx.float32), K.astype(mx.float32), mask, mx.float32)
    assert mx.allclose(ours.astype(mx.float32), theirs, atol=0.02)


def test_masks_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    of_mlx_lm("models.cache")
    with mlx_cuda.patch(batch_invariant=True):
        before = len(masks._known)
        mask = created(6, 14)
        assert len(masks._known) == before + 1
        assert masks.seen_by(mask) == masks.Seen(6, 14, None, None)
        monkeypatch.setattr(_native, "loaded", SimpleNamespace(same_arrays=lambda one, other: one is other))
        assert masks.seen_by(mask) is None  # written to since, as the native module tells
        monkeypatch.setattr(_native, "loaded", None)
        del mask
        gc.collect()
        assert len(masks._known) == before


def shapeless() -> object:
    return mx.compile(lambda x: x @ W.T, shapeless=True)(W)


def in_place() -> None:
    x = mx.ones((2, 2))
    x @= x


REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "a batch": (lambda: mx.ones((2, 3, 4)) @ mx.ones((2, 4, 5)), "batch of right operands"),
    "a batch of one": (lambda: mx.ones((1, 3, 4)) @ mx.ones((1, 4, 5)), "batch of right operands"),
    "quantized batch": (
        lambda: mx.quantized_matmul(mx.ones((2, 3, 128)), PACKED[None], SCALES[None], BIASES[None], True, 32),
        "gather_qmm",
    ),
    "gather_mm without indices": (lambda: mx.gather_mm(mx.ones((2, 3, 4)), mx.ones((2, 4, 5))), "batch of right operands"),
    "float32": (lambda: attend(Q, K, dtype=mx.float32), "not in float32: convert the model"),
    "wide heads": (lambda: attend(random((1, 1, 2, 264)), random((1, 1, 2, 264))), "multiples of 8 up to 256"),
    "odd heads": (lambda: attend(random((1, 1, 2, 12)), random((1, 1, 2, 12))), "multiples of 8 up to 256"),
    "a mask": (lambda: attend(Q, K, mx.ones((6, 20), mx.bool_)), "create_causal_mask"),
    "an additive mask": (lambda: attend(Q, K, mx.zeros((6, 20), HALF)), "create_causal_mask"),
    "part of a mask": (lambda: attend(Q, K, created(6, 14)[..., :20]), "create_causal_mask"),
    "another mask": (lambda: attend(Q, K, created(1, 19)), "create_causal_mask"),
    "right padding": (lambda: attend(Q, K, created(6, 14, right_padding=PADDING)), "create_causal_mask"),
    "vmap": (lambda: mx.vmap(lambda row: row @ W.T)(mx.ones((3, 128), HALF)), "under mx.vmap"),
    "a vector and an index": (lambda: mx.gather_mm(mx.ones((1, 4)), mx.ones(4), None, mx.array([0])), "give them two dimensions"),
    "attention on the CPU": (lambda: flash(Q, K, K, Options(scale=1.0), mx.default_stream(mx.cpu)), "the stream is on the CPU"),
    "an exported function": (lambda: mx.import_function("nowhere"), "call the one that it was exported from"),
    "shapeless": (shapeless, "shapeless=True"),
    "in place": (in_place, "write a = a @ b"),
    "einsum": (lambda: mx.einsum("ij,kj->ik", mx.ones((2, 3)), mx.ones((4, 3))), "mx.einsum"),
    "conv1d": (lambda: mx.conv1d(mx.ones((1, 4, 2)), mx.ones((2, 3, 2))), "mx.conv1d"),
    "gated_delta_update": (lambda: mx.fast.gated_delta_update(W, W, W, W, W), "state from token to token"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_have_it_raises(name: str) -> None:
    call, text = REFUSED[name]
    of_mlx_lm("models.cache")
    with mlx_cuda.patch(batch_invariant=True), pytest.raises(NotInvariant, match=rf"\[batch_invariant\] .*{text}"):
        call()
    assert issubclass(NotInvariant, ValueError)


@pytest.mark.parametrize("name", ["RotatingKVCache", "BatchRotatingKVCache", "ChunkedKVCache", "QuantizedKVCache"])
def test_caches_that_cannot_have_it_raise(name: str) -> None:
    cls = getattr(of_mlx_lm("models.cache"), name)
    cache = {"RotatingKVCache": lambda: cls(8), "BatchRotatingKVCache": lambda: cls(8, [0]), "ChunkedKVCache": lambda: cls(8)}.get(
        name, cls
    )()
    keys = random((1, 2, 3, 64))
    with mlx_cuda.patch(batch_invariant=True), pytest.raises(NotInvariant, match=name):
        cache.update_and_fetch(keys, keys)
    cache.update_and_fetch(keys, keys)


def test_states_that_cannot_have_it_raise() -> None:
    cache = of_mlx_lm("models.cache").ArraysCache(2)
    delta, ssm = of_mlx_lm("models.gated_delta"), of_mlx_lm("models.ssm")
    with mlx_cuda.patch(batch_invariant=True):
        for call in (lambda: cache.__setitem__(0, W), delta.gated_delta_update, delta.gated_delta_ops, ssm.ssm_update, ssm.ssm_attn):
            with pytest.raises(NotInvariant, match="state space models"):
                call()
    cache[0] = W


def test_sums_over_gpus_raise() -> None:
    class Group:
        def size(self) -> int:
            return 2

    with mlx_cuda.patch(batch_invariant=True):
        assert mx.distributed.all_sum(W) is not None  # of one process
        for name in ("all_sum", "sum_scatter"):
            with pytest.raises(NotInvariant, match=f"{name} .*use one GPU"):
                getattr(mx.distributed, name)(W, group=Group())


def test_functions_that_a_module_has_imported_by_their_names_follow() -> None:
    own, x = matmul, mx.ones((2, 3, 4))
    with mlx_cuda.patch(batch_invariant=True):
        assert matmul is mx.matmul is not own
        with pytest.raises(NotInvariant, match="batch of right operands"):
            matmul(x, x.swapaxes(1, 2))
        with mlx_cuda.patch(batch_invariant=False):
            assert matmul is own
    assert matmul is own


def test_comes_and_goes() -> None:
    of_mlx_lm("models.cache")
    before, base = functions(), of_mlx_lm("models.base")
    own, method = base.create_causal_mask, of_mlx_lm("models.cache").RotatingKVCache.update_and_fetch
    with mlx_cuda.patch(batch_invariant=True):
        inside = functions()
        assert not any(now is then for now, then in zip(inside[-len(_patch.INVARIANT) :], before[-len(_patch.INVARIANT) :], strict=True))
        with mlx_cuda.patch():  # as set
            assert functions() == inside
        with mlx_cuda.patch(batch_invariant=False):
            assert not setting.on
            assert mx.matmul is before[functions().index(mx.matmul)]
            assert base.create_causal_mask is own
            with mlx_cuda.patch(batch_invariant=True):
                assert functions() == inside
        assert setting.on
        assert functions() == inside
        assert base.create_causal_mask is not own
    assert functions() == before
    assert base.create_causal_mask is own
    assert of_mlx_lm("models.cache").RotatingKVCache.update_and_fetch is method
    mlx_cuda.patch(batch_invariant=True)
    mlx_cuda.unpatch()
    assert functions() == before
    with mlx_cuda.patch(), mlx_cuda.patch(batch_invariant=True):
        pass
    assert functions() == before


def test_quantized_caches_and_it_exclude_each_other() -> None:
    with pytest.raises(ValueError, match=r"\[patch\] batch_invariant .*kv_bits out"):
        mlx_cuda.patch(kv_bits=4, batch_invariant=True)
    with mlx_cuda.patch(kv_bits=8), pytest.raises(ValueError, match=r"\[patch\] batch_invariant"):
        mlx_cuda.patch(batch_invariant=True)
    with mlx_cuda.patch(kv_bits=8), mlx_cuda.patch(kv_bits=16, batch_invariant=True):
        assert packing.settings.packing is None
    with mlx_cuda.patch(batch_invariant=True), pytest.raises(ValueError, match=r"\[patch\] batch_invariant"):
        mlx_cuda.patch(kv_bits=8)


def test_raises_where_no_kernel_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    if mx.cuda.is_available():
        pytest.skip("a GPU is there")
    before = functions()
    with pytest.raises(ValueError, match=r"\[patch\] batch_invariant is not available: MLX offers no CUDA GPU here"):
        mlx_cuda.patch(batch_invariant=True)
    assert functions() == before


def test_steps_are_not_captured() -> None:
    of_mlx_lm("models")
    model = make_model(0)
    with mlx_cuda.patch(batch_invariant=True):
        choice = mlx_cuda.explain(mlx_cuda.decode_step, model)
        assert choice.engine == "mlx"
        assert "batch_invariant" in choice.reason
        with pytest.raises(ValueError, match="batch_invariant"):
            mlx_cuda.decode_step(model, mx.array([[1]]), [])


def test_gradients_and_compiled_functions_go_on() -> None:
    x = random((100, 128))

    def loss(w: mx.array) -> mx.array:
        return mx.square(x @ w.T).sum()

    w = W.astype(mx.float32)
    theirs = mx.grad(loss)(w)
    with mlx_cuda.patch(batch_invariant=True):
        assert mx.allclose(mx.grad(loss)(w), theirs, rtol=1e-3, atol=1e-3)
        assert mx.allclose(mx.compile(lambda x: x @ w.T)(x), x @ w.T)


def logits_of(model: Any, tokens: list[int], sizes: list[int]) -> mx.array:
    """All logits of a prompt that is given in pieces of these sizes."""
    cache, results, at = of_mlx_lm("models.cache").make_prompt_cache(model), [], 0
    for size in sizes:
        results.append(model(mx.array([tokens[at : at + size]]), cache=cache))
        at += size
    return mx.concatenate(results, axis=1)[0]


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("bits", [None, 4])
def test_logits_of_a_model_are_the_same_in_chunks_and_in_batches(bits: int | None) -> None:
    cache = of_mlx_lm("models.cache")
    with mlx_cuda.patch(batch_invariant=True):
        model = make_model(3, bits, vocab_size=64)
        prompts = [[int(each) for each in np.random.default_rng(size).integers(0, 64, size)] for size in (70, 9)]
        whole = [logits_of(model, tokens, [len(tokens)]) for tokens in prompts]
        assert same(logits_of(model, prompts[0], [1, 30, 39]), whole[0])
        assert same(logits_of(model, prompts[1], [1] * 9), whole[1])
        caches = [cache.BatchKVCache([0, 61]) for _ in model.layers]
        together = model(mx.array([prompts[0], [0] * 61 + prompts[1]]), cache=caches)
        assert same(together[0], whole[0])
        assert same(together[1, 61:], whole[1])
