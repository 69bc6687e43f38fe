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
GPUS = MATRIX.with_name("gpus.toml")
SYSTEMS = {"linux-x86_64": "Linux x86_64", "linux-aarch64": "Linux aarch64", "win-amd64": "Windows x64"}


def load(path: Path = DATA) -> dict[str, Any]:
    return tomllib.loads(path.read_text("utf-8"))


def platform_tables(data: Mapping[str, Any]) -> dict[str, str]:
    """``stages`` of each platform, ``rows`` of the test matrix, device ``code`` that has run, ``runs`` on GPUs, ``times`` of builds; of
    docs/start/install.md the ``support`` of GPUs and platforms, and ``drivers``.
    """
    matrix = load(MATRIX)
    return {
        "stages": _stages(data),
        "rows": _rows(data, matrix["tests"]),
        "code": _code(data),
        "runs": _runs(data),
        "times": _times(data),
        "support": _support(data, load(GPUS)["capability"]),
        "drivers": _drivers(data, matrix["cuda"]),
    }


def _support(data: Mapping[str, Any], gpus: Sequence[Mapping[str, Any]]) -> str:
    """Each compute capability and platform: ``tested`` on such a GPU, ``built``, or ``not built``, as it was never linked."""
    (linked,) = (stage for stage in data["stages"] if stage["what"] == "linked")
    (on_gpu,) = (stage for stage in data["stages"] if stage["what"] == "tests on a GPU")
    ran = {name for run in data["runs"] if run["what"] == "tests" for name in run["code"]}

    def state(platform: str, code: Sequence[str]) -> str:
        if linked[platform].startswith("never"):
            return "not built"
        if code == ["75"]:
            return "built, no speedup"
        if on_gpu[platform] == "never" or not ran & {f"sm_{name}" for name in code}:
            return "built"
        return f"tested on {on_gpu[platform]}"

    rows = [["GPU", "compute capability", *SYSTEMS.values()]]
    rows += [[each["gpus"], each["number"], *(state(platform, each["code"]) for platform in SYSTEMS)] for each in gpus]
    rows += [["newer, such as Jetson Thor", "others from 8.0", *(state(platform, []) for platform in SYSTEMS)]]
    return markdown([*rows, ["older", "below 7.5", *["unsupported"] * len(SYSTEMS)]])


def _drivers(data: Mapping[str, Any], declared: Mapping[str, Mapping[str, Any]]) -> str:
    """The oldest driver of each extra, and those that the tests ran with."""
    tested = ", ".join(dict.fromkeys(_machine(data, run)["driver"] for run in data["runs"] if run["what"] == "tests"))
    rows = [[f"`[{each['extra']}]`", str(each["major"]), each["driver"], tested] for each in declared.values()]
    return markdown([["extra", "CUDA", "oldest driver", "tested with driver"], *rows])


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
    rows = [["run", "scope", "GPU", "driver", "CUDA", "code", "commit", "amount", "result"]]
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
