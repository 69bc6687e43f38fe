"""Checks of the audit on wheels that no archive holds: what each takes and refuses, value by value."""

from __future__ import annotations

import time
import zipfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from packaging.utils import parse_wheel_filename

from ci.audit import expected
from ci.audit.checks import CHECKS
from ci.audit.checks.contents import _unstamped
from ci.audit.checks.libraries import _below_site_packages, _requirements
from ci.audit.checks.sbom import _differences
from ci.audit.policy import for_wheel
from ci.matrix import System
from ci.wheelfile.binary import Binary
from ci.wheelfile.wheel import Wheel

from .audit_support import BUILD, DIST_INFO, MATRIX, METADATA, NAMES, RECORD, WINDOWS_BUILD

NN, FOLDER, MODULE = "mlx_cuda/nn.py", "mlx_cuda/", "mlx_cuda/_cu13.pyd"


def wheel(system: System, members: Mapping[str, bytes], entries: Mapping[str, zipfile.ZipInfo] | None = None) -> Wheel:
    name = NAMES[system]
    project, version, _, tags = parse_wheel_filename(name)
    made = Wheel(Path(name), project, version, tags, {**members, RECORD: b""}, entries or {})
    made.__dict__["binaries"] = {MODULE: Binary("pe", "amd64", None, ())} if MODULE in members else {}
    return made


def found(check: str, wheel: Wheel) -> list[tuple[str, str]]:
    return list(CHECKS[check](wheel, for_wheel(wheel)))


def entry(name: str, **fields: Any) -> zipfile.ZipInfo:
    made = zipfile.ZipInfo(name, (2026, 1, 2, 3, 4, 6))
    made.create_system, made.external_attr, made.extract_version = 3, (0o40755 if name == FOLDER else 0o100644) << 16, 20
    for field, value in fields.items():
        setattr(made, field, value)
    return made


def of_entry(system: System, name: str, **fields: Any) -> list[str]:
    """What `archive` says of an entry."""
    told = found("archive", wheel(system, {name: b""}, {name: entry(name, **fields)}))
    assert {member for member, _ in told} <= {name}
    return [message for _, message in told]


@pytest.mark.parametrize(
    ("system", "name", "modes"),
    [
        ("linux", NN, {0o100644, 0o100664}),
        ("linux", FOLDER, {0o40755, 0o40775}),
        ("linux", MODULE, {0o100644, 0o100664}),
        ("windows", NN, {0o100644, 0o100664}),
        ("windows", MODULE, {0o100644, 0o100664, 0o100755, 0o100775}),
    ],
)
def test_modes(system: System, name: str, modes: set[int]) -> None:
    kinds = {kind | mode for kind in (0o40000, 0o100000) for mode in (0o600, 0o640, 0o644, 0o664, 0o666, 0o755, 0o775, 0o777)}
    for mode in kinds | modes:
        message = f"has the mode {mode:o}, expected {min(modes):o}: installers give it to the file"
        assert of_entry(system, name, external_attr=mode << 16) == [message] * (mode not in modes)


def test_systems_of_archives() -> None:
    for number in range(20):
        message = f"is of an archive of system {number}, expected"
        assert of_entry("linux", NN, create_system=number) == [f"{message} 3"] * (number != 3)
        assert of_entry("windows", NN, create_system=number) == [f"{message} 0 or 3"] * (number not in {0, 3})
    assert of_entry("windows", NN, create_system=0, external_attr=0) == [], "Windows has no modes"


def test_versions_of_zip() -> None:
    for number in (*range(9, 22), 45):
        message = f"needs version {number} of zip and part 0, expected 20 and the first"
        assert of_entry("linux", NN, extract_version=number) == [message] * (number not in {10, 20})
    assert of_entry("linux", NN, volume=1) == ["needs version 20 of zip and part 1, expected 20 and the first"]


