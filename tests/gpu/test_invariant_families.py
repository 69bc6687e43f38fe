"""Every model of ``mlx_lm.models``, small, under ``patch(batch_invariant=True)``: the same bits in pieces and in company, or an error."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

import mlx.core as mx
import mlx_cuda
import numpy as np
import pytest
from mlx_cuda._invariant.state import NotInvariant, refusal

from benchmarks.families.sizes import VOCABULARY
from benchmarks.families.walk import cache_of, families, make

from .invariant_parts import differing, logits_of
from .mlx_lm_parts import part

if find_spec("mlx_lm") is None:
    pytest.skip("mlx_lm is not installed", allow_module_level=True)

pytestmark = pytest.mark.gpu

LENGTH, SHORT = 150, 37
PIECES = ([7, 100, 1, 42], [64, 83, 1, 1, 1], [149, 1])
NOT_PADDED = {
    "afm7": "its last layers count padding as places",
    "gpt_bigcode": "it takes the offset of a cache for a number",
}


@pytest.fixture(autouse=True)
def _patched() -> Iterator[None]:
    if why := refusal():
        pytest.skip(why)
    with mlx_cuda.patch(batch_invariant=True):
        yield


@pytest.mark.parametrize("name", families())
def test_a_model_has_it_or_says_why_not(name: str) -> None:
    model, tokens = make(name, mx.bfloat16), np.random.default_rng(0).integers(1, VOCABULARY, LENGTH).tolist()
    try:
        whole = logits_of(model, tokens, [LENGTH])
    except NotInvariant:
        return
    except (RuntimeError, TypeError, ValueError) as error:
        with mlx_cuda.patch(batch_invariant=False), pytest.raises(type(error)):  # nor does MLX alone run it
            logits_of(model, tokens, [LENGTH])
        return
    for sizes in PIECES:
        assert differing(logits_of(model, tokens, sizes), whole) == 0, sizes
    cache = part("models.cache")
    if name not in NOT_PADDED and all(type(each) is cache.KVCache for each in cache_of(model)):
        padding = LENGTH - SHORT
        caches = [cache.BatchKVCache([padding, 0]) for _ in cache_of(model)]
        together = model(mx.array([[7] * padding + tokens[:SHORT], tokens]), cache=caches)
        assert differing(together[0, padding:], whole[:SHORT]) == 0
        assert differing(together[1], whole) == 0
