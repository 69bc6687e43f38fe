"""A GGUF as a folder that mlx-lm loads: config.json, weights in bfloat16 and the tokenizer's files."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import vocabulary

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Weight = NDArray[np.float32]

# A GGUF's names and mlx-lm's: of the model, and of a layer.
OUTER = {"token_embd": "embed_tokens", "output_norm": "norm"}
COMMON = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip


@dataclass(frozen=True)
class Architecture:
    """``config`` from a GGUF's fields beside what all have; ``mend``: a weight by its name there, as mlx-lm wants it."""

    names: Mapping[str, str]
    config: Callable[[Mapping[str, Any]], dict[str, Any]]
    mend: Callable[[str, Weight, Mapping[str, Any]], Weight]


def _llama_config(of: Mapping[str, Any]) -> dict[str, Any]:
    return {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "attention_bias": False, "mlp_bias": False}


def _halves_of_heads(name: str, weight: Weight, of: Mapping[str, Any]) -> Weight:
    """Rotated pairs of a head lie side by side in a GGUF of this architecture, and half a head apart in mlx-lm."""
    heads = {"attn_q": of["attention.head_count"], "attn_k": of["attention.head_count_kv"]}.get(name)
    if heads is None:
        return weight
    result: Weight = weight.reshape(heads, -1, 2, weight.shape[-1]).swapaxes(1, 2).reshape(weight.shape)
    return result


def _gemma_config(of: Mapping[str, Any]) -> dict[str, Any]:
    """What no field says is the same in all models of this architecture."""
    return {
        "model_type": "gemma3_text", "architectures": ["Gemma3ForCausalLM"], "sliding_window": of["attention.sliding_window"],
        "sliding_window_pattern": 6, "rope_local_base_freq": 10000.0, "query_pre_attn_scalar": of["attention.key_length"],
    }  # fmt: skip


def _norms_about_one(name: str, weight: Weight, of: Mapping[str, Any]) -> Weight:
    """mlx-lm adds the one to Gemma's norms that a GGUF has in them."""
    return weight - 1 if name.endswith("_norm") else weight


ARCHITECTURES = {
    "llama": Architecture({**COMMON, "ffn_norm": "post_attention_layernorm"}, _llama_config, _halves_of_heads),
    "gemma3": Architecture(
        {
            **COMMON, "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
            "post_attention_norm": "post_attention_layernorm", "ffn_norm": "pre_feedforward_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
        },
        _gemma_config, _norms_about_one,
    ),
}  # fmt: skip


def config(architecture: Architecture, of: Mapping[str, Any], tokens: Mapping[str, Any]) -> dict[str, Any]:
    """config.json, from the fields of the architecture and those of the tokenizer."""
    size, heads = of["embedding_length"], of["attention.head_count"]
    return {
        **architecture.config(of),
        "hidden_size": size, "num_hidden_layers": of["block_count"], "intermediate_size": of["feed_forward_length"],
        "num_attention_heads": heads, "num_key_value_heads": of["attention.head_count_kv"],
        "head_dim": of.get("attention.key_length", size // heads), "vocab_size": len(tokens["tokens"]),
        "rms_norm_eps": float(f"{of['attention.layer_norm_rms_epsilon']:.6g}"),  # it is kept in float32
        "rope_theta": of["rope.freq_base"], "max_position_embeddings": of["context_length"], "tie_word_embeddings": True,
        "bos_token_id": tokens["bos_token_id"], "eos_token_id": tokens["eos_token_id"], "torch_dtype": "bfloat16",
    }  # fmt: skip


def name_in_mlx_lm(name: str, architecture: Architecture) -> str:
    parts = name.removesuffix(".weight").split(".")
    if len(parts) == 1 and parts[0] in OUTER:
        return f"model.{OUTER[parts[0]]}.weight"
    if len(parts) == 3 and parts[0] == "blk" and parts[2] in architecture.names:
        return f"model.layers.{parts[1]}.{architecture.names[parts[2]]}.weight"
    raise ValueError(f"[convert] A weight has no place in the architecture, got {name}")


def convert(file: Path, folder: Path, progress: Callable[[float], None] = lambda _: None) -> None:
    """Write the model's files into a folder that is there; ``progress`` is called with the share that is done."""
    import mlx.core as mx
    from gguf import GGUFReader
    from gguf.quants import dequantize

    reader = GGUFReader(file)
    fields = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    kind = fields["general.architecture"]
    if kind not in ARCHITECTURES:
        raise ValueError(f"[convert] Only {', '.join(ARCHITECTURES)} are known, got a GGUF of {kind}")
    architecture = ARCHITECTURES[kind]
    of = {name.removeprefix(f"{kind}."): value for name, value in fields.items() if name.startswith(f"{kind}.")}
    tokens = {name.removeprefix("tokenizer.ggml."): value for name, value in fields.items() if name.startswith("tokenizer.ggml.")}

    weights, done = {}, 0
    whole = sum(int(tensor.n_elements) for tensor in reader.tensors)
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type).reshape([int(size) for size in reversed(tensor.shape)])
        own = tensor.name.removesuffix(".weight").rpartition(".")[2]
        name = name_in_mlx_lm(tensor.name, architecture)
        weights[name] = mx.array(architecture.mend(own, values, of)).astype(mx.bfloat16)
        mx.eval(weights[name])
        done += int(tensor.n_elements)
        progress(done / whole)
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "pt"})
    for name, content in (
        ("config.json", config(architecture, of, tokens)),
        ("tokenizer.json", vocabulary.tokenizer(tokens)),
        ("tokenizer_config.json", vocabulary.tokenizer_config(tokens, fields.get("tokenizer.chat_template"))),
    ):
        (folder / name).write_text(json.dumps(content, ensure_ascii=False) + "\n", "utf-8")
