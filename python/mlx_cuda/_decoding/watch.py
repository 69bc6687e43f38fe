"""Whether a model still is what it was when its step was captured: everything that is reachable from it, watched.

A captured step is launched without the model's Python code, so it is right only while that code would do the same. What is reachable
is found here, once for each capture; whether anything of it has changed is asked at each step, in C++ (src/bindings/watch.h).

Not seen: variables of modules, files and the environment; what objects of C types hold without telling Python's garbage collector;
and code that is replaced inside of a method that stays.
"""

from __future__ import annotations

import functools
import gc
import importlib
import types
from typing import TYPE_CHECKING, Any, NamedTuple

import mlx.core as mx

from .._loader import native
from .caches import NotReplayed

if TYPE_CHECKING:
    from collections.abc import Iterable

Module: Any = importlib.import_module("mlx.nn").Module  # whose names mypy does not see

STATE = "_mlx_cuda_decoding"  # the attribute of a model that holds its captured steps
TRAINING_ONLY = "_no_grad"  # a set of each module's, whose content no call reads
MOST = 100_000  # objects: more would take longer to compare than a step takes

ATOMS = (int, float, complex, bool, str, bytes, range, type(None), type(...), types.CodeType, mx.Dtype)  # equal ones are as good
CONTAINERS = (dict, list, tuple)
HEAP_TYPE, HAVE_GC = 1 << 9, 1 << 14  # flags of types: made by a class statement, and known to the garbage collector
PYTHONS_OWN = {"builtins", "abc", "typing", "enum", "functools", "types", "collections"}  # modules whose classes nobody changes


class Watch:
    """All that is reachable from a model, as it is now.

    The model itself is not held, so that it is freed as if nobody watched it.
    """

    def __init__(self, model: Any, stream: mx.Stream) -> None:
        self._module, self._stream = native.module(stream), stream
        self._found = found = _Found(model)
        self._others = tuple(found.others)
        self._native = self._module.Watch(model, found.instances, found.dicts, found.lists, self._others, gc.get_referents, STATE)

    def same(self, model: Any) -> bool:
        """Whether it is what it was, or holds other objects of equal values: some models write weights of theirs anew in each call.

        Never where an array is that of a transformation, as in training: it has no value.
        """
        if self._native.unchanged(model):
            return True
        now = Watch(model, self._stream)
        pairs = self._found.arrays_beside(now._found)
        changed = [pair for pair in pairs or [] if not self._module.same_arrays([pair[0]], [pair[1]])]
        if pairs is None or self._module.traced([new for _, new in changed]) or not all(_equal(*pair) for pair in changed):
            return False
        self._found, self._others, self._native = now._found, now._others, now._native
        return True


class _Rank(NamedTuple):
    """The place of an object among those that were found."""

    of: int


