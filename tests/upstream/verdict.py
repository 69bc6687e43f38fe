"""What differs between the two sides, what of it is known, and the table."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ci.errors import CheckFailed, EnvironmentProblem

from .running import OVER, Outcome, Ran

DIFFERENCES = Path(__file__).with_name("differences.toml")
REGION = re.compile(r"(<!-- results: upstream-tests -->\n).*?(<!-- end of results -->)", re.DOTALL)
GOOD = {"pass", "xfail"}
SHOWN = {"pass": "passed", "fail": "failed", "skip": "skipped", "crash": "crashed", "timeout": "timed out", "not run": "not run"}
ALIKE = {"xfail": "pass", "xpass": "fail", "error": "fail"}
PROCESS = (" (exit)", " (import)")  # what is a process's own has an outcome only where it failed


@dataclass
class Test:
    """A test's outcomes without and with patch(), again where they were asked for again."""

    name: str  # suite/module.Class.test
    module: str
    without: list[Outcome] = field(default_factory=list)
    with_: list[Outcome] = field(default_factory=list)

    @property
    def differs(self) -> bool:
        """Whether it passes without patch(), each time, and not with it: once is enough, but not of a process's end, where MLX races."""
        enough = all if self.name.endswith(PROCESS) else any
        return all(each.what in GOOD for each in self.without) and enough(each.what not in GOOD for each in self.with_)

    @property
    def cut_off(self) -> bool:
        """Whether the deadline has ended it, or come before it."""
        return any(each.what == "not run" or each.detail.startswith(OVER) for each in (*self.without, *self.with_))

    @property
    def unsteady(self) -> bool:
        """Whether it passed without patch() and failed when it was asked again."""
        return self.without[0].what in GOOD and any(each.what not in GOOD for each in self.without)

    @property
    def unremarkable(self) -> bool:
        """Whether it passes, or is skipped or not run, the same each time."""
        outcomes = {each.what for each in (*self.without, *self.with_)}
        return len(outcomes) == 1 and outcomes <= {*GOOD, "skip", "not run"}

    @property
    def mended(self) -> bool:
        """Whether it fails without patch() and passes with it."""
        return self.without[0].what not in {*GOOD, "skip", "not run"} and all(each.what in GOOD for each in self.with_)

    @property
    def told(self) -> str:
        bad = next(each for each in self.with_ if each.what not in GOOD)
        ways = f", {sum(each.what not in GOOD for each in self.with_)} of {len(self.with_)} times" if len(self.with_) > 1 else ""
        return f"{self.name}: {bad.what} with patch(){ways}\n    {bad.detail.replace(chr(10), chr(10) + '    ')}"


def tests_of(found: Collection[Ran]) -> dict[str, Test]:
    """The tests by their names, each with its outcomes on both sides, the first time and again."""
    tests: dict[str, Test] = {}
    processes = {(ran.job.unit, name): Outcome("pass") for ran in found for name in ran.outcomes if name.endswith(PROCESS)}
    for ran in sorted(found, key=lambda each: each.job.again):
        fine = {name: outcome for (job, name), outcome in processes.items() if job == ran.job.unit and ran.job.only is None}
        for name, outcome in (fine | ran.outcomes).items():
            test = tests.setdefault(f"{ran.job.suite}/{name}", Test(f"{ran.job.suite}/{name}", ran.job.name))
            if not (ran.job.again and outcome.what == "not run"):
                (test.with_ if ran.job.patched else test.without).append(outcome)
    for test in tests.values():
        for side in (test.without, test.with_):
            side[:] = side or [Outcome("not run")]
    return dict(sorted(tests.items()))


@dataclass(frozen=True)
class Known:
    test: str
    reason: str


