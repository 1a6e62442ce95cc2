"""The results of scenarios, as Markdown and as JSON. Pure except for writing the files."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from proof.environment import described
from proof.table import Table


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    """Lines over a common x axis. `name`: the name of the picture's file, without the suffix."""

    name: str
    title: str
    x: str
    y: str
    lines: Mapping[str, Sequence[tuple[float, float]]]
    # Positions on the x axis at which something began or ended.
    marks: Mapping[str, float] = field(default_factory=dict[str, float])
    x_log: bool = False
    y_log: bool = False
    # Plots that are drawn beneath this one, in the same picture and over the same x axis.
    below: Sequence[Plot] = ()


Points: TypeAlias = Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One panel of a dashboard. `x` to `height`: its gridPos. `unit`: Grafana's name of the unit. `lines`: the points
    of each line over seconds, by the line's legend. A NaN is a gap in the line."""

    title: str
    unit: str
    x: int
    y: int
    width: int
    height: int
    lines: Mapping[str, Points]


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """What happened at the moment `at_s`, or from `at_s` to `until_s`."""

    what: str
    at_s: float
    until_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sheet:
    """A whole dashboard, which is one picture. `name`: the name of the picture's file, without the suffix."""

    name: str
    title: str
    panels: Sequence[Panel]
    events: Sequence[Event]
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The result of one scenario. `samples`: everything that was measured, in a form for JSON."""

    scenario: str
    plan: Mapping[str, object]
    samples: Sequence[Mapping[str, object]]
    tables: Sequence[Table]
    plots: Sequence[Plot | Sheet] = ()


def markdown(found: Sequence[Found], *, environment: Mapping[str, object], failed: Mapping[str, str]) -> str:
    """Returns all tables, under a description of the machine and the software on which they were measured."""
    text = [f"{described(environment)}\n"]
    for one in found:
        text += [f"## {one.scenario}\n", *(table.markdown() for table in one.tables)]
    if failed:
        text += ["## Not measured\n", *(f"- {who}: {why}" for who, why in failed.items()), ""]
    return "\n".join(text)


def to_json(found: Sequence[Found], *, environment: Mapping[str, object], failed: Mapping[str, str]) -> str:
    """Returns everything that was measured."""
    scenarios = {
        one.scenario: {
            "plan": dict(one.plan),
            "tables": [
                {"title": table.title, "rows": [dict(zip(table.head, row, strict=True)) for row in table.rows]}
                for table in one.tables
            ],
            "samples": [dict(sample) for sample in one.samples],
        }
        for one in found
    }
    told = {"environment": dict(environment), "scenarios": scenarios, "not_measured": dict(failed)}
    return json.dumps(told, indent=1, ensure_ascii=False) + "\n"


def write(
    folder: Path, found: Sequence[Found], *, environment: Mapping[str, object], failed: Mapping[str, str]
) -> None:
    """Writes bench.json and bench.md."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "bench.json").write_text(to_json(found, environment=environment, failed=failed))
    (folder / "bench.md").write_text("# Benchmark\n\n" + markdown(found, environment=environment, failed=failed))
