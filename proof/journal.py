"""What becomes of slots, written down by the databases themselves: triggers note every change of the catalog's
placement, and of what each shard knows that it owns, in the transaction that makes it. So nothing is missed, and
nothing is noted that did not happen.

Times are of the databases' wall clock, which is one for all servers of a machine; here they become those of the
monotonic clock.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

from proof.checker.evidence import Owned, Placed
from proof.postgres import Shard, ask

_PLACED, _OWNED = "writes, reads, epoch", "state, epoch, chunk"


def install(catalog: Shard, shards: Iterable[Shard]) -> None:
    """Once their tables are there. What they say by then is the beginning."""
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
    """What one database of a shard has noted, in order."""
    ahead_s = time.time() - time.monotonic()
    return [
        Owned(shard=shard, at_s=at_s - ahead_s, slots=slots, state=state, epoch=epoch, chunk=chunk)
        for at_s, slots, state, epoch, chunk in ask(dsn, _read("owned_slot", _OWNED))
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
