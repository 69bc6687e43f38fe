"""Known copies of mlx-lm's functions and classes in other packages, recognized by their code.

Code is identified by a digest of its syntax tree and of everything that it uses of its own package: functions, base classes, constants.
Comments, docstrings, annotations, line breaks and module names do not change the digest.
"""

from __future__ import annotations

import ast
import dataclasses
import hashlib
import inspect
import sys
import types
import weakref
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeAlias

Definition: TypeAlias = "ast.FunctionDef | ast.ClassDef"

TRIED = ("mlx-lm 0.32.2", "mlx-vlm 0.7.10", "mlx-audio 0.6.2")
KNOWN = {  # by what digest() gives of them; each is listed where it was found first
    # mlx-lm 0.32.2
    "759f5e6f63cac688": "KVCache",
    "ec7ca6c56dbf74e4": "RotatingKVCache",
    "99cfe6cb6076b2c0": "QuantizedKVCache",
    "42f698f24e9633db": "ArraysCache",
    "e0288da951d125db": "BatchKVCache",
    "67a9603cf419404d": "BatchRotatingKVCache",
    "73309b1864884198": "create_causal_mask",
    "2e76feb47f5cb8e6": "quantized_scaled_dot_product_attention",
    "a130fff6f79dee06": "gated_delta_ops",
    "6d41378789308736": "ssm_attn",
    # mlx-vlm 0.7.10
    "f798f7e29671a3f4": "KVCache",
    "37268fdf5564604b": "RotatingKVCache",
    "c18a37dd82b03e76": "QuantizedKVCache",
    "e081b18510b39832": "ArraysCache",
    "81e9977596c6b274": "BatchKVCache",
    "1fe0deb36d83272d": "BatchRotatingKVCache",
    "f5362eaa4070e4c4": "quantized_scaled_dot_product_attention",
    "e446710cc076b3df": "cache_position_offset",
    "930554bd36e70ced": "gated_delta_ops",
    "1c00c4a14e9e099d": "gated_delta_chunked",
    "65fef6f1cdbbcefd": "ssm_attn of 0.31",
    "d3bec0d2f20de8e6": "LanguageModel",
    "c9efac0f4372eb0a": "LanguageModel",
    "778acf2e1d87efe3": "LanguageModel",
    "7fd50691aced294c": "LanguageModel",
    "223f0bad7d1790aa": "LanguageModel",
    # mlx-audio 0.6.2
    "fb13ae6bc3ebd569": "KVCache",
    "be3a7410c9795ba9": "RotatingKVCache",
    "e89a03f4c20bada2": "ArraysCache",
    "3a1a1dfc3e21a0dc": "BatchKVCache",
}

OURS = f"{Path(__file__).parents[1]}"  # the folder of this package, whose functions replace theirs while MLX is patched
UNSEEN = {"annotation", "returns", "type_comment", "type_params", "kind", "ctx"}  # parts of a tree that change nothing of what it does
_known: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()


def known_as(code: Any) -> str:
    """Return the original of a known copy; empty if its code is unknown."""
    try:
        found = _known.get(code)
    except TypeError:  # nothing that can be known
        return ""
    if found is None:
        found = KNOWN.get(digest(code), "")
        if found or not is_being_imported(sys.modules.get(getattr(code, "__module__", ""))):
            _known[code] = found
    return found


def package_of(code: Any) -> str:
    """Return the name of the top-level package that defines it."""
    return str(getattr(code, "__module__", "")).partition(".")[0]


