"""The workflows call what there is, pin what they use, and give away no more than they must."""

from __future__ import annotations

import ast
import itertools
import json
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from benchmarks import workflows as picture
from benchmarks.pipeline import pipeline_table
from ci import __main__ as cli
from ci import matrix
from ci.files import tomllib
from tests.pipeline import runner
from tests.upstream import __main__ as upstream

FOLDER = matrix.REPOSITORY / ".github" / "workflows"
FILES = sorted(FOLDER.glob("*.yml"))
TEXTS = {path.stem: path.read_text("utf-8") for path in FILES}
WORKFLOWS: dict[str, dict[Any, Any]] = {name: yaml.safe_load(text) for name, text in TEXTS.items()}
JOBS = {f"{name}/{job}": table for name, workflow in WORKFLOWS.items() for job, table in workflow["jobs"].items()}
STEPS = [(job, step) for job, table in JOBS.items() for step in table.get("steps", [])]
COMMANDS = [(job, step, line) for job, step in STEPS for line in step.get("run", "").splitlines()]
PROJECT = tomllib.loads((matrix.REPOSITORY / "pyproject.toml").read_text("utf-8"))

GH = ("gh api ", "gh release create ", "gh workflow run ")
STATUS = re.compile(r"always\(\)|cancelled\(\)|failure\(\)")
# The jobs that run after a failure too, or have a step that does, and that nothing of a release hangs on.
REPORTS = {"wheels/summary", "wheels/green", "nightly/fuzz"}


def shown(value: str | dict[str, Any]) -> str:
    """What a test's name says of a parameter."""
    return value if isinstance(value, str) else value.get("uses", "").partition("@")[0] or "run"


def triggers(workflow: str) -> dict[str, Any]:
    on: dict[str, Any] = WORKFLOWS[workflow][True]  # YAML 1.1 reads the key `on` so
    return on


