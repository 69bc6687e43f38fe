"""Captured steps: as good as the model's own against float32, through all that may happen to a cache."""

from __future__ import annotations

import copy
import gc
import threading
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx_cuda
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_cuda._mlx_lm import caches
from mlx_cuda._mlx_lm.models import FAILURES, decoding_of

from .decoding_checks import FOUR, PROMPT, TOLERANCE, as_it_is, check, fresh, make, replayed, run, words
from .decoding_model import KVCache, Model, RotatingKVCache, nn
from .formats import FORMS, Form
from .support import DTYPES, host, on_hopper, relative_error

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("small_buckets")]

FORMATS = [None, *(form for form in FORMS if form.bits in {3, 4, 8} or form.group_size == 64)]
EIGHT = Form("affine", 8, 64)


def is_many(form: Form) -> bool:
    """Whether up to eight sequences have a kernel."""
    return form.mode == "affine" and form.bits == 4 and on_hopper()


@pytest.mark.parametrize("batch", [1, 2, 5])
@pytest.mark.parametrize("form", FORMATS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_logits_through_three_buckets(rng: np.random.Generator, dtype: mx.Dtype, form: Form | None, batch: int) -> None:
    model = make(rng, dtype, form)
    check(model, words(rng, batch, 100), dtype)
    fused = mlx_cuda.explain(mlx_cuda.decode_step, model).kernel
    if dtype == mx.float32:
        return  # neither the matmuls nor the attention that heads are made ready for
    most = 4 if form is None else 8 if is_many(form) else 1 if form == Form("affine", 4, 32) or form.bits == 6 else 2
    assert ("GEMV" in fused) == (batch <= most)
    if batch <= most:
        assert "norm + 2 GEMVs + swiglu" in fused
        assert "norm + 3 GEMVs" in fused
        assert "GEMV + add" in fused
    assert "head norms + rope + append" in fused


@pytest.mark.parametrize("sizes", [
    {"size": 384, "hidden": 520, "words": 333, "heads": 6, "kv_heads": 1, "head_norms": False},  # sizes that are no whole tiles
    {"size": 128, "dim": 128, "heads": 8, "kv_heads": 8, "hidden": 2048, "layers": 1},
    {"size": 2560, "hidden": 9728, "words": 20000, "dim": 128, "heads": 8, "layers": 1},  # more tiles than the device holds at once
], ids=["odd", "wide heads", "large"])  # fmt: skip
@pytest.mark.parametrize("form", [None, FOUR, EIGHT, Form("affine", 6, 64), Form("mxfp8", 8, 32), Form("nvfp4", 4, 16)], ids=str)
def test_sizes(rng: np.random.Generator, form: Form | None, sizes: dict[str, Any]) -> None:
    if form and sizes["hidden"] % form.group_size:
        sizes = {**sizes, "hidden": 576}
    check(make(rng, mx.bfloat16, form, **sizes), words(rng, 1, 30) % sizes.get("words", 500), mx.bfloat16)


@pytest.mark.parametrize(("form", "dtype", "batch", "sizes"), [
    (FOUR, mx.bfloat16, 8, {"hidden": 12288}),  # clusters share long rows
    (FOUR, mx.float16, 7, {"hidden": 14336}),
    # the most x that each block normalizes, and more than that
    (Form("affine", 4, 32), mx.float16, 4, {"size": 6144, "hidden": 7680, "heads": 2, "kv_heads": 1, "words": 340}),
    (Form("affine", 4, 32), mx.bfloat16, 4, {"size": 6144, "hidden": 7680, "heads": 2, "kv_heads": 1, "words": 340}),
    (FOUR, mx.float16, 8, {"size": 14336, "heads": 2, "kv_heads": 1, "words": 340}),
    (FOUR, mx.bfloat16, 3, {"size": 640, "hidden": 1344, "words": 333, "dim": 80, "heads": 8, "kv_heads": 2}),  # no whole tiles
    (Form("affine", 4, 32), mx.float16, 4, {"size": 640, "hidden": 1344, "words": 333, "dim": 80, "heads": 8, "kv_heads": 2}),
    (Form("affine", 4, 128), mx.bfloat16, 6, {"size": 1024, "hidden": 1536}),
    (EIGHT, mx.bfloat16, 5, {}),  # has none
    (FOUR, mx.bfloat16, 8, {"size": 2560, "hidden": 9728, "dim": 128, "heads": 32, "kv_heads": 8, "layers": 1}),  # one block on an SM
], ids=str)  # fmt: skip
def test_several_sequences(rng: np.random.Generator, form: Form, dtype: mx.Dtype, batch: int, sizes: dict[str, int]) -> None:
    model = make(rng, dtype, form, **{"size": 512, "hidden": 704, "layers": 2, **sizes})
    check(model, words(rng, batch, 24) % sizes.get("words", 500), dtype)
    fused = mlx_cuda.explain(mlx_cuda.decode_step, model).kernel
    assert ("GEMV + add" in fused) == is_many(form)
    assert ("norm + 2 GEMVs + swiglu" in fused) == (is_many(form) and sizes.get("size", 512) * batch * 2 <= 48 * 1024)


@pytest.mark.parametrize("form", [None, FOUR, Form("mxfp4", 4, 32)], ids=str)
@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=str)
@pytest.mark.parametrize(("gate", "fused"), [
    ("silu", "swiglu"), ("gelu", "geglu"), ("gelu_approx", "geglu_tanh"), ("gelu_fast_approx", ""), ("clamped", ""), ("of itself", ""),
])  # fmt: skip
def test_gates(rng: np.random.Generator, gate: str, fused: str, dtype: mx.Dtype, form: Form | None) -> None:
    model = make(rng, dtype, form, gate=gate)
    check(model, words(rng, 1, 40), dtype)
    parts = mlx_cuda.explain(mlx_cuda.decode_step, model).kernel.split(", ")
    assert ("2 norm + 2 GEMVs" + (f" + {fused}" if fused else "")) in parts


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("size", [256, 1000])
@pytest.mark.parametrize("form", [None, FOUR], ids=str)
@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=str)
def test_norms_before_the_residual(rng: np.random.Generator, dtype: mx.Dtype, form: Form | None, size: int, batch: int) -> None:
    size = size // form.group_size * form.group_size if form else size
    model = make(rng, dtype, form, norms_after=True, size=size)
    check(model, words(rng, batch, 40), dtype)
    assert "4 norm + add" in mlx_cuda.explain(mlx_cuda.decode_step, model).kernel.split(", ")


