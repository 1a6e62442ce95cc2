"""A shard makes its own schema, once, whoever comes first; and refuses a database that is not its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from shard import schema
from shard.books import Books
from shard.database import Database
from shard.errors import Misconfigured
from shard.partitions import make_ahead
from shard.store import Store
from shard.vocabulary import OrgId, ShardName
from tests.conftest import CLUSTER, SHARD
from tests.jobs import some_jobs
from tests.postgres import Server


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
        assert (await Books(databases[0]).versions())[1] == run[-1]
        # Yesterday, today and three days ahead, each once.
        rows = await databases[0].run(
            b"SELECT count(*) FROM pg_inherits WHERE inhparent = 'windrow.finished'::regclass", {}
        )
        assert rows == [(5,)]


async def test_migrating_again_runs_nothing(fresh_dsn: str) -> None:
    async with opened(fresh_dsn) as database:
        assert await schema.migrate(database, cluster=CLUSTER) == []
        assert await make_ahead(database) == 0


async def test_migrations_are_numbered_without_a_gap() -> None:
    numbers = [migration.number for migration in schema.migrations()]
    assert numbers == list(range(1, len(numbers) + 1))


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
            assert (await Books(database).versions())[1] == 9000


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
    """A role that may connect to the database, and owns nothing there."""
    with psycopg.connect(postgres.superuser_dsn, autocommit=True) as connection:
        connection.execute("DROP ROLE IF EXISTS stranger")
        connection.execute("CREATE ROLE stranger LOGIN PASSWORD 'stranger'")
    return make_conninfo(empty_dsn, user="stranger", password="stranger")


async def test_a_role_that_may_not_make_the_schema_is_told_what_to_do(stranger_dsn: str) -> None:
    async with opened(stranger_dsn) as database:
        with pytest.raises(Misconfigured) as caught:
            await schema.migrate(database, cluster=CLUSTER)
    message = str(caught.value)
    assert message.startswith("shard 's1': the role in its DSN may not make the schema: permission denied for database")
    assert message.endswith("make it the owner of the database, or run `windrow migrate` with a role that is")


async def let_in(empty_dsn: str) -> None:
    """Makes the schema, and lets the stranger use what is there."""
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
            "SELECT max(inhrelid::regclass::text) FROM pg_inherits WHERE inhparent = 'windrow.finished'::regclass"
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
