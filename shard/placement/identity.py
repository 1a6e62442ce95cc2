"""Finds out which shard a database belongs to, and whether the catalog agrees
(docs/decisions/0023-a-shard-is-its-database.md). Never changes a database that cannot be used."""

from __future__ import annotations

from typing import NamedTuple

from shard.errors import Misconfigured
from shard.placement import marks, statements
from shard.postgres import schema
from shard.postgres import statements as postgres_statements
from shard.postgres.pool import NO_SCHEMA, Database, Mark
from shard.vocabulary import Micros, ShardName


class Identity(NamedTuple):
    """Which shard of which cluster a database says it is."""

    cluster: str
    shard: ShardName
    id: str


class Record(NamedTuple):
    """What the catalog knows about a shard, in the order of read_shard.sql's columns."""

    # The id of the shard's database. None: the catalog has recorded no database for the shard.
    id: str | None = None
    # The number of slots that the shard holds, and the number of slots that have left the shard but about which routers
    # may still ask it.
    slots: int = 0
    slots_left: int = 0
    # The mark that the catalog confirmed last. None: there is none yet.
    mark_number: int | None = None
    mark_token: str | None = None

    @property
    def needed(self) -> bool:
        """Whether the shard needs exactly this database. If another database took its place, the jobs of slots would be
        lost."""
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
    """Returns which shard the database says it is, or None if it does not belong to a shard yet."""
    try:
        rows = await database.run(postgres_statements.READ_IDENTITY, {})
    except NO_SCHEMA:
        return None
    return Identity._make(rows[0]) if rows else None


async def examine(database: Database, catalog: Database | None, *, cluster: str) -> bool:
    """Returns True if this database is already the shard's database. Returns False if it may become the shard's
    database, because the shard has no slots that would be lost. `catalog` is None while there is no catalog. Raises
    Misconfigured if the database cannot be used. Raises LostHistory if it is the shard's database but lacks history
    that the catalog has confirmed."""
    found = await read(database)
    await schema.refuse_unfit(database)
    record = Record() if catalog is None else await _read_record(catalog, database.name)
    ours = (cluster, database.name)
    if found is not None and found == (*ours, record.id):
        await marks.refuse_lost(database, record.mark)
        return True
    if found is not None and found[:2] == ours:
        # The catalog records a database's id before the shard gets slots. So a database that is not recorded and has no
        # slots may become the shard's database.
        free = not (await database.run(statements.COUNT_OWNED_SLOTS, {}))[0][0]
        if not free and catalog is None:
            raise Misconfigured(
                f"the catalog's database is empty, but shard {database.name!r} has slots of a catalog elsewhere: name "
                "it by [catalog] dsn in the cluster file, or put the first [[shard]] back"
            )
    else:
        free = found is None
    if not free or (record.id is not None and record.needed):
        raise _misfit(database, cluster, found, record)
    return False


async def admit(database: Database, catalog: Database, *, cluster: str) -> Identity | None:
    """Makes this database the shard's database, unless it is already, and migrates its schema to this release. Returns
    its identity. It is safe to call this from many processes at the same time, and again after a crash. Raises
    Misconfigured, ShardUnavailable."""
    is_it = await examine(database, catalog, cluster=cluster)
    await schema.migrate(database, cluster=cluster)
    found = await read(database)
    if not is_it and found is not None:
        async with catalog.transaction() as connection:
            await connection.execute(statements.LOCK_CATALOG)
            await connection.execute(statements.RECORD_SHARD, {"shard": found.shard, "id": found.id})
        # Another process may have recorded another database first.
        await examine(database, catalog, cluster=cluster)
    database.identity = found
    return found


async def locate(database: Database) -> tuple[int, Micros]:
    """Returns a pair that is equal for two DSNs if and only if they lead to the same database."""
    rows = await database.run(statements.LOCATE_DATABASE, {})
    oid, server_since = rows[0]
    return oid, server_since


async def _read_record(catalog: Database, shard: ShardName) -> Record:
    rows = await catalog.run(statements.READ_SHARD, {"shard": shard})
    return Record._make(rows[0])


def _misfit(database: Database, cluster: str, found: Identity | None, record: Record) -> Misconfigured:
    shard = database.name
    if found is None:
        owner = "no shard"
    elif found[:2] == (cluster, shard):
        owner = "another shard of these very names"
    else:
        owner = f"shard {found.shard!r} of cluster {found.cluster!r}"
    if record.needed:
        needed = f"; {record}"
        advice = 'restore this shard\'s backup (docs/operations.md, "A database that is refused")'
    else:
        needed, advice = "", "name an empty database"
    return Misconfigured(
        f"shard {shard!r} of cluster {cluster!r}: its DSN leads to the database of {owner} ({database.address})"
        f"{needed}; correct the dsn or the names in the cluster file, or {advice}"
    )
