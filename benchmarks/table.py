"""The results as Markdown, and docs/results/performance.md brought up to date with them."""

from __future__ import annotations

import re
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any

from .cells import duration, markdown, memory_share, shown, speed
from .targets import ATTENTION, MATMUL, behind_table, targets_table

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from .record import CaseResult, Results

BLOCK = re.compile(r"(<!-- results: (\w+) -->\n).*?(<!-- end of results -->)", re.DOTALL)
NUMBER = re.compile(r"(<!-- n: ([\w-]+) -->)[^<\n]*(<!-- /n -->)")  # within a sentence: `benchmarks.numbers` has their names

# The rows of "In short": what the cases of a group have in common whose names have this in them.
SHORT = (
    ("prefill, head_dim 64 to 128, no mask or causal", "attention", r"^D=(64|80|96|128) "),
    ("prefill, head_dim 192 and 256, causal", "attention", r"^D=(192|256) "),
    ("prefill, bool mask", "masks", "bool|documents|random"),
    ("prefill, additive mask", "masks", "additive"),
    ("prefill, sliding window of 1024", "window", ""),
    ("prefill, logit softcapping", "softcap", ""),
    ("prefill, float32 (TF32)", "float32", ""),
    ("varlen prefill", "varlen", ""),
    ("forward and backward", "backward", ""),
    ("chunked prefill into a growing KV cache, 64 queries per step", "growing", "steps of 64"),
    ("decode, one query", "decode", r" 1 of \d+, D=\d+, [\d/]+ heads$"),
    ("decode, several queries", "decode", r" ([2-9]|\d\d) of "),
    ("decode, ragged batch", "decode", "padded|lengths"),
    ("decode, paged KV cache", "paged", ""),
    ("decode, multi-head latent attention", "mla", "1 of .*576/512"),
    ("quantized matmul, M = 1", "quantized", ", 1 x"),
    ("quantized matmul, M = 2 to 16", "quantized", ", (2|4|8|16) x"),
    ("quantized matmul, M = 64 to 512", "quantized", ", (64|128|256|512) x"),
    ("quantized matmul, M = 2048 and 8192", "quantized", ", (2048|8192) x"),
    ("quantized MoE, sorted tokens", "experts", "gather_qmm.* sorted rows"),
    ("quantized MoE, 1 to 8 tokens", "experts", "gather_qmm.* tokens"),
    ("bfloat16 MoE", "experts", "gather_mm|grouped_matmul"),
    ("FP8 GEMM, which MLX does not have", "fp8", ""),
    ("`linear` with GELU", "linear", "gelu"),
    ("`linear` without activation", "linear", "bias$|bare"),
    ("`swiglu`", "swiglu", ""),
)


def short_table(results: Results) -> str:
    """For each kind of case how many times faster ours is than MLX, and than the best of torch's sides, from worst to best."""

    def between(factors: Sequence[float | None]) -> str:
        known = sorted({f"{factor:.{0 if factor >= 20 else 1 if factor >= 4 else 2}f}" for factor in factors if factor}, key=float)
        return " to ".join(dict.fromkeys((known[0], known[-1]))) if known else ""

    def of_torch(case: CaseResult) -> float | None:
        return min((factor for name in case.sides if name.startswith("torch") and (factor := case.speedup(name))), default=None)

    rows = [["operation", "cases", "speedup over MLX", "over the fastest of torch"]]
    for title, group, pattern in SHORT:
        cases = [case for case in results.cases if case.group == group and re.search(pattern, case.name)]
        if cases:
            factors = [case.speedup("upstream") for case in cases], [of_torch(case) for case in cases]
            rows.append([title, str(len(cases)), *map(between, factors)])
    compared = [case for case in results.cases if case.speedup("upstream")]  # MLX has no FP8
    behind = [f"{case.group} {shown(case.name)}: {case.speedup('upstream'):.2f}" for case in compared if case.behind()]
    told = f"{'; '.join(behind) or 'none'} of {len(compared)} cases"
    return f"{markdown(rows)}\n\nSlower than MLX by more than the noise: {told}."