def known() -> list[Known]:
    """The committed differences, each with its reason."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib

    rows = [Known(**row) for row in tomllib.loads(DIFFERENCES.read_text("utf-8")).get("difference", [])]
    if not all(row.reason.strip() for row in rows) or len({row.test for row in rows}) < len(rows):
        raise CheckFailed(f"{DIFFERENCES.name}: each difference stands there once, with its reason")
    return rows


@dataclass(frozen=True)
class Verdict:
    new: list[Test]
    stale: list[Known]
    known: list[Test]
    unsteady: list[Test]
    mended: list[Test]
    unfinished: list[str]  # modules

    def lines(self) -> Iterable[str]:
        yield from (f"DIFFERS  {test.told}" for test in self.new)
        yield from (f"STALE    {row.test}: does not differ any more ({row.reason})" for row in self.stale)
        yield from (f"NOT RUN  {module}: the time was over" for module in self.unfinished)
        yield from (f"known    {test.name}" for test in self.known)
        yield from (f"unsteady {test.name}: fails now and then without patch() too" for test in self.unsteady)
        yield from (f"mended   {test.name}: {test.without[0].what} without patch(), passes with it" for test in self.mended)


def judge(tests: Mapping[str, Test], rows: Sequence[Known], unfinished: Collection[str] = (), *, whole: bool = True) -> Verdict:
    """``unfinished``: modules that there was no time for; of these too counts what differs in a test that came to its end.

    ``whole``: all tests were to run, so a row without a test is stale too.
    """
    compared = {name: test for name, test in tests.items() if test.module not in unfinished or (test.differs and not test.cut_off)}
    differing = [test for test in compared.values() if test.differs]
    named = {row.test for row in rows}
    return Verdict(
        new=[test for test in differing if test.name not in named],
        stale=[row for row in rows if (not compared[row.test].differs if row.test in compared else whole and row.test not in tests)],
        known=[test for test in differing if test.name in named],
        unsteady=[test for test in compared.values() if test.unsteady],
        mended=[test for test in compared.values() if test.mended],
        unfinished=sorted(unfinished),
    )


# ----------------------------------------------------------------------------------------------------------------- table


def counted(outcomes: Iterable[str]) -> str:
    count = Counter(ALIKE.get(each, each) for each in outcomes)
    return ", ".join(f"{count[what]} {word}" for what, word in SHOWN.items() if count[what]) or "none"


def table(results: Mapping[str, Any]) -> str:
    """The modules of results as ``report`` gives them, in Markdown."""
    differing = Counter(test.module for test in tests_with_lines(results) if test.differs)
    sums: dict[str, tuple[Counter[str], Counter[str]]] = {}
    differ: Counter[str] = Counter()
    for each in (each for each in results["cases"] if "test" not in each and each["module"] not in results["unfinished"]):
        for name in (each["module"], f"{each['module'].partition('/')[0]}, all"):
            without, with_ = sums.setdefault(name, (Counter(), Counter()))
            without.update(each["without"])
            with_.update(each["with"])
            differ[name] += differing[each["module"]]
    rows = [("module", "without", "with", "differ")]
    for name, both in sorted(sums.items()):
        one, other = (counted(count.elements()) for count in both)
        rows.append((name if ", all" in name else f"`{name}`", one, "the same" if other == one else other, str(differ[name] or "")))
    lines = [f"| {' | '.join(row)} |" for row in rows]
    facts = results["facts"]
    about = ", ".join([facts["device"], *(f"{each} {facts[each]}" for each in ("mlx", "mlx-lm", "mlx-cuda") if each in facts)])
    origin = ", ".join(f"{name} {what[:12]}" for name, what in results["sources"].items()) or "an unknown source"
    return "\n".join([f"{about}; the tests are those of {origin}.", "", lines[0], "|---|---|---|---:|", *lines[1:]])


def tests_with_lines(results: Mapping[str, Any]) -> Iterable[Test]:
    """Those that have a line of their own."""
    for each in (each for each in results["cases"] if "test" in each):
        yield Test(each["test"], each["module"], *([Outcome(what) for what in each[side]] for side in ("without", "with")))


def report(tests: Mapping[str, Test], verdict: Verdict, facts: Mapping[str, Any], sources: Mapping[str, str], ran: Iterable[Ran]) -> Any:
    """For a file of results: each module with the number of its outcomes, and after it its tests that are not unremarkable.

    Details are those of tests that do not pass with patch().
    """

    def told(test: Test) -> dict[str, Any]:
        bad = next((each for each in test.with_ if each.what not in {*GOOD, "skip"}), None)
        sides = {"without": [each.what for each in test.without], "with": [each.what for each in test.with_]}
        return {"test": test.name, "module": test.module, **sides, **({"detail": bad.detail} if bad else {})}

    seconds: dict[str, dict[str, float]] = {}
    for each in (each for each in ran if not each.job.again):
        spent = seconds.setdefault(each.job.name, {"without": 0.0, "with": 0.0})
        spent[each.job.side] += each.seconds
    by_module: dict[str, list[Test]] = {}
    for test in tests.values():
        by_module.setdefault(test.module, []).append(test)
    cases: list[dict[str, Any]] = []
    for module, own in sorted(by_module.items()):
        sides = {"without": [test.without for test in own], "with": [test.with_ for test in own]}
        counts = {side: dict(Counter(each[0].what for each in all_of)) for side, all_of in sides.items()}
        cases += [{"module": module, "seconds": seconds[module], **counts}, *(told(test) for test in own if not test.unremarkable)]
    return {
        "kind": "upstream",
        "facts": facts,
        "sources": sources,
        "new": [test.name for test in verdict.new],
        "stale": [asdict(row) for row in verdict.stale],
        "unfinished": verdict.unfinished,
        "cases": cases,
    }


def good(results: Mapping[str, Any]) -> bool:
    return not (results["new"] or results["stale"] or results["unfinished"])


def finished(results: Mapping[str, Any]) -> set[str]:
    """The modules that ended on both sides before the deadline, and in which nothing differs."""
    bad = {each["module"] for each in results["cases"] if each.get("test") in results["new"]}
    return {each["module"] for each in results["cases"]} - bad - set(results["unfinished"])


def joined(earlier: Mapping[str, Any], later: Mapping[str, Any]) -> dict[str, Any]:
    """Both, as one run would have given them: of an earlier one what it has finished."""
    for what in ("facts", "sources"):
        if earlier[what] != later[what]:
            fix = "leave --keep out, so that all of them run"
            raise EnvironmentProblem(f"the earlier results are of other {what}: {earlier[what]}, now {later[what]}", fix=fix)
    kept = finished(earlier)
    cases = [each for results in (earlier, later) for each in results["cases"] if (each["module"] in kept) == (results is earlier)]
    unfinished = [each for each in later["unfinished"] if each not in kept]
    return {**later, "unfinished": unfinished, "cases": sorted(cases, key=lambda each: str(each["module"]))}


def updated(document: str, results: Mapping[str, Any]) -> str:
    if not REGION.search(document):
        raise CheckFailed("the document has no place for the table\n  fix: <!-- results: upstream-tests -->, <!-- end of results -->")
    return REGION.sub(lambda region: f"{region[1]}{table(results)}\n{region[2]}", document)
