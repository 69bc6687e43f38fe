"""Whether a model is unchanged since its step was captured: everything reachable from it is watched.

A captured step runs without the model's Python code, so it is right only while that code would do the same. Reachable objects are found
here, once per capture; each step compares them in C++ (src/bindings/watch.h).

Not detected: variables of modules, files and the environment; contents of C objects that Python's garbage collector does not see; and code
or defaults that are replaced inside a method.
"""

from __future__ import annotations

import functools
import gc
import importlib
import random
import types
import weakref
from collections.abc import Iterable
from typing import Any, NamedTuple

import mlx.core as mx

from .._loader import native
from .errors import NotReplayed

Module: Any = importlib.import_module("mlx.nn").Module  # whose names mypy does not see

STATE = "_mlx_cuda_decoding"  # the attribute of a model that holds its captured steps
TRAINING_ONLY = "_no_grad"  # a set of each module's, whose content no call reads
MOST = 100_000  # objects: more would take longer to compare than a step takes

ATOMS = (int, float, complex, bool, str, bytes, range, type(None), type(...), types.CodeType, mx.Dtype)  # equal ones are as good
CONTAINERS = (dict, list, tuple)
# Of whose objects all that matters is among what they hold: another one that holds the same is as good.
KNOWN_BY_CONTENT = {*CONTAINERS, set, frozenset, types.FunctionType, types.MethodType, types.CellType, functools.partial}
STATEFUL = (random.Random, weakref.ref, *weakref.ProxyTypes)  # that return something else each time, or an object without a reference
BETWEEN = (object(),)  # so that what one object loses is not taken for what the next has gained
HEAP_TYPE, HAVE_GC = 1 << 9, 1 << 14  # flags of types: made by a class statement, and known to the garbage collector
DESCRIPTORS = (property, staticmethod, classmethod, types.GetSetDescriptorType, types.MemberDescriptorType, types.BuiltinFunctionType)
OURS = f"{__name__.partition('.')[0]}."  # modules whose objects say nothing of a model
PYTHONS_OWN = {"builtins", "abc", "typing", "enum", "functools", "types", "collections"}  # modules whose classes do not change


class Watch:
    """Everything reachable from a model, in its present state.

    The model itself is not referred to, so that it can be freed.
    """

    def __init__(self, model: Any, stream: mx.Stream, notes: tuple[str, ...] = ()) -> None:
        """``notes``: names of attributes that the model writes, and that a step does not read."""
        self._module, self._stream, self._notes = native.module(stream), stream, notes
        unwatched = (STATE, *notes)
        self._found = found = _Found(model, unwatched)
        self._others = tuple(each for other in found.others for each in (other, BETWEEN))
        self._native = self._module.Watch(model, found.instances, found.dicts, found.lists, self._others, gc.get_referents, unwatched)

    def same(self, model: Any) -> bool:
        """Return whether the model is unchanged, or has other objects of equal values: some models write weights again in each call.

        False if an array is traced by a transformation, as in training: it has no value.
        """
        if self._native.unchanged(model):
            return True
        try:
            now = Watch(model, self._stream, self._notes)
        except NotReplayed:  # it holds something by now that cannot be watched
            return False
        pairs = self._found.arrays_beside(now._found)
        changed = [pair for pair in pairs or [] if not self._module.same_arrays([pair[0]], [pair[1]])]
        if pairs is None or self._module.traced([new for _, new in changed]) or not all(_equal(*pair) for pair in changed):
            return False
        self._found, self._others, self._native = now._found, now._others, now._native
        return True


class _Rank(NamedTuple):
    """The index of an object among those that were found."""

    of: int


