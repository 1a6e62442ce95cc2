"""`windrow doctor`: finds database problems and prints the commands that fix them. The command reads the cluster file
and connects to the databases."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Annotated

import typer

from cli import databases, options, output, values
from cli.exits import CommandFailed, ExitCode
from cli.output import Column

if TYPE_CHECKING:
    from shard.health.facts import Facts, Holder, Table
    from shard.health.finding import Finding
    from shard.placement.cluster_file import Cluster
    from shard.vocabulary import ShardName

# The tables that grow with jobs, in the order of the output. All other tables are one row, "other".
_TABLES = ("job", "dead", "finished", "cold", "dedup", "tally")
# Smaller estimates are too inexact to show.
_ESTIMATED_MIN = 1024**2
_HOLDERS_SHOWN = 10
_STATEMENT_S = 1.0
_WIDTH = len("critical")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Report:
    """The doctor's report on one database."""

    # A shard's name, or "catalog".
    database: str
    facts: Facts | None = None
    findings: Sequence[Finding] = ()
    # Why the database did not answer. Empty if the database answered.
    trouble: str = ""


def doctor(
    config: options.Config,
    shard: Annotated[
        str | None,
        typer.Option("--shard", metavar="NAME", show_default="all", help="Examine only this shard."),
    ] = None,
    held_for: Annotated[
        timedelta,
        typer.Option(
            "--held-for",
            parser=values.duration,
            metavar="DURATION",
            show_default="1m",
            help="Warn about snapshots that are held for this long.",
        ),
    ] = timedelta(minutes=1),
    as_json: options.Json = False,
) -> None:
    """Finds database problems and prints the commands that fix them.

    Examines table sizes, dead rows, sessions that hold old snapshots, and settings that slow a queue down. Changes
    nothing, and is safe under load. Exit code 1: there are warnings, or worse; 3: a shard did not answer.
    """
    cluster = databases.read(config)
    dsns = _dsns(cluster, shard)
    with output.working("examining " + ", ".join(dsns)):
        reports = databases.asked(_examine_all(cluster, dsns, held_for))
    if as_json:
        output.say_json(_report_json(report) for report in reports)
    else:
        for at, report in enumerate(reports):
            if at:
                output.say("")
            _print_report(report, held_for)
    for report in reports:
        if report.trouble:
            output.note(report.trouble)
    if any(_hurts(report) for report in reports):
        raise typer.Exit(ExitCode.NO)
    if any(report.trouble for report in reports):
        raise typer.Exit(ExitCode.UNAVAILABLE)


def _dsns(cluster: Cluster, shard: str | None) -> dict[ShardName, str]:
    """Returns the DSNs of the shards that are not off, and the DSN of the catalog if the catalog has its own database.
    Raises CommandFailed if `shard` is off or unknown."""
    from shard.placement.cluster_file import ShardState
    from shard.vocabulary import CATALOG

    dsns = {entry.name: entry.dsn for entry in cluster.shards}
    if cluster.catalog_dsn not in dsns.values():
        dsns[CATALOG] = cluster.catalog_dsn
    off = [entry.name for entry in cluster.shards if entry.state is ShardState.OFF]
    if shard is None:
        return {name: dsn for name, dsn in dsns.items() if name not in off}
    for name, dsn in dsns.items():
        if name == shard and name in off:
            raise CommandFailed(f"shard {shard!r} is off in {cluster.source}: it is not contacted", ExitCode.REFUSED)
        if name == shard:
            return {name: dsn}
    raise CommandFailed(f"{cluster.source} names no shard {shard!r}; it names {', '.join(dsns)}", ExitCode.NOT_FOUND)


async def _examine_all(cluster: Cluster, dsns: dict[ShardName, str], held_for: timedelta) -> list[_Report]:
    reports = await asyncio.gather(*(_examine(name, dsn, held_for) for name, dsn in dsns.items()))
    answered = [name for name, report in zip(dsns, reports, strict=True) if report.facts is not None]
    found = await _check_databases(cluster, answered)
    return [
        replace(report, findings=[*found.get(name, ()), *report.findings])
        for name, report in zip(dsns, reports, strict=True)
    ]


