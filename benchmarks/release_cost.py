"""What a release costs on this platform: our way against the usual one. ``python -m benchmarks.release_cost --help``.

Ours is one wheel: a stable-ABI module for each CUDA major, whose kernels are compiled once. The usual way is a wheel for each CPython
and each CUDA major, every one of them compiled, kernels and all, from a fresh build tree. Nothing of the product is changed for it: a
clone of the same commit is edited so that it builds what a nanobind project builds without further thought.

Each build starts from the commit, without a compiler cache, and is repaired. Time is that of all processes of the build; making the
environments and fetching the toolkits, which both ways need, is not counted.
"""

from __future__ import annotations

import argparse
import datetime as dt
import hashlib
import json
import os
import platform
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ci import matrix, toolkit
from ci.errors import CheckFailed, CiError, EnvironmentProblem
from ci.maintain import checkout, reproduce

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

RESULTS = Path(__file__).parent / "results" / "release-cost"
# What makes a module of ours one for every CPython, and what a project without the stable ABI has in its place.
USUAL = {
    "pyproject.toml": [('wheel.py-api = "cp310"\n', "")],
    "CMakeLists.txt": [("        STABLE_ABI\n", ""), ("        BACKEND_MODULE nanobind_backend\n", "")],
}
WAYS = {"ours": "ours: one wheel for all", "usual": "usual: one for each CPython and CUDA major"}


@dataclass(frozen=True)
class Cost:
    """One wheel."""

    way: str  # "ours" or "usual"
    python: str
    cuda: list[str]
    wheel: str
    bytes: int
    cpu_seconds: float
    wall_seconds: float
    device_compilations: int
    load_before: float  # of the machine, which other work may have shared


def make_usual(tree: Path) -> None:
    """Edit a clone so that it builds without the stable ABI; an edit that finds nothing to change is an error."""
    for name, edits in USUAL.items():
        text = (tree / name).read_text("utf-8")
        for old, new in edits:
            if text.count(old) != 1:
                raise EnvironmentProblem(f"{name}: {old.strip()!r} is not there once", cure="bring USUAL up to date")
            text = text.replace(old, new)
        (tree / name).write_text(text, "utf-8")


def environment(python: Path, folder: Path) -> Path:
    """A virtual environment of this interpreter with what the factory needs; returns its Python."""
    uv = [sys.executable, "-m", "uv"]
    made = folder / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")
    group = f"{matrix.REPOSITORY / 'pyproject.toml'}:factory"
    for command in (["venv", "--quiet", "--python", str(python), str(folder)], ["pip", "install", "-q", "-p", str(made), "--group", group]):
        if subprocess.run([*uv, *command], check=False, stdout=sys.stderr).returncode:
            raise EnvironmentProblem(f"no environment could be made of {python}", cure="give the path of an interpreter with --python")
    return made


def measure(way: str, python: Path, cuda: Sequence[str], commit: str, output: Path) -> Cost:
    """Clone, edit where the way asks for it, build and repair; the clock runs for the build and the repair."""
    with tempfile.TemporaryDirectory(prefix="mlx-cuda-cost-") as folder:
        tree = Path(folder, "mlx-cuda")
        checkout.export(commit, tree)
        if way == "usual":
            make_usual(tree)
        selection = [part for version in cuda for part in ("--cuda", version)]
        built, load = Path(folder, "built"), os.getloadavg()[0]
        start, used = time.monotonic(), _cpu_seconds()
        _run([str(python), "-m", "ci", "build", *selection, "--output", str(built)], tree)
        (wheel,) = built.glob("*.whl")
        _run([str(python), "-m", "ci", "repair", str(wheel), "--output", str(output)], tree)
        wall, cpu = time.monotonic() - start, _cpu_seconds() - used
        stores = tree.joinpath("build").rglob("device-objects")  # without a shared store; a fatbin is packed, not compiled
        compiled = sum(len(list(each.glob("??/*"))) - len(list(each.with_name("device").glob("*.fatbin"))) for each in stores)
        (repaired,) = output.glob("*.whl")
    version = subprocess.run([str(python), "-V"], check=True, capture_output=True, text=True).stdout.split()[-1]
    size = repaired.stat().st_size
    return Cost(way, version, list(cuda), repaired.name, size, round(cpu, 1), round(wall, 1), compiled, round(load, 1))


