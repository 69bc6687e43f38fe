"""``python -m ci load``: native modules meet a real loader, and stubs of all that lies outside the wheel."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ci import __main__
from ci.errors import CheckFailed, EnvironmentProblem
from ci.trial import load
from ci.wheelfile.wheel import read

from .audit_support import CU13, NAMES, Files, World, make_world, member, with_module, write_wheel
from .damage_support import without_sections

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the loader of Linux is asked")

# A static initialiser runs when the module is loaded; the functions of MLX and of Python are only bound.
GOOD = """
#include <stdio.h>
void *mlx_core(void); int PyLong_AsLong(void *);
__attribute__((constructor)) static void begin(void) { puts("initialised"); fflush(stdout); }
int use(void *o) { return mlx_core() && PyLong_AsLong(o); }
"""


@pytest.fixture
def made(tmp_path: Path, files: Files, world: World) -> Callable[[str], Path]:
    def wheel(source: str) -> Path:
        changed = dict(files)
        with_module(world, source=source)(changed)
        return write_wheel(tmp_path / NAMES["linux"], changed)

    return wheel


def test_a_good_wheel(made: Callable[[str], Path], capfd: pytest.CaptureFixture[str]) -> None:
    assert __main__.main(["load", str(made(GOOD))]) == 0
    out = capfd.readouterr().out
    assert "initialised" in out
    assert [line.split()[0] for line in out.splitlines() if " loaded by " in line] == ["_cu12.abi3.so", "_cu13.abi3.so"]


def test_without_section_headers(made: Callable[[str], Path], tmp_path: Path) -> None:
    """The loader reads none: neither does what makes the stubs, so that a sound module is not called broken."""
    path = made(GOOD)
    files = {
        name: without_sections(data) if name.endswith(".so") else data
        for name, data in read(path).members.items()
        if not name.endswith("/RECORD")
    }
    load.check(write_wheel(tmp_path / "stripped" / path.name, files), pythons=[sys.executable])


def test_an_older_python_lacks_what_a_stand_in_has(made: Callable[[str], Path], world: World, tmp_path: Path) -> None:
    """The prepared folder gives the same answer under any loader that is asked; here one that says it is Python 3.8."""
    source = "int PyLong_NotYetThere(void *); int use(void *o) { return PyLong_NotYetThere(o); }"
    load.prepare(read(made(source)), tmp_path / "made")
    script = tmp_path / "made" / "load.py"
    assert not load.load(tmp_path / "made", [sys.executable])
    script.write_text("import sys; sys.version_info = (3, 8)\n" + script.read_text())
    assert load.load(tmp_path / "made", [sys.executable])


def test_a_missing_symbol_of_the_system(
    made: Callable[[str], Path], capfd: pytest.CaptureFixture[str], world: World, tmp_path: Path
) -> None:
    """Asked of glibc by version: no stub may give it."""
    wheel = made("#include <string.h>\nvoid use(void *a, void *b, long n) { memcpy(a, b, n); }")
    changed = dict(read(wheel).members)
    module = member(world, CU13)
    assert b"GLIBC_2.14\0" in changed[module] or pytest.skip("this compiler asks for no versioned memcpy")
    changed[module] = _newer(changed[module])
    with pytest.raises(CheckFailed, match=f"^{wheel.name} does not load; the loader's message is above$"):
        load.check(write_wheel(tmp_path / "damaged" / wheel.name, changed), pythons=[sys.executable])
    assert "GLIBC_9.99" in capfd.readouterr().err


def _newer(module: bytes) -> bytes:
    """GLIBC_2.14 becomes GLIBC_9.99, with the hash of that name, which the loader compares first."""

    def elf_hash(name: str) -> bytes:
        value = 0
        for byte in name.encode():
            value = (value << 4) + byte
            value = (value ^ (value & 0xF0000000) >> 24) & ~(value & 0xF0000000)
        return (value & 0xFFFFFFFF).to_bytes(4, "little")

    return module.replace(b"GLIBC_2.14\0", b"GLIBC_9.99\0").replace(elf_hash("GLIBC_2.14"), elf_hash("GLIBC_9.99"))


def test_a_wheel_for_another_architecture(made: Callable[[str], Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    load.prepare(read(made(GOOD)), tmp_path / "made")
    (tmp_path / "made" / "machine").write_text("riscv64")
    assert not load.load(tmp_path / "made", [sys.executable])
    assert capfd.readouterr().err.startswith("wrong architecture: the wheel is for riscv64, this Python for ")


def test_a_windows_wheel(tmp_path: Path) -> None:
    windows = make_world(tmp_path / "windows", "windows")
    wheel = write_wheel(tmp_path / NAMES["windows"], {member(windows, CU13): b""})
    with pytest.raises(EnvironmentProblem, match=f"^{wheel.name} is for Windows\n  fix: give a Linux wheel; Windows wheels are"):
        load.check(wheel, pythons=[sys.executable])


def test_a_wheel_without_native_modules(tmp_path: Path, files: Files, world: World) -> None:
    wheel = write_wheel(tmp_path / NAMES["linux"], {name: data for name, data in files.items() if not name.endswith(".so")})
    with pytest.raises(CheckFailed, match=f"^{wheel.name} holds no native module$"):
        load.check(wheel, pythons=[sys.executable])


def test_the_modules_get_none_of_the_callers_secrets(
    made: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GH_TOKEN", "hush")
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nenv\n")
    python.chmod(0o755)
    load.check(made(GOOD), pythons=[str(python)])
    out = capfd.readouterr().out
    assert "PATH=" in out
    assert "hush" not in out


def test_no_such_interpreter(made: Callable[[str], Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert __main__.main(["load", str(made(GOOD)), "--python", "no-such-python"]) == 2
    said = "error: no-such-python is not installed\n  fix: install no-such-python, or name another\n"
    assert capsys.readouterr().err == said


@pytest.mark.parametrize(("engine", "asked"), [("podman", []), ("docker", ["--engine", "docker"])])
def test_an_image_is_run_without_a_network(
    made: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, engine: str, asked: list[str]
) -> None:
    commands: list[list[str]] = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        folder = Path(command[4].removeprefix("--volume=").removesuffix(":/load:ro"))
        assert folder.stat().st_mode & 0o777 == 0o755, "another user has to read it"
        command[4] = command[4].replace(str(folder), "FOLDER")
        return subprocess.CompletedProcess(command, 0)

    wheel = made(GOOD)
    monkeypatch.setattr(subprocess, "run", run)
    assert __main__.main(["load", str(wheel), "--image", "debian:11", "--image", "fedora", *asked]) == 0
    start = [engine, "run", "--rm", "--network=none", "--volume=FOLDER:/load:ro"]
    assert commands == [[*start, image, "python3", "/load/load.py"] for image in ("debian:11", "fedora")]
    load.check(wheel, images=["alpine"])
    assert (commands[2][0], commands[2][5]) == ("podman", "alpine")