async def _check_databases(cluster: Cluster, names: Collection[ShardName]) -> dict[ShardName, list[Finding]]:
    """Compares the databases `names` with the cluster file and the catalog. Returns what is wrong, by database. Returns
    nothing if the catalog cannot be read."""
    from balancer.recovery import check_databases
    from balancer.shards import open_shards
    from shard.errors import ShardError
    from shard.vocabulary import CATALOG

    shard_at = {entry.dsn: entry.name for entry in cluster.shards}
    async with open_shards(cluster) as shards:
        try:
            return await check_databases(
                {name: database for name, database in shards.databases.items() if name in names},
                shards.catalog,
                cluster=cluster.name,
                named=[entry.name for entry in cluster.shards],
                catalog_at=shard_at.get(cluster.catalog_dsn, CATALOG),
            )
        except ShardError:
            return {}


async def _examine(name: ShardName, dsn: str, held_for: timedelta) -> _Report:
    from shard.errors import ShardUnavailable
    from shard.health.checks import judge
    from shard.health.facts import read

    try:
        facts = await read(name, dsn)
    except ShardUnavailable as error:
        return _Report(database=name, trouble=str(error))
    return _Report(database=name, facts=facts, findings=judge(facts, held_s=held_for.total_seconds()))


def _hurts(report: _Report) -> bool:
    from shard.health.finding import Severity, worst

    return worst(report.findings) >= Severity.WARNING


# ── On a terminal ────────────────────────────────────────────────────────────────────────────────────────────────────


def _print_report(report: _Report, held_for: timedelta) -> None:
    if report.facts is None:
        output.heading(f"{report.database}: no answer")
        return
    from shard.formatting import size_text, span_text

    server = report.facts.server
    output.heading(f"{report.database}: {_verdict(report.findings)}")
    output.say(
        f"postgres {server.version}, up {span_text(server.up_s)}; database {server.database}, "
        f"{size_text(server.bytes)}; {server.connections:,} of {server.connections_max:,} connections"
    )
    output.say("")
    _print_tables(report.facts)
    _print_holders(report.facts.holders, held_for)
    for finding in report.findings:
        output.say("")
        indent = _WIDTH + 2
        output.facts(
            [
                (finding.severity.word, output.wrapped(finding.what, indent=indent)),
                ("why", output.wrapped(finding.why, indent=indent)),
                ("fix", finding.fix),
            ],
            width_min=_WIDTH,
        )


def _verdict(findings: Sequence[Finding]) -> str:
    from shard.health.finding import Severity

    counts = [
        f"{count:,} {severity.word}" if severity is Severity.CRITICAL else output.counted(count, severity.word)
        for severity in reversed(Severity)
        if (count := sum(finding.severity is severity for finding in findings))
    ]
    return ", ".join(counts) or "ok"


def _print_tables(facts: Facts) -> None:
    from shard.formatting import size_text

    rows: list[tuple[str, ...]] = []
    others: list[Table] = []
    for family, tables in _families(facts.tables):
        if family not in _TABLES:
            others += tables
        elif tables[0].partitioned:
            partitions = tables[1:]
            rows.append(_table_row(f"{family} ({output.counted(len(partitions), 'partition')})", partitions))
        elif family == "job":
            hot = tables[0]
            rows.append(_table_row(family, tables, unused=_estimate(hot.unused_bytes)))
            for index in facts.indexes:
                if index.table == family:
                    unused = _estimate(index.unused_bytes(hot.versions))
                    rows.append((f"  {index.name}", "", "", "", size_text(index.bytes), unused, "", ""))
        else:
            rows.append(_table_row(family, tables))
    if others:
        rows.append(_table_row(output.counted(len(others), "other"), others))
    titles = ("rows", "dead rows", "table", "indexes", "unused", "vacuumed", "analyzed")
    output.table([Column(title="table"), *(Column(title=title, right=True) for title in titles)], rows)


def _table_row(name: str, tables: Sequence[Table], *, unused: str = "") -> tuple[str, ...]:
    from shard.formatting import size_text

    return (
        name,
        f"{sum(table.rows for table in tables):,}",
        f"{sum(table.dead_rows for table in tables):,}",
        size_text(sum(table.bytes for table in tables)),
        size_text(sum(table.index_bytes for table in tables)),
        unused,
        _ago(table.vacuumed_s for table in tables),
        _ago(table.analyzed_s for table in tables),
    )


def _estimate(unused: int | None) -> str:
    from shard.formatting import size_text

    return "" if unused is None or unused < _ESTIMATED_MIN else f"~{size_text(unused)}"


