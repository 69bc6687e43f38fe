"""Where numbers come from: machine, versions, the wheel and the commit."""

from __future__ import annotations

import datetime as dt
import hashlib
import os
import platform
import re
import subprocess
from collections.abc import Sequence
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_cuda._loader import native as _native

GPU_FIELDS = (
    "name",
    "driver_version",
    "clocks.sm",
    "clocks.mem",
    "clocks.max.sm",
    "power.draw",
    "power.limit",
    "temperature.gpu",
)
DISTRIBUTIONS = re.compile(r"(mlx|nvidia|torch|triton|fla-core|flash-linear-attention|numpy|nanobind).*", re.IGNORECASE)
LIBRARIES = re.compile(r"/lib(cudnn|cublas|cublasLt|cudart|mlx|cuda)\.so[^/]*$")


def _ask(fields: Sequence[str], *options: str) -> list[str] | None:
    """What nvidia-smi tells of the first GPU that this process sees; None where there is no nvidia-smi."""
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0]
    asked = [f"--query-gpu={','.join(fields)}", f"--format={','.join(('csv', 'noheader', *options))}"]
    command = ["nvidia-smi", *([f"--id={first}"] if first else []), *asked]
    try:
        output = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return [value.strip() for value in output.splitlines()[0].split(",")]


def gpu_state() -> dict[str, str] | None:
    """Clocks, power and temperature of the first GPU, where nvidia-smi tells them."""
    values = _ask(GPU_FIELDS)
    return dict(zip(GPU_FIELDS, values, strict=False)) if values else None


def memory_used() -> float | None:
    """MiB of the first GPU's memory that the driver has given away, where nvidia-smi tells it."""
    values = _ask(["memory.used"], "nounits")
    return float(values[0]) if values and values[0].replace(".", "").isdigit() else None


def native() -> dict[str, Any] | None:
    """What the loaded native module says of itself; None without a GPU."""
    if not mx.cuda.is_available():
        return None
    module = _native.load()
    if isinstance(module, Exception):
        return {"error": str(module)}
    return {"build": dict(module.build_info()), "libraries": dict(module.library_versions())}


def torch_versions(torch: Any) -> dict[str, Any]:
    return {"torch": torch.__version__, "cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}


def loaded_libraries() -> list[str]:
    """The CUDA libraries mapped into this process, from site-packages on: whether MLX and torch share one cuDNN."""
    try:
        maps = Path("/proc/self/maps").read_text("utf-8")
    except OSError:
        return []
    paths = {line.split(maxsplit=5)[-1] for line in maps.splitlines()}
    return sorted({path.rpartition("-packages/")[2] for path in paths if LIBRARIES.search(path)})


def commit() -> str | None:
    """The commit of the checkout, with a mark when it has changes; None outside of one."""
    try:
        command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
        return subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parent).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


@cache  # reading the metadata of all that is installed takes a fifth of a second
def distributions() -> dict[str, str]:
    """Versions of what takes part in a measurement, sorted by name."""
    found = {each.metadata["Name"]: each.version for each in metadata.distributions()}
    return {name: found[name] for name in sorted(found, key=str.lower) if DISTRIBUTIONS.fullmatch(name)}


def collect(arguments: Sequence[str], *, torch: Any | None, commit_name: str | None, wheel: Path | None, quick: bool) -> dict[str, Any]:
    """Everything that is known before the first measurement."""
    return {
        "date": dt.datetime.now(dt.timezone.utc).isoformat(timespec="seconds"),
        "command": ["python", "-m", "benchmarks", *(Path(word).name if Path(word).is_absolute() else word for word in arguments)],
        "quick": quick,
        "commit": commit_name or os.environ.get("MLX_CUDA_COMMIT") or commit(),
        "wheel": {"name": wheel.name, "sha256": hashlib.sha256(wheel.read_bytes()).hexdigest()} if wheel else None,
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}",
        "device": str(mx.device_info().get("device_name", "unknown")),
        "gpu_before": gpu_state(),
        "native": native(),
        "torch": torch_versions(torch) if torch else None,
        "distributions": distributions(),
    }
