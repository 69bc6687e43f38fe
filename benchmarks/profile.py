"""What the device does for a token: its kernels by name, how many and how long, as CUPTI records them for torch's profiler."""

from __future__ import annotations

import importlib
import json
import re
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

PARTS = {  # by the names of kernels, MLX's and ours
    "persistent kernels: all of it in several layers": r"^persistent",
    "matmul": r"row_product|gemv|qmv|qmm|gemm|nvjet|cutlass|xmma|skinny|small_m|gather_mm|splitk",
    "attention": r"sdpa|attention|flash|^decode|^token|cudnn",
    "norms": r"norm",
    "rope, and keys and values to the cache": r"rope|heads|append|copy|slice|concatenate",
    "router": r"router|softmax|sort|partition",
}
REST = "gates, additions and the rest"


def short(name: str) -> str:
    """A kernel's name without its namespaces, types and arguments."""
    plain = re.sub(r"\(anonymous namespace\)", "", name)
    return re.split(r"[<(]", plain, maxsplit=1)[0].split(" ")[-1].split("::")[-1]


def part_of(name: str) -> str:
    """Which part of a step a kernel is."""
    return next((part for part, pattern in PARTS.items() if re.search(pattern, name)), REST)


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """How long at least one of the spans ``(begin, end)`` lasts."""
    total, until = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total


def kernels_of(events: Iterable[Mapping[str, Any]]) -> list[tuple[float, float, str]]:
    """Begin and duration in microseconds, and name, of each kernel and copy, one after the other."""
    device = [event for event in events if event.get("cat") in {"kernel", "gpu_memcpy", "gpu_memset"}]
    return sorted((event["ts"], event["dur"], short(event["name"]) if event["cat"] == "kernel" else "copy") for event in device)


def of_trace(events: Sequence[Mapping[str, Any]], steps: int) -> dict[str, Any]:
    """Of a step: the kernels' number and microseconds by name, those of copies among them, and how long one of them runs at least."""
    found: defaultdict[str, list[float]] = defaultdict(lambda: [0, 0.0])
    kernels = kernels_of(events)
    for _, time, name in kernels:
        found[name][0] += 1 / steps
        found[name][1] += time / steps
    busy = covered((begin, begin + time) for begin, time, _ in kernels) / steps
    return {"steps": steps, "busy us": busy, "kernels": {name: tuple(each) for name, each in sorted(found.items())}}


def last_step(events: Sequence[Mapping[str, Any]], steps: int) -> dict[str, list[tuple[int, int]]]:
    """When each kernel of the last step begins after the first one, and its duration, in whole ns, by name; all steps have as many."""
    kernels = kernels_of(events)
    kernels = kernels[-(len(kernels) // steps) :]
    found: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
    for begin, time, name in kernels:
        found[name].append((round(1e3 * (begin - kernels[0][0])), round(1e3 * time)))
    return dict(found)


def trace(torch: Any, step: Callable[[], object], steps: int) -> list[dict[str, Any]]:
    """The events of so many calls, each of which waits for the device."""
    profiler = importlib.import_module("torch.profiler")
    step()
    with profiler.profile(activities=[profiler.ProfilerActivity.CUDA]) as profiled:
        torch.cuda.synchronize()
        for _ in range(steps):
            step()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "trace.json")
        profiled.export_chrome_trace(str(file))
        events: list[dict[str, Any]] = json.loads(file.read_text("utf-8"))["traceEvents"]
        return events


def profile(torch: Any, step: Callable[[], object], steps: int) -> dict[str, Any]:
    """:func:`of_trace` of so many calls."""
    return of_trace(trace(torch, step, steps), steps)


def by_part(profiled: Mapping[str, Any]) -> dict[str, tuple[float, float]]:
    """Kernels and microseconds of each part of a step."""
    parts = dict.fromkeys((*PARTS, REST), (0.0, 0.0))
    for name, (count, time) in profiled["kernels"].items():
        before = parts[part_of(name)]
        parts[part_of(name)] = (before[0] + count, before[1] + time)
    return parts