def words(line: str) -> list[str]:
    """A command's words without its redirection. There is nothing else of the shell in a workflow."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    found = list(lexer)
    operators = [word for word in found if set(word) <= set("();<>|&")]
    assert operators in ([], [">>"]), line
    return found[: found.index(">>")] if operators else found


def filled(job: str, step: dict[str, Any], line: str) -> Iterator[list[str]]:
    """The command with each value that its variables can have, as far as the workflow says."""
    variables = sorted(set(re.findall(r"\$(\w+)", line)))
    for values in itertools.product(*(possible(job, step, variable) for variable in variables)):
        known = dict(zip(variables, values, strict=True))
        yield words(re.sub(r"\$(\w+)", lambda match, known=known: known[match[1]], line))  # type: ignore[misc]


def possible(job: str, step: dict[str, Any], variable: str) -> list[str]:
    declared = JOBS[job].get("strategy", {}).get("matrix", {})
    match = re.fullmatch(r"\$\{\{ matrix\.([\w-]+) \}\}", str(step.get("env", {}).get(variable)))
    if match and isinstance(declared, dict):
        return list(declared[match[1]])
    assert variable in step.get("env", {}) or variable.startswith("GITHUB_"), f"{variable} is set nowhere"
    default = re.search(r"\|\| '([^']+)' \}\}", str(step.get("env", {}).get(variable)))
    return [default[1] if default else "7"]  # a run, a tag, a file: whatever it is, it parses


def sessions() -> set[str]:
    tree = ast.parse((matrix.REPOSITORY / "noxfile.py").read_text("utf-8"))
    functions = (node for node in tree.body if isinstance(node, ast.FunctionDef))
    marks = {each.name: [ast.unparse(mark) for mark in each.decorator_list if "nox.session" in ast.unparse(mark)] for each in functions}
    names = {name: re.search(r"name='([\w-]+)'", mark) for name, found in marks.items() for mark in found}
    return {named[1] if named else name for name, named in names.items()}


def parses(line: list[str]) -> bool:
    try:
        cli.make_parser().parse_args(line)
    except SystemExit:
        return False
    return True


@pytest.mark.parametrize(("job", "step", "line"), COMMANDS, ids=shown)
def test_a_run_line_is_one_command_that_exists(job: str, step: dict[str, Any], line: str) -> None:
    for command in filled(job, step, line):
        match command:
            case ["python", "-m", "ci", *arguments]:
                assert parses(arguments), command
            case ["python", "-m", "pip", "install", "--require-hashes", *files] | ["uv", "pip", "install", "--require-hashes", *files]:
                assert files[::2] == ["-r"] * (len(files) // 2)
                assert all((matrix.REPOSITORY / file).is_file() for file in files[1::2])
            case ["python", "-m", "pytest", path, "-k", names]:
                assert all(f"def {name}(" in (matrix.REPOSITORY / path).read_text("utf-8") for name in names.split(" or "))
            case ["python", "-m", "nox", "-s", session, *_]:
                assert session in sessions()
            case ["python", "-m", "tests.upstream", *arguments]:
                upstream.make_parser().parse_args(arguments)
            case ["zizmor", *_] | ["sudo", "apt-get" | "rm", *_] | ["exit", "1"]:
                pass
            case _:
                assert line.startswith(GH), f"neither ours nor known: {line}"


def test_a_wrong_option_is_found(capsys: pytest.CaptureFixture[str]) -> None:
    assert parses(["matrix", "--github"])
    assert not parses(["matrix", "--gitlab"])
    assert not parses(["martix"])
    capsys.readouterr()


@pytest.mark.parametrize(("job", "step", "line"), COMMANDS, ids=shown)
def test_no_value_is_pasted_into_a_command(job: str, step: dict[str, Any], line: str) -> None:
    assert "${{" not in line
    assert "${" not in line, "nor does the shell compute anything"


@pytest.mark.parametrize("workflow", WORKFLOWS)
def test_what_holds_for_every_workflow(workflow: str) -> None:
    table = WORKFLOWS[workflow]
    assert table["permissions"] == {}
    assert set(table["concurrency"]) == {"group", "cancel-in-progress"}
    if workflow == "security":  # Scorecard's server takes results only of a workflow without defaults
        assert "defaults" not in table
    else:
        assert table["defaults"] == {"run": {"shell": "bash"}}, "PowerShell reads variables otherwise"
    assert not {"pull_request_target", "workflow_run", "issue_comment", "issues"} & set(triggers(workflow)), "strangers cause these"


@pytest.mark.parametrize("job", JOBS)
def test_what_holds_for_every_job(job: str) -> None:
    table = JOBS[job]
    assert isinstance(table["permissions"], dict), "each by its name"
    assert "continue-on-error" not in table
    assert job in REPORTS or not STATUS.search(str(table.get("if", ""))), "what failed before it ends the run"
    if "uses" not in table:
        assert table["timeout-minutes"] <= 90


def test_who_may_write() -> None:
    writers = {job: {name for name, access in table["permissions"].items() if access == "write"} for job, table in JOBS.items()}
    signing = {"attestations", "id-token"}
    assert {job: names for job, names in writers.items() if names} == {
        "nightly/deploy": {"id-token", "pages"},
        "nightly/wheels": signing,  # called workflows may have no more than the caller
        "platform/attest": signing,
        "release/page": {"contents"},
        "release/publish": {"id-token"},
        "release/wheels": signing,
        "security/codeql": {"security-events"},
        "security/scorecard": {"id-token", "security-events"},
        "upstream/propose": {"actions", "contents", "pull-requests"},
        "wheels/platform": signing,
    }


def test_what_may_write_runs_next_to_nothing() -> None:
    """Actions by their commits, gh, and twine out of a locked environment; no test, no build, no other tool."""
    writers = {job for job, table in JOBS.items() if "write" in table["permissions"].values() and "uses" not in table}
    lines = {job: [line for name, _, line in COMMANDS if name == job] for job in writers}
    assert {job: ours for job, said in lines.items() if (ours := [line for line in said if not line.startswith(GH)])} == {
        "release/publish": [
            "python -m pip install --require-hashes -r requirements/publish.txt",
            'python -m ci release publish dist --index "$INDEX" --manifest release.json --sha256 "$MANIFEST" --attestations',
        ]
    }


def test_a_pull_request_may_write_nothing() -> None:
    assert "pull_request" in triggers("wheels")
    assert {name for name in WORKFLOWS if "pull_request" in triggers(name)} == {"wheels"}


@pytest.mark.parametrize("workflow", WORKFLOWS)
def test_actions_are_pinned_by_commit(workflow: str) -> None:
    lines = [line.strip() for line in TEXTS[workflow].splitlines() if re.match(r"\s*-?\s*uses:", line)]
    assert lines
    for line in lines:
        if local := re.match(r"uses: \./\.github/workflows/(\w+)\.yml\b", line):
            assert "workflow_call" in triggers(local[1])
        else:
            assert re.match(r"-? ?uses: [\w.-]+/[\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+( |$)", line), line


def test_an_action_has_one_version() -> None:
    found = set(re.findall(r"uses: (\S+)@(\S+ # \S+)", "\n".join(TEXTS.values())))
    assert len(found) == len({action for action, _ in found}), sorted(found)


@pytest.mark.parametrize(("job", "step"), STEPS, ids=shown)
def test_what_holds_for_every_step(job: str, step: dict[str, Any]) -> None:
    options = step.get("with", {})
    action = step.get("uses", "").partition("@")[0]
    assert "continue-on-error" not in step
    assert not STATUS.search(str(step.get("if", ""))) or (job in REPORTS and action == "actions/upload-artifact")
    if action == "actions/checkout":
        assert options["persist-credentials"] is False
    if action == "actions/upload-artifact":
        assert options["retention-days"] == 30
        assert options["if-no-files-found"] == "error"
        assert options["overwrite"] is True
    if action == "actions/cache":
        assert step["if"] == "github.ref_type == 'branch' && !inputs.version", "what is published takes nothing from a cache"


def test_every_artifact_that_is_taken_is_made() -> None:
    def names(action: str, key: str) -> set[str]:
        return {step["with"][key] for _, step in STEPS if step.get("uses", "").startswith(action) and key in step["with"]}

    made = names("actions/upload-artifact", "name")
    assert names("actions/download-artifact", "pattern") == {"wheels-*"}
    platforms = {f"wheels-{name}" for name in matrix.load().platforms}
    assert names("actions/download-artifact", "name") <= made | platforms
    assert "wheels-${{ inputs.platform }}" in made


def needs(job: str) -> set[str]:
    """All jobs of the same workflow that have to succeed before this one."""
    workflow = job.partition("/")[0]
    direct = JOBS[job].get("needs", [])
    found = {f"{workflow}/{name}" for name in ([direct] if isinstance(direct, str) else direct)}
    return found.union(*(needs(each) for each in found))


def test_publishing_waits_for_everything_that_has_to_hold() -> None:
    assert needs("release/publish") == {f"release/{name}" for name in ("preflight", "wheels", "gpu", "check")}
    assert needs("release/wheels") == {"release/preflight"}, "a wrong tag costs a minute"
    assert JOBS["release/wheels"]["uses"] == "./.github/workflows/wheels.yml"
    assert JOBS["release/gpu"]["uses"] == "./.github/workflows/gpu.yml"
    assert {"release/publish", "release/wheels"} <= needs("release/page") & needs("release/verify")
    assert not any(STATUS.search(TEXTS[name]) for name in ("release", "gpu", "platform"))
    assert len(STATUS.findall(TEXTS["nightly"])) == 1, "the fuzzer's, which nothing waits for"
    assert not any("nightly/fuzz" in needs(job) for job in JOBS)
    assert WORKFLOWS["release"]["concurrency"]["cancel-in-progress"] is False


def test_only_a_tag_goes_to_the_index_and_by_the_top_workflow() -> None:
    assert triggers("release")["push"] == {"tags": ["v*"]}
    assert set(triggers("release")) == {"push", "workflow_dispatch"}
    asked = triggers("release")["workflow_dispatch"]["inputs"]["index"]
    assert (asked["default"], asked["options"]) == ("none", ["none", "testpypi"])
    publish = JOBS["release/publish"]
    assert publish["environment"] == "${{ github.event_name == 'push' && 'pypi' || 'testpypi' }}"
    assert publish["if"] == "github.event_name == 'push' || inputs.index == 'testpypi'"
    assert JOBS["release/page"]["if"] == "github.event_name == 'push'", "a rehearsal has no page"
    publishing = [job for job, _, line in COMMANDS if "release publish" in line]
    assert publishing == ["release/publish"], "the index does not accept attestations that were made in a reusable workflow"


@pytest.mark.parametrize(("job", "then"), [("release/publish", "python -m ci release publish"), ("release/page", "gh release create")])
def test_a_tag_still_leads_to_what_was_built(job: str, then: str) -> None:
    """People are waited for before a release goes out, and a tag can be moved meanwhile: asked is the commit of it, right before."""
    steps = JOBS[job]["steps"]
    (number,) = (number for number, step in enumerate(steps) if step.get("run", "").startswith(then))
    step = steps[number - 1]
    gh, api, path, option, program = words(step["run"])
    assert (gh, api, path, option) == ("gh", "api", "repos/{owner}/{repo}/commits/tags/$GITHUB_REF_NAME", "--jq")
    assert step["env"] == {"GH_REPO": "${{ github.repository }}", "GH_TOKEN": "${{ github.token }}"}
    assert step.get("if") == (None if JOBS[job].get("if") == "github.event_name == 'push'" else "github.event_name == 'push'")
    if jq := shutil.which("jq"):
        for commit, code in (("aaa", 0), ("bbb", 5)):
            environment = {**os.environ, "GITHUB_SHA": "aaa"}
            done = subprocess.run(
                [jq, program], input=f'{{"sha": "{commit}"}}', env=environment, text=True, check=False, capture_output=True
            )
            assert done.returncode == code, done.stderr


def test_the_notes_are_shown_and_not_published() -> None:
    (line,) = (line for job, _, line in COMMANDS if job == "release/page" and "release create" in line)
    assert [word for word in words(line) if "page/" in word] == ["page/notes.md", "page/files/*"]
    assert "--notes-file page/notes.md" in line


def test_only_what_was_merged_is_signed() -> None:
    assert JOBS["platform/attest"]["if"] == "github.ref_type == 'tag' || github.ref == 'refs/heads/main'"


def test_what_is_handed_on_was_written_before_a_wheels_code_ran() -> None:
    steps = JOBS["release/check"]["steps"]
    (last,) = (number for number, step in enumerate(steps) if "pytest" in step.get("run", ""))
    assert max(number for number, step in enumerate(steps) if "upload" in step.get("uses", "") or "id" in step) < last
    assert JOBS["release/check"]["outputs"]["manifest"] == "${{ steps.check.outputs.manifest }}"
    assert JOBS["release/publish"]["steps"][-1]["env"]["MANIFEST"] == "${{ needs.check.outputs.manifest }}"


def test_what_is_published_is_what_was_checked() -> None:
    lines = {job for job, _, line in COMMANDS if "--manifest" in line}
    assert lines == {"release/check", "release/publish", "release/verify"}
    assert all("--manifest release.json" in line for _, _, line in COMMANDS if "--manifest" in line)


def test_a_runner_of_ours_gets_its_python_from_uv() -> None:
    """setup-python has interpreters for GitHub's own systems alone; `ci try` asks uv for those of its rows."""
    for job in ("gpu/try", "gpu/upstream-tests"):
        steps = JOBS[job]["steps"]
        assert not [step for step in steps if "setup-python" in step.get("uses", "")]
        (options,) = (step["with"] for step in steps if step.get("uses", "").startswith("astral-sh/setup-uv@"))
        assert options == {
            "version": "latest-known",  # with a checksum
            "python-version": "3.13",
            "activate-environment": True,
            "no-project": True,
            "enable-cache": False,
        }
        assert not [line for name, _, line in COMMANDS if name == job and line.startswith("python -m pip ")]


