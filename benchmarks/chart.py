"""The results as one SVG that reads on a light and on a dark page."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .table import sides_of

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from matplotlib.axes import Axes

    from .record import CaseResult

# Greys and colours with enough contrast on white as well as on GitHub's #0d1117.
TEXT = "#7d8590"
COLOURS = {
    "ours": "#2f81f7",
    "ours, mask": "#79b8ff",
    "upstream": "#8c959f",
    "torch": "#e16f24",
    "torch cuDNN": "#e16f24",
    "torch flash": "#bf8700",
}
LABELS = {"ours": "mlx-cuda", "upstream": "MLX"}
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


def draw(cases: Sequence[CaseResult], output: Path) -> None:
    """Bars for every side, grouped by case; one panel for each unit."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    measured = [case for case in cases if case.rate("ours")]
    if not measured:
        raise ValueError("the results hold no case that was measured")
    units = list(dict.fromkeys(case.unit for case in measured))
    panels = [[case for case in measured if case.unit == unit] for unit in units]
    sides = sides_of(measured)
    with mpl.rc_context(STYLE):
        widths = [len(panel) for panel in panels]
        size = (max(6.0, 0.9 * sum(widths)), 3.6)
        figure, grid = plt.subplots(1, len(panels), figsize=size, width_ratios=widths, squeeze=False, layout="constrained")
        for axes, panel, unit in zip(grid[0], panels, units, strict=True):
            _draw_panel(axes, panel, sides, unit)
        handles = {label: handle for axes in grid[0] for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
        figure.legend(handles.values(), handles.keys(), loc="outside upper center", ncols=len(handles), frameon=False)
        output.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(output, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
        plt.close(figure)


def _label(case: CaseResult) -> str:
    """The operation and the case's name, narrow enough to stand under its bars."""
    size, _, rest = case.name.partition(" ")
    lines = [case.group, size.replace("x", " x\n"), rest.replace(", ", "\n").replace(" + ", " +\n")]
    return "\n".join(line for line in lines if line)


def _draw_panel(axes: Axes, cases: Sequence[CaseResult], sides: Sequence[str], unit: str) -> None:
    present = [name for name in sides if any(case.rate(name) for case in cases)]
    width = 0.8 / len(present)
    for position, name in enumerate(present):
        places = [i + (position - (len(present) - 1) / 2) * width for i in range(len(cases))]
        heights = [case.rate(name) or 0.0 for case in cases]
        axes.bar(places, heights, 0.92 * width, color=COLOURS.get(name, TEXT), label=LABELS.get(name, name))
    axes.set_xticks(range(len(cases)), [_label(case) for case in cases], fontsize=7)
    axes.set_ylabel(unit)
    axes.tick_params(axis="x", length=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color=TEXT, alpha=0.25, linewidth=0.6)
    axes.set_axisbelow(True)
