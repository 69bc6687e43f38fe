"""``python -m benchmarks.timeline``: when the kernels of one decoded token run, MLX's and those of the build that is installed.

Each build has a file of its own, and MLX is in one of them. ``python -m benchmarks timeline`` draws them.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx

from . import svg
from .chart import LABELS, TEXT
from .decoding import PROMPT
from .measuring import Log, import_torch
from .models import PROFILED_STEPS, SHAPES, Cache, make, models_of_mlx_lm, of_steps
from .profile import PARTS, REST, covered, last_step, part_of, trace
from .provenance import collect
from .result_file import write

Span = tuple[float, float, str]  # begin and end in us, and the kernel's name
SIDES = ("upstream", "patched")
MODEL = "Qwen 3 4B, 4 bit"
COLOURS = dict(zip((*PARTS, REST), ("#2f81f7", "#2da44e", "#e16f24", "#bf8700", "#a371f7", "#db61a2", "#8c959f"), strict=True))
LEFT, LENGTH, BAR, LANE, TOP, BETWEEN, TICKS = 10, 860, 20, 46, 62, 66, 10  # pixels, and the most ticks of an axis
_STYLE = f"""
    text {{ font: 12px system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; fill: {TEXT} }}
    .title {{ font-size: 15px; font-weight: 700 }}
    .tick {{ font-size: 11px; text-anchor: middle }}
    .line {{ stroke: {TEXT}; fill: none }}
