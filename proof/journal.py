"""A journal of slots, which the databases write: triggers record every change of the catalog's placement and of each
shard's owned slots, in the same transaction. So no change is missed, and none is recorded that did not happen.

Times in the databases are those of the wall clock, which all servers of a machine share. They are converted to the
monotonic clock here.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

from proof.checker.evidence import Owned, Placed
from proof.postgres import Shard, ask

_PLACED, _OWNED = "writes, reads, epoch", "state, epoch, chunk, arriving"


def install(catalog: Shard, shards: Iterable[Shard]) -> None:
    """Call this once their tables exist. The journal begins with their content at that time."""
    for shard in shards:
        ask(shard.direct_dsn, "CREATE SCHEMA chaos")
        ask(shard.direct_dsn, _noting("owned_slot", _OWNED))
    ask(catalog.direct_dsn, _noting("placement", _PLACED))


def read_placed(catalog: Shard) -> list[Placed]:
    """In order."""
    ahead_s = time.time() - time.monotonic()
    return [
        Placed(at_s=at_s - ahead_s, slots=slots, writes=tuple(writes), reads=tuple(reads), epoch=epoch)
        for at_s, slots, writes, reads, epoch in ask(catalog.direct_dsn, _read("placement", _PLACED))
    ]


def read_owned(shards: Iterable[Shard]) -> list[Owned]:
    """Returns the slots that each shard owns, in the order of the shards."""
    return [now for shard in shards for now in owned_in(shard.direct_dsn, shard.name)]


def owned_in(dsn: str, shard: str) -> list[Owned]:
    """Returns the journal of one database of a shard, in order."""
    ahead_s = time.time() - time.monotonic()
    return [
        Owned(shard=shard, at_s=at_s - ahead_s, slots=slots, state=state, epoch=epoch, chunk=chunk, arriving=arriving)
        for at_s, slots, state, epoch, chunk, arriving in ask(dsn, _read("owned_slot", _OWNED))
    ]


def read_pins(catalog: Shard) -> dict[str, int]:
    """The slots of orgs that have one of their own."""
    return dict(ask(catalog.direct_dsn, "SELECT org, slot FROM windrow.pin"))


def _read(table: str, columns: str) -> str:
    return f"SELECT extract(epoch FROM at)::float8, slots, {columns} FROM chaos.{table} ORDER BY number"


def _noting(table: str, columns: str) -> str:
    """One row for all slots that a statement changes in the same way. One transaction, in which nobody else writes."""
    note = f"""
    INSERT INTO chaos.{table} (slots, {columns})
    SELECT array_agg(slot ORDER BY slot), {columns} FROM %s GROUP BY {columns}
    """
    return f"""
    DO $do$ BEGIN
        CREATE TABLE chaos.{table} AS SELECT array[slot] AS slots, {columns} FROM windrow.{table} LIMIT 0;
        ALTER TABLE chaos.{table}
            ADD at timestamptz DEFAULT clock_timestamp(), ADD number bigint GENERATED ALWAYS AS IDENTITY;
        CREATE FUNCTION chaos.note_{table}() RETURNS trigger LANGUAGE plpgsql AS $note$ BEGIN
            {note % "news"};
            RETURN NULL;
        END $note$;
        CREATE TRIGGER note_insert AFTER INSERT ON windrow.{table} REFERENCING NEW TABLE AS news
            FOR EACH STATEMENT EXECUTE FUNCTION chaos.note_{table}();
        CREATE TRIGGER note_update AFTER UPDATE ON windrow.{table} REFERENCING NEW TABLE AS news
            FOR EACH STATEMENT EXECUTE FUNCTION chaos.note_{table}();
        {note % f"windrow.{table}"};
    END $do$
    """
