"""The picture and the numbers of the README, from committed results."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from html import escape
from pathlib import Path
from typing import Any

from . import svg
from .cells import speed
from .chart import COLOURS, LABELS, TEXT
from .decoding import PROMPT
from .record import Results
from .result_file import read

RESULTS = Path(__file__).with_name("results")
PICTURE = RESULTS.parents[1] / "docs" / "img" / "tokens-per-second.svg"
SIDES = ("upstream", "ours")  # as in the other pictures; the results files of models call ours "patched"
LEFT, WIDTH, BAR, ROW, TOP = 200, 720, 15, 46, 78  # pixels: of the labels, the picture, a bar, a model, the heading
_STYLE = f"""
    text {{ font: 13px system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; fill: {TEXT} }}
    .title {{ font-size: 16px; font-weight: 700 }}
    .model {{ text-anchor: end; font-weight: 600 }}
    .factor {{ font-weight: 700; fill: {COLOURS["ours"]} }}
"""


def _one_sequence(gpu: str) -> list[dict[str, Any]]:
    """The models of mlx-lm that decoded one sequence."""
    models = read(RESULTS / "decoding" / f"nvidia-{gpu}-cu13.jsonl")["cases"]
    return [each for each in models if each["batch"] == 1 and " of mlx-" not in each["model"]]


def _tokens(model: Mapping[str, Any]) -> dict[str, float]:
    return {side: speed(model, key) for side, key in zip(SIDES, ("upstream", "patched"), strict=True)}


def drawing() -> str:
    """Tokens per second of each model on an H200, MLX and mlx-cuda, as an SVG that reads on light and dark pages."""
    models = [each for each in _one_sequence("h200") if each["prompt"] == PROMPT]
    most = max(value for each in models for value in _tokens(each).values())
    lines = [
        _text("title", 10, 24, "Tokens per second, decoding with mlx-lm on an H200"),
        _text("", 10, 44, f"One sequence, {PROMPT} tokens of context, random weights in the shapes of the published models"),
    ]
    for number, side in enumerate(SIDES):
        x = 10 + 90 * number
        lines += [f'<rect x="{x}" y="54" width="12" height="12" fill="{COLOURS[side]}"/>', _text("", x + 18, 64.5, LABELS[side])]
    for number, each in enumerate(models):
        top, tokens = TOP + number * ROW, _tokens(each)
        lines.append(_text("model", LEFT - 10, top + BAR + 5, _title(each["model"])))
        for row, (side, value) in enumerate(tokens.items()):
            y, length = top + row * (BAR + 1), value / most * (WIDTH - LEFT - 100)
            lines.append(f'<rect x="{LEFT}" y="{y}" width="{length:.1f}" height="{BAR}" fill="{COLOURS[side]}"/>')
            lines.append(_text("", LEFT + length + 6, y + 12, f"{value:.0f}"))
        lines.append(_text("factor", LEFT + length + 36, y + 12, f"{tokens['ours'] / tokens['upstream']:.1f}x"))
    said = "Tokens per second of decoding on an H200, MLX and mlx-cuda, by model, random weights"
    return svg.picture(f"{WIDTH} {TOP + len(models) * ROW}", said, _STYLE, lines)


def _title(model: str) -> str:
    name = model.partition(":")[0]
    return name if "bit" in name else f"{name}, bf16"


def _text(kind: str, x: float, y: float, said: str) -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:g}">{escape(said)}</text>'


def _range(factors: Iterable[float]) -> str:
    found = list(factors)
    return f"{min(found):.1f} to {max(found):.1f} times"


def _layers(model: str) -> str:
    """Return "NAME, measured with 12 of its 48 layers" for "NAME, 12 of its 48 layers: …"."""
    name, _, layers = model.partition(":")[0].rpartition(", ")
    return f"{name}, measured with {layers}"


def slower(results: Results) -> tuple[str, str]:
    """How many cases are slower than MLX by more than the noise, and of how many that MLX can run."""
    cases = [case for case in results.cases if case.speedup("upstream")]
    return str(sum(case.behind() for case in cases) or "none"), str(len(cases))


def readme_blocks() -> dict[str, str]:
    """Return the lines below the picture. A model with fewer layers than published is named apart."""
    decoding = {gpu: _range(tokens["ours"] / tokens["upstream"] for tokens in map(_tokens, _one_sequence(gpu))) for gpu in ("h200", "h100")}
    cases = read(RESULTS / "models" / "nvidia-h200-cu13.jsonl")["cases"]
    prefill = {each["model"]: speed(each, "patched", "prefill") / speed(each, "upstream", "prefill") for each in cases}
    (part,) = (model for model in prefill if " of its " in model)
    part_speedup = prefill.pop(part)
    h200, h100 = (" of ".join(slower(Results.load(RESULTS / f"nvidia-{gpu}-cu13.jsonl"))) for gpu in decoding)
    versions = read(RESULTS / "decoding" / "nvidia-h100-cu13.jsonl")["provenance"]["distributions"]
    return {
        "readme": "\n".join(
            [
                f"- Decoding one sequence: {decoding['h200']} the tokens/s of MLX on an H200, {decoding['h100']} on an H100",
                "  ([decoding](docs/internals/decoding.md), [serving many requests](docs/guides/serving.md)).",
                "  MLX is limited by the CPU here, so the factor depends on the host.",
                f"- Prefill of {cases[0]['prompt']} tokens on an H200: {_range(prefill.values())}; {part_speedup:.1f} times for",
                f"  {_layers(part)} ([models](docs/results/performance.md#models)).",
                f"- Committed benchmark cases slower than MLX by more than the noise: {h200} on an H200, {h100} on an H100",
                "  ([performance](docs/results/performance.md), [GPUs](docs/results/gpus.md#how-much-faster-the-kernels-are)).",
                "",
                "The benchmarks use random weights in the shapes of published models. Measured with MLX "
                f"{versions['mlx']} and mlx-lm {versions['mlx-lm']}.",
            ]
        )
    }