def _ago(spans: Iterable[float | None]) -> str:
    """Formats how long ago the most recent of some events was. `spans`: their ages."""
    from shard.formatting import span_text

    ages = [span for span in spans if span is not None]
    return f"{span_text(min(ages))} ago" if ages else "never"


def _families(tables: Iterable[Table]) -> list[tuple[str, list[Table]]]:
    """Groups each partitioned table with its partitions. The partitioned table comes first in its group. The groups are
    in the order of the output."""
    families: dict[str, list[Table]] = {}
    for table in sorted(tables, key=lambda table: not table.partitioned):
        families.setdefault(table.family, []).append(table)

    shown = [family for family in _TABLES if family in families]
    return [(family, families[family]) for family in [*shown, *sorted(families.keys() - shown)]]


def _print_holders(holders: Sequence[Holder], held_for: timedelta) -> None:
    """Prints the holders of snapshots, but not those that hold a snapshot only for a short statement."""
    from shard.formatting import size_text, span_text
    from shard.health.checks import TRANSACTIONS_NOTICED

    def stays(holder: Holder) -> bool:
        if holder.is_slot or not held_for:
            return True
        if holder.held_s is None:
            return (holder.transactions or 0) >= TRANSACTIONS_NOTICED
        return holder.held_s >= _STATEMENT_S

    shown = [holder for holder in holders if stays(holder)][:_HOLDERS_SHOWN]
    if not shown:
        return
    output.say("")
    titles = ("holds", "who", "state", "for", "last query", "transactions")
    columns = [Column(title=title, right=title in titles[3:]) for title in titles]
    output.table(
        [*columns, Column(title="query", detail=True)],
        [
            (
                f"{holder.kind} {holder.name}",
                " ".join(part for part in (holder.application, holder.role, holder.client) if part),
                (holder.state or "")
                + ("" if holder.wal_bytes is None else f", keeps {size_text(holder.wal_bytes)} of WAL"),
                "" if holder.held_s is None else span_text(holder.held_s),
                "" if holder.query_s is None else f"{span_text(holder.query_s)} ago",
                "" if holder.transactions is None else f"{holder.transactions:,}",
                " ".join((holder.query or "").split()) + _waits(holder),
            )
            for holder in shown
        ],
    )


def _waits(holder: Holder) -> str:
    """Returns a line about what an active holder waits for. Empty for a holder in another state, such as idle in
    transaction."""
    return f"\nwaits for {holder.waits_for}" if holder.waits_for and holder.state == "active" else ""


# ── For scripts ──────────────────────────────────────────────────────────────────────────────────────────────────────


def _report_json(report: _Report) -> dict[str, object]:
    from shard.health.finding import worst

    document: dict[str, object] = {
        "shard": report.database,
        "answered": report.facts is not None,
        "verdict": worst(report.findings).word if report.facts else None,
        "error": report.trouble or None,
        "findings": [
            {
                "severity": finding.severity.word,
                "about": finding.about,
                "finding": finding.what,
                "why": finding.why,
                "fix": finding.fix or None,
            }
            for finding in report.findings
        ],
    }
    if report.facts is not None:
        facts, server = report.facts, report.facts.server
        versions = sum(table.versions for table in facts.tables if table.name == "job")
        document |= {
            "postgres_version": server.version,
            "database": server.database,
            "role": server.role,
            "bytes": server.bytes,
            "up_s": server.up_s,
            "connections": server.connections,
            "connections_max": server.connections_max,
            "tables": [_table_json(table) for table in facts.tables if not table.partitioned],
            "indexes": [
                {
                    "index": index.name,
                    "table": index.table,
                    "bytes": index.bytes,
                    "unused_bytes_estimate": index.unused_bytes(versions) if index.table == "job" else None,
                    "valid": index.valid,
                }
                for index in facts.indexes
            ],
            "holders": [holder._asdict() for holder in facts.holders],
        }
    return document


def _table_json(table: Table) -> dict[str, object]:
    return {
        "table": table.name,
        "partition_of": table.family if table.family != table.name else None,
        "rows": table.rows,
        "dead_rows": table.dead_rows,
        "bytes": table.bytes,
        "index_bytes": table.index_bytes,
        "unused_bytes_estimate": table.unused_bytes,
        "vacuumed_age_s": table.vacuumed_s,
        "analyzed_age_s": table.analyzed_s,
    }
