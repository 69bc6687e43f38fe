"""Speculative decoding with mlx-lm where the window of some layers is full: the tokens are those of the model alone."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import mlx.core as mx
import pytest
from mlx_cuda._mlx_lm import places

pytest.importorskip("mlx_lm")
generate: Any = importlib.import_module("mlx_lm.generate")
cache_module: Any = importlib.import_module("mlx_lm.models.cache")
gemma: Any = importlib.import_module("mlx_lm.models.gemma3_text")

pytestmark = pytest.mark.usefixtures("on_the_cpu")

WINDOW, COUNT = 8, 40


@pytest.fixture(autouse=True)
def replaced() -> Iterator[None]:
    assert places.put()
    yield
    places.take_away()


def make_model(seed: int, window: int = WINDOW) -> Any:
    """Two layers of a window, and one that sees all."""
    mx.random.seed(seed)
    sizes = {"hidden_size": 32, "num_hidden_layers": 3, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
    args = gemma.ModelArgs(
        model_type="gemma3_text", head_dim=16, rms_norm_eps=1e-6, vocab_size=48, sliding_window=window, sliding_window_pattern=3, **sizes
    )
    model = gemma.Model(args)
    mx.eval(model.parameters())
    return model


def alone(model: Any, prompt: mx.array, count: int = COUNT) -> list[int]:
    """What the model gives token by token."""
    return [int(token) for token, _ in generate.generate_step(prompt, model, max_tokens=count)]


def drafted(model: Any, draft: Any, prompt: mx.array, **options: Any) -> list[int]:
    options = {"num_draft_tokens": 3, "max_tokens": COUNT} | options
    return [int(token) for token, _, _ in generate.speculative_generate_step(prompt, model, draft, **options)]


@pytest.mark.parametrize("length", [2, WINDOW, 3 * WINDOW])
@pytest.mark.parametrize("drafts", [1, 3, 9])
def test_tokens_are_those_of_the_model(length: int, drafts: int) -> None:
    model, prompt = make_model(0), mx.arange(length) % 48
    for draft in make_model(1), make_model(1, window=5), model:  # whose drafts are wrong, and right
        assert drafted(model, draft, prompt, num_draft_tokens=drafts) == alone(model, prompt)


def test_mlx_lm_alone_gives_other_tokens() -> None:
    """So that this file goes once mlx-lm is right."""
    model, prompt = make_model(0), mx.arange(3 * WINDOW) % 48
    places.take_away()
    assert drafted(model, make_model(1), prompt) != alone(model, prompt)


def test_the_cache_goes_on_as_if_there_had_been_no_drafts() -> None:
    model, draft, prompt = make_model(0), make_model(1), mx.arange(2 * WINDOW) % 48
    caches = [*cache_module.make_prompt_cache(model), *cache_module.make_prompt_cache(draft)]
    some = drafted(model, draft, prompt, prompt_cache=caches, max_tokens=20)
    own, offset = caches[: len(model.layers)], 2 * WINDOW + 19  # the last token has not been seen
    assert {cache.offset for cache in own} == {offset}
    rest = [int(token) for token, _ in generate.generate_step(mx.array(some[-1:]), model, prompt_cache=own, max_tokens=20)]
    assert some + rest == alone(model, prompt, 40)


def test_other_caches_are_mlx_lms() -> None:
    for kind in (partial(cache_module.ArraysCache, 2), cache_module.KVCache):
        cache, other = [kind()], [kind()]
        if hasattr(cache[0], "update_and_fetch"):
            for each in cache, other:
                each[0].update_and_fetch(mx.zeros((1, 1, 5, 8)), mx.zeros((1, 1, 5, 8)))
        theirs = cache_module.trim_prompt_cache(other, 2)
        assert generate.trim_prompt_cache(cache, 2) == theirs
        assert getattr(cache[0], "offset", None) == getattr(other[0], "offset", None)
