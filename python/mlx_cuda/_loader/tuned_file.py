"""The algorithms that :func:`mlx_cuda.tune` has found: those that the native module knows, and their file, written whole or not at all."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import Any, TypeVar

from .module import NativeModule

T = TypeVar("T")

VARIABLE = "MLX_CUDA_TUNED"
FORMAT = 1


@dataclass(frozen=True)
class Tuned:
    """The result for a matmul: the bytes of the library's algorithm, its time, and that of the heuristic's choice."""

    algorithm: str
    microseconds: float
    first_microseconds: float


def default_path() -> Path | None:
    """The file that the variable names, else one in the user's cache; None if the variable is empty, or the user has no home."""
    named = os.environ.get(VARIABLE)
    if named is not None:
        return Path(named) if named else None
    variable, below_home = ("LOCALAPPDATA", "AppData/Local") if sys.platform == "win32" else ("XDG_CACHE_HOME", ".cache")
    try:
        cache = Path(os.environ.get(variable) or Path.home() / below_home)
    except RuntimeError:  # no HOME, and a user that the system does not know, as a container may be started with
        return None
    return cache / "mlx-cuda" / "tuned.json"


def read(path: Path) -> dict[str, Tuned] | None:
    """The matmuls of a file, none where there is no file; None, with a warning, where it is not one of mlx-cuda."""
    return read_as(parse, path, "tuned algorithms")


def read_as(parse: Callable[[str], dict[str, T]], path: Path, what: str) -> dict[str, T] | None:
    """Return the results in a file, none if there is no file; None, with a warning, if it has another format."""
    try:
        return parse(path.read_text("utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError) as error:
        text = f"mlx_cuda leaves {path} alone, which holds no {what} ({error}). Delete it, or name another file with {VARIABLE}."
        warnings.warn(text, RuntimeWarning, stacklevel=3)
        return None


def parse(text: str) -> dict[str, Tuned]:
    """The matmuls of a file's text; a ValueError says what is wrong with it."""
    content = json.loads(text)
    if isinstance(content, dict) and content.get("mlx_cuda_tuned") == FORMAT:
        matmuls = content.get("matmuls", content.get("products"))  # the name before 0.32.4.1
        if isinstance(matmuls, dict):
            return {key: _tuned(key, value) for key, value in matmuls.items()}
    raise ValueError(f"not of the format {FORMAT}")


def _tuned(key: str, value: Any) -> Tuned:
    with contextlib.suppress(KeyError, TypeError, ValueError):
        if re.fullmatch("[0-9a-f]{128}", value["algorithm"]):
            return Tuned(value["algorithm"], float(value["microseconds"]), float(value["first_microseconds"]))
    raise ValueError(f"no algorithm for {key!r}")


def add(path: Path, matmuls: dict[str, Tuned]) -> None:
    """Put matmuls into a file, beside those that it holds. Another process sees the old file or the new one."""
    known = read(path)
    if known is None or known == known | matmuls:
        return
    content = {"mlx_cuda_tuned": FORMAT, "matmuls": {key: asdict(each) for key, each in sorted((known | matmuls).items())}}
    write(path, content, "the tuned algorithms")


def write(path: Path, content: Any, what: str) -> bool:
    """A file of JSON, whole or not at all; False, with a warning, where it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=path.name) as folder:
            file = Path(folder, path.name)
            file.write_text(json.dumps(content, indent=1) + "\n", "utf-8")
            file.replace(path)
    except OSError as error:
        text = f"mlx_cuda cannot keep {what}: {error}. Name a file that can be written with {VARIABLE}."
        warnings.warn(text, RuntimeWarning, stacklevel=3)
        return False
    return True


def found(module: NativeModule) -> dict[str, Tuned]:
    """The algorithms that the native module knows."""
    return {key: Tuned(algorithm, time, first) for key, algorithm, time, first in module.tuned()}


def restore(module: NativeModule, path: Path | None = None) -> None:
    """Give the native module a file's algorithms. Those that it has already stay."""
    path = path or default_path()
    matmuls = read(path) if path else None
    if matmuls:
        module.set_tuned([(key, *astuple(each)) for key, each in (matmuls | found(module)).items()])
