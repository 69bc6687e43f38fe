"""Captured steps follow every change of their model: mlx-lm's own models, changed at one place at a time."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx_cuda
import pytest
from mlx.nn.layers.quantized import quantize
from mlx.utils import tree_map
from mlx_cuda._mlx_lm import models
from mlx_cuda._mlx_lm.models import decoding_of

from .changes import changes
from .mlx_lm_parts import SIZES, part
from .test_linear_models import COMMON, EXPERTS, LINEAR

pytestmark = pytest.mark.gpu

TOLERANCE = 6e-2  # of logits in bfloat16 after two layers
SMALL: dict[str, Any] = {**SIZES, "hidden_size": 128, "intermediate_size": 128}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("llama", SMALL),
    "Qwen 3": ("qwen3", SMALL),
    "Gemma 3": ("gemma3_text", {**SMALL, "sliding_window": 64, "sliding_window_pattern": 2}),
    "mixture of experts": ("qwen3_moe", {**SMALL, **EXPERTS, "max_position_embeddings": 4096}),
    "gated delta": ("qwen3_5", {**COMMON, **LINEAR, "num_hidden_layers": 2, "full_attention_interval": 2}),
    "LoRA": ("llama", SMALL),
    "quantized": ("qwen3", SMALL),
}


def make(family: str) -> Any:
    name, sizes = FAMILIES[family]
    try:
        module = part(f"models.{name}")
    except ImportError as error:
        pytest.skip(f"mlx_lm.models.{name} cannot be imported: {error}")
    mx.random.seed(3)
    model = module.Model(module.ModelArgs.from_dict(sizes | {"model_type": name}))
    if family == "LoRA":
        adapter = part("tuner.lora").LoRALinear
        for layer in model.layers:
            layer.self_attn.q_proj = adapter.from_base(layer.self_attn.q_proj)
            layer.self_attn.q_proj.lora_b = mx.random.normal(layer.self_attn.q_proj.lora_b.shape)
    model.update(tree_map(lambda weight: weight.astype(mx.bfloat16), model.parameters()))
    if family == "quantized":
        quantize(model, bits=4, group_size=64)
    mx.eval(model.parameters())
    model.eval()
    return model


def outcome(step: Callable[[], mx.array]) -> mx.array | type[Exception]:
    try:
        logits = step().astype(mx.float32)
        mx.eval(logits)
    except Exception as error:
        return type(error)
    return logits


def distance(one: mx.array | type[Exception], other: mx.array | type[Exception]) -> float:
    if not isinstance(one, mx.array) or not isinstance(other, mx.array):
        return 0 if isinstance(one, type) and isinstance(other, type) else math.inf
    if one.shape != other.shape:
        return math.inf
    seen = ~mx.isnan(other)
    if mx.any(mx.isnan(one) == seen).item():
        return math.inf
    one, other = (mx.where(seen, each, 0) for each in (one, other))
    return float((mx.linalg.norm(one - other) / mx.maximum(mx.linalg.norm(other), 1e-9)).item())  # type: ignore[arg-type]


@pytest.mark.parametrize("family", FAMILIES)
def test_no_change_of_a_model_leaves_its_step_stale(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "FEW_REPLAYS", 10**9)  # it is captured anew all the time
    model = make(family)
    own = getattr(type(model).__call__, "unpatched", type(model).__call__)
    words = [mx.array([[i * i % 89 + 20]]) for i in range(8)]
    stale, felt = [], 0
    with mlx_cuda.patch():
        after_the_prompt = part("models.cache").make_prompt_cache(model)
        mx.eval(model(mx.arange(30)[None], cache=after_the_prompt))
        after_the_prompt = copy.deepcopy(after_the_prompt)
        # Of every module and no step; and of the place where patch() has its own.
        others = ("Module.", f"{type(model).__name__}.__call__")
        made = [change for change in changes(model) if not change.name.startswith(others)]
        for change in made:
            cache = copy.deepcopy(after_the_prompt)
            mx.eval(model(words[0], cache=cache))
            replayed = decoding_of(model).replayed
            usual = outcome(lambda cache=cache: model(words[1], cache=cache))  # type: ignore[misc]
            assert decoding_of(model).replayed == replayed + 1, f"before {change.name}: {decoding_of(model).reason}"
            other = copy.deepcopy(cache)
            with change.made():
                got = outcome(lambda cache=cache: model(words[1], cache=cache))  # type: ignore[misc]
                wanted = outcome(lambda cache=other: own(model, words[1], cache=cache))  # type: ignore[misc]
                felt += distance(usual, wanted) > 2 * TOLERANCE
                if not distance(got, wanted) < TOLERANCE:
                    stale.append(f"{change.name}: {distance(got, wanted):.2g}")
    assert not stale, f"{len(stale)} of {len(made)}: {stale[:20]}"
    assert felt > len(made) / 4
