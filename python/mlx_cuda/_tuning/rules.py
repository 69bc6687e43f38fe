"""The measurements of dispatch thresholds: each threshold, its possible values, and calls that show whether they are faster."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, TypeAlias

import mlx.core as mx

from .._common.limits import KINDS, DispatchThresholds
from .._operations import OPERATIONS

Weights: TypeAlias = tuple[mx.array, mx.array, mx.array | None]  # numbers, scales and biases
Arguments: TypeAlias = list[tuple[tuple[Any, ...], dict[str, Any]]]  # those by place and those by name, of calls

FORMS: dict[str, dict[str, Any]] = {
    "affine 4": {"group_size": 64, "bits": 4, "mode": "affine"},
    "affine 8": {"group_size": 64, "bits": 8, "mode": "affine"},
    "fp4": {"group_size": 32, "bits": 4, "mode": "mxfp4"},
    "fp8": {"group_size": 32, "bits": 8, "mode": "mxfp8"},
}
COLUMNS, INNER = 14336, 4096  # of weights: the MLP of a model of 8 billion
EXPERTS, EXPERT_COLUMNS, EXPERT_INNER = 32, 1024, 2048
KV_HEADS, KEYS, DIM = 8, 4096, 128
COPIES = 3  # of weights, which calls take in turn, so that a cache does not hold them
CALLS = 6  # that are timed together
PLANS = 1.2  # cuDNN's calls count as taking so many times as long: a plan for each number of keys takes it 40 ms, which are not timed


@dataclass(frozen=True)
class Rule:
    """A threshold: its place in :class:`DispatchThresholds`, and calls of sizes that other values would move to another engine.

    For a number, each of ``sizes`` is tried as the threshold of calls of that size, and 0; for engines, each of ``engines`` with all sizes.
    """

    operation: str
    part: str  # a kind of weights, or "attention"
    field: str
    sizes: tuple[int, ...]
    arguments: Callable[[int], Arguments]
    engines: tuple[str, ...] = ()
    price: float = 1.0  # calls of the last of the engines count as taking so many times as long
    off_meanwhile: str = ""  # a limit of the same part that is 0 while this one is measured, so that calls come as far
    compiles: bool = False  # MLX compiles its kernels for it, half a minute for each kind of weights

    @property
    def name(self) -> str:
        return f"{self.part}: {self.field}"

    def calls(self, size: int) -> list[mx.array]:
        return [OPERATIONS[self.operation](*arguments, **options) for arguments, options in self.arguments(size)]

    def value(self, of: DispatchThresholds) -> int | str:
        value: int | str = getattr(of.attention if self.part == "attention" else of.matmul[self.part], self.field)
        return value

    def with_value(self, of: DispatchThresholds, value: int | str) -> DispatchThresholds:
        return self._with(of, {self.field: value})

    def trial(self, of: DispatchThresholds, value: int | str) -> DispatchThresholds:
        """Return the thresholds to use while calls are timed."""
        return self._with(of, {self.field: value} | ({self.off_meanwhile: 0} if self.off_meanwhile else {}))

    def _with(self, of: DispatchThresholds, changed: dict[str, Any]) -> DispatchThresholds:
        if self.part == "attention":
            return of._replace(attention=of.attention._replace(**changed))
        return of._replace(matmul={**of.matmul, self.part: of.matmul[self.part]._replace(**changed)})


@cache
def _arrays(count: int, *shape: int, dtype: mx.Dtype = mx.bfloat16) -> list[mx.array]:
    made = [mx.random.normal(shape).astype(dtype) for _ in range(count)]
    for each in made:
        mx.eval(each)
    return made


@cache
def _weights(kind: str, *shape: int, dtype: mx.Dtype = mx.bfloat16) -> list[Weights]:
    made = []
    for _ in range(COPIES):
        w, scales, *biases = mx.quantize(mx.random.normal(shape).astype(dtype), **FORMS[kind])
        mx.eval(w, scales, biases)
        made.append((w, scales, biases[0] if biases else None))
    return made


def _matmul(kind: str, rows: int, dtype: mx.Dtype = mx.bfloat16, *, transpose: bool = True) -> Arguments:
    (x,) = _arrays(1, rows, INNER if transpose else COLUMNS, dtype=dtype)
    parts = _weights(kind, COLUMNS, INNER, dtype=dtype)
    in_turn = (parts[i % COPIES] for i in range(CALLS))
    return [((x, *each, transpose), FORMS[kind]) for each in in_turn]


def _experts(kind: str, rows: int) -> Arguments:
    (x,), parts = _arrays(1, rows, 1, EXPERT_INNER), _weights(kind, EXPERTS, EXPERT_COLUMNS, EXPERT_INNER)
    chosen = (mx.arange(rows) * 7 % EXPERTS).astype(mx.uint32)
    in_turn = (parts[i % COPIES] for i in range(CALLS))
    return [((x, *each), {"rhs_indices": chosen, **FORMS[kind]}) for each in in_turn]


def _attention(queries: int, heads: int = 32, **options: Any) -> Arguments:
    (q,), (k, v) = _arrays(1, 2, heads, queries, DIM), _arrays(2, 2, KV_HEADS, KEYS, DIM)
    return [((q, k, v), options)] * CALLS


def _biased(keys: int) -> Arguments:
    (q,), (k, v), (bias,) = _arrays(1, 2, 32, keys, DIM), _arrays(2, 2, KV_HEADS, keys, DIM), _arrays(1, 1, 1, keys, keys)
    return [((q, k, v), {"mask": bias})] * CALLS


def rules() -> list[Rule]:
    """Return all rules; those whose calls make MLX compile kernels come last, but before rules that depend on them."""
    found = [
        Rule("attention", "attention", "growing", (16, 32, 64, 128), lambda rows: _attention(rows // 4, mask="causal")),
        Rule("attention", "attention", "before_flash", (32, 64, 128, 256), lambda rows: _attention(rows // 8, 64, softcap=30.0)),
        Rule("attention", "attention", "chunks", (512, 1024), lambda rows: _attention(rows, mask="causal"), ("flash", "cudnn"), PLANS),
        Rule("attention", "attention", "additive", (1024,), _biased, ("flash", "mlx")),
        Rule("quantized_matmul", "affine 4", "small_m", (1, 8, 16, 32, 64, 128), lambda rows: _matmul("affine 4", rows, mx.float32)),
    ]
    for kind in KINDS:
        found.append(Rule("quantized_matmul", kind, "not_transposed", (1, 2, 4, 8, 16), partial(_matmul, kind, transpose=False)))
        found.append(Rule("gather_qmm", kind, "gathered", (1, 8, 16, 32, 64, 128), partial(_experts, kind)))
    for kind in KINDS:
        multiply = partial(_matmul, kind)
        found.append(
            Rule(
                "quantized_matmul",
                kind,
                "upstream",
                (64, 128, 256, 512, 1024, 2048),
                multiply,
                off_meanwhile="half_precision",
                compiles=True,
            )
        )
        found.append(Rule("quantized_matmul", kind, "half_precision", (1, 8, 16, 32, 64, 128, 256, 512, 1024), multiply))
    return found


def forget() -> None:
    """Release the operands of the calls."""
    for kept in (_arrays, _weights):
        kept.cache_clear()
