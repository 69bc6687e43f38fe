"""Checks of where each library that a binary needs comes from."""

from __future__ import annotations

import json
import posixpath
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Literal

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from ...matrix import Library
from ...wheelfile.binary import Binary
from ...wheelfile.wheel import Wheel, extra_of
from .. import providers
from ..policy import Module, Policy
from ..systems import is_system_library, lacks
from .registry import Findings, check

Kind = Literal["package", "inside", "driver", "system", "nobody"]


@dataclass(frozen=True)
class Supplier:
    """The supplier of a library that a binary needs."""

    kind: Kind
    name: str
    detail: str
    directory: str = ""  # below site-packages, where the system does not find the library
    needed: bool = True  # declared so


def supplier(wheel: Wheel, policy: Policy, member: str, library: str) -> Supplier:
    """A declared package, the wheel itself, the driver, the system, or none."""
    key, inside, owner = wheel.key(library), _inside(wheel), policy.module(member)
    # A library that repair copied in may lean on whatever the modules that pulled it in may.
    for module in [owner] if owner else policy.modules:
        for each in module.libraries:
            if key == wheel.key(each.files[wheel.system]):
                extra = f"of the extra {module.extra}" if module.extra else "required"
                return Supplier("package", each.provider, extra, each.directories[wheel.system], each.needed)
    if key in inside:
        return Supplier("inside", "this wheel", "copied in by repair", posixpath.dirname(inside[key]))
    if key == wheel.key(policy.driver):
        return Supplier("driver", "NVIDIA driver", "of the machine")
    if is_system_library(wheel, library):
        return Supplier(
            "system", "Windows and Python" if wheel.system == "windows" else "every Linux of the tag", ", ".join(wheel.platforms)
        )
    return Supplier("nobody", "nobody", "not declared, not the system's")


@check("declare the library in ci/matrix/matrix.toml, or stop linking it")
def needed(wheel: Wheel, policy: Policy) -> Findings:
    """Each needed library is the system's, inside the wheel, the driver's, or declared; each declared one is needed."""
    for member, binary in wheel.binaries.items():
        for name in binary.needed:
            found = supplier(wheel, policy, member, name)
            if not found.needed:
                yield member, f"needs {name}, which is declared as not needed: no requirement supplies it"
            elif found.kind == "nobody":
                yield member, f"needs {name}, which neither {wheel.platforms[0]} nor the wheel nor a declared provider supplies"
        if module := policy.module(member):
            wanted = {wheel.key(each.files[wheel.system]) for each in module.libraries if each.needed}
            for name in sorted(wanted - {wheel.key(name) for name in binary.needed}):
                yield member, f"does not need {name}, which is declared as needed"


@check("change the extra's requirements and the library's directory in ci/matrix/matrix.toml to those of the locked wheels")
def provider(wheel: Wheel, policy: Policy) -> Findings:
    """Each declared library that a module needs comes from a direct requirement of the extra, and is where the loader searches."""
    for member, module, binary in _modules(wheel, policy):
        supplies = _requirements(wheel, module.extra)
        place = f"the extra {module.extra}" if module.extra else "the requirements"
        sites = _sites(policy, module)
        for library in _used(wheel, module, binary):
            requirement = supplies.get(canonicalize_name(library.provider))
            if requirement is None:
                yield member, f"needs {library.files[wheel.system]}, expected {place} to require {library.provider}, which supplies it"
                continue
            if not requirement.specifier:
                yield member, f"needs {library.files[wheel.system]}, expected a bound on {library.provider}: a new major renames it"
            if sites:
                yield from ((member, problem) for problem in _locked(library, wheel, requirement, sites))


def _locked(library: Library, wheel: Wheel, requirement: Requirement, sites: tuple[Path, ...]) -> Iterator[str]:
    """Each library is in the locked wheels: in that directory, from that package, in a version that the requirement admits."""
    path = _path(library, wheel)
    found = providers.supplied(sites, path)
    if found is None:
        roots = " or ".join(site.parent.name for site in sites)
        yield f"needs {path}, but no locked wheel of {roots} installs it, expected {library.provider} to"
    elif found.package != canonicalize_name(library.provider):
        yield f"needs {path}, which {found.package} installs, expected {library.provider}"
    elif not requirement.specifier.contains(found.version, prereleases=True):
        yield f"needs {path} of {library.provider}, locked at {found.version}, expected a version in {requirement.specifier}"


@check("let CMake set it: ci/matrix/matrix.toml has the directories")
def rpath(wheel: Wheel, policy: Policy) -> Findings:
    """RPATH entries start at $ORIGIN, stay below site-packages, and name the directories of the needed libraries and no others."""
    if wheel.system == "windows":
        return
    inside = _inside(wheel)
    for member, binary in wheel.binaries.items():
        module = policy.module(member)
        wanted = {library.directories["linux"] for library in _used(wheel, module, binary)} if module else set()
        wanted |= {posixpath.dirname(inside[name]) for name in binary.needed if name in inside}
        found = set()
        for entry in binary.rpath:
            directory = _below_site_packages(member, entry)
            if directory is None:
                yield member, f"has {entry or 'an empty entry'} in its RPATH, expected entries relative to $ORIGIN and below site-packages"
            elif directory not in wanted | {posixpath.dirname(member)}:
                yield member, f"has {entry} in its RPATH, expected only directories of libraries that it needs"
            found.add(directory)
        # A copied library without an RPATH finds libraries next to it through the RPATH of the module that loaded it.
        for directory in sorted(wanted - found) if module else ():
            yield (
                member,
                f"lacks $ORIGIN/{posixpath.relpath(directory, posixpath.dirname(member))} in its RPATH, the directory of a needed library",
            )


