"""Checks of each binary by itself: what it was built for, and what the build left in it."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from packaging.version import Version

from ...errors import EnvironmentProblem
from ...matrix import REPOSITORY
from ..binary import BinaryError, fatbin
from ..systems import manylinux
from .registry import check

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ..policy import Policy
    from ..wheel import Wheel
    from .registry import Findings


@check
def platform_tag(wheel: Wheel, _: Policy) -> Findings:
    """Every symbol version that a binary needs is one that the tag's systems have."""
    if wheel.system == "windows":
        return
    for platform in wheel.platforms:
        tag = manylinux(platform)
        if tag is None or not tag.symbol_versions:
            yield "", f"has the platform tag {platform}, expected a manylinux tag: any other proves nothing and no index takes it"
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


def newest(versions: Iterable[str]) -> str:
    """The highest of the symbol versions' numbers; names such as PRIVATE sort lowest."""
    return max(versions, key=_comparable, default="")


def _comparable(version: str) -> Version:
    try:
        return Version(version)
    except ValueError:  # which all of packaging's are
        return Version("0")


@check
def machine(wheel: Wheel, _: Policy) -> Findings:
    """Each binary is for the platform tag's processor and system."""
    expected = "pe" if wheel.system == "windows" else "elf"
    for member, binary in wheel.binaries.items():
        if binary.format != expected or not all(platform.endswith(f"_{binary.machine}") for platform in wheel.platforms):
            yield member, f"is {binary.format.upper()} for {binary.machine}, expected {expected.upper()} for {', '.join(wheel.platforms)}"


@check
def abi3(wheel: Wheel, policy: Policy) -> Findings:
    """Named as a stable-ABI module and using nothing else of Python, by abi3audit --strict."""
    tag = min(wheel.tags, key=str)
    abi, oldest = tag.abi, tag.interpreter.replace("cp3", "3.")  # abi3 or, of free-threaded CPython, abi3t
    suffix, python = (".pyd", f"{abi.replace('abi', 'python')}.dll") if wheel.system == "windows" else (f".{abi}.so", "no libpython")
    modules = {member: binary for member, binary in wheel.binaries.items() if policy.module(member)}
    for member, binary in modules.items():
        if PurePosixPath(member).name.partition(".")[1:] != (".", suffix[1:]):
            yield member, f"is not named as a stable-ABI module, expected the suffix {suffix}"
        for library in binary.needed:
            if re.fullmatch(r"(lib)?python3\.?\d+.*", library.lower()):
                yield member, f"needs {library} of one Python version, expected {python}"
    names = {PurePosixPath(member).name: member for member in modules}
    for found in _abi3audit(wheel.path, oldest):
        member, result = names.get(found["name"], found["name"]), found["result"]
        if result["non_abi3_symbols"]:
            yield member, f"uses {', '.join(sorted(result['non_abi3_symbols']))}, expected the stable ABI only"
        for symbol, added in sorted(result["future_abi3_objects"].items()):
            yield member, f"uses {symbol}, which the stable ABI has since {added}, expected that of {result['baseline']}"


def _abi3audit(wheel: Path, oldest: str) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        # The oldest Python is read from the tag of an abi3 wheel, and not from that of an abi3t one.
        command = [sys.executable, "-m", "abi3audit", "--strict", "--report", "--output", str(report)]
        command += ["--assume-minimum-abi3", oldest, str(wheel)]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        try:
            # Its exit code is 1 for findings and for its own failures alike; the report tells them apart.
            specs = json.loads(report.read_text("utf-8"))["specs"].values()
        except (OSError, ValueError, KeyError) as error:
            last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
            raise EnvironmentProblem(f"abi3audit failed on {wheel.name}: {last}", cure="install the dependency group factory") from error
    return [found for spec in specs for found in spec["wheel"]]


