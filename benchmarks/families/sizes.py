"""A small model of every module of ``mlx_lm.models``: what its arguments are called decides most of them, the rest is the module's own.

Heads, head sizes, windows, experts and states are of the kinds that the published models have, so that the same engines are chosen; widths
and depths are small, so that all of them run in minutes.
"""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

LAYERS = 4
VOCABULARY = 1024

# One name means one thing in all modules.
COMMON: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "hidden_dim", "model_dim", "embedding_size"), 1024),
    **dict.fromkeys(("num_hidden_layers", "n_layers", "n_layer", "num_layers", "num_transformer_layers"), LAYERS),
    **dict.fromkeys(("num_attention_heads", "n_heads", "n_head", "num_heads"), 8),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "n_kv_heads", "num_attention_groups"), 2),
    **dict.fromkeys(("intermediate_size", "ffn_hidden_size", "mlp_hidden_size", "n_inner", "ff_intermediate_size",
                     "dense_intermediate_size", "intermediate_size_mlp"), 2048),
    **dict.fromkeys(("head_dim", "v_head_dim", "qk_nope_head_dim", "swa_head_dim", "swa_v_head_dim", "kv_channels"), 128),
    "vocab_size": VOCABULARY,
    **dict.fromkeys(("rms_norm_eps", "norm_eps", "layer_norm_eps", "layer_norm_epsilon", "layernorm_epsilon", "post_norm_eps"), 1e-6),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "model_max_length", "block_size"), 8192),
    **dict.fromkeys(("rope_theta", "rotary_emb_base", "swa_rope_theta"), 1e4),
    **dict.fromkeys(("rope_traditional", "tie_word_embeddings", "attention_bias", "mlp_bias", "use_bias", "conv_bias", "use_qkv_bias"),
                    False),
    "rope_scaling": None, "partial_rotary_factor": 0.5, "rotary_pct": 0.5, "rotary_dim": 64, "use_qk_norm": True,
    **dict.fromkeys(("sliding_window", "attention_window_size", "sliding_window_size"), 256), "sliding_window_pattern": 2,
    "query_pre_attn_scalar": 128, "hidden_act": "silu", "hidden_activation": "gelu_pytorch_tanh",
    # Experts.
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 8),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k", "top_k_experts"), 2),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size", "shared_intermediate_size",
                     "moe_shared_expert_intermediate_size", "share_expert_dim"), 512),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "num_shared_expert", "decoder_sparse_step", "first_k_dense_replace",
                     "moe_layer_freq", "n_group", "topk_group", "num_expert_group", "num_dense_layers"), 1),
    "mlp_only_layers": [], "norm_topk_prob": True, "routed_scaling_factor": 1.0, "topk_method": "noaux_tc", "scoring_func": "sigmoid",
    # Latent attention (MLA), and the index of a sparse one.
    "kv_lora_rank": 256, "q_lora_rank": 256, "qk_rope_head_dim": 64, "mla_scale_q_lora": True, "mla_scale_kv_lora": True,
    "index_head_dim": 128, "index_n_heads": 8, "index_topk": 512,
    # Linear attention, state spaces and short convolutions.
    "linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4, "full_attention_interval": 2, "layer_group_size": 2, "group_norm_size": 4, "linear_allow_neg_eigval": True,
    **dict.fromkeys(("state_size", "ssm_state_size", "mamba_d_state"), 128), **dict.fromkeys(("conv_kernel", "mamba_d_conv"), 4),
    **dict.fromkeys(("mamba_num_heads", "mamba_n_heads"), 16), **dict.fromkeys(("mamba_head_dim", "mamba_d_head"), 64),
    **dict.fromkeys(("n_groups", "mamba_n_groups"), 1), "use_conv_bias": True, "mamba_conv_bias": True, "mamba_proj_bias": False,
    "mamba_expand": 2, "time_step_limit": (0.001, 100.0), "time_step_rank": "auto", "chunk_size": 256, "conv_L_cache": 3,
    # Factors.
    "logit_scale": 1.0, "logits_scaling": 1.0, "attention_multiplier": 128**-0.5, "embedding_multiplier": 1.0, "residual_multiplier": 1.0,
    "dim_model_base": 256, "scale_depth": 1.4, "scale_emb": 12, "final_logit_softcapping": 30.0,
}  # fmt: skip

