"""``python -m ci matrix``: print the jobs that build and test the wheels, for the workflows.

There is a job for each platform, and one for each GPU family of a platform. [tool.cibuildwheel] of pyproject.toml says what a job builds,
[[tests]] of ci/matrix/matrix.toml what it tests. A GPU job runs its tests one after another, because the runner is discarded afterwards.

--since omits the platforms that the changes since a revision cannot break, by [[changes]] of ci/matrix/matrix.toml.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from .. import matrix
from ..errors import EnvironmentProblem
from . import changes

_RUNNERS = (
    "set it to a runner's label, or for each family, or platform and family: "
    '{"hopper": "label", "win-amd64/ada": "label"} (the repository variable MLX_CUDA_GPU_RUNNER)'
)


def platforms(names: Iterable[str]) -> list[dict[str, Any]]:
    """Return the runner of each platform, and its rows without a GPU."""
    found = []
    for name in names:
        rows = [{"name": row.name, "python": row.python} for row in matrix.load().tests if row.platform == name and not row.gpu]
        found.append({"platform": name, "runner": matrix.load().platforms[name].runner, "rows": rows})
    return found


def gpus(runners: str) -> list[dict[str, Any]]:
    """Return the runner's label and the rows, for `ci try --row`, of each platform's GPU families that have a runner."""
    kinds: dict[tuple[str, str], list[str]] = {}
    for row in matrix.load().tests:
        if row.gpu:
            kinds.setdefault((row.platform, row.gpu), []).append(row.name)
    labels = _labels(runners.strip(), list(kinds))
    for platform, family in kinds.keys() - labels.keys():
        print(f"no runner for the GPU family {family} on {platform}: not tried", file=sys.stderr)
    return [
        {"kind": "-".join(kind), "platform": kind[0], "family": kind[1], "label": label, "names": " ".join(kinds[kind])}
        for kind, label in labels.items()
    ]


def _labels(runners: str, kinds: Sequence[tuple[str, str]]) -> dict[tuple[str, str], str]:
    """The label for each platform and family. A machine has one platform: where rows are of several, a family alone names none."""
    named = {"/".join(kind): kind for kind in kinds}
    for family in {family for _, family in kinds}:
        of = [kind for kind in kinds if kind[1] == family]
        if len(of) == 1:
            named[family] = of[0]
    try:
        said = json.loads(runners) if runners.startswith("{") else dict.fromkeys(map("/".join, kinds), runners)
    except ValueError as error:
        raise EnvironmentProblem(f"the runners are not JSON: {error}", fix=_RUNNERS) from error
    if wrong := [name for name, label in said.items() if name not in named or not isinstance(label, str)]:
        raise EnvironmentProblem(
            f"the runners name {wrong[0]}: no family with rows, or no label; there are {', '.join(named)}", fix=_RUNNERS
        )
    if not any(said.values()):
        raise EnvironmentProblem(f"no GPU family has a runner: {', '.join(map('/'.join, kinds))}", fix=_RUNNERS)
    if not runners.startswith("{") and len(platforms := sorted({platform for platform, _ in kinds})) > 1:
        raise EnvironmentProblem(f"one runner is of one platform, and there are rows of {' and '.join(platforms)}", fix=_RUNNERS)
    return {named[name]: label for name, label in said.items() if label}


def outputs(args: argparse.Namespace) -> dict[str, Any]:
    names = list(matrix.load().platforms)
    if args.since:
        needed = changes.needed(changes.since(args.since))
        names = list(needed)
        reasons = [f"{name}: because of {file}" for name, file in needed.items()]
        print("\n".join(reasons) or "the change needs no platform", file=sys.stderr)
    found: dict[str, Any] = {"build": bool(names), "platforms": {"include": platforms(names)}}
    if args.runners is not None:
        found["gpu"] = {"include": gpus(args.runners)}
    return found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print the outputs of --github as one JSON object")
    form.add_argument(
        "--github",
        action="store_true",
        help="print in the form of GITHUB_OUTPUT: build (true or false), platforms and, with --runners, gpu, both for strategy.matrix",
    )
    parser.add_argument("--since", metavar="REV", help="only the platforms that the changes since REV need; all of them if REV is empty")
    parser.add_argument(
        "--runners", metavar="LABELS", help='print GPU jobs too; the label of the runner, or {"hopper": "label", "win-amd64/ada": "label"}'
    )


def run(args: argparse.Namespace) -> int:
    found = outputs(args)
    if args.json:
        print(json.dumps(found, indent=2))
    elif args.github:
        print("\n".join(f"{name}={json.dumps(value, separators=(',', ':'))}" for name, value in found.items()))
    else:
        jobs = [(job["platform"], job["runner"], [row["name"] for row in job["rows"]]) for job in found["platforms"]["include"]]
        jobs += [(job["kind"], job["label"], [job["names"]]) for job in found.get("gpu", {}).get("include", [])]
        print("\n".join(f"{what:19} {runner:18} {' '.join(rows)}" for what, runner, rows in jobs))
    return 0
