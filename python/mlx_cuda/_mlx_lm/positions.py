"""Positions that a model counts beside its caches: those of mlx-vlm's Qwen VL, where a picture's tokens share some.

Such a model notes in itself by how much the positions after a prompt are behind (``_rope_deltas``), or is given that at each step, and adds
it to the place of a token. A step that is captured reads it where it reads places.
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
    """The names of what it notes in itself, if its code is known to go by the argument."""
    cls = type(model)
    notes = _notes.get(cls)
    if notes is None:
        function: Any = getattr(cls.__call__, "unpatched", cls.__call__)
        keeps = NOTE in getattr(getattr(function, "__code__", None), "co_names", ()) and known_as(cls) == KNOWN
        notes = _notes[cls] = NOTES if keeps else ()
    return notes


def numbers_of(deltas: mx.array, batch: int) -> tuple[int, ...] | None:
    """One for each sequence, which waits for the device; None where there are none, or in no such shape as prompts give."""
    if not mx.issubdtype(deltas.dtype, mx.integer) or deltas.shape not in {(1, 1), (batch, 1)}:
        return None
    numbers: list[int] = deltas.flatten().tolist()  # type: ignore[assignment]
    return tuple(numbers * batch if len(numbers) == 1 else numbers)