@pytest.mark.parametrize("form", FORMATS, ids=str)
@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=str)
def test_all_of_a_few_experts(rng: np.random.Generator, dtype: mx.Dtype, form: Form | None) -> None:
    """Nobody can choose others than float32 does."""
    model = make(rng, dtype, form, hidden=512, mixture=(4, 4, "qwen3_moe"))
    check(model, words(rng, 1, 60), dtype)
    fused = mlx_cuda.explain(mlx_cuda.decode_step, model).kernel
    assert "norm + 2 MoE GEMVs + swiglu" in fused
    assert "MoE GEMV + sum + add" in fused


def check_nearly_all(model: Model, tokens: mx.array) -> None:
    """Where two experts are nearly as good, rounding decides, so some steps may have another one: few with float16."""
    own, ours = (host(run(model, fresh(model), tokens, step(model))) for step in (as_it_is, replayed))
    assert mlx_cuda.explain(mlx_cuda.decode_step, model).engine == "replay"
    errors = [relative_error(*pair) for sequence in zip(ours, own, strict=True) for pair in zip(*sequence, strict=True)]
    assert np.median(errors) <= TOLERANCE[mx.bfloat16] / 2
    assert np.mean(np.array(errors) <= TOLERANCE[mx.bfloat16]) >= 0.9
    assert max(errors) <= 0.5


@pytest.mark.parametrize("routing", ["qwen3_moe", "olmoe", "mixtral"])
@pytest.mark.parametrize("mixture", [(16, 4), (40, 3), (128, 8)], ids=str)
def test_the_best_experts(rng: np.random.Generator, mixture: tuple[int, int], routing: str) -> None:
    model = make(rng, mx.float16, EIGHT, mixture=(*mixture, routing))
    check_nearly_all(model, words(rng, 1, 100))
    assert "router" in mlx_cuda.explain(mlx_cuda.decode_step, model).kernel


@pytest.mark.parametrize("batch", [1, 2, 3])
@pytest.mark.parametrize("form", [None, EIGHT], ids=str)
def test_the_best_expert(rng: np.random.Generator, form: Form | None, batch: int) -> None:
    check_nearly_all(make(rng, mx.float16, form, mixture=(4, 1, "mixtral")), words(rng, batch, 60))


