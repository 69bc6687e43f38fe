"""ci.device.plan and [device] of the matrix: what is compiled for which GPUs, and what its keys depend on. Nothing is compiled here."""

from __future__ import annotations

import ast
import re
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from ci import device, matrix
from ci.device import plan
from ci.errors import CheckFailed, EnvironmentProblem
from ci.matrix import gpu
from ci.toolkit import roots

from .device_support import edit, write_kernels

DEVICE = matrix.load().device
TURING, FP8, HOPPER = (DEVICE.declared(name) for name in ("swiglu", "fp8", "flash_sm90"))


def written(folder: Path, **texts: str) -> dict[str, Path]:
    """Write files named by keyword (two underscores for a slash, one for the dot)."""
    paths = {name: folder / name.replace("__", "/").replace("_", ".") for name in texts}
    for name, path in paths.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(texts[name], "utf-8")
    return paths


def test_own_headers_are_followed(tmp_path: Path) -> None:
    files = written(
        tmp_path,
        src__a_cu='#include "near.h"\n  #  include <deep/far.h>\n#include <cuda_fp16.h>\n#include "nowhere.h"\n',
        src__near_h='#pragma once\n#include "near.h"\n#include "deep/far.h"\n',
        include__deep__far_h="#include <deep/end.h>\n",
        include__deep__end_h="",
        include__deep__unused_h="",
    )
    found = plan.own_headers(files["src__a_cu"], [tmp_path / "include"])
    assert set(found) == {files["src__near_h"], files["include__deep__far_h"], files["include__deep__end_h"]}
    assert len(found) == 3


def test_quotes_look_beside_the_file_first_and_brackets_do_not(tmp_path: Path) -> None:
    files = written(tmp_path, src__a_cu='#include "x.h"\n', src__b_cu="#include <x.h>\n", src__x_h="", include__x_h="")
    assert plan.own_headers(files["src__a_cu"], [tmp_path / "include"]) == [files["src__x_h"]]
    assert plan.own_headers(files["src__b_cu"], [tmp_path / "include"]) == [files["include__x_h"]]


def test_the_header_of_a_header_is_looked_for_beside_that_header(tmp_path: Path) -> None:
    files = written(tmp_path, src__a_cu='#include "deep/x.h"\n', src__deep__x_h='#include "y.h"\n', src__deep__y_h="", src__y_h="")
    assert plan.own_headers(files["src__a_cu"], []) == [files["src__deep__x_h"], files["src__deep__y_h"]]


def test_a_computed_include_is_refused(tmp_path: Path) -> None:
    files = written(tmp_path, src__a_cu='#include "x.h"\n', src__x_h='#define HEADER "y.h"\n#include HEADER\n')
    with pytest.raises(CheckFailed, match=r"x\.h: error: #include HEADER: a computed include hides a dependency"):
        plan.own_headers(files["src__a_cu"], [])


def keys(folder: Path, *requested: str) -> dict[str, str]:
    return {source.name: source.fatbin_key for source in plan.sources(requested or ["90", "compute_80"], folder)}


@pytest.fixture
def src(tmp_path: Path) -> Path:
    src = write_kernels(tmp_path / "src", "first", "second")
    (src / "kernels" / "own.h").write_text("", "utf-8")
    edit(src / "kernels" / "second.cu", "#include", '#include "own.h"\n#include')
    return src


def test_keys_are_the_contents(src: Path, tmp_path: Path) -> None:
    """Neither the folder nor any other file changes them."""
    before = keys(src)
    assert before["first"] != before["second"]
    (src / "kernels" / "third.h").write_text("", "utf-8")
    assert keys(src.rename(tmp_path / "else where")) == before


@pytest.mark.parametrize(("file", "changed"), [("first.cu", {"first"}), ("own.h", {"second"}), ("shared.h", {"first", "second"})])
def test_an_edit_changes_the_keys_of_what_it_touches(src: Path, file: str, changed: set[str]) -> None:
    before = keys(src)
    (src / "kernels" / file).write_text((src / "kernels" / file).read_text("utf-8") + "// more\n", "utf-8")
    assert {name for name, key in keys(src).items() if key != before[name]} == changed


def test_a_header_that_moves_changes_the_key(src: Path) -> None:
    before = keys(src)
    (src / "kernels" / "own.h").rename(src / "own.h")
    assert {name for name, key in keys(src).items() if key != before[name]} == {"second"}


