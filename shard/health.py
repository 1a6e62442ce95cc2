"""What hurts a shard's Postgres as a queue: what it holds on to, what grows, what is set badly; and how each is mended.
Pure: judges what shard/vitals.py has read.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from psycopg import sql

from shard import partitions
from shard.vitals import Checkpoints, Facts, Holder, Index, MissingPartition, Server, Setting, Table

_MB = 1024**2
_GB = 1024**3
_MINUTE_S = 60.0
_HOUR_S = 3600.0

# A snapshot so old is critical, whatever is asked for.
_HELD_S_MAX = _HOUR_S
# Where it is not known for how long something has been held, so many transactions are long.
TRANSACTIONS_NOTICED = 1_000
_TRANSACTIONS_MAX = 100_000
_WAL_KEPT_MAX = 10 * _GB
# Ten times what has the hot table vacuumed.
_DEAD_ROWS_MAX = 200_000
_ROWS_NEVER_ANALYZED_MAX = 100_000
# Of the hot table or one of its indexes: bytes that are not used, and which share of it.
_UNUSED_NOTICED = 64 * _MB, 0.5
_UNUSED_WARNED = 1 * _GB, 0.75
# Postgres stops taking writes some three million before 2^31.
_AGE_WARNED = 1_000_000_000
_AGE_CRITICAL = 1_600_000_000
_CHECKPOINTS_MIN = 5

# What the migrations say of the hot tables; more makes autovacuum lazier.
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


class Severity(enum.IntEnum):
    OK = 0
    # Nothing is wrong yet.
    NOTICE = 1
    WARNING = 2
    # Jobs can be lost, or the shard is about to stop.
    CRITICAL = 3

    @property
    def word(self) -> str:
        return self.name.lower()


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    severity: Severity
    # What it is about, in a word that stays: for scripts.
    about: str
    what: str
    why: str
    # SQL to be pasted into psql, as it is; who has to run it, and what it costs, in comments.
    fix: str


def judge(facts: Facts, *, held_s: float = _MINUTE_S) -> list[Finding]:
    """What is to be mended, the worst first. `held_s`: snapshots younger than that are not worth a word."""
    server, settings = facts.server, facts.settings
    found = [
        *judge_server(server),
        *judge_holders(facts.holders, held_s=held_s),
        *judge_settings(settings, server),
        *judge_checkpoints(facts.checkpoints, settings["max_wal_size"], server),
        *judge_tables(facts.tables),
        *judge_room(facts.tables, facts.indexes),
        # A database without tables has more to be made than these.
        *(judge_partitions(facts.missing) if facts.tables else [_NO_SHARD]),
    ]
    return sorted(found, key=lambda finding: -finding.severity)


_NO_SHARD = Finding(
    severity=Severity.CRITICAL,
    about="schema",
    what="there is no schema windrow in this database",
    why="no router has been here yet, or the DSN in the cluster file leads elsewhere (windrow shards plan)",
    fix="-- windrow migrate --config FILE",
)


def worst(findings: Sequence[Finding]) -> Severity:
    return max((finding.severity for finding in findings), default=Severity.OK)


def judge_server(server: Server) -> Iterator[Finding]:
    if server.is_standby:
        yield Finding(
            severity=Severity.CRITICAL,
            about="standby",
            what="it is a standby",
            why="nothing can be enqueued or claimed here; target_session_attrs=read-write in the DSN finds the primary",
            fix="",
        )
    share = server.connections / max(server.connections_max, 1)
    if share >= 0.8:
        yield Finding(
            severity=Severity.CRITICAL if share >= 0.95 else Severity.WARNING,
            about="connections",
            what=f"{server.connections:,} of {server.connections_max:,} connections are used",
            why="without a free one routers cannot reconnect, and operators cannot look",
            fix=_system("max_connections", str(2 * (server.connections_max + 3)), restart=True),
        )
    for what, age in (("transaction", server.age), ("multixact", server.multixact_age)):
        if age >= _AGE_WARNED:
            yield Finding(
                severity=Severity.CRITICAL if age >= _AGE_CRITICAL else Severity.WARNING,
                about="wraparound",
                what=f"the oldest {what} ids are {age:,} old",
                why="Postgres takes no more writes before they are 2,147,483,648 old; vacuum does not get to them",
                fix=f"{_comment('after what holds a snapshot has ended; as a superuser')}VACUUM (FREEZE);",
            )
    if not server.sees_others:
        yield Finding(
            severity=Severity.NOTICE,
            about="privilege",
            what=f"role {server.role} does not see what sessions of other roles do",
            why="for how long they hold a snapshot, and what they run, is not known here",
            fix=f"{_comment('as a superuser')}GRANT pg_read_all_stats TO {server.role};",
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


_KEEPS_ROWS = "no row that was claimed or finished since then can be removed: the hot table and its indexes grow"


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
    right = "" if holder.may_end else _comment(f"as role {holder.role}, or a superuser")
    yield Finding(
        severity=severity,
        about="snapshot",
        what=f"process {holder.name} ({', '.join(who)}) holds a snapshot{since}{_back(holder)}{state}",
        why=_KEEPS_ROWS,
        fix=f"{right}SELECT pg_terminate_backend({holder.pid});",
    )


def _judge_prepared(holder: Holder, held_s: float) -> Iterator[Finding]:
    open_s = holder.held_s or 0.0
    if open_s < held_s:
        return
    gid = _literal(holder.name)
    right = "" if holder.may_end else _comment(f"as role {holder.role}, or a superuser")
    keep = _comment(f"what it did is undone by this; to keep it: COMMIT PREPARED {gid};")
    yield Finding(
        severity=Severity.CRITICAL if open_s >= _HELD_S_MAX else Severity.WARNING,
        about="prepared_transaction",
        what=f"prepared transaction {gid} of role {holder.role} is open for {span_text(open_s)}{_back(holder)}",
        why=f"{_KEEPS_ROWS}; it keeps its locks too, and outlives restarts",
        fix=f"{right}{keep}ROLLBACK PREPARED {gid};",
    )


def _judge_slot(holder: Holder) -> Iterator[Finding]:
    unused, kept = holder.state == "unused", holder.wal_bytes or 0
    long = kept >= _WAL_KEPT_MAX or (holder.transactions or 0) >= _TRANSACTIONS_MAX
    if not unused and not long:
        return
    parts = [f"keeps {size_text(kept)} of WAL"]
    if holder.transactions is not None:
        # Of a logical one that is so by nature.
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
        what=f"{holder.kind.replace(' ', ' replication ')} {_literal(holder.name)} {used}: it {' and '.join(parts)}",
        why="WAL fills the disk, and a full disk stops the shard; an old snapshot keeps dead rows",
        fix=f"{_comment(f'{right}what has read it needs {base} then')}{end}"
        f"SELECT pg_drop_replication_slot({_literal(holder.name)});",
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
        fix=f"{_comment('on the standby, as a superuser; long queries there may be cancelled then')}"
        "ALTER SYSTEM SET hot_standby_feedback = off;\nSELECT pg_reload_conf();",
    )


def _back(holder: Holder) -> str:
    return "" if holder.transactions is None else f", {holder.transactions:,} transactions back"


# ── Settings ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class _Rule:
    name: str
    wrong: Callable[[Setting], bool]
    severity: Severity
    why: str
    better: str


def _is(*values: str) -> Callable[[Setting], bool]:
    return lambda setting: setting.value in values


def _between(least: float, most: float) -> Callable[[Setting], bool]:
    """Both of them wrong, too."""
    return lambda setting: least <= setting.number <= most


_ever = float("inf")
_RULES = (
    _Rule(
        "fsync",
        _is("off"),
        Severity.CRITICAL,
        "after a crash of the machine jobs are lost that were answered OK, or all of them",
        "on",
    ),
    _Rule(
        "full_page_writes",
        _is("off"),
        Severity.CRITICAL,
        "a page that a crash has torn cannot be mended: jobs are lost",
        "on",
    ),
    _Rule(
        "autovacuum",
        _is("off"),
        Severity.CRITICAL,
        "every claim and ack leaves a dead row, and nothing removes them",
        "on",
    ),
    _Rule("track_counts", _is("off"), Severity.CRITICAL, "without counts autovacuum does not know what to clean", "on"),
    _Rule(
        "autovacuum_max_workers",
        _between(0, 1),
        Severity.WARNING,
        "while the only worker is in a large table of finished jobs, nobody cleans the hot one",
        "3",
    ),
    _Rule(
        "autovacuum_naptime",
        _between(_MINUTE_S + 1, _ever),
        Severity.WARNING,
        "the hot table is looked at so seldom; in between its dead rows pile up",
        "5s",
    ),
    _Rule(
        "autovacuum_naptime",
        _between(16, _MINUTE_S),
        Severity.NOTICE,
        "the hot table is looked at so seldom; at thousands of jobs a second its dead rows pile up in between",
        "5s",
    ),
    _Rule(
        "max_wal_size",
        _between(0, _GB - 1),
        Severity.WARNING,
        "a queue writes much WAL: checkpoints come one after the other, and after each every page is written twice",
        "2GB",
    ),
    _Rule(
        "checkpoint_timeout",
        _between(0, 299),
        Severity.NOTICE,
        "after each checkpoint every page is written to WAL in full once",
        "15min",
    ),
    _Rule(
        "shared_buffers",
        _between(0, 128 * _MB),
        Severity.NOTICE,
        "that is Postgres' default: the hot table, its indexes and those of the latest finished jobs should fit "
        "(a quarter of the machine's memory is usual)",
        "1GB",
    ),
    _Rule(
        "old_snapshot_threshold",
        lambda setting: setting.value != "-1",
        Severity.WARNING,
        'statements may fail with "snapshot too old"',
        "-1",
    ),
    _Rule(
        "synchronous_commit",
        _is("off", "local"),
        Severity.NOTICE,
        "Windrow's connections turn it on; what others commit, such as an outbox, may be lost in a crash",
        "on",
    ),
    _Rule(
        "default_transaction_isolation",
        lambda setting: setting.value != "read committed",
        Severity.NOTICE,
        "Windrow's connections take read committed; all other transactions hold one snapshot to their end",
        "read committed",
    ),
    _Rule(
        "idle_in_transaction_session_timeout",
        _is("0"),
        Severity.NOTICE,
        "a transaction that somebody forgets holds its snapshot for ever, and so every dead row since",
        "5min",
    ),
    _Rule(
        "jit",
        _is("on"),
        Severity.NOTICE,
        "Windrow's connections turn it off; for others to compile a short statement takes longer than to run it",
        "off",
    ),
)


def judge_settings(settings: Mapping[str, Setting], server: Server) -> Iterator[Finding]:
    for rule in _RULES:
        # Not every version has all of them.
        setting = settings.get(rule.name)
        if setting is not None and rule.wrong(setting):
            yield Finding(
                severity=rule.severity,
                about="setting",
                what=f"{rule.name} is {setting.shown}",
                why=rule.why,
                fix=_set(setting, rule.better, server),
            )
    delay, limit = (_cost(settings, name) for name in ("delay", "limit"))
    # Postgres' own defaults are 200 in 2 ms.
    if delay.number and limit.number / delay.number < 200 / 0.002:
        yield Finding(
            severity=Severity.NOTICE,
            about="setting",
            what=f"autovacuum rests for {delay.shown} after every {limit.shown} of cost",
            why="that is lazier than by default: tables of finished jobs are cleaned late",
            fix=_system("autovacuum_vacuum_cost_delay", "2ms", "autovacuum_vacuum_cost_limit", "200"),
        )


def _cost(settings: Mapping[str, Setting], name: str) -> Setting:
    own = settings[f"autovacuum_vacuum_cost_{name}"]
    return settings[f"vacuum_cost_{name}"] if own.value == "-1" else own


def _set(setting: Setting, value: str, server: Server) -> str:
    """Where it holds for new sessions of all roles, unless what is wrong is said of a role."""
    if setting.context != "user":
        return _system(setting.name, value, restart=setting.context == "postmaster")
    match setting.source:
        case "database user":
            whose = f"ROLE {server.role} IN DATABASE {server.database}"
        case "user":
            whose = f"ROLE {server.role}"
        case _:
            whose = f"DATABASE {server.database}"
    return f"{_comment('for sessions that begin then')}ALTER {whose} SET {setting.name} = {_literal(value)};"


def _system(*names_and_values: str, restart: bool = False) -> str:
    pairs = zip(names_and_values[::2], names_and_values[1::2], strict=True)
    changes = "".join(f"ALTER SYSTEM SET {name} = {_literal(value)};\n" for name, value in pairs)
    if restart:
        return f"{_comment('as a superuser; it takes a restart of Postgres')}{changes}".rstrip()
    return f"{_comment('as a superuser')}{changes}SELECT pg_reload_conf();"


def judge_checkpoints(checkpoints: Checkpoints, max_wal_size: Setting, server: Server) -> Iterator[Finding]:
    timed, requested, wal_bytes = checkpoints
    # One begins when half of max_wal_size is full. Those that somebody has asked for come with less.
    if requested < max(_CHECKPOINTS_MIN, timed + 1) or wal_bytes / requested < max_wal_size.number / 4:
        return
    yield Finding(
        severity=Severity.WARNING,
        about="checkpoints",
        what=f"{requested:,} of {timed + requested:,} checkpoints came before their time, each after about "
        f"{size_text(wal_bytes // requested)} of WAL: max_wal_size is {max_wal_size.shown}",
        why="after each checkpoint every page is written to WAL in full once, which makes the next one come sooner",
        fix=_set(max_wal_size, f"{int(max_wal_size.number * 4 / _MB)}MB", server),
    )


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
        # What is eager on purpose may stay so.
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
                why="every claim and ack leaves a dead row there: it is to be cleaned after so many, whatever its size",
                fix=f"ALTER TABLE {name} SET ({right});",
            )
        if table.dead_rows >= _DEAD_ROWS_MAX and table.dead_rows >= table.rows / 4:
            last = "never vacuumed" if table.vacuumed_s is None else f"vacuumed {span_text(table.vacuumed_s)} ago"
            yield Finding(
                severity=Severity.WARNING,
                about="dead_rows",
                what=f"{name} has {table.dead_rows:,} dead rows beside {table.rows:,} live ones; {last}",
                why="the table grows: autovacuum does not keep up, or a snapshot keeps it from removing them",
                fix=f"{_comment('after what holds a snapshot has ended')}VACUUM {name};",
            )
        if table.analyzed_s is None and table.rows >= _ROWS_NEVER_ANALYZED_MAX and not table.partitioned:
            yield Finding(
                severity=Severity.WARNING,
                about="never_analyzed",
                what=f"{name} has {table.rows:,} rows, and was never analyzed",
                why="lists, counts and checks of it are planned without knowing what is in it",
                fix=f"ANALYZE {name};",
            )


def judge_room(tables: Sequence[Table], indexes: Sequence[Index]) -> Iterator[Finding]:
    """What the hot table and its indexes take up and do not need: by estimate."""
    hot = next((table for table in tables if table.name == "job"), None)
    for index in indexes:
        name = f"windrow.{index.name}"
        if not index.valid:
            yield Finding(
                severity=Severity.WARNING,
                about="index",
                what=f"index {name} is invalid",
                why="a REINDEX or CREATE INDEX has left it unfinished: it is of no use, and every write pays for it",
                fix=f"{_comment('unless it is being built just now')}DROP INDEX CONCURRENTLY {name};",
            )
        elif hot is not None:
            unused = index.unused_bytes(hot.versions)
            if severity := _unused(unused, index.bytes):
                comment = _comment("goes on beside the queue; best when it is quiet")
                yield Finding(
                    severity=severity,
                    about="bloat",
                    what=f"{size_text(unused)} of the {size_text(index.bytes)} of {name} are unused, by estimate",
                    why="claims and enqueues touch more pages than they need to",
                    fix=f"{comment}REINDEX INDEX CONCURRENTLY {name};",
                )
    free = None if hot is None else hot.unused_bytes
    if hot is not None and free is not None and _unused(free, hot.heap_bytes):
        yield Finding(
            # Nothing walks over it.
            severity=Severity.NOTICE,
            about="bloat",
            what=f"{size_text(free)} of the {size_text(hot.heap_bytes)} of windrow.job are unused, by estimate",
            why="a backlog has left them; new jobs will fill them, and until then they take memory, and time to vacuum",
            fix=f"{_comment('gives back what is free at its end; VACUUM FULL stops the queue')}VACUUM windrow.job;",
        )


def _unused(unused: int, whole: int) -> Severity:
    for severity, (bytes_max, share_max) in ((Severity.WARNING, _UNUSED_WARNED), (Severity.NOTICE, _UNUSED_NOTICED)):
        if unused >= bytes_max and unused >= share_max * whole:
            return severity
    return Severity.OK


def judge_partitions(missing: Sequence[MissingPartition]) -> Iterator[Finding]:
    if not missing:
        return
    # One alone: after midnight UTC the last day's is missing until a router's next look, within the hour.
    names = ", ".join(one.name for one in missing)
    yield Finding(
        severity=Severity.NOTICE if len(missing) == 1 else Severity.WARNING,
        about="partition",
        what=f"{len(missing)} of the days around today have no partition of finished jobs: {names}",
        why="routers make them ahead, every hour: none has been here; the first ack of such a day makes its own",
        fix="\n".join(partitions.making(*one).as_string(None) for one in missing),
    )


# ── Words ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def size_text(size: float) -> str:
    """8.0 kB, 1.2 GB."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if size < 1000 or unit == "GB":
            break
        size /= 1024
    return f"{size:,.0f} bytes" if unit == "bytes" else f"{size:,.1f} {unit}"


def span_text(seconds: float) -> str:
    """Its two largest units: 41s, 3m20s, 2d4h."""
    left, text, parts = max(0, round(seconds)), "", 0
    for unit, unit_s in (("d", 86_400), ("h", 3600), ("m", 60), ("s", 1)):
        count, left = divmod(left, unit_s)
        if parts or count:
            parts += 1
            text += f"{count}{unit}" if count else ""
        if parts == 2:
            break
    return text or "0s"


def _comment(text: str) -> str:
    return f"-- {text}\n"


def _literal(text: str) -> str:
    return sql.Literal(text).as_string(None)
