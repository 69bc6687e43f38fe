"""The doctor on a machine with a GPU: what it says of the libraries that are loaded."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = [pytest.mark.gpu, pytest.mark.older_gpus, pytest.mark.skipif(sys.platform != "linux", reason="loads a Linux library")]


def doctor(**variables: str) -> dict[str, dict[str, str]]:
    command = [sys.executable, "-m", "mlx_cuda", "doctor", "--json"]
    done = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, check=False)
    assert done.stderr == ""
    return {check["name"]: check for check in json.loads(done.stdout)["checks"]}


def files(summary: str) -> Iterator[Path]:
    """Those of ``/a/libcudnn.so.9 (9.19.0), /a/libnvrtc.so.13 (13.0)``."""
    return (Path(word) for word in summary.split() if word.startswith("/"))


def test_the_loaded_libraries_are_the_packages() -> None:
    checks = doctor()
    assert (checks["run"]["status"], checks["loaded"]["status"]) == ("ok", "ok"), checks
    found = list(files(checks["loaded"]["summary"]))
    assert {path.name.partition(".so")[0] for path in found} >= {"libcudnn", "libcublasLt", "libnvrtc"}
    assert all(path.is_file() for path in found)


def test_a_library_that_comes_first_is_named(tmp_path: Path) -> None:
    """A copy of the package's own, which runs as well."""
    (own,) = (path for path in files(doctor()["loaded"]["summary"]) if path.name.startswith("libnvrtc.so"))
    for beside in own.parent.glob("libnvrtc-builtins*"):
        (tmp_path / beside.name).symlink_to(beside)
    copy = Path(shutil.copy(own, tmp_path / own.name))
    checks = doctor(LD_PRELOAD=str(copy))
    assert checks["run"]["status"] == "ok", checks["run"]
    assert (checks["loaded"]["status"], checks["loaded"]["fix"]) == ("warn", f"take {copy} out of LD_PRELOAD")
    assert checks["loaded"]["summary"].startswith(f"{copy} is loaded instead of ")
