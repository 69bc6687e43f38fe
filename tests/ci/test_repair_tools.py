"""What repair asks of auditwheel and delvewheel, and what it makes of their answers: a stub answers for them."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from ci import __main__ as cli
from ci.audit import providers
from ci.audit.policy import platform_of
from ci.errors import CheckFailed, EnvironmentProblem
from ci.matrix import System
from ci.repair import DECLARED, check_excludes, repair
from ci.wheelfile.wheel import SBOM, read

from .audit_support import CU13, DIST_INFO, MATRIX, NAMES, SUFFIXES, Files, World, write_wheel


@pytest.fixture(scope="module", params=["linux", "windows"])
def system(request: pytest.FixtureRequest) -> System:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def silent(world: World) -> bytes:
    """A module that needs the driver alone."""
    return world.module(f"silent{SUFFIXES[world.system]}", CU13, without=[library.name for library in CU13.libraries])


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory, files: Files, system: System) -> Path:
    return write_wheel(tmp_path_factory.mktemp("dist") / NAMES[system], files)


@dataclass
class Tool:
    """Stands for a tool: notes how it is called, and leaves copies of the wheel."""

    status: int = 0
    said: str = ""
    complained: str = ""
    leaves: tuple[str, ...] = ("",)  # what the names of the wheels begin with
    adds: zipfile.ZipInfo | None = None
    calls: list[tuple[list[str], dict[str, Any]]] = field(default_factory=list)

    def __call__(self, command: list[str], **settings: Any) -> subprocess.CompletedProcess[str]:
        self.calls.append((command, settings))
        for prefix in self.leaves:
            wheel = Path(command[command.index("--wheel-dir") + 1], prefix + Path(command[-1]).name)
            shutil.copy(command[-1], wheel)
            if self.adds:
                with zipfile.ZipFile(wheel, "a") as archive:
                    archive.writestr(self.adds, b"")
        return subprocess.CompletedProcess(command, self.status, self.said, self.complained)


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch, world: World) -> Tool:
    tool = Tool()
    monkeypatch.setattr(providers, "site", lambda root, _: world.site(root))
    monkeypatch.setattr(subprocess, "run", tool)
    return tool


def option(command: list[str], name: str) -> list[str]:
    return [command[place + 1] for place, each in enumerate(command) if each == name]


def test_libraries_that_stay_outside(tool: Tool, wheel: Path, tmp_path: Path, system: System) -> None:
    """Those of all CUDA versions in the wheel, each once, then the driver."""
    repair(wheel, tmp_path)
    ((command, _),) = tool.calls
    declared = [library.files[system] for cuda in MATRIX.cuda.values() for library in cuda.libraries]
    expected = [*dict.fromkeys(declared), MATRIX.driver[system]]
    told = option(command, "--exclude")
    assert (told if system == "linux" else told[0].split(os.pathsep)) == expected
    assert command[:3] == [sys.executable, "-m", {"linux": "auditwheel", "windows": "delvewheel"}[system]]
    assert command[3] == "repair"
    assert ("--ignore-existing" in command) == (system == "windows")
    assert command[-1] == str(wheel.resolve())


def test_the_tag_to_prove(tool: Tool, wheel: Path, tmp_path: Path, system: System) -> None:
    """By itself the best that the wheel earns; or one that is given; or that of the matrix."""
    declared = platform_of(read(wheel), MATRIX).tag
    repair(wheel, tmp_path)
    for plat in ("auto", DECLARED, declared):
        repair(wheel, tmp_path, plat=plat)
    told = [option(command, "--plat") for command, _ in tool.calls]
    assert told == ([["auto"], ["auto"], [declared], [declared]] if system == "linux" else [[]] * 4)


def test_the_environment_of_the_tool(tool: Tool, wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs of this Python come first; all else is as it was, and the modes of unpacked files do not depend on who does it."""
    monkeypatch.setenv("PATH", "/somewhere")
    monkeypatch.setenv("A_SETTING", "kept")
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    repair(wheel, tmp_path)
    ((_, settings),) = tool.calls
    assert settings["env"]["PATH"] == f"{sysconfig.get_path('scripts')}{os.pathsep}/somewhere"
    assert (settings["env"]["A_SETTING"], settings["env"]["SOURCE_DATE_EPOCH"]) == ("kept", "1700000000")
    assert settings["umask"] == 0o022


