"""How the benchmark computes medians, ratios, percentiles and tables."""

from __future__ import annotations

import json
import math
import os
import threading
import time
from array import array
from pathlib import Path

import pytest

from bench import pages, payloads, pickups
from bench.counts import Counts
from bench.cpu import waits_of_trees
from bench.messages import Messages
from bench.meter import Spent, Written
from bench.pickups import Pickup
from bench.rate import Figure, Load, Timed
from bench.report import Found, markdown, to_json
from bench.scenarios.throughput.tables import Case, Sample, counts_table, plots, table
from bench.spread import percentile, ratio, spread
from bench.statements import Runs, shape
from proof.table import Table

_SURROUNDINGS: dict[str, object] = {
    "date": "2026-01-01",
    "commit": "abc",
    "cores": 2,
    "cpu": "some",
    "kernel": "6",
    "python": "3.11",
    "postgres": {"version": "18.6"},
}


def test_a_spread_has_the_median_and_both_ends() -> None:
    found = spread([5.0, 1.0, 3.0])
    assert (found.median, found.low, found.high, found.runs) == (3.0, 1.0, 5.0, 3)
    assert found.text() == "3 (1 – 5)"
    assert spread([4.0]).text() == "4"
    with pytest.raises(ValueError, match="no spread"):
        spread([])


def test_a_ratio_is_of_the_rounds_that_both_have() -> None:
    found = ratio({1: 10.0, 2: 30.0, 3: 5.0}, {1: 5.0, 2: 10.0})
    assert found is not None
    assert (found.median, found.low, found.high, found.runs) == (2.5, 2.0, 3.0, 2)
    assert ratio({1: 10.0}, {2: 5.0}) is None
    assert ratio({1: 10.0}, {1: 0.0}) is None


@pytest.mark.parametrize(
    ("count", "share", "expected"),
    [(1, 0.99, 1), (100, 0.99, 99), (101, 0.99, 100), (100, 0.5, 50), (100, 0.07, 7), (100, 0.0, 1), (100, 1.0, 100)],
)
def test_a_percentile_is_the_least_value_that_the_share_does_not_exceed(
    count: int, share: float, expected: float
) -> None:
    assert percentile([float(number) for number in range(1, count + 1)], share) == expected


def test_a_payload_tells_when_it_was_made_and_whether_it_is_whole() -> None:
    payload, same = payloads.stamped(2, at_ns=1_234_567_890)
    assert payload == same
    assert len(payload) == payloads.BYTES
    assert payload.isascii()
    assert payloads.stamp_ns(payload) == 1_234_567_890
    assert payloads.intact(payload)
    assert not payloads.intact(payload[:-1] + b"?")


def test_recorded_pickups_are_read_by_when_they_were_due(tmp_path: Path) -> None:
    file = tmp_path / "pickups"
    file.write_bytes(array("q", [3_000_000_000, 1_000_000_000, 3_500_000_000, 2_000_000]).tobytes())
    first, second = pickups.read(file)
    assert (first.due_s, first.waited_ms) == (2.0, 1000.0)
    assert (second.due_s, second.waited_ms) == (3.498, 2.0)
    assert pickups.due_between([first, second], 2.0, 3.0) == [first]
    assert pickups.by_time([first, second], start_s=1.0, step_s=1.0, share=0.99) == [(1.0, 1000.0), (2.0, 2.0)]


def test_jobs_that_were_never_taken_have_waited_for_ever() -> None:
    taken = [Pickup(due_s=0.0, waited_ms=float(ms)) for ms in range(1, 98)]
    whole = pickups.waits(taken)
    assert whole is not None
    assert whole.worst == 97.0
    lossy = pickups.waits(taken, never=3)
    assert lossy is not None
    assert (lossy.jobs, lossy.p50, lossy.p99) == (100, 50.0, math.inf)
    assert lossy.told() == {"jobs": 100, "p50_ms": 50.0, "p99_ms": None, "worst_ms": None}
    assert pickups.ms_text(lossy.p99) == "never"
    assert pickups.waits([]) is None


def test_what_was_written_is_the_difference_of_two_looks() -> None:
    before, after = Written(wal_bytes=10, commits=1), Written(wal_bytes=25, commits=3, dead_rows=4)
    assert after - before == Written(wal_bytes=15, commits=2, dead_rows=4)


def test_a_throughput_table_compares_windrow_with_each_other_round_by_round() -> None:
    samples = [
        *(_sample("windrow", run, rate) for run, rate in ((1, 200.0), (2, 400.0))),
        *(_sample("limit", run, rate) for run, rate in ((1, 400.0), (2, 500.0))),
    ]
    made = table(samples, over="windrow", title="Jobs a second")
    ours, theirs = ([dict(zip(made.head, row, strict=True)) for row in made.rows])[:2]
    assert ours["jobs/s (min – max)"] == "300 (200 – 400)"
    assert ours["Windrow ÷ it"] == ""
    # This is the median of the ratios 0.5 and 0.8, and not the ratio of the medians.
    assert theirs["Windrow ÷ it"] == "0.65"
    assert (theirs["producer µs"], theirs["worker µs"]) == ("10.0", "15.0")
    assert theirs["Postgres µs"] == "30.0"


