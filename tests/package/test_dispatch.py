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
        {"q_len": 4},
        {"q_len": 1, "head_dim": 80, "v_head_dim": 80},
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
        ({"q_len": 3}, "MLX's vector kernel takes fewer than 4 queries"),
        ({"q_len": 3, "head_dim": 256, "v_head_dim": 256}, "a plan for fewer than 4 queries does not pay"),
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


def test_native_elementwise() -> None:
    assert native_elementwise("float32", (3, 4))
    assert not native_elementwise("float64", (3, 4))
    assert not native_elementwise("float16", (3, 0))
