"""The first process that connects to a shard creates the schema, and no other process does. A database that belongs to
something else is refused and not changed."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import re
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from shard.admin.queue_admin import QueueAdmin
from shard.errors import Misconfigured
from shard.placement import catalog, identity
from shard.placement.slots import SLOTS
from shard.postgres import partitions, schema
from shard.postgres.partitions import make_ahead
from shard.postgres.pool import Database
from shard.postgres.schema import Migration
from shard.queue.store import Store
from shard.vocabulary import OrgId, ShardName, Slot
from tests.conftest import CLUSTER, SHARD
from tests.jobs import some_jobs
from tests.postgres import EMPTY, Server

S2 = ShardName("s2")
_numbers = itertools.count(1)
_FUNCTIONS = b"""
SELECT p.oid::regprocedure::text, pg_get_functiondef(p.oid)
FROM pg_proc p
WHERE p.pronamespace = 'windrow'::regnamespace
"""


@asynccontextmanager
async def opened(dsn: str, *, name: str = SHARD) -> AsyncGenerator[Database, None]:
    database = Database(ShardName(name), dsn, connections=1)
    await database.open()
    try:
        yield database
    finally:
        await database.close()


async def test_of_many_that_migrate_at_once_each_migration_is_run_by_one(empty_dsn: str) -> None:
    async with AsyncExitStack() as stack:
        databases = [await stack.enter_async_context(opened(empty_dsn)) for _ in range(4)]
        done = await asyncio.gather(*(schema.migrate(database, cluster=CLUSTER) for database in databases))
        run = sorted(migration.number for part in done for migration in part)
        assert run == [migration.number for migration in schema.migrations()]
        assert (await QueueAdmin(databases[0]).versions())[1] == run[-1]
        # There are three partitions: for yesterday, today and tomorrow.
        rows = await databases[0].run(
            b"SELECT count(*) FROM pg_inherits WHERE inhparent = 'windrow.finished_30'::regclass", {}
        )
        assert rows == [(3,)]


async def test_migrating_again_runs_nothing(fresh_dsn: str) -> None:
    async with opened(fresh_dsn) as database:
        assert await schema.migrate(database, cluster=CLUSTER) == []
        assert await make_ahead(database) == 0


async def test_processes_that_start_do_not_wait_for_locks_when_nothing_is_to_be_made(spare_dsn: str) -> None:
    """Hundreds of processes may start at the same moment. If they took locks, each process would delay all others."""
    async with opened(spare_dsn) as database:
        await schema.migrate(database, cluster=CLUSTER)
        await catalog.found(database, cluster=CLUSTER, weights={SHARD: 1.0})
    with psycopg.connect(spare_dsn) as another:
        for lock in (schema._LOCK, partitions.LOCK, catalog._LOCK):
            another.execute("SELECT pg_advisory_xact_lock(%s)", [lock])
        async with opened(spare_dsn) as database:
            assert await schema.migrate(database, cluster=CLUSTER) == []
            assert len((await catalog.found(database, cluster=CLUSTER, weights={SHARD: 1.0})).slots) == SLOTS


async def test_migrations_are_numbered_without_a_gap() -> None:
    numbers = [migration.number for migration in schema.migrations()]
    assert numbers == list(range(1, len(numbers) + 1))


async def test_each_function_of_the_database_is_that_of_its_file(fresh_dsn: str) -> None:
    with psycopg.connect(fresh_dsn) as connection:
        before: dict[str, str] = dict(connection.execute(_FUNCTIONS).fetchall())
        for path in schema._FUNCTIONS.glob("*.sql"):
            names = set(re.findall(r"^CREATE OR REPLACE FUNCTION windrow\.(\w+)", path.read_text(), re.MULTILINE))
            assert names == {path.stem}
            connection.execute(path.read_bytes(), prepare=False)
        assert dict(connection.execute(_FUNCTIONS).fetchall()) == before
    files = {path.stem for path in schema._FUNCTIONS.glob("*.sql")}
    assert {name.partition("(")[0].removeprefix("windrow.") for name in before} == files


async def test_a_new_database_accepts_texts_of_functions_that_name_what_later_migrations_add(
    fresh_dsn: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "later.sql").write_text(
        "CREATE OR REPLACE FUNCTION windrow.later() RETURNS integer LANGUAGE sql AS 'SELECT a FROM windrow.added';\n"
    )
    ours = schema.migrations()
    installs = Migration(number=9000, name="first", script=b"-- INSTALL functions/later.sql " + b"0" * 64)
    adds = Migration(number=9001, name="second", script=b"CREATE TABLE windrow.added AS SELECT 7 AS a")
    monkeypatch.setattr(schema, "migrations", lambda: [*ours, installs, adds])
    monkeypatch.setattr(schema, "_FUNCTIONS", tmp_path)
    async with opened(fresh_dsn) as database:
        assert await schema.migrate(database, cluster=CLUSTER) == [installs, adds]
        assert await database.run(b"SELECT windrow.later()", {}) == [(7,)]


async def test_a_function_stays_as_it_is_until_the_migration_that_installs_its_current_text(
    fresh_dsn: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Calls continue between two migrations. So the migration that adds a column also installs the function text that
    needs the column."""
    text = b"CREATE OR REPLACE FUNCTION windrow.told() RETURNS text LANGUAGE sql AS $$ SELECT 'new' $$;\n"
    (tmp_path / "told.sql").write_bytes(text)
    ours = schema.migrations()
    before = b"CREATE FUNCTION windrow.told() RETURNS text LANGUAGE sql AS $$ SELECT 'old' $$"
    digest = hashlib.sha256(text).hexdigest().encode()
    later = [
        Migration(number=9000, name="makes", script=before),
        Migration(number=9001, name="outdated", script=b"-- INSTALL functions/told.sql " + b"0" * 64),
        Migration(number=9002, name="current", script=b"-- INSTALL functions/told.sql " + digest),
    ]
    monkeypatch.setattr(schema, "_FUNCTIONS", tmp_path)
    async with opened(fresh_dsn) as database:
        for count, told in ((1, "old"), (2, "old"), (3, "new")):
            monkeypatch.setattr(schema, "migrations", lambda count=count: [*ours, *later[:count]])
            assert await schema.migrate(database, cluster=CLUSTER) == [later[count - 1]]
            assert await database.run(b"SELECT windrow.told()", {}) == [(told,)]


