"""``python -m ci audit``: check repaired wheels against the checkout.

Prints each difference from the declared contents on one line; docs/factory/audit.md lists the checks. Wheels are only read, never installed
or run, so any machine can audit the wheels of any platform. Exit codes: 0 no violation, 1 violations, or an archive that no tool should
unpack, 2 not a readable wheel, or no violation found but a toolkit root is missing or damaged.
"""

# Every command imports this module; the libraries that read binaries are imported only when there is something to audit.

from __future__ import annotations

import json
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import CheckFailed, CiError, EnvironmentProblem

if TYPE_CHECKING:
    import argparse
    from collections.abc import Collection, Iterator, Sequence

    from ..wheelfile.facts import WheelFacts
    from ..wheelfile.wheel import Wheel


CANNOT_LOOK = "cannot look: "


@dataclass(frozen=True)
class Violation:
    wheel: str
    member: str  # "" for the wheel as a whole
    check: str
    message: str  # what is wrong, what was expected
    fix: str = ""

    @property
    def unseen(self) -> bool:
        """Whether nothing was found: the check could not look, for want of a toolkit root for one."""
        return self.message.startswith(CANNOT_LOOK)

    def __str__(self) -> str:
        from ..console import visible

        said = visible(": ".join(filter(None, (self.wheel, self.member, self.check, self.message))))
        return f"{said}\n    fix: {visible(self.fix)}" if self.fix else said


def audit_wheel(
    path: Path,
    *,
    cuda: Sequence[str] = (),
    arch: Sequence[str] = (),
    checks: Collection[str] | None = None,
) -> list[Violation]:
    """Everything in a wheel that is not as declared, in the checks' order.

    `cuda` and `arch` (GPUs such as 90, or compute_80 for PTX) say what a developer's build was asked for, where that is less than the
    declared matrix. `checks` runs only these ids. Raises EnvironmentProblem for a file that is no wheel.
    """
    from ..wheelfile.wheel import read

    return list(examine(read(path), cuda, arch, checks))


def describe(path: Path) -> WheelFacts:
    """The facts of a wheel and of its native modules, without any judgement."""
    from ..wheelfile.facts import facts
    from ..wheelfile.wheel import read

    return facts(read(path))


def examine(wheel: Wheel, cuda: Sequence[str], arch: Sequence[str], checks: Collection[str] | None = None) -> Iterator[Violation]:
    """Return the problems of a wheel, check by check in the given order."""
    from .checks import CHECKS, FIXES
    from .policy import for_wheel

    policy = for_wheel(wheel, cuda=cuda, arch=arch)
    for identifier, check in CHECKS.items():
        if checks is not None and identifier not in checks:
            continue
        try:
            for member, message in check(wheel, policy):
                yield Violation(wheel.path.name, member, identifier, message, FIXES[identifier])
        except CheckFailed as error:
            yield Violation(wheel.path.name, "", identifier, str(error), FIXES[identifier])
        except EnvironmentProblem as error:  # one that cannot look loses nothing of the others
            yield Violation(wheel.path.name, "", identifier, f"{CANNOT_LOOK}{error.args[0]}", error.fix or FIXES[identifier])


def disagreements(wheels: Sequence[Wheel]) -> Iterator[Violation]:
    """The checks across wheels: those of one release must agree."""
    from .checks import ACROSS, FIXES

    def release(wheel: Wheel) -> tuple[str, str]:
        return wheel.project, str(wheel.version)

    for _, group in groupby(sorted(wheels, key=release), key=release):
        alike = list(group)
        for identifier, check in ACROSS.items():
            with suppress(CheckFailed):  # of a METADATA that is not UTF-8, which the wheel's own checks tell
                for wheel, member, message in check(alike):
                    yield Violation(wheel.path.name, member, identifier, message, FIXES[identifier])


def _install_roots(wheel: Wheel) -> None:
    from ..matrix import load
    from ..toolkit import install
    from .policy import platform_of

    roots = dict.fromkeys(root for extra in load().extras for root in extra.roots)
    install(list(roots), platform_of(wheel, load()))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("wheels", metavar="WHEEL", nargs="+", type=Path, help="a repaired wheel; wheels of one release are also compared with each other")
    add("--cuda", action="append", default=[], metavar="VERSION", help="expect only the module of this CUDA version (repeatable)")
    add("--arch", type=_architectures, default=(), metavar="LIST", help="expect code for these GPUs, such as 90 or 80,compute_80")
    add("--install", action="store_true", help="first install missing toolkit roots that the audit reads")
    add("--json", action="store_true", help="print facts and violations as JSON")


def _architectures(text: str) -> tuple[str, ...]:
    return tuple(part for part in text.replace(";", ",").split(",") if part)


def run(args: argparse.Namespace) -> int:
    from ..wheelfile.facts import facts
    from ..wheelfile.wheel import read

    wheels, violations, unread = [], list[Violation](), list[CiError]()
    for path in args.wheels:
        try:
            wheel = read(path)
            if args.install:
                _install_roots(wheel)
            violations += examine(wheel, args.cuda, args.arch)
            wheels.append(wheel)
        except CiError as error:  # noqa: PERF203  # not a wheel of mlx-cuda: reported after the findings in the others
            unread.append(error)
    violations += disagreements(wheels)
    from ..console import visible

    if args.json:
        found = {"wheels": [asdict(facts(wheel)) for wheel in wheels], "violations": [asdict(each) for each in violations]}
        print(json.dumps(found, indent=2))
    else:
        for wheel in wheels:
            if wheel.sbom not in wheel.members:  # first: it explains most of the others
                name, path = visible(wheel.path.name), visible(str(wheel.path))
                print(f"{name}: not repaired: it has no SBOM\n    fix: python -m ci repair {path}")
        for violation in violations:
            print(violation)
        for wheel in wheels if not violations else ():
            print(f"{wheel.path.name}: ok")
    for each in unread[:-1]:
        print(f"error: {each}", file=sys.stderr)
    if unread:
        raise unread[-1]
    return 0 if not violations else 2 if all(each.unseen for each in violations) else 1
