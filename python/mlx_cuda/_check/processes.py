"""The processes of a check, one after the other: each has the GPU for itself, and a crash is reported as a result."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from .._common.errors import quote
from .._doctor import interpreter_options
from .forms import Side, Task

PARTS = {"upstream": 8, "patched": 9, "float32": 6}  # of each side, for the progress
CODE = """\
import json, sys
task = json.load(sys.stdin)
sys.path[:] = task.pop("path")
from mlx_cuda._check.child import main
main(task)
"""
IN_FLOAT32 = {"MLX_ENABLE_TF32": "0"}  # of the reference alone; both sides multiply as the user's programs do
KILLED = -9
FIX_OF_FOLDERS = "give a folder with config.json, model*.safetensors and a tokenizer, or a name such as mlx-community/Qwen3-4B-4bit"
NOT_DOWNLOADED = ("HFValidation", "Repository", "LocalEntryNotFound", "Connect", "Offline", "HTTP")  # in the names of errors
FULL = ("out of memory", "Unable to allocate", "allocation failed")  # in messages


class SideFailed(Exception):
    """A process ended without a result."""


class CannotLoad(Exception):
    """mlx-lm cannot load the model."""


def require_mlx_lm() -> None:
    """Raise an ImportError, with the fix, unless mlx-lm is installed."""
    if importlib.util.find_spec("mlx_lm") is None:
        raise ImportError("[check] mlx-lm is not installed.\n  fix: pip install mlx-lm")


def require_model(model: str) -> None:
    """Raise a ValueError if the folder is not a model's, and the name cannot be one on Hugging Face."""
    path = Path(model)
    if path.exists() and not (path / "config.json").is_file():
        raise ValueError(f"[check] {model} is not a model folder: it has no config.json.\n  fix: {FIX_OF_FOLDERS}")
    if not path.exists() and (path.is_absolute() or model.startswith((".", "~")) or len(path.parts) > 2):
        raise ValueError(f"[check] There is no folder {model}.\n  fix: {FIX_OF_FOLDERS}")


def fix_of(model: str, error: str) -> str:
    """Return the fix if mlx-lm cannot load a model."""
    if "not supported" in error and "odel type" in error:
        return "pip install -U mlx-lm, if a newer version supports this model type"
    if any(words in error for words in FULL):
        return "end other programs on this GPU, or use a smaller or quantized model"
    if any(words in error for words in NOT_DOWNLOADED):
        return f"check the name and the permission to download it, or {FIX_OF_FOLDERS}"
    return f"check whether this works: python -m mlx_lm generate --model {quote(model)}"


def run(task: Task, begin: Callable[[str], None]) -> Side:
    """Run the process of one side and return its measurements; ``begin`` is called before each part. An interrupt ends the process."""
    environment = os.environ | (IN_FLOAT32 if task["side"] == "float32" else {})
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors:
        command = [sys.executable, *interpreter_options(), "-W", "ignore", "-c", CODE]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, encoding="utf-8", env=environment
        ) as process:
            try:
                found = _listen(process, task, begin)
            except BaseException:
                process.kill()
                raise
        if "cannot_load" in found:
            raise CannotLoad(found["cannot_load"])
        if "found" not in found or process.returncode:
            errors.seek(0)
            raise SideFailed(_ending(process.returncode, errors.read()))
    side: Side = found["found"]
    return side


def _listen(process: subprocess.Popen[str], task: Task, begin: Callable[[str], None]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    assert process.stdin is not None  # noqa: S101  (both are pipes)
    try:
        json.dump({**task, "path": sys.path}, process.stdin)
        process.stdin.close()
    except BrokenPipeError:  # it has ended already
        return found
    for message in _messages(process):
        if "part" in message:
            begin(message["part"])
        found |= message
    return found


def _messages(process: subprocess.Popen[str]) -> Iterator[dict[str, Any]]:
    for line in process.stdout or ():
        yield json.loads(line)


def _ending(returncode: int, errors: str) -> str:
    last = next((line for line in reversed(errors.strip().splitlines()) if line.strip()), "without a message")
    killed = " (probably out of memory)" if returncode == KILLED else ""
    return f"the process ended with {returncode}{killed}: {last.strip()}"
