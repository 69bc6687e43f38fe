"""The limits that were measured: of GPUs whose table comes with the package, and of this machine's, in a file of the user's.

The user's holds for a GPU's name, the driver, MLX and mlx-cuda, and goes before the package's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .._common.limits import Capability, DispatchThresholds, Figures, as_json, conservative, from_json
from .._version import __version__
from . import tuned_file

FORMAT = 1
SHIPPED = Path(__file__).parents[1] / "_limits.json"
LEAST_BANDWIDTH = 0.2e12  # bytes in a second: taken where the driver does not say, as of memory that is shared with the host

Entries = dict[str, dict[str, Any]]  # by the GPU's name: versions, and limits


def default_path() -> Path | None:
    """Beside the file of tuned algorithms; None where that is switched off."""
    tuned = tuned_file.default_path()
    return beside(tuned) if tuned else None


def beside(tuned: Path) -> Path:
    """The file of limits that goes with one of tuned algorithms."""
    return tuned.with_name(f"{tuned.stem}-limits.json")


def read(path: Path) -> Entries | None:
    """What a file holds, nothing where there is none; None, with a warning, where it is not one of mlx-cuda."""
    return tuned_file.read_as(parse, path, "limits")


def parse(text: str) -> Entries:
    """The entries of a file's text; a ValueError says what is wrong with it."""
    content = json.loads(text)
    if not isinstance(content, dict) or content.get("mlx_cuda_limits") != FORMAT or not isinstance(content.get("gpus"), dict):
        raise ValueError(f"not of the format {FORMAT}")
    entries: Entries = content["gpus"]
    for name, entry in entries.items():
        from_json(entry["limits"] if isinstance(entry, dict) and "limits" in entry else None, name)
    return entries


def _write(path: Path, entries: Entries) -> bool:
    return tuned_file.write(path, {"mlx_cuda_limits": FORMAT, "gpus": entries}, "what was measured")


def measured(name: str, versions: Mapping[str, str], path: Path | None) -> DispatchThresholds | None:
    """Those that were measured on this machine, or on another one with such a GPU."""
    own = (read(path) if path else None) or {}
    if name in own and own[name].get("versions") == dict(versions):
        return from_json(own[name]["limits"], f"measured here on {name}")
    shipped = read(SHIPPED) or {}
    return from_json(shipped[name]["limits"], f"measured on {name}, with mlx-cuda") if name in shipped else None


def keep(path: Path, name: str, versions: Mapping[str, str], limits: DispatchThresholds) -> bool:
    """Put the limits of a GPU into a file, instead of those that it has there; False where that cannot be."""
    entries = read(path)
    if entries is None:
        return False
    entries[name] = {"versions": dict(versions), "limits": as_json(limits)}
    return _write(path, entries)


def remove(path: Path, name: str) -> bool:
    """Take those of a GPU out of a file; False where there are none."""
    entries = read(path)
    if not entries or name not in entries:
        return False
    del entries[name]
    return _write(path, entries)


def versions(driver: str, mlx: str) -> dict[str, str]:
    """What limits hold for, besides the GPU."""
    return {"driver": driver, "mlx": mlx, "mlx_cuda": __version__}


def by_data_sheet(capability: Capability, figures: Mapping[str, int]) -> DispatchThresholds:
    """Careful limits, by what the driver says of a GPU. Its memory moves two words in a cycle."""
    bandwidth = 2e3 * figures["memory_khz"] * figures["memory_bits"] / 8
    return conservative(capability, Figures(figures["multiprocessors"], figures["clock_khz"] / 1e6, max(bandwidth, LEAST_BANDWIDTH)))
