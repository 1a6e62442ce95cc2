"""Draws a run as one picture: throughput, errors, pickup latency and the slots of each shard. Below them is a bar for
every fault and every change."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from chaos import figures
from chaos.run import Told

_SIZE_INCH = (12.0, 14.0)
_COLOURS_MAX = 20


def draw(folder: Path, told: Told, say: Callable[[str], None]) -> None:
    """Writes timeline.png. If matplotlib is not installed, says so and draws nothing."""
    try:
        import matplotlib as mpl
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        say("no timeline: matplotlib is not installed; ./run installs it, or `pip install windrow-server[bench]`")
        return
    seconds = figures.seconds(told)
    times = list(range(len(seconds)))
    figure = Figure(figsize=_SIZE_INCH, layout="constrained")
    FigureCanvasAgg(figure)
    rates, failures, latency, slots, faults = figure.subplots(5, 1, sharex=True, height_ratios=(2, 1, 2, 2, 4))

    rates.plot(times, [second.acknowledged for second in seconds], label="enqueued")
    rates.plot(times, [second.delivered for second in seconds], label="delivered")
    rates.plot(times, [second.acked for second in seconds], label="acked")
    rates.set(ylabel="jobs/s", title="What clients saw, and what was done to the cluster")
    rates.legend(fontsize="small", loc="upper right")

    failures.plot(times, [second.failed for second in seconds], color="tab:red")
    failures.set(ylabel="failed calls/s")

    for share, label in ((0.5, "p50"), (0.99, "p99")):
        latency.plot(
            times, [_quantile(second.pickups_s, share) for second in seconds], label=label, marker=".", linestyle=""
        )
    latency.set(ylabel="pickup, s", yscale="log")
    latency.legend(fontsize="small", loc="upper right")

    course = figures.holdings(told.evidence)
    moments = [at_s - told.began_s for at_s, _, _ in course]
    for shard in sorted({shard for _, held, _ in course for shard in held}):
        slots.step(moments, [held.get(shard, 0) for _, held, _ in course], where="post", label=shard)
    slots.step(moments, [moving for _, _, moving in course], where="post", label="on their way", color="black", ls=":")
    for move in figures.moves(told.evidence):
        slots.axvline(move.began_s - told.began_s, color="grey", linewidth=0.3)
    slots.set(ylabel="slots", xlim=(0, len(seconds)))
    slots.legend(fontsize="small", loc="upper right")

    targets = sorted({strike.target for strike in told.strikes}, reverse=True)
    names = sorted({strike.fault for strike in told.strikes})
    colours = mpl.colormaps["tab20"]
    shown: set[str] = set()
    for strike in sorted(told.strikes, key=lambda one: one.began_s):
        # Give a fault that has no duration a width that can be seen.
        width = max(strike.healed_s - strike.began_s, 0.3)
        label = "" if strike.fault in shown else strike.fault
        shown.add(strike.fault)
        colour = colours(names.index(strike.fault) % _COLOURS_MAX)
        faults.barh(strike.target, width, left=strike.began_s - told.began_s, color=colour, label=label or None)
    faults.axvline(told.healed_s - told.began_s, color="grey", linestyle="--", linewidth=1)
    faults.set(xlabel="s", yticks=range(len(targets)))
    if names:
        faults.legend(fontsize="x-small", loc="center left", bbox_to_anchor=(1.0, 0.5))
    for axes in (rates, failures, latency, slots, faults):
        axes.grid(visible=True, alpha=0.3)
    figure.savefig(folder / "timeline.png", dpi=110)


def _quantile(values: Sequence[float], share: float) -> float | None:
    if not values:
        return None
    # The axis is logarithmic, and cannot show 0.
    return max(sorted(values)[min(len(values) - 1, int(len(values) * share))], 1e-3)
