"""``python -m ci origin``: may the artifacts of this workflow run be executed on our own machines?

Only if somebody who may write to the repository started the run, from one of its own branches or tags. What a pull request built is
its author's code, and an artifact does not show where it comes from.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..errors import CheckFailed, EnvironmentProblem

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping

# Events that need the permission to write. Any other one is refused, those that GitHub has not invented yet included.
TRUSTED = {"push", "schedule", "workflow_dispatch"}


def objection(run: Mapping[str, Any], repository: str) -> str | None:
    """What speaks against a run, given as GitHub's API describes it; None if nothing does."""
    if run.get("event") not in TRUSTED:
        return f"it was started by the event {run.get('event')!r}, expected one of {', '.join(sorted(TRUSTED))}"
    head = (run.get("head_repository") or {}).get("full_name")
    if str(head).lower() != repository.lower():
        return f"its commit is of the repository {head}, expected {repository}"
    return None


def check(number: int, run: Mapping[str, Any], repository: str) -> None:
    if run.get("id") != number:
        raise CheckFailed(f"asked for run {number}, the API answered with run {run.get('id')}")
    if reason := objection(run, repository):
        raise CheckFailed(
            f"the artifacts of run {number} are not executed here: {reason}\n  cure: start wheels.yml on a branch of {repository}"
        )


def add_parser(subparsers: Any) -> None:
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "origin",
        help="refuse the artifacts of a workflow run that a pull request started",
        description="Check that a workflow run was started from a branch or tag of the repository itself, by somebody who may write to it.",
        epilog="The token comes from GITHUB_TOKEN or GH_TOKEN; GITHUB_API_URL names another server's API.",
    )
    parser.add_argument("target", metavar="RUN", help="the id or the address of a workflow run")
    parser.add_argument("--repository", metavar="OWNER/NAME", help="whose run it is, if only its id is given (default: GITHUB_REPOSITORY)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from .actions import Api, Run

    target = Run.parse(args.target, args.repository)
    if target is None:
        raise EnvironmentProblem(f"{args.target!r} is no workflow run", cure="give its id, or the address of its page")
    described = Api().about(target)
    check(target.number, described, target.repository)
    print(f"run {target.number} of {target.repository}: {described['event']} of {described.get('head_branch')}")
    return 0
