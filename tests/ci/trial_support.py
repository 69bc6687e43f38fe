"""What the tests of fresh environments, artifacts and trials share: wheels that stand for ours."""

from __future__ import annotations

import json
import sysconfig
from typing import TYPE_CHECKING

from .audit_support import DIST_INFO, VERSION, Files, write_wheel

if TYPE_CHECKING:
    from pathlib import Path

# Enough to be a wheel with a right RECORD.
FILES: Files = {"mlx_cuda/__init__.py": b"", f"{DIST_INFO}/METADATA": f"Name: mlx-cuda\nVersion: {VERSION}\n".encode()}
TAG = f"py3-none-{sysconfig.get_platform().replace('-', '_')}"  # for any Python of this machine
PURE = f"mlx_cuda-{VERSION}-{TAG}.whl"
DOCTOR = {"mlx_cuda": VERSION, "ok": True, "checks": []}


def make_wheel(folder: Path, *, init: str = "", main: str = f"print({json.dumps(DOCTOR)!r})", requires: str = "") -> Path:
    """A wheel of pure Python that can be installed; `main` is what its doctor does."""
    extras = "".join(f"Provides-Extra: {extra}\n" for extra in ("cpu", "cu12", "cu13"))
    files = {
        "mlx_cuda/__init__.py": f"__version__ = {VERSION!r}\n{init}",
        "mlx_cuda/__main__.py": main,
        f"{DIST_INFO}/METADATA": f"Metadata-Version: 2.1\nName: mlx-cuda\nVersion: {VERSION}\n{extras}{requires}",
        f"{DIST_INFO}/WHEEL": f"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: {TAG}\n",
    }
    return write_wheel(folder / PURE, {name: text.encode() for name, text in files.items()})
