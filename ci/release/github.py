"""The settings of the repository on GitHub, as far as a release depends on them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from .. import gh
from ..audit import Violation
from ..build.description import address
from ..matrix import load
from .standing import finding

RUNNER = "MLX_CUDA_GPU_RUNNER"
WHERE = "docs/factory/releasing.md, Set up a repository"


@dataclass(frozen=True)
class Rule:
    """The limits that an environment must have, and whether people must agree to each use."""

    refs: frozenset[str]
    reviewed: bool = False


ENVIRONMENTS = {
    "pypi": Rule(frozenset({"tag v*"}), reviewed=True),
    "testpypi": Rule(frozenset({"branch main"})),
    "gpu": Rule(frozenset({"branch main", "tag v*"})),
}


def runner() -> Iterator[Violation]:
    """The variable of the GPU runner is set."""
    if not os.environ.get(RUNNER):
        message = f"{RUNNER} is not set: no machine with a GPU would try the wheels"
        yield finding("variable", message, f"set the repository variable: {WHERE}")


def repository() -> Iterator[Violation]:
    """The address that the index page will lead to is this repository's."""
    if address() != load().repository:
        message = f"this is {address()}, but ci/matrix/matrix.toml says {load().repository}: who builds elsewhere gets another METADATA"
        yield finding("repository", message, "set repository in ci/matrix/matrix.toml")


def environments() -> Iterator[Violation]:
    """Each environment is there, limited to the refs that it is for, and asks people where it has to."""
    there = {each["name"]: each for each in _ask("environments?per_page=100")["environments"]}
    for name, rule in ENVIRONMENTS.items():
        if name not in there:
            yield finding("environment", f"there is no environment {name}", f"make it: {WHERE}")
            continue
        if (refs := _refs(name, there[name]["deployment_branch_policy"])) != rule.refs:
            message = f"the environment {name} lets in {_spell(refs)}, expected {_spell(rule.refs)}"
            yield finding("environment", message, f"limit its deployment branches and tags: {WHERE}")
        if rule.reviewed and "required_reviewers" not in {each["type"] for each in there[name]["protection_rules"]}:
            yield finding("environment", f"the environment {name} has no required reviewers", f"name its required reviewers: {WHERE}")


def _refs(name: str, policy: dict[str, bool] | None) -> frozenset[str]:
    if policy is None:
        return frozenset({"any branch or tag"})
    if not policy["custom_branch_policies"]:
        return frozenset({"protected branches"})
    listed = _ask(f"environments/{name}/deployment-branch-policies?per_page=100")["branch_policies"]
    return frozenset(f"{each.get('type', 'branch')} {each['name']}" for each in listed)


def _spell(refs: frozenset[str]) -> str:
    return " and ".join(sorted(refs)) or "nothing"


def _ask(path: str) -> Any:
    """Get this path of the repository from GitHub's API; a job needs `actions: read`."""
    url = urlsplit(address())
    return json.loads(gh.api(url.netloc, f"repos{url.path}/{path}", what=f"GitHub does not say what {url.path[1:]} has"))
