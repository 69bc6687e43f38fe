"""A fetched model in one of its forms, the same in float32, and what one reads off their logits."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from benchmarks.mlx_lm_parts import part

from .judging import Reading

FORMS: dict[str, dict[str, Any] | None] = {
    "bf16": None,
    "8 bit": {"bits": 8, "group_size": 64, "mode": "affine"},
    "4 bit": {"bits": 4, "group_size": 64, "mode": "affine"},
    "mxfp4": {"bits": 4, "group_size": 32, "mode": "mxfp4"},
}
ROWS = 64  # positions that are read at a time
LEADING = 16  # of float32's best tokens: those that another side may take for the best one


def load(folder: Path, form: str) -> tuple[Any, Any]:
    """The model as mlx-lm loads and quantizes it, and its tokenizer."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    utils = part("utils")
    model, tokenizer = utils.load(str(folder))
    if options := FORMS[form]:
        model, _ = utils.quantize_model(model, {}, options["group_size"], options["bits"], options["mode"])
    mx.eval(model.parameters())
    return model, tokenizer


def in_float32(folder: Path, model: Any) -> Any:
    """A model that computes with the same values, quantized ones too, in float32."""
    other, _ = part("utils").load_model(folder)
    weights: dict[str, Any] = dict(tree_flatten(other.parameters()))
    for name, layer in model.named_modules():
        if hasattr(layer, "bits"):
            scales, biases = layer.scales, layer.get("biases")
            if layer.mode == "affine":
                scales, biases = scales.astype(mx.float32), biases.astype(mx.float32)
            options = {"group_size": layer.group_size, "bits": layer.bits, "mode": layer.mode, "dtype": mx.float32}
            weights[f"{name}.weight"] = mx.dequantize(layer.weight, scales, biases, **options)
    other.load_weights([(name, weight.astype(mx.float32)) for name, weight in weights.items()])
    mx.eval(other.parameters())
    return other


def _of(logits: mx.array, tokens: mx.array) -> mx.array:
    return mx.take_along_axis(logits, tokens[:, None], axis=-1)[:, 0]


def read(logits: mx.array, exact: mx.array, following: mx.array, chosen: mx.array | None = None) -> Reading:
    """A side's logits beside float32's, ``[T, vocabulary]`` each. ``chosen``: what it took as the best tokens, where it said so."""
    found: dict[str, list[Any]] = {name: [] for name in ("nll", "best", "lost", "error", "most")}
    for at in range(0, exact.shape[0], ROWS):
        rows, wanted, after = logits[at : at + ROWS].astype(mx.float32), exact[at : at + ROWS], following[at : at + ROWS]
        taken = rows.argmax(axis=-1) if chosen is None else chosen[at : at + ROWS]
        off, size = _centered(rows) - _centered(wanted), mx.linalg.norm(_centered(wanted), axis=-1)
        found["nll"].extend(_listed(mx.logsumexp(rows, axis=-1) - _of(rows, after)))
        found["best"].extend(_listed(taken))
        found["lost"].extend(_listed(wanted.max(axis=-1) - _of(wanted, taken)))
        found["error"].extend(_listed(mx.linalg.norm(off, axis=-1) / size))
        leading = mx.argpartition(-wanted, LEADING - 1, axis=-1)[:, :LEADING]
        found["most"].extend(_listed(mx.abs(mx.take_along_axis(off, leading, axis=-1)).max(axis=-1)))
    return Reading(**found)


def _listed(values: mx.array) -> list[Any]:
    numbers: Any = values.tolist()
    return list(numbers)


def _centered(logits: mx.array) -> mx.array:
    return logits - logits.mean(axis=-1, keepdims=True)
