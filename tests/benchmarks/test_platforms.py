"""docs/platforms.md is what docs/platforms.toml says, and that fits the matrix, the results and the history."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from benchmarks.__main__ import RESULTS, main
from benchmarks.platforms import load, platform_tables
from ci import matrix
from ci.matrix import Row

DOCUMENT = Path(__file__).parents[2] / "docs" / "platforms.md"
DATA = load()


def test_the_document_is_made_from_the_data(tmp_path: Path) -> None:
    text = DOCUMENT.read_text("utf-8")
    copy = tmp_path / "platforms.md"
    copy.write_text(text.replace("| tests | all |", "| tests | none |"), "utf-8")
    assert copy.read_text("utf-8") != text
    assert main(["platforms", "--update", str(copy)]) == 0
    assert copy.read_text("utf-8") == text, "run: python -m benchmarks platforms --update docs/platforms.md"


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
    places = {".": "cases", "models": "models", "decoding": "models", "several-gpus": "models"}
    for folder in ("linear-attention", "quantized-cache"):
        places |= {folder: "cases", f"{folder}/models": "models"}
    for folder, kind in places.items():
        for path in RESULTS.glob(f"{folder}/*.json"):
            results = json.loads(path.read_text("utf-8"))
            commits = Counter((each.get("commit") or results["provenance"]["commit"])[:7] for each in results[kind])
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
    for commit in {commit for run in DATA["runs"] for commit in run["commit"].split(" + ")}:
        assert git("cat-file", "-e", f"{commit}^{{commit}}").returncode == 0, commit
