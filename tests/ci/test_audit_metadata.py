"""The audit's checks of METADATA and WHEEL: each passes the good wheel and fires on a bad one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from packaging.requirements import Requirement

from ci import __main__ as cli
from ci.audit.checks import SAME_METADATA

from .audit_support import (
    CU12,
    CU13,
    DIST_INFO,
    MATRIX,
    METADATA,
    NAMES,
    PROJECT,
    VERSION,
    WHEEL,
    Change,
    Files,
    World,
    member,
    replaced,
    said,
    wheel_file,
    write_wheel,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

MLX = f"Requires-Dist: mlx=={MATRIX.mlx}\n"
TAG = "cp310-abi3-manylinux_2_28_x86_64"


@pytest.mark.usefixtures("locked_roots")
@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("2_28", "2_35", f"has tag cp310-abi3-manylinux_2_35_x86_64, expected the file name's {TAG}"),
        ("Tag: ", "Tag: cp39-abi3-any\nTag: ", f"has tag {TAG}, cp39-abi3-any, expected the file name's {TAG}"),
        ("Tag:", "Gat:", f"has tag none, expected the file name's {TAG}"),
        ("Tag:", "Build: 1\nTag:", "has a build number, which goes before other wheels of this version, expected none"),
        ("Purelib: false", "Purelib: true", "has Root-Is-Purelib: true, expected false: the wheel holds binaries"),
        ("Root", "Root-Is-Purelib: true\nRoot", "has Root-Is-Purelib: true, false, expected false: the wheel holds binaries"),
        ("Root-Is-Purelib: false\n", "", "has Root-Is-Purelib: nothing, expected false: the wheel holds binaries"),
        ("Wheel-Version: 1.0", "Wheel-Version: 2.0", "has Wheel-Version: 2.0, expected 1.0"),
        ("Wheel", "Wheel-Version: 10\nWheel", "has Wheel-Version: 10, 1.0, expected 1.0"),
        ("Wheel-Version: 1.0\n", "", "has Wheel-Version: nothing, expected 1.0"),
    ],
)
def test_wheel_file(tmp_path: Path, files: Files, old: str, new: str, message: str) -> None:
    assert said(tmp_path / NAMES["linux"], files, replaced(WHEEL, old, new)) == [f"{WHEEL}: tags: {message}"]


@pytest.mark.usefixtures("locked_roots")
def test_tag_of_one_python(tmp_path: Path, files: Files) -> None:
    name = NAMES["linux"].replace("cp310-abi3", "cp312-cp312")
    lines = said(tmp_path / name, files, lambda files: files.update({WHEEL: wheel_file(name).encode()}))
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


INVALID = "is not valid core metadata: "


@pytest.mark.usefixtures("locked_roots")
@pytest.mark.parametrize(
    ("old", "new", "messages"),
    [
        ("Name: mlx-cuda\n", "Name: mlx-kuda\n", ["has Name: mlx-kuda, expected mlx-cuda"]),
        ("Name: mlx-cuda\n", "", [f"{INVALID}name: 'name' is a required field", "has Name: None, expected mlx-cuda"]),
        ("Requires-Python: >=3.10", "Requires-Python: >=3.9", ["has Requires-Python: >=3.9, expected >=3.10"]),
        (
            "Requires-Python: >=3.10",
            "Requires-Python: 3.10 or so",
            [
                f"{INVALID}requires-python: '3.10 or so' is invalid for 'requires-python'",
                "has Requires-Python: 3.10 or so, expected >=3.10",
            ],
        ),
        ("Requires-Python: >=3.10\n", "", ["has Requires-Python: None, expected >=3.10"]),
        ("Summary: ", "Keywords: ", ["has no Summary"]),
        ("Summary: ", "Yrammus: ", [f"{INVALID}yrammus: unrecognized field: 'yrammus'", "has no Summary"]),
        ("# mlx-cuda", "", ["has no description, expected the README"]),
        (
            "# mlx-cuda",
            "[how](docs/how.md)",
            ["has a description that links to docs/how.md, which leads nowhere on an index page: expected a whole URL"],
        ),
        (
            "License-Expression: MIT",
            "License-Expression: as you like",
            [f"{INVALID}license-expression: 'as you like' is invalid for 'license-expression'"],
        ),
        (
            "Metadata-Version: 2.4",
            "Metadata-Version: 2.1",
            [f"{INVALID}license-{each}: license-{each} introduced in metadata version 2.4, not 2.1" for each in ("expression", "file")],
        ),
    ],
)
def test_metadata(tmp_path: Path, files: Files, old: str, new: str, messages: list[str]) -> None:
    lines = said(tmp_path / NAMES["linux"], files, replaced(METADATA, old, new))
    assert sorted(lines) == sorted(f"{METADATA}: metadata: {message}" for message in messages)


PLAIN, CUDA_12 = (", ".join(sorted(str(Requirement(each)) for each in some)) for some in (PROJECT["dependencies"], CU12.requires))
INVALID_LINE = (
    "has an invalid requirement 'mlx = 0': Expected semicolon (after name with no version specifier) or end\\n    mlx = 0\\n        ^"
)


@pytest.mark.parametrize(
    ("old", "new", "messages"),
    [
        (
            '; extra == "cpu"',
            '; extra == "cpu" and platform_system == "Linux"',
            [
                """has the marker 'extra == "cpu" and platform_system == "Linux"' on mlx-cpu, expected none but the extra""",
                f"the requirements: has mlx-cpu=={MATRIX.mlx}, expected {PLAIN}",
                f"extra cpu: lacks mlx-cpu=={MATRIX.mlx}",
            ],
        ),
        (
            MLX,
            f"{MLX[:-1]}; sys_platform == 'linux'\n",
            ["""has the marker 'sys_platform == "linux"' on mlx, expected none but the extra"""],
        ),
        (
            MLX,
            MLX.replace("==", ">="),
            [f"the requirements: has mlx>={MATRIX.mlx}, expected {PLAIN}", f"the requirements: lacks mlx=={MATRIX.mlx}"],
        ),
        (MLX, "", [f"the requirements: lacks mlx=={MATRIX.mlx}"]),
        (MLX, "Requires-Dist: mlx = 0\n", [INVALID_LINE, f"the requirements: lacks mlx=={MATRIX.mlx}"]),
        (MLX, f"{MLX}Requires-Dist: a[c,b]\n", [f"the requirements: has a[b,c], expected {PLAIN}"]),
        (MLX, f"{MLX}Requires-Dist: A_b @ https://x\n", [f"the requirements: has a-b @ https://x, expected {PLAIN}"]),
        ("Provides-Extra: cu13", "Provides-Extra: cuda13", ["offers the extra cuda13, expected only cpu, cu12, cu13"]),
        (f'Provides-Extra: cpu\nRequires-Dist: mlx-cpu=={MATRIX.mlx}; extra == "cpu"\n', "", ["lacks the extra cpu"]),
        (
            f"mlx-cuda-12=={MATRIX.mlx}",
            "mlx-cuda-12==0.32.3",
            [
                f"extra cu12: has mlx-cuda-12==0.32.3, expected {CUDA_12}",
                f"extra cu12: lacks mlx-cuda-12=={MATRIX.mlx}",
            ],
        ),
    ],
)
def test_requirements(tmp_path: Path, files: Files, old: str, new: str, messages: list[str]) -> None:
    lines = said(tmp_path / NAMES["linux"], files, replaced(METADATA, old, new), ("requirements",))
    assert lines == [f"{METADATA}: requirements: {message}" for message in messages]


def test_an_unreadable_requirement(audited: Callable[..., set[str]]) -> None:
    assert audited(replaced(METADATA, MLX, MLX.replace("==", " = "))) == {"metadata", "requirements"}


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (
            lambda files: files.pop(f"{DIST_INFO}/licenses/LICENSE"),
            f"{DIST_INFO}/licenses/LICENSE: licence: is missing or empty, but METADATA names it",
        ),
        (
            replaced(METADATA, "License-File: ", "Classifier: "),
            f"{METADATA}: licence: has no License-File, expected the licence's text in the wheel",
        ),
        (
            replaced(METADATA, "License-Expression: ", "Keywords: "),
            f"{METADATA}: licence: names no licence, expected License-Expression",
        ),
    ],
    ids=["not in the wheel", "no file", "no name"],
)
def test_licence(tmp_path: Path, files: Files, change: Change, line: str) -> None:
    assert said(tmp_path / NAMES["linux"], files, change, ("licence",)) == [line]


@pytest.mark.usefixtures("locked_roots", "without_abi3audit")
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