class _Found:
    """The objects reachable from a model, nearest first. None stands for the model."""

    def __init__(self, model: Any, unwatched: tuple[str, ...] = (STATE,)) -> None:
        self.unwatched = unwatched  # names of what may change
        self.instances: list[Any] = []  # whose class stays
        # Dicts whose content stays; before each the object of whose attributes it has to be, or False. Of a module's nothing is asked:
        # `module.__dict__ = …` puts that among its weights.
        self.dicts: list[tuple[Any, Any]] = []
        self.lists: list[Any] = []
        self.others: list[Any] = []  # whose referents stay
        # The contents of each: its class, names if there are any, and values, with copies of arrays: an update in place does not change
        # them.
        self._parts: list[tuple[type, tuple[Any, ...], list[Any]]] = []
        self._kept: list[Any] = []  # so that nothing else has the address of one of these
        self._rank = {id(model): 0}
        try:
            self._find(model)
        except NotReplayed:
            raise
        except Exception as error:  # of an object's own code
            raise NotReplayed(f"it holds what cannot be watched: {error!r}") from error
        # Only now all ranks are known.
        self._parts = [(cls, names, [self._form(value) for value in values]) for cls, names, values in self._parts]
        self._kept = [value for value in self._kept if value is not model]

    def _find(self, model: Any) -> None:
        following = [model]
        for each in following:  # which grows meanwhile
            for value in self._look_into(each, None if each is model else each):
                if _refers(value) and id(value) not in self._rank:
                    self._rank[id(value)] = len(following)
                    following.append(value)

    def arrays_beside(self, now: _Found) -> list[tuple[mx.array, mx.array]] | None:
        """Return pairs of the former and the present arrays; None if anything else has changed."""
        pairs = []
        if len(self._parts) != len(now._parts):
            return None
        for before, after in zip(self._parts, now._parts, strict=True):
            if before[:2] != after[:2] or len(before[2]) != len(after[2]):
                return None
            for old, new in zip(before[2], after[2], strict=True):
                if isinstance(old, mx.array) and isinstance(new, mx.array):
                    pairs.append((old, new))
                elif old is not new and not (type(old) is type(new) and isinstance(old, (*ATOMS, _Rank)) and repr(old) == repr(new)):
                    return None
        return pairs

    def _form(self, value: Any) -> Any:
        if isinstance(value, mx.array):
            return value.__copy__()
        rank = self._rank.get(id(value))
        return _Rank(rank) if rank is not None and (type(value) in KNOWN_BY_CONTENT or isinstance(value, Module)) else value

    def _look_into(self, each: Any, named: Any) -> list[Any]:
        """Watch an object and return its contents. It goes by the type, because objects may claim another class."""
        cls, found = type(each), list[Any]()
        if issubclass(cls, type):
            return self._look_into_class(each)
        if cls is types.FunctionType:
            self.others.append(each)
            parts = [each.__code__, each.__closure__, each.__defaults__, each.__kwdefaults__, vars(each), each.__globals__]
            return self._hold(each, parts)[:-1]
        if issubclass(cls, dict):
            self.dicts.append((False, named))
            keys = tuple(key for key in dict.keys(each) if key not in self.unwatched)
            found += [*self._hold(each, [dict.__getitem__(each, key) for key in keys], keys), *keys]
        elif issubclass(cls, list):
            self.lists.append(each)
            found += self._hold(each, list.__iter__(each))
        elif issubclass(cls, tuple):
            found += self._hold(each, tuple.__iter__(each))
            if any(isinstance(value, mx.array) for value in found):
                self.others.append(each)
        return found if cls in CONTAINERS else [*found, cls, *self._look_into_instance(each, named)]

    def _look_into_instance(self, each: Any, named: Any) -> list[Any]:
        cls, found, is_module = type(each), list[Any](), isinstance(each, Module)
        if _can_be_written(each) or issubclass(cls, STATEFUL) or hasattr(cls, "__next__"):
            raise NotReplayed(f"it holds a {cls.__module__}.{cls.__qualname__}, whose content cannot be watched")
        attributes = getattr(each, "__dict__", None) if cls.__dictoffset__ else None
        if isinstance(attributes, dict):
            self.instances.append(named)
            self.dicts.append((named is not None and not is_module and each, named is not None and attributes))
            shown = {name: value for name, value in attributes.copy().items() if name not in self.unwatched}
            held = self._hold(each, shown.values(), tuple(shown))
            found += [value for value, name in zip(held, shown, strict=True) if not is_module or name != TRAINING_ONLY]
        if not is_module or any(vars(base).get("__slots__") for base in cls.__mro__):
            self.others.append(each)
            found += self._hold(each, [value for value in gc.get_referents(each) if value is not attributes])
        return found

    def _look_into_class(self, cls: type) -> list[Any]:
        """Return the attributes and methods of a class and its bases, and their contents."""
        if not cls.__flags__ & HEAP_TYPE or cls.__module__ in PYTHONS_OWN:
            return []
        (content,) = gc.get_referents(vars(cls))  # what the proxy is of
        self.dicts.append((False, content))
        self._hold(cls, content.values(), tuple(content))
        found: list[Any] = [*cls.__mro__[1:]]
        for name, value in content.items():
            for part in _parts_of_a_method(value):
                found += [part.__closure__, part.__defaults__, part.__kwdefaults__, vars(part)]
            if not name.startswith("__") and not isinstance(value, (type, types.FunctionType, *DESCRIPTORS)):
                found.append(value)
        return found

    def _hold(self, each: Any, values: Iterable[Any], names: tuple[Any, ...] = ()) -> list[Any]:
        own = list(values)
        self._kept += [each, *own]
        self._parts.append((type(each), names, own))
        if len(self._kept) > MOST:
            raise NotReplayed(f"it holds more than {MOST} objects, which are too many to watch")
        return own


def _parts_of_a_method(value: Any) -> list[types.FunctionType]:
    """Return the functions of a class attribute."""
    parts: list[Any]
    if isinstance(value, property):
        parts = [value.fget, value.fset, value.fdel]
    else:
        parts = [value.__func__ if isinstance(value, (staticmethod, classmethod)) else value]
    return [part for part in parts if type(part) is types.FunctionType]


def _refers(value: Any) -> bool:
    """Return whether an object may hold something that a model's code reads."""
    cls = type(value)
    if issubclass(cls, (mx.array, types.ModuleType)) or cls.__module__.startswith(OURS):
        return False
    return bool(cls.__flags__ & HAVE_GC) or _can_be_written(value)


def _can_be_written(value: Any) -> bool:
    """Return whether it is memory that others may write to, such as a NumPy array."""
    if isinstance(value, (mx.array, *ATOMS)):
        return False
    try:
        with memoryview(value) as view:
            return not view.readonly
    except TypeError:
        return False
    except (ValueError, BufferError):  # it is memory, of numbers that no view can be of
        return True


def _equal(one: mx.array, other: mx.array) -> bool:
    return (one.shape, one.dtype) == (other.shape, other.dtype) and bool(mx.array_equal(one, other).item())