def test_without_a_search_path(tool: Tool, wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PATH")
    repair(wheel, tmp_path)
    assert tool.calls[0][1]["env"]["PATH"] == sysconfig.get_path("scripts")


def test_the_sbom_bears_the_time_of_what_was_built(tool: Tool, wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tool that stamps its files with another time does not change it."""
    monkeypatch.delenv("SOURCE_DATE_EPOCH", raising=False)
    tool.adds = zipfile.ZipInfo("mlx_cuda/new", (2031, 1, 1, 0, 0, 0))
    document = read(repair(wheel, tmp_path)).members[f"{DIST_INFO}/sboms/{SBOM}"]
    assert json.loads(document)["metadata"]["timestamp"] == "2026-01-02T03:04:06+00:00"


def test_the_time_of_the_wheel_goes_to_the_tool(tool: Tool, wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SOURCE_DATE_EPOCH", raising=False)
    repair(wheel, tmp_path)
    assert tool.calls[0][1]["env"]["SOURCE_DATE_EPOCH"] == "1767323046"


@pytest.mark.parametrize("leaves", [(), ("", "x")])
def test_not_one_wheel(tool: Tool, wheel: Path, tmp_path: Path, leaves: tuple[str, ...], system: System) -> None:
    tool.leaves = leaves
    name = {"linux": "auditwheel", "windows": "delvewheel"}[system]
    with pytest.raises(EnvironmentProblem, match=f"^{name} left {len(leaves)} wheels instead of one") as refusal:
        repair(wheel, tmp_path / "out")
    fix = str(refusal.value.fix)
    assert fix.startswith(f"run it yourself: {sys.executable} -m {name} repair")
    assert shlex.split(fix)[-1] == str(wheel)
    assert not (tmp_path / "out").exists()


def test_a_refusal_says_all_that_the_tool_said(tool: Tool, wheel: Path, tmp_path: Path) -> None:
    tool.status, tool.said, tool.complained = 3, "on stdout", "on stderr\n"
    with pytest.raises(CheckFailed, match=r"^\w+wheel refuses the wheel:\non stdout\non stderr$"):
        repair(wheel, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(sys.platform == "win32", reason="the stub is a shell script")
def test_what_a_real_process_says(wheel: Path, tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "python"
    script.write_text("#!/bin/sh\necho 'größer'; echo 'as expected' >&2; exit 1\n", "utf-8")
    script.chmod(0o755)
    monkeypatch.setattr(providers, "site", lambda root, _: world.site(root))
    monkeypatch.setattr(sys, "executable", str(script))
    with pytest.raises(CheckFailed, match=r"refuses the wheel:\ngrößer\n\nas expected$"):
        repair(wheel, tmp_path / "out")


def test_complaints_of_a_tool_that_succeeds_do_not_matter(tool: Tool, wheel: Path, tmp_path: Path) -> None:
    tool.complained = "No module named auditwheel, No module named delvewheel"
    assert repair(wheel, tmp_path).is_file()


def test_a_tool_that_is_not_installed(tool: Tool, wheel: Path, tmp_path: Path, system: System) -> None:
    name = {"linux": "auditwheel", "windows": "delvewheel"}[system]
    tool.status, tool.complained = 1, f"python: No module named {name}"
    with pytest.raises(EnvironmentProblem, match=f"^{name} is not installed") as missing:
        repair(wheel, tmp_path)
    assert missing.value.fix == "install the dependency group 'factory' of pyproject.toml"


def test_another_module_that_is_missing_is_a_refusal(tool: Tool, wheel: Path, tmp_path: Path) -> None:
    tool.status, tool.complained = 1, "No module named pefile"
    with pytest.raises(CheckFailed, match="No module named pefile"):
        repair(wheel, tmp_path)


def test_only_what_is_in_the_wheel_is_proved(tool: Tool, tmp_path: Path, files: Files, system: System) -> None:
    """The libraries of a CUDA version that it has no module for are not its own."""
    thirteen = {name: data for name, data in files.items() if not name.startswith("mlx_cuda/_cu12.")}
    found = check_excludes(read(write_wheel(tmp_path / NAMES[system], thirteen)), MATRIX)
    libraries = [library.files[system] for library in MATRIX.cuda["13.0"].libraries]
    assert list(found) == [*dict.fromkeys(libraries), MATRIX.driver[system]]


def test_every_missing_library_is_named(tool: Tool, tmp_path: Path, files: Files, silent: bytes, system: System) -> None:
    """All mistakes of a table at once, each with its place."""
    changed = {name: silent if name.startswith("mlx_cuda/_cu") else data for name, data in files.items()}
    with pytest.raises(CheckFailed) as refusal:
        check_excludes(read(write_wheel(tmp_path / NAMES[system], changed)), MATRIX)
    first, *lines = str(refusal.value).split("\n  ")
    assert first == "excludes of ci/matrix/matrix.toml that match nothing:"
    needed = [(cuda.version, library.files[system]) for cuda in MATRIX.cuda.values() for library in cuda.libraries if library.needed]
    assert [line.split()[1:3] for line in lines] == [[f"{version}:", file] for version, file in needed]


def test_a_guard_that_no_root_has(wheel: Path, tool: Tool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All roots of the CUDA version are looked through; the message names them."""
    asked = []

    def site(*root: object) -> Path:
        asked.append(root)
        return tmp_path

    monkeypatch.setattr(providers, "site", site)
    with pytest.raises(CheckFailed, match=r"no locked wheel of cuda-12\.8, mlx-cu12, cudnn-frontend installs it"):
        check_excludes(read(wheel), MATRIX)
    assert asked == [(root, platform_of(read(wheel), MATRIX)) for cuda in MATRIX.cuda.values() for root in cuda.roots]


@pytest.mark.parametrize("system", ["windows"], scope="module")
def test_a_tag_of_another_system(tool: Tool, wheel: Path, tmp_path: Path) -> None:
    with pytest.raises(EnvironmentProblem, match=r"is for Windows, not for manylinux_2_28_x86_64") as refusal:
        repair(wheel, tmp_path, plat="manylinux_2_28_x86_64")
    assert refusal.value.fix == "omit --plat"
    assert not tool.calls


def test_the_command(
    tool: Tool, wheel: Path, tmp_path: Path, system: System, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without -o the finished wheel goes to wheelhouse/ of the folder at hand, and its path is all that is printed."""
    monkeypatch.chdir(tmp_path)
    assert cli.main(["repair", str(wheel), "--plat", DECLARED]) == 0
    assert capsys.readouterr().out == f"{Path('wheelhouse', wheel.name)}\n"
    assert Path("wheelhouse", wheel.name).is_file()
    assert cli.main(["repair", str(wheel), "--output", "elsewhere"]) == 0
    assert Path("elsewhere", wheel.name).is_file()
    told = [option(command, "--plat") for command, _ in tool.calls]
    assert told == ([[platform_of(read(wheel), MATRIX).tag], ["auto"]] if system == "linux" else [[], []])
