"""Small wheels of a whole release, for every declared platform and build: pure Python inside, and honest about nothing but their names."""

from __future__ import annotations

import base64
import hashlib
import zipfile
from typing import TYPE_CHECKING

from ci.matrix import Build, Platform, load

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

MATRIX = load()
VERSION = f"{MATRIX.mlx}.7"
EXTRAS = ("cpu", *(cuda.extra for cuda in MATRIX.cuda.values()))
# As much of the package as verification looks at: it can be imported, and its doctor is content.
PACKAGE = {
    "__init__.py": "",
    "__main__.py": "import json\nfrom importlib.metadata import version\n"
    "print(json.dumps({'mlx_cuda': version('mlx-cuda'), 'ok': True, 'checks': []}))\n",
}


def wheel_name(platform: Platform, build: Build, version: str = VERSION) -> str:
    return f"{MATRIX.module}-{version}-{build.abi}-{platform.tag}.whl"


def metadata(version: str = VERSION) -> str:
    lines = [
        "Metadata-Version: 2.4",
        f"Name: {MATRIX.name}",
        f"Version: {version}",
        "Summary: a wheel of the tests",
        "License-Expression: MIT",
    ]
    lines += ["Requires-Python: >=3.10", *(f"Provides-Extra: {extra}" for extra in EXTRAS), "Description-Content-Type: text/markdown"]
    return "\n".join([*lines, "", "# mlx-cuda", ""])


def write_wheel(path: Path, *, version: str = VERSION, changes: Mapping[str, str | None] | None = None) -> Path:
    """A wheel under this name; `changes` replaces members of .dist-info, or removes them by None."""
    tag = path.name.removesuffix(".whl").split("-", 2)[2]
    python, abi, platforms = tag.split("-")
    information: dict[str, str | None] = {
        "METADATA": metadata(version),
        "WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: false\n"
        + "".join(f"Tag: {python}-{abi}-{platform}\n" for platform in platforms.split(".")),
        "sboms/mlx-cuda.cdx.json": '{"bomFormat": "CycloneDX"}\n',
        **(changes or {}),
    }
    folder = f"{MATRIX.module}-{version}.dist-info"
    files = {f"{MATRIX.module}/{name}": text for name, text in PACKAGE.items()}
    files |= {f"{folder}/{name}": text for name, text in information.items() if text is not None}
    files[f"{MATRIX.module}/platform.txt"] = tag
    record = "".join(f"{name},{_digest(text)},{len(text)}\n" for name, text in files.items()) + f"{folder}/RECORD,,\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in {**files, f"{folder}/RECORD": record}.items():
            archive.writestr(zipfile.ZipInfo(name, (2026, 1, 2, 3, 4, 6)), text)
    return path


def _digest(text: str) -> str:
    return "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()


def make_dist(folder: Path, version: str = VERSION) -> Path:
    """A folder with every wheel of a release."""
    for platform in MATRIX.platforms.values():
        for build in MATRIX.builds:
            write_wheel(folder / wheel_name(platform, build, version), version=version)
    return folder
