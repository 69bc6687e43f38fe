"""Whatever the bytes of a wheel are, they are accepted or refused by one of the factory's own errors: no other exception, and no hang.

The files are small, so that a number that a reader trusts and counts up to would show as a test that does not end.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from zipfile import ZIP_STORED  # compressing would take most of the time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ci.audit import providers
from ci.audit.checks import CHECKS
from ci.audit.policy import Policy, for_wheel
from ci.errors import CiError
from ci.repair import sbom
from ci.wheelfile.facts import facts
from ci.wheelfile.wheel import DEVICE, MANIFEST, read

from .attack_support import ANY, BOM, info, packed, plain, start
from .audit_support import (
    CU12,
    CU13,
    METADATA,
    NAMES,
    QUICK,
    RECORD,
    WHEEL,
    Files,
    World,
    good_files,
    make_world,
    member,
    with_sbom,
    write_wheel,
)

DOCUMENTS = (MANIFEST, "mlx_cuda/_libraries.json", "mlx_cuda/_build.json", BOM)
FEW = 60  # the nightly workflow's are thousands, of a new seed
TEXTS = (*DOCUMENTS, METADATA, WHEEL, RECORD, "mlx_cuda/_version.py", f"{DEVICE}decode.fatbin.lzma")


@pytest.fixture
def amount(pytestconfig: pytest.Config) -> int:
    """How many examples: a few that are the same each time, or as many others as `--examples` says (nox -s fuzz-audit)."""
    return int(pytestconfig.getoption("examples") or FEW)


def fuzzed(amount: int, strategy: st.SearchStrategy[Any], check: Callable[[Any], None]) -> None:
    options = settings(max_examples=amount, deadline=None, database=None, derandomize=amount == FEW)
    settings(options, suppress_health_check=list(HealthCheck))(given(strategy)(check))()


def examine(path: Path, policy: Policy) -> None:
    """Run every check; what they find is not the matter here."""
    with suppress(CiError):
        wheel = read(path)
        assert all(str(message) for identifier in QUICK for _, message in CHECKS[identifier](wheel, policy))
        facts(wheel)


@pytest.fixture(scope="module")
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    world = make_world(tmp_path_factory.mktemp("world"), getattr(request, "param", "linux"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(providers, "site", lambda root, _: world.site(root))
        yield world


@pytest.fixture(scope="module")
def files(world: World, tmp_path_factory: pytest.TempPathFactory) -> Files:
    """Of a good wheel those that a check reads: each example writes and reads them all."""
    path = with_sbom(write_wheel(tmp_path_factory.mktemp("good") / NAMES[world.system], good_files(world)))
    kept = {*TEXTS, "mlx_cuda/py.typed", *(member(world, cuda) for cuda in (CU12, CU13))}
    return {name: data for name, data in read(path).members.items() if name in kept}


@pytest.fixture(scope="module")
def policy(world: World, files: Files, tmp_path_factory: pytest.TempPathFactory) -> Policy:
    """Made once: it takes more time than the checks."""
    return for_wheel(read(write_wheel(tmp_path_factory.mktemp("policy") / NAMES[world.system], files)))


@pytest.fixture(scope="module")
def small(files: Files) -> bytes:
    """A wheel of few bytes, each of which is worth a change."""
    kept = {name: files[name] for name in ("mlx_cuda/py.typed", "mlx_cuda/_version.py", METADATA, WHEEL)}
    return packed([(info(name), data[:200]) for name, data in {**kept, "mlx_cuda/_cu13.abi3.so": plain(files), RECORD: b""}.items()])


NUMBERS = st.sampled_from([0, 1, 2, 8, 0x14, 0x2D, 0x7F, 0x80, 0xFF, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFE, 0xFFFFFFFF])
WHERE = st.floats(0, 1)
WORDS = st.sampled_from([b"PK\5\6", b"PK\6\7", b"PK\1\2", b"[" * 9999])
CHANGE = st.one_of(
    st.tuples(st.just("put"), WHERE, st.one_of(st.binary(min_size=1, max_size=4), NUMBERS.map(lambda each: struct.pack("<I", each)))),
    st.tuples(st.just("insert"), WHERE, st.one_of(st.binary(max_size=30), WORDS)),
    st.tuples(st.sampled_from(["delete", "copy"]), WHERE, WHERE),
    st.tuples(st.just("cut"), WHERE, st.none()),
)
CHANGES = st.lists(CHANGE, min_size=1, max_size=4)


def mutated(data: bytes, changes: list[tuple[str, float, Any]]) -> bytes:
    for kind, where, what in changes:
        place = int(where * len(data))
        if kind == "put":
            data = data[:place] + what + data[place + len(what) :]
        elif kind == "insert":
            data = data[:place] + what + data[place:]
        elif kind == "cut":
            data = data[:place]
        else:
            other = int(what * len(data))
            data = data[: min(place, other)] + data[max(place, other) :] if kind == "delete" else data[:place] + data[min(place, other) :]
    return data


@pytest.mark.nightly
def test_bytes_of_the_archive(tmp_path: Path, small: bytes, amount: int, policy: Policy) -> None:
    path = tmp_path / NAMES["linux"]

    def check(changes: list[tuple[str, float, Any]]) -> None:
        path.write_bytes(mutated(small, changes))
        examine(path, policy)

    fuzzed(amount, CHANGES, check)


def test_fields_of_headers(tmp_path: Path, small: bytes, amount: int, policy: Policy) -> None:
    """Half of the numbers of the directory and of the end, and of the headers before the data, become others."""
    path = tmp_path / NAMES["linux"]
    places = list(range(start(small), len(small) - 1))
    places += [each + place for each in range(len(small)) if small[each : each + 4] == b"PK\3\4" for place in range(30)]

    def check(changes: list[tuple[int, str, int]]) -> None:
        data = bytearray(small)
        for place, layout, number in changes:
            if place + struct.calcsize(layout) <= len(data):
                struct.pack_into(layout, data, place, number % 256 ** struct.calcsize(layout))
        path.write_bytes(data)
        examine(path, policy)

    change = st.tuples(st.sampled_from(places), st.sampled_from(["<B", "<H", "<I"]), st.one_of(NUMBERS, st.integers(0, len(small))))
    fuzzed(amount, st.lists(change, min_size=1, max_size=5), check)


TRICKY = [METADATA, RECORD, "mlx_cuda/", "mlx_cuda/nn.py", "mlx_cuda/NN.py", "../x", "a" * 70000]
ENTRY = st.fixed_dictionaries(
    {
        "name": st.one_of(st.sampled_from(TRICKY), st.text(max_size=9)),
        "data": st.one_of(st.binary(max_size=40), st.just(b"\x7fELF"), st.just(b"MZ")),
        "flags": st.sampled_from([0, 0, 0, 1, 8, 0x20, 0x40, 0x800]),
        "method": st.sampled_from([0, 0, 8, 12, 14, 99]),
        "grows": st.sampled_from([0, 0, 0, 1, -1, 2**31]),
        "moves": st.sampled_from([0, 0, 0, 1, -1, 2**31]),
        "extra": st.sampled_from([b"", b"", b"\1\0\0\0", b"\1\0\x08\0" + bytes(8), b"\x75\x70\x06\0\1\0\0\0\0x", b"\xff"]),
        "attributes": st.sampled_from([0, 0o100644 << 16, 0o120777 << 16, 0o40755 << 16, 0x10, 2**32 - 1]),
        "date": st.sampled_from([0x5C22, 0x5C22, 0, 0xFFFF]),
    }
)


def built(entries: list[dict[str, Any]], end: tuple[int, int, bytes]) -> bytes:
    """An archive of these entries, right or wrong as they are."""
    data, directory = b"", b""
    for each in entries:
        name = each["name"].encode("utf-8", "replace")[:65535]
        size = (len(each["data"]) + each["grows"]) % 2**32
        shared = struct.pack("<5H3I2H", 20, each["flags"], each["method"], 0, each["date"], 0, size, size, len(name), len(each["extra"]))
        offset = (len(data) + each["moves"]) % 2**32
        data += b"PK\3\4" + shared + name + each["extra"] + each["data"]
        directory += b"PK\1\2\x14\3" + shared + struct.pack("<3H2I", 0, 0, 0, each["attributes"], offset) + name + each["extra"]
    count, moved, comment = end
    sizes = struct.pack("<4H2IH", 0, 0, *[(len(entries) + count) % 65536] * 2, len(directory), (len(data) + moved) % 2**32, len(comment))
    return data + directory + b"PK\5\6" + sizes + comment


def test_archives_that_are_made_up(tmp_path: Path, world: World, amount: int, policy: Policy) -> None:
    path = tmp_path / NAMES["linux"]

    def check(made: tuple[list[dict[str, Any]], tuple[int, int, bytes]]) -> None:
        path.write_bytes(built(*made))
        examine(path, policy)

    end = st.tuples(
        st.sampled_from([0, 0, 1, -1]), st.sampled_from([0, 0, 1, -1, 2**31]), st.sampled_from([b"", b"", b"PK\5\6" + bytes(18)])
    )
    fuzzed(amount, st.tuples(st.lists(ENTRY, max_size=5), end), check)


@pytest.mark.parametrize("world", ANY, indirect=True)
def test_bytes_of_the_files(tmp_path: Path, world: World, files: Files, amount: int, policy: Policy) -> None:
    path = tmp_path / NAMES[world.system]

    def check(made: tuple[str, list[tuple[str, float, Any]]]) -> None:
        name, changes = made
        changed = {**files, name: mutated(files[name], changes)}
        write_wheel(path, changed if name == RECORD else {key: data for key, data in changed.items() if key != RECORD}, ZIP_STORED)
        examine(path, policy)

    names = st.one_of(st.just(member(world, CU13)), st.sampled_from(TEXTS))
    fuzzed(amount, st.tuples(names, CHANGES), check)


KEYS = st.sampled_from(["name", "alg", "size", "specVersion"])
JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.sampled_from(["", "1.6", "1.0", "SHA-256", "\ud800"])),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(KEYS, inner, max_size=3)),
    max_leaves=4,
)


def replaced(value: Any, path: list[int], new: Any) -> Any:
    """A document with something else in one place."""
    if not path or not value or not isinstance(value, (dict, list)):
        return new
    keys = list(value) if isinstance(value, dict) else range(len(value))
    key = keys[path[0] % len(keys)]
    copy = value.copy()
    copy[key] = replaced(value[key], path[1:], new)
    return copy


@pytest.mark.nightly
def test_documents_of_another_shape(tmp_path: Path, world: World, files: Files, amount: int, policy: Policy) -> None:
    path = tmp_path / NAMES["linux"]

    def check(made: tuple[str, list[int], Any]) -> None:
        name, where, new = made
        changed = {**files, name: json.dumps(replaced(json.loads(files[name]), where, new)).encode()}
        write_wheel(path, {key: data for key, data in changed.items() if key != RECORD}, ZIP_STORED)
        examine(path, policy)
        with suppress(CiError):
            list(CHECKS["sbom"](read(path), policy)) if name == BOM else sbom.embed(path)

    fuzzed(amount // 2, st.tuples(st.sampled_from(DOCUMENTS), st.lists(st.integers(0, 50), max_size=4), JSON), check)
