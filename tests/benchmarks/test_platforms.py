"""docs/results/platforms.md is what docs/results/platforms.toml says, and that fits the matrix, the results and the history."""

from __future__ import annotations

import shutil
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from benchmarks.__main__ import RESULTS, main
from benchmarks.platforms import load, platform_tables
from benchmarks.result_file import read
from benchmarks.table import fill_blocks
from ci import matrix
from ci.matrix import Row

DOCUMENT = Path(__file__).parents[2] / "docs" / "results" / "platforms.md"
INSTALL = DOCUMENT.parents[1] / "start" / "install.md"
DATA = load()
APART = ("linear-attention", "quantized-cache")  # pages with cases and models of their own


def test_the_page_on_installing_is_made_from_the_data() -> None:
    text, tables = INSTALL.read_text("utf-8"), platform_tables(DATA)
    assert all(f"<!-- results: {name} -->" in text for name in ("support", "drivers"))
    assert fill_blocks(text, tables) == text, "run: python -m benchmarks platforms --update docs/start/install.md"
    without = [run for run in DATA["runs"] if run["what"] != "tests"]
    assert ("tested" in tables["support"], "tested" in platform_tables(DATA | {"runs": without})["support"]) == (True, False)


def test_the_tables_can_be_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["platforms"]) == 0
    assert capsys.readouterr().out == "\n\n".join(platform_tables(DATA).values()) + "\n"


def test_the_platforms_and_the_device_code_are_those_of_the_matrix() -> None:
    declared = matrix.load()
    for stage in DATA["stages"]:
        assert {"what", *declared.platforms} == set(stage)
    names = [*(f"sm_{name}" for name in declared.device.sass), *(f"compute_{name}" for name in declared.device.ptx)]
    assert [each["name"] for each in DATA["code"]] == names
    for run in DATA["runs"]:
        assert set(run["code"]) <= set(names)


def test_the_rows_are_those_of_the_matrix() -> None:
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in platform_tables(DATA)["rows"].splitlines()[2:]]
    found = [
        Row(platform, python, extra, gpu, driver.partition(" ")[0])
        for platform, extra, gpu, driver, pythons, _ in lines
        for python in pythons.split(", ")
    ]
    assert found == list(matrix.load().tests)
    declared = {(row.platform, row.extra, row.gpu) for row in found}
    assert {(each["platform"], each["extra"], each.get("gpu", "")) for each in DATA["tried"]} <= declared
    nothing = platform_tables(DATA | {"tried": []})["rows"].splitlines()[2:]
    assert all(line.endswith("| never |") for line in nothing)


def test_what_was_measured_is_in_the_results() -> None:
    runs = {(run["commit"], run["number"].split()[0]) for run in DATA["runs"] if run["what"] in {"benchmark", "models"}}
    found = set()
    for folder in (".", "models", "decoding", "several-gpus", *(f"{page}{of}" for page in APART for of in ("", "/models"))):
        for path in RESULTS.glob(f"{folder}/*.jsonl"):
            results = read(path)
            commits = Counter((each.get("commit") or results["provenance"]["commit"])[:7] for each in results["cases"])
            found |= {(commit, str(count)) for commit, count in commits.items()}
    assert runs == found


def test_code_that_no_test_ran_is_said_to_have_run_nowhere() -> None:
    data = DATA | {"runs": [run for run in DATA["runs"] if run["what"] != "tests"]}
    for row in platform_tables(data)["code"].splitlines()[2:]:
        assert row.endswith("| never |")


def test_commits_are_in_the_history() -> None:
    def git(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["git", "-C", str(DOCUMENT.parent), *words], check=False, capture_output=True, text=True)

    if not shutil.which("git") or git("rev-parse", "--is-shallow-repository").stdout.strip() != "false":
        pytest.skip("no git, or not the whole history")
    timed = {each["commit"] for each in (DATA["wheel"], *DATA["times"]) if "commit" in each}
    for commit in timed | {commit for run in DATA["runs"] for commit in run["commit"].split(" + ")}:
        assert git("cat-file", "-e", f"{commit}^{{commit}}").returncode == 0, commit
