"""Whose a database is, and whether it is the one that the catalog takes a shard's to be
(docs/decisions/0023-a-shard-is-its-database.md). A database that will not do is looked at, and not changed."""

from __future__ import annotations

from typing import NamedTuple

import psycopg

from shard import history, schema, statements
from shard.database import NO_SCHEMA, Database, Mark
from shard.errors import Misconfigured
from shard.vocabulary import Micros, ShardName


class Identity(NamedTuple):
    """What a database says it is."""

    cluster: str
    shard: ShardName
    # None: it was made by a release that gave none.
    id: str | None


class Record(NamedTuple):
    """What the catalog knows of a shard, in the order of read_shard.sql's columns."""

    # Its database has been made.
    made: bool = False
    id: str | None = None
    # That it holds; that have left it, and for which it may be asked.
    slots: int = 0
    slots_left: int = 0
    # The one that it has confirmed last; None: none yet.
    mark_number: int | None = None
    mark_token: str | None = None

    @property
    def needed(self) -> bool:
        return bool(self.slots or self.slots_left)

    @property
    def mark(self) -> Mark | None:
        if self.mark_number is None or self.mark_token is None:
            return None
        return Mark(self.mark_number, self.mark_token)

    def __str__(self) -> str:
        if self.slots:
            return f"the catalog says that it holds {self.slots:,} slots"
        return f"the catalog says that it may be asked about {self.slots_left:,} slots that have left it"


async def read(database: Database) -> Identity | None:
    """None: it is no shard yet."""
    try:
        rows = await database.run(statements.READ_IDENTITY, {})
    except NO_SCHEMA:
        return None
    return Identity._make(rows[0]) if rows else None


async def examine(database: Database, catalog: Database | None, *, cluster: str) -> bool:
    """Whether it is this shard's database; False: it may become that, for nothing is lost with another. `catalog`:
    None while there is none. Raises Misconfigured if it will not do, LostHistory if it was this shard's and has gone
    back in time."""
    found = await read(database)
    await schema.refuse_encoding(database)
    record = Record() if catalog is None else await _read_record(catalog, database.name)
    ours = (cluster, database.name)
    if found is not None and record.made and found == (*ours, record.id):
        await history.refuse_lost(database, record.mark)
        return True
    if found is not None and found[:2] == ours:
        # Before it is given slots, its id is in the catalog.
        free = not (await database.run(statements.COUNT_OWNED_SLOTS, {}))[0][0]
        if not free and catalog is None:
            raise Misconfigured(
                f"the catalog's database is empty, but shard {database.name!r} has slots of a catalog elsewhere: name "
                "it by [catalog] dsn in the cluster file, or put the first [[shard]] back"
            )
    else:
        free = found is None
    if not free or (record.made and record.needed):
        raise _misfit(database, cluster, found, record)
    return False


async def admit(database: Database, catalog: Database, *, cluster: str) -> Identity | None:
    """Makes it this shard's database, unless it is already, and brings its schema up to this release. Answers what it
    is. Safe to call from many processes at once, and again after a crash. Raises Misconfigured, ShardUnavailable."""
    is_it = await examine(database, catalog, cluster=cluster)
    await schema.migrate(database, cluster=cluster)
    found = await read(database)
    if not is_it and found is not None:
        async with catalog.transaction() as connection:
            await connection.execute(statements.LOCK_CATALOG)
            await connection.execute(statements.RECORD_SHARD, {"shard": found.shard, "id": found.id})
        # Another may have been first, with another database.
        await examine(database, catalog, cluster=cluster)
    database.identity = found
    return found


async def place(database: Database) -> tuple[int, Micros]:
    """The same for two DSNs that lead to one database."""
    rows = await database.run(statements.FIND_PLACE, {})
    oid, server_since = rows[0]
    return oid, server_since


async def _read_record(catalog: Database, shard: ShardName) -> Record:
    try:
        rows = await catalog.run(statements.READ_SHARD, {"shard": shard})
    except psycopg.errors.UndefinedTable as error:
        raise Misconfigured("the catalog's schema is an earlier release's: run `windrow migrate`") from error
    return Record._make(rows[0])


def _misfit(database: Database, cluster: str, found: Identity | None, record: Record) -> Misconfigured:
    shard = database.name
    if found is None:
        whose = "no shard"
    elif found[:2] == (cluster, shard):
        whose = "another shard of these very names"
    else:
        whose = f"shard {found.shard!r} of cluster {found.cluster!r}"
    if record.needed:
        needed = f"; {record}"
        advice = 'restore this shard\'s backup (docs/operations.md, "A database that is refused")'
    else:
        needed, advice = "", "name an empty database"
    return Misconfigured(
        f"shard {shard!r} of cluster {cluster!r}: its DSN leads to the database of {whose} ({database.address})"
        f"{needed}; correct the dsn or the names in the cluster file, or {advice}"
    )
