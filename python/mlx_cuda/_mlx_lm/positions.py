"""Positions that a model counts itself: those of mlx-vlm's Qwen VL, in which the tokens of an image share some.

Such a model stores the offset of positions after a prompt (``_rope_deltas``), or gets it in each step, and adds it to the token's position.
A captured step reads it from device memory.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from .copies import known_as

NAME = "rope_deltas"  # of the argument
NOTE = "_rope_deltas"
NOTES = (NOTE, "_position_ids")  # attributes that a prompt writes; with the argument, a step reads neither. Names that Python has once
KNOWN = "LanguageModel"  # as what the classes are known whose code this holds for


_notes: dict[type, tuple[str, ...]] = {}


def notes_of(model: Any) -> tuple[str, ...]:
    """Return the attributes that it stores, if its code is known to use the argument instead."""
    cls = type(model)
    notes = _notes.get(cls)
    if notes is None:
        function: Any = getattr(cls.__call__, "unpatched", cls.__call__)
        keeps = NOTE in getattr(getattr(function, "__code__", None), "co_names", ()) and known_as(cls) == KNOWN
        notes = _notes[cls] = NOTES if keeps else ()
    return notes


def numbers_of(deltas: mx.array, batch: int) -> tuple[int, ...] | None:
    """Return one number per sequence, which synchronizes; None without numbers, or in another shape than that of prompts."""
    if not mx.issubdtype(deltas.dtype, mx.integer) or deltas.shape not in {(1, 1), (batch, 1)}:
        return None
    numbers: list[int] = deltas.flatten().tolist()  # type: ignore[assignment]
    return tuple(numbers * batch if len(numbers) == 1 else numbers)