def _cpu_seconds() -> float:
    """Of all child processes that have ended, and theirs."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _run(command: Sequence[str], tree: Path) -> None:
    if subprocess.run(command, check=False, cwd=tree, env={**os.environ, **reproduce.NO_CACHE}, stdout=sys.stderr).returncode:
        raise CheckFailed(f"{' '.join(command[:4])} failed; its words are above")


# --------------------------------------------------------------------------------------------------------------- the results
def provenance(commit: str, arguments: Sequence[str]) -> dict[str, Any]:
    compiler = shutil.which(os.environ.get("CXX", "c++")) or "unknown"
    said = subprocess.run([compiler, "--version"], check=False, capture_output=True, text=True).stdout
    information = Path("/proc/cpuinfo")
    models = re.findall(r"model name\s*: (.*)", information.read_text("utf-8")) if information.exists() else []
    return {
        "date": dt.datetime.now(dt.timezone.utc).isoformat(timespec="seconds"),
        "command": ["python", "-m", "benchmarks.release_cost", *(Path(word).name if "/" in word else word for word in arguments)],
        "commit": commit,
        "platform": matrix.host_platform().name,
        "processor": models[0] if models else platform.machine(),
        "cores": os.cpu_count(),
        "compiler": said.splitlines()[0] if said else compiler,
        "script": hashlib.sha256(Path(__file__).read_bytes()).hexdigest(),
    }


def table(results: Mapping[str, Any]) -> str:
    """The sums of each way, as Markdown."""
    costs = [Cost(**entry) for entry in results["wheels"]]
    rows = ["| on one platform | wheels | bytes of a release | CPU seconds | compilations of device code | a user downloads |"]
    rows += ["|---|---:|---:|---:|---:|---:|"]
    for way, title in WAYS.items():
        mine = [cost for cost in costs if cost.way == way]
        sizes, seconds = [cost.bytes for cost in mine], sum(cost.cpu_seconds for cost in mine)
        download = f"{min(sizes):,}" if min(sizes) == max(sizes) else f"{min(sizes):,} to {max(sizes):,}"
        compiled = sum(cost.device_compilations for cost in mine)
        rows.append(f"| {title} | {len(mine)} | {sum(sizes):,} | {seconds:.0f} | {compiled} | {download} |")
    known, pythons = results["provenance"], sorted({_minor(cost.python) for cost in costs if cost.way == "usual"})
    versions = ", ".join(".".join(map(str, version)) for version in pythons)
    rows += ["", f"{known['platform']}, CPython {versions}, {known['compiler']}, {known['cores']} cores, {known['date'][:10]},"]
    rows.append(f"commit `{known['commit'][:12]}`.")
    return "\n".join(rows)


def _minor(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")[:2]))


def builds(pythons: Sequence[Path]) -> Iterator[tuple[str, Path, list[str]]]:
    """Ours with the oldest interpreter, then each of the usual ones."""
    versions = list(matrix.load().cuda)
    yield "ours", pythons[0], versions
    yield from (("usual", python, [version]) for python in pythons for version in versions)


def run(args: argparse.Namespace, arguments: Sequence[str]) -> None:
    if args.table:
        results = json.loads(args.table.read_text("utf-8"))
    else:
        commit = checkout.commit(args.commit)
        results = {"provenance": provenance(commit, arguments), "wheels": []}
        roots = dict.fromkeys(root for cuda in matrix.load().cuda.values() for root in cuda.roots)
        toolkit.install([matrix.load().device.root, *roots], matrix.host_platform())
        output = args.output or RESULTS / f"{matrix.host_platform().name}.json"
        with tempfile.TemporaryDirectory(prefix="mlx-cuda-cost-") as folder:
            pythons = [environment(python, Path(folder, f"python-{number}")) for number, python in enumerate(args.python)]
            for number, (way, python, cuda) in enumerate(builds(pythons)):
                cost = measure(way, python, cuda, commit, Path(folder, f"wheel-{number}"))
                print(f"{cost.wheel}: {cost.bytes:,} bytes, {cost.cpu_seconds} CPU seconds", file=sys.stderr)
                results["wheels"].append(asdict(cost))
        output.parent.mkdir(parents=True, exist_ok=True)
        part = output.with_suffix(".part")
        part.write_text(json.dumps(results, indent=1) + "\n", "utf-8")
        part.replace(output)
    print(table(results))


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.release_cost", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--python", type=Path, nargs="+", default=[Path(sys.executable)], help="interpreters to build for, the oldest first")
    add("--commit", metavar="NAME", help="the commit to build (default: the one that is checked out, which must have no changes)")
    add("-o", "--output", type=Path, metavar="FILE", help="results file (default: benchmarks/results/release-cost/<platform>.json)")
    add("--table", type=Path, metavar="RESULTS", help="measure nothing, take these results")
    try:
        run(parser.parse_args(words), words)
    except (CiError, OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code if isinstance(error, CiError) else 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
