"""Finds settings of Postgres that harm a queue, and proposes better values. Pure: judges the facts that
shard/health/facts.py has read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from shard.formatting import size_text
from shard.health.facts import Checkpoints, Server, Setting
from shard.health.finding import Finding, Severity, comment, literal, system

_MB = 1024**2
_GB = 1024**3
_MINUTE_S = 60.0
# With fewer requested checkpoints, nothing is reported, because so few checkpoints prove nothing.
_CHECKPOINTS_MIN = 5


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
    """Returns a function that says whether a value is wrong: whether it is from `least` to `most`, both included."""
    return lambda setting: least <= setting.number <= most


_INFINITE = float("inf")
_RULES = (
    _Rule(
        "fsync",
        _is("off"),
        Severity.CRITICAL,
        "after a crash of the machine, acknowledged jobs are lost, perhaps all of them",
        "on",
    ),
    _Rule(
        "full_page_writes",
        _is("off"),
        Severity.CRITICAL,
        "a page that a crash has left half written cannot be repaired: jobs are lost",
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
        "while the only worker vacuums a large table of finished jobs, windrow.job is not vacuumed",
        "3",
    ),
    _Rule(
        "autovacuum_naptime",
        _between(_MINUTE_S + 1, _INFINITE),
        Severity.WARNING,
        "autovacuum checks windrow.job too seldom; its dead rows pile up in between",
        "5s",
    ),
    _Rule(
        "autovacuum_naptime",
        _between(16, _MINUTE_S),
        Severity.NOTICE,
        "autovacuum checks windrow.job seldom; at thousands of jobs a second its dead rows pile up in between",
        "5s",
    ),
    _Rule(
        "max_wal_size",
        _between(0, _GB - 1),
        Severity.WARNING,
        "a queue writes much WAL: checkpoints follow each other closely, and after each every page is written twice",
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
        "no more than Postgres' default of 128MB: windrow.job, its indexes and those of the latest finished jobs "
        "should fit (a quarter of the machine's memory is usual)",
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
        "Windrow's connections turn it on; what other sessions commit, such as an outbox, may be lost in a crash",
        "on",
    ),
    _Rule(
        "default_transaction_isolation",
        lambda setting: setting.value != "read committed",
        Severity.NOTICE,
        "Windrow's connections use read committed; all other transactions hold one snapshot until they end",
        "read committed",
    ),
    _Rule(
        "idle_in_transaction_session_timeout",
        _is("0"),
        Severity.NOTICE,
        "a forgotten transaction holds its snapshot for ever, so no dead row since then can be removed",
        "5min",
    ),
    _Rule(
        "jit",
        _is("on"),
        Severity.NOTICE,
        "Windrow's connections turn it off; elsewhere, compiling a short statement takes longer than running it",
        "off",
    ),
)


def judge_settings(settings: Mapping[str, Setting], server: Server) -> Iterator[Finding]:
    for rule in _RULES:
        # Not every version of Postgres has every setting.
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
    # Postgres' own default is 200 units of cost per 2 ms.
    if delay.number and limit.number / delay.number < 200 / 0.002:
        yield Finding(
            severity=Severity.NOTICE,
            about="setting",
            what=f"autovacuum pauses for {delay.shown} after every {limit.shown} units of cost",
            why="that is slower than the default: tables of finished jobs are vacuumed late",
            fix=system("autovacuum_vacuum_cost_delay", "2ms", "autovacuum_vacuum_cost_limit", "200"),
        )


def _cost(settings: Mapping[str, Setting], name: str) -> Setting:
    own = settings[f"autovacuum_vacuum_cost_{name}"]
    return settings[f"vacuum_cost_{name}"] if own.value == "-1" else own


def judge_checkpoints(checkpoints: Checkpoints, max_wal_size: Setting, server: Server) -> Iterator[Finding]:
    timed, requested, wal_bytes = checkpoints
    # Postgres requests a checkpoint when WAL of about half of max_wal_size is written. If checkpoints came after less
    # than a quarter of max_wal_size on average, commands have requested them, and max_wal_size is not too small.
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


def _set(setting: Setting, value: str, server: Server) -> str:
    """Returns the SQL that changes a setting for new sessions of all roles. If the wrong value is set for this role,
    the SQL changes it for this role only."""
    if setting.context != "user":
        return system(setting.name, value, restart=setting.context == "postmaster")
    match setting.source:
        case "database user":
            scope = f"ROLE {server.role} IN DATABASE {server.database}"
        case "user":
            scope = f"ROLE {server.role}"
        case _:
            scope = f"DATABASE {server.database}"
    return f"{comment('for sessions that begin after this')}ALTER {scope} SET {setting.name} = {literal(value)};"
