"""How dashboards become pictures: their queries, their legends, their axes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import pytest

from bench import panels
from bench.report import Event, Panel, Points, Sheet
from bench.scenarios.dashboards import lines_of, points_of
from proof.dashboards import filled, legend, read_dashboards
from proof.prometheus import INSTALL, NotInstalled, running_prometheus

_LEVEL: Points = [(0.0, 1.0), (1.0, 1.0)]


def _panel(lines: Mapping[str, Points], *, title: str = "Calls", unit: str = "reqps", y: int = 0) -> Panel:
    return Panel(title=title, unit=unit, x=0, y=y, width=8, height=8, lines=lines)


def _sheet(*made: Panel) -> Sheet:
    event = Event(what="a process is killed", at_s=0.5)
    return Sheet(name="dashboard", title="Windrow", panels=made, events=[event], seconds=1.0)


def _series(**labels: str) -> dict[str, object]:
    return {"metric": labels, "values": [(100.0, "1")]}


def test_each_variable_of_a_query_is_filled_in() -> None:
    query = 'sum(rate(jobs{org="$org",queue=~".+$"}[$__rate_interval]))'
    values = {"org": "acme", "__rate_interval": "8s"}
    assert filled(query, values) == 'sum(rate(jobs{org="acme",queue=~".+$"}[8s]))'


def test_a_variable_is_not_taken_for_another_one_whose_name_it_begins_with() -> None:
    assert filled("$org $organ", {"org": "a", "organ": "b"}) == "a b"


def test_a_variable_that_nobody_knows_is_an_error() -> None:
    with pytest.raises(KeyError, match="region"):
        filled('up{region="$region"}', {"org": "acme"})


def test_a_legend_leaves_out_labels_that_a_line_does_not_have() -> None:
    assert legend("{{verb}} {{answer}}", {"verb": "ack", "answer": "ok"}) == "ack ok"
    assert legend("{{verb}} {{answer}}", {"verb": "ack"}) == "ack"
    assert legend("median", {"shard": "s1"}) == "median"


def test_lines_with_the_same_legend_are_all_kept() -> None:
    series = [("{{shard}}", _series(shard="s1", org=org)) for org in "abc"]
    assert list(lines_of(series, 100.0, 1.0)) == ["s1", "s1 (2)", "s1 (3)"]


def test_missing_values_and_values_that_are_no_numbers_are_gaps() -> None:
    values = [(100.0, "1"), (101.0, "NaN"), (102.0, "+Inf"), (103.0, "2"), (106.0, "3")]
    points = points_of(values, 100.0, 1.0)
    assert [at for at, _ in points] == [0, 1, 2, 3, 5, 6]
    assert [at for at, value in points if math.isnan(value)] == [1, 2, 5]


@pytest.mark.parametrize("lines", [{}, {"failed": [(0.0, math.nan), (1.0, math.nan)]}, {"failed": []}])
def test_a_panel_without_data_says_so(lines: dict[str, Points]) -> None:
    empty, full = panels.figure(_sheet(_panel(lines), _panel({"failed": _LEVEL}, y=8))).axes
    assert [text.get_text() for text in empty.texts] == ["no data"]
    assert "no data" not in [text.get_text() for text in full.texts]


def test_a_value_between_two_gaps_is_drawn_as_a_dot() -> None:
    points = [(0.0, math.nan), (0.4, 2.0), (0.8, math.nan)]
    (axes,) = panels.figure(_sheet(_panel({"failed": points}))).axes
    assert [len(line.get_path()) for line in axes.lines if line.get_marker() == "."] == [1]


@pytest.mark.parametrize("letters", [2, 30, 200])
def test_a_legend_of_many_lines_stays_in_its_panel_and_counts_the_others(letters: int) -> None:
    lines = {f"{number:03}".ljust(letters, "x"): [(0.0, float(number)), (1.0, 0.0)] for number in range(60)}
    made = panels.figure(_sheet(_panel(lines), _panel(lines, y=8)))
    made.canvas.draw()
    upper, lower = made.axes
    legend = upper.get_legend()
    assert legend is not None
    *named, others = [text.get_text() for text in legend.get_texts()]
    assert others == f"{60 - len(named)} more"
    assert [name[:3] for name in named] == [f"{59 - number:03}" for number in range(len(named))]
    assert legend.get_window_extent().y0 > lower.title.get_window_extent().y1
    assert len([line for line in upper.lines if str(line.get_label()).startswith("_0")]) == 60 - len(named)


@pytest.mark.parametrize(
    ("unit", "most", "shown"),
    [
        ("s", 0.0, (1, " s")),
        ("s", 0.000_02, (1e-6, " µs")),
        ("s", 0.25, (1e-3, " ms")),
        ("s", 90.0, (1, " s")),
        ("s", 900.0, (60, " min")),
        ("s", 90 * 86_400.0, (86_400, " d")),
        ("percentunit", 0.2, (0.01, " %")),
        ("ops", 800.0, (1, "/s")),
        ("ops", 25_000.0, (1e3, "k/s")),
        ("short", 2e9, (1e9, "G")),
        ("short", 0.0, (1, "")),
    ],
)
def test_an_axis_has_a_unit_that_suits_its_values(unit: str, most: float, shown: tuple[float, str]) -> None:
    assert panels.scale(unit, most) == shown


def test_every_unit_of_the_dashboards_is_known() -> None:
    units = {p["fieldConfig"]["defaults"]["unit"] for one in read_dashboards().values() for p in one["panels"]}
    assert all(panels.scale(unit, 1.0) for unit in units)


def test_without_prometheus_the_error_says_how_to_install_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NotInstalled, match=INSTALL), running_prometheus(tmp_path):
        pass
