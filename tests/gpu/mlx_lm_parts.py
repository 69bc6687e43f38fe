"""mlx-lm's own code around models, and a small model of it: nothing here makes tokenizers or fetches files."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
import warnings
from typing import Any

import mlx.core as mx
from mlx.nn.layers.quantized import quantize
from mlx.utils import tree_flatten, tree_map

UNUSED = ("transformers", "transformers.tokenization_utils_base", "huggingface_hub")  # of which mlx-lm imports names
GROUP = 64  # numbers of quantised weights
SIZES: dict[str, Any] = {
    "model_type": "qwen3", "hidden_size": 256, "num_hidden_layers": 2, "intermediate_size": 512, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 512, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
    "max_position_embeddings": 4096, "rope_theta": 1e5,
}  # fmt: skip


class _Names(types.ModuleType):
    """A package that is not installed: every name of it is a class that can be registered, and no more."""

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {"register": staticmethod(lambda *_, **__: None), "apply_chat_template": None})


def part(name: str) -> Any:
    """A module of mlx-lm, an ImportError where it cannot be had; without mlx-lm's own ``__init__``, which imports all of it."""
    found = importlib.util.find_spec("mlx_lm")
    if found is None or found.submodule_search_locations is None:
        raise ImportError("mlx_lm is not installed")
    if "mlx_lm" not in sys.modules:
        package = types.ModuleType("mlx_lm")
        package.__path__, package.__spec__ = list(found.submodule_search_locations), found
        sys.modules["mlx_lm"] = package
    for package_name in {each.partition(".")[0] for each in UNUSED}:
        if package_name not in sys.modules and importlib.util.find_spec(package_name) is None:
            sys.modules.update({each: _Names(each) for each in UNUSED if each.partition(".")[0] == package_name})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(f"mlx_lm.{name}")


def make_model(seed: int, bits: int | None = None, **sizes: int) -> Any:
    """A model with random weights in bfloat16."""
    module = part("models.qwen3")
    mx.random.seed(seed)
    model = module.Model(module.ModelArgs.from_dict(SIZES | sizes))
    model.update(tree_map(lambda weight: weight.astype(mx.bfloat16), model.parameters()))
    if bits:
        quantize(model, bits=bits, group_size=GROUP)
    mx.eval(model.parameters())
    return model


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
