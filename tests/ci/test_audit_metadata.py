"""The audit's checks of METADATA and WHEEL: each passes the good wheel and fires on a bad one."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ci import __main__ as cli
from ci.audit import expected
from ci.audit.checks import SAME_METADATA
from ci.errors import EnvironmentProblem
from ci.matrix import REPOSITORY

from .audit_support import (
    CU13,
    MATRIX,
    METADATA,
    NAMES,
    PROJECT,
    VERSION,
    WHEEL,
    Files,
    World,
    member,
    replaced,
    said,
    wheel_file,
    write_wheel,
)

MLX = f"Requires-Dist: mlx=={MATRIX.mlx}\n"
TAG = "cp310-abi3-manylinux_2_28_x86_64"


NEEDED = {name: PROJECT[name] for name in expected.REQUIRED}


def test_optional_keys_of_a_project() -> None:
    text = expected.metadata(NEEDED, VERSION)
    assert not re.search(r"^(Keywords|Classifier|Requires-Dist|Provides-Extra):", text, re.MULTILINE)
    assert "\nKeywords: one,two\n" in expected.metadata({**NEEDED, "keywords": ["one", "two"]}, VERSION)


@pytest.mark.parametrize(
    ("project", "message"),
    [
        ({**NEEDED, "scripts": {}, "authors": []}, r"does not support authors, scripts in \[project\]\n  fix: remove it"),
        ({name: NEEDED[name] for name in NEEDED if name != "license"}, r"\[project\] lacks license, which the audit needs\n  fix: add it"),
    ],
)
def test_keys_that_the_audit_cannot_compare(project: dict[str, Any], message: str) -> None:
    with pytest.raises(EnvironmentProblem, match=message):
        expected.metadata(project, VERSION)


def has(line: str) -> str:
    return f"has the line {line!r}, expected no such line there"


def lacks(line: str) -> str:
    return f"lacks the line {line!r}, expected it there"


@pytest.mark.parametrize(
    ("old", "new", "messages"),
    [
        ("2_28", "2_35", [has(f"Tag: {TAG.replace('2_28', '2_35')}"), lacks(f"Tag: {TAG}")]),
        ("Tag: ", "Tag: cp39-abi3-any\nTag: ", [has("Tag: cp39-abi3-any")]),
        ("Tag:", "Build: 1\nTag:", [has("Build: 1")]),
        ("Purelib: false", "Purelib: true", [has("Root-Is-Purelib: true"), lacks("Root-Is-Purelib: false")]),
        ("Root", "root-is-purelib: true\nRoot", [has("root-is-purelib: true")]),
        ("Root-Is-Purelib: false\n", "", [lacks("Root-Is-Purelib: false")]),
        ("Wheel-Version: 1.0", "Wheel-Version: 1.evil", [has("Wheel-Version: 1.evil"), lacks("Wheel-Version: 1.0")]),
        ("Wheel-Version", "\nWheel-Version", [has("")]),
        ("false", "false ", [has("Root-Is-Purelib: false "), lacks("Root-Is-Purelib: false")]),
        ("scikit-build-core 1", "evil 1", [has("Generator: evil 1.1.2"), lacks("Generator: scikit-build-core VERSION")]),
    ],
)
def test_wheel_file(told: Callable[..., list[str]], old: str, new: str, messages: list[str]) -> None:
    lines = told(replaced(WHEEL, old, new), ("tags",))
    assert sorted(lines) == sorted(f"{WHEEL}: tags: {message}" for message in messages)


def test_the_order_of_tags_is_the_backends(audited: Callable[..., set[str]]) -> None:
    name = NAMES["linux"].replace("2_28_x86_64", "2_28_x86_64.manylinux_2_31_x86_64")
    lines = wheel_file(name).splitlines(keepends=True)
    for text in (lines, [*lines[:3], lines[4], lines[3], *lines[5:]]):
        assert audited(lambda files, text=text: files.update({WHEEL: "".join(text).encode()}), name=name, checks=("tags",)) == set()


@pytest.mark.usefixtures("locked_roots")
def test_tag_of_one_python(tmp_path: Path, files: Files) -> None:
    name = NAMES["linux"].replace("cp310-abi3", "cp312-cp312")
    lines = said(tmp_path / name, files, lambda files: files.update({WHEEL: wheel_file(name).encode()}), ("tags",))
    assert lines == ["tags: has the tag cp312-cp312, expected cp310-abi3 or cp315-abi3t"]


def test_versions(tmp_path: Path, files: Files, world: World) -> None:
    def change(files: Files) -> None:
        replaced(METADATA, f"\nVersion: {VERSION}", "\nVersion: 9\nVersion: 8")(files)
        files["mlx_cuda/_version.py"] = b""
        files[member(world, CU13)] += b"mlx-cuda==7\0"

    versions = {METADATA: "9, 8", "mlx_cuda/_version.py": "none", member(world, CU13): f"{VERSION}, 7"}
    lines = said(tmp_path / NAMES["linux"], files, change, ("versions",))
    assert lines == [f"{name}: versions: has the version {each}, expected the file name's {VERSION}" for name, each in versions.items()]


def test_other_names(tmp_path: Path, files: Files) -> None:
    name = NAMES["linux"].replace("-cp310", "-1-cp310")
    expected = f"mlx_cuda-{VERSION}-PYTHON-ABI-PLATFORM.whl: another spelling, or a build number, which goes before others"
    assert said(tmp_path / name, files, lambda _: None, ("versions",)) == [f"versions: is not named {expected}"]
    lines = said(tmp_path / NAMES["linux"].replace(VERSION, "0.99.0.1"), files, lambda _: None, ("versions",))
    assert lines[-1] == f"versions: has the version 0.99.0.1, expected that of MLX, {MATRIX.mlx}, and a number"


@pytest.mark.parametrize(
    ("old", "new", "messages"),
    [
        ("Name: mlx-cuda\n", "Name: mlx-kuda\n", [has("Name: mlx-kuda"), lacks("Name: mlx-cuda")]),
        ("Requires-Python: >=3.10\n", "", [lacks("Requires-Python: >=3.10")]),
        ("License-File: LICENSE\n", "", [lacks("License-File: LICENSE")]),
        (MLX, MLX.replace("\n", "; sys_platform == 'linux'\n"), [has(f"{MLX[:-1]}; sys_platform == 'linux'"), lacks(MLX[:-1])]),
        (MLX, MLX + MLX, [has(MLX[:-1])]),
        (MLX, f"{MLX}Requires-Dist: A_b @ https://x\n", [has("Requires-Dist: A_b @ https://x")]),
        ("Provides-Extra: cu13", "Provides-Extra: cuda13", [has("Provides-Extra: cuda13"), lacks("Provides-Extra: cu13")]),
        ("# mlx-cuda\n", "# mlx-cuda\nevil\n", [has("evil")]),
        ("# mlx-cuda\n", "# mlx-cuda\r\n", [has("# mlx-cuda\r"), lacks("# mlx-cuda")]),
    ],
)
def test_metadata(told: Callable[..., list[str]], old: str, new: str, messages: list[str]) -> None:
    lines = told(replaced(METADATA, old, new), ("metadata",))
    assert sorted(lines) == sorted(f"{METADATA}: metadata: {message}" for message in messages)


def test_the_backend_writes_what_is_expected(tmp_path: Path) -> None:
    """scikit-build-core's own METADATA of this checkout."""
    from packaging.metadata import Metadata

    script = "import sys; from scikit_build_core.build import prepare_metadata_for_build_wheel as make; make(sys.argv[1])"
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], cwd=REPOSITORY, check=True, capture_output=True)
    (written,) = tmp_path.glob("*.dist-info/METADATA")
    assert written.read_text("utf-8") == expected.metadata(PROJECT, VERSION)
    Metadata.from_email(written.read_bytes(), validate=True)


@pytest.mark.usefixtures("locked_roots")
def test_same_metadata(tmp_path: Path, files: Files, capsys: pytest.CaptureFixture[str]) -> None:
    one = write_wheel(tmp_path / NAMES["linux"], files)
    changed = dict(files)
    name = NAMES["linux"].replace("x86_64", "aarch64")
    replaced(METADATA, MLX, "")(changed)
    replaced(METADATA, "Provides-Extra: cpu", "Provides-Extra: gpu")(changed)
    replaced(METADATA, "Requires-Python: >=3.10", "Requires-Python: >=3.9")(changed)
    other = write_wheel(tmp_path / name, changed)
    assert cli.main(["audit", str(one), str(other)]) == 1
    differences = [
        f"lacks {MLX.strip()}",
        *("lacks Provides-Extra: cpu", "has Provides-Extra: gpu"),
        *("lacks Requires-Python: >=3.10", "has Requires-Python: >=3.9"),
    ]
    expected = [f"{name}: {METADATA}: {SAME_METADATA}: {each}, expected the same as in {one.name}" for each in differences]
    assert [line for line in capsys.readouterr().out.splitlines() if SAME_METADATA in line] == expected
