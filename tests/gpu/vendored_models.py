"""Small models of mlx-vlm and mlx-audio with random weights."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx.utils import tree_map

from benchmarks.vendored_parts import part, vision_settings

TEXT: dict[str, Any] = {
    "hidden_size": 256, "num_hidden_layers": 2, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 64, "vocab_size": 512, "rms_norm_eps": 1e-6, "max_position_embeddings": 4096, "rope_theta": 1e4,
    "tie_word_embeddings": False,
}  # fmt: skip
SECTIONS = {"type": "default", "mrope_section": [16, 8, 8]}
WINDOWS = {"sliding_window": 32, "sliding_window_pattern": 2, "query_pre_attn_scalar": 64}
LINEAR: dict[str, Any] = {
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 64, "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4, "full_attention_interval": 2, "num_experts": 0,
    "rope_parameters": {"type": "default", "mrope_section": [8, 4, 4], "rope_theta": 1e4, "partial_rotary_factor": 0.5},
}  # fmt: skip
CONVOLUTIONS: dict[str, Any] = {
    "full_attn_idxs": [1], "norm_eps": 1e-6, "conv_bias": False, "conv_L_cache": 3, "block_dim": 256, "block_ff_dim": 512,
    "block_multiple_of": 8, "block_ffn_dim_multiplier": 1.0, "block_auto_adjust_ff_dim": False,
}  # fmt: skip
STATES: dict[str, Any] = {
    "num_heads": 8, "state_size": 64, "expand": 2, "conv_kernel": 4, "n_groups": 2, "use_bias": False, "use_conv_bias": True,
    "time_step_limit": (0.001, 100.0), "layer_norm_epsilon": 1e-6, "chunk_size": 8, "time_step_rank": 4,
}  # fmt: skip
PICTURES: dict[str, Any] = {
    "rope_scaling": SECTIONS, "image_token_id": 501, "video_token_id": 502, "vision_start_token_id": 500, "vision_end_token_id": 503,
}  # fmt: skip
VISION: dict[str, dict[str, Any]] = {
    "mlx_vlm.llama": {},
    "mlx_vlm.gemma3": WINDOWS,
    "mlx_vlm.qwen2_5_vl": PICTURES,
    "mlx_vlm.qwen3_vl": PICTURES,
    "mlx_vlm.qwen3_5": LINEAR,
    "mlx_vlm.lfm2": CONVOLUTIONS,
    "mlx_vlm.mamba2": STATES,
}
ROPES = ["mlx_vlm.qwen2_5_vl", "mlx_vlm.qwen3_vl"]  # whose positions have three axes
AUDIO: dict[str, dict[str, Any]] = {
    "mlx_audio.llama": {},
    "mlx_audio.qwen3": {},
    "mlx_audio.gemma3_text": WINDOWS,
    "mlx_audio.qwen3_5": {"text_config": {**TEXT, **LINEAR, "model_type": "qwen3_5"}},
    "mlx_audio.lfm2": CONVOLUTIONS,
}


def forget_positions(model: Any) -> None:
    """As mlx-vlm does before each prompt, where the part that decodes notes the places of its tokens."""
    if hasattr(model, "_rope_deltas"):
        model._position_ids = model._rope_deltas = None


def prompt_with_picture(model: Any, text: mx.array, height: int, width: int) -> tuple[mx.array, dict[str, Any]]:
    """A prompt of one of `ROPES`, with a picture of so many patches after its first tokens or none, and what mlx-vlm gives with it."""
    if not height:
        return text, {}
    picture = mx.array([[500, *[501] * (height * width // 4), 503]])
    given = mx.concatenate([text[:, :9], picture, text[:, 9:]], axis=1)
    positions, deltas = model.get_rope_index(given, mx.array([[1, height, width]]))
    return given, {"inputs_embeds": model.model.embed_tokens(given), "position_ids": positions, "rope_deltas": deltas}


def make(name: str, dtype: mx.Dtype = mx.float32, **sizes: Any) -> Any:
    """The part of a model that decodes."""
    package, _, kind = name.partition(".")
    values = {**TEXT, "model_type": kind, **(VISION | AUDIO)[name], **sizes}
    mx.random.seed(7)
    if package == "mlx_vlm":
        model = part(f"mlx_vlm.models.{kind}.language").LanguageModel(*vision_settings(kind, values))
    else:
        module = part(f"mlx_audio.lm.models.{kind}")
        model = module.Model(module.ModelArgs.from_dict(values))
    model.update(tree_map(lambda weight: weight.astype(dtype), model.parameters()))
    mx.eval(model.parameters())
    return model


class Tokenizer:
    """What mlx-vlm's generator asks of one: when to stop, which is never."""

    class Criteria:
        def __call__(self, token: int) -> bool:  # noqa: ARG002
            return False

        def add_eos_token_ids(self, tokens: Any) -> None:
            """None does."""

    stopping_criteria = Criteria()
