"""What the audit found, as the report shows it."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from markupsafe import escape

from ci.audit.checks import ACROSS, CHECKS, SAME_DEVICE, SAME_METADATA
from ci.device.packed import pack
from ci.errors import EnvironmentProblem
from ci.report import contents, coverage, page, verdict
from ci.report.model import make
from ci.report.page import render
from ci.wheelfile.wheel import DEVICE, MANIFEST

from ..audit_support import (
    DIST_INFO,
    MATRIX,
    NAMES,
    QUICK,
    Files,
    World,
    fatbin,
    replaced,
    with_module,
)


def test_a_good_set(wheel: Callable[..., Path], windows_wheel: Callable[..., Path]) -> None:
    report = make([windows_wheel(), wheel()])
    assert (report.violations, report.unknown) == (0, 0)
    assert [each.contents.slot.platform for each in report.wheels] == ["Linux x86_64", "Windows amd64"]  # in the order of the matrix
    assert [result.check for result in report.results] == [*QUICK, *ACROSS]
    assert len(report.absent) == len(MATRIX.platforms) * len(MATRIX.builds) - 2
    html = render(report)
    assert f"All {len(QUICK) + len(ACROSS)} checks passed" in html
    assert "declared, no wheel in this set" in html
    assert "code missing" not in re.sub(r"<style>.*?</style>", "", html, flags=re.DOTALL)


DECODE = f"{DEVICE}decode.fatbin.lzma"


def test_a_violation_is_shown(wheel: Callable[..., Path]) -> None:
    report = make([wheel(lambda files: files.update({DECODE: pack(fatbin([80, 86], [80]))}))])
    (result,) = (result for result in report.results if result.violations)
    assert (result.check, result.state) == ("device", "bad")
    html = render(report)
    assert "All " not in html.split("<main")[0]
    assert f">{len(result.violations)} violation" in html
    assert all(escape(violation.message) in html for violation in result.violations)
    (row,) = report.wheels[0].places
    states = {column.architecture: cell.codes[0].state for column, cell in zip(report.columns, row.cells, strict=True)}
    assert {name: state for name, state in states.items() if state != "present"} == {
        "86": "surplus", "87": "absent", "90a": "partial", "100": "partial", "103": "absent", "110": "absent",
        "120": "partial", "121": "absent",
    }  # fmt: skip
    assert "SASS, not declared" in html


def test_no_device_code_is_missing(wheel: Callable[..., Path]) -> None:
    def change(files: Files) -> None:
        for name in [name for name in files if name.startswith(DEVICE)]:
            del files[name]

    report = make([wheel(change)])
    (row,) = report.wheels[0].places
    assert {code.state for cell in row.cells for code in cell.codes} == {"absent", "missing"}
    html = render(report)
    assert "SASS missing" in html
    assert 'class="code missing"' in html


def test_gpu_code_inside_a_module_is_not_declared(wheel: Callable[..., Path], world: World) -> None:
    report = make([wheel(with_module(world, gpu_code=fatbin([80], [])))])
    device, module = report.wheels[0].places
    assert (device.code.name, module.code.name) == ("device code", "_cu13.abi3.so")
    assert {code.state for cell in module.cells for code in cell.codes} == {"absent", "surplus"}


NEWER = NAMES["linux"].replace("2_28", "2_34")  # another wheel of the same release


def test_wheels_with_the_same_device_code_share_a_row(wheel: Callable[..., Path]) -> None:
    report = make([wheel(), wheel(name=NEWER)])
    assert [numbers for _, numbers in report.covered] == [[0, 1]]
    html = render(report)
    assert html.count(">GPUs get<") == 1
    assert html.count('href="#wheel-') == 2


@pytest.mark.parametrize(
    ("held", "gpu", "served"),
    [
        ([("sass", "80"), ("ptx", "80")], "80", ("sass", "sm_80")),
        ([("sass", "75"), ("sass", "80"), ("sass", "89"), ("ptx", "80")], "86", ("sass", "sm_80")),
        ([("sass", "80"), ("sass", "89"), ("ptx", "80")], "89", ("sass", "sm_89")),
        ([("sass", "80"), ("ptx", "80")], "75", None),
        ([("sass", "80"), ("ptx", "80")], "110", ("ptx", "compute_80")),
        ([("sass", "80"), ("ptx", "75"), ("ptx", "80")], "90", ("ptx", "compute_80")),
        ([("sass", "90a")], "90", ("sass", "sm_90a")),
        ([("sass", "90a"), ("ptx", "90a")], "100", None),
        ([("sass", "100a"), ("sass", "100f")], "103", ("sass", "sm_100f")),
        ([("ptx", "100f")], "120", None),
        ([("sass", "100")], "110", None),
        ([], "80", None),
    ],
)
def test_what_a_gpu_gets(held: list[tuple[str, str]], gpu: str, served: tuple[str, str] | None) -> None:
    code = contents.Code("device code", 0, {}, {"one": frozenset(held)})
    (cell,) = coverage.row(code, {}, [coverage.Column(gpu, "", "")])
    assert [(each.kind, each.name, each.fatbins) for each in cell.served] == ([(*served, 1)] if served else [])
    assert cell.without == (not served)


def test_every_gpu_after_the_first_has_a_column() -> None:
    assert [each.architecture for each in coverage.columns(["100", "90a", "80"])] == [
        "80", "86", "87", "89", "90a", "100", "103", "110", "120", "121",
    ]  # fmt: skip
    assert coverage.columns([]) == ()


def test_a_check_that_cannot_run_here_says_so(wheel: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    def no_root(*_: object) -> None:
        raise EnvironmentProblem("no root", fix="install it")

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


def test_wheels_of_different_device_code(wheel: Callable[..., Path]) -> None:
    changed = wheel(lambda files: files.update({MANIFEST: files[MANIFEST] + b" "}), name=NEWER)
    report = make([wheel(), changed])
    assert {result.check for result in report.results if result.violations} == {"tags", "device", "device-digest", SAME_DEVICE}
    same = make([wheel(), wheel(name=NEWER)])
    assert {result.check for result in same.results if result.violations} == {"tags"}


def test_every_check_is_explained() -> None:
    assert verdict.meanings().keys() == {*CHECKS, *ACROSS}


def test_explanations_become_html() -> None:
    assert page.prose("No `a<b>` in *any* [doc](doc.md) & more") == "No <code>a&lt;b&gt;</code> in <em>any</em> doc &amp; more"


def test_the_same_wheel_twice(wheel: Callable[..., Path]) -> None:
    with pytest.raises(EnvironmentProblem, match="given twice"):
        make([wheel(), wheel(folder="again")])