@check
def architectures(wheel: Wheel, _: Policy) -> Findings:
    """No fatbin lies inside a binary."""
    for member in wheel.binaries:
        try:
            fatbins = list(fatbin.find(wheel.members[member]))
        except BinaryError as error:
            yield member, f"has a damaged {error}"
            continue
        if fatbins:
            yield member, f"holds {len(fatbins)} fatbins (the first at {fatbins[0].offset:#x}), expected none: they are files"


@check
def stripped(wheel: Wheel, _: Policy) -> Findings:
    for member, binary in wheel.binaries.items():
        if binary.debug:
            yield member, f"has {', '.join(binary.debug)}, expected it stripped"
        if binary.pdb and re.match(r"[A-Za-z]:|[\\/]", binary.pdb):
            yield member, f"names the debug database {binary.pdb}, expected none or a file name without its folder (/PDBALTPATH:%_PDB%)"


@check
def executable_stack(wheel: Wheel, _: Policy) -> Findings:
    for member, binary in wheel.binaries.items():
        if binary.executable_stack:
            yield member, "asks for an executable stack, which glibc 2.41 refuses to load, expected -Wl,-z,noexecstack"


@check
def build_path(wheel: Wheel, _: Policy) -> Findings:
    for member in wheel.binaries:
        if paths := sorted(set(_build_paths(wheel.members[member]))):
            yield member, f"holds paths of the build ({len(paths)}), such as {paths[0]}, expected none (see -ffile-prefix-map)"


# Where builds run. Places of the running system (/usr/lib, /proc, /etc) and of the user's machine (/usr/local/cuda) that a program may
# well name are not among them.
PLACES = rb"home|Users|root|tmp|var/tmp|project|build|io|ws|workspace|__w|__e|github/workspace|opt/_internal|opt/python"
DRIVE_PLACES = rb"Users|a|b|src|build|projects|actions-runner"
PATH_CHARACTERS = rb"[\w.@+~$\\/:-]"
NAME = rb"[\w.@+~-]+"
PATH_BEGINNING = re.compile(PATH_CHARACTERS + rb"*\Z")
LONGEST_PATH = 4096


def _build_paths(data: bytes) -> Iterator[str]:
    """The absolute paths below a place where builds run, at least two names deep, so that a mere /tmp/x is none.

    A quick search for the tell-tale part comes first; what counts is then decided on the whole path around it, which keeps the end of
    some longer path from being taken for one.
    """
    hint, path = _patterns()
    for match in hint.finditer(data):
        here = match.start()
        beginning = PATH_BEGINNING.search(data, max(0, here - 256), here)
        # A word directly before is the beginning of the path, unless it is an option or an item of a list.
        is_item = data[here - 2 : here] in {b"-I", b"-L"} or data[here - 1 : here] == b":"
        start = here if is_item or not beginning else beginning.start()
        if whole := path.match(data, start, start + LONGEST_PATH):
            yield whole.group().decode()


@cache
def _patterns() -> tuple[re.Pattern[bytes], re.Pattern[bytes]]:
    own = b"|".join(re.escape(str(place).encode()) for place in _own_places())
    hint = rb"/(?:" + PLACES + rb"|(?:site|dist)-packages)/|:[\\/](?:" + DRIVE_PLACES + rb")[\\/]|(?:" + own + rb")/"
    roots = (
        rb"/(?:" + PLACES + rb")",
        rb"/(?:" + NAME + rb"/)+(?:site|dist)-packages",
        rb"[A-Za-z]:[\\/](?:" + DRIVE_PLACES + rb")",
        own,
    )
    return re.compile(hint), re.compile(rb"(?:" + rb"|".join(roots) + rb")(?:[\\/]" + NAME + rb"){2,}")


def _own_places() -> set[Path]:
    places = {REPOSITORY, Path(tempfile.gettempdir()), Path(sys.prefix)}
    with contextlib.suppress(RuntimeError):  # the user has none
        places.add(Path.home())
    # A home of / or /usr would make everything a build path.
    return {place for place in places if len(place.parts) > 2}
