"""Tests the doctor's findings and their severities. The tests invent the facts, because real problems would take too
long to produce."""

from __future__ import annotations

from typing import Any

import pytest

from shard.formatting import size_text, span_text
from shard.health.checks import (
    judge,
    judge_clock,
    judge_holders,
    judge_partitions,
    judge_room,
    judge_server,
    judge_tables,
)
from shard.health.facts import Checkpoints, Clock, Facts, Holder, Index, MissingPartition, Server, Setting, Table
from shard.health.finding import Finding, Severity, worst
from shard.health.setting_checks import judge_checkpoints, judge_settings

MB, GB = 1024**2, 1024**3
OK, NOTICE, WARNING, CRITICAL = Severity

SERVER = Server(
    version="18.6",
    version_num=180_006,
    database="windrow",
    role="windrow",
    bytes=10 * MB,
    up_s=60.0,
    is_standby=False,
    sees_others=True,
    connections=10,
    connections_max=97,
    age=1000,
    oldest="windrow",
    multixact_age=1,
    multixact_oldest="windrow",
)
HOT = Table(
    name="job",
    family="job",
    partitioned=False,
    rows=1000,
    dead_rows=10,
    bytes=MB,
    heap_bytes=MB,
    index_bytes=MB,
    row_bytes=300.0,
    vacuumed_s=5.0,
    analyzed_s=5.0,
    options=[
        "autovacuum_vacuum_scale_factor=0",
        "autovacuum_vacuum_threshold=20000",
        "autovacuum_vacuum_insert_scale_factor=0",
        "autovacuum_vacuum_insert_threshold=200000",
        "autovacuum_analyze_scale_factor=0",
        "autovacuum_analyze_threshold=50000",
        "autovacuum_vacuum_cost_delay=0",
    ],
)
FINISHED = HOT._replace(name="finished_20261120", family="finished", row_bytes=None, options=[])
READY = Index(name="job_ready", table="job", bytes=MB, valid=True, entry_bytes=36)
SESSION = Holder(
    kind="process",
    name="4711",
    pid=4711,
    role="ada",
    application="psql",
    client="10.0.0.7",
    state="idle in transaction",
    waits_for="Client ClientRead",
    held_s=120.0,
    query_s=119.0,
    transactions=4200,
    wal_bytes=None,
    query="SELECT 1",
    may_end=True,
)
SLOT = SESSION._replace(
    kind="physical slot",
    name="db1b",
    pid=None,
    role=None,
    application=None,
    client=None,
    state="in use",
    held_s=None,
    transactions=None,
    wal_bytes=GB,
)
STANDBY = SESSION._replace(kind="standby", name="db1b", held_s=None, state="streaming", may_end=False)


def setting(name: str, value: str, unit: str | None = None, **more: Any) -> Setting:
    given: dict[str, Any] = {"shown": f"{value}{unit or ''}", "context": "sighup", "source": "default", **more}
    return Setting(name=name, value=value, unit=unit, **given)


SETTINGS = {
    one.name: one
    for one in (
        setting("fsync", "on"),
        setting("full_page_writes", "on"),
        setting("autovacuum", "on"),
        setting("track_counts", "on", context="superuser"),
        setting("autovacuum_max_workers", "3", context="postmaster"),
        setting("autovacuum_naptime", "5", "s"),
        setting("autovacuum_vacuum_cost_delay", "2", "ms"),
        setting("autovacuum_vacuum_cost_limit", "-1"),
        setting("vacuum_cost_delay", "0", "ms"),
        setting("vacuum_cost_limit", "200"),
        setting("max_wal_size", "2048", "MB"),
        setting("checkpoint_timeout", "900", "s"),
        setting("shared_buffers", "32768", "8kB", context="postmaster"),
        setting("synchronous_commit", "on", context="user"),
        setting("default_transaction_isolation", "read committed", context="user"),
        setting("idle_in_transaction_session_timeout", "300000", "ms", context="user"),
        setting("jit", "off", context="user"),
    )
}
FACTS = Facts(
    server=SERVER,
    settings=SETTINGS,
    tables=[HOT, FINISHED],
    indexes=[READY],
    holders=[SESSION._replace(held_s=0.5), SLOT],
    checkpoints=Checkpoints(timed=100, requested=3, wal_bytes=100 * GB),
    clock=Clock(0.0, 0.0),
    missing=[],
)


def only(findings: Any) -> Finding:
    (finding,) = findings
    assert isinstance(finding, Finding)
    return finding


def test_a_healthy_shard_is_found_healthy() -> None:
    assert judge(FACTS) == []
    assert worst([]) is OK


