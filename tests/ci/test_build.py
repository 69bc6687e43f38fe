"""``ci.build`` and ``ci.wheel``: what they hand to the build, and what a failure leaves behind. Nothing is compiled here."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ci import __main__ as cli
from ci import audit, matrix, toolkit, wheel
from ci.build import build, compiler
from ci.errors import CheckFailed
from ci.matrix import gpu
from ci.toolkit import roots
from ci.wheelfile.facts import DeviceFacts, ModuleFacts, WheelFacts

NAME = "mlx_cuda-1-cp310-abi3-linux_x86_64.whl"
REPAIRED = "mlx_cuda-1-cp310-abi3-manylinux_2_28_x86_64.whl"
ALL = list(matrix.load().cuda)
HOST = matrix.host_platform()


class FakeBuild:
    """Stands for the build front end: leaves a wheel, and half of another one when it fails."""

    def __init__(self) -> None:
        self.status = 0
        self.command: list[str] = []
        self.environment: dict[str, str] = {}
        self.checked: list[matrix.Platform] = []

    def __call__(self, command: list[str], *, env: dict[str, str], **_: Any) -> subprocess.CompletedProcess[bytes]:
        self.command, self.environment = command, env
        Path(command[command.index("--outdir") + 1], NAME).write_bytes(b"PK" if self.status else b"a wheel")
        return subprocess.CompletedProcess(command, self.status)

    @property
    def settings(self) -> dict[str, str]:
        given = [part.removeprefix("--config-setting=") for part in self.command if part.startswith("--config-setting=")]
        return dict(setting.split("=", 1) for setting in given)


@pytest.fixture
def front_end(monkeypatch: pytest.MonkeyPatch) -> FakeBuild:
    fake = FakeBuild()
    monkeypatch.setattr(subprocess, "run", fake)
    return fake


def test_the_whole_matrix_is_built_in_the_shared_tree(front_end: FakeBuild, tmp_path: Path) -> None:
    assert build.build_wheel(ALL, ["declared"], tmp_path) == tmp_path / NAME
    assert front_end.settings == {
        "cmake.define.MLX_CUDA_VERSIONS": "12.8;13.0",
        "cmake.define.MLX_CUDA_ARCHITECTURES": "declared",
    }
    assert front_end.command[:5] == [sys.executable, "-m", "build", "--wheel", "--no-isolation"]
    assert front_end.command[-1] == str(matrix.REPOSITORY)


@pytest.mark.parametrize(
    ("versions", "architectures", "folder"),
    [(["13.0"], ["declared"], "13.0-declared"), (ALL, ["90", "80"], "12.8-13.0-90-80"), (["12.8"], ["90"], "12.8-90")],
)
def test_a_selection_is_built_in_a_tree_of_its_own(
    front_end: FakeBuild, tmp_path: Path, versions: list[str], architectures: list[str], folder: str
) -> None:
    build.build_wheel(versions, architectures, tmp_path, verbose=True)
    assert front_end.settings == {
        "cmake.define.MLX_CUDA_VERSIONS": ";".join(versions),
        "cmake.define.MLX_CUDA_ARCHITECTURES": ";".join(architectures),
        "build-dir": f"build/{{wheel_tag}}-{folder}",
        "build.verbose": "true",
    }


def test_tools_beside_the_interpreter_are_found_first(front_end: FakeBuild, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/elsewhere")
    build.build_wheel(ALL, ["declared"], tmp_path)
    assert front_end.environment["PATH"] == f"{Path(sys.executable).parent}{os.pathsep}/elsewhere"


def test_a_failing_build_leaves_nothing(front_end: FakeBuild, tmp_path: Path) -> None:
    front_end.status = 1
    with pytest.raises(CheckFailed, match="the build failed"):
        build.build_wheel(ALL, ["declared"], tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_command_line_selects(front_end: FakeBuild, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["build", "--cuda", "13.0", "--cuda", "12.8", "--arch", "80", "90", "-o", str(tmp_path)]
    assert cli.main(arguments) == 0
    assert front_end.settings["cmake.define.MLX_CUDA_VERSIONS"] == "12.8;13.0"
    assert front_end.settings["cmake.define.MLX_CUDA_ARCHITECTURES"] == "80;90"
    assert capsys.readouterr().out == f"{tmp_path / NAME}\n"


def test_a_platform_that_is_this_machines_own_is_no_cross_build(front_end: FakeBuild, tmp_path: Path) -> None:
    build.build_wheel(ALL, ["declared"], tmp_path, platform=HOST)
    assert "cmake.define.CMAKE_TOOLCHAIN_FILE" not in front_end.settings
    assert "_PYTHON_HOST_PLATFORM" not in front_end.environment


class Stages:
    """Stands for all stages of ``ci.wheel``; keeps what each was asked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.violations: list[audit.Violation] = []
        self.asked: dict[str, Any] = {}
        monkeypatch.setattr(compiler, "toolchain", self.check)
        monkeypatch.setattr(toolkit, "install", self.install)
        monkeypatch.setattr(build, "build_wheel", self.build)
        monkeypatch.setattr(wheel, "repair", self.repair)
        monkeypatch.setattr(audit, "audit_wheel", self.audit)

    def check(self, platform: matrix.Platform) -> None:
        assert not self.asked, "the compiler is checked before anything is fetched"
        self.asked["compiler"] = platform

    def install(self, roots: list[str], platform: matrix.Platform) -> None:
        self.asked.setdefault("roots", {}).setdefault(platform.name, []).extend(roots)

    def build(self, versions: list[str], architectures: list[str], output: Path, *, platform: matrix.Platform) -> Path:
        self.asked["build"] = (versions, architectures, platform)
        output.mkdir()
        (output / NAME).write_bytes(b"built")
        return output / NAME

    def repair(self, path: Path, output: Path, *, plat: str) -> Path:
        self.asked["plat"] = plat
        output.mkdir()
        (output / REPAIRED).write_bytes(path.read_bytes() + b", repaired")
        return output / REPAIRED

    def audit(self, path: Path, **narrowed: Any) -> list[audit.Violation]:
        assert path.name == REPAIRED
        self.asked["audit"] = narrowed
        return self.violations


