"""``pytest --place NAME``, or MLX_CUDA_PLACE: a skip that tests/skips.toml does not declare for this place is a failure.

Without a place every skip is taken as it is.
"""

from __future__ import annotations

import os
import re
import sys
from collections import Counter
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest

DECLARED = Path(__file__).with_suffix(".toml")
WHOLE = "nightly"  # where every test runs: a row without a skip has outlived it


@dataclass(frozen=True)
class Row:
    places: list[str]
    tests: str  # a pattern of node ids
    reason: str  # a regular expression

    def covers(self, test: str, reason: str) -> bool:
        return fnmatchcase(test, self.tests) and bool(re.search(self.reason, reason))


def load(path: Path = DECLARED) -> tuple[dict[str, str], list[Row]]:
    """The places with what they are, and the rows."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib

    data = tomllib.loads(path.read_text("utf-8"))
    return data["places"], [Row(**row) for row in data["skips"]]


@dataclass(eq=False)  # pytest keeps its plugins in sets
class Judge:
    """Hears of all skips, in the process that has the verdict."""

    place: str
    rows: list[Row]
    skips: list[tuple[str, str]] = field(default_factory=list)  # node id and reason

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.skipped and not hasattr(report, "wasxfail"):
            self.hear(report.nodeid, report.longrepr)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.skipped:
            self.hear(report.nodeid, report.longrepr)

    def hear(self, test: str, said: Any) -> None:
        """``said`` is pytest's: file, line and reason."""
        self.skips.append((test, str(said[2]).removeprefix("Skipped: ")))

    def undeclared(self) -> list[tuple[str, str]]:
        return [skip for skip in self.skips if not any(row.covers(*skip) for row in self.rows)]

    def stale(self) -> list[Row]:
        return [row for row in self.rows if self.place == WHOLE and not any(row.covers(*skip) for skip in self.skips)]

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if session.exitstatus == pytest.ExitCode.OK and self.undeclared():
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        line = terminalreporter.write_line
        found = Counter((test.partition("::")[0], reason) for test, reason in self.undeclared())
        for (file, reason), number in found.items():
            line(f"UNDECLARED SKIP [{number}] {file}: {reason}", red=True)
        if found:
            line(f"fix: give {self.place} what is missing, or declare the skip in tests/skips.toml", red=True)
        for row in self.stale():
            line(f"STALE in tests/skips.toml: nothing of {row.tests} was skipped because of {row.reason}")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--place", metavar="NAME", default=os.environ.get("MLX_CUDA_PLACE"), help="a place of tests/skips.toml: no other skips"
    )


def pytest_configure(config: pytest.Config) -> None:
    place = config.getoption("place")
    if not place or hasattr(config, "workerinput"):
        return
    places, rows = load()
    if place not in places:
        raise pytest.UsageError(f"unknown place {place!r}: use one of {', '.join(places)}")
    config.pluginmanager.register(Judge(place, [row for row in rows if place in row.places]), "skips")
