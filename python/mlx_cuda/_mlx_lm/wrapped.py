"""Models whose steps are captured while MLX is patched: mlx-lm's, and those of packages with copies of its code."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import wraps
from typing import Any

from .._replay.watch import STATE, Module
from .caches import has_known_caches
from .calls import MODELS, Signature, is_fixed, takes_tokens
from .copies import TRIED, package_of
from .in_pages import restore
from .models import _all, _inside, _on_gpu, decoding_of, is_step, step_of
from .positions import NAME, notes_of
from .prompts import begun_ahead, is_prompt


def replaying(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a model's ``__call__`` with captured decode steps."""
    signature = Signature.of(function)

    @wraps(function)
    def call(model: Any, *arguments: Any, **options: Any) -> Any:
        if getattr(_inside, "a_step", False):
            return function(model, *arguments, **options)
        tokens, cache, rest = signature.read(arguments, options)
        step, fixed = is_step(tokens, cache), not rest or is_fixed(rest, NAME if notes_of(model) else None)
        if step and not fixed:
            decoding_of(model).reason = f"its steps are given {', '.join(rest)} besides their tokens and caches"
        if not step or not fixed:
            of_a_prompt = is_prompt(tokens, cache) and _on_gpu(tokens)
            if of_a_prompt or STATE in vars(model):
                decoding_of(model).notice()
            if of_a_prompt:
                decoding_of(model).make_room()
            with begun_ahead(cache) if of_a_prompt and decoding_of(model).may_begin(model) else contextlib.nullcontext():
                return function(model, *arguments, **options)
        return step_of(model, function, tokens, cache, rest, at_once=False)[0]

    vars(call)["unpatched"] = function
    return call


def _is_model(cls: type) -> bool:
    """Return whether it is a model of mlx-lm, or of a package with known copies of mlx-lm's caches."""
    if cls.__name__ not in MODELS or "__call__" not in vars(cls):
        return False
    if cls.__module__.startswith("mlx_lm.models."):
        return cls.__name__ == "Model"
    return takes_tokens(vars(cls)["__call__"]) and has_known_caches(package_of(cls))


def _modules() -> list[type]:
    """Return all layer classes."""
    found: list[type] = [Module]
    for cls in found:
        found.extend(cls.__subclasses__())
    return list(dict.fromkeys(found))


def _wrap(cls: type) -> None:
    if _is_model(cls) and not hasattr(vars(cls)["__call__"], "unpatched"):
        setattr(cls, "__call__", replaying(vars(cls)["__call__"]))  # noqa: B010  (mypy takes no assignment to a method)


def not_replaying(model: Any) -> str:
    """Return why a model's steps are not captured while MLX is patched, or an empty string."""
    cls = type(model)
    if not installed() or hasattr(cls.__call__, "unpatched"):
        return ""
    return f"{cls.__module__}.{cls.__qualname__} is no model of mlx-lm, and of none that has its caches from {', '.join(TRIED)}"


def installed() -> bool:
    """Return whether steps are captured at present."""
    hook = vars(Module).get("__init_subclass__")
    return hook is not None and bool(vars(hook.__func__)["replaying"])


def install(also: Callable[[], object], *, replay: bool = True) -> None:
    """Capture the steps of models, also of those imported later. ``also`` is called now, and for each later import."""
    if replay:
        for cls in _modules():
            _wrap(cls)
    also()

    def made(cls: type, /, **options: Any) -> None:
        super(Module, cls).__init_subclass__(**options)
        if cls.__name__ in MODELS or cls.__module__.startswith("mlx_lm.models."):
            if replay:
                _wrap(cls)
            also()

    vars(made)["replaying"] = replay
    Module.__init_subclass__ = classmethod(made)


def remove() -> None:
    """Restore the models' ``__call__`` and release all captures."""
    for decoding in list(_all):
        for session in decoding.sessions:
            session.release()
        decoding.forget()
    restore()
    if "__init_subclass__" in vars(Module):
        del Module.__init_subclass__
    for cls in _modules():
        if hasattr(vars(cls).get("__call__"), "unpatched"):
            setattr(cls, "__call__", vars(cls)["__call__"].unpatched)  # noqa: B010
