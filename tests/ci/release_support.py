"""Small wheels of a whole release, for every declared platform and build: pure Python inside, and honest about nothing but their names."""

from __future__ import annotations

import io
import logging
import os
import sys
import traceback
import warnings
import zipfile
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from subprocess import CompletedProcess
from unittest import mock

from ci.files import record_digest
from ci.matrix import Build, Platform, load

MATRIX = load()
PROJECT = MATRIX.name.replace("-", "_")
VERSION = f"{MATRIX.mlx}.7"
EXTRAS = ("cpu", *(cuda.extra for cuda in MATRIX.cuda.values()))
# As much of the package as verification looks at: it can be imported, and its doctor is content unless a dependency came from a stranger.
PACKAGE = {
    "__init__.py": "",
    "__main__.py": """\
import json
from importlib.metadata import version
try:
    from innocent import ORIGIN
except ImportError:
    ORIGIN = "ours"
check = {"name": "origin", "status": "ok" if ORIGIN == "ours" else "fail", "summary": ORIGIN}
print(json.dumps({"mlx_cuda": version("mlx-cuda"), "ok": check["status"] == "ok", "checks": [check]}))
""",
}


def wheel_name(platform: Platform, build: Build, version: str = VERSION) -> str:
    return f"{PROJECT}-{version}-{build.abi}-{platform.tag}.whl"


def metadata(version: str = VERSION, requires: str = "") -> str:
    lines = [
        "Metadata-Version: 2.4",
        f"Name: {MATRIX.name}",
        f"Version: {version}",
        "Summary: a wheel of the tests",
    ]
    lines += ["Requires-Python: >=3.10", *(f"Provides-Extra: {extra}" for extra in EXTRAS)]
    lines += [
        "License-Expression: MIT",
        "License-File: LICENSE",
        *([f"Requires-Dist: {requires}"] if requires else []),
        "Description-Content-Type: text/markdown",
    ]
    return "\n".join([*lines, "", "# mlx-cuda", ""])


def write_wheel(
    path: Path, *, version: str = VERSION, changes: Mapping[str, str | None] | None = None, package: Mapping[str, str] | None = None
) -> Path:
    """A wheel under this name; `changes` replaces members of .dist-info, or removes them by None; `package` adds to the package."""
    tag = path.name.removesuffix(".whl").split("-", 2)[2]
    python, abi, platforms = tag.split("-")
    information: dict[str, str | None] = {
        "METADATA": metadata(version),
        "WHEEL": "Wheel-Version: 1.0\nGenerator: scikit-build-core 1.1.2\nRoot-Is-Purelib: false\n"
        + "".join([*(f"Tag: {python}-{abi}-{platform}\n" for platform in platforms.split(".")), "\n"]),
        "sboms/mlx-cuda.cdx.json": '{"bomFormat": "CycloneDX"}\n',
        "licenses/LICENSE": "MIT\n",
        **(changes or {}),
    }
    folder = f"{PROJECT}-{version}.dist-info"
    files = {f"{MATRIX.module}/{name}": text for name, text in {**PACKAGE, **(package or {})}.items()}
    files |= {f"{folder}/{name}": text for name, text in information.items() if text is not None}
    files[f"{MATRIX.module}/platform.txt"] = tag
    record = "".join(f"{name},{record_digest(text.encode())},{len(text)}\n" for name, text in files.items()) + f"{folder}/RECORD,,\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in {**files, f"{folder}/RECORD": record}.items():
            archive.writestr(zipfile.ZipInfo(name, (2026, 1, 2, 3, 4, 6)), text)
    return path


def make_dist(folder: Path, version: str = VERSION, *, changes: Mapping[str, str | None] | None = None) -> Path:
    """A folder with every wheel of a release."""
    for platform in MATRIX.platforms.values():
        for build in MATRIX.builds:
            write_wheel(folder / wheel_name(platform, build, version), version=version, changes=changes)
    return folder


def write_innocent(folder: Path, origin: str, name: str = "innocent") -> None:
    """A wheel of the one dependency that some of these releases have, or of another name."""
    folder.mkdir(parents=True, exist_ok=True)
    files = {
        f"{name}.py": f"ORIGIN = {origin!r}\n",
        f"{name}-1.0.dist-info/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n",
        f"{name}-1.0.dist-info/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = (
        "".join(f"{each},{record_digest(text.encode())},{len(text)}\n" for each, text in files.items()) + f"{name}-1.0.dist-info/RECORD,,\n"
    )
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as archive:
        for each, text in {**files, f"{name}-1.0.dist-info/RECORD": record}.items():
            archive.writestr(each, text)


def twine_in_this_process(command: Sequence[str], *, env: Mapping[str, str], **_: object) -> CompletedProcess[str]:
    """Return what `process.run` returns for `python -m twine`, in this process: a new interpreter needs half a second to import it.

    Twine replaces the handlers of the root logger and rich's console, which are put back.
    """
    import rich
    from twine.__main__ import main

    assert list(command[:3]) == [sys.executable, "-m", "twine"]
    out, err = io.StringIO(), io.StringIO()
    arguments = mock.patch.object(sys, "argv", ["twine", *command[3:]])
    root, twine = logging.getLogger(), logging.getLogger("twine")
    kept = root.handlers[:], root.level, twine.level, rich.get_console()
    with arguments, mock.patch.dict(os.environ, env, clear=True), redirect_stdout(out), redirect_stderr(err), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            code = int(bool(main()))
        except Exception:
            traceback.print_exc()
            code = 1
        finally:
            root.handlers[:], root.level, twine.level = kept[:3]
            rich._console = kept[3]
    return CompletedProcess(list(command), code, out.getvalue(), err.getvalue())
