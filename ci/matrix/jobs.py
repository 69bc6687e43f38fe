"""``python -m ci matrix``: the jobs that build and try the wheels, for the workflows.

There is one for each platform, and one for each family of GPUs. What is built in a job is cibuildwheel's configuration (pyproject.toml).
What is tried are the rows of ci/matrix/matrix.toml: those of one job one after another, as a GPU's machine that is thrown away after a job
takes one. ``--since`` leaves out the platforms that the change since a revision cannot break, by [[changes]] of ci/matrix/matrix.toml.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from typing import Any

from .. import matrix
from ..errors import EnvironmentProblem
from . import changes

_RUNNERS = 'set it to a runner\'s label, or for each family: {"hopper": "label"} (the repository variable MLX_CUDA_GPU_RUNNER)'


def platforms(names: Iterable[str]) -> list[dict[str, Any]]:
    """Of each platform, its runner and its rows without a GPU."""
    found = []
    for name in names:
        rows = [{"name": row.name, "python": row.python} for row in matrix.load().tests if row.platform == name and not row.gpu]
        found.append({"platform": name, "runner": matrix.load().platforms[name].runner, "rows": rows})
    return found


def gpus(runners: str) -> list[dict[str, Any]]:
    """Of each GPU family with a runner, the runner's label, its rows for `ci try --row`, and their Pythons for the action that installs."""
    families: dict[str, list[matrix.Row]] = {}
    for row in matrix.load().tests:
        if row.gpu:
            families.setdefault(row.gpu, []).append(row)
    labels = _labels(runners.strip(), families)
    for family in families.keys() - labels.keys():
        print(f"no runner for the GPU family {family}: not tried", file=sys.stderr)
    jobs = []
    for family, label in labels.items():
        names, pythons = ([getattr(row, each) for row in families[family]] for each in ("name", "python"))
        jobs.append({"family": family, "label": label, "names": " ".join(names), "pythons": "\n".join(dict.fromkeys(pythons))})
    return jobs


def _labels(runners: str, families: Iterable[str]) -> dict[str, str]:
    try:
        labels = json.loads(runners) if runners.startswith("{") else dict.fromkeys(families, runners)
    except ValueError as error:
        raise EnvironmentProblem(f"the runners are no JSON: {error}", cure=_RUNNERS) from error
    if wrong := [family for family, label in labels.items() if family not in families or not isinstance(label, str)]:
        raise EnvironmentProblem(f"the runners name {wrong[0]}: no family with rows, or no label", cure=_RUNNERS)
    if not any(labels.values()):
        raise EnvironmentProblem(f"no GPU family has a runner: {', '.join(families)}", cure=_RUNNERS)
    return {family: label for family, label in labels.items() if label}


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
    form.add_argument("--json", action="store_true", help="print the outputs below as one JSON object")
    form.add_argument(
        "--github",
        action="store_true",
        help="print lines for GITHUB_OUTPUT: build, true or false; platforms and, with --runners, gpu, as strategy.matrix takes them",
    )
    parser.add_argument("--since", metavar="REV", help="only the platforms that the change since REV needs; all of them where REV is empty")
    parser.add_argument("--runners", metavar="LABELS", help='GPU jobs: a label for every family, or {"hopper": "label"}')


def run(args: argparse.Namespace) -> int:
    found = outputs(args)
    if args.json:
        print(json.dumps(found, indent=2))
    elif args.github:
        print("\n".join(f"{name}={json.dumps(value, separators=(',', ':'))}" for name, value in found.items()))
    else:
        jobs = [(job["platform"], job["runner"], [row["name"] for row in job["rows"]]) for job in found["platforms"]["include"]]
        jobs += [(job["family"], job["label"], [job["names"]]) for job in found.get("gpu", {}).get("include", [])]
        print("\n".join(f"{what:15} {runner:18} {' '.join(rows)}" for what, runner, rows in jobs))
    return 0
