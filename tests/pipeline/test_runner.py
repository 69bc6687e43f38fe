"""The runner of workflows does what GitHub documents, as far as the workflows use it."""

from __future__ import annotations

import json
import re
import subprocess
from typing import TYPE_CHECKING, Any

import pytest

from . import expressions, runner

if TYPE_CHECKING:
    from pathlib import Path

CONTEXTS: dict[str, Any] = {
    "github": {"event_name": "push", "ref_type": "tag"},
    "inputs": {"index": "none", "run-id": ""},
    "needs": {"a": {"result": "success"}, "b": {"result": "failure"}},
    "matrix": {"rows": [{"name": "x"}]},
}


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("github.event_name == 'push' && 'pypi' || inputs.index", "pypi"),
        ("github.event_name == 'PUSH'", True),
        ("inputs.run-id || github.nothing || 'it''s'", "it's"),
        ("!inputs.run-id && github.ref_type != 'branch'", True),
        ("contains(needs.*.result, 'failure')", True),
        ("contains(needs.*.result, 'cancelled') || contains('abc', 'B')", True),
        ("toJSON(matrix.rows)", '[{"name": "x"}]'),
        ("fromJSON('[1, 2]')[1]", 2),
        ("(false || null) == ''", True),
        ("matrix.rows[0].name", "x"),
    ],
)
def test_expressions(expression: str, value: object) -> None:
    assert expressions.evaluate(expression, CONTEXTS, {}) == value


@pytest.mark.parametrize("expression", ["a +", "github.event_name ==", "'open", "1 2", "f(", "${{ x }}"])
def test_what_is_no_expression_is_refused(expression: str) -> None:
    with pytest.raises((ValueError, KeyError, IndexError)):
        expressions.evaluate(expression, CONTEXTS, {})


def test_a_whole_expression_keeps_its_type() -> None:
    assert expressions.fill("${{ matrix.rows }}", CONTEXTS, {}) == [{"name": "x"}]
    assert expressions.fill("<${{ true }} ${{ github.ref_type }}>", CONTEXTS, {}) == "<true tag>"


WORKFLOW = """
on:
  push:
  workflow_call:
    inputs: {word: {default: none}}
    outputs: {said: {value: "${{ jobs.second.outputs.said }}"}}
jobs:
  first:
    outputs: {list: "${{ steps.make.outputs.list }}"}
    steps:
      - run: echo 'list={"include":[{"n":1},{"n":2}]}' >> "$GITHUB_OUTPUT"
        id: make
      - run: exit 1
        if: inputs.word != 'hello' && github.ref_type == 'tag'
  second:
    needs: first
    strategy: {matrix: "${{ fromJSON(needs.first.outputs.list) }}"}
    outputs: {said: "${{ steps.say.outputs.said }}"}
    steps:
      - run: echo "said=$N $WORD" >> "$GITHUB_OUTPUT"
        id: say
        env: {N: "${{ matrix.n }}", WORD: "${{ inputs.word }}"}
  never:
    needs: first
    if: github.event_name == 'pull_request'
    steps: [{run: exit 1}]
  always:
    needs: [second, never]
    if: always()
    steps: [{run: exit 1, if: "contains(needs.*.result, 'failure')"}]
"""
CALLER = """
on: {workflow_dispatch: {inputs: {word: {default: hello}}}}
jobs:
  call:
    uses: ./.github/workflows/called.yml
    with: {word: "${{ inputs.word }}"}
"""


def machine(tmp_path: Path) -> runner.Machine:
    folder = tmp_path / "repository" / ".github" / "workflows"
    folder.mkdir(parents=True)
    (folder / "called.yml").write_text(WORKFLOW)
    (folder / "caller.yml").write_text(CALLER)
    git = ["git", "-C", str(tmp_path / "repository"), "-c", "user.name=x", "-c", "user.email=x@localhost"]
    for words in (["init", "-q", "-b", "main"], ["add", "."], ["commit", "-q", "-m", "x"], ["tag", "v1"]):
        subprocess.run([*git, *words], check=True, capture_output=True)
    return runner.Machine(tmp_path / "repository", tmp_path, {})


def test_matrices_outputs_conditions_and_calls(tmp_path: Path) -> None:
    started = machine(tmp_path)
    done = started.run("caller", "workflow_dispatch", ref="refs/heads/main")
    assert done == {"call": {"result": "success", "outputs": {"said": "2 hello"}}}
    assert [each["job"] for each in started.report] == [f"caller / call / {name}" for name in ("first", "second", "second", "always")]
    runner.save(started, tmp_path / "report.json", "0123456")
    report = json.loads((tmp_path / "report.json").read_text("utf-8"))
    assert (report["commit"], len(report["date"]), len(report["jobs"])) == ("0123456", len("2026-11-22"), 4)


def test_a_failure_skips_what_waits_for_it(tmp_path: Path) -> None:
    done = machine(tmp_path).run("called", "push", ref="refs/tags/v1")
    assert {name: each["result"] for name, each in done.items()} == {
        "first": "failure",
        "second": "skipped",
        "never": "skipped",
        "always": "success",
    }


def test_a_step_sees_nothing_of_the_callers_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLX_CUDA_DEVICE_STORE", "elsewhere")
    started = machine(tmp_path)
    path = tmp_path / "repository" / ".github" / "workflows" / "called.yml"
    path.write_text("on: {push: null}\njobs: {one: {steps: [{run: env | sort}]}}\n")
    started.run("called", "push", ref="refs/heads/main")
    log = next(tmp_path.glob("*.log")).read_text("utf-8")
    assert "MLX_CUDA" not in log
    assert "GITHUB_REF_NAME=main\n" in log
    assert re.search(r"^GITHUB_SHA=[0-9a-f]{40}$", log, re.MULTILINE)
    assert subprocess.run(["grep", "-c", "^PATH=", next(tmp_path.glob("*.log"))], check=True, capture_output=True).stdout == b"1\n"
