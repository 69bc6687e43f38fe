"""The audit's checks of what lies in a wheel and of its metadata: each passes the good wheel and fires on a bad one; and the command."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from ci import audit
from ci.audit import audit_wheel, describe
from ci.audit.checks import ACROSS, CHECKS, SAME_METADATA, binaries
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
    QUICK,
    RECORD,
    VERSION,
    WHEEL,
    Files,
    World,
    device_code,
    digest,
    member,
    replaced,
    wheel_file,
    with_device,
    with_sbom,
    write_wheel,
)

if TYPE_CHECKING:
    from collections.abc import Callable

MLX = f"Requires-Dist: mlx=={MATRIX.mlx}\n"


def test_good_wheel(audited: Callable[..., set[str]]) -> None:
    assert audited(checks=tuple(CHECKS)) == set()


# ------------------------------------------------------------------------------------------------------------ what lies in the wheel


def library(world: World, name: str, soname: str = "") -> bytes:
    return world.compile(world.folder / "made" / name, "int f(void) { return 1; }", f"-Wl,-soname,{soname or name}").read_bytes()


def test_a_missing_module(audited: Callable[..., set[str]], world: World) -> None:
    assert audited(lambda files: files.pop(member(world, CU13)) and None) == {"modules"}


def test_an_unexpected_binary(audited: Callable[..., set[str]], world: World) -> None:
    assert audited(lambda files: files.update({"mlx_cuda/helper.so": library(world, "helper.so")})) == {"modules"}


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


def record_of(files: Files) -> list[str]:
    return [*(f"{name},{digest(data)},{len(data)}" for name, data in files.items()), f"{RECORD},,"]


@pytest.mark.parametrize(
    "spoil",
    [
        lambda lines: lines[1:],
        lambda lines: [*lines, "mlx_cuda/ghost.py,sha256=x,1"],
        lambda lines: [*lines, lines[0]],
        lambda lines: [lines[0].replace("sha256=", "sha256=x"), *lines[1:]],
        lambda lines: [re.sub(r",\d+$", ",999", lines[0]), *lines[1:]],
        lambda lines: [lines[0].split(",")[0] + ",,", *lines[1:]],
        lambda lines: [lines[0].rsplit(",", 1)[0], *lines[1:]],
    ],
    ids=["unlisted", "ghost", "twice", "hash", "size", "no hash", "fields"],
)
def test_record(audited: Callable[..., set[str]], spoil: Callable[[list[str]], list[str]]) -> None:
    assert audited(lambda files: files.update({RECORD: "\n".join(spoil(record_of(files))).encode()})) == {"record"}


def test_size(audited: Callable[..., set[str]]) -> None:
    noise = os.urandom((MATRIX.size_budget_mib + 1) << 20)
    assert audited(lambda files: files.update({"mlx_cuda/py.typed": noise})) == {"size", "sources"}


# ------------------------------------------------------------------------------------------------------------ METADATA and WHEEL


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("manylinux_2_28_x86_64", "manylinux_2_35_x86_64"),
        ("Purelib: false", "Purelib: true"),
        ("Wheel-Version: 1.0", "Wheel-Version: 2.0"),
        ("Tag:", "Gat:"),
    ],
)
def test_wheel_file(audited: Callable[..., set[str]], old: str, new: str) -> None:
    assert audited(replaced(WHEEL, old, new)) == {"tags"}


def test_tag_of_one_python(audited: Callable[..., set[str]]) -> None:
    name = NAMES["linux"].replace("cp310-abi3", "cp312-cp312")
    assert audited(lambda files: files.update({WHEEL: wheel_file(name).encode()}), name=name) == {"tags"}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("Name: mlx-cuda\n", "Name: mlx-kuda\n"),
        ("Requires-Python: >=3.10", "Requires-Python: >=3.9"),
        ("Requires-Python: >=3.10", "Requires-Python: 3.10 or so"),
        ("Summary: ", "Yrammus: "),
        ("# mlx-cuda", ""),
        ("License-Expression: MIT", "License-Expression: as you like"),
        ("Metadata-Version: 2.4", "Metadata-Version: 2.1"),
    ],
)
def test_metadata(audited: Callable[..., set[str]], old: str, new: str) -> None:
    assert audited(replaced(METADATA, old, new)) == {"metadata"}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('; extra == "cpu"', '; extra == "cpu" and platform_system == "Linux"'),
        (MLX, f"{MLX[:-1]}; sys_platform == 'linux'\n"),
        (MLX, MLX.replace("==", ">=")),
        (MLX, ""),
        ("Provides-Extra: cu13", "Provides-Extra: cuda13"),
        (MLX, f"{MLX}Requires-Dist: numpy\n"),
        (f"mlx-cuda-12=={MATRIX.mlx}", "mlx-cuda-12==0.32.3"),
    ],
)
def test_requirements(audited: Callable[..., set[str]], old: str, new: str) -> None:
    assert "requirements" in audited(replaced(METADATA, old, new))


def test_an_unreadable_requirement(audited: Callable[..., set[str]]) -> None:
    assert audited(replaced(METADATA, MLX, MLX.replace("==", " = "))) == {"metadata", "requirements"}


def test_licence_not_in_the_wheel(audited: Callable[..., set[str]]) -> None:
    assert audited(lambda files: files.pop(f"{DIST_INFO}/licenses/LICENSE") and None) == {"licence", "sources"}


@pytest.mark.parametrize("line", ["License-File: ", "License-Expression: "])
def test_licence_not_named(audited: Callable[..., set[str]], line: str) -> None:
    assert audited(replaced(METADATA, line, "Keywords: " if line.startswith("License-E") else "Classifier: ")) == {"licence"}


@pytest.mark.usefixtures("locked_roots", "without_abi3audit")
def test_same_metadata(tmp_path: Path, files: Files, capsys: pytest.CaptureFixture[str]) -> None:
    one = write_wheel(tmp_path / NAMES["linux"], files)
    changed = dict(files)
    name = NAMES["linux"].replace("x86_64", "aarch64")
    replaced(METADATA, MLX, "")(changed)
    other = write_wheel(tmp_path / name, changed)
    assert main("audit", str(one), str(other)) == 1
    assert f"{name}: {METADATA}: {SAME_METADATA}: lacks {MLX.strip()}, expected the same as in {one.name}" in capsys.readouterr().out


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


@pytest.mark.parametrize(
    ("name", "contents"),
    [
        ("absent.whl", None),
        ("mlx_cuda-1-cp310-abi3-win_amd64.whl", None),
        ("mlx_cuda-1-cp310-abi3-win_amd64.whl", b"PK\3\4 but no more"),
        ("x.whl", b"PK"),
    ],
)
def test_unreadable_input(tmp_path: Path, name: str, contents: bytes | None, capsys: pytest.CaptureFixture[str]) -> None:
    if contents:
        (tmp_path / name).write_bytes(contents)
    assert main("audit", str(tmp_path / name)) == 2
    assert "error:" in capsys.readouterr().err


def test_a_damaged_binary_is_unreadable_input(tmp_path: Path, files: Files, world: World) -> None:
    changed = {**files, member(world, CU13): files[member(world, CU13)][:200]}
    with pytest.raises(EnvironmentProblem, match="not readable as ELF"):
        audit_wheel(write_wheel(tmp_path / NAMES["linux"], changed), checks=QUICK)


def test_unknown_names(tmp_path: Path, files: Files) -> None:
    path = write_wheel(tmp_path / NAMES["linux"], files)
    for arguments in ({"cuda": ["11.8"]}, {"arch": ["nine"]}):
        with pytest.raises(EnvironmentProblem, match="unknown"):
            audit_wheel(path, **arguments)


def test_describe(tmp_path: Path, files: Files) -> None:
    path = write_wheel(tmp_path / NAMES["linux"], files)
    facts = describe(path)
    assert (facts.file, facts.version, facts.size) == (path.name, VERSION, path.stat().st_size)
    assert facts.tags == ("cp310-abi3-manylinux_2_28_x86_64",)
    first = facts.modules[0]
    assert first.rpath == CU12.rpath()
    assert "libcublasLt.so.12" in first.needed


def test_no_wheel_without_its_folder(tmp_path: Path, files: Files) -> None:
    for name in (METADATA, WHEEL, f"{DIST_INFO}/licenses/LICENSE"):
        files = {key: value for key, value in files.items() if key != name}
    path = write_wheel(tmp_path / NAMES["linux"], {**files, "other-1.dist-info/METADATA": b""})
    with pytest.raises(EnvironmentProblem, match=r"2 \.dist-info folders"):
        read(path)


def test_every_check_is_documented() -> None:
    text = (REPOSITORY / "docs" / "audit.md").read_text("utf-8")
    documented = re.findall(r"^\| `([a-z0-9-]+)` \|", text, re.MULTILINE)
    assert documented == [*CHECKS, *ACROSS]


def test_the_command_line_imports_nothing_heavy() -> None:
    """`toolkit path` runs in the build environment, which has none of the audit's libraries."""
    source = Path(audit.__file__).read_text("utf-8")
    top = re.findall(r"^(?:from|import) (\S+)", source, re.MULTILINE)
    assert set(top) <= {"__future__", "json", "dataclasses", "itertools", "pathlib", "typing"}
