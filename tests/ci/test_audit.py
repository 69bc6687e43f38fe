"""The audit's checks of what lies in a wheel: each passes the good wheel and fires on a bad one; and the command."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import astuple
from pathlib import Path
from typing import Any

import pytest

from ci import audit
from ci.audit import audit_wheel, describe
from ci.audit.checks import ACROSS, CHECKS, FIXES, registry
from ci.errors import EnvironmentProblem
from ci.files import record_digest
from ci.matrix import REPOSITORY
from ci.trial import load
from ci.wheelfile.binary import Binary
from ci.wheelfile.facts import highest, newest
from ci.wheelfile.wheel import read

from .audit_support import (
    CU12,
    CU13,
    DIST_INFO,
    MATRIX,
    METADATA,
    NAMES,
    RECORD,
    VERSION,
    WHEEL,
    Change,
    Files,
    World,
    device_code,
    member,
    said,
    with_device,
    with_sbom,
    write_wheel,
)


def test_good_wheel(audited: Callable[..., set[str]]) -> None:
    assert audited(checks=tuple(CHECKS)) == set()


# ------------------------------------------------------------------------------------------------------------ what lies in the wheel


def library(world: World, name: str, soname: str = "") -> bytes:
    return world.compile(world.folder / "made" / name, "int f(void) { return 1; }", f"-Wl,-soname,{soname or name}").read_bytes()


def test_a_missing_module(told: Callable[..., list[str]], world: World) -> None:
    lines = told(lambda files: files.pop(member(world, CU13)))
    assert lines == ["mlx_cuda/_cu13.*: modules: is missing, expected one native module of this name"]


def test_an_unexpected_binary(told: Callable[..., list[str]], world: World) -> None:
    helper = library(world, "helper.so")
    lines = told(lambda files: files.update({"mlx_cuda/helper.so": helper}))
    assert lines == ["mlx_cuda/helper.so: modules: is an unexpected binary, expected only mlx_cuda/_cu12.*, mlx_cuda/_cu13.*"]


@pytest.mark.parametrize(
    ("name", "soname"),
    [("libcudart-1a2b3c4d.so.12", ""), ("libcudnn_graph.so.9", ""), ("libmlx.so", ""), ("libharmless.so", "libcublasLt.so.12")],
)
def test_nvidia_inside(audited: Callable[..., set[str]], world: World, name: str, soname: str) -> None:
    # A name that the modules need is also missing from their RPATH then.
    assert audited(lambda files: files.update({f"mlx_cuda.libs/{name}": library(world, name, soname)})) - {"loader", "rpath"} == {
        "modules",
        "nvidia-inside",
    }


def test_a_static_library_inside(audited: Callable[..., set[str]]) -> None:
    assert audited(lambda files: files.update({"mlx_cuda/lib/libcudart_static.a": b"!<arch>\n"})) == {"members", "nvidia-inside"}


def test_libcurl_is_not_nvidias(audited: Callable[..., set[str]], world: World) -> None:
    assert audited(lambda files: files.update({"mlx_cuda.libs/libcurl.so.4": library(world, "libcurl.so.4")})) == {"modules"}


@pytest.mark.parametrize("name", ["libcuda.so.1", "libcuda-0123abcd.so.580.65", "libnvidia-ml.so.1"])
def test_driver_inside(audited: Callable[..., set[str]], world: World, name: str) -> None:
    assert audited(lambda files: files.update({f"mlx_cuda.libs/{name}": library(world, name)})) - {"rpath"} == {"driver-inside", "modules"}


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
    return [*(f"{name},{record_digest(data)},{len(data)}" for name, data in files.items()), f"{RECORD},,"]


FIRST = "mlx_cuda/__init__.py"
DIGEST = record_digest((REPOSITORY / "python" / FIRST).read_bytes())
BYTES = len((REPOSITORY / "python" / FIRST).read_bytes())


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
def test_record(told: Callable[..., list[str]], spoil: Callable[[list[str]], list[str]], expected: list[str]) -> None:
    def change(files: Files) -> None:
        files[RECORD] = "\n".join([*spoil(record_of(files)), ""]).encode()

    assert told(change) == expected


def test_size(audited: Callable[..., set[str]]) -> None:
    noise = os.urandom((MATRIX.size_budget_mib + 1) << 20)
    assert audited(lambda files: files.update({"mlx_cuda/py.typed": noise})) == {"size", "sources"}


# ------------------------------------------------------------------------------------------------------------ the command


def main(*arguments: str) -> int:
    from ci.__main__ import main as command

    return command(arguments)


@pytest.mark.usefixtures("locked_roots")
def test_command_on_a_good_wheel(tmp_path: Path, files: Files, capsys: pytest.CaptureFixture[str]) -> None:
    path = with_sbom(write_wheel(tmp_path / NAMES["linux"], files))
    assert main("audit", str(path)) == 0
    assert capsys.readouterr().out == f"{path.name}: ok\n"


@pytest.mark.usefixtures("locked_roots")
def test_command_prints_a_line_per_violation(tmp_path: Path, files: Files, capsys: pytest.CaptureFixture[str]) -> None:
    changed = {**files, RECORD: b"\n".join([*(line.encode() for line in record_of(files)), b"ghost.py,sha256=x,1", b""])}
    path = with_sbom(write_wheel(tmp_path / NAMES["linux"], changed))
    assert main("audit", str(path)) == 1
    line = f"{path.name}: ghost.py: record: is in RECORD but not in the archive\n"
    assert capsys.readouterr().out == f"{line}    fix: {FIXES['record']}\n"


@pytest.mark.usefixtures("locked_roots")
def test_a_fault_of_the_wheel_is_no_want_of_a_root(tmp_path: Path, files: Files, capsys: pytest.CaptureFixture[str]) -> None:
    record = "\n".join([*record_of(files), ""]).encode()
    path = write_wheel(tmp_path / NAMES["linux"], {**files, RECORD: record.replace(b"/", b"\xff", 1)})
    assert [each.check for each in audit_wheel(path, checks=("record",))] == ["record"]
    assert main("audit", str(path)) == 1
    assert f": record: {path.name}: {RECORD} is not UTF-8" in capsys.readouterr().out
    other = write_wheel(tmp_path / NAMES["linux"].replace("2_28", "2_29"), {**files, METADATA: b"\xff", "evil.pth": b""})
    assert main("audit", str(path), str(other)) == 1
    assert ": evil.pth: members: " in capsys.readouterr().out, "one that cannot be compared loses nothing"


def test_numbers_that_python_does_not_read(audited: Callable[..., set[str]]) -> None:
    """It refuses to read one of 5,000 digits."""
    digits = b"1" * 5000

    def facts(files: Files) -> None:
        files["mlx_cuda/_build.json"] = files["mlx_cuda/_build.json"].replace(b"12.2.0", b"12." + digits)

    def requirement(new: bytes) -> Change:
        return lambda files: files.update({METADATA: files[METADATA].replace(b"<10,>=9.19", new)})

    assert audited(facts) == {"build-facts"}
    assert audited(requirement(b">=1." + digits)) == {"metadata", "provider"}
    assert audited(requirement(b"<0,>=1." + digits)) == {"metadata", "provider"}
    assert audited(requirement(b">=9; " + b"(" * 9999)) == {"metadata", "provider"}


@pytest.mark.usefixtures("locked_roots")
def test_command_installs_roots(tmp_path: Path, files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only where it is asked to."""
    asked: list[tuple[list[str], str]] = []
    monkeypatch.setattr("ci.toolkit.install", lambda names, platform: asked.append((names, platform.name)))
    path = str(write_wheel(tmp_path / NAMES["linux"], files))
    main("audit", path)
    assert asked == []
    main("audit", "--install", path)
    assert asked == [(["cuda-12.8", "mlx-cu12", "cudnn-frontend", "cuda-13.0", "mlx-cu13"], "linux-x86_64")]