@pytest.fixture
def stages(monkeypatch: pytest.MonkeyPatch) -> Stages:
    return Stages(monkeypatch)


def test_all_stages_in_order(stages: Stages, tmp_path: Path) -> None:
    path, seconds = wheel.make_wheel(ALL, ["declared"], tmp_path / "wheelhouse", plat="manylinux_2_28_x86_64")
    assert path == tmp_path / "wheelhouse" / REPAIRED
    assert path.read_bytes() == b"built, repaired"
    assert list(path.parent.iterdir()) == [path]
    assert list(seconds) == ["toolkit", "build", "repair", "audit"]
    assert stages.asked == {
        "compiler": HOST,
        "roots": {HOST.name: ["cuda-12.8", "mlx-cu12", "cudnn-frontend", "cuda-13.0", "mlx-cu13", "device"]},
        "build": (ALL, ["declared"], HOST),
        "plat": "manylinux_2_28_x86_64",
        "audit": {"cuda": ALL, "arch": ["declared"]},
    }


@pytest.mark.parametrize(
    ("versions", "requested"),
    [(["13.0"], ["declared"]), (ALL, ["90", "80"]), (["12.8"], ["90"])],
)
def test_the_audit_is_told_of_a_selection(stages: Stages, tmp_path: Path, versions: list[str], requested: list[str]) -> None:
    wheel.make_wheel(versions, requested, tmp_path)
    assert stages.asked["audit"] == {"cuda": versions, "arch": requested}
    roots = dict.fromkeys(root for version in versions for root in matrix.load().cuda[version].roots)
    assert stages.asked["roots"] == {HOST.name: [*roots, "device"]}


def test_finished_device_code_needs_no_compilers(stages: Stages, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(roots.PREBUILT, "folder")
    wheel.make_wheel(["13.0"], ["declared"], tmp_path)
    assert stages.asked["roots"] == {HOST.name: list(matrix.load().cuda["13.0"].roots)}


@pytest.mark.usefixtures("described")
@pytest.mark.parametrize("arguments", [["90", "80"], ["90,80"], ["90,", "80"]], ids=" ".join)
def test_architectures_are_separated_as_the_audit_has_them(stages: Stages, tmp_path: Path, arguments: list[str]) -> None:
    assert cli.main(["wheel", "--json", "--arch", *arguments, "-o", str(tmp_path)]) == 0
    assert stages.asked["audit"]["arch"] == ["90", "80"]


@pytest.mark.parametrize("nothing", ["", ","])
def test_no_architecture_is_a_wrong_call(stages: Stages, tmp_path: Path, capsys: pytest.CaptureFixture[str], nothing: str) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["wheel", "--arch", nothing, "-o", str(tmp_path / "out")])
    assert stopped.value.code == 2
    assert "argument --arch: no GPU is named; use numbers" in capsys.readouterr().err
    assert not stages.asked


