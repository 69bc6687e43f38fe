"""A small model of mlx-lm's own code, and what stands for its tokenizer: nothing here fetches files."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.nn.layers.quantized import quantize
from mlx.utils import tree_flatten, tree_map

from benchmarks.mlx_lm_parts import part

__all__ = ["SIZES", "Tokenizer", "make_model", "part", "wide", "with_windows", "write_folder"]
GROUP = 64  # numbers of quantised weights
SIZES: dict[str, Any] = {
    "model_type": "qwen3", "hidden_size": 256, "num_hidden_layers": 2, "intermediate_size": 512, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 512, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
    "max_position_embeddings": 4096, "rope_theta": 1e5,
}  # fmt: skip


def make_model(seed: int, bits: int | None = None, kind: str = "qwen3", **sizes: Any) -> Any:
    """A model with random weights in bfloat16."""
    module = part(f"models.{kind}")
    mx.random.seed(seed)
    model = module.Model(module.ModelArgs.from_dict(SIZES | sizes))
    model.update(tree_map(lambda weight: weight.astype(mx.bfloat16), model.parameters()))
    if bits:
        quantize(model, bits=bits, group_size=GROUP)
    mx.eval(model.parameters())
    return model


def with_windows(size: int) -> Any:
    """A model of three layers, the first two of which see so many tokens."""
    module = part("models.gemma3_text")
    mx.random.seed(3)
    return module.Model(module.ModelArgs.from_dict({
        "model_type": "gemma3_text", "hidden_size": 256, "num_hidden_layers": 3, "intermediate_size": 512, "head_dim": 64,
        "vocab_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2,
        "sliding_window": size, "sliding_window_pattern": 3, "query_pre_attn_scalar": 64,
    }))  # fmt: skip


def wide(model: Any) -> Any:
    """The same with its values in float32."""
    weights: dict[str, Any] = dict(tree_flatten(model.parameters()))
    for name in [name.removesuffix(".scales") for name in weights if name.endswith(".scales")]:
        packed, scales, biases = (weights.pop(f"{name}.{each}") for each in ("weight", "scales", "biases"))
        bits = packed.shape[-1] * 32 // (scales.shape[-1] * GROUP)
        weights[f"{name}.weight"] = mx.dequantize(packed, scales.astype(mx.float32), biases.astype(mx.float32), GROUP, bits)
    other = type(model)(model.args)
    other.load_weights([(name, weight.astype(mx.float32)) for name, weight in weights.items()])
    mx.eval(other.parameters())
    return other


def write_folder(folder: Path, model: Any, config: dict[str, Any]) -> None:
    """A model as ``mlx_lm.load`` finds it, with a tokenizer that knows bytes and the end: 257 tokens. It needs the package tokenizers."""
    found: Any = importlib.import_module("tokenizers")  # which is not installed where mypy runs
    models, pre_tokenizers = found.models, found.pre_tokenizers
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = found.Tokenizer(models.BPE(vocab={each: number for number, each in enumerate([*letters, "<eos>"])}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = found.decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>"}))
    (folder / "config.json").write_text(json.dumps(config))
    weights: Any = tree_flatten(model.parameters())
    mx.save_safetensors(str(folder / "model.safetensors"), dict(weights))


class Tokenizer:
    """Tokens are written as their numbers."""

    eos_token_id = bos_token = chat_template = None

    def encode(self, text: str, **_: Any) -> list[int]:
        return [int(word) for word in text.split() if word.isdigit()]

    def decode(self, tokens: list[int], **_: Any) -> str:
        return "".join(f" {token}" for token in tokens)

    def apply_chat_template(self, messages: list[dict[str, str]], **_: Any) -> list[int]:
        return [token for message in messages for token in self.encode(message["content"])]

    def convert_ids_to_tokens(self, tokens: list[int]) -> list[str]:
        return [str(token) for token in tokens]

    def get_vocab(self) -> dict[str, int]:
        return {str(token): token for token in range(int(str(SIZES["vocab_size"])))}
