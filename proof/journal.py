"""A journal that the databases write. Triggers record each row that is inserted or updated in the catalog's placement,
in a shard's owned slots and in the runs of its schedules, and each release of a node of a workflow. A record is part of
the transaction that makes the change, so the journal has exactly the changes that were committed.

Times in the databases are of the wall clock, which all servers of a machine share. This module converts them to the
monotonic clock, except the times of runs and releases.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

from proof.checker.evidence import Owned, Placed, Release, Run
from proof.postgres import Shard, ask

_NOTE_RUNS = """
DO $do$ BEGIN
    CREATE TABLE chaos.run (LIKE windrow.schedule_run);
    CREATE FUNCTION chaos.note_run() RETURNS trigger LANGUAGE plpgsql AS $note$ BEGIN
        INSERT INTO chaos.run SELECT * FROM news;
        RETURN NULL;
    END $note$;
    CREATE TRIGGER note_insert AFTER INSERT ON windrow.schedule_run REFERENCING NEW TABLE AS news
        FOR EACH STATEMENT EXECUTE FUNCTION chaos.note_run();
    CREATE TRIGGER note_update AFTER UPDATE ON windrow.schedule_run REFERENCING NEW TABLE AS news
        FOR EACH STATEMENT EXECUTE FUNCTION chaos.note_run();
END $do$
"""
_RUNS = """
SELECT DISTINCT
    schedule_id::text, (extract(epoch FROM at) * 1000000)::bigint, (extract(epoch FROM through) * 1000000)::bigint,
    outcome, skipped_for, job_id::text, (extract(epoch FROM decided_at) * 1000000)::bigint, request::text, cause
FROM chaos.run
"""
_NOTE_RELEASES = """
DO $do$ BEGIN
    CREATE TABLE chaos.release (workflow uuid, job_id uuid, at timestamptz, began_at timestamptz);
    CREATE FUNCTION chaos.note_release() RETURNS trigger LANGUAGE plpgsql AS $note$ BEGIN
        INSERT INTO chaos.release
        SELECT w.id, n.job_id, clock_timestamp(), now()
        FROM news n
        JOIN olds o ON o.flow = n.flow AND o.node = n.node AND o.state <> 'released'
        JOIN windrow.workflow w ON w.flow = n.flow
        WHERE n.state = 'released';
        RETURN NULL;
    END $note$;
    CREATE TRIGGER note_release AFTER UPDATE ON windrow.workflow_node REFERENCING OLD TABLE AS olds NEW TABLE AS news
        FOR EACH STATEMENT EXECUTE FUNCTION chaos.note_release();
END $do$
"""
_RELEASES = """
SELECT
    workflow::text, job_id::text, (extract(epoch FROM at) * 1000000)::bigint,
    (extract(epoch FROM began_at) * 1000000)::bigint
FROM chaos.release
"""
_PLACED, _OWNED = "writes, reads, epoch", "state, epoch, chunk, arriving"


def install(catalog: Shard, shards: Iterable[Shard]) -> None:
    """Installs the journals. The tables of the catalog and of the shards must exist. A journal of slots begins with the
    present content of its table."""
    for shard in shards:
        ask(shard.direct_dsn, "CREATE SCHEMA chaos")
        ask(shard.direct_dsn, _noting("owned_slot", _OWNED))
        ask(shard.direct_dsn, _NOTE_RUNS)
        ask(shard.direct_dsn, _NOTE_RELEASES)
    ask(catalog.direct_dsn, _noting("placement", _PLACED))


def read_placed(catalog: Shard) -> list[Placed]:
    """Returns the journal of the catalog's placement, in order."""
    ahead_s = time.time() - time.monotonic()
    return [
        Placed(at_s=at_s - ahead_s, slots=slots, writes=tuple(writes), reads=tuple(reads), epoch=epoch)
        for at_s, slots, writes, reads, epoch in ask(catalog.direct_dsn, _read("placement", _PLACED))
    ]


def read_owned(shards: Iterable[Shard]) -> list[Owned]:
    """Returns the journals of the shards' owned slots, one shard after another, each in order."""
    return [now for shard in shards for now in owned_in(shard.direct_dsn, shard.name)]


def owned_in(dsn: str, shard: str) -> list[Owned]:
    """Returns the journal of owned slots in one database of a shard, in order."""
    ahead_s = time.time() - time.monotonic()
    return [
        Owned(shard=shard, at_s=at_s - ahead_s, slots=slots, state=state, epoch=epoch, chunk=chunk, arriving=arriving)
        for at_s, slots, state, epoch, chunk, arriving in ask(dsn, _read("owned_slot", _OWNED))
    ]


def read_runs(shards: Iterable[Shard]) -> frozenset[Run]:
    """Returns all runs of schedules that a shard has ever recorded."""
    return frozenset(Run._make(row) for shard in shards for row in ask(shard.direct_dsn, _RUNS))


def read_releases(shards: Iterable[Shard]) -> list[Release]:
    """Returns each release of a node of a workflow, on any shard."""
    return [Release._make(row) for shard in shards for row in ask(shard.direct_dsn, _RELEASES)]


def read_pins(catalog: Shard) -> dict[str, int]:
    """Returns, for each org that has its own slot, the number of this slot."""
    return dict(ask(catalog.direct_dsn, "SELECT org, slot FROM windrow.pin"))


def _read(table: str, columns: str) -> str:
    return f"SELECT extract(epoch FROM at)::float8, slots, {columns} FROM chaos.{table} ORDER BY number"


def _noting(table: str, columns: str) -> str:
    """Returns the statement that begins a journal of this table, in one transaction. CREATE TRIGGER locks the table, so
    nobody else writes to it until the transaction ends. The journal has one row for all slots that a statement changes
    in the same way."""
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
