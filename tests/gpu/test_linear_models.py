"""mlx-lm's models with linear attention: their prompts and steps, patched and as they are."""

from __future__ import annotations

import copy
import importlib
from typing import Any

import mlx.core as mx
import mlx_cuda
import numpy as np
import pytest
from mlx.utils import tree_map
from mlx_cuda._mlx_lm import caches
from mlx_cuda._mlx_lm.models import decoding_of

from .mlx_lm_parts import part
from .reference import Array
from .support import host, relative_error

nn: Any = importlib.import_module("mlx.nn")  # whose names mypy does not see

pytestmark = pytest.mark.gpu

TOLERANCE = 6e-2  # of logits in bfloat16 after four layers
LINEAR = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 64, "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4, "full_attention_interval": 4,
}  # fmt: skip
COMMON = {
    "hidden_size": 256, "num_hidden_layers": 4, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 64, "vocab_size": 512, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
}  # fmt: skip
EXPERTS = {  # all of them, so that no rounding chooses another one
    "num_experts": 4, "num_experts_per_tok": 4, "decoder_sparse_step": 1, "shared_expert_intermediate_size": 128, "mlp_only_layers": [],
    "moe_intermediate_size": 128, "norm_topk_prob": True,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "qwen3_5": {**COMMON, **LINEAR},
    "qwen3_next": {
        **COMMON, **LINEAR, **EXPERTS, "rope_theta": 1e6, "partial_rotary_factor": 0.25, "max_position_embeddings": 4096,
    },
    "kimi_linear": {
        **COMMON, "rope_theta": 1e4, "model_max_length": 4096, "num_experts": 4, "moe_intermediate_size": 128, "kv_lora_rank": 64,
        "qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "v_head_dim": 64, "num_experts_per_token": 4, "first_k_dense_replace": 1,
        "linear_attn_config": {
            "kda_layers": [1, 2, 3], "full_attn_layers": [4], "num_heads": 4, "head_dim": 64, "short_conv_kernel_size": 4,
        },
    },
    "mamba2": {
        "num_heads": 8, "head_dim": 64, "vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "state_size": 64,
        "num_hidden_layers": 3, "layer_norm_epsilon": 1e-6, "conv_kernel": 4, "n_groups": 2, "use_bias": False, "use_conv_bias": True,
        "tie_word_embeddings": False, "time_step_limit": (0.001, 100.0), "time_step_rank": "auto",
    },
}  # fmt: skip


def make(name: str) -> Any:
    try:
        module = part(f"models.{name}")
    except ImportError as error:
        pytest.skip(f"mlx_lm.models.{name} cannot be imported: {error}")
    mx.random.seed(3)
    model = module.Model(module.ModelArgs.from_dict({"model_type": name, **MODELS[name]}))
    model.update(tree_map(lambda weight: weight.astype(mx.bfloat16), model.parameters()))
    mx.eval(model.parameters())
    return model


def logits(model: Any, prompt: mx.array, tokens: list[int]) -> tuple[Array, Any]:
    """After the prompt and each of the tokens, and the cache."""
    cache = part("models.cache").make_prompt_cache(model)
    found = [model(prompt, cache=cache)[:, -1:]]
    for token in tokens:
        found.append(model(mx.full((prompt.shape[0], 1), token), cache=cache))
        mx.eval(found[-1])
    return host(mx.concatenate(found, axis=1)), cache


@pytest.fixture(autouse=True)
def _small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(caches, "LEAST_CAPACITY", 128)
    monkeypatch.setattr(caches, "HEADROOM", 8)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("name", MODELS)
def test_patched_models_give_the_same(rng: np.random.Generator, name: str, batch: int) -> None:
    model, prompt, tokens = make(name), mx.array(rng.integers(0, 512, (batch, 100))), rng.integers(0, 512, 60).tolist()
    theirs, _ = logits(model, prompt, tokens)
    with mlx_cuda.patch():
        ours, cache = logits(model, prompt, tokens)
        choice = mlx_cuda.explain(mlx_cuda.decode_step, model)
        again, _ = logits(model, prompt, tokens)
    assert relative_error(ours, theirs) < TOLERANCE
    assert choice.engine == "replay", choice.reason
    assert "LinearAttention" in choice.kernel
    assert "CacheReplace" in choice.kernel
    assert "short convolution + silu" in choice.kernel
    assert ("norm x scale" in choice.kernel) == (name != "mamba2")
    assert relative_error(again, theirs) < TOLERANCE  # over what the first conversation captured
    for each in cache:
        if type(each).__name__ == "ArraysCache":
            assert all(np.isfinite(host(array)).all() for array in each.cache)


@pytest.mark.parametrize("name", MODELS)
def test_what_is_kept_of_a_cache_stays_as_it_is(rng: np.random.Generator, name: str) -> None:
    """The state is written where it lies, but not where somebody has a copy of it, which shares its memory."""
    model, prompt = make(name), mx.array(rng.integers(0, 512, (1, 20)))
    with mlx_cuda.patch():
        _, cache = logits(model, prompt, [5, 6, 7, 8])
        linear = next(each for each in cache if type(each).__name__ == "ArraysCache")
        kept = [copy.copy(array) for array in linear.cache]
        before = [host(array + 0) for array in kept]  # what the host reads itself moves, and would be noticed by that
        for token in (1, 2, 3, 4):
            mx.eval(model(mx.array([[token]]), cache=cache))
        assert all(np.array_equal(host(array), then) for array, then in zip(kept, before, strict=True))
        assert not np.array_equal(host(linear.cache[-1]), before[-1])


