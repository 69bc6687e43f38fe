"""The numbers of the documents' prose, by name: ``<!-- n: NAME -->51<!-- /n -->`` is filled with what committed results say."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from ci import matrix

from .cells import ARITHMETIC, MEMORY, speed
from .front_page import RESULTS, slower
from .platforms import load
from .record import Results
from .result_file import read
from .table import fill_blocks

ROOT = Path(__file__).parents[1]
GPUS = ("h100", "h200")


def documents() -> list[Path]:
    return [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]


def numbers() -> dict[str, str]:
    """Every number that a document may name."""
    return {**_kernels(), **_prompts(), **_families(), **_real(), **_soak(), **_upstream(), **_tune(), **_wheel(), **_constants()}


def update() -> list[Path]:
    """Fill the numbers of all documents; returns those that changed."""
    known, changed = numbers(), []
    for path in documents():
        text = path.read_text("utf-8")
        if (filled := fill_blocks(text, known)) != text:
            path.write_text(filled, "utf-8")
            changed.append(path)
    return changed


def _kernels() -> dict[str, str]:
    """Benchmark cases, those slower than MLX by more than the noise, versions, and what an H200 reaches of its data sheet."""
    found = {}
    for gpu in GPUS:
        results = Results.load(RESULTS / f"nvidia-{gpu}-cu13.jsonl")
        found[f"{gpu}-slower"], found[f"{gpu}-cases"] = slower(results)
    data_sheet = {each["title"]: each for each in load(Path(__file__).with_name("gpus.toml"))["gpu"]}
    return found | {
        "mlx": results.provenance["distributions"]["mlx"],
        "h200-memory": f"{MEMORY['NVIDIA H200']:g}",
        "h200-peak-memory": f"{data_sheet['H200']['bandwidth'] / 1e12:g}",
        "h200-peak-arithmetic": f"{ARITHMETIC['NVIDIA H200']:g}",
    }


def _prompts() -> dict[str, str]:
    results = read(RESULTS / "models" / "nvidia-h200-cu13.jsonl", "models")
    factors = [speed(each, "patched", "prefill") / speed(each, "upstream", "prefill") for each in results["cases"]]
    return {
        "models-prompt": str(results["cases"][0]["prompt"]),
        "models-commit": results["provenance"]["commit"][:7],
        "models-mlx-lm": results["provenance"]["distributions"]["mlx-lm"],
        "models-best": f"{max(factors):.1f}",
    }


def _families() -> dict[str, str]:
    quiet = read(RESULTS / "families" / "nvidia-h200-cu13-quiet.jsonl", "families")
    factors = [each["seconds"]["patched"]["prompt"] / each["seconds"]["upstream"]["prompt"] for each in quiet["cases"]]
    jobs = read(RESULTS / "families" / "nvidia-h200-cu13.jsonl", "families")["settings"]["jobs"]
    turns = quiet["settings"]["turns"]
    return {"families-jobs": str(jobs), "quiet-turns": str(turns), "quiet-slowest": f"{100 * (max(factors) - 1):.0f}"}


def _real() -> dict[str, str]:
    """Of the models with their own weights: where greedy answers part, and how fast they are beside random weights."""
    cases = read(RESULTS / "real" / "nvidia-h100-cu13.jsonl", "real")["cases"]
    parted = [each for case in cases if case["part"] == "alone" for each in case.get("differences", ()) if "gap" in each]
    parts = [part for case in cases for part in (case, *case.values()) if isinstance(part, dict) and "wrong tokens" in part]
    wrong = {side: sum(part["wrong tokens"].get(side, 0) for part in parts) or "none" for side in ("upstream", "patched")}
    return {
        "real-parted": str(len(parted)),
        "real-ties": str(sum(each["tie"] for each in parted)),
        "real-nearer": str(sum(min(each["error"], key=each["error"].get) == "patched" for each in parted)),
        "real-wrong": str(wrong["patched"]),
        "real-wrong-mlx": str(wrong["upstream"]),
    }


def _soak() -> dict[str, str]:
    results: dict[str, Any] = read(RESULTS / "soak" / "nvidia-h100-cu13.jsonl", "soak")
    requests, answers = results["requests"], results["answers"]
    return {
        "soak-minutes": f"{results['minutes']:.1f}",
        "soak-requests": f"{sum(requests.values()):,}",
        "soak-closed": f"{requests['cancelled closed']:,}",
        "soak-known": f"{answers['in company']:,}",
        "soak-ties": str(answers["in company, a tie"]),
        "soak-growth": f"{results['growth']['host']:.0f}",
        "soak-failures": str(len(results["failures"]) or "none"),
    }


def _upstream() -> dict[str, str]:
    results = read(RESULTS / "upstream" / "nvidia-h100-cu13.jsonl", "upstream")
    modules, unfinished = [each["module"] for each in results["cases"] if "test" not in each], results["unfinished"]
    return {"upstream-modules": str(len({*modules, *unfinished})), "upstream-finished": str(len({*modules} - {*unfinished}))}


def _tune() -> dict[str, str]:
    said = {gpu: (RESULTS / "tune" / f"nvidia-{gpu}-cu13.txt").read_text("utf-8") for gpu in GPUS}
    return {f"tune-{gpu}": found[1] for gpu, text in said.items() if (found := re.search(r"in (\d+) s", text))}


def _constants() -> dict[str, str]:
    """Of the code: how `check` judges, and up to which size mlx-cuda's all-reduce is used."""
    from mlx_cuda._check import judge

    (all_sum,) = re.findall(r"kMost = (\d+) << 10;", (ROOT / "src" / "all_sum" / "all_sum.cpp").read_text("utf-8"))
    factors = {"tie": judge.TIE, "wrong": judge.WRONG_ERROR, "warning": judge.MORE_ERROR, "slower": judge.SLOWER}
    return {f"check-{name}": f"{value:g}" for name, value in factors.items()} | {"all-sum-kib": all_sum}


def _wheel() -> dict[str, str]:
    """Of docs/results/platforms.toml: the wheel, all wheels of a night, and the minutes of a first build for all GPUs."""
    data, wheels = load(), len(matrix.load().platforms) * len(matrix.load().builds)
    (first,) = (row for row in data["times"] if row["what"].startswith("`nox -s wheel` the first time"))
    wheel, minutes = data["wheel"], float(first["seconds"]) / 60
    return {
        "wheel-mib": f"{wheel['mib']:g}",
        "wheel-commit": wheel["commit"],
        "download-gb": f"{wheel['download_gb']:g}",
        "build-minutes": f"{minutes:.0f}",
        "night-wheels": str(wheels),
        "night-mib": f"{wheels * wheel['mib']:.0f}",
    }