def test_a_merge_queue_is_waited_for() -> None:
    """`green`, which is required, has to say something of what a queue makes too; it is looked at as a pull request is."""
    assert "merge_group" in triggers("wheels")
    (base,) = (step["env"]["BASE"] for job, step in STEPS if job == "wheels/plan" and "BASE" in step.get("env", {}))
    assert base == "${{ github.event.pull_request.base.sha || github.event.merge_group.base_sha }}"
    assert {name for name in WORKFLOWS if "merge_group" in triggers(name)} == {"wheels"}


def test_a_fork_is_not_scanned() -> None:
    """It would fail there: it may not publish results, and shows none unless its owner sets it up to."""
    forks = {job for job, table in JOBS.items() if table.get("if") == "${{ !github.event.repository.fork }}"}
    assert forks == {job for job, table in JOBS.items() if "security-events" in table["permissions"]}


def test_the_pins_are_looked_up() -> None:
    assert "python -m ci pins" in [line for job, _, line in COMMANDS if job == "security/pins"]
    assert JOBS["security/pins"]["permissions"] == {"contents": "read"}


def test_the_documentation_is_built_into_the_finished_index() -> None:
    """`ci nightly` refuses a folder that exists, so the documents come after it."""
    lines = [line for job, _, line in COMMANDS if job == "nightly/site"]
    index = next(number for number, line in enumerate(lines) if line.startswith("python -m ci nightly dist -o site --docs "))
    assert lines[index + 1 :] == ["python -m nox -s docs -- site/docs"]


