"""The fuzzer of the audit (`nox -s fuzz-audit`), on a small wheel: its mutants are the same each time; what escapes is told and kept."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from ci.audit import providers
from ci.errors import CheckFailed

from .audit_support import NAMES, Files, World, with_sbom, write_wheel
from .fuzz.__main__ import Fuzzer

if TYPE_CHECKING:
    from pathlib import Path

SEEDS = [f"1:{number}" for number in range(12)]


@pytest.fixture
def fuzzer(tmp_path: Path, files: Files, world: World, monkeypatch: pytest.MonkeyPatch) -> Fuzzer:
    monkeypatch.setattr(providers, "site", lambda root, _: world.site(root))
    (tmp_path / "own" / "loaded").mkdir(parents=True)
    return Fuzzer(with_sbom(write_wheel(tmp_path / NAMES["linux"], files)), tmp_path / "own", tmp_path / "escapes", (), ())


def test_the_audit_lets_none_escape(fuzzer: Fuzzer) -> None:
    tried = [fuzzer.tried(seed) for seed in SEEDS]
    assert [found for _, _, found in tried if found] == []
    assert {kind.partition(":")[0] for kind, _, _ in tried} == {"elf", "text", "archive"}
    assert sum(refused for _, refused, _ in tried) > len(SEEDS) // 2
    assert not fuzzer.keep.exists()


def test_an_audit_that_takes_all(fuzzer: Fuzzer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each oracle notices some of what the audit has refused."""
    monkeypatch.setattr(fuzzer, "refused", lambda _: False)
    escapes = {seed: found for seed in SEEDS if (found := fuzzer.tried(seed)[2])}
    assert {each.split(" ")[0] for found in escapes.values() for each in found} == {"ld.so", "pip", "uv"}
    assert sorted(path.name for path in fuzzer.keep.iterdir()) == sorted(f"{seed.replace(':', '-')}.whl" for seed in escapes)


def test_a_wheel_that_is_bad_to_begin_with(fuzzer: Fuzzer, tmp_path: Path, files: Files) -> None:
    bad = with_sbom(write_wheel(tmp_path / "bad" / NAMES["linux"], {**files, "evil.pth": b""}))
    (tmp_path / "more" / "loaded").mkdir(parents=True)
    with pytest.raises(CheckFailed, match="is no good wheel to begin with: the audit refuses it"):
        Fuzzer(bad, tmp_path / "more", fuzzer.keep, (), ())
