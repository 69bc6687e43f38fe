"""The pictures of the documents, each from what the results hold for it."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from .cells import ARITHMETIC, MEMORY, memory_share
from .chart import draw, draw_lines, draw_times

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from .record import CaseResult, Results

ARRAYS = {"bool causal": "causal, as an array", "documents": "documents", "random": "random", "additive": "additive"}


def draw_pictures(results: Results, folder: Path) -> list[Path]:
    """Every picture that there are results for; the paths of those drawn."""
    drawn = []
    for name, picture in PICTURES.items():
        with contextlib.suppress(ValueError):  # nothing was measured for it
            picture(results, folder / name)
            drawn.append(folder / name)
    return drawn


def _attention(results: Results, output: Path) -> None:
    """Bars at one length, by head_dim."""
    cases = [case for case in results.cases if case.group == "attention" and case.parameters["length"] == 8192]
    draw(sorted(cases, key=lambda case: (case.parameters["head_dim"], case.parameters["mask"] == "causal")), output)


def _lengths(results: Results, output: Path) -> None:
    """Speed against T, a panel for each head_dim."""
    panels: dict[tuple[bool, int], list[CaseResult]] = {}
    for case in results.cases:
        given = case.parameters
        if case.group == "attention" and given["heads"] == given["kv_heads"] and not given.get("window"):
            panels.setdefault((given["mask"] == "causal", given["head_dim"]), []).append(case)
    draw_lines(
        {
            f"D={head_dim} {'causal' if causal else 'full'}": cases
            for (causal, head_dim), cases in sorted(panels.items(), key=lambda item: item[0])
            if len(cases) > 2
        },
        output,
        x=lambda case: float(case.parameters["length"]),
        y=lambda case, side: case.rate(side),
        labels=("queries and keys", "TFLOP/s"),
        columns=4,
    )


def _decode(results: Results, output: Path) -> None:
    """Part of the memory's speed against the length of the cache, a panel for each batch size."""
    device = results.provenance["device"]
    chosen = {"head_dim": 128, "queries": 1, "heads": 32, "kv_heads": 8}
    panels: dict[str, list[CaseResult]] = {}
    for case in results.cases:
        given = case.parameters
        if case.group == "decode" and chosen.items() <= given.items() and not given.get("ragged"):
            panels.setdefault(f"B={given['batch']}", []).append(case)

    def share(case: CaseResult, side: str) -> float | None:
        value = memory_share(case, device, side)
        return None if value is None else 100 * value

    labels = ("keys", "% of bandwidth")
    draw_lines(panels, output, x=lambda case: float(case.parameters["length"]), y=share, labels=labels, columns=3)


def _masks(results: Results, output: Path) -> None:
    """What a call takes with each kind of restriction, at one size."""
    size = {"head_dim": 128, "length": 8192, "batch": 2, "heads": 16, "kv_heads": 16, "dtype": "bfloat16"}
    chosen = {}
    for case in results.cases:
        given = case.parameters
        if case.group in ("attention", "masks", "window", "softcap") and size.items() <= given.items():
            words = [ARRAYS.get(given["mask"], given["mask"] or "no mask")]
            words += [f"{option} {given[option]:g}" for option in ("window", "softcap") if given.get(option)]
            chosen[", ".join(words)] = case
    draw_times(chosen, output)


def _backward(results: Results, output: Path) -> None:
    draw([case for case in results.cases if case.group == "backward"], output)


def _products(results: Results, output: Path) -> None:
    draw([case for case in results.cases if case.group in ("linear", "swiglu")], output)


def _quantized(results: Results, output: Path) -> None:
    """The time of a call against the number of rows, a panel for each way in which weights are stored."""
    device = results.provenance["device"]
    limits = {"memory": ("bytes", MEMORY.get(device)), "arithmetic": ("operations", ARITHMETIC.get(device))}
    panels: dict[str, list[CaseResult]] = {}
    for case in results.cases:
        if case.group == "quantized":
            panels.setdefault(case.name.partition(",")[0], []).append(case)

    def microseconds(case: CaseResult, side: str) -> float | None:
        if side in limits:
            counted, most = limits[side]
            return float(case.parameters[counted]) / most / 1e6 if most else None
        value = case.median(side)
        return None if value is None else 1e6 * value

    draw_lines(
        panels,
        output,
        x=lambda case: float(case.parameters["rows"]),
        y=microseconds,
        labels=("M", "microseconds per call"),
        columns=3,
        sides=("ours", "upstream", "dequantised", "bf16", *limits),
        logarithmic=True,
    )


PICTURES: dict[str, Callable[[Results, Path], None]] = {
    "attention.svg": _attention,
    "attention-lengths.svg": _lengths,
    "decode.svg": _decode,
    "masks.svg": _masks,
    "backward.svg": _backward,
    "linear-swiglu.svg": _products,
    "quantized.svg": _quantized,
}
