"""Attention to quantised keys and values: the kernel that reads them as they are packed, against float64, and mlx-lm's cache of them."""

from __future__ import annotations

import random
from functools import partial
from typing import Any, Literal

import mlx.core as mx
import mlx_cuda
import numpy as np
import pytest
from mlx.utils import tree_map
from mlx_cuda._mlx_lm import caches

from . import reference
from .mlx_lm_parts import part
from .reference import Array
from .support import TOLERANCE, assert_close, assert_fused, host, normal, poison, relative_error

pytestmark = pytest.mark.gpu

FORMS = [("affine", group, bits) for bits in (4, 8) for group in (32, 64, 128)] + [("mxfp4", 32, 4), ("mxfp8", 32, 8), ("nvfp4", 16, 4)]
forms = pytest.mark.parametrize(("mode", "group", "bits"), FORMS, ids=str)
attend: Any = mlx_cuda.quantized_attention  # overloads do not let options through


def taken(dtype: mx.Dtype, mode: str) -> bool:
    """Whether the kernel takes it."""
    return dtype == mx.bfloat16 or mode == "affine"


def packed(of: mx.array, mode: str, group: int, bits: int) -> tuple[tuple[mx.array, ...], mx.array]:
    """An array quantised, and the numbers that it has then."""
    parts = tuple(mx.quantize(of, group_size=group, bits=bits, mode=mode))
    biases = parts[2] if len(parts) > 2 else None
    return parts, mx.dequantize(parts[0], parts[1], biases, group_size=group, bits=bits, mode=mode, dtype=of.dtype)


def strided(parts: tuple[mx.array, ...], chance: random.Random) -> tuple[mx.array, ...]:
    """The same numbers in memory that is not one piece: a slice of a longer cache, or heads after rows."""
    way = chance.randrange(3)
    if way == 1:
        grown = [mx.concatenate([part, mx.full((*part.shape[:2], 5, part.shape[3]), 255, part.dtype)], axis=2) for part in parts]
        mx.eval(grown)
        return tuple(part[:, :, :-5] for part in grown)
    if way == 2:
        turned = [mx.contiguous(part.swapaxes(1, 2)) for part in parts]
        mx.eval(turned)
        return tuple(part.swapaxes(1, 2) for part in turned)
    return parts


