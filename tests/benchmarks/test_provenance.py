"""What is said of the machine."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.provenance import memory_used

if TYPE_CHECKING:
    import pytest


def test_the_gpu_that_is_asked_is_the_first_visible_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text('#!/bin/sh\ncase "$*" in *--id=3*) echo 300;; *--id*) exit 6;; *) echo 100; echo 300;; esac\n', "utf-8")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    for visible, expected in (("", 100), ("3,0", 300), ("-1", None)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert memory_used() == expected
