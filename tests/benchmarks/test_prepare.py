"""What is compiled beforehand: which cases stand for the others, and what a process that ends costs."""

from __future__ import annotations

import os
from collections import Counter
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from benchmarks import prepare
from benchmarks.__main__ import main
from benchmarks.cases import GROUPS
from benchmarks.prepare import CACHE, Job, hand_over, jobs_of, prepare_all


def all_jobs() -> list[Job]:
    return jobs_of(GROUPS, lambda group: GROUPS[group](quick=False))


def test_one_case_stands_for_those_with_the_same_kernels() -> None:
    jobs = all_jobs()
    assert len(set(jobs)) == len(jobs) < sum(len(make(quick=False)) for make in GROUPS.values())
    assert {job.group for job in jobs} == set(GROUPS)
    names = [job.name for job in jobs if job.group == "quantized"]
    modes = Counter(name.partition(",")[0] for name in names)
    assert len(modes) == 9
    assert set(modes.values()) == {3}  # up to 7 rows, 16 and 64
    assert not any(" 8192 x" in name for name in names)
    long = [job for job in jobs if job.group == "attention" and "L=32768" in job.name]
    assert not long  # they would not fit beside each other


def test_what_takes_long_begins_first() -> None:
    slow = [job.slow for job in all_jobs()]
    assert slow == sorted(slow, reverse=True)
    assert any(slow)
    assert not all(slow)


def compile_or_end(connection: Connection, own: str, quick: bool, torch: bool) -> None:
    """Leaves a file for each case, fails at the second, and ends at the third."""
    while (job := connection.recv()) is not None:
        _, index = job
        Path(own, f"{index}.ptx").write_text(str(os.getpid()), "utf-8")
        if index == 2:
            os._exit(3)
        connection.send((index != 1, f"case {index}"))


@pytest.mark.parametrize("processes", [1, 3])
def test_a_process_that_ends_costs_its_case_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, processes: int) -> None:
    shared = tmp_path / "cache" / "ptx"
    monkeypatch.setenv(CACHE, str(shared))
    jobs = [Job("swiglu", index, str(index), slow=False) for index in range(5)]
    said: list[str] = []
    failed = prepare_all(jobs, processes, said.append, quick=True, torch=False, work=compile_or_end)
    assert sorted(job.index for job in failed) == [1, 2]
    assert sorted(path.name for path in shared.iterdir()) == [f"{index}.ptx" for index in range(5)]
    assert [path.name for path in shared.parent.iterdir()] == ["ptx"]  # the folders of the processes are gone
    assert len(said) == 5
    assert [text.partition(":")[0] for text in said] == [f"{number} of 5" for number in range(1, 6)]
    assert any("FAILED: its process has ended" in text for text in said)


def test_a_process_that_takes_too_long_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE, str(tmp_path / "ptx"))
    monkeypatch.setattr(prepare, "SECONDS", 0.0)
    said: list[str] = []
    assert len(prepare_all([Job("swiglu", 0, "0", slow=False)], 1, said.append, quick=True, torch=False, work=compile_or_end)) == 1
    assert "took too long" in said[0]


def test_files_are_handed_over_once_and_whole(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    (source / "long").mkdir(parents=True)
    for name in ("a.ptx", "a.txt", "long/name.ptx"):
        (source / name).write_text(name, "utf-8")
    target.mkdir()
    (target / "a.txt").write_text("theirs", "utf-8")
    assert hand_over(source, target) == 2
    assert hand_over(source, target) == 0
    assert (target / "long" / "name.ptx").read_text("utf-8") == "long/name.ptx"
    assert (target / "a.txt").read_text("utf-8") == "theirs"


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv(CACHE, str(tmp_path / "ptx"))
    assert main(["prepare", "--quick", "--no-torch", "--case", "swiglu", "--case", "experts", "--processes", "2"]) == 0
    said = capsys.readouterr().err
    assert "4 of 4: " in said
    assert "4 cases prepared, 0 failed" in said
