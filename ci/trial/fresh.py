"""A fresh virtual environment, made and filled by uv, that nothing of the source tree or of the caller's shell reaches into.

uv starts the environment's interpreter, and that runs installed code: whatever uv installs comes before the code of a wheel has run.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import process
from ..errors import CheckFailed, EnvironmentProblem
from ..matrix import load
from ..toolkit import uv
from . import variables

# uv's messages if the requirements are at fault, not this machine or its network.
_AT_FAULT = re.compile(
    r"No solution found|Hash mismatch|incompatible with the current platform|Building source distributions .*is disabled"
)
_VERSION = "import platform, sysconfig; print(platform.python_version() + ('t' if sysconfig.get_config_var('Py_GIL_DISABLED') else ''))"


@dataclass(frozen=True)
class Fresh:
    """An environment in ``folder``; its maker removes the directory."""

    folder: Path

    @classmethod
    def make(cls, folder: Path, python: str | Path | None = None) -> Fresh:
        """Make an empty environment for ``python``: a path, a version such as ``3.13``, or this interpreter's own version."""
        wanted = str(python or sys.executable)
        done = _uv("venv", "--quiet", "--no-project", "--python", wanted, str(folder.absolute()))
        if done.returncode:
            said = done.stderr.strip().partition("\n")[0].removeprefix("error: ")
            raise EnvironmentProblem(f"no environment for Python {wanted}: {said}", fix="give the path of an installed interpreter")
        return cls(folder.absolute())

    @property
    def python(self) -> Path:
        return self.folder / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")

    @property
    def activation(self) -> str:
        """The command that activates it in a shell of this system."""
        if sys.platform == "win32":
            return f'"{self.folder}\\Scripts\\activate"'
        return f"source {shlex.quote(str(self.folder / 'bin' / 'activate'))}"

    @property
    def version(self) -> str:
        """The version of its Python, with a ``t`` where it is free-threaded."""
        return self.run("-c", _VERSION).stdout.strip()

    def install(self, *requirements: str, options: Sequence[str] = ()) -> None:
        """Install requirements as wheels, from the index that uv uses; ``options`` are passed to ``uv pip install``.

        CheckFailed where the requirements cannot be met or a file is damaged, EnvironmentProblem where it is this machine or its network.
        """
        done = _uv("pip", "install", "--no-build", "--python", str(self.python), *options, *requirements)
        if done.returncode and _AT_FAULT.search(done.stderr):
            raise CheckFailed(f"cannot install {' '.join((*options, *requirements))}:\n{done.stderr.strip()}")
        if done.returncode:
            sys.stderr.write(done.stderr)
            raise uv.explain(done.stderr, done.returncode)

    def run(
        self, *arguments: str, cwd: Path | None = None, env: Mapping[str, str] | None = None, show: bool = False, installs: bool = False
    ) -> subprocess.CompletedProcess[str]:
        """Run its interpreter, by default in its own folder, and return the result, whatever the exit code.

        ``show`` passes everything on to stderr at once instead of returning it. A program that ``installs`` is not the wheel's code, and
        gets the caller's index, proxy and home.
        """
        home = self.folder / "home"
        home.mkdir(exist_ok=True)
        environment = {**(variables.for_installers() if installs else variables.for_code(home)), **(env or {})}
        return process.run([self.python, *arguments], cwd=cwd or self.folder, env=environment, show=show)

    def doctor(self) -> dict[str, Any]:
        """The result of the package's ``doctor --json``: its version under its name, ``ok``, ``checks`` (name, status, summary, fix)."""
        done = self.run("-m", load().module, "doctor", "--json")
        try:
            report: dict[str, Any] = json.loads(done.stdout)
        except ValueError:
            said = done.stderr.strip().rpartition("\n")[2] or "nothing"
            raise CheckFailed(f"the doctor did not run: exit code {done.returncode}, and it said: {said}") from None
        return report


def _uv(*arguments: str) -> subprocess.CompletedProcess[str]:
    return process.run([uv.executable(), "--color", "never", *arguments], env=variables.for_installers())
