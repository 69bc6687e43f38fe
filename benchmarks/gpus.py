"""By which limits calls choose engines on each GPU, and how fast its memory lets a model decode: tables for docs/results/gpus.md."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlx_cuda._common.limits import HOPPERS, DispatchThresholds, Figures, conservative
from mlx_cuda._loader import limits_file

from .cells import markdown, speed
from .decoding import PROMPT, bytes_of_step
from .platforms import load
from .record import Results
from .result_file import read
from .table import short_table

GPUS = Path(__file__).with_name("gpus.toml")
RESULTS = Path(__file__).with_name("results")
MODELS = ("Qwen 3 4B: head_dim 128", "Qwen 3 4B, 4 bit", "Llama 3.1 8B, 4 bit")


def gpus() -> list[dict[str, Any]]:
    """The GPUs of the tables, with what their data sheets say."""
    found: list[dict[str, Any]] = load(GPUS)["gpu"]
    return found


def limits_of(gpu: Mapping[str, Any]) -> tuple[DispatchThresholds, str]:
    """Those that come into force on a GPU of which nothing is kept there, and what they are by."""
    if "name" in gpu and (shipped := limits_file.measured(gpu["name"], {}, None)):
        return shipped, "`tune`"
    found = conservative(tuple(gpu["capability"]), Figures(gpu["multiprocessors"], gpu["ghz"], gpu["bandwidth"]))
    return found, "Hopper default" if found is HOPPERS else "data sheet"


def _range(values: list[int]) -> str:
    return f"{min(values)}" if len(set(values)) == 1 else f"{min(values)} to {max(values)}"


def limits_table() -> str:
    """A row for each GPU."""
    rows = [["GPU", "source", "small-M GEMM", "then MLX's", "MoE GEMV", "decode kernel", "chunked prefill", "additive masks"]]
    for gpu in gpus():
        limits, by = limits_of(gpu)
        gemms = list(limits.matmul.values())
        upstream = _range([each.upstream if each.upstream > each.half_precision else 0 for each in gemms])
        rows.append([
            f"{gpu['title']} ({'.'.join(map(str, gpu['capability']))})",
            by,
            _range([each.half_precision for each in gemms]),
            f"up to {upstream}" if upstream != "0" else "never",
            _range([each.gathered for each in gemms]),
            str(limits.attention.growing),
            limits.attention.chunks,
            limits.attention.additive,
        ])  # fmt: skip
    return markdown(rows)


def decoding_speeds(shapes: Mapping[str, tuple[str, Any]]) -> str:
    """Tokens per second of one sequence that a GPU's memory allows by its data sheet, and those that were measured."""
    measured: dict[tuple[str, str], float] = {}
    for file in sorted((RESULTS / "decoding").glob("*.jsonl")):
        results = read(file, "models")
        for each in results["cases"]:
            if each["batch"] == 1 and each["prompt"] == PROMPT:
                measured[results["provenance"]["device"], each["model"]] = speed(each, "patched")
    rows = [["GPU", *(name.partition(":")[0] for name in MODELS)]]
    for gpu in gpus():
        cells = []
        for name in MODELS:
            most = gpu["bandwidth"] / bytes_of_step(shapes[name][1], PROMPT)
            found = measured.get((gpu.get("name", ""), name))
            cells.append(f"{most:.0f}" + (f"; measured {found:.0f}" if found else ""))
        rows.append([gpu["title"], *cells])
    return markdown(rows)


def kernels() -> str:
    """How many times faster ours is than MLX and torch on an H100, of which commits that is, and what was measured on an H200 alone."""
    results, all_of = (Results.load(RESULTS / f"nvidia-{gpu}-cu13.jsonl") for gpu in ("h100", "h200"))
    measured = {(case.group, case.name) for case in results.cases}
    missing = Counter(case.group for case in all_of.cases if (case.group, case.name) not in measured)
    told = ", ".join(f"{group} {count}" for group, count in missing.items())
    own = results.provenance["commit"]
    commits = Counter((case.commit or own)[:7] for case in results.cases)
    of = f"{results.provenance['device']}: {', '.join(f'{count} cases at `{commit}`' for commit, count in commits.items())}"
    text = textwrap.fill(f"{of}. Measured on an H200 only: {told or 'none'}.", 140)
    return f"{text}\n\n{short_table(results)}"


def gpu_tables(shapes: Mapping[str, tuple[str, Any]]) -> dict[str, str]:
    """The blocks of docs/results/gpus.md that are not of the machine code."""
    printed = "\n```\n\n```text\n".join(file.read_text("utf-8").strip() for file in sorted((RESULTS / "tune").glob("*.txt")))
    renamed = printed.replace("skinny ", "small_m").replace("limits changed", "thresholds changed")  # words of when they were printed
    return {
        "limits": limits_table(),
        "tuned": f"```text\n{renamed}\n```",
        "kernels": kernels(),
        "memory": decoding_speeds(shapes),
    }
