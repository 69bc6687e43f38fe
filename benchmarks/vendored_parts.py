"""Models of mlx-vlm and mlx-audio, which carry copies of mlx-lm's, without what these packages read pictures, sounds and files with."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import types
import warnings
from types import SimpleNamespace
from typing import Any

from .mlx_lm_parts import add_unused

VERSIONS = {"mlx_vlm": "0.7.10", "mlx_audio": "0.6.2"}  # those that were tried
MODULES = {"mlx_vlm": "mlx_vlm.models", "mlx_audio": "mlx_audio.lm.models"}
UNUSED = ("PIL", "PIL.Image", "requests", "transformers")  # of which they import names
# What the language part of a vision model does not read, but its configuration has.
VISION: dict[str, Any] = {
    "hidden_size": 32, "depth": 1, "num_heads": 1, "num_attention_heads": 1, "num_hidden_layers": 1, "patch_size": 14,
    "intermediate_size": 32,
}  # fmt: skip
QUANTIZED = {"group_size": 64, "bits": 4}
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {  # published ones
    "Qwen 2.5 VL 3B of mlx-vlm, 4 bit": (
        "mlx_vlm.qwen2_5_vl",
        {
            "model_type": "qwen2_5_vl", "hidden_size": 2048, "num_hidden_layers": 36, "intermediate_size": 11008, "head_dim": 128,
            "num_attention_heads": 16, "num_key_value_heads": 2, "vocab_size": 151936, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
            "max_position_embeddings": 128000, "tie_word_embeddings": True,
            "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}, "quantization": QUANTIZED,
        },
    ),
    "Qwen 3 VL 4B of mlx-vlm, 4 bit": (
        "mlx_vlm.qwen3_vl",
        {
            "model_type": "qwen3_vl", "hidden_size": 2560, "num_hidden_layers": 36, "intermediate_size": 9728, "head_dim": 128,
            "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 151936, "rms_norm_eps": 1e-6, "rope_theta": 5e6,
            "max_position_embeddings": 262144, "tie_word_embeddings": True,
            "rope_scaling": {"type": "default", "mrope_section": [24, 20, 20]}, "quantization": QUANTIZED,
        },
    ),
    "Gemma 3 4B of mlx-vlm, 4 bit": (
        "mlx_vlm.gemma3",
        {
            "model_type": "gemma3_text", "hidden_size": 2560, "num_hidden_layers": 34, "intermediate_size": 10240, "head_dim": 256,
            "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 262208, "rms_norm_eps": 1e-6, "sliding_window": 1024,
            "sliding_window_pattern": 6, "query_pre_attn_scalar": 256, "rope_theta": 1e6, "max_position_embeddings": 131072,
            "quantization": QUANTIZED,
        },
    ),
    "Orpheus 3B of mlx-audio, 4 bit": (
        "mlx_audio.llama",
        {
            "model_type": "llama", "hidden_size": 3072, "num_hidden_layers": 28, "intermediate_size": 8192, "head_dim": 128,
            "num_attention_heads": 24, "num_key_value_heads": 8, "vocab_size": 156940, "rms_norm_eps": 1e-5, "rope_theta": 5e5,
            "max_position_embeddings": 131072, "tie_word_embeddings": True, "quantization": QUANTIZED,
        },
    ),
}  # fmt: skip


def part(name: str) -> Any:
    """A module of theirs by its whole name, without the ``__init__`` of its packages; an ImportError where it cannot be had."""
    packages = name.split(".")[:-1]
    for package in (".".join(packages[: count + 1]) for count in range(len(packages))):
        if package not in sys.modules:
            found = importlib.util.find_spec(package)
            if found is None or found.submodule_search_locations is None:
                raise ImportError(f"{package} is not installed")
            module = types.ModuleType(package)
            module.__path__, module.__spec__ = list(found.submodule_search_locations), found
            sys.modules[package] = module
    add_unused(UNUSED)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(name)


def caches(package: str) -> Any:
    return part(f"{MODULES[package]}.cache")


def _chosen(cls: Any, values: dict[str, Any]) -> Any:
    """An object of a class of settings, of those of these values that it has."""
    return cls(**{name: value for name, value in values.items() if name in inspect.signature(cls).parameters})


def vision_settings(name: str, values: dict[str, Any]) -> tuple[Any, ...]:
    """What the language part of a vision model is made of: its settings, and those of the whole where it takes them."""
    config, language = (part(f"mlx_vlm.models.{name}.{each}") for each in ("config", "language"))
    if not hasattr(config, "TextConfig"):
        return (_chosen(config.ModelConfig, values),)
    text, vision = _chosen(config.TextConfig, values), _chosen(config.VisionConfig, VISION | {"model_type": values["model_type"]})
    whole = _chosen(config.ModelConfig, {**values, "text_config": text, "vision_config": vision})
    return (text, whole)[: len(inspect.signature(language.LanguageModel).parameters)]


def model_module(name: str) -> Any:
    """As a module of mlx-lm's models, ``mlx_vlm.qwen3_vl`` or ``mlx_audio.llama``: the part of a model that decodes, and its settings."""
    package, _, kind = name.partition(".")
    if package == "mlx_audio":
        return part(f"{MODULES[package]}.{kind}")
    language: Any = part(f"mlx_vlm.models.{kind}.language").LanguageModel
    settings = SimpleNamespace(from_dict=lambda values: vision_settings(kind, values))
    return SimpleNamespace(Model=lambda made: language(*made), ModelArgs=settings)
