"""The signatures of models: which arguments are tokens and caches, and where their results have logits."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import mlx.core as mx

FIXED = (bool, int, float, str)  # of other arguments, those that a captured step has for good
MODELS = {"Model", "LanguageModel"}  # what mlx-lm, and those that have copies of it, call what is given tokens and gives logits
POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


class Signature(NamedTuple):
    """The names of a model's positional arguments; the first are the tokens."""

    names: tuple[str, ...]
    cache: str

    @classmethod
    def of(cls, function: Callable[..., Any]) -> Signature:
        parameters = inspect.signature(function).parameters.values()
        names = tuple(each.name for each in parameters if each.kind in POSITIONAL)[1:]
        names = names if len(names) > 1 else ("inputs", "cache")
        return cls(names, "cache" if "cache" in names else names[1])

    def read(self, arguments: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, Any, dict[str, Any]]:
        """Return the tokens, the caches and the other arguments."""
        if len(arguments) == len(options) == 1 and self.cache in options:  # as at each step
            return arguments[0], options[self.cache], {}
        given = dict(zip(self.names, arguments, strict=False)) | options
        fits = len(given) == len(arguments) + len(options)  # none too many, and none twice: the model says what is wrong
        tokens, cache = given.pop(self.names[0], None), given.pop(self.cache, None)
        rest = {name: value for name, value in given.items() if value is not None}
        return tokens, cache, rest if fits else {**rest, "": arguments}


def is_fixed(rest: dict[str, Any], read: str | None = None) -> bool:
    """Return whether a step can be captured for these arguments. ``read``: the one that a captured step reads on the device."""
    return all(isinstance(value, FIXED) or name == read for name, value in rest.items())


def takes_tokens(function: Any) -> bool:
    """Return whether it looks like a language model, and not like one with images."""
    try:
        parameters = list(inspect.signature(function).parameters)[1:]
    except (TypeError, ValueError):
        return False
    return "cache" in parameters[1:] and "pixel_values" not in parameters


def logits_of(result: Any) -> tuple[Any, Callable[..., Any] | None]:
    """Return the logits, and a function that rebuilds the model's result: mlx-vlm's has other fields, which must be empty."""
    logits = getattr(result, "logits", None)
    if not dataclasses.is_dataclass(result) or isinstance(result, type) or not isinstance(logits, mx.array):
        return result, None
    others = [getattr(result, field.name) for field in dataclasses.fields(result) if field.name != "logits"]
    return (result, None) if any(other is not None for other in others) else (logits, type(result))
