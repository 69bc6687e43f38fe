"""``python -m ci origin``: refuse the artifacts of a workflow run that a pull request started.

They may be executed on our own machines only if somebody who may write to the repository started the run, from one of its own branches or
tags. What a pull request built is its author's code, and an artifact does not show where it comes from. GitHub is asked by gh, its command
line, which is logged in or has GH_TOKEN in the environment.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from typing import Any

from ..errors import CheckFailed, EnvironmentProblem
from .actions import Run, ask

# Events that need the permission to write. Any other one is refused, those that GitHub has not invented yet included.
TRUSTED = {"push", "schedule", "workflow_dispatch"}


def objection(described: Mapping[str, Any], run: Run) -> str | None:
    """What speaks against a run, given as GitHub's API describes it; None if nothing does."""
    if described.get("id") != run.number:
        return f"the API answered with run {described.get('id')}"
    if described.get("event") not in TRUSTED:
        return f"it was started by the event {described.get('event')!r}, expected one of {', '.join(sorted(TRUSTED))}"
    head = (described.get("head_repository") or {}).get("full_name")
    if str(head).lower() != run.repository.lower():
        return f"its commit is of the repository {head}, expected {run.repository}"
    return None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("target", metavar="RUN", help="the id or the address of a workflow run")
    parser.add_argument("--repository", metavar="OWNER/NAME", help="whose run it is, if only its id is given (default: GITHUB_REPOSITORY)")


def run(args: argparse.Namespace) -> int:
    target = Run.parse(args.target, args.repository)
    if target is None:
        raise EnvironmentProblem(f"{args.target!r} is no workflow run", cure="give its id, or the address of its page")
    described = json.loads(ask(target, f"runs/{target.number}"))
    if reason := objection(described, target):
        cure = f"start wheels.yml on a branch of {target.repository}"
        raise CheckFailed(f"the artifacts of {target} are not executed here: {reason}\n  cure: {cure}")
    print(f"{target}: {described['event']} of {described.get('head_branch')}")
    return 0