@pytest.mark.usefixtures("locked_roots")
def test_command_json(tmp_path: Path, files: Files, capsys: pytest.CaptureFixture[str]) -> None:
    path = with_sbom(write_wheel(tmp_path / NAMES["linux"], files))
    assert main("audit", "--json", str(path)) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["violations"] == []
    assert [module["member"] for module in answer["wheels"][0]["modules"]] == ["mlx_cuda/_cu12.abi3.so", "mlx_cuda/_cu13.abi3.so"]


@pytest.mark.usefixtures("locked_roots")
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
    assert "unknown architectures 'hopper'\n  fix: use 'declared', 'native', numbers such as 90" in capsys.readouterr().err


AGAIN = "\n  fix: download or build it again, and look at its first bytes"


@pytest.mark.parametrize(
    ("name", "contents", "message"),
    [
        ("absent-1-py3-none-any.whl", None, "cannot read {path}: No such file or directory\n  fix: check the path"),
        ("broken-1-py3-none-any.whl", b"PK\3\4 but no more", f"{{path}} is not a readable wheel: File is not a zip file{AGAIN}"),
        (
            "x.whl",
            b"PK",
            "Invalid wheel filename (wrong number of parts): 'x'\n  fix: give the path of a .whl file that still has its own name",
        ),
    ],
)
def test_unreadable_input(tmp_path: Path, name: str, contents: bytes | None, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    if contents:
        (tmp_path / name).write_bytes(contents)
    assert main("audit", str(tmp_path / name)) == 2
    assert capsys.readouterr().err == f"error: {message.format(path=tmp_path / name)}\n"


@pytest.mark.usefixtures("locked_roots")
def test_a_wheel_that_was_not_repaired(tmp_path: Path, files: Files, capsys: pytest.CaptureFixture[str]) -> None:
    (folder := tmp_path / "a $HOME b").mkdir()
    path = write_wheel(folder / NAMES["linux"], files)
    assert main("audit", str(path)) == 1
    first = f"{path.name}: not repaired: it has no SBOM\n    fix: python -m ci repair '{path}'\n"
    assert capsys.readouterr().out.startswith(first)


def test_several_that_cannot_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each is told."""
    names = [f"absent{number}-1-py3-none-any.whl" for number in range(3)]
    assert main("audit", *(str(tmp_path / name) for name in names)) == 2
    said = capsys.readouterr().err
    assert [name for name in names if f"error: cannot read {tmp_path / name}: " in said] == names


def test_a_damaged_binary(tmp_path: Path, files: Files, world: World) -> None:
    name = member(world, CU13)
    path = write_wheel(tmp_path / NAMES["linux"], {**files, name: files[name][:200], "evil.pth": b""})
    found = {(each.check, each.member) for each in audit_wheel(path, checks=("modules", "members", "loader"))}
    assert found == {("loader", name), ("members", "evil.pth")}, "what cannot be read hides nothing else"
    with pytest.raises(EnvironmentProblem, match=f"^{NAMES['linux']}: {name}: not readable as ELF: ") as refusal:
        load.prepare(read(path), tmp_path)
    assert refusal.value.fix == "build or fetch the wheel again: it is damaged"


@pytest.mark.parametrize(
    ("platform", "arguments", "message"),
    [
        ("manylinux_2_28_x86_64", {"cuda": ["13.0", "11.8", "11.2"]}, "unknown CUDA version 11.2, 11.8\n  fix: use 12.8 or 13.0"),
        ("manylinux_2_28_x86_64", {"arch": ["nine"]}, "unknown architectures 'nine'\n  fix: use "),
        (
            "macosx_14_0_arm64",
            {},
            "{name}: ci/matrix/matrix.toml does not declare the platform macosx_14_0_arm64\n"
            f"  fix: give a wheel for {', '.join(MATRIX.platforms)}",
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
    assert (facts.file, facts.project, facts.version, facts.size) == (path.name, "mlx-cuda", VERSION, path.stat().st_size)
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


def test_the_newest_of_versions() -> None:
    assert newest(["2.9", "2.17", "PRIVATE", "2.3.4"]) == "2.17"
    assert newest(["PRIVATE"]) == "PRIVATE"
    assert newest([]) == ""


def test_what_a_format_does_not_have_is_empty() -> None:
    assert astuple(Binary("pe", "amd64", None, ())) == (
        *("pe", "amd64", None, (), (), {}, frozenset(), {}, frozenset(), frozenset()),
        *((), None, None, False, False, ()),
    )


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
        found, fixes = dict[str, object](), dict[str, str]()
        monkeypatch.setattr(registry, listed, found)
        monkeypatch.setattr(registry, "FIXES", fixes)
        assert decorator("mend it")(of_two_words) is of_two_words
        assert (found, fixes) == ({"of-two-words": of_two_words}, {"of-two-words": "mend it"})


def test_every_check_is_documented() -> None:
    text = (REPOSITORY / "docs" / "factory" / "audit.md").read_text("utf-8")
    documented = re.findall(r"^\| `([a-z0-9-]+)` \|", text, re.MULTILINE)
    assert documented == [*CHECKS, *ACROSS]


def test_the_command_line_imports_nothing_heavy() -> None:
    """`toolkit path` runs in the build environment, which has none of the audit's libraries."""
    source = Path(audit.__file__).read_text("utf-8")
    top = re.findall(r"^(?:from|import) (\S+)", source, re.MULTILINE)
    assert set(top) <= {"__future__", "contextlib", "json", "sys", "dataclasses", "itertools", "pathlib", "typing", "..errors"}