def test_what_is_extracted_from_a_batch_stays_as_it_is(rng: np.random.Generator) -> None:
    model, prompt = make("qwen3_5"), mx.array(rng.integers(0, 512, (3, 20)))
    with mlx_cuda.patch():
        _, cache = logits(model, prompt, [5, 6, 7, 8])
        linear = next(each for each in cache if type(each).__name__ == "ArraysCache")
        one = linear.extract(1)
        before = [host(array[1:2] + 0) for array in linear.cache]
        for token in (1, 2, 3, 4):
            mx.eval(model(mx.full((3, 1), token), cache=cache))
    assert all(np.array_equal(host(array), then) for array, then in zip(one.cache, before, strict=True))
    assert not np.array_equal(host(linear.cache[-1][1:2]), before[-1])


@pytest.mark.parametrize("name", MODELS)
def test_in_a_loop_of_one_s_own(rng: np.random.Generator, name: str) -> None:
    model, prompt, tokens = make(name), mx.array(rng.integers(0, 512, (1, 30))), rng.integers(0, 512, 12).tolist()
    theirs, _ = logits(model, prompt, tokens)
    cache = part("models.cache").make_prompt_cache(model)
    ours = [model(prompt, cache=cache)[:, -1:]]
    ours.extend(mlx_cuda.decode_step(model, mx.array([[token]]), cache) for token in tokens)
    assert relative_error(host(mx.concatenate(ours, axis=1)), theirs) < TOLERANCE
    assert "LinearAttention" in mlx_cuda.explain(mlx_cuda.decode_step, model).kernel


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_next", "kimi_linear"])
def test_batches_whose_sequences_join_and_leave(rng: np.random.Generator, name: str) -> None:
    """Rows in pages, and states in memory that captures for all sizes share."""
    model, tokens = make(name), mx.array(rng.integers(0, 512, (3, 80)))

    def batch(lengths: list[int]) -> list[Any]:
        caches = [part("models.cache").make_prompt_cache(model) for _ in lengths]
        for i, (own, length) in enumerate(zip(caches, lengths, strict=True)):
            model(tokens[i : i + 1, :length], cache=own)
        return [layer[0].merge(list(layer)) for layer in zip(*caches, strict=True)]

    def conversation() -> Array:
        cache = batch([40, 21, 33])
        found = [model(tokens[:, at : at + 1], cache=cache) for at in range(40, 46)]
        left = [each.extract(1) for each in cache]
        for each in cache:
            each.filter([2, 0])
        found += [model(tokens[:2, at : at + 1], cache=cache) for at in range(46, 50)]
        other = batch([17])
        found.append(model(tokens[:1, 17:18], cache=other))
        for each, more in zip(cache, other, strict=True):
            each.extend(more)
        found += [model(tokens[:, at : at + 1], cache=cache) for at in range(50, 56)]
        found.append(model(tokens[:1, 60:61], cache=left))
        return host(mx.concatenate(found))

    theirs = conversation()
    with mlx_cuda.patch():
        ours = conversation()
        batches = decoding_of(model).batches
    assert relative_error(ours, theirs) < TOLERANCE
    assert batches.pool is not None
    assert batches.pool.states
    assert {session.batch for session in batches.sessions} == {1, 2, 4}


class Convolution(nn.Module):  # type: ignore[misc]
    """A short convolution of two sequences, to each of which something else is added."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(512, 256)
        self.conv = nn.Conv1d(256, 256, 4, groups=256, bias=False)
        self.added = mx.random.normal((2, 256))
        self.layers = [self.conv]

    def __call__(self, tokens: mx.array, cache: Any) -> mx.array:
        x = self.embedding(tokens)
        kept = cache[0][0]
        both = mx.concatenate([mx.zeros((2, 3, 256), x.dtype) if kept is None else kept, x], axis=1)
        cache[0][0] = mx.contiguous(both[:, -3:])
        y = nn.silu(self.conv(both).reshape(1, 2, 256) + self.added).reshape(2, 1, 256)
        return self.embedding.as_linear(y)  # type: ignore[no-any-return]


def test_what_is_added_to_sequences_is_no_bias_of_channels(rng: np.random.Generator) -> None:
    mx.random.seed(3)
    model = Convolution()
    model.update(tree_map(lambda weight: weight.astype(mx.bfloat16), model.parameters()))
    tokens = rng.integers(0, 512, (12, 2, 1))
    found = []
    for step in (model, lambda *arguments: mlx_cuda.decode_step(model, *arguments)):
        cache = [part("models.cache").ArraysCache(1)]
        logits = [model(mx.array(tokens[0]), cache)]
        logits.extend(step(mx.array(each), cache) for each in tokens[1:])
        found.append(host(mx.concatenate(logits, axis=1)))
    assert relative_error(found[1], found[0]) < 1e-2
    choice = mlx_cuda.explain(mlx_cuda.decode_step, model)
    assert choice.engine == "replay", choice.reason
    assert "short convolution" in choice.kernel
    assert "silu" not in choice.kernel
