"""What runs on users' machines: ld.so, pip and uv, each asked what it makes of a wheel. None: it refuses."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from ci.trial import load, variables

from .mutants import Files, Mutant, Subject

SECONDS = 120
# After `ci load`'s script: what the process has of each module, and which libraries came with it.
FACTS = """
import json
maps = [line.split(None, 5) for line in open("/proc/self/maps")]
maps = [(each[5].rstrip(), each[1], each[2], eval("-0x" + each[0].replace("-", "+0x"))) for each in maps if len(each) > 5]
told = {"libraries": sorted({os.path.basename(path) for path, *_ in maps})}
for path in files("modules"):
    name = "PyInit_" + os.path.basename(path).split(".")[0]
    told[os.path.basename(path)] = [hasattr(ctypes.PyDLL(path), name), [each[1:] for each in maps if each[0] == path]]
print(json.dumps(told))
"""
BINDING = re.compile(r"binding file (\S+) \[0\] to (\S+) \[0\]: (.*)")
WRITTEN = {"RECORD", "INSTALLER", "REQUESTED", "direct_url.json", "uv_cache.json", ".lock"}  # by installers


class Loader:
    """ld.so, with stubs of all that lies outside the wheel, made of the good one."""

    def __init__(self, subject: Subject, folder: Path) -> None:
        self.folder = folder
        load.prepare(subject.wheel, folder)
        (folder / "load.py").write_text(load.SCRIPT + FACTS)

    def __call__(self, mutant: Mutant) -> Any:
        """The libraries of the process, the modules' memory, and what their symbols are bound to in other libraries."""
        for module in (self.folder / "modules").iterdir():
            (name,) = (each for each in mutant.files if PurePosixPath(each).name == module.name)
            module.unlink()  # not written over: what is loaded elsewhere would change
            module.write_bytes(mutant.files[name])
        debug = {"LD_DEBUG": "bindings", "LD_DEBUG_OUTPUT": str(self.folder / "bindings")}
        said = _said([sys.executable, str(self.folder / "load.py")], variables.for_code(self.folder) | debug)
        bound = set[tuple[str, ...]]()
        for path in self.folder.glob("bindings.*"):
            bound |= {
                tuple(PurePosixPath(word).name if "/" in word else word for word in each) for each in BINDING.findall(path.read_text())
            }
            path.unlink()
        bound = {each for each in bound if each[0].startswith("_cu") and each[0] != each[1]}
        return None if said is None else (json.loads(said.splitlines()[-1]), bound)


class Installer:
    """pip or uv, into an empty folder."""

    def __init__(self, command: Sequence[str]) -> None:
        self.command = command

    def __call__(self, mutant: Mutant) -> Any:
        """The files, with their modes and digests, as far as they are the wheel's."""
        with tempfile.TemporaryDirectory() as folder:
            if _said([*self.command, "--target", folder, str(mutant.path)], variables.for_installers()) is None:
                return None
            files = [path for path in Path(folder).rglob("*") if path.is_file() and path.name not in WRITTEN]
            return {path.relative_to(folder).as_posix(): (path.stat().st_mode, _digest(path.read_bytes())) for path in files}


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _said(command: Sequence[str], env: dict[str, str]) -> str | None:
    try:
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=SECONDS, env=env, errors="replace")
    except subprocess.TimeoutExpired:
        return None
    return None if done.returncode else done.stdout


PIP = ("-m", "pip", "install", "--no-deps", "--no-index", "--no-compile", "--ignore-installed", "--disable-pip-version-check")
UV = ("-m", "uv", "pip", "install", "--no-deps", "--no-index", "--no-cache", "--offline", "--python", sys.executable)


def oracles(subject: Subject, folder: Path) -> dict[str, Callable[[Mutant], Any]]:
    return {"ld.so": Loader(subject, folder), "pip": Installer([sys.executable, *PIP]), "uv": Installer([sys.executable, *UV])}


def expected(good: dict[str, tuple[int, str]], files: Files) -> dict[str, tuple[int, str]]:
    """What an installer makes of these files, where it does as with the good wheel."""
    return {name: (mode, _digest(files[name])) for name, (mode, _) in good.items()}
