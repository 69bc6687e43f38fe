"""The workflows call what there is, pin what they use, and give away no more than they must."""

from __future__ import annotations

import ast
import itertools
import json
import re
import shlex
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from ci import __main__ as cli
from ci import matrix
from ci.files import tomllib
from ci.matrix.jobs import jobs

if TYPE_CHECKING:
    from collections.abc import Iterator

FOLDER = matrix.REPOSITORY / ".github" / "workflows"
FILES = sorted(FOLDER.glob("*.yml"))
TEXTS = {path.stem: path.read_text("utf-8") for path in FILES}
WORKFLOWS: dict[str, dict[Any, Any]] = {name: yaml.safe_load(text) for name, text in TEXTS.items()}
JOBS = {f"{name}/{job}": table for name, workflow in WORKFLOWS.items() for job, table in workflow["jobs"].items()}
STEPS = [(job, step) for job, table in JOBS.items() for step in table.get("steps", [])]
COMMANDS = [(job, step, line) for job, step in STEPS for line in step.get("run", "").splitlines()]
PROJECT = tomllib.loads((matrix.REPOSITORY / "pyproject.toml").read_text("utf-8"))

GH = ("gh release create ", "gh workflow run ")


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
    return ["7"]  # a run, a tag, a file: whatever it is, it parses