def _below_site_packages(member: str, entry: str) -> str | None:
    """The directory below site-packages that an RPATH entry of a member names; None if it is not one."""
    origin, *rest = entry.replace("${ORIGIN}", "$ORIGIN").split("/")
    if origin != "$ORIGIN" or any("$" in each for each in rest):
        return None
    directory = posixpath.normpath(posixpath.join(posixpath.dirname(member), *rest))
    return None if directory.split("/")[0] == ".." else directory


@check("python -m ci.matrix.package_table, then build it again")
def dll_directories(wheel: Wheel, policy: Policy) -> Findings:
    """The package's own list of libraries (on Windows: the DLL directories added at import) equals the declared one."""
    raw = wheel.members.get(policy.libraries_file)
    if raw is None:
        yield policy.libraries_file, "is missing, expected the list of libraries that the package reads at import"
        return
    try:
        found = json.loads(raw)
        keys = sorted(found.keys() | policy.libraries.keys())
    except (ValueError, AttributeError, RecursionError) as error:
        yield policy.libraries_file, f"is no table in JSON: {error}"
        return
    for key in keys:
        if found.get(key) != policy.libraries.get(key):
            yield (
                policy.libraries_file,
                f"differs from ci/matrix/matrix.toml in {key!r}, expected the output of python -m ci.matrix.package_table",
            )


@check("link the library that has it, or build against the libc of the tag")
def symbols(wheel: Wheel, policy: Policy) -> Findings:
    """Each undefined symbol is one that a library has: of the system in the version that it asks for, or else a locked one, or the wheel.

    A symbol that the libc at link time lacked has no version, so that no symbol-version policy sees it, and fails only when it is called.
    """
    if wheel.system == "windows":
        return
    own = frozenset().union(*(binary.exports for binary in wheel.binaries.values()))
    for member, binary in wheel.binaries.items():
        module = policy.module(member)
        exports = _exports(wheel, policy, module, binary) if module else {}
        exported = own.union(*exports.values())
        for symbol in sorted(binary.undefined):
            if asked := binary.asked_of.get(symbol):
                library, version = asked
                if not is_system_library(wheel, library):
                    if symbol not in exports.get(library, ()):
                        yield member, f"needs {symbol} of {version}, expected {library} to export it"
                elif lacks(wheel, library, version, symbol):
                    yield member, f"needs {symbol} of {version}, expected a symbol that {library} has: the loader refuses it"
            elif owner := next((name for name, each in exports.items() if each.get(symbol)), None):
                yield member, f"needs {symbol} of no version, expected that which {owner} has it in"
            elif symbol not in exported and not symbol.startswith(("Py", "_Py")):
                yield member, f"has the undefined symbol {symbol} without a version, expected a needed library to export it"


def _exports(wheel: Wheel, policy: Policy, module: Module, binary: Binary) -> dict[str, dict[str, bool]]:
    """The symbols, with or without a version, that a module needs and the system does not supply are exported by the libraries."""
    sites = _sites(policy, module)
    found = {_path(library, wheel): library.files[wheel.system] for library in _used(wheel, module, binary)}
    files = {name: there.path for path, name in found.items() if (there := providers.supplied(sites, path))}
    stubs = [stub for site in sites if (stub := site.parent / "lib" / "stubs" / policy.driver).is_file()]
    return {name: providers.exports(path) for name, path in [*files.items(), *((policy.driver, stub) for stub in stubs)]}


def _sites(policy: Policy, module: Module) -> tuple[Path, ...]:
    """The directories of the locked provider wheels of a module."""
    return tuple(providers.site(root, policy.platform) for root in module.roots)


def _modules(wheel: Wheel, policy: Policy) -> Iterator[tuple[str, Module, Binary]]:
    return ((member, module, binary) for member, binary in wheel.binaries.items() if (module := policy.module(member)))


def _used(wheel: Wheel, module: Module, binary: Binary) -> list[Library]:
    """The declared libraries of a module that this binary needs."""
    names = {wheel.key(name) for name in binary.needed}
    return [library for library in module.libraries if wheel.key(library.files[wheel.system]) in names]


def _requirements(wheel: Wheel, extra: str) -> dict[str, Requirement]:
    """The direct requirements of an extra (""; the plain ones) by package name; what cannot be read is left out, and told by `metadata`."""
    found: dict[str, Requirement] = {}
    for line in wheel.metadata.get_all("Requires-Dist", []):
        try:
            requirement = Requirement(line)
            _ = [each.contains("0") for each in requirement.specifier]  # which alone reads its numbers
        except (ValueError, RecursionError):  # of another syntax, a number of 5,000 digits, a thousand brackets
            continue
        if extra_of(requirement) in {"", extra}:
            found[canonicalize_name(requirement.name)] = requirement
    return found


def _inside(wheel: Wheel) -> dict[str, str]:
    """The wheel's own libraries by file name, which is what loaders search for, whatever the soname."""
    return {wheel.key(PurePosixPath(member).name): member for member in wheel.binaries}


def _path(library: Library, wheel: Wheel) -> str:
    return f"{library.directories[wheel.system]}/{library.files[wheel.system]}"
