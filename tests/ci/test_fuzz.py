"""The fuzzer of the audit (`nox -s fuzz-audit`), on a small wheel: its mutants are the same each time; what escapes is told and kept."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest

from ci.audit import providers
from ci.errors import CheckFailed
from ci.wheelfile.binary.elf import HEADER, SEGMENT, Elf

from .audit_support import CU13, NAMES, Files, World, member, with_sbom, write_wheel
from .fuzz.__main__ import Fuzzer
from .fuzz.mutants import elf

SEEDS = [f"1:{number}" for number in range(12)]


@pytest.fixture
def fuzzer(tmp_path: Path, files: Files, world: World, monkeypatch: pytest.MonkeyPatch) -> Fuzzer:
    monkeypatch.setattr(providers, "site", lambda root, _: world.site(root))
    (tmp_path / "own" / "loaded").mkdir(parents=True)
    return Fuzzer(with_sbom(write_wheel(tmp_path / NAMES["linux"], files)), tmp_path / "own", tmp_path / "escapes", (), ())


@pytest.mark.nightly
def test_the_audit_lets_none_escape(fuzzer: Fuzzer) -> None:
    tried = [fuzzer.tried(seed) for seed in SEEDS]
    assert [found for _, _, found in tried if found] == []
    assert {kind.partition(":")[0] for kind, _, _ in tried} == {"elf", "text", "archive"}
    assert sum(refused for _, refused, _ in tried) > len(SEEDS) // 2
    assert not fuzzer.keep.exists()


@pytest.mark.nightly
def test_an_audit_that_takes_all(fuzzer: Fuzzer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each oracle notices some of what the audit has refused."""
    monkeypatch.setattr(fuzzer, "refused", lambda _: False)
    escapes = {seed: found for seed in SEEDS if (found := fuzzer.tried(seed)[2])}
    assert {each.split(" ")[4] for found in escapes.values() for each in found} == {"ld.so", "pip", "uv"}
    assert sorted(path.name for path in fuzzer.keep.iterdir()) == sorted(f"{seed.replace(':', '-')}.whl" for seed in escapes)


def test_an_audit_that_breaks(fuzzer: Fuzzer, monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(_: Path) -> bool:
        raise TypeError("unhashable")

    monkeypatch.setattr(fuzzer, "refused", breaks)
    assert fuzzer.tried("1:0")[1:] == (False, ["TypeError: unhashable"])
    assert [path.name for path in fuzzer.keep.iterdir()] == ["1-0.whl"]


def test_every_part_of_a_module_is_changed(files: Files, world: World) -> None:
    """One place of it, and those often that decide what is loaded."""
    data, chance = files[member(world, CU13)], random.Random(1)  # noqa: S311
    good, places = Elf(data), Counter[tuple[str, int]]()
    while places.total() < 2000:
        kind, new = elf(data, chance)
        if kind != "end":
            assert len(new) == len(data)
            places[kind, next((place for place, (old, byte) in enumerate(zip(data, new, strict=True)) if old != byte), -1)] += 1
    kinds = {kind for kind, _ in places}
    assert kinds >= {"header", "segment", "dynamic", "symbol", "versym", "string", "relocation", "plt", "version", "hash", "note"}

    def hits(kind: str, start: int, size: int) -> int:
        return sum(count for (each, place), count in places.items() if each == kind and start <= place < start + size)

    (number,) = (number for number, each in enumerate(good.symbols) if each.name == "PyInit__cu13")
    assert hits("symbol", good.place(good.tags["SYMTAB"]) + 24 * number, 24) > 30
    assert hits("versym", good.place(good.tags["VERSYM"]) + 2 * number, 2) > 30
    assert hits("string", data.index(b"PyInit__cu13\0", good.string_table[0]), 13) > 3
    assert hits("segment", HEADER.size + SEGMENT.size * good.segments.index(good.loads[0]) + 48, 8) > 3


@pytest.mark.nightly
def test_a_wheel_that_is_bad_to_begin_with(fuzzer: Fuzzer, tmp_path: Path, files: Files) -> None:
    bad = with_sbom(write_wheel(tmp_path / "bad" / NAMES["linux"], {**files, "evil.pth": b""}))
    (tmp_path / "more" / "loaded").mkdir(parents=True)
    with pytest.raises(CheckFailed, match="is no good wheel to begin with: the audit refuses it"):
        Fuzzer(bad, tmp_path / "more", fuzzer.keep, (), ())