def test_several_sequences_go_to_experts(rng: np.random.Generator) -> None:
    model = make(rng, mx.bfloat16, FOUR, mixture=(4, 4, "qwen3_moe"))
    check(model, words(rng, 3, 40), mx.bfloat16)


@pytest.mark.parametrize("keep", [0, 4])
def test_a_rotating_cache(rng: np.random.Generator, keep: int) -> None:
    check(make(rng, mx.float32), words(rng, 2, 120), mx.float32, lambda: RotatingKVCache(48, keep))


@pytest.mark.parametrize("window", [None, 9], ids=str)
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_attention_with_sinks(rng: np.random.Generator, dtype: mx.Dtype, window: int | None) -> None:
    check(make(rng, dtype, sinks=True, window=window), words(rng, 1, 60), dtype)


@pytest.mark.parametrize("layout", ["rows of all heads", "every other head", "part of more rows"])
def test_caches_that_lie_otherwise(rng: np.random.Generator, layout: str) -> None:
    """What they hold is copied to the capture's memory from where it lies, or put in order before."""
    lay: dict[str, Callable[[mx.array], mx.array]] = {
        "rows of all heads": lambda x: mx.contiguous(x.swapaxes(1, 2)).swapaxes(1, 2),
        "every other head": lambda x: mx.contiguous(mx.repeat(x, 2, axis=1))[:, ::2],
        "part of more rows": lambda x: mx.contiguous(mx.pad(x, [(0, 0), (0, 0), (3, 5), (0, 0)]))[:, :, 3:-5],
    }
    model, tokens = make(rng, mx.float32, heads=6, kv_heads=3), words(rng, 2, 30)

    def logits(step: Callable[..., mx.array]) -> mx.array:
        found = []
        for _ in range(2):  # the second conversation takes the first one's memory
            cache = fresh(model)
            model(tokens[:, :PROMPT], cache=cache)
            for each in cache:
                each.keys, each.values = lay[layout](each.keys), lay[layout](each.values)
            mx.eval([(each.keys, each.values) for each in cache])
            found += [step(tokens[:, i : i + 1], cache) for i in range(PROMPT, 30)]
            del cache, each
        return mx.concatenate(found, axis=1)

    assert relative_error(logits(replayed(model)), host(logits(as_it_is(model)))) < TOLERANCE[mx.float32]
    assert decoding_of(model).captured == 1


def test_a_window(rng: np.random.Generator) -> None:
    check(make(rng, mx.float32, window=9), words(rng, 2, 60), mx.float32)