_WINDOWS = ["sliding_attention", "full_attention"] * (LAYERS // 2)
_KDA = {"kda_layers": [1, 3], "full_attn_layers": [2, 4], "num_heads": 8, "head_dim": 128, "short_conv_kernel_size": 4}
_DENSE = {name: COMMON[name] for name in (
    "hidden_size", "num_hidden_layers", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size",
    "rms_norm_eps", "rope_theta", "max_position_embeddings", "tie_word_embeddings",
)}  # fmt: skip
_EXPERTS = {name: COMMON[name] for name in (
    "num_experts", "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size", "norm_topk_prob",
    "decoder_sparse_step", "mlp_only_layers",
)}  # fmt: skip
_LINEAR = {name: COMMON[name] for name in COMMON if name.startswith("linear_") or name == "full_attention_interval"}
_LATENT = {name: COMMON[name] for name in (
    "kv_lora_rank", "q_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "n_routed_experts", "n_shared_experts",
    "num_experts_per_tok", "moe_intermediate_size", "first_k_dense_replace", "routed_scaling_factor", "n_group", "topk_group",
)}  # fmt: skip
_ROPE = {"rope_theta": 1e4, "rope_type": "default", "type": "default", "partial_rotary_factor": 0.5}

# What a module has beside, or otherwise.
OWN: dict[str, dict[str, Any]] = {
    "afm7": {"num_kv_reuse_layers": 1},
    "afmoe": {"layer_types": _WINDOWS},
    "apertus": {"post_norm": False, "qk_norm": True},
    "baichuan_m1": {"sliding_window_layers": [0, 2], "conv_window": 2},
    "bailing_moe_linear": {"topk_group": 1},
    "dbrx": {
        "ffn_config": {"ffn_hidden_size": 512, "moe_num_experts": 8, "moe_top_k": 2, "moe_jitter_eps": 0},
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 5e5},
    },
    "deepseek_v2": {"topk_method": "greedy", "rope_scaling": {"type": "yarn", "factor": 4, "original_max_position_embeddings": 2048}},
    "ernie4_5_moe": {"moe_layer_start_index": 1},
    "exaone4": {"sliding_window_pattern": "LG"},
    "exaone_moe": {"layer_types": _WINDOWS, "is_moe_layer": [False, True, True, True]},
    "falcon_h1": {"mamba_d_ssm": 1024},
    "gear": {"layer_types": _WINDOWS},
    "gemma3": {"text_config": {**_DENSE, "model_type": "gemma3_text", "sliding_window": 256, "sliding_window_pattern": 2}},
    "gemma3n": {
        "text_config": {
            **_DENSE, "model_type": "gemma3n_text", "num_kv_shared_layers": 0, "vocab_size_per_layer_input": VOCABULARY,
            "sliding_window": 256, "rope_local_base_freq": 1e4, "final_logit_softcapping": 30.0, "layer_types": _WINDOWS,
            "activation_sparsity_pattern": [0.95, 0.95, 0.0, 0.0], "hidden_size_per_layer_input": 128, "altup_num_inputs": 4,
            "altup_coef_clip": 120.0, "altup_correct_scale": True, "altup_active_idx": 0, "laurel_rank": 64,
        }
    },
    "gemma4": {
        "text_config": {
            **_DENSE, "model_type": "gemma4_text", "global_head_dim": 256, "vocab_size_per_layer_input": VOCABULARY,
            "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 128, "sliding_window": 256, "sliding_window_pattern": 2,
        }
    },
    "gemma4_text": {"global_head_dim": 256, "vocab_size_per_layer_input": VOCABULARY, "num_kv_shared_layers": 0,
                    "hidden_size_per_layer_input": 128},
    "glm_moe_dsa": {"rope_parameters": _ROPE},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2},
    "hunyuan": {"use_mixed_mlp_moe": True, "use_cla": True, "cla_share_factor": 2,
                "rope_scaling": {"type": "dynamic", "factor": 1.0, "alpha": 1000.0}},
    "jamba": {"attn_layer_offset": 1, "attn_layer_period": 2, "expert_layer_offset": 1, "expert_layer_period": 2},
    "kimi_k25": {"text_config": {**_DENSE, **_LATENT}},
    "kimi_k3": {
        "text_config": {
            **_DENSE, **_LATENT, "hidden_act": "situ", "activation_situ_beta": 1.0, "activation_situ_linear_beta": 1.0,
            "linear_attn_config": _KDA, "num_experts": 8, "num_experts_per_token": 2, "num_shared_experts": 1, "attn_res_block_size": 2,
        }
    },
    "kimi_linear": {"linear_attn_config": _KDA},
    "kimi_vl": {"text_config": {**_DENSE, **_LATENT}},
    "lfm2": {"block_dim": 1024, "block_multiple_of": 256, "block_ffn_dim_multiplier": 1.0, "block_auto_adjust_ff_dim": True,
             "layer_types": ["conv", "full_attention"] * 2},
    "lfm2-vl": {
        "text_config": {
            **_DENSE, "model_type": "lfm2", "norm_eps": 1e-6, "conv_bias": False, "conv_L_cache": 3, "block_dim": 1024,
            "block_multiple_of": 256, "block_ffn_dim_multiplier": 1.0, "block_auto_adjust_ff_dim": True,
            "layer_types": ["conv", "full_attention"] * 2,
        }
    },
    "lfm2_moe": {"use_expert_bias": True, "layer_types": ["conv", "full_attention"] * 2},
    "llama4": {
        "text_config": {
            **_DENSE, "model_type": "llama4_text", "attention_bias": False, "attention_chunk_size": 256, "interleave_moe_layer_step": 2,
            "intermediate_size_mlp": 2048, "num_experts_per_tok": 1, "num_local_experts": 8, "rope_scaling": None, "use_qk_norm": True,
        }
    },
    "llama4_text": {"no_rope_layers": [1, 1, 1, 0]},
    "longcat_flash": {"attention_method": "MLA", "zero_expert_type": "identity", "zero_expert_num": 4},
    "longcat_flash_ngram": {"zero_expert_num": 4},
    "mellum": {"layer_types": _WINDOWS, "rope_parameters": {"full_attention": _ROPE, "sliding_attention": _ROPE}},
    "mimo_v2_flash": {
        "hybrid_layer_pattern": [0, 1, 0, 1], "moe_layer_freq": [0, 1, 1, 1], "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False, "swa_num_attention_heads": 8, "swa_num_key_value_heads": 4,
    },
    "minicpm3": {"rope_scaling": {"type": "longrope", "original_max_position_embeddings": 8192}},
    "minimax_m3_vl": {
        "text_config": {**_DENSE, "num_local_experts": 8, "num_experts_per_tok": 2, "dense_intermediate_size": 2048,
                        "intermediate_size": 512, "shared_intermediate_size": 512}
    },
    "ministral3": {"layer_types": _WINDOWS, "rope_parameters": {**_ROPE, "llama_4_scaling_beta": 0.1,
                                                                "original_max_position_embeddings": 8192}},
    "mistral3": {"text_config": {**_DENSE, "model_type": "llama"}},
    "mistral4": {"rope_parameters": {**_ROPE, "llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 8192}},
    "muse_spark": {
        "text_config": {
            **_DENSE, "post_norm_eps": 1e-6, "rope_parameters": _ROPE, "layer_rope_theta": [1e4] * LAYERS, "layer_types": _WINDOWS,
            "sliding_window": 256, "final_logit_softcapping": 30.0, "output_multiplier": 1.0, "num_local_experts": 8,
            "num_experts_per_tok": 2, "moe_hidden_size": 1024, "moe_intermediate_size": 512,
        }
    },
    "nemotron-nas": {
        "block_configs": [{"attention": {"n_heads_in_group": 4}, "ffn": {"ffn_mult": 2.0}}, {"attention": {"no_op": True},
                          "ffn": {"ffn_mult": 2.0}}] * 2
    },
    "nemotron_h": {"hybrid_override_pattern": ["M", "*", "M", "-"]},
    "olmo3": {"layer_types": _WINDOWS},
    "openelm": {"ffn_dim_divisor": 256, "num_query_heads": [8] * LAYERS, "num_kv_heads": [2] * LAYERS, "ffn_multipliers": [2.0] * LAYERS},
    # It masks tokens of the published vocabulary by their numbers: with a smaller one it would write beyond its logits.
    "phi3small": {"dense_attention_every_n_layers": 2, "gegelu_limit": 20.0, "vocab_size": 100352},
    "pixtral": {"text_config": {**_DENSE, "model_type": "llama"}},
    "plamo": {"n_shared_head": 4},
    "qwen": {"intermediate_size": 4096},
    "qwen2_vl": {"text_config": {**_DENSE, "model_type": "qwen2"}},
    "qwen3_5": {"text_config": {**_DENSE, **_LINEAR}},
    "qwen3_5_moe": {"text_config": {**_DENSE, **_LINEAR, **_EXPERTS}},
    "qwen3_vl": {"text_config": {**_DENSE, "model_type": "qwen3"}},
    "qwen3_vl_moe": {"text_config": {**_DENSE, **_EXPERTS, "model_type": "qwen3_moe"}},
    "recurrent_gemma": {"conv1d_width": 4, "logits_soft_cap": 30.0, "num_key_value_heads": 1, "block_types": ["recurrent", "attention"]},
    "rwkv7": {"a_low_rank_dim": 64, "v_low_rank_dim": 32, "gate_low_rank_dim": 128, "decay_low_rank_dim": 64, "head_dim": 64},
    "spark2_5": {"hidden_act": "gelu", "layer_types": _WINDOWS,
                 "rope_parameters": {"sliding_attention": _ROPE, "full_attention": _ROPE}},
    "step3p5": {"layer_types": _WINDOWS},
}  # fmt: skip

# Modules with a model that cannot be made here, and why.
LEFT_OUT = {
    "olmo": "needs the package ai2-olmo",
    "prism_hadamard_qwen35": "is made from a checkpoint's own list of packed weights",
}


def arguments(name: str, module: Any) -> dict[str, Any]:
    """What the module's ``ModelArgs`` are made from."""
    known = {field.name for field in dataclasses.fields(module.ModelArgs)}
    common = {key: value for key, value in COMMON.items() if key in known}
    # Models write into what they are given.
    return copy.deepcopy({**common, "model_type": name, **OWN.get(name, {})})
