"""``python -m ci msvc-env``: Visual Studio is found, its toolset judged, its environment taken over; a stub for it on Linux."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ci import matrix
from ci.__main__ import main
from ci.build import compiler, msvc_env
from ci.errors import EnvironmentProblem
from ci.files import tomllib

from .windows_support import DECLARED, VCVARSALL, VERSION, WINDOWS, Studio, program


@pytest.fixture
def studio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Studio:
    monkeypatch.setattr(matrix, "host_platform", lambda: WINDOWS)
    return Studio.make(tmp_path, monkeypatch)


def seen_by(command: list[str], tmp_path: Path) -> dict[str, str]:
    """The environment in which a command runs."""
    tell = f"import json, os; open({str(tmp_path / 'seen')!r}, 'w').write(json.dumps(dict(os.environ)))"
    assert main([*command, sys.executable, "-c", tell]) == 0
    seen: dict[str, str] = json.loads((tmp_path / "seen").read_text("utf-8"))
    return seen


def test_the_command_runs_in_the_prompt(studio: Studio, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CMAKE_GENERATOR", "Visual Studio 18 2026")
    monkeypatch.setenv("PRÜFUNG", "zwei\nZeilen; ü")
    seen = seen_by(["msvc-env", "--"], tmp_path)
    assert (seen["CMAKE_GENERATOR"], seen["CXX"]) == ("Ninja", "cl")
    assert seen["VCTOOLSVERSION"] == VERSION
    assert seen["PATH"].split(os.pathsep)[0] == str(studio.tools())
    assert seen["PRÜFUNG"] == "zwei\nZeilen; ü"


def test_elsewhere_it_just_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrix, "host_platform", lambda: matrix.load().platform("linux-x86_64"))
    monkeypatch.setattr(msvc_env, "developer", lambda _: pytest.fail("there is no Visual Studio"))
    for name in ("CMAKE_GENERATOR", "CXX"):
        monkeypatch.delenv(name, raising=False)
    assert not {"CMAKE_GENERATOR", "CXX"} & {*seen_by(["msvc-env", "--"], tmp_path)}


def test_the_exit_code_and_the_arguments_are_the_commands(capfd: pytest.CaptureFixture[str]) -> None:
    tell = "import sys; print(sys.argv[1:]); sys.exit(7)"
    assert main(["msvc-env", "--", sys.executable, "-c", tell, "--flag", "a b", "$HOME"]) == 7
    assert capfd.readouterr().out == "['--flag', 'a b', '$HOME']\n"


def test_a_program_of_the_prompt_alone(studio: Studio, tmp_path: Path) -> None:
    program(studio.tools() / "only-there", f'#!/bin/sh\ntouch "{tmp_path}/ran"\n')
    assert main(["msvc-env", "--", "only-there"]) == 0
    assert (tmp_path / "ran").exists()


def test_a_command_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["msvc-env", "--", "no-such-command"]) == 2
    assert capsys.readouterr().err == "error: no-such-command is not found\n  fix: give a program that is on PATH, after --\n"
    with pytest.raises(SystemExit, match="2"):
        main(["msvc-env"])


def test_what_vswhere_is_asked(studio: Studio) -> None:
    """The newest of the declared major version, of any edition, that has C++ tools."""
    assert msvc_env.studio(DECLARED) == studio.folder
    assert studio.asked() == [
        *("-latest", "-products", "*", "-version", "[17,18)"),
        *("-requires", "Microsoft.VisualStudio.Component.VC.Tools.x86.x64", "-property", "installationPath", "-utf8"),
    ]


def test_the_newest_fitting_toolset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    versions = ["14.29.30133", "14.44.9", "14.44.35207", "14.440.1", "14.50.35717"]
    studio = Studio.make(tmp_path, monkeypatch, versions)
    assert msvc_env.toolset(studio.folder, DECLARED) == "14.44.35207"
    assert msvc_env.developer(DECLARED)["VCTOOLSVERSION"] == "14.44.35207"


def refusal() -> str:
    with pytest.raises(EnvironmentProblem) as refused:
        msvc_env.developer(DECLARED)
    return str(refused.value)


def test_without_vswhere(studio: Studio, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("PROGRAMFILES(X86)", str(tmp_path / "nothing"))
    assert main(["msvc-env", "--", "true"]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: {tmp_path / 'nothing'}/Microsoft Visual Studio/Installer/vswhere.exe is not installed\n")
    assert said.endswith("\n  fix: install Visual Studio 17, or its Build Tools, with the component " + msvc_env.TOOLS + "\n")


def test_where_vswhere_is_if_nothing_says_it(studio: Studio, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PROGRAMFILES(X86)")
    assert refusal().startswith(f"C:/Program Files (x86)/{msvc_env.VSWHERE} is not installed\n")


def test_what_lies_in_the_current_folder_is_not_run(studio: Studio, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit(3)\n", "utf-8")
    monkeypatch.chdir(tmp_path)
    assert msvc_env.developer(DECLARED)["VCTOOLSVERSION"] == VERSION


def test_vswhere_fails(studio: Studio, tmp_path: Path) -> None:
    program(tmp_path / "x86" / msvc_env.VSWHERE, "#!/bin/sh\nexit 87\n")
    assert "cannot be queried: " in refusal()
    assert "exit code 87" in refusal()


def test_without_visual_studio(studio: Studio) -> None:
    studio.answer("")
    assert refusal().startswith("no Visual Studio 17 with C++ tools is installed\n  fix: install Visual Studio 17")


@pytest.mark.parametrize(("toolsets", "named"), [((), "none"), (("14.50.1", "14.29.30133"), "14.29.30133, 14.50.1")])
def test_without_the_toolset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, toolsets: tuple[str, ...], named: str) -> None:
    studio = Studio.make(tmp_path, monkeypatch, toolsets)
    assert refusal() == (
        f"{studio.folder} has no C++ toolset 14.44, but {named}\n"
        "  fix: add the MSVC build tools v14.44 for x64 with the Visual Studio Installer"
    )


def test_a_toolset_without_its_compiler_is_none(studio: Studio) -> None:
    """Other components put folders there too."""
    (studio.tools() / "cl.exe").unlink()
    assert "has no C++ toolset 14.44, but none" in refusal()


@pytest.mark.parametrize(
    ("batch", "found"),
    [("return 1\n", "none"), ("export VCToolsVersion=14.50.35717\n", "14.50.35717"), ("export VCToolsVersion=14.44.1\n", "14.44.1")],
    ids=["fails", "another prompt", "another update"],
)
def test_a_batch_file_that_does_not_obey(studio: Studio, batch: str, found: str) -> None:
    studio.batch(batch)
    path = studio.folder / "VC/Auxiliary/Build/vcvarsall.bat"
    assert refusal() == f"{path} has set up toolset {found}, expected {VERSION}\n  fix: start outside of any developer prompt"


def test_the_line_for_cmd(monkeypatch: pytest.MonkeyPatch) -> None:
    """One string, since cmd has quotes of its own: /s takes off the outer ones and leaves the rest."""
    asked: list[Any] = []

    def run(command: str, **options: Any) -> subprocess.CompletedProcess[str]:
        asked.append((command, options["stdout"], options.get("shell")))
        return subprocess.CompletedProcess(command, 0, stdout="printed")

    monkeypatch.setattr(subprocess, "run", run)
    assert msvc_env.cmd('"a b.bat" x && "c d"') == "printed"
    assert asked == [('cmd /d /s /c ""a b.bat" x && "c d""', subprocess.PIPE, None)]


def test_nothing_in_the_line_that_cmd_would_take_amiss() -> None:
    assert not {*'"%^&|<>!'} & {*msvc_env.TELL}


def test_cmake_takes_ninja_and_the_prompts_compiler(studio: Studio, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where another compiler stands first on PATH, as on GitHub's machines."""
    real = shutil.which("g++")
    if real is None:
        pytest.skip("g++ stands for cl here")
    program(studio.tools() / "cl", f'#!/bin/sh\nexec {real} "$@"\n')
    studio.batch(VCVARSALL.format(tools=studio.tools()) + f'PATH="{tmp_path}/others:$PATH"\n')
    for name in ("c++", "g++", "CC"):
        program(tmp_path / "others" / name, f'#!/bin/sh\nexec {real} "$@"\n')
    monkeypatch.setenv("PATH", compiler.tools_first()["PATH"])
    (tmp_path / "CMakeLists.txt").write_text("cmake_minimum_required(VERSION 3.28)\nproject(small LANGUAGES CXX)\n", "utf-8")
    assert main(["msvc-env", "--", "cmake", "-S", str(tmp_path), "-B", str(tmp_path / "build")]) == 0
    cache = (tmp_path / "build" / "CMakeCache.txt").read_text("utf-8")
    assert "CMAKE_GENERATOR:INTERNAL=Ninja\n" in cache
    assert f"CMAKE_CXX_COMPILER:FILEPATH={studio.tools()}/cl\n" in cache


def test_cibuildwheel_chooses_nothing_else() -> None:
    """It hands the environment of its caller on to the build, with what its configuration sets."""
    options = tomllib.loads((matrix.REPOSITORY / "pyproject.toml").read_text("utf-8"))["tool"]["cibuildwheel"]
    assert "environment" not in options
    assert "environment" not in options.get("windows", {})


def test_the_toolset_is_the_oldest_compiler_that_is_taken() -> None:
    """MSVC 19.x is the compiler of toolset 14.x."""
    assert DECLARED.toolset == DECLARED.minimum.replace("19.", "14.", 1)
