"""Draws a dashboard: each panel at its `gridPos`, all panels over the same time axis, with the events of the run."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bench.report import Panel, Points, Sheet

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.ticker import Locator

_COLUMNS = 24
_DPI, _COLORS = 110, 128
_WIDTH_INCH, _UNIT_INCH, _HEAD_LINE_INCH = 15.0, 0.37, 0.24
# The margins around the axes of a panel. The height of the legend is added to the margin below the axes.
_LEFT_INCH, _RIGHT_INCH, _TOP_INCH, _BOTTOM_INCH = 0.72, 0.28, 0.5, 0.34
_LEGEND_LINE_INCH, _LETTER_INCH, _SWATCH_INCH = 0.2, 0.076, 0.45
_LEGEND_LINES_MAX, _TICKS_MAX = 3, 7
_TEXT, _FAINT, _EVENT, _OTHERS = "#24292e", "#8a9199", "#d1495b", "#c5cad0"
# Divisors for values in seconds, each with the name of its unit, and the least value that is shown in this unit.
_TIMES = ((86_400, "d", 172_800), (3600, "h", 7200), (60, "min", 300), (1, "s", 1), (1e-3, "ms", 1e-3), (1e-6, "µs", 0))
_SIZES = ((1e9, "G", 1e9), (1e6, "M", 1e6), (1e3, "k", 1e4), (1, "", 0))
# The text after a number, by Grafana's name of the unit.
_SUFFIXES = {"ops": "/s", "reqps": "/s", "short": "", "percentunit": " %", "bool_yes_no": ""}


def scale(unit: str, most: float) -> tuple[float, str]:
    """Returns the number by which values up to `most` are divided before they are shown, and the unit that follows the
    result. Raises KeyError for a unit that no panel has had so far."""
    if unit == "percentunit":
        return 0.01, " %"
    if unit == "s":
        divisor, name, _ = next(one for one in _TIMES if most >= one[2])
        return (1, " s") if most == 0 else (divisor, f" {name}")
    divisor, prefix, _ = next(one for one in _SIZES if most >= one[2])
    return divisor, f"{prefix}{_SUFFIXES[unit]}"


def shown(lines: Mapping[str, Points], width_inch: float) -> tuple[Mapping[str, Points], int, int]:
    """Returns the lines that the legend has room for, how many lines the legend leaves out, and how many columns it
    has. The lines with the largest values come first."""
    ordered = sorted(lines, key=lambda name: -_most(lines[name]))
    for count in range(len(ordered), 0, -1):
        more = len(ordered) - count
        names = [*ordered[:count], *([_more(more)] if more else [])]
        columns = max(1, int(width_inch / (_SWATCH_INCH + _LETTER_INCH * max(map(len, names)))))
        if -(-len(names) // columns) <= _LEGEND_LINES_MAX:
            return {name: lines[name] for name in ordered[:count]}, more, columns
    return {}, len(ordered), 1


def _more(count: int) -> str:
    return f"{count} more"


def figure(sheet: Sheet) -> Figure:
    from matplotlib.figure import Figure

    head = (1.6 + len(sheet.events)) * _HEAD_LINE_INCH + 0.1
    height = head + _UNIT_INCH * max(panel.y + panel.height for panel in sheet.panels)
    made = Figure(figsize=(_WIDTH_INCH, height), facecolor="white")
    side = 0.15 / _WIDTH_INCH
    made.text(side, 1 - 0.1 / height, sheet.title, fontsize=15, weight="bold", va="top", color=_TEXT)
    for line, event in enumerate(sheet.events):
        below = 0.1 + (1.6 + line) * _HEAD_LINE_INCH
        made.text(side, 1 - below / height, f"{line + 1}", fontsize=11, va="top", color=_EVENT, weight="bold")
        text = f"{clock(event.at_s)}{f' to {clock(event.until_s)}' if event.until_s else ''}: {event.what}"
        made.text(side + 0.2 / _WIDTH_INCH, 1 - below / height, text, fontsize=11, va="top", color=_TEXT)
    for panel in sheet.panels:
        _draw(panel, sheet, made, (_WIDTH_INCH, height), head)
    return made


def save(made: Figure, file: Path) -> None:
    """Writes the figure as a PNG with few colors, which has a third of the bytes. This matters because the repository
    keeps these pictures."""
    from PIL import Image

    full = io.BytesIO()
    made.savefig(full, dpi=_DPI)
    Image.open(full).convert("RGB").quantize(_COLORS).save(file, optimize=True)


def clock(at_s: float) -> str:
    minutes, seconds = divmod(round(at_s), 60)
    return f"{minutes}:{seconds:02}"


def _draw(panel: Panel, sheet: Sheet, made: Figure, size: tuple[float, float], head: float) -> None:
    lines = {name: points for name, points in panel.lines.items() if not math.isnan(_most(points))}
    left = panel.x / _COLUMNS * size[0]
    top = size[1] - head - panel.y * _UNIT_INCH
    width = panel.width / _COLUMNS * size[0] - _LEFT_INCH - _RIGHT_INCH
    named, more, columns = shown(lines, width + _LEFT_INCH)
    legend_inch = _LEGEND_LINE_INCH * -(-(len(named) + bool(more)) // columns)
    below = _BOTTOM_INCH + legend_inch
    bottom, tall = top - panel.height * _UNIT_INCH + below, panel.height * _UNIT_INCH - _TOP_INCH - below
    axes = made.add_axes(
        ((left + _LEFT_INCH) / size[0], bottom / size[1], width / size[0], tall / size[1]), facecolor="#fafbfc"
    )
    axes.set_title(panel.title, loc="left", fontsize=11.5, weight="bold", color=_TEXT, pad=17, x=-0.1)
    for side in axes.spines:
        axes.spines[side].set_visible(False)
    axes.tick_params(length=0, labelsize=10, labelcolor="#57606a")
    axes.set_xlim(0, sheet.seconds)
    if not lines:
        axes.set(xticks=[], yticks=[])
        axes.text(0.5, 0.5, "no data", transform=axes.transAxes, ha="center", va="center", fontsize=13, color=_FAINT)
        return
    _lines(axes, panel, lines, named, more)
    _events(axes, sheet)
    axes.xaxis.set_major_locator(_every(sheet.seconds))
    axes.xaxis.set_major_formatter(lambda value, _: clock(value))
    axes.grid(color="#e4e8ec", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.legend(
        fontsize=9.5,
        ncols=columns,
        loc="upper left",
        bbox_to_anchor=(-_LEFT_INCH / 2 / width, -0.27 / tall),
        frameon=False,
        borderpad=0,
        borderaxespad=0,
        handlelength=1.2,
        handletextpad=0.4,
        columnspacing=1.1,
        labelspacing=0.25,
        labelcolor=_TEXT,
    )


def _lines(axes: Axes, panel: Panel, lines: Mapping[str, Points], named: Mapping[str, Points], more: int) -> None:
    most = max(map(_most, lines.values()))
    divisor, suffix = scale(panel.unit, most)
    for name, points in lines.items():
        if name not in named:
            _line(axes, points, divisor, color=_OTHERS, label=f"_{name}")
    for color, (name, points) in enumerate(named.items()):
        _line(axes, points, divisor, color=f"C{color}", label=name)
    if more:
        axes.plot([], [], color=_OTHERS, label=_more(more))
    if panel.unit == "bool_yes_no":
        axes.set(ylim=(-0.15, 1.15), yticks=[0, 1], yticklabels=["no", "yes"])
        return
    # Leave some room below zero, so that a line at zero is drawn in its full width.
    above = most / divisor or 1.0
    axes.set_ylim(-0.04 * above, 1.08 * above)
    from matplotlib.ticker import MaxNLocator

    whole = all(math.isnan(value) or value.is_integer() for points in lines.values() for _, value in points)
    axes.yaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 2.5, 5, 10], integer=whole and divisor == 1))
    axes.yaxis.set_major_formatter(lambda value, _: "" if value < 0 else f"{value:g}{suffix if value else ''}")


def _line(axes: Axes, points: Points, divisor: float, *, color: str, label: str) -> None:
    values = [value / divisor for _, value in points]
    axes.plot([at for at, _ in points], values, color=color, label=label, linewidth=1.6)
    # Draw a dot for a value between two gaps, because a line needs two values.
    padded = [math.nan, *values, math.nan]
    alone = [at for at in range(len(values)) if math.isnan(padded[at]) and math.isnan(padded[at + 2])]
    axes.plot([points[at][0] for at in alone], [values[at] for at in alone], ".", color=color)


def _events(axes: Axes, sheet: Sheet) -> None:
    across = axes.get_xaxis_transform()
    for number, event in enumerate(sheet.events, 1):
        axes.axvline(event.at_s, color=_EVENT, linestyle=(0, (4, 3)), linewidth=0.9, alpha=0.7)
        if event.until_s:
            axes.axvspan(event.at_s, event.until_s, color=_EVENT, alpha=0.08, linewidth=0)
        axes.text(
            event.at_s, 1.01, f"{number}", transform=across, ha="center", va="bottom", fontsize=9, color=_EVENT,
            weight="bold",
        )  # fmt: skip


def _every(seconds: float) -> Locator:
    from matplotlib.ticker import MultipleLocator

    steps = (step for step in (1, 2, 5, 15, 30, 60, 120, 300, 600) if seconds / step <= _TICKS_MAX)
    return MultipleLocator(next(steps, 60 * math.ceil(seconds / 60 / _TICKS_MAX)))


def _most(points: Sequence[tuple[float, float]]) -> float:
    """Returns the largest value. Returns NaN if there are no values."""
    return max((value for _, value in points if not math.isnan(value)), default=math.nan)
