"""Files of results: a line for each case, four digits, a clear error for any other file; and that the committed ones stay small."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.__main__ import RESULTS, main
from benchmarks.result_file import read, write

COMMITTED = sorted(path for path in RESULTS.rglob("*") if path.is_file())
PRINTED = ("check", "tune")  # folders of what programs have printed, as documents show it


def test_what_is_written_is_read_back_with_four_digits(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "results.jsonl"
    case = {"name": "a\nb\u2028c", "seconds": [1.23456e-5, (98765.4, None)], "count": 123456, "met": True}
    write(path, {"kind": "models", "provenance": {"commit": "abc"}, "cases": [case, {}]})
    assert len(path.read_text("utf-8").splitlines()) == 3
    results = read(path, "models")
    assert results == {
        "kind": "models",
        "provenance": {"commit": "abc"},
        "cases": [{**case, "seconds": [1.235e-5, [98770.0, None]]}, {}],
    }
    write(path.with_name("again.jsonl"), results)
    assert path.with_name("again.jsonl").read_bytes() == path.read_bytes()
    assert len(list(path.parent.iterdir())) == 2, "nothing temporary is left"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "is no file of results: the first line says their kind, and each is JSON\n  fix: measure again"),
        ('{\n "schema": 1,\n "cases": []\n}\n', "is no file of results"),
        ('{"cases": []}\n', "is no file of results"),
        ('{"kind": "models"}\n{"model": \n', "is no file of results"),
        ("[1]\n", "is no file of results"),
        ('{"kind": "serving"}\n', "has results of the kind serving, not models\n  fix: give another file"),
    ],
)
def test_another_file_is_refused(text: str, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "results.jsonl"
    path.write_text(text, "utf-8")
    assert main(["models", str(path)]) == 2
    assert f"error: {path} {reason}" in capsys.readouterr().err


def test_the_committed_files_are_small() -> None:
    assert sum(path.read_bytes().count(b"\n") for path in COMMITTED) <= 3000
    assert sum(path.stat().st_size for path in COMMITTED) <= 1_000_000


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.relative_to(RESULTS).as_posix())
def test_each_committed_file_is_as_it_is_written(path: Path, tmp_path: Path) -> None:
    if path.parent.name in PRINTED:
        return
    assert path.suffix == ".jsonl"
    write(tmp_path / path.name, read(path))
    assert (tmp_path / path.name).read_bytes() == path.read_bytes()
