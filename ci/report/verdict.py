"""The audit's results, check by check, with what each check proves in the words of docs/audit.md."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING

from ..audit import Violation
from ..audit.checks import ACROSS, CHECKS
from ..audit.wheel import MANIFEST
from ..errors import EnvironmentProblem
from ..matrix import REPOSITORY

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ..audit.policy import Policy
    from ..audit.wheel import Wheel


@dataclass(frozen=True)
class Result:
    """One check of all wheels."""

    check: str
    proves: str
    wheels: int
    violations: tuple[Violation, ...]
    problems: tuple[str, ...]  # why it could not run on a wheel

    @property
    def state(self) -> str:
        return "bad" if self.violations else "unknown" if self.problems else "good"


@dataclass(frozen=True)
class Outcome:
    """What one check said of one wheel."""

    check: str
    violations: tuple[Violation, ...]
    problem: str = ""


def judge(wheel: Wheel, policy: Policy) -> list[Outcome]:
    """The outcome of every check."""
    return [_outcome(wheel, policy, identifier) for identifier in CHECKS]


def _outcome(wheel: Wheel, policy: Policy, identifier: str) -> Outcome:
    """A check that lacks something here, such as a toolkit root, says so and does not stop the others."""
    try:
        found = tuple(CHECKS[identifier](wheel, policy))
    except EnvironmentProblem as problem:
        return Outcome(identifier, (), f"{wheel.path.name}: {problem}")
    return Outcome(identifier, tuple(Violation(wheel.path.name, member, identifier, message) for member, message in found))


def without_binaries(wheel: Wheel) -> Wheel:
    """The wheel with no more than comparing releases needs: the native code of many wheels is large."""
    kept = {name: data for name, data in wheel.members.items() if name.startswith(f"{wheel.dist_info}/") or name == MANIFEST}
    return replace(wheel, members=kept)


def results(outcomes: Iterable[Outcome], wheels: Sequence[Wheel]) -> tuple[Result, ...]:
    """The outcomes by check, and the checks across wheels of one release where there are several."""
    by_check: dict[str, list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        by_check[outcome.check].append(outcome)
    found = [
        Result(
            check=check,
            proves=proofs().get(check, ""),
            wheels=len(each),
            violations=tuple(violation for outcome in each for violation in outcome.violations),
            problems=tuple(outcome.problem for outcome in each if outcome.problem),
        )
        for check, each in by_check.items()
    ]
    releases: dict[tuple[str, str], list[Wheel]] = defaultdict(list)
    for wheel in wheels:
        releases[wheel.project, str(wheel.version)].append(wheel)
    for identifier, check in ACROSS.items() if len(wheels) > len(releases) else ():
        differences = tuple(
            Violation(wheel.path.name, member, identifier, message)
            for release in releases.values()
            for wheel, member, message in check(release)
        )
        found.append(Result(identifier, proofs().get(identifier, ""), len(wheels), differences, ()))
    return tuple(found)


@cache
def proofs() -> dict[str, str]:
    """What each check proves, from the table in docs/audit.md."""
    text = (REPOSITORY / "docs" / "audit.md").read_text("utf-8")
    return {match[1]: match[2].strip() for match in re.finditer(r"^\| `([\w-]+)` \| (.+?) \|", text, re.MULTILINE)}