def sessions() -> set[str]:
    tree = ast.parse((matrix.REPOSITORY / "noxfile.py").read_text("utf-8"))
    functions = (node for node in tree.body if isinstance(node, ast.FunctionDef))
    return {each.name for each in functions if any(ast.unparse(mark).startswith("nox.session") for mark in each.decorator_list)}


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
            case ["python", "-m", "pip", "install", *groups]:
                assert groups[::2] == ["--group"] * (len(groups) // 2)
                assert set(groups[1::2]) <= set(PROJECT["dependency-groups"])
            case ["python", "-m", "cibuildwheel", "--output-dir", "wheelhouse"]:
                assert "cibuildwheel" in PROJECT["dependency-groups"]
            case ["python", "-m", "pytest", path, "-k", name]:
                assert f"def {name}(" in (matrix.REPOSITORY / path).read_text("utf-8")
            case ["pipx", "run", tool, "-s", session, *_]:
                assert re.fullmatch(r"nox==[\d.]+", tool)
                assert session in sessions()
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
    assert table["defaults"] == {"run": {"shell": "bash"}}, "PowerShell reads variables otherwise"
    assert not {"pull_request_target", "workflow_run", "issue_comment", "issues"} & set(triggers(workflow)), "strangers cause these"


@pytest.mark.parametrize("job", JOBS)
def test_what_holds_for_every_job(job: str) -> None:
    table = JOBS[job]
    assert isinstance(table["permissions"], dict), "each by its name"
    assert "continue-on-error" not in table
    assert "if" not in table
    if "uses" not in table:
        assert table["timeout-minutes"] <= 90


def test_who_may_write() -> None:
    writers = {job: {name for name, access in table["permissions"].items() if access == "write"} for job, table in JOBS.items()}
    assert {job: names for job, names in writers.items() if names} == {
        "release/publish": {"attestations", "id-token"},
        "release/page": {"contents"},
        "upstream/bump": {"actions", "contents", "pull-requests"},
    }


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
    assert not re.search(r"always\(\)|cancelled\(\)|failure\(\)", str(step.get("if", "")))
    if action == "actions/checkout":
        assert options["persist-credentials"] is False
    if action == "actions/upload-artifact":
        assert options["retention-days"] == 30
        assert options["if-no-files-found"] == "error"
        assert options["overwrite"] is True
    if action == "actions/cache":
        assert step["if"] == "github.ref_type == 'branch'", "a release takes nothing from a cache"


def test_every_artifact_that_is_taken_is_made() -> None:
    def names(action: str, key: str) -> set[str]:
        return {step["with"][key] for _, step in STEPS if step.get("uses", "").startswith(action) and key in step["with"]}

    made = names("actions/upload-artifact", "name")
    assert names("actions/download-artifact", "pattern") == {"wheels-*"}
    platforms = {f"wheels-{name}" for name in matrix.load().platforms}
    assert names("actions/download-artifact", "name") <= made | platforms
    assert "wheels-${{ matrix.platform }}" in made


def needs(job: str) -> set[str]:
    """All jobs of the same workflow that have to succeed before this one."""
    workflow = job.partition("/")[0]
    direct = JOBS[job].get("needs", [])
    found = {f"{workflow}/{name}" for name in ([direct] if isinstance(direct, str) else direct)}
    return found.union(*(needs(each) for each in found))


def test_publishing_waits_for_everything_that_has_to_hold() -> None:
    assert needs("release/publish") == {f"release/{name}" for name in ("wheels", "gpu", "check")}
    assert JOBS["release/wheels"]["uses"] == "./.github/workflows/wheels.yml"
    assert JOBS["release/gpu"]["uses"] == "./.github/workflows/gpu.yml"
    assert {"release/publish", "release/wheels"} <= needs("release/page") & needs("release/verify")
    assert not re.search(r"always\(\)|cancelled\(\)|failure\(\)", TEXTS["release"] + TEXTS["wheels"] + TEXTS["gpu"])
    assert WORKFLOWS["release"]["concurrency"]["cancel-in-progress"] is False


def test_only_a_tag_is_released_and_by_the_top_workflow() -> None:
    assert triggers("release") == {"push": {"tags": ["v*"]}}
    assert JOBS["release/publish"]["environment"] == "pypi"
    publishing = [job for job, _, line in COMMANDS if "release publish" in line]
    assert publishing == ["release/publish"], "the index does not accept attestations that were made in a reusable workflow"


def test_what_is_published_is_what_was_checked() -> None:
    lines = {job: line for job, _, line in COMMANDS if "--manifest" in line}
    assert set(lines) == {"release/check", "release/publish", "release/verify"}
    assert all("--manifest release.json" in line for line in lines.values())


def test_no_pull_request_reaches_our_own_machines() -> None:
    hosted = r"(ubuntu|windows)-[\w.-]+"
    own = {job for job, table in JOBS.items() if "uses" not in table and not re.fullmatch(hosted, table["runs-on"])}
    assert own == {"wheels/build", "wheels/try", "gpu/try", "release/verify"}
    for job in own - {"gpu/try"}:
        assert JOBS[job]["runs-on"] == "${{ matrix.runner }}"
        assert "outputs.matrix) }}" in JOBS[job]["strategy"]["matrix"]
    assert all(re.fullmatch(hosted, platform.runner) for platform in matrix.load().platforms.values())

    assert set(triggers("gpu")) == {"workflow_call", "workflow_dispatch"}
    assert [job for job, table in JOBS.items() if table.get("uses", "").endswith("gpu.yml")] == ["release/gpu"]
    assert needs("gpu/try") == {"gpu/origin"}
    assert [line for job, _, line in COMMANDS if job == "gpu/origin"][-1] == 'python -m ci origin "$RUN_ID"'
    taken = [step["with"]["run-id"] for job, step in STEPS if job == "gpu/try" and "run-id" in step.get("with", {})]
    asked = [step["env"]["RUN_ID"] for job, step in STEPS if job == "gpu/origin" and "env" in step]
    assert taken == asked, "the run that is judged is the run that is taken"


def test_every_extra_with_a_gpu_is_tried() -> None:
    assert JOBS["gpu/try"]["strategy"]["matrix"]["extra"] == [cuda.extra for cuda in matrix.load().cuda.values()]
    line = next(line for job, _, line in COMMANDS if job == "gpu/try" and "ci try" in line)
    assert "--require-gpu" in line


@pytest.mark.parametrize("job", ["wheels/try", "release/verify"])
def test_oldest_and_newest_python(job: str) -> None:
    line = next(line for name, _, line in COMMANDS if name == job and "--python" in line)
    asked = re.findall(r"--python (\S+)", line)
    assert f">={asked[0]}" == PROJECT["project"]["requires-python"]
    newest = max(PROJECT["tool"]["cibuildwheel"]["build"].split(), key=lambda identifier: int(identifier[3:5]))
    assert asked[1] == newest.removeprefix("cp").removesuffix("-*").replace("3", "3.", 1)
    # Each wheel is tried: the free-threaded one needs an interpreter of its own.
    assert job != "wheels/try" or asked[2:] == [f"{asked[1]}t"]
    installed = next(step["with"]["python-version"] for name, step in STEPS if name == job and "setup-python" in step.get("uses", ""))
    assert installed.split()[: len(asked)] == asked


def test_the_job_matrix(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["matrix", "--github"]) == 0
    name, _, value = capsys.readouterr().out.strip().partition("=")
    assert name == "matrix"
    assert json.loads(value) == {"include": jobs()}
    assert cli.main(["matrix", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == jobs()
    assert [job["platform"] for job in jobs()] == list(matrix.load().platforms)
    assert all(re.search(rf"matrix\.({'|'.join(jobs()[0])}) ", text) for text in (TEXTS["wheels"], TEXTS["release"]))
