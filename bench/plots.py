"""Draws plots as PNG, with matplotlib, which only benchmarks need (the extra `bench`)."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bench import panels
from bench.report import Plot, Sheet

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_SIZE_INCH = (9.0, 5.0)
# A line with fewer points than this has a mark at each point.
_POINTS_FEW = 20


def draw(folder: Path, plots: Sequence[Plot | Sheet], say: Callable[[str], None]) -> None:
    """Writes one file for each plot. If matplotlib is not installed, says so and draws none."""
    if not plots:
        return
    if importlib.util.find_spec("matplotlib") is None:
        say("no plots: matplotlib is not installed; ./run installs it, or `pip install windrow-server[bench]`")
        return
    for plot in plots:
        file = folder / f"{plot.name}.png"
        if isinstance(plot, Sheet):
            panels.save(panels.figure(plot), file)
        else:
            _figure(plot).savefig(file, dpi=110)


def _figure(plot: Plot) -> Figure:
    from matplotlib.figure import Figure

    each = (plot, *plot.below)
    width, height = _SIZE_INCH
    figure = Figure(figsize=(width, height * (1 + 0.6 * len(plot.below))), layout="constrained")
    rows = figure.subplots(len(each), 1, sharex=True, squeeze=False)
    for panel, axes in zip(each, rows[:, 0], strict=True):
        _draw(panel, axes)
    rows[-1, 0].set(xlabel=plot.x)
    return figure


def _draw(plot: Plot, axes: Axes) -> None:
    for label, points in plot.lines.items():
        marker = "o" if len(points) < _POINTS_FEW else ""
        axes.plot([x for x, _ in points], [y for _, y in points], label=label, marker=marker)
    for label, at in plot.marks.items():
        axes.axvline(at, color="grey", linestyle="--", linewidth=1)
        across = axes.get_xaxis_transform()
        axes.text(at, 0.99, f" {label}", transform=across, fontsize="small", va="top", rotation=90)
    axes.set(title=plot.title, ylabel=plot.y)
    if plot.x_log:
        axes.set_xscale("log")
    if plot.y_log:
        axes.set_yscale("log")
    axes.grid(visible=True, which="both", alpha=0.3)
    # The legend is to the right of the plot. Inside, it would cover lines and marks.
    axes.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1.0, 1.0))
