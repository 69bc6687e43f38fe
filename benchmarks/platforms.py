"""What ran where: the tables of docs/platforms.md, from docs/platforms.toml."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .cells import markdown

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

if TYPE_CHECKING:
    from collections.abc import Mapping

DATA = Path(__file__).parents[1] / "docs" / "platforms.toml"


def load(path: Path = DATA) -> dict[str, Any]:
    return tomllib.loads(path.read_text("utf-8"))


def platform_tables(data: Mapping[str, Any]) -> dict[str, str]:
    """``stages``: how far each platform has come; ``code``: which device code has run; ``runs``: what ran on a GPU."""
    return {"stages": _stages(data), "code": _code(data), "runs": _runs(data)}


def _stages(data: Mapping[str, Any]) -> str:
    platforms = [name for name in data["stages"][0] if name != "what"]
    return markdown([["", *platforms], *([stage["what"], *(stage[name] for name in platforms)] for stage in data["stages"])])


def _code(data: Mapping[str, Any]) -> str:
    """Each name of the device code with the GPUs that take it, and where its tests have run."""
    rows = [["code", "taken by compute capability", "tests have run on"]]
    for each in data["code"]:
        tested = {_machine(data, run)["gpu"]: None for run in data["runs"] if run["what"] == "tests" and each["name"] in run["code"]}
        rows.append([f"`{each['name']}`", each["gpus"], ", ".join(tested) or "never"])
    return markdown(rows)


def _runs(data: Mapping[str, Any]) -> str:
    rows = [["what", "kernels", "GPU", "driver", "CUDA", "code", "commit", "number", "result"]]
    for run in data["runs"]:
        machine = _machine(data, run)
        code, commits = (" + ".join(f"`{name}`" for name in names) for names in (run["code"], run["commit"].split(" + ")))
        found = [run.get("cuda", ""), code, commits, run.get("number", ""), run["result"]]
        rows.append([run["what"], run["kernels"], machine["gpu"], machine["driver"], *found])
    return markdown(rows)


def _machine(data: Mapping[str, Any], run: Mapping[str, Any]) -> Mapping[str, str]:
    machine: Mapping[str, str] = data["machines"][run["machine"]]
    return machine
