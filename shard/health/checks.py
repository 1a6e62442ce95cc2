"""Finds what harms a shard's Postgres as a queue: what holds back vacuum, what grows, and which settings are bad. Each
finding comes with a fix. Pure: judges the facts that shard/health/facts.py has read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from shard.formatting import size_text, span_text
from shard.health.facts import Clock, Facts, Holder, Index, MissingPartition, Server, Table
from shard.health.finding import Finding, Severity, comment, literal, system
from shard.health.setting_checks import judge_checkpoints, judge_settings
from shard.postgres import partitions
from shard.postgres.clock import BEHIND_S_MAX, DIFFERENCE_S_MAX
from shard.vocabulary import RETENTION_DEFAULT

_MB = 1024**2
_GB = 1024**3
_MINUTE_S = 60.0
_HOUR_S = 3600.0

# A snapshot of this age is critical, whatever the caller's threshold is.
_HELD_S_MAX = _HOUR_S
# For a snapshot that has been held for an unknown time, the age in transactions is compared with these numbers.
TRANSACTIONS_NOTICED = 1_000
_TRANSACTIONS_MAX = 100_000
_WAL_KEPT_MAX = 10 * _GB
# Autovacuum vacuums windrow.job, the table of live jobs, at 20,000 dead rows. The limit is ten times that number.
_DEAD_ROWS_MAX = 200_000
_ROWS_NEVER_ANALYZED_MAX = 100_000
# Limits for the unused bytes of windrow.job or of one of its indexes: a number of bytes, and a share of all bytes. A
# finding is made only if both limits are reached.
_UNUSED_NOTICED = 64 * _MB, 0.5
_UNUSED_WARNED = 1 * _GB, 0.75
# Postgres refuses writes about three million transactions before 2^31.
_AGE_WARNED = 1_000_000_000
_AGE_CRITICAL = 1_600_000_000

# The table options that the migrations set. Greater values make autovacuum lazier.
_OPTIONS: Mapping[str, Mapping[str, int]] = {
    "job": {
        "autovacuum_vacuum_scale_factor": 0,
        "autovacuum_vacuum_threshold": 20_000,
        "autovacuum_vacuum_insert_scale_factor": 0,
        "autovacuum_vacuum_insert_threshold": 200_000,
        "autovacuum_analyze_scale_factor": 0,
        "autovacuum_analyze_threshold": 50_000,
        "autovacuum_vacuum_cost_delay": 0,
    },
    "departing": {
        "autovacuum_vacuum_scale_factor": 0,
        "autovacuum_vacuum_threshold": 20_000,
        "autovacuum_vacuum_cost_delay": 0,
    },
}


def judge(facts: Facts, *, held_s: float = _MINUTE_S) -> list[Finding]:
    """Returns the problems that should be fixed, the worst first. Snapshots younger than `held_s` are not reported."""
    server, settings = facts.server, facts.settings
    found = [
        *judge_disk(facts.disk_full),
        *judge_server(server),
        *judge_clock(facts.clock),
        *judge_holders(facts.holders, held_s=held_s),
        *judge_settings(settings, server),
        *judge_checkpoints(facts.checkpoints, settings["max_wal_size"], server),
        *judge_tables(facts.tables),
        *judge_room(facts.tables, facts.indexes),
        # If there are no tables, report this fact instead of missing partitions.
        *(judge_partitions(facts.missing) if facts.tables else [_NO_SHARD]),
    ]
    return sorted(found, key=lambda finding: -finding.severity)


_NO_SHARD = Finding(
    severity=Severity.CRITICAL,
    about="schema",
    what="there is no schema windrow in this database",
    why="no router has used this database yet, or the DSN in the cluster file is wrong (windrow shards plan)",
    fix="-- windrow migrate --config FILE",
)


def judge_disk(full: str | None) -> Iterator[Finding]:
    if full is not None:
        yield Finding(
            severity=Severity.CRITICAL,
            about="disk",
            what=f"the disk is full: {full}",
            why="nothing can be enqueued, claimed or acked here; a server that restarts now may not come up",
            fix="-- on the server: enlarge the disk, or remove files of other programs; never remove any in pg_wal",
        )


def judge_server(server: Server) -> Iterator[Finding]:
    if server.is_standby:
        yield Finding(
            severity=Severity.CRITICAL,
            about="standby",
            what="the server is a standby",
            why="nothing can be enqueued or claimed here; target_session_attrs=read-write in the DSN finds the primary",
            fix="",
        )
    share = server.connections / max(server.connections_max, 1)
    if share >= 0.7:
        severity = Severity.WARNING if share >= 0.8 else Severity.NOTICE
        yield Finding(
            severity=Severity.CRITICAL if share >= 0.95 else severity,
            about="connections",
            what=f"{server.connections:,} of {server.connections_max:,} connections are used",
            why="without a free connection, routers cannot reconnect and operators cannot connect",
            fix=system("max_connections", str(2 * (server.connections_max + 3)), restart=True),
        )
    ages = (("transaction", server.age, server.oldest), ("multixact", server.multixact_age, server.multixact_oldest))
    for what, age, database in ages:
        if age >= _AGE_WARNED:
            yield Finding(
                severity=Severity.CRITICAL if age >= _AGE_CRITICAL else Severity.WARNING,
                about="wraparound",
                what=f"the oldest {what} ids, of database {database}, are {age:,} old",
                why="Postgres refuses writes in all databases of the server before they are 2,147,483,648 old; vacuum "
                "does not freeze them",
                # Without TRUNCATE false, VACUUM may need a transaction id to truncate a table, and Postgres gives no
                # transaction ids while it refuses writes.
                fix=comment(f"after what holds a snapshot has ended; as a superuser, in database {database}")
                + "VACUUM (FREEZE, TRUNCATE false);",
            )
    if server.other_owner is not None:
        yield Finding(
            severity=Severity.CRITICAL,
            about="privilege",
            what=f"role {server.role} lacks the rights of {server.other_owner}, which owns what is in schema windrow",
            why="routers and the archiver cannot create the partitions of coming days or drop old ones, nor migrate",
            fix=f"{comment('as a superuser')}GRANT {server.other_owner} TO {server.role};",
        )
    if not server.sees_others:
        yield Finding(
            severity=Severity.NOTICE,
            about="privilege",
            what=f"role {server.role} cannot see what sessions of other roles do",
            why="how long they hold a snapshot, and what they run, is unknown",
            fix=f"{comment('as a superuser')}GRANT pg_read_all_stats TO {server.role};",
        )


def judge_clock(clock: Clock) -> Iterator[Finding]:
    if clock.behind_s > BEHIND_S_MAX:
        yield Finding(
            severity=Severity.CRITICAL,
            about="clock",
            what=f"its clock was set back: it is {span_text(clock.behind_s)} behind the latest time it has shown",
            why="jobs that finish now might not be found later, and run again: routers refuse calls for this shard "
            "until its clock has caught up",
            fix="-- set the server's clock right; or, if it is correct:\n"
            "-- windrow shards accept-clock SHARD --config FILE",
        )
    if abs(clock.ahead_s) > DIFFERENCE_S_MAX:
        where = "ahead of" if clock.ahead_s > 0 else "behind"
        yield Finding(
            severity=Severity.CRITICAL,
            about="clock",
            what=f"its clock is {span_text(abs(clock.ahead_s))} {where} the clock of this machine",
            why="by a clock that is ahead, all that is kept for a time seems old: an archiver whose own clock differs "
            "that much does nothing",
            fix="-- correct the clock that is wrong",
        )


# ── What is held ─────────────────────────────────────────────────────────────────────────────────────────────────────


def judge_holders(holders: Sequence[Holder], *, held_s: float) -> Iterator[Finding]:
    for holder in holders:
        match holder.kind:
            case "process":
                yield from _judge_process(holder, held_s)
            case "prepared transaction":
                yield from _judge_prepared(holder, held_s)
            case "standby":
                yield from _judge_standby(holder)
            case _:
                yield from _judge_slot(holder)


_KEEPS_ROWS = "no row that was claimed or finished since then can be removed: windrow.job and its indexes grow"


def _judge_process(holder: Holder, held_s: float) -> Iterator[Finding]:
    if holder.held_s is None:
        back = holder.transactions or 0
        if held_s and back < TRANSACTIONS_NOTICED:
            return
        severity = Severity.WARNING if back >= _TRANSACTIONS_MAX else Severity.NOTICE
    elif holder.held_s < held_s:
        return
    else:
        severity = Severity.CRITICAL if holder.held_s >= _HELD_S_MAX else Severity.WARNING
    who = [
        *([holder.application] if holder.application else []),
        *([f"role {holder.role}"] if holder.role else []),
        *([f"from {holder.client}"] if holder.client else []),
    ]
    since = "" if holder.held_s is None else f" for {span_text(holder.held_s)}"
    state = f", {holder.state}" if holder.state else ""
    right = "" if holder.may_end else comment(f"as role {holder.role}, or a superuser")
    yield Finding(
        severity=severity,
        about="snapshot",
        what=f"process {holder.name} ({', '.join(who)}) holds a snapshot{since}{_back(holder)}{state}",
        why=f"{_KEEPS_ROWS}; rows that it has locked stay locked, and calls that need them are refused",
        fix=f"{right}SELECT pg_terminate_backend({holder.pid});",
    )


def _judge_prepared(holder: Holder, held_s: float) -> Iterator[Finding]:
    open_s = holder.held_s or 0.0
    if open_s < held_s:
        return
    gid = literal(holder.name)
    right = "" if holder.may_end else comment(f"as role {holder.role}, or a superuser")
    keep = comment(f"this undoes its changes; to keep them: COMMIT PREPARED {gid};")
    yield Finding(
        severity=Severity.CRITICAL if open_s >= _HELD_S_MAX else Severity.WARNING,
        about="prepared_transaction",
        what=f"prepared transaction {gid} of role {holder.role} has been open for {span_text(open_s)}{_back(holder)}",
        why=f"{_KEEPS_ROWS}; it keeps its locks too, and outlives restarts",
        fix=f"{right}{keep}ROLLBACK PREPARED {gid};",
    )


def _judge_slot(holder: Holder) -> Iterator[Finding]:
    unused, wal_bytes = holder.state == "unused", holder.wal_bytes or 0
    long = wal_bytes >= _WAL_KEPT_MAX or (holder.transactions or 0) >= _TRANSACTIONS_MAX
    if not unused and not long:
        return
    parts = [f"keeps {size_text(wal_bytes)} of WAL"]
    if holder.transactions is not None:
        # A logical slot always holds a snapshot, but only of the system tables.
        of = " of the system's tables" if holder.kind == "logical slot" else ""
        parts.append(f"holds a snapshot{of}{_back(holder)}")
    used = f"is used by process {holder.pid}" if not unused else "is used by nobody"
    if unused and holder.held_s is not None:
        used += f" for {span_text(holder.held_s)}"
    base = "a new base backup" if holder.kind == "physical slot" else "a new copy of all it reads"
    right = "" if holder.may_end else "as a superuser, or a role with REPLICATION; "
    end = "" if unused else f"SELECT pg_terminate_backend({holder.pid}, 5000);\n"
    yield Finding(
        severity=Severity.CRITICAL if unused and long else Severity.WARNING,
        about="slot",
        what=f"{holder.kind.replace(' ', ' replication ')} {literal(holder.name)} {used}: it {' and '.join(parts)}",
        why="WAL fills the disk, and a full disk stops the shard; an old snapshot keeps dead rows",
        fix=f"{comment(f'{right}its reader needs {base} afterwards')}{end}"
        f"SELECT pg_drop_replication_slot({literal(holder.name)});",
    )


def _judge_standby(holder: Holder) -> Iterator[Finding]:
    if (holder.transactions or 0) < _TRANSACTIONS_MAX:
        return
    where = f"at {holder.client}" if holder.client else f"process {holder.pid}"
    yield Finding(
        severity=Severity.WARNING,
        about="standby_feedback",
        what=f"standby {holder.name} ({where}) holds a snapshot{_back(holder)}, by hot_standby_feedback",
        why=_KEEPS_ROWS,
        fix=f"{comment('on the standby, as a superuser; long queries there may be cancelled afterwards')}"
        "ALTER SYSTEM SET hot_standby_feedback = off;\nSELECT pg_reload_conf();",
    )


def _back(holder: Holder) -> str:
    return "" if holder.transactions is None else f", {holder.transactions:,} transactions back"


# ── Tables ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def judge_tables(tables: Sequence[Table]) -> Iterator[Finding]:
    for table in tables:
        options = dict(option.split("=", 1) for option in table.options)
        name = f"windrow.{table.name}"
        if options.get("autovacuum_enabled", "on").lower() in ("off", "false", "no", "0", "f", "n", "of"):
            yield Finding(
                severity=Severity.CRITICAL if table.name in _OPTIONS else Severity.WARNING,
                about="table_option",
                what=f"autovacuum is off for {name}",
                why="nothing removes its dead rows",
                fix=f"ALTER TABLE {name} RESET (autovacuum_enabled);",
            )
        # An option may make autovacuum more eager than `_OPTIONS` does.
        lazy = {
            option: (options.get(option, "not set"), value)
            for option, value in _OPTIONS.get(table.name, {}).items()
            if float(options.get(option, "inf")) > value
        }
        if lazy:
            right = ", ".join(f"{option} = {value}" for option, (_, value) in lazy.items())
            yield Finding(
                severity=Severity.WARNING,
                about="table_option",
                what=f"autovacuum of {name} is lazier than it should be: "
                + ", ".join(f"{option} is {found}" for option, (found, _) in lazy.items()),
                why="every claim and ack leaves a dead row there: it must be vacuumed after a fixed number of them",
                fix=f"ALTER TABLE {name} SET ({right});",
            )
        if table.dead_rows >= _DEAD_ROWS_MAX and table.dead_rows >= table.rows / 4:
            last = "never vacuumed" if table.vacuumed_s is None else f"vacuumed {span_text(table.vacuumed_s)} ago"
            yield Finding(
                severity=Severity.WARNING,
                about="dead_rows",
                what=f"{name} has {table.dead_rows:,} dead rows beside {table.rows:,} live ones; {last}",
                why="the table grows: autovacuum does not keep up, or a snapshot keeps it from removing them",
                fix=f"{comment('after what holds a snapshot has ended')}VACUUM {name};",
            )
        if table.analyzed_s is None and table.rows >= _ROWS_NEVER_ANALYZED_MAX and not table.partitioned:
            yield Finding(
                severity=Severity.WARNING,
                about="never_analyzed",
                what=f"{name} has {table.rows:,} rows, and was never analyzed",
                why="the planner knows nothing about its rows when it plans lists, counts and checks",
                fix=f"ANALYZE {name};",
            )


def judge_room(tables: Sequence[Table], indexes: Sequence[Index]) -> Iterator[Finding]:
    """Estimates how much unused room windrow.job and its indexes have. Also finds invalid indexes."""
    hot = next((table for table in tables if table.name == "job"), None)
    for index in indexes:
        name = f"windrow.{index.name}"
        if not index.valid:
            yield Finding(
                severity=Severity.WARNING,
                about="index",
                what=f"index {name} is invalid",
                why="a REINDEX or CREATE INDEX left it unfinished: it is useless, and every write still updates it",
                fix=f"{comment('unless it is being built right now')}DROP INDEX CONCURRENTLY {name};",
            )
        elif hot is not None:
            unused = index.unused_bytes(hot.versions)
            if severity := _unused(unused, index.bytes):
                cost = comment("the queue keeps working meanwhile; best done when it is quiet")
                yield Finding(
                    severity=severity,
                    about="bloat",
                    what=f"{size_text(unused)} of the {size_text(index.bytes)} of {name} are unused, by estimate",
                    why="claims and enqueues touch more pages than they need to",
                    fix=f"{cost}REINDEX INDEX CONCURRENTLY {name};",
                )
    free = None if hot is None else hot.unused_bytes
    if hot is not None and free is not None and _unused(free, hot.heap_bytes):
        yield Finding(
            # Only a notice, because claims and enqueues do not touch unused pages.
            severity=Severity.NOTICE,
            about="bloat",
            what=f"{size_text(free)} of the {size_text(hot.heap_bytes)} of windrow.job are unused, by estimate",
            why="a backlog left them; new jobs will fill them, and until then they cost memory and vacuum time",
            fix=f"{comment('returns free space at its end; VACUUM FULL would stop the queue')}VACUUM windrow.job;",
        )


def _unused(unused: int, whole: int) -> Severity:
    for severity, (bytes_max, share_max) in ((Severity.WARNING, _UNUSED_WARNED), (Severity.NOTICE, _UNUSED_NOTICED)):
        if unused >= bytes_max and unused >= share_max * whole:
            return severity
    return Severity.OK


def judge_partitions(missing: Sequence[MissingPartition]) -> Iterator[Finding]:
    if not missing:
        return
    # A single missing partition is harmless. After midnight UTC, the partition of the last day ahead is missing until a
    # router makes it, which happens within an hour. Every shard uses the default retention. So if no partition of the
    # default retention is missing, routers do make partitions. Then the missing partitions belong to a retention that
    # an operator has just set.
    is_new = all(partition.retention != RETENTION_DEFAULT for partition in missing)
    names = ", ".join(partition.name for partition in missing)
    yield Finding(
        severity=Severity.NOTICE if is_new or len(missing) == 1 else Severity.WARNING,
        about="partition",
        what=f"{len(missing)} partition(s) of finished jobs for the days around today are missing: {names}",
        why=(
            "they are of a retention that this shard has not used before: routers create them within an hour; the "
            "first ack that needs one creates it"
            if is_new
            else "routers create them ahead, every hour, so none has run; the first ack that needs one creates it"
        ),
        fix="\n".join(partitions.making(*partition).as_string(None) for partition in missing),
    )