def test_the_worst_comes_first() -> None:
    facts = Facts(
        server=SERVER._replace(sees_others=False),
        settings={**SETTINGS, "fsync": setting("fsync", "off")},
        tables=[HOT],
        indexes=[],
        holders=[SESSION],
        checkpoints=FACTS.checkpoints,
        clock=Clock(30.0, 0.0),
        missing=[],
    )
    assert [one.severity for one in judge(facts)] == [CRITICAL, WARNING, NOTICE]
    assert worst(judge(facts)) is CRITICAL


def test_a_clock_that_was_set_back_by_more_than_a_minute_is_critical() -> None:
    assert not list(judge_clock(Clock(60.0, 0.0)))
    finding = only(judge_clock(Clock(7325.0, 0.0)))
    assert finding.severity is CRITICAL
    assert "is 2h2m behind the latest time" in finding.what


def test_a_clock_that_differs_from_that_of_this_machine_by_more_than_an_hour_is_critical() -> None:
    assert not list(judge_clock(Clock(0.0, 3600.0)))
    assert not list(judge_clock(Clock(0.0, -3600.0)))
    for ahead_s, where in ((7325.0, "ahead of"), (-7325.0, "behind")):
        finding = only(judge_clock(Clock(0.0, ahead_s)))
        assert finding.severity is CRITICAL
        assert f"is 2h2m {where} the clock of this machine" in finding.what


# ── What is held ─────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("held_s", "severity"), [(59.0, OK), (60.0, WARNING), (3599.0, WARNING), (3600.0, CRITICAL), (90_000.0, CRITICAL)]
)
def test_a_snapshot_is_the_worse_the_longer_it_is_held(held_s: float, severity: Severity) -> None:
    assert worst(list(judge_holders([SESSION._replace(held_s=held_s)], held_s=60.0))) is severity


def test_who_holds_it_is_named() -> None:
    finding = only(judge_holders([SESSION], held_s=60.0))
    assert finding.what == (
        "process 4711 (psql, role ada, from 10.0.0.7) holds a snapshot for 2m, 4,200 transactions back, "
        "idle in transaction"
    )
    assert ": windrow.job and its indexes grow" in finding.why
    assert finding.fix == "SELECT pg_terminate_backend(4711);"


@pytest.mark.parametrize(
    ("transactions", "severity"), [(999, OK), (1000, NOTICE), (99_999, NOTICE), (100_000, WARNING)]
)
def test_where_the_time_cannot_be_seen_transactions_tell(transactions: int, severity: Severity) -> None:
    hidden = SESSION._replace(held_s=None, state=None, client=None, transactions=transactions)
    assert worst(list(judge_holders([hidden], held_s=60.0))) is severity


def test_a_prepared_transaction_is_as_bad_as_a_session_and_its_name_is_quoted() -> None:
    prepared = SESSION._replace(kind="prepared transaction", name="it's", pid=None, held_s=7200.0, may_end=False)
    finding = only(judge_holders([prepared], held_s=60.0))
    assert finding.severity is CRITICAL
    assert finding.fix.splitlines() == [
        "-- as role ada, or a superuser",
        "-- this undoes its changes; to keep them: COMMIT PREPARED 'it''s';",
        "ROLLBACK PREPARED 'it''s';",
    ]


@pytest.mark.parametrize(
    ("state", "wal_bytes", "transactions", "severity"),
    [
        ("in use", GB, 500, OK),
        ("in use", 10 * GB, None, WARNING),
        ("in use", GB, 100_000, WARNING),
        ("unused", 0, None, WARNING),
        ("unused", None, None, WARNING),
        ("unused", 10 * GB, None, CRITICAL),
        ("unused", GB, 100_000, CRITICAL),
    ],
)
def test_a_replication_slot_is_bad_if_it_is_unused_or_far_behind(
    state: str, wal_bytes: int | None, transactions: int | None, severity: Severity
) -> None:
    slot = SLOT._replace(state=state, wal_bytes=wal_bytes, transactions=transactions)
    assert worst(list(judge_holders([slot], held_s=60.0))) is severity


def test_the_process_that_uses_a_replication_slot_is_ended_before_the_slot_is_dropped() -> None:
    slot = SLOT._replace(kind="logical slot", pid=99, wal_bytes=12 * GB)
    assert only(judge_holders([slot], held_s=60.0)).fix.splitlines() == [
        "-- its reader needs a new copy of all it reads afterwards",
        "SELECT pg_terminate_backend(99, 5000);",
        "SELECT pg_drop_replication_slot('db1b');",
    ]


def test_a_standby_that_holds_a_snapshot_is_mended_where_it_is() -> None:
    assert not list(judge_holders([STANDBY._replace(transactions=99_999)], held_s=0.0))
    finding = only(judge_holders([STANDBY._replace(transactions=100_000)], held_s=0.0))
    assert "standby db1b (at 10.0.0.7) holds a snapshot, 100,000 transactions back" in finding.what
    assert finding.fix.startswith("-- on the standby, as a superuser; ")


