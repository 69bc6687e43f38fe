"""mlx-lm's own code around models, without what it reads tokens and fetches files with, which need not be installed."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
import warnings
from typing import Any

UNUSED = ("transformers", "transformers.tokenization_utils_base", "huggingface_hub")  # of which mlx-lm imports names


class Names(types.ModuleType):
    """A package that is not installed: every name of it is a class that can be registered, and no more."""

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {"register": staticmethod(lambda *_, **__: None), "apply_chat_template": None})


def add_package() -> None:
    """Have ``mlx_lm`` without its own ``__init__``, which imports all of it; an ImportError where it is not installed."""
    found = importlib.util.find_spec("mlx_lm")
    if found is None or found.submodule_search_locations is None:
        raise ImportError("mlx_lm is not installed")
    if "mlx_lm" not in sys.modules:
        package = types.ModuleType("mlx_lm")
        package.__path__, package.__spec__ = list(found.submodule_search_locations), found
        sys.modules["mlx_lm"] = package


def add_unused(names: tuple[str, ...]) -> None:
    """Have these modules of packages that are not installed."""
    for package_name in {each.partition(".")[0] for each in names}:
        if package_name not in sys.modules and importlib.util.find_spec(package_name) is None:
            sys.modules.update({each: Names(each) for each in names if each.partition(".")[0] == package_name})


def part(name: str) -> Any:
    """A module of mlx-lm, an ImportError where it cannot be had."""
    add_package()
    add_unused(UNUSED)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(f"mlx_lm.{name}")
