"""The audit's checks of what lies in a wheel and of its metadata: each passes the good wheel and fires on a bad one; and the command."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from packaging.requirements import Requirement

from ci import audit
from ci.audit import audit_wheel, describe
from ci.audit.binary import Binary
from ci.audit.checks import ACROSS, CHECKS, SAME_METADATA, binaries, registry
from ci.audit.facts import highest
from ci.audit.wheel import read
from ci.errors import EnvironmentProblem
from ci.matrix import REPOSITORY

from .audit_support import (
    CU12,
    CU13,
    DIST_INFO,
    MATRIX,
    METADATA,
    NAMES,
    PROJECT,
    QUICK,
    RECORD,
    VERSION,
    WHEEL,
    Change,
    Files,
    World,
    device_code,
    digest,
    member,
    replaced,
    said,
    wheel_file,
    with_device,
    with_sbom,
    write_wheel,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

MLX = f"Requires-Dist: mlx=={MATRIX.mlx}\n"


def test_good_wheel(audited: Callable[..., set[str]]) -> None:
    assert audited(checks=tuple(CHECKS)) == set()


# ------------------------------------------------------------------------------------------------------------ what lies in the wheel


def library(world: World, name: str, soname: str = "") -> bytes:
    return world.compile(world.folder / "made" / name, "int f(void) { return 1; }", f"-Wl,-soname,{soname or name}").read_bytes()


@pytest.mark.usefixtures("locked_roots")
def test_a_missing_module(tmp_path: Path, files: Files, world: World) -> None:
    lines = said(tmp_path / NAMES["linux"], files, lambda files: files.pop(member(world, CU13)))
    assert lines == ["mlx_cuda/_cu13.*: modules: is missing, expected one native module of this name"]


@pytest.mark.usefixtures("locked_roots")
def test_an_unexpected_binary(tmp_path: Path, files: Files, world: World) -> None:
    helper = library(world, "helper.so")
    lines = said(tmp_path / NAMES["linux"], files, lambda files: files.update({"mlx_cuda/helper.so": helper}))
    assert lines == ["mlx_cuda/helper.so: modules: is an unexpected binary, expected only mlx_cuda/_cu12.*, mlx_cuda/_cu13.*"]


@pytest.mark.parametrize(
    ("name", "soname"),
    [("libcudart-1a2b3c4d.so.12", ""), ("libcudnn_graph.so.9", ""), ("libmlx.so", ""), ("libharmless.so", "libcublasLt.so.12")],
)
def test_nvidia_inside(audited: Callable[..., set[str]], world: World, name: str, soname: str) -> None:
    # A name that the modules need is also missing from their RPATH then.
    assert audited(lambda files: files.update({f"mlx_cuda.libs/{name}": library(world, name, soname)})) - {"rpath"} == {"nvidia-inside"}


def test_a_static_library_inside(audited: Callable[..., set[str]]) -> None:
    assert audited(lambda files: files.update({"mlx_cuda/lib/libcudart_static.a": b"!<arch>\n"})) == {"members", "nvidia-inside"}


def test_libcurl_is_not_nvidias(audited: Callable[..., set[str]], world: World) -> None:
    assert audited(lambda files: files.update({"mlx_cuda.libs/libcurl.so.4": library(world, "libcurl.so.4")})) == set()


@pytest.mark.parametrize("name", ["libcuda.so.1", "libcuda-0123abcd.so.580.65", "libnvidia-ml.so.1"])
def test_driver_inside(audited: Callable[..., set[str]], world: World, name: str) -> None:
    assert audited(lambda files: files.update({f"mlx_cuda.libs/{name}": library(world, name)})) - {"rpath"} == {"driver-inside"}


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (
            lambda files: files.update({"evil.pth": b""}),
            "evil.pth: members: is neither of the package in this checkout nor made by its build, expected no other file",
        ),
        (lambda files: files.pop("mlx_cuda/nn.py"), "mlx_cuda/nn.py: sources: is missing, expected the file of this checkout"),
        (
            lambda files: files.update({"mlx_cuda/nn.py": b""}),
            "mlx_cuda/nn.py: sources: differs from this checkout, expected the same bytes: a wheel is audited where it was built, "
            "or at its tag",
        ),
        (
            lambda files: files.update({"mlx_cuda.libs/libcudart.so.12": b""}),
            "mlx_cuda.libs/libcudart.so.12: nvidia-inside: is a library of another package, expected it outside the wheel: "
            "its provider is a requirement of the extra",
        ),
        (
            lambda files: files.update({"mlx_cuda.libs/libcuda.so.1": b""}),
            "mlx_cuda.libs/libcuda.so.1: driver-inside: is the GPU driver's own library, which must come from the driver installed on "
            "the machine, expected it outside the wheel",
        ),
    ],
    ids=["another file", "missing", "changed", "of NVIDIA", "of the driver"],
)
def test_what_is_said_of_files(tmp_path: Path, files: Files, change: Change, line: str) -> None:
    check = line.split(": ")[1]
    assert said(tmp_path / NAMES["linux"], files, change, (check,)) == [line]


def record_of(files: Files) -> list[str]:
    return [*(f"{name},{digest(data)},{len(data)}" for name, data in files.items()), f"{RECORD},,"]


FIRST = "mlx_cuda/__init__.py"
DIGEST = digest((REPOSITORY / "python" / FIRST).read_bytes())
BYTES = len((REPOSITORY / "python" / FIRST).read_bytes())


@pytest.mark.usefixtures("locked_roots")
@pytest.mark.parametrize(
    ("spoil", "expected"),
    [
        (lambda lines: lines[1:], [f"{FIRST}: record: is not in RECORD"]),
        (lambda lines: [*lines, "mlx_cuda/ghost.py,sha256=x,1"], ["mlx_cuda/ghost.py: record: is in RECORD but not in the archive"]),
        (lambda lines: [*lines, lines[0]], [f"{FIRST}: record: is 2 times in RECORD, expected once"]),
        (lambda lines: [f"{FIRST},sha256=x,{BYTES}", *lines[1:]], [f"{FIRST}: record: RECORD has sha256=x, expected {DIGEST}"]),
        (lambda lines: [f"{FIRST},{DIGEST},999", *lines[1:]], [f"{FIRST}: record: RECORD has size 999, expected {BYTES}"]),
        (
            lambda lines: [f"{FIRST},,", *lines[1:]],
            [f"{FIRST}: record: RECORD has no hash, expected {DIGEST}", f"{FIRST}: record: RECORD has size none, expected {BYTES}"],
        ),
        (
            lambda lines: [f"{FIRST},{DIGEST}", *lines[1:]],
            [f"{RECORD}: record: has a line of 2 fields, expected path, hash and size: {FIRST},{DIGEST}"],
        ),
        (
            lambda lines: lines[:-1],
            [f"{RECORD}: record: is not in RECORD", f"{RECORD}: record: does not list itself without hash and size"],
        ),
        (lambda lines: [*lines, '"mlx_cuda'], [f"{RECORD}: record: is not readable: unexpected end of data"]),
    ],
    ids=["unlisted", "ghost", "twice", "hash", "size", "no hash", "fields", "itself", "quote"],
)
def test_record(tmp_path: Path, files: Files, spoil: Callable[[list[str]], list[str]], expected: list[str]) -> None:
    def change(files: Files) -> None:
        files[RECORD] = "\n".join(spoil(record_of(files))).encode()

    assert said(tmp_path / NAMES["linux"], files, change) == expected


def test_size(audited: Callable[..., set[str]]) -> None:
    noise = os.urandom((MATRIX.size_budget_mib + 1) << 20)
    assert audited(lambda files: files.update({"mlx_cuda/py.typed": noise})) == {"size", "sources"}


# ------------------------------------------------------------------------------------------------------------ METADATA and WHEEL


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
    assert main("audit", str(one), str(other)) == 1
    differences = [
        f"lacks {MLX.strip()}",
        *("lacks Provides-Extra: cpu", "has Provides-Extra: gpu"),
        *("lacks Requires-Python: >=3.10", "has Requires-Python: >=3.9"),
    ]
    expected = [f"{name}: {METADATA}: {SAME_METADATA}: {each}, expected the same as in {one.name}" for each in differences]
    assert [line for line in capsys.readouterr().out.splitlines() if SAME_METADATA in line] == expected


# ------------------------------------------------------------------------------------------------------------ the command


@pytest.fixture
def without_abi3audit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(binaries, "_abi3audit", lambda *_: [])


def main(*arguments: str) -> int:
    from ci.__main__ import main as command

    return command(arguments)


@pytest.mark.usefixtures("locked_roots")
def test_command_on_a_good_wheel(tmp_path: Path, files: Files, capsys: pytest.CaptureFixture[str]) -> None:
    path = with_sbom(write_wheel(tmp_path / NAMES["linux"], files))
    assert main("audit", str(path)) == 0
    assert capsys.readouterr().out == f"{path.name}: ok\n"


@pytest.mark.usefixtures("locked_roots", "without_abi3audit")
def test_command_prints_a_line_per_violation(tmp_path: Path, files: Files, capsys: pytest.CaptureFixture[str]) -> None:
    changed = {**files, RECORD: b"\n".join([*(line.encode() for line in record_of(files)), b"ghost.py,sha256=x,1"])}
    path = with_sbom(write_wheel(tmp_path / NAMES["linux"], changed))
    assert main("audit", str(path)) == 1
    assert capsys.readouterr().out == f"{path.name}: ghost.py: record: is in RECORD but not in the archive\n"


@pytest.mark.usefixtures("locked_roots", "without_abi3audit")
def test_command_json(tmp_path: Path, files: Files, capsys: pytest.CaptureFixture[str]) -> None:
    path = with_sbom(write_wheel(tmp_path / NAMES["linux"], files))
    assert main("audit", "--json", str(path)) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["violations"] == []
    assert [module["member"] for module in answer["wheels"][0]["modules"]] == ["mlx_cuda/_cu12.abi3.so", "mlx_cuda/_cu13.abi3.so"]


@pytest.mark.usefixtures("locked_roots", "without_abi3audit")
def test_a_developers_build(tmp_path: Path, files: Files, world: World, capsys: pytest.CaptureFixture[str]) -> None:
    """One module and one GPU are wrong by the whole matrix, and right by what was asked for."""
    changed = dict(files)
    del changed[member(world, CU12)]
    with_device(changed, device_code(["90"]))
    path = str(with_sbom(write_wheel(tmp_path / NAMES["linux"], changed)))
    assert main("audit", path, "--cuda", "13.0", "--arch", "90") == 0
    assert main("audit", path, "--cuda", "13.0", "--arch", "90a") == 0
    assert main("audit", path, "--cuda", "13.0", "--arch", "90,compute_80") == 1
    assert main("audit", path, "--cuda", "13.0") == 1
    assert main("audit", path) == 1
    assert ": modules: is missing" in capsys.readouterr().out
    assert main("audit", path, "--cuda", "13.0", "--arch", "hopper") == 2
    assert "unknown architectures 'hopper'\n  cure: use 'declared', 'native', numbers such as 90" in capsys.readouterr().err


AGAIN = "\n  cure: download or build it again, and look at its first bytes"


@pytest.mark.parametrize(
    ("name", "contents", "message"),
    [
        ("absent-1-py3-none-any.whl", None, "cannot read {path}: No such file or directory\n  cure: check the path"),
        ("broken-1-py3-none-any.whl", b"PK\3\4 but no more", f"{{path}} is not a readable wheel: File is not a zip file{AGAIN}"),
        (
            "x.whl",
            b"PK",
            "Invalid wheel filename (wrong number of parts): 'x'\n  cure: give the path of a .whl file that still has its own name",
        ),
    ],
)
def test_unreadable_input(tmp_path: Path, name: str, contents: bytes | None, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    if contents:
        (tmp_path / name).write_bytes(contents)
    assert main("audit", str(tmp_path / name)) == 2
    assert capsys.readouterr().err == f"error: {message.format(path=tmp_path / name)}\n"


def test_a_damaged_binary_is_unreadable_input(tmp_path: Path, files: Files, world: World) -> None:
    name = member(world, CU13)
    with pytest.raises(EnvironmentProblem, match=f"^{NAMES['linux']}: {name}: not readable as ELF: ") as refusal:
        audit_wheel(write_wheel(tmp_path / NAMES["linux"], {**files, name: files[name][:200]}), checks=QUICK)
    assert refusal.value.cure == "build or fetch the wheel again: it is damaged"


@pytest.mark.parametrize(
    ("platform", "arguments", "message"),
    [
        ("manylinux_2_28_x86_64", {"cuda": ["13.0", "11.8", "11.2"]}, "unknown CUDA version 11.2, 11.8\n  cure: use 12.8 or 13.0"),
        ("manylinux_2_28_x86_64", {"arch": ["nine"]}, "unknown architectures 'nine'\n  cure: use "),
        (
            "macosx_14_0_arm64",
            {},
            f"{{name}}: nothing is declared for the platform macosx_14_0_arm64\n  cure: give a wheel for {', '.join(MATRIX.platforms)}",
        ),
    ],
)
def test_unknown_names(tmp_path: Path, files: Files, platform: str, arguments: dict[str, list[str]], message: str) -> None:
    path = write_wheel(tmp_path / NAMES["linux"].replace("manylinux_2_28_x86_64", platform), files)
    with pytest.raises(EnvironmentProblem) as refusal:
        audit_wheel(path, **arguments)
    assert str(refusal.value).startswith(message.format(name=path.name))


def test_describe(tmp_path: Path, files: Files, world: World) -> None:
    path = write_wheel(tmp_path / NAMES["linux"], files)
    facts = describe(path)
    assert (facts.file, facts.version, facts.size) == (path.name, VERSION, path.stat().st_size)
    assert facts.tags == ("cp310-abi3-manylinux_2_28_x86_64",)
    first = facts.modules[0]
    assert (first.member, first.size, first.glibc, first.glibcxx) == (member(world, CU12), len(files[member(world, CU12)]), "2.2.5", None)
    assert first.rpath == CU12.rpath()
    assert "libcublasLt.so.12" in first.needed


def test_the_highest_version_of_symbols() -> None:
    needed = {
        "libc.so.6": frozenset({"GLIBC_2.9", "GLIBC_2.17", "GLIBC_PRIVATE"}),
        "libm.so.6": frozenset({"GLIBC_2.10", "GLIBCXX_3.4.30"}),
    }
    binary = Binary(format="elf", machine="x86_64", soname=None, needed=tuple(needed), versions=needed)
    assert [highest(binary, family) for family in ("GLIBC_", "GLIBCXX_", "CXXABI_")] == ["2.17", "3.4.30", None]


def test_no_wheel_without_its_folder(tmp_path: Path, files: Files) -> None:
    for name in (METADATA, WHEEL, f"{DIST_INFO}/licenses/LICENSE"):
        files = {key: value for key, value in files.items() if key != name}
    path = write_wheel(tmp_path / NAMES["linux"], {**files, "other-1.dist-info/METADATA": b""})
    with pytest.raises(EnvironmentProblem, match=r"2 \.dist-info folders"):
        read(path)


def test_a_new_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """A function gets its name in the list from the decorator, and stays what it is."""

    def of_two_words(*_: object) -> Iterator[tuple[Any, ...]]:
        yield from ()

    for decorator, listed in ((registry.check, "CHECKS"), (registry.across, "ACROSS")):
        found: dict[str, object] = {}
        monkeypatch.setattr(registry, listed, found)
        assert decorator(of_two_words) is of_two_words
        assert found == {"of-two-words": of_two_words}


def test_every_check_is_documented() -> None:
    text = (REPOSITORY / "docs" / "audit.md").read_text("utf-8")
    documented = re.findall(r"^\| `([a-z0-9-]+)` \|", text, re.MULTILINE)
    assert documented == [*CHECKS, *ACROSS]


def test_the_command_line_imports_nothing_heavy() -> None:
    """`toolkit path` runs in the build environment, which has none of the audit's libraries."""
    source = Path(audit.__file__).read_text("utf-8")
    top = re.findall(r"^(?:from|import) (\S+)", source, re.MULTILINE)
    assert set(top) <= {"__future__", "json", "dataclasses", "itertools", "pathlib", "typing"}