def compared_table(first: Sequence[Results], second: Sequence[Results]) -> str:
    """Ours of the second build against the first's: the median of the factors, and the cases whose batches do not overlap."""

    def seconds(results: Sequence[Results]) -> dict[str, list[float]]:
        found: dict[str, list[float]] = {}
        for each in results:
            for case in each.cases:
                if "ours" in case.sides:
                    found.setdefault(f"{case.group} {case.name}", []).extend(case.sides["ours"].seconds)
        return {name: times for name, times in found.items() if times}

    before, after = seconds(first), seconds(second)
    factors = {name: median(after[name]) / median(before[name]) for name in before if name in after}
    apart = [name for name in factors if min(after[name]) > max(before[name]) or max(after[name]) < min(before[name])]
    rows = [["case", "first", "second", "second / first"]]
    rows += [
        [name, duration(median(before[name])), duration(median(after[name])), f"{factors[name]:.3f}"]
        for name in sorted(apart, key=lambda name: -factors[name])
    ]
    return f"{len(factors)} cases, median factor {median(factors.values()):.3f}; apart: {len(apart)}\n\n{markdown(rows)}"


def sides_of(cases: Sequence[CaseResult]) -> list[str]:
    """Every side that any of the cases has, in the order in which they were measured."""
    return list(dict.fromkeys(name for case in cases for name in case.sides))


def side_cell(case: CaseResult, name: str) -> str:
    side, rate = case.sides.get(name), case.rate(name)
    if side is None:
        return ""
    if side.median is None or rate is None:
        return "unavailable" if name == "ours" and case.unavailable else "failed"
    if case.unit == "steps/s":
        return f"{duration(side.median)} a step"
    return f"{duration(side.median)}, {rate:.{0 if rate >= 100 else 1 if rate >= 10 else 2}f} {case.unit}"


def case_table(cases: Sequence[CaseResult], device: str = "") -> str:
    """One row per case: who computes ours, time and rate of each side, and ours against each of the others."""
    sides = sides_of(cases)
    others = [name for name in sides if name != "ours"]
    columns: dict[str, Callable[[CaseResult], str]] = {
        "case": lambda case: shown(case.name) + (f" (`{case.commit}`)" if case.commit else "")
    }
    if any(case.engine for case in cases):
        columns["engine"] = lambda case: shown(case.computed_by)
    columns |= {shown(name): partial(side_cell, name=name) for name in sides}
    if any(case.engine and memory_share(case, device) for case in cases):
        columns["of bandwidth"] = lambda case: percent(memory_share(case, device))
    columns |= {f"vs {shown(name)}": partial(speedup_cell, name=name) for name in others}
    for name in dict.fromkeys(name for case in cases for name in case.numbers):
        columns[shown(name)] = partial(number_cell, name=name)
    rows = [list(columns)]
    for case in cases:
        if case.error:
            rows.append([shown(case.name), f"failed: {case.error.splitlines()[-1]}", *[""] * (len(columns) - 2)])
        else:
            rows.append([cell(case) for cell in columns.values()])
    return markdown(rows)


def speedup_cell(case: CaseResult, name: str) -> str:
    value = case.speedup(name)
    return "" if value is None else f"{value:.2f}x"


def number_cell(case: CaseResult, name: str) -> str:
    return f"{case.numbers[name]:g}" if name in case.numbers else ""


def percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.0f} %"


