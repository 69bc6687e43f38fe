"""``nox -s pipeline``: the workflows release and nightly on this machine, from a tag of a clone, step by step.

Real: every command of every step, the containers, the tools of the locked files, an index server, pip and uv. Not real: GitHub's actions
(`standins.py`), its command line and its identity. The clone declares this machine's platform, one build, and the CPythons that are here;
its tests run on the tree as it is.

    python -m tests.pipeline -o report.json [--pythons FOLDER] [--only release]

PIPELINE_PYTHONS, or --pythons, is a folder with interpreters (3.13.x/bin/python, …), as pyenv and GitHub's tool cache have them. Where
manylinux's image cannot be had, CIBW_MANYLINUX_X86_64_IMAGE names another.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import tomlkit

from ci import matrix

from ..ci.index_support import server
from . import runner, standins

GH = '''#!{python}
"""GitHub's command line, as far as the workflows call it: it answers from one repository as docs/factory/releasing.md sets it up."""
import json, os, pathlib, shutil, subprocess, sys
here, words = pathlib.Path({folder!r}), sys.argv[1:]
with (here / "gh.log").open("a") as log:
    print(json.dumps(words), file=log)
if words[:2] == ["release", "create"]:
    options = {{"--title", "--notes-file"}}
    files = [word for before, word in zip(words, words[1:]) if not word.startswith("-") and before not in options][2:]
    (here / "release").mkdir()
    for file in files:
        shutil.copy(file, here / "release")
elif words[0] == "api":
    path = next(word for word in words[1:] if word.startswith("repos/")).partition("?")[0]
    refs = {{"pypi": [("v*", "tag")], "testpypi": [("main", "branch")], "gpu": [("main", "branch"), ("v*", "tag")]}}
    if path.endswith("/environments"):
        limited = {{"protected_branches": False, "custom_branch_policies": True}}
        rules = {{"protection_rules": [{{"type": "required_reviewers"}}], "deployment_branch_policy": limited}}
        print(json.dumps({{"environments": [{{"name": name, **rules}} for name in refs]}}))
    elif path.endswith("/deployment-branch-policies"):
        print(json.dumps({{"branch_policies": [{{"name": name, "type": kind}} for name, kind in refs[path.split("/")[-2]]]}}))
    elif "/actions/runs/" in path:
        mine = {{"full_name": "OWNER/mlx-cuda"}}
        print(json.dumps({{"id": 7, "event": "push", "path": ".github/workflows/release.yml", "status": "in_progress", "conclusion": None,
                          "repository": mine, "head_repository": mine, "head_branch": "main"}}))
    elif "/commits/tags/" in path:
        command = ["git", "-C", str(here / "repository"), "rev-parse", "--verify", path.rpartition("/")[2] + "^{{commit}}"]
        commit = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
        if commit != os.environ["GITHUB_SHA"]:  # as the expression behind --jq says
            sys.exit("the tag was moved")
        print(commit)
    else:
        sys.exit("gh: Not Found (HTTP 404)")