def modules_of(package: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The modules of a package that are there, or of all, by their names; and their variables."""
    for name, module in list(sys.modules.items()):
        if isinstance(module, types.ModuleType) and (not package or name.partition(".")[0] == package):
            yield name, variables_of(module)


def variables_of(module: types.ModuleType) -> dict[str, Any]:
    """The variables of a module, without asking it: some import what they are asked for."""
    found: dict[str, Any] = types.ModuleType.__getattribute__(module, "__dict__")
    return found


def is_being_imported(module: Any) -> bool:
    """Return whether its import has not finished."""
    return bool(getattr(getattr(module, "__spec__", None), "_initializing", False))


def digest(code: Any) -> str:
    """Return the digest of a function or class and what it uses of its package; empty if the source is not available or not what runs."""
    node = _node(code)
    if node is None:
        return ""
    package, forms, following = package_of(code), list[str](), {id(code): (code, node)}
    for each, tree in (pairs := list(following.values())):  # which grows meanwhile
        if not _is_from(each, tree):
            return ""
        variables, used = vars(sys.modules[each.__module__]), set[str]()
        parts = [_form(tree, used)]
        for name in sorted(used & variables.keys()):
            value = variables[name]
            value = getattr(value, "unpatched", value)  # ours, in its place
            inner = _node(value) if package_of(value) == package else None
            if inner is None:
                parts.append(f"{name}={_described(value, package)}")
            elif id(value) not in following:
                following[id(value)] = (value, inner)
                pairs.append((value, inner))
        forms.append("\n".join(parts))
    return hashlib.sha256("\n".join([forms[0], *sorted(forms[1:])]).encode()).hexdigest()[:16]


def _node(code: Any) -> Definition | None:
    """Return its definition in its module."""
    module = sys.modules.get(getattr(code, "__module__", None) or "")
    name = getattr(code, "__qualname__", None) or getattr(code, "__name__", None)
    if not isinstance(module, types.ModuleType) or isinstance(code, types.ModuleType):
        return None
    try:
        return _definitions(module, Path(module.__file__ or "").stat().st_mtime_ns).get(str(name))
    except Exception:  # whatever the matter is, it has no source
        return None


@lru_cache(maxsize=4)
def _definitions(module: types.ModuleType, _: int) -> dict[str, Definition]:
    """Return the definitions of a module by name; read again if its file has changed."""
    return {node.name: node for node in ast.parse(inspect.getsource(module)).body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}


def _is_from(code: Any, node: Definition) -> bool:
    """Return whether it is the definition in the file, and was not replaced since."""
    file = inspect.getsourcefile(sys.modules[code.__module__])
    if isinstance(code, type):
        defined = {each.name for each in node.body if isinstance(each, ast.FunctionDef)}
        makes_others = dataclasses.is_dataclass(code) or issubclass(code, tuple)  # `NamedTuple`, too
        own = [value for name, value in vars(code).items() if name in defined or not makes_others]
        return all(each.co_filename == file for value in own for each in _functions(value))
    first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
    return all(each.co_filename == file and first <= each.co_firstlineno <= (node.end_lineno or 0) for each in _functions(code))


def _functions(value: Any) -> list[types.CodeType]:
    """Return the functions that Python runs for a function, method or property, except mlx-cuda's own."""
    parts = (value.fget, value.fset, value.fdel) if isinstance(value, property) else (getattr(value, "__func__", value),)
    found = (getattr(part, "unpatched", part) for part in parts)
    codes = [part.__code__ for part in found if isinstance(part, types.FunctionType)]
    return [each for each in codes if not each.co_filename.startswith(OURS)]


def _form(tree: Any, used: set[str]) -> str:
    """Return a syntax tree as text, the same in all versions of Python, and add the names that it uses to ``used``."""
    if isinstance(tree, list):
        return f"[{','.join(_form(each, used) for each in tree)}]"
    if not isinstance(tree, ast.AST):
        return repr(tree)
    if isinstance(tree, ast.Name):
        used.add(tree.id)
    fields = {name: value for name, value in ast.iter_fields(tree) if name not in UNSEEN and value not in (None, [])}
    if isinstance(tree, (ast.FunctionDef, ast.ClassDef)) and ast.get_docstring(tree, clean=False) is not None:
        fields["body"] = tree.body[1:]
    return f"{type(tree).__name__}({','.join(f'{name}={_form(value, used)}' for name, value in fields.items())})"


def _described(value: Any, package: str) -> str:
    """Describe what code uses from elsewhere: modules and functions by name, constants by value."""
    if isinstance(value, types.ModuleType):
        name = value.__name__
        return f"module {name.rpartition('.')[2] if name.partition('.')[0] == package else name}"
    if isinstance(value, (bool, int, float, str, bytes, type(None), tuple)):
        return repr(value)
    name = getattr(value, "__qualname__", None) or getattr(value, "__name__", None) or type(value).__qualname__
    return f"{'' if package_of(value) == package else getattr(value, '__module__', '')}.{name}"