def test_no_escape_hides_a_test() -> None:
    lines = {job: [line for each, _, line in COMMANDS if each == job] for job in ("nightly/slow", "nightly/fuzz")}
    assert [job for job, each in lines.items() if any("fuzz-audit" in line for line in each)] == ["nightly/fuzz"]
    last = JOBS["nightly/fuzz"]["steps"][-1]
    assert (last["if"], last["with"]["path"]) == ("failure()", "escapes"), "what escaped is kept"


def test_a_played_job_keeps_what_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`nox -s pipeline` runs after a failure what asks for one, and nothing else."""
    monkeypatch.setattr(runner.Job, "_step", lambda _, step: "failed: 1" if step["run"] == "test" else "")
    for first, said in (("test", ["test", "keep"]), ("pass", ["pass", "then", "more"])):
        steps = [{"run": first}, {"run": "then"}, {"run": "keep", "if": "failure()"}, {"run": "more", "if": "github.ref"}]
        machine: Any = SimpleNamespace(folder=tmp_path / first, report=[])
        result = runner.Job(machine, "a/b", "b", {"steps": steps}, {"github": {"ref": "x"}}, "").run()
        assert [step["step"] for step in machine.report[0]["steps"]] == said
        assert (result["result"], machine.report[0]["failed"]) == (("failure", "test") if first == "test" else ("success", ""))


def test_no_platform_hides_another() -> None:
    assert JOBS["wheels/platform"]["uses"] == "./.github/workflows/platform.yml"
    assert JOBS["wheels/platform"]["strategy"]["fail-fast"] is False
    for job in ("attest", "try", "tests"):
        assert needs(f"platform/{job}") == {"platform/build"}


def test_one_check_stands_for_all() -> None:
    assert needs("wheels/green") == {f"wheels/{name}" for name in ("lint", "plan", "device", "platform", "summary")}
    (step,) = JOBS["wheels/green"]["steps"]
    assert step["run"] == "exit 1"
    assert step["if"] == "contains(needs.*.result, 'failure') || contains(needs.*.result, 'cancelled')"


def test_no_pull_request_reaches_our_own_machines() -> None:
    hosted = r"(ubuntu|windows)-[\w.-]+"
    own = {job: table["runs-on"] for job, table in JOBS.items() if "uses" not in table and not re.fullmatch(hosted, table["runs-on"])}
    called = "${{ inputs.runner }}"
    assert own == {
        "platform/build": called,
        "platform/try": called,
        "platform/tests": called,
        "release/verify": "${{ matrix.runner }}",
        "gpu/try": "${{ matrix.label }}",
        "gpu/upstream-tests": "${{ matrix.label }}",
    }
    assert JOBS["wheels/platform"]["with"]["runner"] == "${{ matrix.runner }}"
    assert [job for job, table in JOBS.items() if table.get("uses", "").endswith("platform.yml")] == ["wheels/platform"]
    assert all(re.fullmatch(hosted, platform.runner) for platform in matrix.load().platforms.values())

    assert set(triggers("gpu")) == {"workflow_call", "workflow_dispatch"}
    assert [job for job, table in JOBS.items() if table.get("uses", "").endswith("gpu.yml")] == ["nightly/gpu", "release/gpu"]
    assert needs("gpu/try") == needs("gpu/upstream-tests") == {"gpu/origin"}
    assert 'python -m ci origin "$RUN_ID"' in [line for job, _, line in COMMANDS if job == "gpu/origin"]
    taken = {step["with"]["run-id"] for job, step in STEPS if job.startswith("gpu/") and "run-id" in step.get("with", {})}
    asked = {step["env"]["RUN_ID"] for job, step in STEPS if job == "gpu/origin" and "RUN_ID" in step.get("env", {})}
    assert taken == asked, "the run that is judged is the run that is taken"


def test_the_picture_is_of_these_workflows() -> None:
    assert picture.PICTURE.read_text("utf-8") == picture.drawing(), "run: python -m benchmarks.workflows"


def test_the_times_are_those_of_the_last_run() -> None:
    document = matrix.REPOSITORY / "docs" / "factory" / "releasing.md"
    report = json.loads((matrix.REPOSITORY / "docs" / "factory" / "pipeline.json").read_text("utf-8"))
    assert pipeline_table(report) in document.read_text("utf-8"), "run: python -m benchmarks pipeline docs/factory/pipeline.json --update …"
    assert not [job["job"] for job in report["jobs"] if job["failed"]]
    played = ("release", "wheels", "platform", "gpu")
    jobs = {job for job, table in JOBS.items() if job.split("/")[0] in played and "uses" not in table}
    assert {job["key"] for job in report["jobs"]} == jobs - {"gpu/upstream-tests"}, "which is nightly's"