'''


def prepare(repository: Path, pythons: Path) -> str:
    """Clone, and leave in the clone's matrix what this machine can do, with what an owner sets; commit and tag that; returns the tag."""
    subprocess.run(["git", "clone", "--quiet", str(matrix.REPOSITORY), str(repository)], check=True)
    for branch in (standins.WHOLE, "main"):
        subprocess.run(["git", "checkout", "--quiet", "-B", branch], cwd=repository, check=True)
    path = repository / "ci" / "matrix" / "matrix.toml"
    document = tomlkit.parse(path.read_text("utf-8"))
    here = matrix.host_platform().name
    document["project"]["repository"] = "https://github.com/OWNER/mlx-cuda"
    for name in [name for name in document["platforms"] if name != here]:
        del document["platforms"][name]
    for row in document["tests"]:
        row["pythons"] = [python for python in row["pythons"] if list(pythons.glob(f"{python}.*"))]
    for table, kept in (
        ("builds", lambda row: not row["abi"].endswith("t")),
        ("tests", lambda row: row["platform"] == here and row["pythons"]),
    ):
        rows = document[table]
        for number in reversed(range(len(rows))):
            if not kept(rows[number]):
                del rows[number]
    path.write_text(tomlkit.dumps(document), "utf-8")
    project, changes = repository / "pyproject.toml", repository / "CHANGELOG.md"
    text = project.read_text("utf-8")
    version = tomlkit.parse(text)["project"]["version"]
    builds = next(line for line in text.splitlines() if line.startswith('build = "cp310-*'))
    project.write_text(text.replace(builds, 'build = "cp310-*"'), "utf-8")
    changes.write_text(changes.read_text("utf-8").replace(f"## [{version}]\n", f"## [{version}] - 2000-01-01\n"), "utf-8")
    for command in (["commit", "--quiet", "--all", "--message", "What this machine can do"], ["tag", f"v{version}"]):
        subprocess.run(["git", "-c", "user.name=pipeline", "-c", "user.email=pipeline@localhost", *command], cwd=repository, check=True)
    return f"v{version}"


def instead(key: str, line: str) -> str | None:
    """What cannot be here: a GPU, GitHub's identity to sign with, CPython 3.15, packages of the system."""
    if key == "gpu/try" and "ci try" in line:
        return 'python -m ci try artifacts --extra cpu --json > "benchmark-$KIND.jsonl"'
    if key == "gpu/upstream-tests" and "nox" in line.split():
        return 'touch "upstream-tests-$KIND.jsonl"'
    if line.startswith("sudo "):
        return None
    line = line.replace("test_fault or ", "")  # they are of all platforms' wheels
    return line.replace(" --attestations", "").replace("--python 3.15", "--python 3.13") if key.startswith("release/") else line


def main(arguments: argparse.Namespace) -> int:
    os.environ["PIPELINE_PYTHONS"] = str(arguments.pythons)
    with tempfile.TemporaryDirectory(prefix="mlx-cuda-pipeline-") as name, server(Path(name, "index")) as index:
        folder = Path(name)
        repository, earlier = folder / "repository", {}
        if arguments.again:
            shutil.copytree(arguments.again, folder, dirs_exist_ok=True, symlinks=True)
            before = json.loads(arguments.output.read_text("utf-8"))
            commit, earlier = before["commit"], {each["job"]: each for each in before["jobs"]}
            tag = subprocess.run(["git", "describe", "--tags"], cwd=repository, check=True, capture_output=True, text=True).stdout.strip()
        else:
            tag = prepare(repository, arguments.pythons)
            head = ["git", "-C", str(matrix.REPOSITORY), "rev-parse", "--short=7", "HEAD"]
            commit = subprocess.run(head, check=True, capture_output=True, text=True).stdout.strip()
        (folder / "bin").mkdir(exist_ok=True)
        (folder / "bin" / "gh").write_text(GH.format(python=sys.executable, folder=str(folder)))
        (folder / "bin" / "gh").chmod(0o755)
        environment = {
            "MLX_CUDA_INDEX_PYPI_UPLOAD": index,
            "MLX_CUDA_INDEX_PYPI_SIMPLE": f"{index}simple/",
            "TWINE_USERNAME": "anyone",
            "TWINE_PASSWORD": "anything",
        }
        variables = {"MLX_CUDA_GPU_RUNNER": "gpu", "MLX_CUDA_NIGHTLY": ""}
        machine = runner.Machine(repository, folder, standins.ACTIONS, variables, environment, instead, earlier=earlier)
        runs: dict[str, tuple[str, str, dict[str, str]]] = {
            "release": ("push", f"refs/tags/{tag}", {}),
            "nightly": ("workflow_dispatch", "refs/heads/main", {"history": "new"}),
        }
        chosen = [arguments.only] if arguments.only else list(runs)
        done = {name: machine.run(name, runs[name][0], ref=runs[name][1], inputs=runs[name][2]) for name in chosen}
        runner.save(machine, arguments.output, commit)
        if arguments.keep:
            shutil.copytree(folder, arguments.keep, symlinks=True, ignore=shutil.ignore_patterns("home", "jobs"))
    bad = [f"{workflow}/{job}" for workflow, jobs in done.items() for job, each in jobs.items() if each["result"] == "failure"]
    print("\n".join(f"failed: {each}" for each in bad) or "every job succeeded")
    return bool(bad)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        prog="python -m tests.pipeline", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("-o", "--output", type=Path, default=Path("pipeline.json"), help="the report: commit, date, jobs, steps, seconds (%(default)s)")
    add(
        "--pythons",
        type=Path,
        default=Path(os.environ.get("PIPELINE_PYTHONS", "/opt/hostedtoolcache/Python")),
        help="a folder of interpreters",
    )
    add("--only", choices=["release", "nightly"], help="one of the two workflows")
    add("--again", type=Path, metavar="FOLDER", help="what --keep kept: run only the jobs that failed, or that others wait for")
    add("--keep", type=Path, metavar="FOLDER", help="keep artifacts, logs, index and site in this folder")
    sys.exit(main(parser.parse_args()))
