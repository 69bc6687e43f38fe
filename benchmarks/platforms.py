"""What ran where: the tables of docs/results/platforms.md, from platforms.toml beside it and ci/matrix/matrix.toml."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from .cells import markdown

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

from collections.abc import Mapping, Sequence

DATA = Path(__file__).parents[1] / "docs" / "results" / "platforms.toml"
MATRIX = Path(__file__).parents[1] / "ci" / "matrix" / "matrix.toml"


def load(path: Path = DATA) -> dict[str, Any]:
    return tomllib.loads(path.read_text("utf-8"))


def platform_tables(data: Mapping[str, Any]) -> dict[str, str]:
    """``stages`` of each platform, ``rows`` of the test matrix, device ``code`` that has run, ``runs`` on GPUs, ``times`` of builds."""
    rows = _rows(data, load(MATRIX)["tests"])
    return {"stages": _stages(data), "rows": rows, "code": _code(data), "runs": _runs(data), "times": _times(data)}


def _stages(data: Mapping[str, Any]) -> str:
    platforms = [name for name in data["stages"][0] if name != "what"]
    return markdown([["", *platforms], *([stage["what"], *(stage[name] for name in platforms)] for stage in data["stages"])])


def _rows(data: Mapping[str, Any], declared: Sequence[Mapping[str, Any]]) -> str:
    """The declared rows, a line for those that differ in the Python alone, and which of their Pythons have run."""
    rows = [["platform", "extra", "GPU", "driver", "CPython", "has run on"]]
    for row in declared:
        same = [each for each in data["tried"] if all(each.get(key, "") == row.get(key, "") for key in ("platform", "extra", "gpu"))]
        run = [f"{each['python']} ({each['how']})" for each in same]
        driver = f"{row['driver']} or newer" if "driver" in row else ""
        rows.append([row["platform"], row["extra"], row.get("gpu", ""), driver, ", ".join(row["pythons"]), ", ".join(run) or "never"])
    return markdown(rows)


def _code(data: Mapping[str, Any]) -> str:
    """Each name of the device code with the GPUs that take it, and where its tests have run."""
    rows = [["device code", "used by compute capability", "tests have run on"]]
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


def _times(data: Mapping[str, Any]) -> str:
    rows = [[each["what"], each["seconds"], each.get("parts", ""), each.get("commit", "")] for each in data["times"]]
    return markdown([["on 2 cores, g++ 12", "seconds", "of which", "commit"], *rows])


def _machine(data: Mapping[str, Any], run: Mapping[str, Any]) -> Mapping[str, str]:
    machine: Mapping[str, str] = data["machines"][run["machine"]]
    return machine
