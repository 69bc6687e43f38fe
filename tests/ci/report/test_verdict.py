"""What the audit found, as the report shows it."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest
from markupsafe import escape

from ci.audit.checks import CHECKS, SAME_METADATA
from ci.errors import EnvironmentProblem
from ci.report import page, verdict
from ci.report.model import make
from ci.report.page import render

from ..audit_support import (
    CU13,
    DIST_INFO,
    MATRIX,
    NAMES,
    QUICK,
    World,
    fatbin,
    replaced,
    with_module,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def test_a_good_set(wheel: Callable[..., Path], windows_wheel: Callable[..., Path]) -> None:
    report = make([windows_wheel(), wheel()])
    assert (report.violations, report.unknown) == (0, 0)
    assert [each.contents.platform for each in report.wheels] == ["Linux x86_64", "Windows amd64"]  # in the order of the matrix
    assert [result.check for result in report.results] == [*QUICK, SAME_METADATA]
    assert len(report.absent) == len(MATRIX.platforms) * len(MATRIX.builds) - 2
    html = render(report)
    assert f"All {len(QUICK) + 1} checks passed" in html
    assert "declared, no wheel in this set" in html
    assert "code missing" not in re.sub(r"<style>.*?</style>", "", html, flags=re.DOTALL)


def test_a_violation_is_shown(wheel: Callable[..., Path], world: World) -> None:
    report = make([wheel(with_module(world, gpu_code=fatbin([75, 80, 86], CU13.ptx)))])
    (result,) = (result for result in report.results if result.violations)
    assert (result.check, result.state) == ("architectures", "bad")
    html = render(report)
    assert "All " not in html.split("<main")[0]
    assert f">{len(result.violations)} violation" in html
    assert all(escape(violation.message) in html for violation in result.violations)
    states = {code.state for row in report.wheels[0].covered for pair in row.codes for code in pair}
    assert states == {"present", "absent", "missing", "surplus"}
    assert "machine code missing" in html
    assert 'class="code missing"' in html
    assert "machine code, not declared" in html


def test_code_that_some_fatbins_lack_is_partial(wheel: Callable[..., Path], world: World) -> None:
    report = make([wheel(with_module(world, gpu_code=fatbin(CU13.sass, CU13.ptx) + fatbin(CU13.sass[1:], CU13.ptx)))])
    (row,) = (row for row in report.wheels[0].covered if row.title == "CUDA 13.0")
    assert [pair[0].state for pair in row.codes] == ["partial", *["present"] * 6]
    assert "<b>1/2</b>" in render(report)


def test_a_check_that_cannot_run_here_says_so(wheel: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    def no_root(*_: object) -> None:
        raise EnvironmentProblem("no root", cure="install it")

    monkeypatch.setattr(verdict, "CHECKS", {"size": CHECKS["size"], "provider": no_root})
    report = make([wheel()])
    assert (report.violations, report.unknown) == (0, 1)
    html = render(report)
    assert "Not fully checked" in html
    assert "no root" in html
    assert "install it" in html
    assert "checks passed" not in html


def test_wheels_that_disagree(wheel: Callable[..., Path], windows_wheel: Callable[..., Path]) -> None:
    changed = windows_wheel(replaced(f"{DIST_INFO}/METADATA", "Requires-Python: >=3.10", "Requires-Python: >=3.11"))
    report = make([wheel(), changed])
    assert {result.check for result in report.results if result.violations} == {"metadata", SAME_METADATA}
    assert report.violations_of(NAMES["windows"]) == report.violations


def test_every_check_is_explained() -> None:
    assert verdict.proofs().keys() == {*CHECKS, SAME_METADATA}


def test_explanations_become_html() -> None:
    assert page.prose("No `a<b>` in *any* [doc](doc.md) & more") == "No <code>a&lt;b&gt;</code> in <em>any</em> doc &amp; more"


def test_the_same_wheel_twice(wheel: Callable[..., Path]) -> None:
    with pytest.raises(EnvironmentProblem, match="given twice"):
        make([wheel(), wheel(folder="again")])
