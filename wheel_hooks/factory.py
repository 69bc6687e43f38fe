"""Run ``python -m ci ARGUMENTS`` in an environment made for it: what cibuildwheel's repair and audit commands call.

It needs only Python and pip, so it runs alike in any manylinux container, on Windows, and on the machine outside the container. The
environment holds requirements/factory.txt, installed by the uv of requirements/uv.txt, nothing without its hash. It is made once for each
state of these files, by the first call, from whichever interpreter that was made with (where it is too old for the factory, from the
newest of the container's /opt/python); later calls use it, from whichever interpreter they are made.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
OLDEST = (3, 10)  # requires-python of the project
LOCKS = [REPOSITORY / "requirements" / name for name in ("uv.txt", "factory.txt")]
WINDOWS = sys.platform == "win32"
COMPLETE = "mlx-cuda-factory.complete"


def main(arguments: list[str]) -> int:
    try:
        folder = environment()
    except RuntimeError:
        print("error: the user has no home directory, where the factory is kept\n  fix: set XDG_CACHE_HOME to a folder", file=sys.stderr)
        return 2
    if not ((folder / COMPLETE).is_file() and Path(python_of(folder)).is_file()) and (code := make(folder)):
        return code
    # Relative paths of the command line are the caller's; the factory itself is found where it lies.
    return run([python_of(folder), "-m", "ci", *arguments], PYTHONPATH=str(REPOSITORY))


def environment() -> Path:
    """The folder of the environment, named after what it is made from."""
    made_from = hashlib.sha256(b"".join(lock.read_bytes() for lock in LOCKS)).hexdigest()
    cache = os.environ.get("LOCALAPPDATA") if WINDOWS else os.environ.get("XDG_CACHE_HOME")
    return Path(cache or Path.home() / ".cache", "mlx-cuda", "factory", made_from[:12])


def make(folder: Path) -> int:
    """Make the environment in its place, since its scripts name the folder; a file in it says that it is complete."""
    interpreter = choose_interpreter(sys.executable, sys.version_info[:2], Path("/opt/python"))
    if interpreter is None:
        needed = ".".join(map(str, OLDEST))
        print(f"error: /opt/python holds no final Python {needed} or newer\n  fix: run this script with one", file=sys.stderr)
        return 2
    shutil.rmtree(folder, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix="mlx-cuda-uv-") as tools:
        uv = str(Path(tools, "bin", "uv.exe" if WINDOWS else "uv"))
        locked_uv, factory = (["--require-hashes", "-r", str(lock)] for lock in LOCKS)
        for command in (
            [interpreter, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--target", tools, *locked_uv],
            [uv, "venv", "--quiet", "--python", interpreter, str(folder)],
            [uv, "pip", "install", "--quiet", "--python", python_of(folder), *factory],
        ):
            if code := run(command):
                return code
    (folder / COMPLETE).touch()
    return 0


def python_of(folder: Path) -> str:
    return str(folder / ("Scripts/python.exe" if WINDOWS else "bin/python"))


def run(command: list[str], **environment: str) -> int:
    print("+", shlex.join(command), file=sys.stderr, flush=True)
    return subprocess.run(command, check=False, env=os.environ | environment).returncode


def choose_interpreter(current: str, version: tuple[int, ...], folder: Path) -> str | None:
    """The running interpreter if it is new enough, else the newest final release of a manylinux container's, not a free-threaded one."""
    if version >= OLDEST:
        return current
    found = []
    for path in folder.glob("cp3*/bin/python"):
        match = re.fullmatch(r"cp(3)(\d+)-cp3\d+", path.parent.parent.name)
        if match and (int(match[1]), int(match[2])) >= OLDEST:
            found.append((int(match[2]), str(path)))
    return next((path for _, path in sorted(found, reverse=True) if is_final(path)), None)


def is_final(python: str) -> bool:
    command = [python, "-c", "import sys; print(sys.version_info.releaselevel)"]
    return subprocess.run(command, check=False, capture_output=True, text=True).stdout.strip() == "final"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
