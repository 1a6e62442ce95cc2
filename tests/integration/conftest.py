"""Fixtures: databases that record the statements sent to them, two shards, and the workflows of an org."""

from __future__ import annotations

from collections.abc import AsyncGenerator

import pytest

from shard.postgres.pool import Database
from shard.queue.store import Store
from shard.vocabulary import OrgId
from tests.conftest import SHARD
from tests.pair import Pair, open_pair
from tests.recorder import Recorder
from tests.workflows import Flows


@pytest.fixture
async def fresh_recorder(fresh_dsn: str) -> AsyncGenerator[Recorder, None]:
    """Yields a recorder with its own database."""
    opened = Recorder(SHARD, fresh_dsn)
    await opened.open()
    yield opened
    await opened.close()


@pytest.fixture
async def recorder(module_dsn: str) -> AsyncGenerator[Recorder, None]:
    opened = Recorder(SHARD, module_dsn)
    await opened.open()
    yield opened
    await opened.close()


@pytest.fixture
async def flows(database: Database, store: Store, org: OrgId) -> AsyncGenerator[Flows, None]:
    """Yields the workflows of the org. After the test, the check of the workflows must find nothing wrong."""
    opened = Flows(database, org, store=store)
    yield opened
    await opened.check()


@pytest.fixture
async def two(module_dsn: str, org: OrgId) -> AsyncGenerator[list[Flows], None]:
    """Yields the workflows of the org twice, each on the connections of another router."""
    # The lock wait is long, so that no call is refused because another call is slow.
    databases = [Database(SHARD, module_dsn, connections=4, short_lock_wait_s=30.0) for _ in range(2)]
    for database in databases:
        await database.open()
    yield [Flows(database, org) for database in databases]
    for database in databases:
        await database.close()


@pytest.fixture
async def pair(fresh_dsn: str, spare_dsn: str) -> AsyncGenerator[Pair, None]:
    async with open_pair(fresh_dsn, spare_dsn) as opened:
        yield opened