# ── The server, and its settings ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("change", "about", "severity"),
    [
        ({"is_standby": True}, "standby", CRITICAL),
        ({"sees_others": False}, "privilege", NOTICE),
        ({"connections": 68}, "connections", NOTICE),
        ({"connections": 78}, "connections", WARNING),
        ({"connections": 97}, "connections", CRITICAL),
        ({"age": 1_000_000_000}, "wraparound", WARNING),
        ({"multixact_age": 1_600_000_000}, "wraparound", CRITICAL),
    ],
)
def test_a_server_that_is_near_its_limits_is_reported(change: dict[str, Any], about: str, severity: Severity) -> None:
    finding = only(judge_server(SERVER._replace(**change)))
    assert (finding.about, finding.severity) == (about, severity)


@pytest.mark.parametrize(
    ("bad", "severity"),
    [
        (setting("fsync", "off"), CRITICAL),
        (setting("full_page_writes", "off"), CRITICAL),
        (setting("autovacuum", "off"), CRITICAL),
        (setting("track_counts", "off", context="superuser"), CRITICAL),
        (setting("autovacuum_max_workers", "1", context="postmaster"), WARNING),
        (setting("autovacuum_naptime", "60", "s"), NOTICE),
        (setting("autovacuum_naptime", "61", "s"), WARNING),
        (setting("autovacuum_vacuum_cost_delay", "20", "ms"), NOTICE),
        (setting("vacuum_cost_limit", "100"), NOTICE),
        (setting("max_wal_size", "1023", "MB"), WARNING),
        (setting("checkpoint_timeout", "60", "s"), NOTICE),
        (setting("shared_buffers", "16384", "8kB", context="postmaster"), NOTICE),
        (setting("old_snapshot_threshold", "60", "min", context="postmaster"), WARNING),
        (setting("synchronous_commit", "local", context="user"), NOTICE),
        (setting("default_transaction_isolation", "serializable", context="user"), NOTICE),
        (setting("idle_in_transaction_session_timeout", "0", "ms", context="user"), NOTICE),
        (setting("jit", "on", context="user"), NOTICE),
    ],
    ids=lambda value: value.name if isinstance(value, Setting) else "",
)
def test_a_setting_that_hurts_is_named_with_its_value(bad: Setting, severity: Severity) -> None:
    finding = only(judge_settings({**SETTINGS, bad.name: bad}, SERVER))
    assert finding.severity is severity
    assert bad.shown in finding.what
    # The text names the table, because operators do not know the term "hot table".
    assert "hot table" not in finding.why


@pytest.mark.parametrize(
    "good",
    [
        setting("old_snapshot_threshold", "-1", "min"),
        setting("synchronous_commit", "remote_apply", context="user"),
        setting("synchronous_commit", "remote_write", context="user"),
        setting("autovacuum_vacuum_cost_delay", "0", "ms"),
        setting("max_wal_size", "1024", "MB"),
        setting("checkpoint_timeout", "300", "s"),
    ],
    ids=lambda value: f"{value.name} {value.value}",
)
def test_what_others_may_well_choose_is_left_to_them(good: Setting) -> None:
    assert not list(judge_settings({**SETTINGS, good.name: good}, SERVER))


@pytest.mark.parametrize(
    ("context", "source", "fix"),
    [
        ("user", "default", "ALTER DATABASE windrow SET jit = 'off';"),
        ("user", "configuration file", "ALTER DATABASE windrow SET jit = 'off';"),
        ("user", "user", "ALTER ROLE windrow SET jit = 'off';"),
        ("user", "database user", "ALTER ROLE windrow IN DATABASE windrow SET jit = 'off';"),
        ("sighup", "default", "ALTER SYSTEM SET jit = 'off';\nSELECT pg_reload_conf();"),
        ("postmaster", "default", "ALTER SYSTEM SET jit = 'off';"),
    ],
)
def test_a_setting_is_put_right_where_that_counts(context: str, source: str, fix: str) -> None:
    bad = setting("jit", "on", context=context, source=source)
    finding = only(judge_settings({**SETTINGS, "jit": bad}, SERVER))
    comment, _, statements = finding.fix.partition("\n")
    assert statements == fix
    assert ("restart" in comment) == (context == "postmaster")


