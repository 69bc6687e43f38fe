"""The rules as a table: one call, what is changed in it, who computes it, and the rule that says so."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_cuda._attention.options import check_window
from mlx_cuda._attention.rules import (
    AttentionCase,
    choose_attention,
    choose_paged,
    choose_update,
    choose_varlen,
    equal_choice,
)
from mlx_cuda._common.choice import against_native

from .tables import rows, says

PREFILL = AttentionCase(
    batch=2,
    heads=16,
    kv_heads=4,
    q_len=4096,
    k_len=4096,
    head_dim=128,
    v_head_dim=128,
    dtype="bfloat16",
    mask="causal",
    capability=(9, 0),
    cudnn=(9, 28, 0),
)
STEP = PREFILL._replace(q_len=1, k_len=8192)


def heads(dim: int, v_dim: int | None = None) -> dict[str, Any]:
    return {"head_dim": dim, "v_head_dim": v_dim or dim}


PREFILLS: list[tuple[dict[str, Any], str, str]] = [
    # cuDNN: half precision without array masks, softcap, ragged lengths and windows beyond the causal one
    ({}, "cudnn", "up to 32 queries"),
    ({"mask": "none"}, "cudnn", ""),
    ({"dtype": "float16"}, "cudnn", ""),
    (heads(256), "cudnn", ""),
    (heads(72), "cudnn", ""),
    (heads(256) | {"capability": (10, 0)}, "cudnn", ""),
    (heads(192, 128), "cudnn", ""),
    (heads(64, 256), "cudnn", ""),
    ({"capability": (8, 0)}, "cudnn", ""),
    ({"window": "left"}, "cudnn", ""),
    ({"sinks": True, "lse": True, "window": "left"}, "cudnn", ""),
    # but no plan for each length of a cache
    ({"k_len": 8192}, "flash", "the keys of a growing cache"),
    ({"k_len": 8192, "window": "left", "sinks": True}, "flash", "the keys of a growing cache"),
    ({"k_len": 8192, "capability": (8, 0)}, "flash", "the keys of a growing cache"),
    ({"k_len": 8192, "deterministic": True}, "cudnn", ""),  # whose backward can be asked for that
    ({"q_len": 17}, "decode", ""),
    ({"q_len": 17, "capability": (8, 0)}, "flash", "the keys of a growing cache"),
    ({"q_len": 17} | heads(192), "flash", "the keys of a growing cache"),
    ({"q_len": 33, "heads": 4}, "flash", "the keys of a growing cache"),
    ({"q_len": 9000, "mask": "none"}, "flash", "the keys of a growing cache"),
    ({"q_len": 17, "k_len": 17}, "cudnn", "68 queries share each key, too many to decode"),
    ({"cudnn": (9, 19)}, "cudnn", ""),
    # flash: what cuDNN does not take
    ({"mask": "bool"}, "flash", "cuDNN is given no array masks"),
    ({"mask": "bool", "lse": True}, "flash", "cuDNN is given no array masks"),
    ({"mask": "bool", "sinks": True, "window": "sides"}, "flash", "cuDNN is given no array masks"),
    ({"window": "sides"}, "flash", "not given a window beyond the causal one"),
    ({"softcap": True}, "flash", "not given softcap"),
    ({"ragged": True, "softcap": True}, "flash", "not given softcap, lengths or left_padding"),
    ({"q_len": 9000}, "flash", "the first queries see no key"),
    (heads(136) | {"capability": (8, 9)}, "flash", "136 is over 128, cuDNN's widest on sm_89"),
    (heads(128, 192) | {"capability": (8, 0)}, "flash", "128/192 is over 128"),
    ({"cudnn": (9, 10, 2)}, "flash", "cuDNN 9.10.2 is older than 9.19"),
    ({"refusal": "no engine"}, "flash", "cuDNN does not support it: no engine"),
    ({"q_len": 17, "heads": 64, "mask": "bool"}, "flash", "272 queries share each key"),
    # additive masks: on Hopper our kernel, elsewhere MLX's own, which gives them to cuDNN, where it says the rest of the call
    ({"mask": "additive"}, "flash", "cuDNN is given no array masks"),
    ({"mask": "additive", "q_len": 999, "k_len": 4100} | heads(64), "flash", ""),
    ({"mask": "additive", "capability": (8, 0)}, "mlx", "MLX gives cuDNN the additive mask"),
    ({"mask": "additive", "capability": (10, 0)}, "mlx", ""),
    ({"mask": "additive", "lse": True}, "flash", ""),
    ({"mask": "additive", "sinks": True}, "flash", ""),
    ({"mask": "additive", "window": "sides"}, "flash", ""),
    ({"mask": "additive"} | heads(136), "flash", ""),
    ({"mask": "additive"} | heads(128, 64), "flash", ""),
    # float32: through TF32, where that may be
    ({"dtype": "float32"}, "flash", "cuDNN computes float16 and bfloat16, not float32"),
    ({"dtype": "float32", "tf32": False}, "mlx", "MLX_ENABLE_TF32=0"),
    ({"dtype": "float32", "q_len": 15}, "mlx", "fewer than 16 queries in float32"),
    ({"dtype": "float32"} | heads(512), "mlx", "the flash kernel does not support head_dim 512"),
    ({"dtype": "float64"}, "mlx", "not float64"),
    # head_dims over 256
    (heads(512), "flash", "512 is over 256, cuDNN's widest on sm_90"),
    (heads(576, 512) | {"softcap": True}, "flash", "not given softcap"),
    (heads(264), "flash", "264 is over 256"),
    (heads(584), "mlx", "the flash kernel does not support head_dim 584"),
    (heads(584, 512) | {"softcap": True}, "fallback", "the flash kernel does not support head_dim 584/512"),
    (heads(512, 520), "mlx", "the flash kernel does not support head_dim 512/520"),
    # nobody
    (heads(100), "mlx", "100 is not a multiple of 8"),
    (heads(128, 100), "mlx", "128/100 is not a multiple of 8"),
    ({"capability": (7, 5)}, "mlx", "needs sm_80 or newer, not sm_75"),
    ({"capability": (7, 5), "softcap": True}, "fallback", "needs sm_80 or newer, not sm_75"),
    ({"capability": (7, 5), "mask": "additive"}, "mlx", "cuDNN is given no array masks"),
    ({"capability": (7, 5), "lse": True}, "fallback", ""),
    ({"batch": 0}, "mlx", "a dimension is 0"),
    ({"k_len": 0, "ragged": True}, "fallback", "a dimension is 0"),
    ({"batch": 8192, "heads": 8, "mask": "bool"}, "flash", "cuDNN is given no array masks"),  # in parts
    ({"batch": 8192, "heads": 8, "softcap": True}, "flash", "not given softcap"),
    ({"batch": 65536, "softcap": True}, "fallback", "the flash kernel's grid has at most 65535 blocks"),
]


@rows(PREFILLS)
def test_many_queries(changed: dict[str, Any], engine: str, reason: str) -> None:
    assert says(choose_attention(PREFILL._replace(**changed)), engine, reason)


STEPS: list[tuple[dict[str, Any], str, str]] = [
    ({}, "decode", "up to 32 queries read the keys once"),
    ({"mask": "none"}, "decode", ""),
    ({"k_len": 1, "batch": 1}, "decode", ""),  # as fast as MLX's own
    ({"mask": "bool"}, "decode", ""),
    ({"mask": "additive"}, "decode", ""),
    ({"q_len": 3} | heads(64), "decode", ""),
    ({"q_len": 16}, "decode", ""),
    ({"q_len": 32}, "decode", ""),
    ({"q_len": 32, "capability": (8, 0)}, "flash", "the keys of a growing cache"),
    ({"q_len": 32, "mask": "additive"}, "decode", ""),  # cuDNN takes no array mask, so more rows are decoded
    (heads(256), "decode", ""),
    (heads(72) | {"dtype": "float16"}, "decode", ""),
    ({"window": "sides", "softcap": True, "sinks": True, "ragged": True, "lse": True}, "decode", ""),
    (heads(256) | {"capability": (8, 0)}, "decode", ""),
    ({"cudnn": (8, 0)}, "decode", ""),
    ({"q_len": 8, "k_len": 4}, "decode", ""),
    (heads(192, 128), "decode", ""),
    (heads(512), "decode", ""),
    (heads(576, 512) | {"heads": 128, "kv_heads": 1, "q_len": 4}, "decode", ""),
    (heads(512) | {"capability": (8, 9)}, "flash", "sm_89 has too little memory for head_dim 512"),
    (heads(584), "mlx", "the decode kernel does not support head_dim 584"),
    ({"q_len": 3, "heads": 640}, "decode", ""),  # however many share a key
    ({"q_len": 17, "heads": 64}, "flash", "the keys of a growing cache"),
    ({"q_len": 17, "heads": 64, "mask": "bool"}, "flash", "272 queries share each key, too many to decode"),
    ({"batch": 65536}, "mlx", "the decode kernel's grid has at most 65535 blocks"),
    ({"q_len": 3, "capability": (7, 5)}, "mlx", "a plan for fewer than 4 queries does not pay"),
    ({"dtype": "float32"}, "mlx", "fewer than 16 queries in float32 are MLX's"),
]


@rows(STEPS)
def test_few_queries(changed: dict[str, Any], engine: str, reason: str) -> None:
    assert says(choose_attention(STEP._replace(**changed)), engine, reason)


KEYS = st.one_of(st.integers(0, 70), st.sampled_from([255, 256, 257, 4096, 8191, 8192, 2**31 - 1]))
CASES = st.builds(
    AttentionCase,
    batch=st.sampled_from([1, 2, 65536]),
    heads=st.sampled_from([8, 64]),
    kv_heads=st.sampled_from([1, 8]),
    q_len=st.one_of(st.integers(1, 40), st.sampled_from([256, 4096])),
    k_len=KEYS,
    head_dim=st.sampled_from([64, 100, 128, 192, 512]),
    v_head_dim=st.sampled_from([64, 128, 192]),
    dtype=st.sampled_from(["bfloat16", "float32"]),
    mask=st.sampled_from(["none", "causal", "bool", "additive"]),
    capability=st.sampled_from([(7, 5), (8, 9), (9, 0)]),
    cudnn=st.sampled_from([(9, 10), (9, 28)]),
    window=st.sampled_from(["none", "left", "sides"]),
    softcap=st.booleans(),
    sinks=st.booleans(),
    ragged=st.booleans(),
    lse=st.booleans(),
    deterministic=st.booleans(),
    tf32=st.booleans(),
)


@given(CASES, KEYS, st.data())
def test_the_choice_is_the_same_for_the_numbers_of_keys_that_are_named(case: AttentionCase, other: int, data: st.DataObject) -> None:
    """And where cuDNN, which may refuse one number of keys and not another, would be asked, there is but one."""
    left = data.draw(st.none() | st.integers(0, 2**31))
    given_keys = partial(equal_choice, case.q_len, window_left=left, asked=case.deterministic)
    fewest, most = given_keys(case.k_len)
    assert fewest <= case.k_len <= most
    engine, window = choose_attention(case).engine, check_window("attention", left, None, case.k_len)
    for k_len in (fewest, most, data.draw(st.integers(fewest, most))):
        assert choose_attention(case._replace(k_len=k_len)).engine == engine
        assert check_window("attention", left, None, k_len) == window
    if engine == "cudnn":
        assert fewest == most
    assert (given_keys(other) == (fewest, most)) == (fewest <= other <= most)


def test_a_growing_cache_is_one_call() -> None:
    choice = partial(equal_choice, window_left=None, asked=False)
    assert choice(1, 2) == choice(1, 9999) == (2, 2**31 - 1)
    assert choice(64, 64) == (64, 64)
    assert choice(64, 63) == (1, 63)
    assert choice(1, 9999, asked=True) == (9999, 9999)
    assert [choice(1, keys, window_left=100) for keys in (50, 100, 101)] == [(2, 100), (2, 100), (101, 2**31 - 1)]
    assert [choice(64, keys, window_left=0) for keys in (1, 64, 65)] == [(1, 63), (64, 64), (65, 2**31 - 1)]


@rows(
    [
        ({}, "flash", "read in place"),
        ({"q_len": 1, "softcap": True, "sinks": True, "lse": True}, "flash", ""),
        ({"dtype": "float32"}, "flash", ""),
        ({"dtype": "float32", "tf32": False}, "fallback", "MLX_ENABLE_TF32=0"),
        ({"capability": (7, 5)}, "fallback", "sm_75"),
        ({"k_len": 0}, "fallback", "a dimension is 0"),
    ],
)
def test_packed_sequences(changed: dict[str, Any], engine: str, reason: str) -> None:
    assert says(choose_varlen(PREFILL._replace(**changed)), engine, reason)


@pytest.mark.parametrize(
    ("changed", "page_size", "engine", "reason"),
    [
        ({}, 16, "decode", "read in place"),
        ({"q_len": 32, "softcap": True, "sinks": True, "lse": True, "window": "left"}, 64, "decode", ""),
        ({}, 24, "fallback", "a multiple of 16 keys, not 24"),
        ({"q_len": 33}, 16, "fallback", "up to 32 queries"),
        ({"k_len": 0}, 16, "fallback", "a dimension is 0"),
    ],
    ids=str,
)
def test_pages(changed: dict[str, Any], page_size: int, engine: str, reason: str) -> None:
    assert says(choose_paged(STEP._replace(**changed), page_size), engine, reason)


@pytest.mark.parametrize(
    ("dtype", "sizes", "dims", "reason"),
    [
        ("bfloat16", (2, 4), (128, 64), ""),
        ("float64", (2, 4), (128, 64), "mlx-cuda's kernels compute float16, bfloat16, float32, not float64"),
        ("float32", (2, 0), (128, 64), "a dimension is 0"),
        ("float16", (2, 4), (128, 0), "a dimension is 0"),
        ("float16", (2, 4), (128, 60), "the kernel needs head_dim a multiple of 8, not 60"),
    ],
)
def test_new_keys_in_pages(dtype: str, sizes: tuple[int, ...], dims: tuple[int, int], reason: str) -> None:
    choice = choose_update(dtype, sizes, dims)
    assert (choice.engine, choice.reason) == (("fallback", reason) if reason else ("fused", "keys and values are written in one pass"))


def test_against_native() -> None:
    assert not against_native("float32", (3, 4))
    assert against_native("float64", (3, 4))
    assert against_native("float16", (3, 0))
