"""Provision the toolkits inside a cibuildwheel build: the ``before-all`` hook.

It needs only Python and pip, so it runs alike in any manylinux container and on Windows, and it starts from whichever interpreter
the hook was called with: where that is too old for the factory, a newer one of the container's /opt/python is taken. Arguments go
on to ``python -m ci toolkit install``, whose exit code is this script's.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
OLDEST = (3, 10)  # requires-python of the project


def main(arguments: list[str]) -> int:
    interpreter = choose_interpreter(sys.executable, sys.version_info[:2], Path("/opt/python"))
    if interpreter is None:
        needed = ".".join(map(str, OLDEST))
        print(f"error: Python {needed} or newer is needed, and /opt/python holds none\n  cure: run this script with one", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="mlx-cuda-factory-") as folder:
        windows = sys.platform == "win32"
        uv = str(Path(folder, "uv", "bin", "uv.exe" if windows else "uv"))
        python = str(Path(folder, "venv", "Scripts/python.exe" if windows else "bin/python"))
        for command in (
            [interpreter, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--target", str(Path(folder, "uv")), "uv"],
            [uv, "venv", "--quiet", "--python", interpreter, str(Path(folder, "venv"))],
            [uv, "pip", "install", "--quiet", "--python", python, "--group", f"{REPOSITORY / 'pyproject.toml'}:factory"],
            [python, "-m", "ci", "toolkit", "install", *arguments],
        ):
            print("+", shlex.join(command), file=sys.stderr, flush=True)
            code = subprocess.run(command, cwd=REPOSITORY, check=False).returncode
            if code:
                return code
    return 0


def choose_interpreter(current: str, version: tuple[int, ...], folder: Path) -> str | None:
    """The running interpreter if it is new enough, else the newest CPython of a manylinux container (not a free-threaded one)."""
    if version >= OLDEST:
        return current
    found = []
    for path in folder.glob("cp3*/bin/python"):
        match = re.fullmatch(r"cp(3)(\d+)-cp3\d+", path.parent.parent.name)
        if match and (int(match[1]), int(match[2])) >= OLDEST:
            found.append((int(match[2]), str(path)))
    return max(found)[1] if found else None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
