"""Which engine serves which case, as the dispatch rules say it: the table of docs/reference/attention.md."""

from __future__ import annotations

from typing import Any

from mlx_cuda._attention import rules

from .cells import markdown

HOPPER = {"capability": (9, 0), "cudnn": (9, 19, 0)}
PREFILL = {
    "batch": 2,
    "heads": 16,
    "kv_heads": 16,
    "q_len": 8192,
    "k_len": 8192,
    "head_dim": 128,
    "dtype": "bfloat16",
    "mask": "causal",
} | HOPPER
DECODE = PREFILL | {"batch": 8, "heads": 32, "kv_heads": 8, "q_len": 1, "mask": "none"}

# What a case is called, and how it differs from the one before the colon's.
CASES: dict[str, dict[str, Any]] = {
    "prefill: causal or no mask": PREFILL,
    "prefill: 1,000 queries after 7,192 keys in the cache": PREFILL | {"q_len": 1000},
    "prefill: head_dim 256": PREFILL | {"head_dim": 256},
    "prefill: head_dim 192 and 128 (latent attention)": PREFILL | {"head_dim": 192, "v_head_dim": 128},
    "prefill: causal window": PREFILL | {"window": "left"},
    "prefill: sinks, return_lse": PREFILL | {"sinks": True, "lse": True},
    "prefill: bool mask": PREFILL | {"mask": "bool"},
    "prefill: additive mask": PREFILL | {"mask": "additive"},
    "prefill: additive mask, head_dim 256": PREFILL | {"mask": "additive", "head_dim": 256},
    "prefill: softcap": PREFILL | {"softcap": True},
    "prefill: lengths or left_padding": PREFILL | {"ragged": True},
    "prefill: window on both sides": PREFILL | {"mask": "none", "window": "sides"},
    "prefill: head_dim 512": PREFILL | {"head_dim": 512},
    "prefill: float32": PREFILL | {"dtype": "float32"},
    "prefill: head_dim 100": PREFILL | {"head_dim": 100},
    "decode: one query": DECODE,
    "decode: 16 queries": DECODE | {"q_len": 16, "mask": "causal"},
    "decode: 32 queries": DECODE | {"q_len": 32, "mask": "causal"},
    "decode: 32 queries, bool mask": DECODE | {"q_len": 32, "mask": "bool"},
    "decode: left_padding, lengths": DECODE | {"ragged": True},
    "decode: bool mask, as mlx-lm's batches": DECODE | {"mask": "bool"},
    "decode: softcap, sinks, window": DECODE | {"softcap": True, "sinks": True, "window": "left"},
    "decode: head_dim 576 and 512 (latent attention)": DECODE | {"heads": 16, "kv_heads": 1, "head_dim": 576, "v_head_dim": 512},
    "decode: 200 keys, one sequence": DECODE | {"batch": 1, "k_len": 200},
    "attention_varlen": PREFILL | {"entry": "choose_varlen"},
    "paged_attention: pages of 16": DECODE | {"entry": "choose_paged", "page_size": 16, "mask": "causal"},
    "paged_attention: pages of 5": DECODE | {"entry": "choose_paged", "page_size": 5, "mask": "causal"},
    "A100, prefill: causal": PREFILL | {"capability": (8, 0)},
    "A100, prefill: head_dim 256": PREFILL | {"capability": (8, 0), "head_dim": 256},
    "T4, prefill: causal": PREFILL | {"capability": (7, 5)},
}


def choice(case: dict[str, Any]) -> Any:
    """What the rules choose."""
    given = {"v_head_dim": case["head_dim"], **case}
    rule = getattr(rules, given.pop("entry", "choose_attention"))
    extra = [given.pop("page_size")] if "page_size" in given else []
    return rule(rules.AttentionCase(**given), *extra)


def gallery_table() -> str:
    """Every case with its engine and the rule that says so."""
    rows = [["case", "engine", "why"]]
    for name, case in CASES.items():
        chosen = choice(case)
        rows.append([name, f"`{chosen.engine}`", chosen.reason])
    return markdown(rows)