@pytest.mark.parametrize("command", ["build", "wheel"])
def test_unknown_architectures_are_found_out_first(
    front_end: FakeBuild, stages: Stages, tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    assert cli.main([command, "--arch", "hopper", "-o", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err.startswith("error: unknown architectures 'hopper'\n  fix: use 'declared'")
    assert {*stages.asked} <= {"compiler"}
    assert not front_end.command
    assert not (tmp_path / "out").exists()


def test_where_finished_device_code_lies_is_told_from_here(front_end: FakeBuild, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CMake runs elsewhere."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(roots.PREBUILT, "folder")
    build.build_wheel(ALL, ["declared"], tmp_path)
    assert front_end.environment[roots.PREBUILT] == str(tmp_path / "folder")


def test_native_is_asked_once_and_passed_on_as_numbers(stages: Stages, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "capabilities", lambda: (89, 90))
    wheel.make_wheel(["13.0"], ["native"], tmp_path)
    assert stages.asked["build"] == (["13.0"], ["89", "90a"], HOST)
    assert stages.asked["audit"]["arch"] == ["89", "90a"]


def test_a_wheel_that_fails_the_audit_stays_out_and_keeps_the_old_one(stages: Stages, tmp_path: Path) -> None:
    (tmp_path / REPAIRED).write_bytes(b"the old one")
    stages.violations = [audit.Violation(REPAIRED, "mlx_cuda/_cu12.abi3.so", "stripped", "has .symtab")]
    with pytest.raises(CheckFailed, match=r"the audit found:\n.*_cu12\.abi3\.so: stripped: has \.symtab"):
        wheel.make_wheel(ALL, ["declared"], tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [REPAIRED]
    assert (tmp_path / REPAIRED).read_bytes() == b"the old one"


MODULE = ModuleFacts("mlx_cuda/_cu13.abi3.so", 3 << 20, ("libmlx.so",), ("$ORIGIN/../mlx/lib",), "2.28", "3.4.25")
DEVICE = DeviceFacts("0" * 64, 2 << 20, ("a.fatbin", "b.fatbin"), ("80", "90a"), ("80",))
FACTS = WheelFacts(REPAIRED, "mlx-cuda", "1", ("cp310-abi3-manylinux_2_28_x86_64",), 5 << 20, DEVICE, (MODULE,))


@pytest.fixture
def described(stages: Stages, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit, "describe", lambda _: FACTS)


@pytest.mark.usefixtures("described")
def test_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["wheel", "-o", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    for part in (
        "cp310-abi3-manylinux_2_28_x86_64",
        f"5.00 MiB of {matrix.load().size_budget_mib} MiB",
        "mlx_cuda/_cu13.abi3.so (3.00 MiB)",
        "2.00 MiB in 2 fatbins",
        "sm_80 sm_90a",
        "compute_80",
        "libmlx.so",
        "$ORIGIN/../mlx/lib",
        "GLIBC_2.28 GLIBCXX_3.4.25",
        "total, seconds",
    ):
        assert part in out
    assert out.endswith(f"{tmp_path / REPAIRED}\n")


@pytest.mark.usefixtures("described")
def test_the_printed_command_can_be_copied_into_a_shell(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "a $HOME b"
    assert cli.main(["wheel", "--cuda", "13.0", "-o", str(folder)]) == 0
    (line,) = (line for line in capsys.readouterr().err.splitlines() if line.startswith("CUDA 13.0: "))
    assert shlex.split(line.removeprefix("CUDA 13.0: ")) == ["pip", "install", f"{folder / REPAIRED}[cu13]"]
    assert "'" in line


@pytest.mark.usefixtures("stages")
def test_the_table_of_a_module_that_needs_no_cplusplus_library(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = replace(FACTS, modules=(replace(MODULE, glibcxx=None),))
    monkeypatch.setattr(audit, "describe", lambda _: facts)
    assert cli.main(["wheel", "-o", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "GLIBC_2.28" in out
    assert "GLIBCXX" not in out


@pytest.mark.usefixtures("described")
def test_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["wheel", "--json", "-o", str(tmp_path)]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["wheel"] == str(tmp_path / REPAIRED)
    assert list(printed["seconds"]) == ["toolkit", "build", "repair", "audit"]
    assert printed["facts"]["device"]["sass"] == ["80", "90a"]


@pytest.mark.usefixtures("described")
def test_a_cross_build_needs_the_roots_of_its_platform_and_of_this_one_what_compiles_device_code(stages: Stages, tmp_path: Path) -> None:
    other = next(platform for platform in matrix.load().platforms.values() if platform != HOST)
    assert cli.main(["wheel", "--json", "--platform", other.name, "-o", str(tmp_path)]) == 0
    assert (stages.asked["compiler"], stages.asked["build"][2]) == (other, other)
    assert stages.asked["roots"] == {
        other.name: ["cuda-12.8", "mlx-cu12", "cudnn-frontend", "cuda-13.0", "mlx-cu13"],
        HOST.name: ["device"],
    }
