"""Every way to change one thing that is reachable from a model, to ask whether a captured step notices.

Found by other means than the package's own (_replay/watch.py): by names, keys, and places.
"""

from __future__ import annotations

import functools
import importlib
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import mlx.core as mx

nn: Any = importlib.import_module("mlx.nn")  # whose names mypy does not see

MISSING = object()
OWN = ("mlx_lm.", "mlx.nn", "tests.", "test_")  # modules whose classes a program may change


class Change(NamedTuple):
    name: str
    apply: Callable[[], Any]
    undo: Callable[[], Any]

    @contextmanager
    def made(self) -> Iterator[None]:
        self.apply()
        try:
            yield
        finally:
            self.undo()


class Wrapped(nn.Module):  # type: ignore[misc]
    """A layer of somebody's, around the one that was there; its results are other ones."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer = layer

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return _louder(self.layer(*arguments, **options))

    def __getattr__(self, name: str) -> Any:
        if name in self:
            return self[name]
        if "layer" not in self:
            raise AttributeError(name)
        return getattr(self["layer"], name)


def _louder(result: Any) -> Any:
    if isinstance(result, mx.array):
        return result * 2 if mx.issubdtype(result.dtype, mx.floating) else result
    return type(result)(map(_louder, result)) if type(result) in {tuple, list} else result


def _wrapped(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def louder(*arguments: Any, **options: Any) -> Any:
        return _louder(function(*arguments, **options))

    return louder


def other_values(value: Any) -> Iterator[tuple[str, Any]]:
    """What a program might put in the place of a value."""
    if isinstance(value, bool) or value is None:
        yield "turned", not value
    elif isinstance(value, int):
        yield "+ 1", value + 1
    elif isinstance(value, float):
        yield "* 2 + 1", value * 2 + 1
    elif isinstance(value, str):
        yield "another", value + "x"
    elif isinstance(value, mx.array):
        if value.size and mx.issubdtype(value.dtype, mx.floating):
            yield "* -1.5", value * -1.5
    elif isinstance(value, nn.Module):
        yield "wrapped", Wrapped(value)
    elif isinstance(value, tuple):
        for i, each in enumerate(value):
            for how, other in other_values(each):
                yield f"[{i}] {how}", (*value[:i], other, *value[i + 1 :])
    elif isinstance(value, functools.partial) or (callable(value) and not isinstance(value, type)):
        yield "wrapped", _wrapped(value)


def changes(model: Any) -> list[Change]:
    """Of all that is reachable, each once."""
    found: list[Change] = []
    seen: set[int] = set()
    waiting: list[tuple[str, Any]] = [("model", model)]
    for path, each in waiting:  # which grows meanwhile
        if id(each) in seen or isinstance(each, (mx.array, types.ModuleType, str, bytes, int, float, bool, type(None))):
            continue
        seen.add(id(each))
        waiting += _looked_into(path, each, found)
    return found


def _looked_into(path: str, each: Any, found: list[Change]) -> list[tuple[str, Any]]:
    inner: list[tuple[str, Any]] = []
    if isinstance(each, type):
        if each.__module__.startswith(OWN):
            for name, value in list(vars(each).items()):
                if isinstance(value, types.FunctionType) and name in {"__call__", *(n for n in vars(each) if not n.startswith("_"))}:
                    found.append(_of_attribute(f"{path}.{name} wrapped", each, name, _wrapped(value)))
                elif not name.startswith("__") and isinstance(value, (int, float, str, list, dict, mx.array)):
                    found += [_of_attribute(f"{path}.{name} {how}", each, name, other) for how, other in other_values(value)]
                    inner.append((f"{path}.{name}", value))
        return inner
    if isinstance(each, dict):
        for key, value in each.items():
            found += [_of_item(f"{path}[{key!r}] {how}", each, key, other) for how, other in other_values(value)]
            inner.append((f"{path}[{key!r}]", value))
            if isinstance(value, mx.array) and value.size and mx.issubdtype(value.dtype, mx.floating):
                found.append(_in_place(f"{path}[{key!r}] in place", value))
    elif isinstance(each, (list, tuple)):
        for i, value in enumerate(each):
            inner.append((f"{path}[{i}]", value))
            if isinstance(each, list):
                found += [_of_item(f"{path}[{i}] {how}", each, i, other) for how, other in other_values(value)]
    if type(each) is types.FunctionType:
        for name, cell in zip(each.__code__.co_freevars, each.__closure__ or (), strict=True):
            found += [
                _of_attribute(f"{path}'s {name} {how}", cell, "cell_contents", other) for how, other in other_values(cell.cell_contents)
            ]
            inner.append((f"{path}'s {name}", cell.cell_contents))
        found += [
            _of_attribute(f"{path}.__defaults__ {how}", each, "__defaults__", other) for how, other in other_values(each.__defaults__ or ())
        ]
        inner.append((f"{path}.__kwdefaults__", each.__kwdefaults__))
    elif isinstance(each, types.MethodType):
        inner += [(f"{path}.__self__", each.__self__), (f"{path}.__func__", each.__func__)]
    elif isinstance(each, functools.partial):
        inner += [(f"{path}.func", each.func), (f"{path}.args", each.args), (f"{path}.keywords", each.keywords)]
    elif type(each) not in {dict, list, tuple}:
        inner.append((type(each).__name__, type(each)))
        inner += [(base.__name__, base) for base in type(each).__mro__[1:]]
        slots = [name for base in type(each).__mro__ for name in _names(vars(base).get("__slots__", ())) if hasattr(each, name)]
        for name, value in (
            [*vars(each).items(), *((name, getattr(each, name)) for name in slots)]
            if hasattr(each, "__dict__")
            else [(name, getattr(each, name)) for name in slots]
        ):
            if name == "_mlx_cuda_decoding":
                continue
            found += [_of_attribute(f"{path}.{name} {how}", each, name, other) for how, other in other_values(value)]
            inner.append((f"{path}.{name}", value))
    return inner


def _names(slots: Any) -> tuple[str, ...]:
    return (slots,) if isinstance(slots, str) else tuple(slots)


def _of_item(name: str, owner: Any, key: Any, value: Any) -> Change:
    before = owner[key]
    return Change(name, lambda: owner.__setitem__(key, value), lambda: owner.__setitem__(key, before))


def _of_attribute(name: str, owner: Any, attribute: str, value: Any) -> Change:
    before = vars(owner)[attribute] if isinstance(owner, type) else getattr(owner, attribute)
    put = type.__setattr__ if isinstance(owner, type) else object.__setattr__
    return Change(name, lambda: put(owner, attribute, value), lambda: put(owner, attribute, before))


def _in_place(name: str, array: mx.array) -> Change:
    before = array.__copy__()

    def apply() -> None:
        array[...] = array * -1.5

    def undo() -> None:
        array[...] = before

    return Change(name, apply, undo)
