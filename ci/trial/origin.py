"""``python -m ci origin``: refuse the artifacts of a workflow run that must not run on our machines.

Accepts a run only if it is of a workflow of this repository that builds wheels, was started with write access, and built a
commit of this repository. A pull request's wheels are its author's code, and an artifact does not show its origin. The run must be finished
and successful, unless it is the run that calls this command, whose job order ensures it. GITHUB_REPOSITORY and GITHUB_RUN_ID name the
repository and the calling run. gh queries GitHub; it must be logged in, or GH_TOKEN must be set.
"""

from __future__ import annotations

import argparse
import json
import os
import re
from collections.abc import Mapping
from typing import Any

from ..errors import CheckFailed, EnvironmentProblem
from .actions import ID, REPOSITORY, Run, query

# Events that need the permission to write. Any other one is refused, those that GitHub has not invented yet included.
TRUSTED = {"push", "schedule", "workflow_dispatch"}
# The workflow that makes wheels, and those that call it.
WORKFLOWS = tuple(f".github/workflows/{name}.yml" for name in ("wheels", "release", "nightly"))


def objection(described: Mapping[str, Any], run: Run, *, itself: bool) -> str | None:
    """The objection to a run, given as GitHub's API describes it; None if there is none. ``itself``: this very run asks."""
    if described.get("id") != run.number:
        return f"the API answered with run {described.get('id')}"
    for what, key in ("it", "repository"), ("its commit", "head_repository"):
        owner = (described.get(key) or {}).get("full_name")
        if str(owner).lower() != run.repository.lower():
            return f"{what} is of the repository {owner}, expected {run.repository}"
    workflow = str(described.get("path")).partition("@")[0]  # a ref may stand behind
    if workflow not in WORKFLOWS:
        return f"it is a run of {workflow}, expected one of {', '.join(WORKFLOWS)}"
    if described.get("event") not in TRUSTED:
        return f"it was started by the event {described.get('event')!r}, expected one of {', '.join(sorted(TRUSTED))}"
    came = described.get("status"), described.get("conclusion")
    if not itself and came != ("completed", "success"):
        return f"it is {came[0]}, with the conclusion {came[1]}, expected completed and success"
    return None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_id", metavar="ID", help="id of a workflow run of this repository (digits)")


def run(args: argparse.Namespace) -> int:
    if not re.fullmatch(ID, args.run_id):
        raise EnvironmentProblem(f"{args.run_id!r} is no id of a workflow run", fix="give the digits at the end of its page's address")
    repository = os.environ.get("GITHUB_REPOSITORY", "")
    if not re.fullmatch(REPOSITORY, repository):
        raise EnvironmentProblem(
            f"run {args.run_id} of which repository?", fix="set GITHUB_REPOSITORY to OWNER/NAME, as GitHub's workflows do"
        )
    target = Run(repository, int(args.run_id))
    described = json.loads(query(target, f"runs/{target.number}"))
    if reason := objection(described, target, itself=args.run_id == os.environ.get("GITHUB_RUN_ID")):
        fix = f"start wheels.yml on a branch of {target.repository}, and wait for its end"
        raise CheckFailed(f"the artifacts of {target} may not run here: {reason}\n  fix: {fix}")
    print(f"{target}: {described['event']} of {described.get('head_branch')}, {described['path']}")
    return 0
