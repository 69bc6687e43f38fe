"""The results as one SVG that reads on a light and on a dark page."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from .table import sides_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from .record import CaseResult

# Greys and colours with enough contrast on white as well as on GitHub's #0d1117.
TEXT = "#7d8590"
COLOURS = {
    "ours": "#2f81f7",
    "ours, mask": "#79b8ff",
    "ours, contiguous": "#79b8ff",
    "ours, one by one": "#79b8ff",
    "ours, without": "#79b8ff",
    "upstream": "#8c959f",
    "torch": "#e16f24",
    "torch cuDNN": "#e16f24",
    "torch flash": "#bf8700",
    "torch varlen": "#e16f24",
    "torch efficient": "#57ab5a",
    "torch flex": "#a371f7",
    "dequantised": "#57ab5a",
    "bf16": "#a371f7",
    "memory": "#bf8700",
    "arithmetic": "#e5534b",
}
LABELS = {
    "ours": "mlx-cuda", "upstream": "MLX", "torch flex": "torch FlexAttention", "dequantised": "MLX, in two steps",
    "bf16": "MLX, bfloat16", "memory": "bandwidth limit", "arithmetic": "compute limit",
}  # fmt: skip
MARKERS = {
    "ours": "o",
    "upstream": "s",
    "torch cuDNN": "^",
    "torch flash": "v",
    "dequantised": "D",
    "bf16": "x",
    "memory": "",
    "arithmetic": "",
}  # sides are told apart without their colours too
LINES = {"memory": "--", "arithmetic": ":"}  # what nobody measured
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "mlx-cuda",  # equal results give equal files
    "font.family": "sans-serif",
    "font.size": 9,
    "text.color": TEXT,
    "axes.edgecolor": TEXT,
    "axes.labelcolor": TEXT,
    "xtick.color": TEXT,
    "ytick.color": TEXT,
}


@contextlib.contextmanager
def _figure(rows: int, columns: int, size: tuple[float, float], output: Path, **options: Any) -> Iterator[tuple[Figure, list[Axes]]]:
    """A figure with its panels; at the end it gets one legend for all of them and is written."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    with mpl.rc_context(STYLE):
        figure, grid = plt.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained", **options)
        try:
            yield figure, list(grid.flat)
            handles = {label: handle for axes in grid.flat for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
            rows = -(-len(handles) // max(1, int(size[0] / 1.5)))  # a legend wider than the figure would be cut off
            columns = -(-len(handles) // rows)
            figure.legend(handles.values(), handles.keys(), loc="outside upper center", ncols=columns, frameon=False)
            output.parent.mkdir(parents=True, exist_ok=True)
            figure.savefig(output, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
        finally:
            plt.close(figure)


def bars(groups: Sequence[str], sides: Mapping[str, tuple[str, Sequence[float]]], unit: str, output: Path) -> None:
    """A bar of each side, by its label with its colour and values, in each group; none where the value is 0."""
    width = 0.8 / len(sides)
    with _figure(1, 1, (max(6.0, 1.6 * len(groups)), 3.4), output) as (_, (axes,)):
        for number, (label, (colour, values)) in enumerate(sides.items()):
            places = [group + (number - (len(sides) - 1) / 2) * width for group in range(len(groups))]
            drawn = axes.bar(places, values, width * 0.92, color=colour, label=label)
            axes.bar_label(drawn, [f"{value:.0f}" if value else "" for value in values], padding=2, fontsize=7, color=TEXT)
        axes.set_xticks(range(len(groups)), groups)
        axes.set_ylabel(unit, color=TEXT)
        _clean(axes, "y")


def draw(cases: Sequence[CaseResult], output: Path) -> None:
    """Bars for every side, grouped by case; one panel for each unit."""
    measured = [case for case in cases if case.rate("ours")]
    if not measured:
        raise ValueError("the results hold no case that was measured")
    units = list(dict.fromkeys(case.unit for case in measured))
    panels = [[case for case in measured if case.unit == unit] for unit in units]
    sides = sides_of(measured)
    widths = [len(panel) for panel in panels]
    groups = len({case.group for case in measured}) > 1
    with _figure(1, len(panels), (max(6.0, 0.9 * sum(widths)), 3.6), output, width_ratios=widths) as (_, grid):
        for axes, panel, unit in zip(grid, panels, units, strict=True):
            _draw_panel(axes, panel, sides, unit, groups=groups)


def draw_lines(
    panels: Mapping[str, Sequence[CaseResult]],
    output: Path,
    *,
    x: Callable[[CaseResult], float],
    y: Callable[[CaseResult, str], float | None],
    labels: tuple[str, str],
    columns: int,
    sides: Sequence[str] = ("ours", "upstream", "torch cuDNN", "torch flash"),
    logarithmic: bool = False,
) -> None:
    """A small panel for each title, all with the same axes: each side as a line over ``x``, which grows by factors."""
    shown = {title: cases for title, cases in panels.items() if any(y(case, "ours") for case in cases)}
    if not shown:
        raise ValueError("the results hold no case that was measured")
    columns = min(columns, len(shown))
    rows = -(-len(shown) // columns)
    with _figure(rows, columns, (max(6.0, 2.6 * columns), 2.3 * rows + 0.5), output, sharey=True) as (figure, grid):
        for axes, (title, cases) in zip(grid, shown.items(), strict=False):
            for name in sides:
                points = sorted((x(case), value) for case in cases if (value := y(case, name)) is not None)
                if points:
                    places, heights = zip(*points, strict=True)
                    (line,) = axes.plot(places, heights, color=COLOURS.get(name, TEXT), label=LABELS.get(name, name), linewidth=1.6)
                    line.set(marker=MARKERS.get(name, "o"), markersize=4, linestyle=LINES.get(name, "-"), zorder=3 if name == "ours" else 2)
            ticks = sorted({x(case) for case in cases})
            ticks = ticks[:: -(-len(ticks) // 8)]  # more would stand in one another's place
            axes.set_xscale("log", base=2)
            axes.set_xticks(ticks, [_thousands(tick) for tick in ticks])
            axes.minorticks_off()
            axes.set_title(title, color=TEXT, fontsize=9)
            _clean(axes, "both")
        for axes in grid[len(shown) :]:
            axes.set_visible(False)
        if logarithmic:
            measured = [value for cases in shown.values() for case in cases for side in case.sides if (value := y(case, side)) is not None]
            grid[0].set(yscale="log", ylim=(min(measured) / 4, 2 * max(measured)))
            grid[0].yaxis.set_major_formatter("{x:g}")
        else:
            grid[0].set_ylim(bottom=0)  # of all panels; only now, because it also ends the scaling
        figure.supxlabel(labels[0], color=TEXT, fontsize=9)
        figure.supylabel(labels[1], color=TEXT, fontsize=9)


def draw_times(cases: Mapping[str, CaseResult], output: Path) -> None:
    """Horizontal bars of the time of one call, on a logarithmic axis: what lies a hundredfold apart stands in one picture."""
    measured = {label: case for label, case in cases.items() if case.median()}
    if not measured:
        raise ValueError("the results hold no case that was measured")
    sides = [name for name in sides_of(list(measured.values())) if name.partition(",")[2] == ""]
    bars: dict[str, list[tuple[int, float]]] = {name: [] for name in sides}  # places and milliseconds, a place free between the cases
    middles, place = [], 0
    for case in measured.values():
        shown = [(name, median) for name in sides if (median := case.median(name))]
        middles.append(place + (len(shown) - 1) / 2)
        for name, median in shown:
            bars[name].append((place, 1e3 * median))
            place += 1
        place += 1
    with _figure(1, 1, (7.6, 0.15 * place + 1.0), output) as (_, (axes,)):
        for name, those in bars.items():
            places, times = zip(*those, strict=True)
            axes.barh(places, times, 0.86, color=COLOURS.get(name, TEXT), label=LABELS.get(name, name))
            for at, time in those:
                axes.annotate(f"{time:.3g}", (time, at), (3, 0), textcoords="offset points", va="center", fontsize=7, color=TEXT)
        axes.set_yticks(middles, list(measured))
        axes.set_ylim(place - 1, -1)
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter("{x:g}")
        axes.set_xlabel("milliseconds a call")
        axes.tick_params(axis="y", length=0)
        _clean(axes, "x")


def _thousands(number: float) -> str:
    return f"{number / 1024:g}k" if number >= 1024 and number % 256 == 0 else f"{number:g}"


def _clean(axes: Axes, grid: Any) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis=grid, color=TEXT, alpha=0.25, linewidth=0.6)
    axes.set_axisbelow(True)


def _label(case: CaseResult, *, group: bool) -> str:
    """The operation, where there are several, and the case's name, narrow enough to stand under its bars."""
    size, _, rest = case.name.partition(" ")
    lines = [case.group if group else "", size.replace("x", " x\n"), rest.replace(", ", "\n").replace(" + ", " +\n")]
    return "\n".join(line for line in lines if line)


def _draw_panel(axes: Axes, cases: Sequence[CaseResult], sides: Sequence[str], unit: str, *, groups: bool) -> None:
    present = [name for name in sides if any(case.rate(name) for case in cases)]
    width = 0.8 / len(present)
    for position, name in enumerate(present):
        places = [i + (position - (len(present) - 1) / 2) * width for i in range(len(cases))]
        heights = [case.rate(name) or 0.0 for case in cases]
        axes.bar(places, heights, 0.92 * width, color=COLOURS.get(name, TEXT), label=LABELS.get(name, name))
    axes.set_xticks(range(len(cases)), [_label(case, group=groups) for case in cases], fontsize=7)
    axes.set_ylabel(unit)
    axes.tick_params(axis="x", length=0)
    _clean(axes, "y")
