"""GitHub's own parser reads our workflows, as `nox -s lint` has it, and says what is wrong with others."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from ci import matrix

TOOL = matrix.REPOSITORY / ".github" / "workflow-parser"
pytestmark = [pytest.mark.slow, pytest.mark.nightly]  # by day `nox -s lint` reads ours


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not shutil.which("npm"):
        pytest.skip("npm is not installed")
    folder = shutil.copytree(TOOL, tmp_path_factory.mktemp("npm") / "parser")
    bundle = ["--bundle", "--platform=node", "--outfile=checked.cjs", "--log-level=warning"]
    for command in (["npm", "ci", "--silent", "--ignore-scripts"], ["node_modules/.bin/esbuild", "check.mjs", *bundle]):
        subprocess.run(command, cwd=folder, check=True, capture_output=True)
    return Path(folder, "checked.cjs")


def check(program: Path, repository: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["node", str(program), str(repository)], check=False, capture_output=True, encoding="utf-8")


def test_ours_are_read(program: Path) -> None:
    """With what they call."""
    done = check(program, matrix.REPOSITORY)
    assert done.returncode == 0, done.stdout + done.stderr
    said = dict(line.split(": ", 1) for line in done.stdout.splitlines())
    assert said.keys() == {path.name for path in (matrix.REPOSITORY / ".github" / "workflows").glob("*.yml")}
    assert "wheels(plan lint device platform summary green)" in said["release.yml"]


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("timeout-minutes: 15", "timeout-minuts: 15", "Unexpected value 'timeout-minuts'"),
        ("contents: read", "contents: reed", "Unexpected value 'reed'"),
        ("runs-on: ubuntu-24.04", "", "Required property is missing: runs-on"),
        ("needs: [wheels, gpu, check]", "needs: [wheels, gpu, cheque]", "depends on unknown job 'cheque'"),
        ("inputs.index", "secrets2.index", "Unrecognized named-value: 'secrets2'"),
        ("github.event_name == 'push'", "github.event_name = 1", "Unexpected symbol: '='"),
        ("      version: ${{ needs.preflight", "      wersion: ${{ needs.preflight", "Invalid input, wersion is not defined"),
        ("", None, "release.yml: Expected a scalar value, a sequence, or a mapping"),
    ],
)
def test_what_is_wrong_is_said(program: Path, tmp_path: Path, before: str, after: str | None, said: str) -> None:
    folder = tmp_path / ".github" / "workflows"
    shutil.copytree(matrix.REPOSITORY / ".github" / "workflows", folder)
    path = folder / "release.yml"
    path.write_text("" if after is None else path.read_text("utf-8").replace(before, after), "utf-8")
    done = check(program, tmp_path)
    assert done.returncode == 1
    assert re.search(said, done.stdout), done.stdout
