"""What the tests of fresh environments, artifacts and trials share: wheels that stand for ours."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from .audit_support import DIST_INFO, VERSION, Files, write_wheel

# Enough to be a wheel with a right RECORD.
FILES: Files = {"mlx_cuda/__init__.py": b"", f"{DIST_INFO}/METADATA": f"Name: mlx-cuda\nVersion: {VERSION}\n".encode()}
TAG = f"py3-none-{sysconfig.get_platform().replace('-', '_')}"  # for any Python of this machine
PURE = f"mlx_cuda-{VERSION}-{TAG}.whl"
DOCTOR = {"mlx_cuda": VERSION, "ok": True, "checks": []}


def make_wheel(folder: Path, *, init: str = "", main: str = f"print({json.dumps(DOCTOR)!r})", requires: str = "", pth: str = "") -> Path:
    """A wheel of pure Python that can be installed; `main` is what its doctor does, `pth` what every start of its interpreter does."""
    extras = "".join(f"Provides-Extra: {extra}\n" for extra in ("cpu", "cu12", "cu13"))
    files = {
        "mlx_cuda/__init__.py": f"__version__ = {VERSION!r}\n{init}",
        "mlx_cuda/__main__.py": main,
        f"{DIST_INFO}/METADATA": f"Metadata-Version: 2.1\nName: mlx-cuda\nVersion: {VERSION}\n{extras}{requires}",
        f"{DIST_INFO}/WHEEL": f"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: {TAG}\n",
    }
    if pth:
        files["every_start.pth"] = pth
    return write_wheel(folder / PURE, {name: text.encode() for name, text in files.items()})


# Stands for GitHub's command line: answers each path as it was told, and writes down how it was called.
GH = """#!{python}
import json, os, pathlib, sys
folder = pathlib.Path({folder!r})
with (folder / "calls").open("a") as calls:
    print(json.dumps(sys.argv[1:]), file=calls)
code, out, err = json.loads((folder / "answers.json").read_text()).get(sys.argv[4], [1, "", "gh: Not Found (HTTP 404)"])
sys.stderr.write(err)
sys.stdout.flush()
sys.stdout.buffer.write(pathlib.Path(out).read_bytes() if os.path.isabs(out) else out.encode())
sys.exit(code)
"""


@dataclass(frozen=True)
class Gh:
    folder: Path

    def answer(self, path: str, out: str | Path, *, code: int = 0, err: str = "") -> None:
        """Answer this path with a text, or with what is in a file."""
        file = self.folder / "answers.json"
        answers = json.loads(file.read_text()) if file.exists() else {}
        file.write_text(json.dumps(answers | {path: [code, str(out), err]}))

    @property
    def calls(self) -> list[list[str]]:
        return [json.loads(line) for line in (self.folder / "calls").read_text().splitlines()]


def make_gh(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Gh:
    """A ``gh`` that is found before any other."""
    if sys.platform == "win32":
        pytest.skip("the stub for gh is a script")
    folder.mkdir()
    (folder / "answers.json").write_text("{}")
    (folder / "gh").write_text(GH.format(python=sys.executable, folder=str(folder)))
    (folder / "gh").chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)
    monkeypatch.delenv("GITHUB_REPOSITORY", raising=False)
    return Gh(folder)


# How ci.process runs a program.
ALWAYS: dict[str, Any] = {
    "check": False,
    "stdin": subprocess.DEVNULL,
    "stdout": subprocess.PIPE,
    "stderr": subprocess.PIPE,
    "encoding": "utf-8",
    "errors": "replace",
}
Runs = list[tuple[list[str], dict[str, Any]]]


def record(monkeypatch: pytest.MonkeyPatch, code: int = 0, out: str | bytes = "", err: str | bytes = "") -> Runs:
    """In place of programs: each ends with this, and is written down as it was called."""
    runs: Runs = []

    def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str | bytes]:
        runs.append((command, options))
        return subprocess.CompletedProcess(command, code, out, err)

    monkeypatch.setattr(subprocess, "run", run)
    return runs