def test_times() -> None:
    """A day to come is admitted, as clocks of the world differ."""
    for hours, taken in ((0, True), (23, True), (25, False)):
        when = time.gmtime(time.time() + hours * 3600)[:6]
        assert of_entry("linux", NN, date_time=when) == [f"is of the year {when[0]}, expected no time to come"] * (not taken)


def test_record_is_the_last() -> None:
    made = wheel("linux", {})
    after = Wheel(made.path, made.project, made.version, made.tags, {**made.members, NN: b""})
    assert found("archive", after) == [(RECORD, f"is followed by {NN}, expected it last")]
    assert found("archive", made) == []


FACTS = "mlx_cuda/_build.json"


def of_facts(system: System, **facts: Any) -> list[str]:
    """What `build-facts` says where they are others."""
    told = {**(BUILD if system == "linux" else WINDOWS_BUILD), **facts}
    messages = found("build-facts", wheel(system, {FACTS: expected.build_facts(told).encode()}))
    assert {member for member, _ in messages} <= {FACTS}
    return [message for _, message in messages]


def test_a_nanobind_that_is_not_pinned() -> None:
    built = wheel("linux", {FACTS: expected.build_facts(BUILD).encode()})
    told = [message for _, message in CHECKS["build-facts"](built, replace(for_wheel(built), nanobind=""))]
    assert told == ["has the nanobind 3.1.0, expected it pinned in pyproject.toml, as nanobind==3.1.0 in [build-system] requires"]


@pytest.mark.parametrize(
    ("system", "facts", "message"),
    [
        ("linux", {}, ""),
        ("windows", {}, ""),
        ("linux", {"platform": "win-amd64"}, "has the platform win-amd64, expected linux-x86_64"),
        ("linux", {"host": "linux-aarch64"}, ""),
        ("linux", {"host": "macos"}, f"has the host macos, expected {' or '.join(MATRIX.platforms)}"),
        ("linux", {"nanobind": "1.0"}, "has the nanobind 1.0, expected 3.1.0"),
        ("linux", {"generator": "Unix Makefiles"}, ""),
        ("linux", {"generator": "make"}, "has the generator make, expected Ninja or Unix Makefiles"),
        *(("linux", {"cmake": each}, "") for each in ("3.26", "4.4.4", "4.0.0.1", "123456.123456")),
        *(
            ("linux", {"cmake": each}, f"has the cmake {each}, expected a version")
            for each in ("4", "", "4.", "4.0.0.0.1", "1234567.1", "4.1234567", "4.0-rc1", "4\u0661.0", "4,0")
        ),
        *(
            (
                "linux",
                {"compiler": {"id": name, "version": version}},
                f"has the compiler {name} {version}, expected {MATRIX.compilers['linux']}",
            )
            for name, version in (("Clang", "12.2.0"), ("GNU", "1.0"), ("GNU", "12.2.0-evil"), ("MSVC", "19.44.35211.0"))
        ),
        (
            "windows",
            {"compiler": {"id": "GNU", "version": "12.2.0"}},
            f"has the compiler GNU 12.2.0, expected {MATRIX.compilers['windows']}",
        ),
    ],
)
def test_build_facts(system: System, facts: dict[str, Any], message: str) -> None:
    assert of_facts(system, **facts) == [message] * bool(message)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (None, "(KeyError: 'mlx_cuda/_build.json')"),
        (b"{}", "(KeyError: 'cmake')"),
        (b"[]", "(TypeError: "),
        (b"\xff", "(UnicodeDecodeError: "),
        (b"x", "(JSONDecodeError: "),
        (b"[" * 100_000, "(RecursionError: "),
    ],
)
def test_no_build_facts(data: bytes | None, words: str) -> None:
    ((member, message),) = found("build-facts", wheel("linux", {} if data is None else {FACTS: data}))
    assert member == FACTS
    assert message.startswith(f"is missing or not what CMake writes {words}")
    assert message.endswith("), expected the facts of the build")


def test_facts_of_more() -> None:
    """A key that CMake does not write."""
    assert of_facts("linux", more="x") == ['has the line \'  "more" : "x",\', expected no such line there']


