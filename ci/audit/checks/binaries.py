"""Checks of each binary by itself: what it was built for, and what the build left in it."""

from __future__ import annotations

import contextlib
import re
import sys
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path, PurePosixPath

from packaging.version import Version

from ...matrix import REPOSITORY
from ...wheelfile.binary import Binary, BinaryError, fatbin
from ...wheelfile.facts import newest
from ...wheelfile.wheel import Wheel
from ..policy import Policy
from ..systems import manylinux
from .registry import Findings, check


@check("build it in the container of the tag, or repair it with the most compatible tag that its symbols allow (--plat auto)")
def platform_tag(wheel: Wheel, _: Policy) -> Findings:
    """Every symbol version that a binary needs is one that the tag's systems have."""
    if wheel.system == "windows":
        return
    for platform in wheel.platforms:
        tag = manylinux(platform)
        if tag is None or not tag.symbol_versions:
            yield "", f"has the platform tag {platform}, expected a manylinux tag: no index accepts any other"
            continue
        for member, binary in wheel.binaries.items():
            for library, versions in binary.versions.items():
                for version in sorted(versions):
                    family, number = version.partition("_")[::2]
                    allowed = tag.symbol_versions.get(family)
                    if allowed is not None and number not in allowed:
                        yield member, f"needs {version} of {library}, expected at most {family}_{newest(allowed)} by {platform}"
            for library in sorted(tag.blacklist.keys() & set(binary.needed)):
                for symbol in sorted(tag.blacklist[library] & binary.undefined):
                    yield member, f"uses {symbol} of {library}, which {platform} forbids"


@check("build it for the platform of the tag: --platform")
def machine(wheel: Wheel, _: Policy) -> Findings:
    """Each binary is for the platform tag's processor and system."""
    expected = "pe" if wheel.system == "windows" else "elf"
    for member, binary in wheel.binaries.items():
        if binary.format != expected or not all(platform.endswith(f"_{binary.machine}") for platform in wheel.platforms):
            yield member, f"is {binary.format.upper()} for {binary.machine}, expected {expected.upper()} for {', '.join(wheel.platforms)}"


@check("use Python's limited API only (Py_LIMITED_API), and build it again")
def abi3(wheel: Wheel, policy: Policy) -> Findings:
    """Named as a stable-ABI module and using nothing else of Python, by CPython's own list of the stable ABI (abi3info)."""
    tag = min(wheel.tags, key=str)
    abi = tag.abi  # abi3 or, of free-threaded CPython, abi3t
    named = re.fullmatch(r"cp3(\d+)", tag.interpreter)
    oldest = f"3.{named[1] if named else 10}"  # MLX's own wheels are for every Python
    suffix, python = (".pyd", f"{abi.replace('abi', 'python')}.dll") if wheel.system == "windows" else (f".{abi}.so", "no libpython")
    modules = {member: binary for member, binary in wheel.binaries.items() if policy.module(member)}
    for member, binary in modules.items():
        if PurePosixPath(member).name.partition(".")[1:] != (".", suffix[1:]):
            yield member, f"is not named as a stable-ABI module, expected the suffix {suffix}"
        init = f"PyInit_{PurePosixPath(member).name.partition('.')[0]}"
        if init not in binary.exports:
            yield member, f"does not export {init}, expected it: Python imports a module by calling it"
        for library in binary.needed:
            if re.fullmatch(r"(lib)?python3\.?\d+.*", library.lower()):
                yield member, f"needs {library} of one Python version, expected {python}"
        stable = {name: _added(name) for name in binary.used if name.startswith(("Py", "_Py")) and not name.startswith("PyInit_")}
        if foreign := sorted(name for name, added in stable.items() if added is None):
            yield member, f"uses {', '.join(foreign)}, expected the stable ABI only"
        for name, added in sorted(stable.items()):
            if added is not None and added > Version(oldest):
                yield member, f"uses {name}, which the stable ABI has since {added}, expected that of {oldest}"


def _added(name: str) -> Version | None:
    """The first Python that has a symbol in its stable ABI."""
    from abi3info import DATAS, FUNCTIONS
    from abi3info.models import Symbol

    found = FUNCTIONS.get(Symbol(name)) or DATAS.get(Symbol(name))
    return Version(str(found.added)) if found else None


@check("build it again with a compiler of ci/matrix/matrix.toml and GNU ld or MSVC's linker, and change nothing afterwards")
def loader(wheel: Wheel, policy: Policy) -> Findings:
    """Each binary can be loaded, and has only what mlx-cuda's linkers write: binary/rules.py, binary/pe.py."""
    yield from ((member, f"is {error}, expected a whole binary") for member, error in wheel.unreadable.items())
    for member, binary in wheel.binaries.items():
        yield from ((member, fault) for fault in binary.faults)
        if binary.signed and not policy.copied(wheel, member):
            yield member, "has a certificate, expected none: our builds do not sign"
        if binary.soname and binary.soname != PurePosixPath(member).name:
            yield member, f"calls itself {binary.soname}, expected no name but its file's: it would stand for another library"