def test_options_tools_and_architectures_change_every_key(src: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = [keys(src), keys(src, "90"), keys(src, "80", "compute_80")]
    monkeypatch.setattr(plan, "OPTIONS", (*plan.OPTIONS, "--use_fast_math"))
    found.append(keys(src))
    lock = roots.lock_text(roots.find(DEVICE.root))
    monkeypatch.setattr(roots, "lock_text", lambda _: lock.replace("sha256:", "sha256:0", 1))
    found.append(keys(src))
    monkeypatch.setattr(plan, "MAKER", plan.MAKER.replace("-compress=false", "-compress=true"))
    found.append(keys(src))
    monkeypatch.setattr(plan, "PACKER", plan.PACKER.replace("LC, LP, PB = 0, 4, 4", "LC, LP, PB = 3, 0, 2"))
    found.append(keys(src))
    for name in ("first", "second"):
        assert len({each[name] for each in found}) == len(found)


def test_machine_code_is_known_by_its_ptx_too(src: Path) -> None:
    (source, _) = plan.sources(["90"], src)
    other = replace(source, fronts={"90a": "80"})
    assert source.ptx_key("80") == other.ptx_key("80")
    assert source.sass_key("90a") != other.sass_key("90a")


@pytest.mark.parametrize(
    ("targets", "architecture", "front"),
    [
        (DEVICE.default, "80", "80"),
        (DEVICE.default, "86", "80"),
        (DEVICE.default, "90a", "90a"),
        (DEVICE.default, "100", "80"),
        (TURING, "75", "75"),
        (FP8, "89", "89"),
        (FP8, "100", "89"),
        (FP8, "120", "89"),
        (FP8, "90a", "90a"),
        (HOPPER, "90a", "90a"),
        (matrix.Targets(("120",), ("80", "100")), "120", "100"),
    ],
)
def test_the_ptx_that_machine_code_is_assembled_from(targets: matrix.Targets, architecture: str, front: str) -> None:
    assert targets.front(architecture) == front


NOTHING = ((), ())


@pytest.mark.parametrize(
    ("requested", "default", "fp8", "hopper"),
    [
        (["90"], (("90a",), ()), (("90a",), ()), (("90a",), ())),
        (["90a", "90"], (("90a",), ()), (("90a",), ()), (("90a",), ())),
        (["86"], (("86",), ()), NOTHING, NOTHING),
        (["89", "80"], (("80", "89"), ()), (("89",), ()), NOTHING),
        (["120"], (("120",), ()), (("120",), ()), NOTHING),
        (["75"], NOTHING, NOTHING, NOTHING),
        (["compute_80"], ((), ("80",)), NOTHING, NOTHING),
        (["compute_89"], ((), ("89",)), ((), ("89",)), NOTHING),
        (["90", "compute_80"], (("90a",), ("80",)), (("90a",), ()), (("90a",), ())),
    ],
    ids=str,
)
def test_what_is_asked_for_is_narrowed_to_what_a_source_has(
    requested: list[str], default: tuple[tuple[str, ...], ...], fp8: tuple[tuple[str, ...], ...], hopper: tuple[tuple[str, ...], ...]
) -> None:
    found = [DEVICE.narrowed(name, requested) for name in ("decode", "fp8", "flash_sm90")]
    assert [(each.sass, each.ptx) for each in found] == [default, fp8, hopper]


def test_a_source_without_code_is_left_out() -> None:
    names = {source.name for source in plan.sources(["compute_80"])}
    assert "decode" in names
    assert not [name for name in names if name == "fp8" or name.endswith("_sm90")]


@pytest.mark.parametrize(
    ("capabilities", "sass", "ptx"),
    [((86, 90), ("80", "90a"), ()), ((103,), ("100",), ()), ((121,), ("120",), ()), ((110,), (), ("80", "89"))],
)
def test_native_is_what_this_machines_gpus_run(
    src: Path, monkeypatch: pytest.MonkeyPatch, capabilities: tuple[int, ...], sass: tuple[str, ...], ptx: tuple[str, ...]
) -> None:
    """Also of GPUs that the compilers do not know by name."""
    monkeypatch.setattr(gpu, "capabilities", lambda: capabilities)
    assert plan.sources(["native"], src)[0].targets == matrix.Targets(sass, ptx)


@pytest.mark.parametrize(
    "requested", [["hopper"], ["90", "native"], ["declared", "90"], ["sm_90"], ["90b"], ["a"], [""], ["compute_"], ["compute_x"]]
)
def test_unknown_names_are_refused_in_one_line_with_a_fix(requested: list[str]) -> None:
    with pytest.raises(EnvironmentProblem) as refused:
        plan.sources(requested)
    line, fix = str(refused.value).splitlines()
    assert line == f"unknown architectures {' '.join(requested)!r}"
    assert fix == "  fix: use 'declared', 'native', numbers such as 90, or compute_80 for PTX"


def test_a_gpu_that_nothing_is_for_is_refused(src: Path) -> None:
    with pytest.raises(EnvironmentProblem, match=r"^no kernel is for 70\n  fix: see \[device\] in ci/matrix/matrix.toml$"):
        plan.sources(["70"], src)


def test_two_sources_of_one_name_are_refused(src: Path) -> None:
    """One fatbin would be written over the other."""
    (src / "first.cu").write_text("", "utf-8")
    with pytest.raises(CheckFailed, match=r"first\.cu: another source has this name too"):
        plan.sources(["declared"], src)


def test_every_pattern_of_the_matrix_is_of_a_source() -> None:
    names = [path.stem for path in plan.SRC.rglob("*.cu")]
    assert [pattern for pattern, _ in DEVICE.special if not any(fnmatchcase(name, pattern) for name in names)] == []


def test_a_number_names_one_architecture() -> None:
    for targets in (DEVICE.default, *dict(DEVICE.special).values()):
        for names in (targets.sass, targets.ptx):
            assert len({matrix.capability(name) for name in names}) == len(names)
            assert list(names) == sorted(names, key=matrix.architecture_order)
    assert len({matrix.capability(name) for name in DEVICE.sass}) == len(DEVICE.sass)


def test_the_tests_of_the_package_know_the_matrix() -> None:
    """They run without the factory."""
    text = (matrix.REPOSITORY / "tests" / "package" / "environments.py").read_text("utf-8")
    (written,) = re.findall(r"^DECLARED = ({.*?^})", text, re.MULTILINE | re.DOTALL)
    found = {name: matrix.Targets(*targets) for name, targets in ast.literal_eval(written).items()}
    assert found == {name: DEVICE.declared(name) for name in found}
    assert set(found.values()) == {DEVICE.default, *dict(DEVICE.special).values()}


def test_a_source_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentProblem, match=r"^no source for these GPUs is called nope\n  fix: use one of .*\bflash\b"):
        device.make(tmp_path, ["80"], only=["flash", "nope"])
