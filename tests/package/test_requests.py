"""mlx-lm's ``BatchGenerator`` over captured steps, on the CPU: requests come and go, and what they leave behind goes on."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_cuda._mlx_lm import models
from mlx_cuda._mlx_lm.models import Decoding

from benchmarks.mlx_lm_parts import part

from ..gpu.test_linear_models import COMMON, LINEAR
from .sessions_on_cpu import set_both

try:
    generate = part("generate")
except ImportError as error:
    pytest.skip(f"mlx_lm.generate cannot be imported: {error}", allow_module_level=True)

CONFIGS: dict[str, dict[str, Any]] = {
    "gemma3_text": {
        "hidden_size": 32, "num_hidden_layers": 3, "intermediate_size": 32, "head_dim": 16, "vocab_size": 100, "num_attention_heads": 2,
        "num_key_value_heads": 1, "sliding_window": 20, "sliding_window_pattern": 3, "query_pre_attn_scalar": 16,
    },
    "qwen3_5": {**COMMON, **LINEAR, "full_attention_interval": 2},
}  # fmt: skip
PROMPTS = [np.random.default_rng(1).integers(0, 100, count).tolist() for count in (30, 2, 25, 9)]
WANTED = [25, 12, 6, 20]


def served(model: Any) -> tuple[list[list[int]], list[list[Any]]]:
    """What each request says, of which two go on together, and the caches that they have left behind before."""
    generator = generate.BatchGenerator(model, completion_batch_size=4, prefill_batch_size=2)
    said: dict[int, list[int]] = {}
    left: dict[int, list[Any]] = {}

    def take() -> None:
        for response in generator.next_generated():
            said[response.uid].append(response.token)
            if response.finish_reason:
                left[response.uid] = response.prompt_cache

    for prompt, count in zip(PROMPTS, WANTED, strict=True):
        said |= {number: [] for number in generator.insert([prompt], max_tokens=[count])}
        for _ in range(4):
            take()
    while len(left) < len(PROMPTS):
        take()
    caches = [left[number] for number in sorted(left)]
    more = generator.insert([[1, 2, 3], [5]], max_tokens=[8, 8], caches=copy.deepcopy(caches[:2]))
    said |= {number: [] for number in more}
    while not {*more} <= left.keys():
        take()
    return [said[number] for number in sorted(said)], caches


@pytest.mark.parametrize("name", CONFIGS)
def test_requests_that_come_and_go(decoding: Decoding, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    for each, value in {"PAGE": 8, "AHEAD": 1, "LEAST_ROWS": 8, "HEADROOM": 40, "EXPECTED": 4}.items():
        set_both(monkeypatch, each, value)
    module = part(f"models.{name}")
    mx.random.seed(3)
    model = module.Model(module.ModelArgs.from_dict({"model_type": name, **CONFIGS[name]}))
    mx.eval(model.parameters())
    own: Callable[..., mx.array] = type(model).__call__

    def call(model: Any, inputs: mx.array, cache: Any = None, **options: Any) -> mx.array:
        if cache is None or inputs.shape[1] > 1 or getattr(models._inside, "a_step", False):
            return own(model, inputs, cache=cache, **options)
        logits: mx.array = decoding.step(model, own, inputs, cache, at_once=False)
        return logits

    expected, theirs = served(model)
    monkeypatch.setattr(type(model), "__call__", call)
    said, ours = served(model)
    assert said == expected
    assert decoding.replayed > 30, decoding.reason
    assert not decoding.errors
    for one, other in zip([each for cache in ours for each in cache], [each for cache in theirs for each in cache], strict=True):
        assert type(one) is type(other)
        arrays = [(each.cache if hasattr(each, "cache") else [each.keys, each.values]) for each in (one, other)]
        for array, wanted in zip(*arrays, strict=True):
            assert array.shape == wanted.shape
            assert mx.allclose(array, wanted, atol=1e-3).item()
