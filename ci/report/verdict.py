"""The audit's results, check by check, with what each check means, in the words of docs/factory/audit.md."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache

from ..audit import Violation, disagreements
from ..audit.checks import ACROSS, CHECKS
from ..audit.policy import Policy
from ..errors import EnvironmentProblem
from ..matrix import REPOSITORY
from ..wheelfile.wheel import MANIFEST, Wheel


@dataclass(frozen=True)
class Result:
    """One check of all wheels."""

    check: str
    violations: list[Violation] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)  # why it could not run on a wheel

    @property
    def state(self) -> str:
        return "bad" if self.violations else "unknown" if self.problems else "good"

    @property
    def meaning(self) -> str:
        return meanings().get(self.check, "")


def judge(wheel: Wheel, policy: Policy, results: dict[str, Result]) -> None:
    """Add the outcome of every check. One that lacks something here, such as a toolkit root, says so and does not stop the others."""
    for identifier, check in CHECKS.items():
        result = results.setdefault(identifier, Result(identifier))
        try:
            found = list(check(wheel, policy))
        except EnvironmentProblem as problem:
            result.problems.append(f"{wheel.path.name}: {problem}")
        else:
            result.violations.extend(Violation(wheel.path.name, member, identifier, message) for member, message in found)


def without_binaries(wheel: Wheel) -> Wheel:
    """The wheel with no more than comparing releases needs: the native code of many wheels is large."""
    kept = {name: data for name, data in wheel.members.items() if name.startswith(f"{wheel.dist_info}/") or name == MANIFEST}
    return replace(wheel, members=kept)


def compare(wheels: Sequence[Wheel], results: dict[str, Result]) -> None:
    """Add the checks across wheels of one release, where there are several."""
    if len(wheels) > len({(wheel.project, wheel.version) for wheel in wheels}):
        results.update({identifier: Result(identifier) for identifier in ACROSS})
        for violation in disagreements(wheels):
            results[violation.check].violations.append(violation)


@cache
def meanings() -> dict[str, str]:
    """The meaning of each check, from the table in docs/factory/audit.md."""
    text = (REPOSITORY / "docs" / "factory" / "audit.md").read_text("utf-8")
    return {match[1]: match[2].strip() for match in re.finditer(r"^\| `([\w-]+)` \| (.+?) \|", text, re.MULTILINE)}
