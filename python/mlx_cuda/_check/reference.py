"""The same model in float32, by MLX's basic operations: the reference of both sides.

Its process runs with MLX_ENABLE_TF32=0, so matmuls are float32 throughout. Quantized weights are dequantized for each matmul; 16-bit
matrices are promoted in the matmul, which is exact, so the model takes hardly more memory.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import mlx.core as mx

from .forms import Answer, Judged, Side
from .measure import CHUNK, Reading, numbers, quantized, read_prompt, read_steps
from .plan import Plan


def widen(model: Any) -> None:
    """Make a model of mlx-lm compute in float32, for the rest of the process."""
    nn: Any = importlib.import_module("mlx.nn")  # whose names mypy does not see
    _compute_by_dequantizing()
    for module in model.modules():
        own = {name: value for name, value in module.items() if isinstance(value, mx.array) and mx.issubdtype(value.dtype, mx.floating)}
        for name, value in own.items():
            if value.ndim < 2 or isinstance(module, nn.Embedding):  # whose rows are no factors of a matmul
                module[name] = value.astype(mx.float32)
    mx.eval(model.parameters())


def _compute_by_dequantizing() -> None:
    dequantize, gather_mm = mx.dequantize, mx.gather_mm

    def wide(w: mx.array, /, scales: mx.array, biases: mx.array | None = None, *arguments: Any, **options: Any) -> mx.array:
        if biases is not None:  # of mode "affine"
            scales, biases = scales.astype(mx.float32), biases.astype(mx.float32)
        return dequantize(w, scales, biases, *arguments, **{**options, "dtype": mx.float32})

    def quantized_matmul(
        x: mx.array, w: mx.array, /, scales: mx.array, biases: mx.array | None = None, transpose: bool = True,
        group_size: int | None = None, bits: int | None = None, mode: str = "affine", **_: Any,
    ) -> mx.array:  # fmt: skip
        weights = wide(w, scales, biases, group_size=group_size, bits=bits, mode=mode)
        return x.astype(mx.float32) @ (weights.swapaxes(-1, -2) if transpose else weights)

    def gather_qmm(
        x: mx.array, w: mx.array, /, scales: mx.array, biases: mx.array | None = None,
        lhs_indices: mx.array | None = None, rhs_indices: mx.array | None = None, transpose: bool = True,
        group_size: int | None = None, bits: int | None = None, mode: str = "affine", global_scale: mx.array | None = None, **_: Any,
    ) -> mx.array:  # fmt: skip
        weights = wide(w, scales, biases, group_size=group_size, bits=bits, mode=mode, global_scale=global_scale)
        weights = weights.swapaxes(-1, -2) if transpose else weights
        return gather_mm(x.astype(mx.float32), weights, lhs_indices, rhs_indices)

    for function in (quantized_matmul, gather_qmm):
        setattr(mx, function.__name__, function)
    setattr(mx, "dequantize", wide)  # noqa: B010  (mypy takes no assignment)


class Reference:
    """The texts and answers of both sides in float32."""

    def __init__(self, model: Any, plan: Plan, upstream: Side, patched: Side) -> None:
        widen(model)
        self.model, self.plan, self.upstream, self.patched = model, plan, upstream, patched
        self.found: Side = {"passages": {}, "judged": {}, "errors": {}}
        dtype = model(mx.array(upstream["tokens"][:2])[None]).dtype
        if dtype != mx.float32:
            raise ValueError(f"the model's own code computes its logits in {dtype}, whatever its weights are")

    @property
    def parts(self) -> dict[str, Callable[[], None]]:
        reading = {name: partial(self._read, name) for name in self.upstream["passages"]}
        return {**reading, **{name: partial(self._judge, name) for name in self.upstream["answers"]}}

    def _read(self, name: str) -> None:
        tokens, ids = self.upstream["tokens"], self.upstream["passages"][name]["ids"]
        if name == "prompt":
            seen = read_prompt(self.model, tokens, self.plan, ids)
        else:
            seen = read_steps(self.model, tokens, self.plan, ids, few=quantized if name == "cache" else None, at_once=CHUNK)
        self.found["passages"][name] = seen

    def _judge(self, name: str) -> None:
        theirs = self.upstream["answers"][name]
        ours = self.patched.get("answers", {}).get(name, theirs)
        self.found["judged"][name] = [judge(self.model, *pair) for pair in zip(theirs, ours, strict=True)]


def judge(model: Any, theirs: Answer, ours: Answer) -> Judged:
    """Judge the tokens of both sides after a prompt."""
    values, upstream = follow(model, theirs["prompt"], theirs["tokens"], theirs["ids"])
    same = ours["tokens"] == theirs["tokens"]
    patched = None if same else follow(model, ours["prompt"], ours["tokens"], theirs["ids"])[1]
    return {"values": values, "upstream": upstream, "patched": patched}


def follow(model: Any, prompt: list[int], tokens: list[int], ids: list[list[int]]) -> tuple[list[list[float]], list[float]]:
    """Return, for each of these tokens, some logits and how far the token is below the maximum."""
    reading, begin = Reading(model, prompt + tokens, None), len(prompt) - 1
    reading.skip(0, begin)
    logits = model(reading.tokens[None, begin : begin + len(tokens)], cache=reading.cache)[0].astype(mx.float32)
    below = logits.max(axis=-1) - mx.take_along_axis(logits, mx.array(tokens)[:, None], axis=-1)[:, 0]
    values = mx.take_along_axis(logits, mx.array(ids), axis=-1)
    return numbers(values), numbers(below)
