"""The walk of mlx-lm's models: what counts as worse than upstream, its tables, and the program's arguments."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from benchmarks.__main__ import main as tables
from benchmarks.families import __main__ as program
from benchmarks.families import walk
from benchmarks.families.__main__ import ended, main
from benchmarks.families.judging import summary, worse
from benchmarks.families.table import family_tables
from benchmarks.result_file import read, write

from .invented import PROVENANCE

SIDE: dict[str, Any] = {"error": {"prompt": 0.01, "steps": 0.02}, "at once": {"right": True}}
GOOD: dict[str, Any] = {
    "family": "llama", "parameters": 10, "caches": ["KVCache", "ArraysCache"], "replayed": 3, "reason": "",
    "upstream": SIDE, "patched": {"error": {**SIDE["error"]}, "at once": {"right": True, "replayed": 2, "pages": True}},
    "engines": {"prompt": {"cudnn": 2}, "step": {"decode": 2}},
    "seconds": {"upstream": {"prompt": 0.004, "step": 0.002}, "patched": {"prompt": 0.002, "step": 0.0005}},
}  # fmt: skip
FAILS = {"family": "bitnet", "failed": "RuntimeError: none", "side": "upstream"}


def changed(**changes: Any) -> dict[str, Any]:
    """The good entry, with other values by the way to them."""
    entry = copy.deepcopy(GOOD)
    for way, value in changes.items():
        *path, last = way.split("__")
        at = entry
        for name in path:
            at = at[name.replace("_", " ")]
        at[last.replace("_", " ")] = value
    return entry


@pytest.mark.parametrize("entry", [
    GOOD, FAILS, changed(patched__error__steps=0.039), changed(replayed=0, reason="its cache is another"),
    changed(upstream__failed="it does", patched__failed="too"),
    changed(upstream__at_once={"right": False}, patched__at_once={"right": False}),
    {**changed(patched__at_once__right=False), "requests apart in float32": False},
    changed(upstream__at_once={"failed": "it does"}, patched__at_once={"failed": "too"}),
])  # fmt: skip
def test_what_is_as_good(entry: dict[str, Any]) -> None:
    assert worse(entry) == ""


@pytest.mark.parametrize(("entry", "reason"), [
    ({**FAILS, "side": "patched"}, "RuntimeError"),
    (changed(patched__failed="crashed"), "crashed"),
    (changed(patched__error__steps=0.041), "error of the steps 4.10%, upstream's 2.00%"),
    (changed(patched__error__prompt=None), "error of the prompt not a number"),
    (changed(patched__error__steps=float("nan")), "error of the steps"),
    (changed(replayed=0), "recorded again and again"),
    (changed(patched__at_once={"failed": "crashed"}), "requests at once: crashed"),
    (changed(patched__at_once__right=False), "not those of their own prompts"),
    ({**changed(patched__at_once__right=False), "requests apart in float32": True}, "not those of their own prompts"),
])  # fmt: skip
def test_what_is_worse(entry: dict[str, Any], reason: str) -> None:
    assert reason in worse(entry)
    assert "WORSE" in summary(entry) or "fails" in summary(entry)


@pytest.mark.parametrize(("gap", "apart"), [(0.0, True), (3 * walk.SAME, True), (4 * walk.SAME, False)])
def test_a_float32_model_may_mix_requests_up(monkeypatch: pytest.MonkeyPatch, gap: float, apart: bool) -> None:
    monkeypatch.setattr(walk, "at_once", lambda _: [([1], [2]), ([3], [4])])
    monkeypatch.setattr(walk, "agrees", lambda _, prompt, __, near: prompt == [1] or gap <= near)
    assert walk.keeps_requests_apart(None, 3.0) == apart


def results(jobs: int, *entries: dict[str, Any]) -> dict[str, Any]:
    settings = {"prompt": 512, "steps": 32, "turns": 5, "jobs": jobs}
    provenance = {**PROVENANCE, "commit": "0123456789abcdef"}
    head = {"kind": "families", "provenance": provenance, "settings": settings, "left out": {"olmo": "needs a package"}}
    return {**head, "cases": list(entries)}


def test_the_tables() -> None:
    slow = changed(family="mamba", patched__error__steps=1.2, seconds__patched__step=0.004)
    made = family_tables(results(8, GOOD, slow, FAILS))
    assert list(made) == ["families_counts", "families_speed", "families_failing"]
    row = next(line for line in made["families_speed"].splitlines() if "`llama`" in line)
    assert [cell.strip() for cell in row.strip("| ").split("|")] == [
        "`llama`", "KV cache, state", "4.00", "2.00", "2.00x", "2.00", "0.50", "4.00x", "captured", "paged",
        "cudnn; decode: decode", "2.0%, 2.0%",
    ]  # fmt: skip
    assert "2 of 3 modules run; 2 have captured decode steps" in made["families_counts"]
    assert "(0.50x to 4x)" in made["families_counts"]
    assert "`mamba` (error of the steps 120.00%" in made["families_counts"]
    assert "`bitnet` | RuntimeError: none" in made["families_failing"]
    assert "left out: needs a package" in made["families_failing"]
    assert list(family_tables(results(2, GOOD))) == ["families_quiet"]


@pytest.mark.parametrize(("theirs", "apart", "told"), [
    (True, None, "paged; tokens differ"),
    (True, True, "paged; tokens differ"),
    (True, False, "paged; tokens differ, with MLX too"),
    (False, None, "paged; tokens differ, with MLX too"),
])  # fmt: skip
def test_whose_requests_have_other_tokens(theirs: bool, apart: bool | None, told: str) -> None:
    entry = changed(upstream__at_once__right=theirs, patched__at_once__right=False)
    entry |= {} if apart is None else {"requests apart in float32": apart}
    assert f"| {told} |" in family_tables(results(8, entry))["families_speed"]


def test_a_document_is_filled(tmp_path: Path) -> None:
    given, document = tmp_path / "families.jsonl", tmp_path / "models.md"
    write(given, results(1, GOOD))
    document.write_text("before\n<!-- results: families_quiet -->\nold\n<!-- end of results -->\nafter\n", "utf-8")
    assert tables(["families", str(given), "--update", str(document)]) == 0
    assert "`llama`" in document.read_text("utf-8")
    assert "old" not in document.read_text("utf-8")


def test_the_file_has_each_module_that_was_walked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlx_lm", reason="mlx_lm is not installed")
    found = {"llama": GOOD, "bitnet": FAILS}
    monkeypatch.setattr(program, "in_process", lambda name, *_: found[name])
    path = tmp_path / "families.jsonl"
    assert main(["--family", "llama", "bitnet", "-o", str(path)]) == 0
    written = read(path, "families")
    assert written["cases"] == [FAILS, GOOD]
    assert written["settings"]["prompt"] == 512
    assert family_tables(written)


def test_a_module_that_there_is_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--family", "no_such_model", "-o", str(tmp_path / "out.jsonl")]) == 2
    assert capsys.readouterr().err.startswith("error: ")  # of the module, or that mlx-lm is not installed
    assert not (tmp_path / "out.jsonl").exists()


@pytest.mark.parametrize(("code", "text", "expected"), [
    (-11, "side: upstream\nside: patched\n", {"failed": "crashes: SIGSEGV", "side": "patched"}),
    (1, "side: upstream\nValueError: no\n", {"failed": "ValueError: no", "side": "upstream"}),
    (2, "error: the device is busy\n  fix: install mlx-lm\n", {"failed": "error: the device is busy", "side": "none"}),
    (3, "", {"failed": "ended with 3", "side": "none"}),
])  # fmt: skip
def test_a_process_that_ends_without_a_result(code: int, text: str, expected: dict[str, str]) -> None:
    assert ended(code, text) == expected