@forms
@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=str)
def test_random_calls(rng: np.random.Generator, dtype: mx.Dtype, mode: str, group: int, bits: int) -> None:
    chance = random.Random(int(rng.integers(2**31)))  # noqa: S311
    for _ in range(16):
        dims = [dim for dim in ((64, 64), (128, 128), (96, 96), (192, 128), (256, 256), (224, 160)) if not any(d % group for d in dim)]
        (dim, value_dim), kv_heads, groups = chance.choice(dims), chance.choice((1, 2, 3)), chance.choice((1, 4, 7, 16))
        t = chance.choice([t for t in (1, 1, 2, 5, 16) if t * groups <= 64])
        batch, length = chance.choice((1, 2, 5)), chance.choice((1, 15, 16, 17, 130, 700, 3000))
        q = normal(rng, (batch, kv_heads * groups, t, dim), dtype)
        k, k_values = packed(normal(rng, (batch, kv_heads, length, dim), dtype, 2.0), mode, group, bits)
        v, v_values = packed(normal(rng, (batch, kv_heads, length, value_dim), dtype), mode, group, bits)
        options: dict[str, Any] = {}
        bias: dict[str, Any] = {}
        if chance.random() < 0.3 and t <= length:
            options["mask"], bias["window"] = "causal", (-1, 0)
        if chance.random() < 0.3:
            options["window_size"] = 40
            bias["window"] = (40 if length > 40 else -1, bias.get("window", (-1, -1))[1])
        if chance.random() < 0.3:
            lengths = rng.integers(0, length + 1, batch)
            options["lengths"], bias["ends"] = mx.array(lengths, mx.int32), lengths
        if chance.random() < 0.2:
            starts = rng.integers(0, length, batch)
            options["left_padding"], bias["starts"] = mx.array(starts, mx.int32), starts
        hidden = reference.bias_of(t, length, **bias)
        if chance.random() < 0.3 and "mask" not in options:
            seen = rng.random((batch, 1, t, length)) < 0.7
            options["mask"], hidden = mx.array(seen), hidden + np.where(seen, 0, -np.inf)
        softcap = chance.choice((0.0, 0.0, 5.0))
        sinks = normal(rng, (kv_heads * groups,), dtype) if chance.random() < 0.2 else None
        form: dict[str, Any] = {"mode": mode, "group_size": group, "bits": bits}
        asked = {**form, **options, "softcap": softcap or None, "sinks": sinks}
        k, v = strided(k, chance), strided(v, chance)
        poison(partial(attend, q * np.nan, k, v, **form), (*q.shape[:3], value_dim), dtype)
        out, lse = attend(q, k, v, return_lse=True, **asked)
        about = (dim, value_dim, kv_heads, groups, t, batch, length, asked)
        if taken(dtype, mode):
            assert_fused(out, "QuantizedAttention")
        sunk = None if sinks is None else host(sinks)
        numbers = (host(q), host(k_values), host(v_values))
        done = reference.attend(*numbers, scale=dim**-0.5, bias=hidden, softcap=softcap, sinks=sunk)
        assert_close(out, done.out, tolerance=TOLERANCE[dtype], size=done.size, about=about)
        there = np.isfinite(done.lse)
        assert np.array_equal(np.isfinite(host(lse)), there), about
        assert np.allclose(host(lse)[there], done.lse[there], rtol=2e-3, atol=2e-2), about


