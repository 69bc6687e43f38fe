"""Checks of the files in the wheel."""

from __future__ import annotations

import csv
import json
import re
import time
from collections import Counter
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import PurePosixPath

from ...files import record_digest
from ...matrix import load
from ...wheelfile.wheel import DEVICE, STAMP, VERSION, Wheel
from .. import expected
from ..expected import differences
from ..policy import Policy
from .registry import Findings, check

# File names of NVIDIA's run-time libraries, of the hash-named copies that the repair tools make, and of their Windows twins.
NVIDIA = (
    *(
        f"lib{name}*"
        for name in ("cudart", "cublas", "cudnn", "cufft", "cufile", "cupti", "curand", "cusolver", "cusparse", "nccl", "npp", "nv")
    ),
    *(f"{name}*" for name in ("cudart", "cublas", "cudnn", "cufft", "cupti", "curand", "cusolver", "cusparse", "nccl", "npp", "nv")),
    *("libmlx.*", "libmlx-*", "mlx-*.dll"),
    *{file for cuda in load().cuda.values() for library in cuda.libraries for file in library.files.values()},
)
DRIVER = (
    "libcuda.so*",
    "libcuda-*.so*",
    "libnvidia-*",
    "libcudadebugger.*",
    *load().driver.values(),
    "nvcuda-*.dll",
    "nvcuda64.dll",
    "nvcudadebugger.dll",
)


@check("build it again: python -m ci wheel makes the declared modules and copies nothing in")
def modules(wheel: Wheel, policy: Policy) -> Findings:
    needed = {wheel.key(name) for binary in wheel.binaries.values() for name in binary.needed}
    for module in policy.modules:
        if not any(module.holds(member) for member in (*wheel.binaries, *wheel.unreadable)):
            yield f"{module.stem}.*", "is missing, expected one native module of this name"
    for member in wheel.binaries:
        if policy.module(member) is None and not (policy.copied(wheel, member) and wheel.key(PurePosixPath(member).name) in needed):
            yield member, f"is an unexpected binary, expected only {', '.join(f'{module.stem}.*' for module in policy.modules)}"


# The code that delvewheel adds to the package's first file if it copied a DLL in, except for its own version.
DELVEWHEEL = re.compile(
    rb"""\n\n\n# start delvewheel patch
def (_delvewheel_patch_\w+)\(\):
    import os
    if os\.path\.isdir\(libs_dir := os\.path\.abspath\(os\.path\.join\(os\.path\.dirname\(__file__\), os\.pardir, '%b\.libs'\)\)\):
        os\.add_dll_directory\(libs_dir\)


\1\(\)
del \1
# end delvewheel patch
"""
    % load().module.encode()
)


@check(f"build it again from this checkout; a file of the package belongs to python/{load().module}")
def members(wheel: Wheel, policy: Policy) -> Findings:
    """No other file than the package's own, what the build makes of it, and a plain .dist-info; binaries and device code have checks."""
    allowed = {*policy.sources, *policy.made, *wheel.binaries, *wheel.unreadable}
    if wheel.system == "windows":
        allowed.add(f"{wheel.dist_info}/DELVEWHEEL")  # what delvewheel did, where it copied a DLL
    for member in wheel.members:
        if member not in allowed and not member.startswith(DEVICE):
            yield member, "is neither of the package in this checkout nor made by its build, expected no other file"


@check("audit it from a checkout of the commit that it was built from, or build it again from this one")
def sources(wheel: Wheel, policy: Policy) -> Findings:
    """The package's files and the licenses are those of this checkout, all of them, byte-identical except for the stamped version."""
    for member, path in sorted(policy.sources.items()):
        if member not in wheel.members:
            yield member, "is missing, expected the file of this checkout"
        elif _unstamped(wheel, member, wheel.members[member]) != _unstamped(wheel, member, path.read_bytes()):
            yield member, "differs from this checkout, expected the same bytes: a wheel is audited where it was built, or at its tag"


def _unstamped(wheel: Wheel, member: str, data: bytes) -> bytes:
    """A file without what the release and, on Windows, the repair put into it: the version, and how copied DLLs are found."""
    if wheel.system == "windows" and member == f"{load().module}/__init__.py":
        return DELVEWHEEL.sub(b"\n", data, count=1)
    return STAMP.sub(b"", data) if member == VERSION else data


@check("leave it outside: repair excludes the libraries that ci/matrix/matrix.toml declares")
def nvidia_inside(wheel: Wheel, policy: Policy) -> Findings:
    for member in _foreign_libraries(wheel, policy, NVIDIA):
        if not _matches(member, DRIVER):
            yield member, "is a library of another package, expected it outside the wheel: its provider is a requirement of the extra"
    for member, binary in wheel.binaries.items():
        if binary.company and "nvidia" in binary.company.lower():
            yield member, f"is made by {binary.company}, expected nothing of NVIDIA's inside"


@check("leave it outside: repair excludes the driver of ci/matrix/matrix.toml")
def driver_inside(wheel: Wheel, policy: Policy) -> Findings:
    for member in _foreign_libraries(wheel, policy, DRIVER):
        yield (
            member,
            "is the GPU driver's own library, which must come from the driver installed on the machine, expected it outside the wheel",
        )


def _foreign_libraries(wheel: Wheel, policy: Policy, patterns: tuple[str, ...]) -> Iterator[str]:
    """Members whose file name, or whose soname if the file was renamed, matches; the expected native modules apart."""
    for member in wheel.members:
        binary = wheel.binaries.get(member)
        if policy.module(member) is None and (
            _matches(member, patterns) or bool(binary and binary.soname and _matches(binary.soname, patterns))
        ):
            yield member


