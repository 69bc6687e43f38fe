"""``python -m ci pins``: check that each action's pinned commit is that of the tag in its comment.

Queries the action's own repository with `git ls-remote`, which needs no token: the tag must exist and must name that commit, directly or as
an annotated tag. So the commit belongs to that repository, not to a fork of it, and the version in the comment is right. A tag that was
moved after pinning is also found.
"""

from __future__ import annotations

import argparse
import os
import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from .. import process
from ..errors import CheckFailed, EnvironmentProblem
from ..matrix import REPOSITORY

WORKFLOWS = REPOSITORY / ".github" / "workflows"
SERVER = "https://github.com"
_USES = re.compile(r"^\s*(?:-\s+)?uses:\s*(?P<uses>\S+)(?:\s+#\s*(?P<tag>\S+))?", re.MULTILINE)
_PINNED = re.compile(r"(?P<repository>[\w.-]+/[\w.-]+)(?:/[\w./-]+)?@(?P<commit>[0-9a-f]{40})")
_SECONDS = 60


@dataclass(frozen=True, order=True)
class Pin:
    repository: str
    tag: str
    commit: str


def pins(texts: Iterable[tuple[str, str]]) -> list[Pin]:
    """The pins of workflows, each with its name; CheckFailed if an action has no commit, or no version next to it."""
    found, problems = set[Pin](), list[str]()
    for name, text in texts:
        for line in _USES.finditer(text):
            if line["uses"].startswith("./"):  # of this repository, at the same commit
                continue
            if (pinned := _PINNED.fullmatch(line["uses"])) and line["tag"]:
                found.add(Pin(pinned["repository"], line["tag"], pinned["commit"]))
            else:
                problems.append(f"{name}: {line[0].strip()}")
    if problems:
        fix = "uses: OWNER/NAME@COMMIT # TAG, with the commit of the tag in 40 digits"
        raise CheckFailed("\n  ".join(["actions without a commit and its tag:", *problems, f"fix: {fix}"]))
    return sorted(found)


def tags(repository: str, server: str) -> dict[str, str]:
    """The tags of a repository, each with the commit that it leads to."""
    url = f"{server.rstrip('/')}/{repository}"
    words = ["-c", "credential.helper=", "ls-remote", "--tags", "--", url]
    environment = {**os.environ, "GIT_TERMINAL_PROMPT": "0", "GIT_CONFIG_NOSYSTEM": "1"}
    fix = "check the network, and that the repository is still there"
    lines = process.git(*words, env=environment, timeout=_SECONDS, said=f"the tags of {url} cannot be queried", fix=fix).splitlines()
    found = {name.removeprefix("refs/tags/"): commit for commit, _, name in (line.partition("\t") for line in lines)}
    # Behind an annotated tag, NAME^{} is what it leads to.
    return {name: found.get(f"{name}^{{}}", commit) for name, commit in found.items() if not name.endswith("^{}")}


def wrong(pin: Pin, known: dict[str, str]) -> str | None:
    """The problem of a pin, by the tags of its repository; None if there is none."""
    if known.get(pin.tag) == pin.commit:
        return None
    here = sorted(tag for tag, commit in known.items() if commit == pin.commit)
    has = f"; the tags of {pin.commit[:12]} are {', '.join(here)}" if here else f"; no tag leads to {pin.commit[:12]}"
    there = f"{pin.tag} is {known[pin.tag]}" if pin.tag in known else f"there is no tag {pin.tag}"
    return f"{pin.repository}: {there}, expected {pin.commit}{has}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--workflows", metavar="FOLDER", type=Path, default=WORKFLOWS, help="directory of workflows (default: this project's)")
    add("--server", metavar="URL", default=SERVER, help="server with OWNER/NAME below it, or a directory of clones (default: %(default)s)")


def run(args: argparse.Namespace) -> int:
    files = sorted(path for pattern in ("*.yml", "*.yaml") for path in args.workflows.glob(pattern))
    if not files:
        raise EnvironmentProblem(f"{args.workflows} has no workflow", fix="give a folder with some")
    repositories = defaultdict[str, list[Pin]](list)
    for pin in pins((path.name, path.read_text("utf-8")) for path in files):
        repositories[pin.repository].append(pin)
    problems: list[str] = []
    unknown: list[EnvironmentProblem] = []
    for repository, pinned in repositories.items():
        try:
            known = tags(repository, args.server)
        except EnvironmentProblem as error:  # which keeps no other from being looked at
            unknown.append(error)
            continue
        for pin in pinned:
            if problem := wrong(pin, known):
                problems.append(problem)
            else:
                print(f"{pin.repository} {pin.tag} {pin.commit}: the commit of the tag")
    if problems:
        fix = "find out why (a tag that was moved is a warning), and pin the commit of a tag that was looked at"
        raise CheckFailed("\n  ".join(["pinned commits that are not their tags':", *problems, *map(str, unknown), f"fix: {fix}"]))
    if unknown:
        raise EnvironmentProblem("\n  ".join([*(each.args[0] for each in unknown)]), fix=unknown[0].fix)
    return 0