@pytest.mark.parametrize(
    ("python", "name", "since"),
    [
        ("cp310-abi3", "PyType_GetName", "3.11"),
        ("cp311-abi3", "PyType_GetName", ""),
        ("cp311-abi3", "PyLong_AsInt", "3.13"),
        ("cp315-abi3t", "PyLong_AsInt", ""),
        ("cp310-abi3", "PyList_New", ""),
        ("py3-none", "PyType_GetName", "3.11"),
    ],
)
def test_the_oldest_python(python: str, name: str, since: str) -> None:
    """Of a wheel for every Python, 3.10."""
    project, version, _, tags = parse_wheel_filename(NAMES["windows"].replace("cp310-abi3", python))
    made = Wheel(Path(), project, version, tags, {RECORD: b""})
    dll = f"{python.split('-')[1].replace('abi', 'python')}.dll"
    made.__dict__["binaries"] = {MODULE: Binary("pe", "amd64", None, (dll,), exports=frozenset({"PyInit__cu13"}), used=frozenset({name}))}
    oldest = python[2:5].replace("3-n", "310")
    message = f"uses {name}, which the stable ABI has since {since}, expected that of 3.{oldest[1:]}"
    assert found("abi3", made) == [(MODULE, message)] * bool(since)


def test_what_delvewheel_tells() -> None:
    """It is no file of a Linux wheel."""
    member = f"{DIST_INFO}/DELVEWHEEL"
    message = "is neither of the package in this checkout nor made by its build, expected no other file"
    assert found("members", wheel("windows", {member: b""})) == []
    assert found("members", wheel("linux", {member: b""})) == [(member, message)]


PATCH = b"""


# start delvewheel patch
def _delvewheel_patch_1_10_0():
    import os
    if os.path.isdir(libs_dir := os.path.abspath(os.path.join(os.path.dirname(__file__), os.pardir, 'mlx_cuda.libs'))):
        os.add_dll_directory(libs_dir)


_delvewheel_patch_1_10_0()
del _delvewheel_patch_1_10_0
# end delvewheel patch
"""


def test_what_repair_and_release_put_into_files() -> None:
    """Once each, into one file each, and nothing like it."""
    first, version = "mlx_cuda/__init__.py", "mlx_cuda/_version.py"
    windows, linux = wheel("windows", {}), wheel("linux", {})
    assert _unstamped(windows, first, b"a" + PATCH + b"b") == b"a\nb"
    assert _unstamped(windows, first, PATCH + PATCH) == b"\n" + PATCH
    for old, new in ((b"mlx_cuda.libs", b"evil.libs"), (b"del _", b"run _"), (b"1_10_0()\ndel", b"2()\ndel")):
        other = PATCH.replace(old, new)
        assert _unstamped(windows, first, other) == other
    assert _unstamped(linux, first, PATCH) == PATCH
    assert _unstamped(windows, NN, PATCH) == PATCH
    assert _unstamped(linux, version, b'a\n__version__ = "1"\nb') == b"a\n\nb"
    assert _unstamped(linux, NN, b'__version__ = "1"') == b'__version__ = "1"'


def test_requirements_of_an_extra() -> None:
    """Its own and the plain ones; what cannot be read is passed over."""
    lines = ("a>=1", 'b>=2; extra == "cu13"', 'c; extra == "cu12"', "D_e", "f==" + "9" * 5000, "g; " + "(" * 5000, "h", "i ==")
    text = "".join(f"Requires-Dist: {line}\n" for line in sorted(lines, key=len, reverse=True))
    made = wheel("linux", {METADATA: text.encode()})
    assert set(_requirements(made, "cu13")) == {"a", "b", "d-e", "h"}
    assert set(_requirements(made, "")) == {"a", "d-e", "h"}
    assert str(_requirements(made, "cu13")["b"].specifier) == ">=2"
    assert _requirements(wheel("linux", {METADATA: b"Name: x\n"}), "cu13") == {}


