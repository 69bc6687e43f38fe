"""Measured dispatch thresholds: of GPUs in the package's table, and of this machine, in a file of the user.

The user's are valid for one GPU name, driver, MLX and mlx-cuda, and take precedence.
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
    """Return the file next to that of tuned algorithms; None if that is switched off."""
    tuned = tuned_file.default_path()
    return beside(tuned) if tuned else None


def beside(tuned: Path) -> Path:
    """Return the thresholds' file that belongs to one of tuned algorithms."""
    return tuned.with_name(f"{tuned.stem}-limits.json")


def read(path: Path) -> Entries | None:
    """Return the entries of a file, none if there is no file; None, with a warning, if it has another format."""
    return tuned_file.read_as(parse, path, "limits")


def parse(text: str) -> Entries:
    """Parse the entries of a file, with the current names; raise a ValueError that says what is wrong."""
    content = json.loads(text)
    if not isinstance(content, dict) or content.get("mlx_cuda_limits") != FORMAT or not isinstance(content.get("gpus"), dict):
        raise ValueError(f"not of the format {FORMAT}")
    entries: Entries = content["gpus"]
    for name, entry in entries.items():
        entry["limits"] = as_json(from_json(entry["limits"] if isinstance(entry, dict) and "limits" in entry else None, name))
    return entries


def _write(path: Path, entries: Entries) -> bool:
    return tuned_file.write(path, {"mlx_cuda_limits": FORMAT, "gpus": entries}, "what was measured")


def measured(name: str, versions: Mapping[str, str], path: Path | None) -> DispatchThresholds | None:
    """Return the thresholds that were measured on this machine, or on another one with such a GPU."""
    own = (read(path) if path else None) or {}
    if name in own and own[name].get("versions") == dict(versions):
        return from_json(own[name]["limits"], f"measured here on {name}")
    shipped = read(SHIPPED) or {}
    return from_json(shipped[name]["limits"], f"measured on {name}, with mlx-cuda") if name in shipped else None


def keep(path: Path, name: str, versions: Mapping[str, str], limits: DispatchThresholds) -> bool:
    """Write the thresholds of a GPU to a file; return False if that is not possible."""
    entries = read(path)
    if entries is None:
        return False
    entries[name] = {"versions": dict(versions), "limits": as_json(limits)}
    return _write(path, entries)


def remove(path: Path, name: str) -> bool:
    """Delete the thresholds of a GPU from a file; return False if there are none."""
    entries = read(path)
    if not entries or name not in entries:
        return False
    del entries[name]
    return _write(path, entries)


def versions(driver: str, mlx: str) -> dict[str, str]:
    """Return the versions for which thresholds are valid."""
    return {"driver": driver, "mlx": mlx, "mlx_cuda": __version__}


def by_data_sheet(capability: Capability, figures: Mapping[str, int]) -> DispatchThresholds:
    """Return conservative defaults from the driver's figures of a GPU. Its memory transfers two words per cycle."""
    bandwidth = 2e3 * figures["memory_khz"] * figures["memory_bits"] / 8
    return conservative(capability, Figures(figures["multiprocessors"], figures["clock_khz"] / 1e6, max(bandwidth, LEAST_BANDWIDTH)))