"""


def measure(torch: Any) -> dict[str, Any]:
    """The kernels of a step of each side."""
    load, (module, arguments) = models_of_mlx_lm(), SHAPES[MODEL]
    model, prompt = make(load(module), arguments), mx.random.randint(0, arguments["vocab_size"], (1, PROMPT))

    def make_cache(**_: bool) -> Cache:
        return Cache(load("cache").make_prompt_cache(model))

    return of_steps(lambda step: last_step(trace(torch, step, PROFILED_STEPS), PROFILED_STEPS), model, make_cache, prompt)


def lanes(files: Sequence[Mapping[str, Any]]) -> dict[str, list[Span]]:
    """MLX, then each build by its commit, and how many kernels it has and how long."""
    found: dict[str, list[Span]] = {}
    cases = [(file["provenance"], case) for file in files for case in file["cases"]]
    for known, case in sorted(cases, key=lambda pair: SIDES.index(pair[1]["side"])):
        kernels = case["kernels, ns"].items()
        spans = sorted((begin / 1e3, (begin + time) / 1e3, name) for name, each in kernels for begin, time in each)
        name = f"{LABELS['ours']} ({known['commit'][:7]})" if case["side"] == "patched" else LABELS["upstream"]
        last, busy = max(end for _, end, _ in spans), covered((begin, end) for begin, end, _ in spans)
        found[f"{name}: {len(spans)} kernels in {last:.0f} us, at least one of them running for {busy:.0f} us"] = spans
    return found


def layer(spans: Sequence[Span]) -> tuple[float, float]:
    """From one layer's attention to the next one's, in the middle of a step; where no kernel is attention, the longest kernel."""
    first = next((name for *_, name in spans if part_of(name) == "attention"), None)
    begins = [begin for begin, _, name in spans if name == first]
    middle = len(begins) // 2
    return (begins[middle - 1], begins[middle]) if begins[1:] else max(spans, key=lambda span: span[1] - span[0])[:2]


def drawing(files: Sequence[Mapping[str, Any]]) -> str:
    """All of the token on one axis, and below it a layer of the first lane beside what the others do in that time, as SVG."""
    device, *others = {file["provenance"]["device"] for file in files}
    if others:
        raise ValueError(f"the results are of several GPUs: {device}, {', '.join(others)}")
    found = lanes(files)
    labels, most = list(found), max(end for spans in found.values() for _, end, _ in spans)
    begin, end = layer(found[labels[0]])
    time = end - begin
    title = f"The kernels of one token: {MODEL}, {PROMPT} tokens of context, {device}"
    parts, x, below = [svg.text("title", LEFT, 20, title)], float(LEFT), TOP + len(labels) * LANE + BETWEEN
    used = {part_of(name) for spans in found.values() for *_, name in spans}
    for part, colour in ((part.partition(":")[0], colour) for part, colour in COLOURS.items() if part in used):
        parts += [f'<rect x="{x:g}" y="32" width="12" height="12" fill="{colour}"/>', svg.text("", x + 16, 42.5, part)]
        x += 34 + 6.2 * len(part)
    for number, (label, spans) in enumerate(found.items()):
        start, scale, top, zoomed = layer(spans)[0], LENGTH / most, TOP + number * LANE, below + number * LANE
        parts += [svg.text("", LEFT, top + 10, label), *_bars(spans, (0, most), top + 16)]
        outline = f'x="{LEFT + start * scale:.1f}" y="{top + 14}" width="{time * scale:.1f}" height="{BAR + 4}"'
        parts += [f'<rect class="line" {outline}/>', svg.text("", LEFT, zoomed + 10, label.partition(":")[0])]
        parts += _bars(spans, (start, start + time), zoomed + 16, rows=2)
    said = f"One layer of {labels[0].partition(':')[0]}, and the same time of the others (outlined above; every other kernel is lower)"
    parts += [*_axis(most, below - BETWEEN), svg.text("title", LEFT, below - 14, said), *_axis(time, below + len(labels) * LANE)]
    return svg.picture(f"{LENGTH + 4 * LEFT} {below + len(labels) * LANE + 24}", title, _STYLE, parts)


def _bars(spans: Sequence[Span], shown: tuple[float, float], top: int, rows: int = 1) -> Iterator[str]:
    """What runs in the time that is shown, a path for each part of a step; kernels take turns with the rows."""
    scale, height = LENGTH / (shown[1] - shown[0]), BAR / rows
    paths: dict[str, str] = {}
    for number, (*times, name) in enumerate(spans):
        x, end = (LEFT + (min(max(time, shown[0]), shown[1]) - shown[0]) * scale for time in times)
        if end > x:
            path = f"M{x:.2f} {top + number % rows * height:g}h{end - x:.2f}v{height:g}h-{end - x:.2f}z"
            paths[part_of(name)] = paths.get(part_of(name), "") + path
    return (f'<path fill="{COLOURS[part]}" d="{path}"/>' for part, path in paths.items())


def _axis(most: float, top: int) -> Iterator[str]:
    step = next(step for power in range(9) for digit in (1, 2, 5) if most / (step := digit * 10**power) <= TICKS)
    yield f'<path class="line" d="M{LEFT} {top}h{LENGTH}"/>'
    for time in range(0, int(most) + 1, step):
        x = LEFT + time * LENGTH / most
        yield f'<path class="line" d="M{x:.1f} {top}v4"/>{svg.text("tick", x, top + 16, f"{time} us" if time else "0")}'


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(prog="python -m benchmarks.timeline", description=__doc__)
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES), help="that the file has (default: both)")
    parser.add_argument("--commit", required=True, help="of the build that is installed")
    parser.add_argument("--wheel", type=Path, help="the wheel that is installed, for its digest")
    parser.add_argument("-o", "--output", type=Path, required=True)
    args = parser.parse_args(words)
    log = Log()
    torch = import_torch(log, wanted=True)
    if not torch:
        parser.error("torch's profiler times the kernels\n  fix: install torch on a machine with an NVIDIA GPU")
    known = collect(words, torch=torch, commit_name=args.commit, wheel=args.wheel, quick=False)
    cases = [{"side": side, "kernels, ns": kernels} for side, kernels in measure(torch).items() if side in args.sides]
    results = {"kind": "timeline", "provenance": known, "cases": cases}
    write(args.output, results)
    log("\n".join(lanes([results])))
    return 0


if __name__ == "__main__":
    sys.exit(main())