class _Found:
    """What is reachable from a model, nearest first. None stands for the model."""

    def __init__(self, model: Any) -> None:
        self.instances: list[Any] = []  # whose class stays
        # Dicts whose content stays; before each the object of whose attributes it has to be, or False. Of a module's nothing is asked:
        # `module.__dict__ = …` puts that among its weights.
        self.dicts: list[tuple[Any, Any]] = []
        self.lists: list[Any] = []
        self.others: list[Any] = []  # whose referents stay
        # What each holds: its class, names if there are any, and values, of which arrays are as they are now: an update in place leaves
        # these alone.
        self._parts: list[tuple[type, tuple[Any, ...], list[Any]]] = []
        self._kept: list[Any] = []  # so that nothing else has the address of one of these
        self._rank = {id(model): 0}
        following = [model]
        for each in following:  # which grows meanwhile
            for value in self._look_into(each, None if each is model else each):
                if _refers(value) and id(value) not in self._rank:
                    self._rank[id(value)] = len(following)
                    following.append(value)
        # Only now all ranks are known.
        self._parts = [(cls, names, [self._form(value) for value in values]) for cls, names, values in self._parts]
        self._kept = [value for value in self._kept if value is not model]

    def arrays_beside(self, now: _Found) -> list[tuple[mx.array, mx.array]] | None:
        """The arrays that were there, each beside the one that is in its place; None where anything else is not what it was."""
        pairs = []
        if len(self._parts) != len(now._parts):
            return None
        for before, after in zip(self._parts, now._parts, strict=True):
            if before[:2] != after[:2] or len(before[2]) != len(after[2]):
                return None
            for old, new in zip(before[2], after[2], strict=True):
                if isinstance(old, mx.array) and isinstance(new, mx.array):
                    pairs.append((old, new))
                elif old is not new and not (type(old) is type(new) and isinstance(old, (*ATOMS, _Rank)) and old == new):
                    return None
        return pairs

    def _form(self, value: Any) -> Any:
        if isinstance(value, mx.array):
            return value.__copy__()
        rank = self._rank.get(id(value))
        return value if rank is None else _Rank(rank)

    def _look_into(self, each: Any, named: Any) -> list[Any]:
        """Have it be watched; what is looked into next."""
        cls = type(each)
        if isinstance(each, type):
            return self._look_into_class(each)
        if type(each) is types.FunctionType:
            self.others.append(each)
            return self._hold(each, [each.__code__, each.__closure__, each.__defaults__, each.__kwdefaults__, vars(each)])
        found: list[Any] = []
        if isinstance(each, dict):
            self.dicts.append((False, named))
            found += self._hold(each, each.values(), tuple(each))
        elif isinstance(each, list):
            self.lists.append(each)
            found += self._hold(each, each)
        elif isinstance(each, tuple):
            found += self._hold(each, each)
        return found if cls in CONTAINERS else [*found, cls, *self._look_into_instance(each, named)]

    def _look_into_instance(self, each: Any, named: Any) -> list[Any]:
        cls, attributes, found = type(each), getattr(each, "__dict__", None), []
        if isinstance(attributes, dict):
            self.instances.append(named)
            self.dicts.append((named is not None and not isinstance(each, Module) and each, named is not None and attributes))
            shown = {name: value for name, value in attributes.items() if name != STATE}
            held = self._hold(each, shown.values(), tuple(shown))
            found += [value for value, name in zip(held, shown, strict=True) if name != TRAINING_ONLY]
        if not isinstance(each, Module) or any(vars(base).get("__slots__") for base in cls.__mro__):
            if _can_be_written(each):
                raise NotReplayed(f"it holds a {cls.__module__}.{cls.__qualname__}, whose content cannot be watched")
            self.others.append(each)
            found += self._hold(each, [value for value in gc.get_referents(each) if value is not attributes])
        return found

    def _look_into_class(self, cls: type) -> list[Any]:
        """Its attributes and methods, and what methods' closures hold; the same of the classes that it is made of."""
        if not cls.__flags__ & HEAP_TYPE or cls.__module__ in PYTHONS_OWN:
            return []
        (content,) = gc.get_referents(vars(cls))  # what the proxy is of
        self.dicts.append((False, content))
        self._hold(cls, content.values(), tuple(content))
        own = {name: value for name, value in content.items() if not name.startswith("__") or name == "__call__"}
        methods = [value for value in own.values() if isinstance(value, types.FunctionType)]
        values = [value for value in own.values() if isinstance(value, CONTAINERS) or type(value) is functools.partial]
        return [*cls.__mro__[1:], *values, *(method.__closure__ for method in methods)]

    def _hold(self, each: Any, values: Iterable[Any], names: tuple[Any, ...] = ()) -> list[Any]:
        own = list(values)
        self._kept += [each, *own]
        self._parts.append((type(each), names, own))
        if len(self._kept) > MOST:
            raise NotReplayed(f"it holds more than {MOST} objects, which are too many to watch")
        return own


def _refers(value: Any) -> bool:
    """Whether it may hold what a model's code reads."""
    return bool(type(value).__flags__ & HAVE_GC or _can_be_written(value)) and not isinstance(value, (mx.array, types.ModuleType))


def _can_be_written(value: Any) -> bool:
    """Whether it is memory that others may write to, as NumPy's arrays are."""
    if isinstance(value, (mx.array, *ATOMS)):
        return False
    try:
        with memoryview(value) as view:
            return not view.readonly
    except TypeError:
        return False


def _equal(one: mx.array, other: mx.array) -> bool:
    return (one.shape, one.dtype) == (other.shape, other.dtype) and bool(mx.array_equal(one, other).item())
