"""Errors of the system's loader, with their fixes."""

from __future__ import annotations

import re
from pathlib import PurePath

from .environment import Environment
from .loaded import take_out

_TOO_OLD = re.compile(r"(\S+): version [`'](?!GLIBC_)\S+' not found")
_CRASHED = re.compile(r"ended with (?:-|3\d{9}\b)")  # by a signal; on Windows with a status such as 0xC0000409
_MISSING = re.compile(r"(lib[\w+-]+)\.so[\w.]*: cannot open shared object file")
# GCC's runtime libraries: the packages of Debian and Ubuntu, of Fedora and RHEL, and of conda-forge.
_RUNTIMES = {
    "libstdc++": ("libstdc++6", "libstdc++", "libstdcxx"),
    "libgcc_s": ("libgcc-s1", "libgcc", "libgcc"),
    "libgomp": ("libgomp1", "libgomp", "libgomp"),
}
_GCC = 12  # whose libstdc++ MLX's wheels ask for


def fix(text: str, env: Environment) -> str:
    """Return the fix for an error of the system's loader, or an empty string."""
    if old := _TOO_OLD.search(text):
        return _newer(PurePath(old[1]), env)
    if (missing := _MISSING.search(text)) and missing[1] in _RUNTIMES:
        debian, fedora, _ = _RUNTIMES[missing[1]]
        return f"apt-get install {debian}  (Fedora, RHEL: dnf install {fedora})"
    shadow = next((path for path in env.shadows if path in text), env.shadows[0] if env.shadows and _CRASHED.search(text) else "")
    return take_out(PurePath(shadow).parent) if shadow else ""


def _newer(path: PurePath, env: Environment) -> str:
    """Return the fix for a library that is too old, by its location."""
    debian, fedora, conda = _RUNTIMES.get(path.name.partition(".so")[0], ("", "", ""))
    if path.parent in map(PurePath, env.search):
        return f"{take_out(path.parent)}: its {path.name} is too old"
    if not debian:
        return f"reinstall the package of {path}"
    if env.conda and PurePath(env.conda) in path.parents:
        return f"conda install -c conda-forge '{conda}>={_GCC}'"
    return f"apt-get install --only-upgrade {debian}  (Fedora, RHEL: dnf upgrade {fedora}), or move {path} away where no package owns it"
