"""What the scale scenario calculates from its measurements."""

from __future__ import annotations

import math

from bench.scenarios.scale.crew import Backends, Spent
from bench.scenarios.scale.tables import Bell, Catalog, Change, Enqueued, Figures, Member, Read, Router


def spent(*, seconds: float = 10.0, postgres_s: float = 0.0, parts_s: float = 0.0, statements: float = 0.0) -> Spent:
    return Spent(seconds=seconds, postgres_s=postgres_s, parts_s=parts_s, statements=statements)


def router(shards: int) -> Router:
    """Returns a router that uses 0.001 s of CPU per second and 6 files for each shard, and 14 files for itself."""
    made = spent(parts_s=0.02 * shards)
    idle = spent(parts_s=0.01 * shards, statements=10.0)
    return Router(shards=shards, made=made, idle=idle, files=14 + 6 * shards, resident_mib=70.0 + shards)


CATALOG = Catalog(
    copies=10,
    reads=[Read(what="all of it", bytes=1000, took_ms=2, router_ms=1, postgres_ms=1)],
    made=spent(),
    # An idle Postgres uses a tenth of a core.
    idle=spent(postgres_s=1.0, parts_s=2.0),
    changes=[Change(seen=9, late_ms=[1.0] * 8 + [7.0], spent=spent(seconds=2.0, postgres_s=0.5, parts_s=1.4))],
)
MEMBER = Member(
    count=10,
    connections=1,
    made=spent(),
    backends=[
        Backends(application="windrow", count=20, private_mib=2.0, pss_mib=2.5),
        Backends(application="windrow doorbell", count=10, private_mib=1.0, pss_mib=1.2),
        Backends(application="", count=1, private_mib=9.0, pss_mib=9.0),
    ],
    idle=spent(statements=30.0),
    waiting=spent(statements=60.0),
)
FIGURES = Figures(
    shards=1000,
    processes=200,
    catalog=CATALOG,
    bells=[Bell(listeners=20, rings=100, late_us=[1000, 2000], spent=spent(postgres_s=0.5))],
    member=MEMBER,
    enqueued=[Enqueued(jobs=10, late_us=[5000], spent=spent(statements=160.0))],
    routers=[router(10), router(30)],
)


def test_a_change_is_told_without_what_idle_copies_read() -> None:
    postgres_ms, copy_ms = CATALOG.change_ms()
    assert math.isclose(postgres_ms, 300.0)
    assert math.isclose(copy_ms, 100.0)
    assert "1 did not see it" in FIGURES.tables()[1].markdown()


def test_a_job_is_told_without_what_waiting_consumers_ask() -> None:
    assert FIGURES.tables()[4].rows[0][1] == "10"


def test_the_whole_cluster_follows_from_the_slope_for_a_shard_and_the_share_of_a_process() -> None:
    whole = {row[0]: row[1] for row in FIGURES.tables()[-1].rows}
    # Each process was measured with three connections to a shard, one of them for the queue. The default for the queue
    # is four.
    assert whole["connections to one shard"] == "1,200"
    assert whole["connections of one router process"] == "6,014 files"
    assert whole["one idle router process, % of a core"] == "100"
    assert whole["one idle router process, statements/s"] == "1,000"
    assert whole["one router process starts, CPU seconds of its own"] == "20"
    assert whole["statements/s on an idle shard"] == "60"
    # A ring takes 5 ms of CPU in Postgres.
    assert whole["rings/s of one shard that keep one core of Postgres busy"] == "200"


def test_all_rows_fit_their_tables_and_all_measurements_are_told() -> None:
    assert all(len(row) == len(table.head) for table in FIGURES.tables() for row in table.rows)
    told = [sample["sample"] for sample in FIGURES.told()]
    assert told == ["catalog", "doorbells", "one shard", "jobs", *["one router process"] * 2]