def provenance_list(results: Results) -> str:
    """Machine and versions, as a list."""
    provenance = results.provenance
    native, torch, gpu = provenance["native"], provenance["torch"], provenance["gpu_before"]
    lines = [f"- {provenance['device']}, Python {provenance['python']}, {provenance['date']}"]
    if gpu:
        lines[0] += f", driver {gpu['driver_version']}"
    versions = {name: version for name, version in provenance["distributions"].items() if name.lower().startswith("mlx")}
    if native and "libraries" in native:
        versions |= {f"{name} (loaded)": version for name, version in native["libraries"].items()}
    lines.append(f"- {', '.join(f'{name} {version}' for name, version in versions.items())}")
    lines.append(f"- torch {torch['torch']}, cuDNN {torch['cudnn']}" if torch else "- without torch")
    if provenance["wheel"]:
        lines.append(f"- `{provenance['wheel']['name']}`, sha256 `{provenance['wheel']['sha256']}`")
    if provenance["commit"]:
        lines.append(f"- commit `{provenance['commit']}`")
    for commit, build in provenance.get("earlier_builds", {}).items():
        digest = f", sha256 `{build['wheel']['sha256']}`" if build["wheel"] else ""
        lines.append(f"- cases marked with `{commit}` are of that commit ({build['date'].partition('T')[0]}){digest}")
    if provenance["quick"]:
        lines.append("- **quick run with tiny sizes: the times mean nothing**")
    return "\n".join(lines)


def sections(results: Results) -> dict[str, str]:
    """The blocks by name: one for each operation, ``provenance``, ``targets`` (of attention), ``matmul_targets`` and ``behind``."""
    groups = dict.fromkeys(case.group for case in results.cases)
    device = results.provenance["device"]
    tables = {group: case_table([case for case in results.cases if case.group == group], device) for group in groups}
    targets = {"targets": targets_table(ATTENTION, results), "matmul_targets": targets_table(MATMUL, results)}
    targets["behind"] = behind_table((*ATTENTION, *MATMUL), results)
    return {"provenance": provenance_list(results), "short": short_table(results), **targets, **tables}


def models_table(results: Mapping[str, Any]) -> str:
    """What ``python -m benchmarks.models`` measured of prompts: tokens per second of MLX and patched, and how alike logits are."""
    rows = [
        [
            "model",
            "batch",
            "prefill, tokens/s: MLX",
            "patched",
            "speedup",
            "same next token",
            "logit error: MLX, patched",
        ]
    ]
    for each in results["cases"]:
        upstream, patched = (speed(each, side, "prefill") for side in ("upstream", "patched"))
        speeds = [f"{upstream:.0f}", f"{patched:.0f}", f"{patched / upstream:.2f}x"]
        logits = each.get("logits")
        alike = [""] * 2
        if logits:
            error = logits["error"]
            alike = [
                f"{logits['equal tokens']['patched, upstream']} of {logits['steps']}",
                f"{error['upstream']:.1e}, {error['patched']:.1e}",
            ]
        rows.append([each["model"], str(each["batch"]), *speeds, *alike])
    calls = [["model", "part", "attention and quantized matmul calls, by engine"]]
    for each in results["cases"]:
        if each["batch"] == results["cases"][0]["batch"]:
            for part, counts in each.get("engines", {}).items():
                calls.append([each["model"], part, ", ".join(f"{count} x {_call(name)}" for name, count in counts.items())])
    return "\n\n".join(markdown(table) for table in (rows, calls) if len(table) > 1)


def _call(name: str) -> str:
    """Such as ``flash (causal mask)`` for the recorded ``flash, causal mask``."""
    engine, _, kind = name.partition(", ")
    return f"{shown(engine)} ({kind})"


def fill(document: str, results: Results) -> str:
    """The document with each block between its markers made anew; a block that the results lack stays."""
    return fill_blocks(document, sections(results))


def fill_blocks(document: str, blocks: Mapping[str, str]) -> str:
    """The document with each block, and each number of its sentences, as they are given; others stay."""
    document = BLOCK.sub(lambda match: f"{match[1]}{blocks[match[2]]}\n{match[3]}" if match[2] in blocks else match[0], document)
    return NUMBER.sub(lambda match: f"{match[1]}{blocks[match[2]]}{match[3]}" if match[2] in blocks else match[0], document)