async def test_a_migration_may_take_longer_than_a_call(fresh_dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = schema.migrations()
    asks = Migration(
        number=9000,
        name="asks",
        script=b"CREATE TABLE windrow.limits AS SELECT current_setting('statement_timeout') AS s",
    )
    monkeypatch.setattr(schema, "migrations", lambda: [*ours, asks])
    async with opened(fresh_dsn) as database:
        assert await schema.migrate(database, cluster=CLUSTER) == [asks]
        assert await database.run(b"SELECT s FROM windrow.limits", {}) == [("0",)]
        assert await database.run(b"SELECT current_setting('statement_timeout')", {}) == [("1min",)]


async def test_a_migration_that_was_changed_after_it_ran_is_refused(fresh_dsn: str) -> None:
    with psycopg.connect(fresh_dsn) as connection:
        connection.execute("UPDATE windrow.migration SET checksum = 'another' WHERE number = 1")
    async with opened(fresh_dsn) as database:
        with pytest.raises(Misconfigured, match=r"migration 0001 \(queue\) was changed after it had been run"):
            await schema.migrate(database, cluster=CLUSTER)


@pytest.mark.parametrize("breaking", [True, False])
async def test_a_schema_of_a_newer_release_is_refused_only_if_it_breaks_this_one(
    fresh_dsn: str, breaking: bool
) -> None:
    with psycopg.connect(fresh_dsn) as connection:
        connection.execute(
            "INSERT INTO windrow.migration (number, name, checksum, breaking) VALUES (9000, 'later', 'x', %s)",
            [breaking],
        )
    async with opened(fresh_dsn) as database:
        if breaking:
            with pytest.raises(Misconfigured, match="has migration 9000 of a newer release"):
                await schema.migrate(database, cluster=CLUSTER)
        else:
            assert await schema.migrate(database, cluster=CLUSTER) == []
            assert (await QueueAdmin(database).versions())[1] == 9000


@pytest.mark.parametrize(("shard", "cluster"), [("s2", CLUSTER), (SHARD, "another")])
async def test_a_dsn_that_leads_to_another_shards_database_is_refused(fresh_dsn: str, shard: str, cluster: str) -> None:
    async with opened(fresh_dsn, name=shard) as database:
        with pytest.raises(Misconfigured) as caught:
            await schema.migrate(database, cluster=cluster)
    assert str(caught.value) == (
        f"shard {shard!r} of cluster {cluster!r}: its DSN leads to the database of shard 's1' of cluster 'tests'; "
        "correct the dsn or the names in the cluster file"
    )


@pytest.fixture
def stranger_dsn(postgres: Server, empty_dsn: str) -> str:
    """Creates a role that may connect to the database and owns nothing in it. Returns a DSN with this role."""
    with psycopg.connect(postgres.superuser_dsn, autocommit=True) as connection:
        connection.execute("DROP ROLE IF EXISTS stranger")
        connection.execute("CREATE ROLE stranger LOGIN PASSWORD 'stranger'")
    return make_conninfo(empty_dsn, user="stranger", password="stranger")


async def test_a_role_that_may_not_make_the_schema_is_told_what_to_do(stranger_dsn: str) -> None:
    async with opened(stranger_dsn) as database:
        with pytest.raises(Misconfigured) as caught:
            await schema.migrate(database, cluster=CLUSTER)
    assert str(caught.value) == (
        "shard 's1': the role in its DSN may not create the schema windrow; make it the owner of the database, or a "
        "member of the role that is"
    )


async def test_a_role_that_lacks_a_right_is_told_so_by_each_statement(stranger_dsn: str, empty_dsn: str) -> None:
    async with opened(empty_dsn) as owner:
        await schema.migrate(owner, cluster=CLUSTER)
    async with opened(stranger_dsn) as database:
        with pytest.raises(Misconfigured, match="lacks a right: permission denied for schema windrow"):
            await database.run(b"SELECT FROM windrow.job", {})
        with pytest.raises(Misconfigured, match="lacks a right: permission denied for schema windrow"):
            await schema.migrate(database, cluster=CLUSTER)


async def let_in(empty_dsn: str) -> None:
    """Creates the schema, and grants the stranger access to it."""
    async with opened(empty_dsn) as owner:
        await schema.migrate(owner, cluster=CLUSTER)
    with psycopg.connect(empty_dsn) as connection:
        connection.execute("GRANT USAGE ON SCHEMA windrow TO stranger")
        connection.execute("GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA windrow TO stranger")


async def test_a_role_that_may_only_use_the_schema_can_work_on_it(
    stranger_dsn: str, empty_dsn: str, org: OrgId
) -> None:
    await let_in(empty_dsn)
    with psycopg.connect(empty_dsn) as connection:
        connection.execute("INSERT INTO windrow.owned_slot SELECT n, 'owned', 1 FROM generate_series(0, 16383) n")
    async with opened(stranger_dsn) as database:
        assert await schema.migrate(database, cluster=CLUSTER) == []
        assert await Store(database).enqueue(some_jobs(org, 1)) == {}


async def test_a_role_that_cannot_make_the_days_partition_is_told_what_to_do(stranger_dsn: str, empty_dsn: str) -> None:
    await let_in(empty_dsn)
    with psycopg.connect(empty_dsn) as connection:
        rows = connection.execute(
            "SELECT max(inhrelid::regclass::text) FROM pg_inherits WHERE inhparent = 'windrow.finished_30'::regclass"
        ).fetchall()
        connection.execute(f"DROP TABLE {rows[0][0]}".encode())
    async with opened(stranger_dsn) as database:
        with pytest.raises(Misconfigured, match="the role in its DSN"):
            await schema.migrate(database, cluster=CLUSTER)


@pytest.mark.parametrize("encoding", ["SQL_ASCII", "LATIN1"])
async def test_a_database_of_another_encoding_is_refused_and_left_empty(postgres: Server, encoding: str) -> None:
    name = f"encoded_{encoding.lower()}"
    with psycopg.connect(postgres.superuser_dsn, autocommit=True) as admin:
        admin.execute(f"CREATE DATABASE {name} TEMPLATE template0 ENCODING '{encoding}' LOCALE 'C'".encode())
    try:
        async with opened(postgres.superuser_dsn_of(name)) as database:
            with pytest.raises(Misconfigured, match=rf"encoding is {encoding}.*createdb -T template0 -E UTF8"):
                await schema.migrate(database, cluster=CLUSTER)
            assert await database.run(b"SELECT to_regnamespace('windrow') IS NULL", {}) == [(True,)]
    finally:
        postgres.drop(name)


# ── Which database is a shard's ──────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def database_of(postgres: Server) -> Iterator[Callable[..., str]]:
    """Returns a function that creates an empty database, or a copy of another database, and returns its DSN."""
    made: list[str] = []

    def make(like: str | None = None) -> str:
        made.append(f"identity_{next(_numbers)}")
        template = EMPTY if like is None else str(conninfo_to_dict(like)["dbname"])
        return postgres.create(made[-1], template=template)

    yield make
    for name in made:
        postgres.drop(name)


async def is_empty(dsn: str) -> bool:
    async with await psycopg.AsyncConnection.connect(dsn) as connection:
        cursor = await connection.execute("SELECT to_regnamespace('windrow') IS NULL")
        return await cursor.fetchone() == (True,)


async def admit(dsn: str, at: Database) -> identity.Identity | None:
    """Admits the database as shard s2 of the cluster whose catalog is in the database `at`."""
    async with opened(dsn, name=S2) as database:
        return await identity.admit(database, at, cluster=CLUSTER)


async def give_slots(at: Database, slots: int) -> None:
    known = await catalog.read(at)
    move = await catalog.begin_move(at, known, map(Slot, range(slots)), target=S2)
    assert move is not None
    await catalog.switch_writer(at, move)
    await catalog.finish_move(at, move, move.slots)


async def take_slots_away(at: Database) -> None:
    known = await catalog.read(at)
    move = await catalog.begin_move(at, known, known.slots_written_by(S2), target=SHARD)
    assert move is not None
    await catalog.switch_writer(at, move)
    await catalog.finish_move(at, move, move.slots)


async def test_an_empty_database_is_made_a_shards_only_while_nothing_is_lost_with_the_one_before(
    fresh_database: Database, database_of: Callable[..., str]
) -> None:
    first, second, third = database_of(), database_of(), database_of()
    await admit(first, fresh_database)
    # The first database holds no data, so an operator may correct a typing error in the DSN.
    assert await admit(second, fresh_database)
    await give_slots(fresh_database, 1200)
    with pytest.raises(Misconfigured) as caught:
        await admit(third, fresh_database)
    where = conninfo_to_dict(third)
    assert str(caught.value) == (
        "shard 's2' of cluster 'tests': its DSN leads to the database of no shard (database "
        f"'{where['dbname']}' at {where['host']}:{where['port']}); the catalog says that it holds 1,200 slots; correct "
        "the dsn or the names in the cluster file, or restore this shard's backup (docs/operations.md, "
        '"A database that is refused")'
    )
    assert str(where["password"]) not in str(caught.value)
    with pytest.raises(Misconfigured, match=r"database of another shard of these very names .* holds 1,200 slots"):
        await admit(first, fresh_database)
    await take_slots_away(fresh_database)
    with pytest.raises(Misconfigured, match="may be asked about 1,200 slots that have left it"):
        await admit(third, fresh_database)
    assert await admit(second, fresh_database)
    assert await catalog.forget_owner(fresh_database, S2, force=True) == 1200
    assert await is_empty(third)
    assert await admit(third, fresh_database)


async def test_a_copy_of_a_shards_database_will_do(fresh_database: Database, database_of: Callable[..., str]) -> None:
    before = await admit(original := database_of(), fresh_database)
    await give_slots(fresh_database, 1)
    assert await admit(database_of(original), fresh_database) == before


async def test_a_shard_of_another_cluster_of_the_same_name_is_refused(
    fresh_database: Database, database_of: Callable[..., str]
) -> None:
    theirs = database_of()
    async with opened(theirs, name=S2) as other:
        await schema.migrate(other, cluster=None)
        known = await catalog.found(other, cluster=CLUSTER, weights={S2: 1})
        await identity.admit(other, other, cluster=CLUSTER)
        assert await catalog.grant_slots(other, known) == SLOTS

    async def is_refused() -> None:
        with pytest.raises(Misconfigured, match="database of another shard of these very names"):
            await admit(theirs, fresh_database)

    await is_refused()
    await admit(database_of(), fresh_database)
    await is_refused()
    await give_slots(fresh_database, 1)
    await is_refused()


async def test_another_process_finishes_admitting_a_shard_that_the_catalog_does_not_know_yet(
    fresh_database: Database, database_of: Callable[..., str]
) -> None:
    await give_slots(fresh_database, 1)
    dsn = database_of()
    async with opened(dsn, name=S2) as database:
        await schema.migrate(database, cluster=CLUSTER)
    assert await admit(dsn, fresh_database)
    with pytest.raises(Misconfigured, match="no shard"):
        await admit(database_of(), fresh_database)


async def test_of_two_databases_that_are_made_a_shards_at_once_one_is_refused(
    fresh_database: Database, database_of: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    await give_slots(fresh_database, 1)
    both, migrate, made = asyncio.Barrier(2), schema.migrate, [database_of(), database_of()]

    async def migrate_together(database: Database, *, cluster: str | None) -> list[schema.Migration]:
        await both.wait()
        return await migrate(database, cluster=cluster)

    monkeypatch.setattr(schema, "migrate", migrate_together)
    done = await asyncio.gather(*(admit(dsn, fresh_database) for dsn in made), return_exceptions=True)
    monkeypatch.undo()
    assert sorted(isinstance(one, Misconfigured) for one in done) == [False, True]
    right = made[isinstance(done[0], Misconfigured)]
    assert await admit(right, fresh_database) in done
