"""The list of operations, for explain, tune, patch and the tests."""

from __future__ import annotations

from typing import Any

from ._all_sum import all_sum
from ._attention.attention import attention
from ._attention.paged import paged_attention, paged_cache_update
from ._attention.quantized import quantized_attention
from ._attention.varlen import attention_varlen
from ._matmul.fp8 import fp8_matmul, quantize_fp8
from ._matmul.gather import gather_mm, gather_qmm
from ._matmul.grouped import grouped_matmul
from ._matmul.linear import linear
from ._matmul.quantized import quantized_matmul
from ._recurrence.gated_delta import gated_delta
from ._recurrence.short_conv import short_conv
from ._recurrence.ssd import ssd
from ._swiglu import swiglu

_ALL: tuple[Any, ...] = (
    attention, attention_varlen, paged_attention, paged_cache_update, quantized_attention, linear, swiglu, quantized_matmul, gather_mm,
    gather_qmm, grouped_matmul, fp8_matmul, quantize_fp8, gated_delta, ssd, short_conv, all_sum,
)  # fmt: skip
OPERATIONS: dict[str, Any] = {each.__name__: each for each in _ALL}
