from __future__ import annotations

from typing import Any

import pytest
from mlx_cuda._dispatch import AttentionCase, choose_attention, native_elementwise

PREFILL = AttentionCase(
    batch=2,
    heads=16,
    kv_heads=4,
    q_len=4096,
    k_len=8192,
    head_dim=128,
    v_head_dim=128,
    dtype="bfloat16",
    mask="causal",
    capability=(9, 0),
    cudnn=(9, 28, 0),
)


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"mask": "none"},
        {"dtype": "float16"},
        {"head_dim": 256, "v_head_dim": 256},
        {"head_dim": 72, "v_head_dim": 72},
        {"head_dim": 256, "v_head_dim": 256, "capability": (10, 0)},
        {"capability": (8, 0)},
        {"q_len": 17},
        {"q_len": 33, "heads": 4},
        {"q_len": 9000, "mask": "none"},
        {"cudnn": (9, 19)},
    ],
    ids=str,
)
def test_cudnn_takes(changed: dict[str, Any]) -> None:
    assert choose_attention(PREFILL._replace(**changed)).engine == "cudnn"


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"batch": 0}, "a dimension is 0"),
        ({"k_len": 0}, "a dimension is 0"),
        ({"dtype": "float32"}, "not float32"),
        ({"mask": "array"}, "no array masks"),
        ({"q_len": 9000}, "the first queries see no key"),
        ({"q_len": 3, "heads": 16, "kv_heads": 16, "capability": (7, 5)}, "a plan for fewer than 4 queries does not pay"),
        ({"q_len": 3, "head_dim": 256, "v_head_dim": 256, "heads": 64, "kv_heads": 2}, "96 queries share each key, more than"),
        ({"q_len": 1, "batch": 65536}, "at most 65535 blocks"),
        ({"v_head_dim": 64}, "head_dim 128 of q and k differs from 64 of v"),
        ({"head_dim": 100, "v_head_dim": 100}, "100 is no multiple of 8"),
        ({"head_dim": 264, "v_head_dim": 264}, "264 is over 256, the widest on sm_90"),
        ({"head_dim": 136, "v_head_dim": 136, "capability": (8, 9)}, "136 is over 128, the widest on sm_89"),
        ({"capability": (7, 5)}, "needs sm_80 or newer, not sm_75"),
        ({"cudnn": (9, 10, 2)}, "cuDNN 9.10.2 is older than 9.19"),
    ],
    ids=str,
)
def test_upstream_takes(changed: dict[str, Any], reason: str) -> None:
    choice = choose_attention(PREFILL._replace(**changed))
    assert choice.engine == "upstream"
    assert reason in choice.reason


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"mask": "none"},
        {"mask": "array"},
        {"q_len": 3, "head_dim": 64, "v_head_dim": 64},
        {"q_len": 16},
        {"q_len": 16, "heads": 32, "mask": "array"},  # cuDNN takes no array mask, so more rows are decoded
        {"head_dim": 256, "v_head_dim": 256},
        {"head_dim": 72, "v_head_dim": 72, "dtype": "float16"},
        {"window": True, "softcap": True, "sinks": True, "ragged": True},
        {"capability": (8, 0), "head_dim": 256, "v_head_dim": 256},
        {"cudnn": (8, 0)},
        {"q_len": 8, "k_len": 4},
    ],
    ids=str,
)
def test_decode_takes(changed: dict[str, Any]) -> None:
    assert choose_attention(PREFILL._replace(q_len=1)._replace(**changed)).engine == "decode"


def test_short_caches_are_left_to_mlx() -> None:
    short = PREFILL._replace(q_len=1, k_len=255, batch=1, heads=16, kv_heads=8)
    assert choose_attention(short).engine == "upstream"
    for changed in ({"k_len": 256}, {"batch": 2}, {"mask": "array"}, {"softcap": True}, {"head_dim": 80, "v_head_dim": 80}, {"q_len": 4}):
        assert choose_attention(short._replace(**changed)).engine == "decode"


@pytest.mark.parametrize("option", ["window", "softcap", "sinks", "ragged"])
def test_options_of_long_prompts_are_composed(option: str) -> None:
    changed: dict[str, Any] = {option: True}
    choice = choose_attention(PREFILL._replace(**changed))
    assert choice.engine == "composed"
    assert "cuDNN is not given" in choice.reason
    assert "up to 32 queries" in choice.reason


def test_native_elementwise() -> None:
    assert native_elementwise("float32", (3, 4))
    assert not native_elementwise("float64", (3, 4))
    assert not native_elementwise("float16", (3, 0))