@forms
def test_pages(rng: np.random.Generator, mode: str, group: int, bits: int) -> None:
    """Pages in any order, with garbage where no keys are, give what one piece gives."""
    for size in (16, 48, 64, 24, 7):
        batch, kv_heads, longest, dim = 3, 2, 300, 128
        lengths = np.array([300, 0, 131])
        columns = -(-longest // size) + 1
        table = rng.permutation(batch * columns).reshape(batch, columns)
        q = normal(rng, (batch, 8, 2, dim), mx.bfloat16)
        pairs = [packed(normal(rng, (batch, kv_heads, longest, dim), mx.bfloat16), mode, group, bits) for _ in range(2)]
        pages = []
        for parts, _ in pairs:
            own: list[mx.array] = []
            for part_ in parts:
                rows = np.array(part_.view(mx.uint16) if part_.dtype == mx.bfloat16 else part_)
                memory = np.full((batch * columns, kv_heads, size, rows.shape[-1]), np.iinfo(rows.dtype).max, rows.dtype)
                for b, length in enumerate(lengths):
                    for place in range(length):
                        memory[table[b, place // size], :, place % size] = rows[b, :, place]
                own.append(mx.array(memory).view(part_.dtype) if part_.dtype == mx.bfloat16 else mx.array(memory))
            mx.eval(own)
            pages.append(tuple(own))
        given: dict[str, Any] = {"mode": mode, "group_size": group, "bits": bits, "lengths": mx.array(lengths, mx.int32)}
        given["block_table"] = mx.array(table, mx.int32)
        out = attend(q, *pages, **given)
        assert mlx_cuda.explain(attend, q, *pages, **given).engine == ("fallback" if size % 16 else "decode")
        bias = reference.bias_of(2, longest, window=(-1, 0), ends=lengths)
        done = reference.attend(host(q), *(host(values) for _, values in pairs), scale=dim**-0.5, bias=bias)
        assert_close(out, done.out, tolerance=TOLERANCE[mx.bfloat16], about=size)


@pytest.mark.parametrize("bits", [4, 8])
def test_derivatives_and_batches_of_calls(rng: np.random.Generator, bits: int) -> None:
    q = normal(rng, (2, 8, 1, 64), mx.bfloat16)
    k, k_values = packed(normal(rng, (2, 2, 90, 64), mx.bfloat16), "affine", 64, bits)
    v, v_values = packed(normal(rng, (2, 2, 90, 64), mx.bfloat16), "affine", 64, bits)
    cotangent = normal(rng, (2, 8, 1, 64), mx.bfloat16)
    _, (gradient,) = mx.vjp(lambda q: attend(q, k, v, group_size=64, bits=bits), [q], [cotangent])
    wanted = reference.attention_vjp(host(q), host(k_values), host(v_values), host(cotangent), scale=0.125)[0]
    assert relative_error(gradient, wanted) < 3e-2
    several = mx.stack([q, q * 2])
    out = mx.vmap(lambda q: attend(q, k, v, group_size=64, bits=bits))(several)
    for each, of in zip(out, several, strict=True):
        assert relative_error(each, reference.attention(host(of), host(k_values), host(v_values), scale=0.125)) < TOLERANCE[mx.bfloat16]


@pytest.mark.parametrize("queries", [100, 600])
def test_prompts_are_computed_from_the_numbers(rng: np.random.Generator, queries: int) -> None:
    q = normal(rng, (1, 8, queries, 128), mx.bfloat16)
    k, k_values = packed(normal(rng, (1, 2, 900, 128), mx.bfloat16), "affine", 64, 4)
    v, v_values = packed(normal(rng, (1, 2, 900, 128), mx.bfloat16), "affine", 64, 4)
    out = attend(q, k, v, group_size=64, bits=4, mask="causal")
    wanted = reference.attention(host(q), host(k_values), host(v_values), scale=128**-0.5, causal=True)
    assert_close(out, wanted, tolerance=TOLERANCE[mx.bfloat16])


# ------------------------------------------------------------------------------------------------------------------ mlx-lm
SIZES = {
    "hidden_size": 256, "num_hidden_layers": 3, "intermediate_size": 512, "num_attention_heads": 8, "num_key_value_heads": 2,
    "head_dim": 64, "vocab_size": 512, "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "rope_theta": 1e6,
    "max_position_embeddings": 4096,
}  # fmt: skip


def make() -> Any:
    module = part("models.qwen3")
    mx.random.seed(3)
    model = module.Model(module.ModelArgs.from_dict({"model_type": "qwen3", **SIZES}))
    model.update(tree_map(lambda weight: weight.astype(mx.bfloat16), model.parameters()))
    mx.eval(model.parameters())
    return model


def logits(model: Any, prompt: mx.array, tokens: list[int], bits: int, group: int) -> tuple[Array, Any]:
    cache = [each.to_quantized(group_size=group, bits=bits) for each in part("models.cache").make_prompt_cache(model)]
    found = [model(prompt, cache=cache)[:, -1:]]
    for token in tokens:
        found.append(model(mx.full((prompt.shape[0], 1), token), cache=cache))
        mx.eval(found[-1])
    return host(mx.concatenate(found, axis=1)), cache


def by_numbers(q: mx.array, k: Any, v: Any, scale: float, mask: Any = None, group_size: int = 64, bits: int = 8) -> mx.array:
    """What mlx-lm's attention to a quantised cache means: its own raises an error for a batch of prompts."""
    keys, values = (mx.dequantize(w, scales, biases, group_size=group_size, bits=bits) for w, scales, biases in (k, v))
    return mx.fast.scaled_dot_product_attention(q, keys, values, scale=scale, mask=mask)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize(("bits", "group"), [(4, 64), (8, 64), (8, 32), (2, 64)])
def test_mlx_lm_replays_steps_with_its_quantised_cache(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, bits: int, group: int, batch: int
) -> None:
    monkeypatch.setattr(caches, "LEAST_CAPACITY", 128)
    monkeypatch.setattr(caches, "HEADROOM", 8)
    model, prompt, tokens = make(), mx.array(rng.integers(0, 512, (batch, 100))), rng.integers(0, 512, 60).tolist()
    with monkeypatch.context() as replaced:
        replaced.setattr(part("models.base"), "quantized_scaled_dot_product_attention", by_numbers)
        theirs, cache = logits(model, prompt, tokens, bits, group)
    with mlx_cuda.patch():
        ours, our_cache = logits(model, prompt, tokens, bits, group)
        choice = mlx_cuda.explain(mlx_cuda.decode_step, model)
        again, _ = logits(model, prompt, tokens, bits, group)
    tolerance = 6e-2 if bits > 2 else 0.2  # a rounding of a key becomes one of its last bit
    assert relative_error(ours, theirs) < tolerance
    assert relative_error(again, theirs) < tolerance
    assert choice.engine == "replay", choice.reason
    assert ("QuantizedAttention" in choice.kernel) == ("head norms + rope + quantized append" in choice.kernel) == (bits > 2)
    assert our_cache[0].offset == cache[0].offset
    for own, other in zip(our_cache, cache, strict=True):
        for one, two in zip(own.keys_and_values(), other.keys_and_values(), strict=True):
            numbers = [host(mx.dequantize(w, scales, biases, group_size=group, bits=bits)) for w, scales, biases in (one, two)]
            assert relative_error(numbers[0], numbers[1]) < tolerance
    trimmed = our_cache[0].trim(20)
    assert trimmed == 20
    assert [each.shape[2] for each in our_cache[0].keys_and_values()[0]] == [our_cache[0].offset] * 3


@pytest.mark.parametrize(("bits", "group"), [(4, 64), (8, 64), (8, 32)])
def test_batches_in_quantised_pages(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, bits: Literal[4, 8], group: Literal[32, 64]
) -> None:
    """Each sequence of a batch, which others leave, has the logits that it has alone with a cache that was quantised after its prompt."""
    model, tokens = make(), rng.integers(0, 512, 90).tolist()
    prompts = [mx.array(rng.integers(0, 512, (1, length))) for length in (100, 31, 64)]
    theirs = []
    with monkeypatch.context() as replaced:
        replaced.setattr(part("models.base"), "quantized_scaled_dot_product_attention", by_numbers)
        for prompt in prompts:
            cache = part("models.cache").make_prompt_cache(model)
            model(prompt, cache=cache)
            cache = [each.to_quantized(group_size=group, bits=bits) for each in cache]
            theirs.append(host(mx.concatenate([model(mx.array([[token]]), cache=cache) for token in tokens], axis=1))[0])
    with mlx_cuda.patch(kv_bits=bits, kv_group_size=group):
        own = [part("models.cache").make_prompt_cache(model) for _ in prompts]
        for prompt, each in zip(prompts, own, strict=True):
            model(prompt, cache=each)
        batch: Any = [part("models.cache").BatchKVCache.merge(list(layer)) for layer in zip(*own, strict=True)]
        first = host(mx.concatenate([model(mx.full((3, 1), token), cache=batch) for token in tokens[:60]], axis=1))
        for layer in batch:
            layer.filter([2, 0])
        rest = host(mx.concatenate([model(mx.full((2, 1), token), cache=batch) for token in tokens[60:]], axis=1))
        choice = mlx_cuda.explain(mlx_cuda.decode_step, model)
        left = [layer.extract(1) for layer in batch]
    for sequence, at in enumerate((1, None, 0)):
        ours = first[sequence] if at is None else np.concatenate([first[sequence], rest[at]])
        assert relative_error(ours, theirs[sequence][: len(ours)]) < 6e-2
    assert "QuantizedAttention" in choice.kernel
    assert "head norms + rope + quantized append" in choice.kernel
    assert left[0].keys.shape[2] == left[0].offset == 100 + 90