@check("put device code into src/*.cu, which becomes files beside the modules")
def architectures(wheel: Wheel, _: Policy) -> Findings:
    """No fatbin is inside a binary."""
    for member in wheel.binaries:
        try:
            fatbins = list(fatbin.find(wheel.members[member]))
        except BinaryError as error:
            yield member, f"has a damaged {error}"
            continue
        if fatbins:
            yield member, f"holds {len(fatbins)} fatbins (the first at {fatbins[0].offset:#x}), expected none: they are files"


def _built(wheel: Wheel, policy: Policy) -> Iterator[tuple[str, Binary]]:
    """All but what is copied in as Microsoft signed it, and names its own build."""
    return ((member, each) for member, each in wheel.binaries.items() if not (each.signed and policy.copied(wheel, member)))


@check("strip it, as a Release build does")
def stripped(wheel: Wheel, policy: Policy) -> Findings:
    for member, binary in _built(wheel, policy):
        if binary.debug:
            yield member, f"has {', '.join(binary.debug)}, expected it stripped"
        if binary.pdb and re.match(r"[A-Za-z]:|[\\/]", binary.pdb):
            yield member, f"names the debug database {binary.pdb}, expected none or a file name without its folder (/PDBALTPATH:%_PDB%)"


@check("link with -Wl,-z,noexecstack")
def executable_stack(wheel: Wheel, _: Policy) -> Findings:
    for member, binary in wheel.binaries.items():
        if binary.executable_stack:
            yield member, "has an executable PT_GNU_STACK, which glibc 2.41 refuses to load, expected -Wl,-z,noexecstack"


@check("compile with -ffile-prefix-map (CMakeLists.txt), then build it again")
def build_path(wheel: Wheel, policy: Policy) -> Findings:
    for member, _ in _built(wheel, policy):
        if paths := sorted(set(_build_paths(wheel.members[member]))):
            yield member, f"holds paths of the build ({len(paths)}), such as {paths[0]}, expected none (see -ffile-prefix-map)"


# Any place but those of the running system (/usr/lib, /proc, /etc) and of the user's machine (/usr/local/cuda), which a program may name.
NAME = rb"[\w.@+~-]+"
SPACED = NAME + rb"(?: " + NAME + rb")*"  # as Windows has them: C:\Users\Jane Doe
SEPARATOR = rb"(?:/|\\\\?)"  # C's backslashes may be two
PLACE = rb"/(?!(?:proc|sys|dev|etc|usr|run|lib|lib64|bin|sbin|\.\.?)/|-)" + NAME
DRIVE_PLACE = SEPARATOR + rb"(?!(?i:Windows|Program Files)[\\/]|\.\.?[\\/]|-)" + SPACED
SHARE = rb"\\\\\w[\w.-]*\\" + SPACED  # of Windows' network
PATH_CHARACTERS = re.compile(rb"[\w.@+~$\\/:-]*")
DRIVE = re.compile(rb"\W?[A-Za-z]:")
WORD = re.compile(rb"[^\\/]{2}")  # tables of characters have slashes between them
LONGEST_PATH = 4096


def _build_paths(data: bytes) -> Iterator[str]:
    """The absolute paths below a place where builds run, at least two names deep, so that a mere /tmp/x is none.

    A quick search for the tell-tale part comes first; what counts is then decided on the whole path around it, which keeps the end of
    some longer path from being taken for one.
    """
    hint, path = _patterns()
    for match in hint.finditer(data):
        here = match.start()
        before = PATH_CHARACTERS.match(data[max(0, here - LONGEST_PATH) : here][::-1])
        # A word directly before is the beginning of the path, unless it is an option or an item of a list.
        is_item = data[here - 2 : here] in {b"-I", b"-L"} or data[here - 1 : here] == b":" or match.group().startswith(rb"\\")
        is_drive = DRIVE.fullmatch(data[max(0, here - 3) : here])
        start = here - 2 if is_drive else here if is_item or not before else here - before.end()
        whole = path.match(data, start, start + LONGEST_PATH) if here - start < LONGEST_PATH else None
        if whole and WORD.search(whole.group()):
            yield whole.group().decode()


@cache
def _patterns() -> tuple[re.Pattern[bytes], re.Pattern[bytes]]:
    own = b"|".join(re.escape(str(place).encode()) for place in _own_places())
    hint = PLACE + rb"/|(?<=:)" + DRIVE_PLACE + rb"[\\/]|" + SHARE + rb"[\\/]|(?:" + own + rb")/"
    roots = PLACE + rb"|/(?:" + NAME + rb"/)+(?:site|dist)-packages|" + own
    spaced = rb"[A-Za-z]:" + DRIVE_PLACE + rb"|" + SHARE
    whole = rb"(?:%b)(?:%b%b){2,}|(?:%b)(?:%b%b){2,}" % (roots, SEPARATOR, NAME, spaced, SEPARATOR, SPACED)
    return re.compile(hint), re.compile(whole)


def _own_places() -> set[Path]:
    places = {REPOSITORY, Path(tempfile.gettempdir()), Path(sys.prefix)}
    with contextlib.suppress(RuntimeError):  # the user has none
        places.add(Path.home())
    # A home of / or /usr would make everything a build path.
    return {place for place in places if len(place.parts) > 2}