def _matches(member: str, patterns: tuple[str, ...]) -> bool:
    name = PurePosixPath(member).name.lower()
    is_library = name.endswith((".dll", ".lib", ".a")) or ".so" in name
    return is_library and any(fnmatch(name, pattern) for pattern in patterns)


@check("repair it again: python -m ci repair writes RECORD")
def record(wheel: Wheel, _: Policy) -> Findings:
    """RECORD names every file once, with its SHA-256 and size, and itself without."""
    own = f"{wheel.dist_info}/RECORD"
    try:
        rows = [row for row in csv.reader(wheel.information("RECORD").splitlines(), strict=True) if row]
    except csv.Error as error:
        yield own, f"is not readable: {error}"
        return
    if wheel.information("RECORD") != "".join(f"{','.join(row)}\n" for row in rows):
        yield own, "is not written as installers read it, expected a line each of path, hash and size, without quotes, ended by a line feed"
    for row in rows:
        if len(row) != 3:
            yield own, f"has a line of {len(row)} fields, expected path, hash and size: {','.join(row)}"
    listed = Counter(row[0] for row in rows)
    for name in sorted(set(wheel.members) - set(listed)):
        yield name, "is not in RECORD"
    for name in sorted(set(listed) - set(wheel.members)):
        yield name, "is in RECORD but not in the archive"
    for name, count in listed.items():
        if count > 1:
            yield name, f"is {count} times in RECORD, expected once"
    if [own, "", ""] not in rows:
        yield own, "does not list itself without hash and size"
    for name, digest, size in (row for row in rows if len(row) == 3 and row[0] in wheel.members and row[0] != own):
        own_digest = record_digest(wheel.members[name])
        if digest != own_digest:
            yield name, f"RECORD has {digest or 'no hash'}, expected {own_digest}"
        if size != str(len(wheel.members[name])):
            yield name, f"RECORD has size {size or 'none'}, expected {len(wheel.members[name])}"


@check("repair it again: python -m ci repair writes the archive as auditwheel and delvewheel do")
def archive(wheel: Wheel, _: Policy) -> Findings:
    """Each entry is written as the tools of repair do on their system, and RECORD is the last, so that all before it is in it."""
    systems = {3} if wheel.system == "linux" else {0, 3}  # delvewheel runs on Windows too, which has no modes
    limit = time.gmtime(time.time() + 24 * 3600)[:6]
    for name, entry in wheel.entries.items():
        mode = entry.external_attr >> 16
        modes = {0o40755, 0o40775} if entry.is_dir() else {0o100644, 0o100664}
        if wheel.system == "windows" and name in wheel.binaries:  # delvewheel on Linux keeps what linkers give, and Windows has no modes
            modes |= {0o100755, 0o100775}
        if entry.create_system not in systems:
            yield name, f"is of an archive of system {entry.create_system}, expected {' or '.join(map(str, sorted(systems)))}"
        elif entry.create_system == 3 and mode not in modes:
            yield name, f"has the mode {mode:o}, expected {min(modes):o}: installers give it to the file"
        if entry.extract_version not in {10, 20} or entry.volume:
            yield name, f"needs version {entry.extract_version} of zip and part {entry.volume}, expected 20 and the first"
        if entry.date_time > limit:
            yield name, f"is of the year {entry.date_time[0]}, expected no time to come"
    if (last := list(wheel.members)[-1]) != f"{wheel.dist_info}/RECORD":
        yield f"{wheel.dist_info}/RECORD", f"is followed by {last}, expected it last"


@check("build it again: CMake writes it (cmake/BuildFacts.cmake)")
def build_facts(wheel: Wheel, policy: Policy) -> Findings:
    """`_build.json` names the tools that this checkout takes, written as CMake does, byte by byte."""
    member = f"{load().module}/_build.json"
    try:
        text = wheel.members[member].decode()
        found = json.loads(text)
        told = {name: str(found[name]) for name in ("cmake", "generator", "host", "nanobind", "platform")}
        compiler = {name: str(found["compiler"][name]) for name in ("id", "version")}
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        yield member, f"is missing or not what CMake writes ({type(error).__name__}: {error}), expected the facts of the build"
        return
    yield from ((member, wrong) for wrong in differences(text, expected.build_facts({**told, "compiler": compiler})))
    unpinned = f"it pinned in pyproject.toml, as nanobind=={told['nanobind']} in [build-system] requires"
    takes = VERSION_NUMBER.fullmatch(compiler["version"]) and compiler["version"] in policy.compiler
    for name, value, good, wanted in (
        ("platform", told["platform"], told["platform"] == policy.platform.name, policy.platform.name),
        ("host", told["host"], told["host"] in policy.platforms, " or ".join(policy.platforms)),
        ("nanobind", told["nanobind"] or "none", told["nanobind"] == policy.nanobind, policy.nanobind or unpinned),
        ("cmake", told["cmake"], VERSION_NUMBER.fullmatch(told["cmake"]), "a version"),
        ("generator", told["generator"], told["generator"] in GENERATORS, " or ".join(GENERATORS)),
        ("compiler", " ".join(compiler.values()), compiler["id"] == policy.compiler.id and takes, str(policy.compiler)),
    ):
        if not good:
            yield member, f"has the {name} {value}, expected {wanted}"


VERSION_NUMBER = re.compile(r"[0-9]{1,6}(\.[0-9]{1,6}){1,3}")
GENERATORS = ("Ninja", "Unix Makefiles")  # those that scikit-build-core chooses


@check("python -m ci report shows the sizes; the budget is in ci/matrix/matrix.toml")
def size(wheel: Wheel, policy: Policy) -> Findings:
    mib = wheel.path.stat().st_size / 2**20
    if mib > policy.size_budget_mib:
        yield "", f"is {mib:.1f} MiB, expected at most {policy.size_budget_mib} MiB"