@pytest.mark.parametrize(
    ("member", "entry", "directory"),
    [
        ("mlx_cuda/x.so", "$ORIGIN", "mlx_cuda"),
        ("mlx_cuda/x.so", "${ORIGIN}/../nvidia/lib", "nvidia/lib"),
        ("mlx_cuda/a/x.so", "$ORIGIN/..", "mlx_cuda"),
        ("x.so", "$ORIGIN/..a", "..a"),
        ("mlx_cuda/x.so", "$ORIGIN/../..", None),
        ("mlx_cuda/x.so", "$ORIGIN/../../a", None),
        ("mlx_cuda/x.so", "$ORIGIN/a$LIB", None),
        ("mlx_cuda/x.so", "$ORIGINX/a", None),
        ("mlx_cuda/x.so", "$origin/a", None),
        ("mlx_cuda/x.so", "/a", None),
        ("mlx_cuda/x.so", "", None),
    ],
)
def test_entries_of_an_rpath(member: str, entry: str, directory: str | None) -> None:
    assert _below_site_packages(member, entry) == directory


def test_no_version_at_all() -> None:
    made = wheel("linux", {METADATA: b"Name: x\n"})
    messages = [message for member, message in found("versions", made) if member == METADATA]
    assert messages == [f"has the version none, expected the file name's {made.version}"]


ONCE = "has parts of /x more than once, expected each once"
ORDER = "has the parts of /x in another order, expected that of python -m ci repair"


@pytest.mark.parametrize(
    ("found", "expected", "messages"),
    [
        ([1, 2], [1, 2], []),
        ([2, 1], [1, 2], [ORDER]),
        ([1, 1, 2], [1, 2], [ONCE]),
        ([1], [1, 2], ["lacks in /x 2, expected it"]),
        ([1, 3], [1, 2], ["has in /x 3, expected nothing of the kind", "lacks in /x 2, expected it"]),
        ([1, 2, 3], [1, 2], ["has in /x 3, expected nothing of the kind"]),
        ({"a": 1, "b": 2}, {"b": 2, "c": 1}, ["has 1 in /x/a, expected null", "has null in /x/c, expected 1"]),
        ({"a": {"b": [1]}}, {"a": {"b": []}}, ["has in /x/a/b 1, expected nothing of the kind"]),
        (1, [1], ["has 1 in /x, expected [1]"]),
        ([1], {}, ["has [1] in /x, expected {}"]),
        ({}, 1, ["has {} in /x, expected 1"]),
        ({}, [], ["has {} in /x, expected []"]),
    ],
)
def test_differences_of_documents(found: object, expected: object, messages: list[str]) -> None:
    assert list(_differences(found, expected, "/x")) == messages


def test_the_serial_number_follows_from_the_rest() -> None:
    assert list(_differences({"serialNumber": 1, "a": {"serialNumber": 1}}, {"serialNumber": 2, "a": {"serialNumber": 2}})) == [
        "has 1 in /a/serialNumber, expected 2"
    ]
    assert list(_differences(1, 2)) == ["has 1 in the document, expected 2"]


def test_an_sbom_of_facts_that_cannot_be_read() -> None:
    sbom = f"{DIST_INFO}/sboms/mlx-cuda.cdx.json"
    ((member, message),) = found("sbom", wheel("linux", {FACTS: b"{", sbom: b"{}"}, {sbom: entry(sbom)}))
    assert member == sbom
    assert message.startswith("cannot be made again (JSONDecodeError: ")
    assert message.endswith("), expected files that can be read")


def test_size(tmp_path: Path) -> None:
    for more, message in (
        (0, []),
        (2**20 // 10, [("", f"is {MATRIX.size_budget_mib}.1 MiB, expected at most {MATRIX.size_budget_mib} MiB")]),
    ):
        path = tmp_path / NAMES["linux"]
        with path.open("wb") as stream:
            stream.truncate(MATRIX.size_budget_mib * 2**20 + more)
        made = wheel("linux", {})
        assert found("size", Wheel(path, made.project, made.version, made.tags, made.members)) == message
