"""`windrow upgrade`: what an upgrade to this release will do to the databases of a cluster."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

import typer

from cli import databases, options, output
from cli.exits import ExitCode
from cli.layout import App
from cli.output import Column

if TYPE_CHECKING:
    from shard.placement.cluster_file import Cluster
    from shard.postgres.upgrade_plan import Step
    from shard.vocabulary import ShardName

app = App(help="Tells what an upgrade to this release will do.")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Planned:
    # A shard's name, or "catalog".
    database: str
    # "up to date", "to migrate", "empty" (the first router makes the schema), "refused" or "unreachable".
    state: str
    steps: list[Step]
    error: str | None = None

    @property
    def code(self) -> ExitCode:
        match self.state:
            case "up to date":
                return ExitCode.OK
            case "refused":
                return ExitCode.REFUSED
            case "unreachable":
                return ExitCode.UNAVAILABLE
            case _:
                return ExitCode.NO


@app.command("plan")
def plan(config: options.Config, as_json: options.Json = False) -> None:
    """Lists the migrations that this release will run, what each locks, and what each reads meanwhile.

    Changes nothing. Skips shards that are off. Exit codes: 0: no migration is left to run; 1: some migrations are left;
    3: a database cannot be reached; 5: this release cannot work with a schema, because a newer release has changed it.
    """
    cluster = databases.read(config)
    planned = databases.asked(_plan_all(cluster))
    if as_json:
        output.say_json(
            {
                "database": one.database,
                "state": one.state,
                "migrations": [_step_json(step) for step in one.steps],
                "error": one.error,
            }
            for one in planned
        )
    else:
        output.table(
            [
                Column(title="database"),
                Column(title="state", coloured=True),
                Column(title="migration"),
                Column(title="locks"),
                Column(title="reads"),
                Column(title="older routers"),
            ],
            [row for one in planned for row in _rows(one)],
        )
    for one in planned:
        if one.error:
            output.note(one.error)
    if worst := max(one.code for one in planned):
        raise typer.Exit(worst)


def _rows(planned: _Planned) -> list[tuple[str, ...]]:
    head = (planned.database, planned.state)
    if not planned.steps:
        return [(*head, "", "", "", "")]
    return [(*(("", "") if at else head), *_cells(step)) for at, step in enumerate(planned.steps)]


def _cells(step: Step) -> tuple[str, ...]:
    by_mode: dict[str, list[str]] = {}
    for table, mode in step.migration.locks.items():
        by_mode.setdefault(mode, []).append(table)
    return (
        f"{step.migration.number:04} {step.migration.name}",
        "; ".join(f"{mode}: {', '.join(tables)}" for mode, tables in by_mode.items()) or "none",
        ", ".join(f"{table} ({size / 2**20:,.0f} MiB)" for table, size in step.reads.items()) or "nothing",
        "must stop" if step.migration.breaking else "go on",
    )


def _step_json(step: Step) -> dict[str, object]:
    return {
        "name": f"{step.migration.number:04} {step.migration.name}",
        "locks": step.migration.locks,
        "reads_bytes": dict(step.reads),
        "breaking": step.migration.breaking,
    }


async def _plan_all(cluster: Cluster) -> list[_Planned]:
    """Plans the migrations of all databases. The catalog has its own entry if it has its own database."""
    from shard.placement.cluster_file import ShardState
    from shard.vocabulary import CATALOG

    places = [(entry.name, entry.dsn) for entry in cluster.shards if entry.state is not ShardState.OFF]
    if cluster.catalog_dsn not in {dsn for _, dsn in places}:
        places.append((CATALOG, cluster.catalog_dsn))
    return list(await asyncio.gather(*(_plan(name, dsn) for name, dsn in places)))


async def _plan(name: ShardName, dsn: str) -> _Planned:
    from shard.errors import ShardError, ShardUnavailable
    from shard.postgres import upgrade_plan
    from shard.postgres.pool import Database

    database = Database(name, dsn, connections=1)
    try:
        await database.open()
        steps = await upgrade_plan.plan(database)
    except ShardUnavailable as error:
        return _Planned(database=name, state="unreachable", steps=[], error=str(error))
    except ShardError as error:
        return _Planned(database=name, state="refused", steps=[], error=str(error))
    finally:
        await database.close()
    state = "empty" if steps is None else "to migrate" if steps else "up to date"
    return _Planned(database=name, state=state, steps=steps or [])