@pytest.mark.parametrize(
    ("checkpoints", "hurts"),
    [
        (Checkpoints(timed=3, requested=20, wal_bytes=20 * GB), True),
        # Four checkpoints are too few to prove anything.
        (Checkpoints(timed=0, requested=4, wal_bytes=4 * GB), False),
        (Checkpoints(timed=20, requested=20, wal_bytes=20 * GB), False),
        # There is so little WAL that somebody must have requested these checkpoints by a command.
        (Checkpoints(timed=3, requested=20, wal_bytes=GB), False),
    ],
)
def test_checkpoints_that_come_before_their_time_are_told_from_those_asked_for(
    checkpoints: Checkpoints, hurts: bool
) -> None:
    found = list(judge_checkpoints(checkpoints, SETTINGS["max_wal_size"], SERVER))
    assert len(found) == hurts
    for finding in found:
        assert "20 of 23 checkpoints came before their time, each after about 1.0 GB" in finding.what
        assert "ALTER SYSTEM SET max_wal_size = '8192MB';" in finding.fix


# ── Tables ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("table", "about"),
    [
        (HOT._replace(dead_rows=200_000), "dead_rows"),
        (FINISHED._replace(rows=100_000, analyzed_s=None), "never_analyzed"),
        (HOT._replace(options=[*HOT.options, "autovacuum_enabled=OFF"]), "table_option"),
        (HOT._replace(options=HOT.options[1:]), "table_option"),
    ],
)
def test_a_table_without_maintenance_is_reported(table: Table, about: str) -> None:
    assert only(judge_tables([table])).about == about


@pytest.mark.parametrize(
    "table",
    [
        HOT._replace(dead_rows=199_999),
        HOT._replace(dead_rows=200_000, rows=1_000_000),
        FINISHED._replace(rows=99_999, analyzed_s=None),
        HOT._replace(options=[*HOT.options, "autovacuum_enabled=on", "fillfactor=90"]),
        FINISHED._replace(options=["autovacuum_vacuum_scale_factor=0.5"]),
    ],
)
def test_a_normal_table_is_not_reported(table: Table) -> None:
    assert not list(judge_tables([table]))


@pytest.mark.parametrize(
    ("heap_bytes", "rows", "severity"),
    [
        (100 * MB, 300_000, OK),
        (100 * MB, 0, NOTICE),
        (63 * MB, 0, OK),
        (GB, 1_500_000, NOTICE),
        (100 * GB, 0, NOTICE),
        (10 * GB, 30_000_000, OK),
    ],
)
def test_room_that_is_not_used_is_estimated(heap_bytes: int, rows: int, severity: Severity) -> None:
    assert worst(list(judge_room([HOT._replace(heap_bytes=heap_bytes, rows=rows)], []))) is severity


def test_an_index_is_measured_by_the_rows_of_its_table() -> None:
    full = READY._replace(bytes=100 * MB)
    assert not list(judge_room([HOT._replace(rows=2_000_000)], [full]))
    finding = only(judge_room([HOT], [full]))
    assert (finding.severity, finding.about) == (NOTICE, "bloat")
    assert finding.fix.splitlines()[-1] == "REINDEX INDEX CONCURRENTLY windrow.job_ready;"
    assert only(judge_room([HOT], [READY._replace(bytes=2 * GB)])).severity is WARNING
    # Dead rows have a finding of their own.
    assert not list(judge_room([HOT._replace(dead_rows=2_000_000)], [full]))


def test_without_statistics_nothing_is_estimated() -> None:
    assert HOT._replace(row_bytes=None).unused_bytes is None
    assert not list(judge_room([HOT._replace(row_bytes=None, heap_bytes=GB)], []))


def test_the_last_day_may_be_missing_until_a_router_looks_again() -> None:
    days = [MissingPartition(f"finished_30_2026112{at}", 30, f"2026-11-2{at}", f"2026-11-2{at + 1}") for at in range(3)]
    assert only(judge_partitions(days[:1])).severity is NOTICE
    assert only(judge_partitions(days)).severity is WARNING
    assert not list(judge_partitions([]))


def test_the_partitions_of_a_retention_that_was_just_set_are_no_warning() -> None:
    new = [
        MissingPartition("finished_90", 90, None, None),
        MissingPartition("finished_90_20261121", 90, "2026-11-21", "2026-11-22"),
    ]
    found = only(judge_partitions(new))
    assert (found.severity, "routers create them within an hour" in found.why) == (NOTICE, True)
    both = [MissingPartition("finished_30_20261121", 30, "2026-11-21", "2026-11-22"), *new]
    assert only(judge_partitions(both)).severity is WARNING


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 bytes"), (999, "999 bytes"), (1000, "1.0 kB"), (8192, "8.0 kB"), (5 * 1024**4, "5,120.0 GB")],
)
def test_sizes_are_said_for_the_eye(size: int, text: str) -> None:
    assert size_text(size) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.2, "0s"), (-1, "0s"), (41, "41s"), (60, "1m"), (3620, "1h"), (200, "3m20s"), (187_000, "2d3h")],
)
def test_spans_are_said_by_their_two_largest_units(seconds: float, text: str) -> None:
    assert span_text(seconds) == text
