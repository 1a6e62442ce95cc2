"""The server processes of a cluster, `windrow router`, `windrow balancer` and `windrow archiver`, and `windrow migrate`
for their databases."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from cli import databases, options, output
from cli.exits import CommandFailed, ExitCode
from cli.output import Column

if TYPE_CHECKING:
    from archiver.run import Pass
    from shard.history.days import Aged
    from shard.placement.catalog import Move
    from shard.placement.cluster_file import Cluster, ShardEntry
    from shard.postgres.pool import Database
    from shard.vocabulary import ShardName


def router(
    config: options.Config,
    listen: options.Listen = None,
    processes: Annotated[
        int | None,
        typer.Option(
            "--processes",
            metavar="N",
            min=1,
            max=256,
            show_default=False,
            help="Number of router processes, instead of the cluster file's (default 2).",
        ),
    ] = None,
    metrics: Annotated[
        str | None,
        typer.Option(
            "--metrics",
            metavar="HOST:PORT",
            show_default="the cluster file's",
            help="Where to serve the metrics of all processes, for Prometheus.",
        ),
    ] = None,
) -> None:
    """Runs this machine's routers.

    They reload the cluster file when it changes, or at once after SIGHUP. If the new file has errors, the old file
    stays in use. Runs until SIGTERM or Ctrl-C, then lets the calls in flight finish.
    """
    from router.__main__ import run
    from router.errors import CannotListen, RouterFailed, RouterGaveUp
    from shard.placement.cluster_file import ClusterFileError

    try:
        run(config, listen=listen, processes=processes, metrics=metrics)
    except ClusterFileError as error:
        raise CommandFailed(str(error), ExitCode.USAGE) from error
    except CannotListen as error:
        raise CommandFailed(str(error), ExitCode.REFUSED) from error
    except RouterGaveUp as error:
        raise CommandFailed(f"{error}; see its message above", ExitCode.REFUSED) from error
    except RouterFailed as error:
        raise CommandFailed(str(error), ExitCode.UNAVAILABLE) from error


def balancer(
    config: options.Config,
    once: Annotated[
        bool, typer.Option("--once", help="Exit when all slots are in place; exit with 5 if another balancer leads.")
    ] = False,
) -> None:
    """Runs the balancer, which moves slots to the shards that the cluster file wants.

    Several may run: one leads and the others stand by. Runs until SIGTERM or Ctrl-C, then finishes steps that must not
    be left half done. With --once, exits with 1 if the cluster file blocks moves that have begun.
    """
    from balancer.service import balance, balance_once
    from shard.placement.file_watcher import WatchedFile

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    cluster = databases.read(config)

    async def until_stopped() -> None:
        file = WatchedFile(config)
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, file.hurry)
        await balance(file, file.read(), stop=databases.stop_on_signals())

    async def until_done() -> Mapping[Move, str]:
        stop = databases.stop_on_signals()
        held = await balance_once(cluster, stop=stop)
        if stop.is_set():
            raise typer.Exit(ExitCode.INTERRUPTED)
        return held

    if not once:
        databases.asked(until_stopped())
    elif held := databases.asked(until_done()):
        raise CommandFailed(
            f"moves of {output.counted(sum(len(move.slots) for move in held), 'slot')} cannot go on",
            ExitCode.NO,
            particulars=[f"{move}: {why}" for move, why in held.items()],
        )


def archiver(
    config: options.Config,
    once: Annotated[bool, typer.Option("--once", help="Run one pass over every shard now, then exit.")] = False,
    as_json: options.Json = False,
) -> None:
    """Runs the archiver, which moves finished jobs of past days out of the table that acks write to, and drops them
    after their retention.

    If [archiver] export is set, it exports jobs before it drops them. Runs on the schedule of [archiver] in the cluster
    file, until SIGTERM or Ctrl-C; --json needs --once. Exit codes with --once: 1 if work is left to the next pass, 3 if
    a shard cannot be reached, 5 if another archiver is running, or if a shard's clock and this machine's differ by more
    than an hour.
    """
    from archiver import reporting
    from archiver.service import archive
    from shard.placement.file_watcher import WatchedFile

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    cluster = databases.read(config)
    if once:
        _archive_once(cluster, as_json=as_json)
        return

    async def until_stopped() -> None:
        file = WatchedFile(config)
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, file.hurry)
        with reporting.metrics() as record:

            def report(shard: ShardName, outcome: Pass | Exception) -> None:
                reporting.log(shard, outcome)
                record(shard, outcome)

            await archive(file, file.read(), stop=databases.stop_on_signals(), listener=report)

    databases.asked(until_stopped())


def _archive_once(cluster: Cluster, *, as_json: bool) -> None:
    from archiver import reporting
    from archiver.run import AnotherArchives, Pass
    from archiver.service import archive_once
    from shard.errors import ClocksDiffer, ShardUnavailable

    async def until_done() -> Mapping[ShardName, Pass | Exception]:
        stop = databases.stop_on_signals()
        outcomes = await archive_once(cluster, stop=stop)
        if stop.is_set():
            raise typer.Exit(ExitCode.INTERRUPTED)
        return outcomes

    with output.working(f"one pass over {output.counted(len(cluster.shards), 'shard')}"):
        outcomes = databases.asked(until_done())
    with reporting.metrics() as record:
        for shard, outcome in outcomes.items():
            record(shard, outcome)
    if as_json:
        output.say_json(_pass_json(shard, outcome) for shard, outcome in outcomes.items())
    else:
        for outcome in outcomes.values():
            (output.say if isinstance(outcome, Pass) else output.note)(str(outcome))
    for outcome in outcomes.values():
        if isinstance(outcome, Pass):
            for why in outcome.not_exported:
                output.note(f"shard {outcome.shard!r}: {why}")

    def code(outcome: Pass | Exception) -> ExitCode:
        match outcome:
            case Pass():
                return ExitCode.NO if outcome.left_something else ExitCode.OK
            case ShardUnavailable():
                return ExitCode.UNAVAILABLE
            case AnotherArchives() | ClocksDiffer():
                return ExitCode.REFUSED
            case _:
                return ExitCode.NO

    if worst := max(map(code, outcomes.values()), default=ExitCode.OK):
        raise typer.Exit(worst)


def _pass_json(shard: ShardName, outcome: Pass | Exception) -> dict[str, object]:
    if isinstance(outcome, Exception):
        return {"shard": shard, "error": str(outcome)}
    return {
        "shard": shard,
        "turned_cold": [_aged_json(each) for each in outcome.turned_cold],
        "exported": [
            {
                "partition": each.partition,
                "file": each.file,
                "jobs": each.jobs,
                "bytes": each.bytes,
                "seconds": round(each.seconds, 3),
            }
            for each in outcome.exported
        ],
        "not_exported": outcome.not_exported,
        "dropped": [_aged_json(each) for each in outcome.dropped],
        "dedup_keys": outcome.dedup_keys,
        "jobs_expired": outcome.jobs_expired,
        "dead_jobs_cancelled": outcome.dead_jobs_cancelled,
        "released_jobs_dropped": outcome.released_jobs_dropped,
        "erased": outcome.erased,
        "in_use": outcome.in_use,
        "stuck": outcome.stuck,
        "more": outcome.more,
        "locked_ms_max": round(outcome.locked_s_max * 1000, 3),
        "seconds": round(outcome.seconds, 3),
        "error": None,
    }


def _aged_json(aged: Aged) -> dict[str, object]:
    return {
        "partition": aged.partition,
        "jobs": aged.jobs,
        "bytes": aged.bytes,
        "locked_ms": round(aged.locked_s * 1000, 3),
    }


def migrate(config: options.Config, as_json: options.Json = False) -> None:
    """Migrates the schema of every shard and of the catalog to this release.

    Skips shards that are off. Safe to repeat, and safe while routers run. Exit code 1: a database could not be
    migrated; the other databases were.
    """
    cluster = databases.read(config)
    with output.working(f"migrating {len(cluster.shards)} shards"):
        outcomes = databases.asked(_migrate_all(cluster))
    if as_json:
        output.say_json(
            {"database": outcome.database, "migrated": outcome.run, "error": outcome.error} for outcome in outcomes
        )
    else:
        rows = [
            (
                outcome.database,
                "failed" if outcome.error else "migrated" if outcome.run else "up to date",
                ", ".join(outcome.run),
            )
            for outcome in outcomes
        ]
        output.table(
            [Column(title="database"), Column(title="state", coloured=True), Column(title="migrations run")], rows
        )
    failures = [outcome.error for outcome in outcomes if outcome.error]
    for failure in failures:
        output.note(failure)
    if failures:
        raise typer.Exit(ExitCode.NO)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Outcome:
    """The result for one database."""

    # A shard's name, or "catalog".
    database: str
    # Names of the migrations that were run; empty if there were none.
    run: list[str]
    error: str | None = None


async def _migrate_all(cluster: Cluster) -> list[_Outcome]:
    """Migrates every shard that is not off, and the catalog. If the catalog exists already, it is migrated first,
    because it knows which databases belong to the cluster. Raises ShardError if the catalog cannot be used."""
    from shard.placement import catalog
    from shard.placement.cluster_file import ShardState
    from shard.postgres import schema
    from shard.postgres.pool import Database
    from shard.vocabulary import CATALOG

    entries = [entry for entry in cluster.shards if entry.state is not ShardState.OFF]
    database = Database(CATALOG, cluster.catalog_dsn, connections=1, may_scan=True)
    try:
        await database.open()
        there = database if await catalog.is_founded(database, cluster=cluster.name) else None
        run = await schema.migrate(database, cluster=None) if there else []
        outcomes = list(await asyncio.gather(*(_migrate(entry, cluster.name, there) for entry in entries)))
        if there is None and not any(outcome.error for outcome in outcomes):
            run = await schema.migrate(database, cluster=None)
    finally:
        await database.close()
    named = [f"{one.number:04} {one.name}" for one in run]
    for outcome, entry in zip(outcomes, entries, strict=True):
        if entry.dsn == cluster.catalog_dsn:
            outcome.run[:0] = named
            return outcomes
    return [*outcomes, _Outcome(database=CATALOG, run=named)]


async def _migrate(entry: ShardEntry, cluster: str, catalog: Database | None) -> _Outcome:
    from shard.errors import ShardError
    from shard.placement import identity
    from shard.postgres import schema
    from shard.postgres.pool import Database

    database = Database(entry.name, entry.dsn, connections=1)
    try:
        await database.open()
        await identity.examine(database, catalog, cluster=cluster)
        done = await schema.migrate(database, cluster=cluster)
    except ShardError as error:
        return _Outcome(database=entry.name, run=[], error=str(error))
    finally:
        await database.close()
    return _Outcome(database=entry.name, run=[f"{one.number:04} {one.name}" for one in done])
