"""Toolkit roots: the CUDA, cuDNN and MLX files that a build needs, taken from the package index and pinned by hash.

The command line is ``python -m ci toolkit``. :func:`root_path` needs only the standard library, tomli and platformdirs, since
the CMake configure step asks it in the build environment; what installing needs is imported when installing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from .roots import root_path

if TYPE_CHECKING:
    from ci.matrix import Platform

    from .provision import Installed

__all__ = ["install", "root_path"]


def install(names: Sequence[str], platform: Platform) -> list[Installed]:
    """Install the named roots for ``platform``; a complete root is used without the network."""
    from . import provision

    return [provision.install(name, platform) for name in names]