def test_pieces_are_jobs_a_statement_and_a_message_and_empty_where_nothing_was_counted() -> None:
    acts = {
        "enqueue": Runs(calls=4, rows=4),
        "enqueue_plain": Runs(calls=6, rows=6),
        "claim": Runs(calls=5, rows=250),
        "ack": Runs(calls=4, rows=4),
    }
    messages = Messages(received=9, with_jobs=8, jobs=1000, sent=3, with_acks=2, acks=1000)
    whole = _sample("windrow", 1, 100.0, counts=Counts(seconds=2.0, acts=acts, messages=messages, waits={"worker": 30}))
    (row,) = counts_table([whole]).rows
    assert dict(zip(counts_table([whole]).head, row, strict=True)) == {
        "shards": "1",
        "routers": "2",
        "batch": "100",
        "callers": "8",
        "figure": "whole life",
        "system": "Windrow",
        "jobs an enqueue act": "100",
        "handed over, %": "75",
        "jobs a claim act": "50",
        "jobs a message": "125",
        "acks a message": "500",
        "jobs an ack act": "250",
        "messages/s": "6",
        "doorbells/s": "0",
        "probes/s": "0",
        "producer wake-ups/s": "",
        "worker wake-ups/s": "15",
        "router wake-ups/s": "",
        "Postgres wake-ups/s": "",
    }
    (row,) = counts_table([_sample("limit", 1, 100.0)]).rows
    assert set(row[6:]) == {""}


def test_a_statement_is_recognised_by_its_text_without_constants() -> None:
    assert shape("SELECT x FROM t\n WHERE a = %(a)s AND b = 'it''s' AND c IN (1, 2.5) AND d IS NULL") == shape(
        "SELECT x FROM t WHERE a = $1 AND b = $2 AND c IN ($3, $4) AND d IS NULL"
    )
    assert shape("SELECT a FROM t1") != shape("SELECT a FROM t2")


def test_a_thread_that_waits_is_counted() -> None:
    mine = threading.get_native_id()
    (before,) = waits_of_trees([os.getpid()])
    time.sleep(0.001)
    none, after = waits_of_trees((), [os.getpid()])
    assert not none
    assert after[mine] > before[mine]


def test_a_table_of_a_page_is_written_from_results_and_the_rest_of_the_page_stays() -> None:
    samples = [
        _sample("windrow", run, rate, figure=figure)
        for figure in Figure
        for run, rate in ((1, 200.0), (2, 400.0), (3, 300.0))
    ]
    told = {
        "environment": _SURROUNDINGS,
        "scenarios": {"throughput": {"samples": [sample.told() for sample in samples]}},
    }
    page = "A\n<!-- table users -->\nold\n<!-- end -->\nB\n<!-- table cpu -->\nkept\n<!-- end -->\n"
    made = pages.written(page, pages.Results(told), ["users"])
    head = "| jobs/s | enqueue | drain | whole life | CPU µs for each job (whole life, all processes) |"
    assert made.startswith(f"A\n<!-- table users -->\n{head}\n")
    assert "| Windrow | 300 | 300 | 300 | 75 |" in made
    assert "Medians of 3 runs" in made
    assert "old" not in made
    assert made.endswith("<!-- end -->\nB\n<!-- table cpu -->\nkept\n<!-- end -->\n")
    assert pages.written(made, pages.Results(told), ["users"]) == made


def test_every_table_has_its_place_in_a_page() -> None:
    places = [mark["name"] for page in pages.PAGES for mark in pages.MARK.finditer(page.read_text())]
    assert sorted(places) == sorted(pages.TABLES)


def test_a_plot_is_made_where_several_batches_were_measured() -> None:
    several = [_sample("windrow", 1, 100.0, batch=10), _sample("windrow", 1, 900.0, batch=100)]
    (plot,) = plots(several)
    assert list(plot.lines.values()) == [[(10, 100.0), (100, 900.0)]]
    assert plots(several[:1]) == []


def test_a_report_holds_every_table_and_says_what_is_missing() -> None:
    found = Found(
        scenario="throughput",
        plan={"runs": 1},
        samples=[{"rate": 1.5}],
        tables=[Table(title="Rates", head=("a", "b"), rows=[("1", "2")], note="A note.")],
    )
    text = markdown([found], environment=_SURROUNDINGS, failed={"pgmq": "no network"})
    assert "| a | b |\n| --- | --- |\n| 1 | 2 |" in text
    assert "A note." in text
    assert "- pgmq: no network" in text
    told = json.loads(to_json([found], environment=_SURROUNDINGS, failed={}))
    assert told["scenarios"]["throughput"]["tables"] == [{"title": "Rates", "rows": [{"a": "1", "b": "2"}]}]
    assert told["scenarios"]["throughput"]["samples"] == [{"rate": 1.5}]


def _sample(
    system: str,
    run: int,
    rate: float,
    *,
    batch: int = 100,
    figure: Figure = Figure.LIFE,
    counts: Counts | None = None,
) -> Sample:
    spent = Spent(producer_s=0.01, worker_s=0.015, router_s=0.02, postgres_s=0.03, own_s=0.0, machine_s=0.1)
    seconds = 1000 / rate
    timed = Timed(
        figure=figure,
        jobs=1000,
        seconds=seconds,
        spent=spent,
        counts=counts or Counts(seconds=seconds),
        wall_s=seconds,
        load_average=0.0,
    )
    case = Case(shards=1, load=Load(batch=batch, callers=8, consumers=8))
    return Sample(system=system, case=case, run=run, timed=timed)
