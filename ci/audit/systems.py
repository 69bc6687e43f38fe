"""The libraries and symbols that each system supplies: auditwheel's policies for Linux, delvewheel's lists for Windows, unchanged."""

from __future__ import annotations

import ctypes
import platform
import re
import sys
from functools import cache
from typing import TYPE_CHECKING

from ..errors import EnvironmentProblem

if TYPE_CHECKING:
    from auditwheel.policy import Policy as Manylinux

    from ..wheelfile.wheel import Wheel

# The loader itself: on every Linux, named differently on each machine, on no policy's list.
LOADERS = {"x86_64": "ld-linux-x86-64.so.2", "aarch64": "ld-linux-aarch64.so.1"}


@cache
def manylinux(platform: str) -> Manylinux | None:
    """auditwheel's policy for a platform tag; None for a tag it does not know."""
    try:
        from auditwheel.architecture import Architecture
        from auditwheel.libc import Libc
        from auditwheel.policy import WheelPolicies
    except ImportError as error:
        raise EnvironmentProblem(
            f"auditing a Linux wheel needs auditwheel: {error}", fix="audit it on Linux, where auditwheel installs"
        ) from error
    machine = re.search(r"x86_64|aarch64", platform)
    if not machine:
        return None
    try:
        return WheelPolicies(libc=Libc.GLIBC, arch=Architecture(machine.group())).get_policy_by_name(platform)
    except LookupError:
        return None


def is_system_library(wheel: Wheel, library: str) -> bool:
    """Whether every system that the wheel's platform tag admits supplies this library."""
    if wheel.system == "windows":
        return _is_windows_library(wheel.platforms[0], library.lower())
    policies = [manylinux(platform) for platform in wheel.platforms]
    loaders = {name for machine, name in LOADERS.items() if wheel.platforms[0].endswith(machine)}
    return library in loaders or all(policy is not None and library in policy.whitelist for policy in policies)


def lacks(wheel: Wheel, library: str, version: str, symbol: str) -> bool:
    """Whether this machine's library has a version, and the symbol not in it: what its loader would say.

    False where that cannot be told: on another system or processor, or where the library is not there or too old to know the version.
    """
    if sys.platform != "linux" or not wheel.platforms[0].endswith(f"_{platform.machine()}"):
        return False
    # Of each version that it defines, a library has a symbol of the same name.
    return _has(library, version, version) and not _has(library, version, symbol)


@cache
def _has(library: str, version: str, symbol: str) -> bool:
    try:
        handle, libc = ctypes.CDLL(library), ctypes.CDLL(None)
        libc.dlvsym.argtypes, libc.dlvsym.restype = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_char_p], ctypes.c_void_p
    except (OSError, AttributeError):  # musl has no dlvsym
        return False
    libc.dlerror.restype = ctypes.c_char_p
    libc.dlvsym(handle._handle, symbol.encode(), version.encode())
    return libc.dlerror() is None


def _is_windows_library(tag: str, library: str) -> bool:
    from delvewheel import _dll_list as lists

    machine = lists.MachineType.platform_tag_to_type(tag)
    # The C run-time that every python.org build since 3.9 brings; the C++ one (msvcp140.dll) is not among it.
    python = {name for pattern, names in lists.ignore_abi3.items() if re.fullmatch(pattern, f"cp310-{tag}") for name in names}
    return library in lists.ignore_names[machine] or library in python or any(regex.fullmatch(library) for regex in lists.ignore_regexes)