def test_the_same_bits_after_a_trim(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(caches, "LEAST_CAPACITY", 64)  # one bucket: how attention is shared out depends on it
    model, tokens = make(rng, mx.bfloat16), words(rng, 1, 40)
    cache, step = fresh(model), replayed(model)
    first = run(model, cache, tokens, step)
    for each in cache:
        each.trim(12)
    again = mx.concatenate([step(tokens[:, i : i + 1], cache) for i in range(28, 40)], axis=1)
    assert mx.array_equal(first[:, -12:], again).item()
    assert len(decoding_of(model).sessions) == 1


def test_steps_of_several_tokens_between(rng: np.random.Generator) -> None:
    model, tokens = make(rng, mx.float32), words(rng, 1, 60)
    expected = host(run(model, fresh(model), tokens, as_it_is(model)))
    cache, step = fresh(model), replayed(model)
    run(model, cache, tokens[:, :20], step)
    model(tokens[:, 20:27], cache=cache)
    rest = mx.concatenate([step(tokens[:, i : i + 1], cache) for i in range(27, 60)], axis=1)
    assert relative_error(rest, expected[:, 27 - PROMPT :]) < TOLERANCE[mx.float32]
    assert len(decoding_of(model).sessions) == 1


def test_a_copy_of_a_cache_keeps_what_it_holds(rng: np.random.Generator) -> None:
    model, tokens = make(rng, mx.float32), words(rng, 1, 40)
    expected = host(run(model, fresh(model), tokens, as_it_is(model)))[:, -10:]
    cache, step = fresh(model), replayed(model)
    run(model, cache, tokens[:, :30], step)
    copies = copy.deepcopy(cache)
    for each in cache:
        each.trim(15)
    others = words(rng, 1, 20)
    mx.eval([step(others[:, i : i + 1], cache) for i in range(20)])
    for continued in (as_it_is(model), step):
        mine = copy.deepcopy(copies)
        logits = mx.concatenate([continued(tokens[:, i : i + 1], mine) for i in range(30, 40)], axis=1)
        assert relative_error(logits, expected) < TOLERANCE[mx.float32]


def test_what_a_cache_holds_can_be_read(rng: np.random.Generator) -> None:
    model, tokens = make(rng, mx.float32), words(rng, 1, 30)
    own, ours = fresh(model), fresh(model)
    run(model, own, tokens, as_it_is(model))
    run(model, ours, tokens, replayed(model))
    for one, other in zip(own, ours, strict=True):
        assert one.offset == other.offset
        keys = np.array(other.keys[..., : other.offset, :])  # without waiting for the logits
        assert relative_error(keys.astype(np.float64), host(one.keys[..., : one.offset, :])) < TOLERANCE[mx.float32]


def zero(model: Any, _: np.random.Generator) -> None:
    model.layers[1].down.weight = mx.zeros_like(model.layers[1].down.weight)


def another_layer(model: Any, rng: np.random.Generator) -> None:
    model.layers[0] = make(rng, mx.float32).layers[0]


@pytest.mark.parametrize("change", [zero, another_layer])
def test_other_weights_are_noticed(rng: np.random.Generator, change: Callable[[Any, np.random.Generator], None]) -> None:
    model, tokens = make(rng, mx.float32), words(rng, 1, 24)
    cache, step = fresh(model), replayed(model)
    before = run(model, cache, tokens, step)[:, -1:]
    change(model, rng)
    found = []
    for call in (step, step, as_it_is(model)):
        for each in cache:
            each.trim(1)
        found.append(host(call(tokens[:, -1:], cache)))
    assert relative_error(before, found[2]) > TOLERANCE[mx.float32]
    assert relative_error(found[0], found[2]) < TOLERANCE[mx.float32]
    assert relative_error(found[1], found[2]) < TOLERANCE[mx.float32]


@pytest.mark.parametrize("arrays", [
    lambda _, cache: [each.keys for each in cache],
    lambda model, _: list(dict(tree_flatten(model.parameters())).values()),
], ids=["caches", "weights"])  # fmt: skip
def test_what_the_host_reads_lies_elsewhere_then(rng: np.random.Generator, arrays: Callable[[Any, Any], list[mx.array]]) -> None:
    model, tokens = make(rng, mx.float32), words(rng, 1, 24)
    cache, step = fresh(model), replayed(model)
    run(model, cache, tokens, step)
    for array in arrays(model, cache):
        np.array(array)
    del array
    noise = [mx.full((1 << n,), np.nan) for n in range(8, 22) for _ in range(4)]
    mx.eval(noise)
    found = []
    for call in (step, step, as_it_is(model)):
        for each in cache:
            each.trim(1)
        found.append(host(call(tokens[:, -1:], cache)))
    assert relative_error(found[0], found[2]) < TOLERANCE[mx.float32]
    assert relative_error(found[1], found[2]) < TOLERANCE[mx.float32]


def fails_on_arrays(offset: Any) -> None:
    assert not isinstance(offset, mx.array)


@pytest.mark.parametrize("before", [int, fails_on_arrays])
def test_a_step_that_cannot_be_captured(rng: np.random.Generator, before: Callable[[Any], Any]) -> None:
    model, tokens = make(rng, mx.float32), words(rng, 1, 40)
    expected = host(run(model, fresh(model), tokens, as_it_is(model)))
    model.before = before
    with mlx_cuda.patch():
        logits = run(model, fresh(model), tokens, as_it_is(model))
    assert relative_error(logits, expected) < TOLERANCE[mx.float32]
    assert mlx_cuda.explain(mlx_cuda.decode_step, model).engine == "mlx"
    cache = fresh(model)
    model(tokens[:, :PROMPT], cache=cache)
    with pytest.raises(ValueError, match=r"\[decode_step\] The step cannot be captured"):
        mlx_cuda.decode_step(model, tokens[:, PROMPT : PROMPT + 1], cache)
    assert {each.offset for each in cache} == {PROMPT}


class Failing(Model):
    """Its last kernel does not compile, where its step is captured."""

    def __call__(self, inputs: mx.array, cache: Any = None) -> mx.array:
        captured = isinstance(cache[0].offset, mx.array)
        logits = super().__call__(inputs, cache)
        if not captured:
            return logits
        broken: Any = mx.fast.cuda_kernel(name="broken", input_names=["x"], output_names=["out"], source="this is no program;")
        shape = {"output_shapes": [logits.shape], "output_dtypes": [logits.dtype], "grid": (1, 1, 1), "threadgroup": (1, 1, 1)}
        return broken(inputs=[logits], **shape)[0]  # type: ignore[no-any-return]


def test_a_capture_that_fails_half_way_leaves_nothing_behind(rng: np.random.Generator) -> None:
    mx.random.seed(0)
    model, tokens = Failing(), words(rng, 1, 30)
    mx.eval(model.parameters())
    expected = host(run(model, fresh(model), tokens, as_it_is(model)))
    cache, memory = fresh(model), []
    model(tokens[:, :PROMPT], cache=cache)
    for _ in range(FAILURES):
        with pytest.raises(ValueError, match="capturing it failed"):
            mlx_cuda.decode_step(model, tokens[:, PROMPT : PROMPT + 1], cache)
        assert {each.offset for each in cache} == {PROMPT}
        gc.collect()
        mx.synchronize()
        memory.append(mx.get_active_memory())
    assert memory[-1] <= memory[0]
    logits = mx.concatenate([model(tokens[:, i : i + 1], cache=cache) for i in range(PROMPT, 30)], axis=1)
    assert relative_error(logits, expected) < TOLERANCE[mx.float32]


@pytest.mark.parametrize("drawn", ["here", "for every token"])
def test_random_numbers_are_noticed(rng: np.random.Generator, drawn: str) -> None:
    """Those of a key of the model's own too, which depend on no token."""
    model, tokens, key = make(rng, mx.float32), words(rng, 1, 40), mx.random.key(3)

    class Noisy(nn.RMSNorm):  # type: ignore[misc]
        def __call__(self, x: mx.array) -> mx.array:
            noise = mx.random.normal(x.shape[-1:], key=key if drawn == "here" else None)
            return super().__call__(x) + 0.1 * noise  # type: ignore[no-any-return]

    norm = Noisy(256)
    norm.weight = model.norm.weight
    model.norm = norm
    cache = fresh(model)
    model(tokens[:, :PROMPT], cache=cache)
    with pytest.raises(ValueError, match="draws random numbers"):
        mlx_cuda.decode_step(model, tokens[:, PROMPT : PROMPT + 1], cache)


def test_patch_replays_from_the_first_step_on(rng: np.random.Generator) -> None:
    model, tokens = make(rng, mx.bfloat16), words(rng, 1, 30)
    with mlx_cuda.patch():
        cache = fresh(model)
        model(tokens[:, :PROMPT], cache=cache)
        first = [host(model(tokens[:, i : i + 1], cache=cache)) for i in range(PROMPT, 30)]
        del cache
        again = host(run(model, fresh(model), tokens, as_it_is(model)))
        state = decoding_of(model)
        assert len(state.sessions) == state.captured == 1  # the memory of a cache that is gone serves the next
        assert state.replayed == 2 * len(first) - 1
        assert relative_error(again, np.concatenate(first, axis=1)) < TOLERANCE[mx.bfloat16]
    assert not hasattr(Model.__call__, "unpatched")


def test_two_models_in_two_threads(rng: np.random.Generator) -> None:
    models = [make(rng, mx.bfloat16, FOUR), make(rng, mx.bfloat16)]
    tokens = words(rng, 1, 50)
    expected = [host(run(model, fresh(model), tokens, as_it_is(model))) for model in models]
    found: list[Any] = [None, None]

    def work(index: int) -> None:
        with mx.stream(mx.new_stream(mx.gpu)):
            found[index] = host(run(models[index], fresh(models[index]), tokens, replayed(models[index])))

    threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for ours, theirs in zip(found, expected, strict=True):
        assert relative_error(ours, theirs) < TOLERANCE[mx.bfloat16]


@pytest.mark.parametrize(("tokens", "make_cache", "message"), [
    (mx.zeros((1, 2), mx.int32), KVCache, r"got tokens \[1, 2\]"),
    (mx.zeros((1, 1), mx.int32), dict, "its cache is a dict"),
])  # fmt: skip
def test_wrong_arguments(tokens: mx.array, make_cache: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        mlx_cuda.decode_step(Model(), tokens, [make_cache(), make_cache()])
