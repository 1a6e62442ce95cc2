"""What every test may ask for: one server for the session, a migrated database for each module, an org for each test.

Tests of one module share its database and differ by org; one that breaks or counts a whole database asks for
`fresh_dsn`, a database of its own.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import AsyncGenerator, Generator, Iterator

import pytest
from hypothesis import HealthCheck, settings

from shard import catalog, identity, schema
from shard.books import Books
from shard.database import Database
from shard.store import Store
from shard.vocabulary import OrgId, ShardName
from tests.postgres import Server, open_server

# Before gRPC is imported: as root, servers are started by a fork, and gRPC's fork handlers may crash the child.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

SHARD = ShardName("s1")
CLUSTER = "tests"
_TEMPLATE = "migrated"
_numbers = itertools.count(1)

# HYPOTHESIS_PROFILE=long searches for minutes. An example talks to a database: its time says nothing.
_QUIET = (HealthCheck.too_slow, HealthCheck.data_too_large)
settings.register_profile("default", deadline=None, print_blob=True, suppress_health_check=_QUIET)
settings.register_profile("long", settings.get_profile("default"), max_examples=1500)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    # It goes to another process where tests run side by side, which half a character in a log would not survive.
    report.sections = [(name, text.encode(errors="backslashreplace").decode()) for name, text in report.sections]
    return report


@pytest.fixture(scope="session")
def postgres() -> Iterator[Server]:
    with open_server() as server:
        yield server


@pytest.fixture(scope="session")
def template(postgres: Server) -> str:
    """The name of a database that is migrated and owns every slot, to be copied and never written to."""
    dsn = postgres.create(_TEMPLATE)

    async def migrate() -> None:
        database = Database(SHARD, dsn, connections=1)
        await database.open()
        await schema.migrate(database, cluster=None)
        known = await catalog.found(database, cluster=CLUSTER, weights={SHARD: 1})
        await identity.admit(database, database, cluster=CLUSTER)
        await catalog.grant(database, known)
        await database.close()

    asyncio.run(migrate())
    return _TEMPLATE


def _fresh(postgres: Server, template: str) -> Generator[str, None, None]:
    name = f"shard_{next(_numbers)}"
    yield postgres.create(name, template=template)
    postgres.drop(name)


@pytest.fixture(scope="module")
def module_dsn(postgres: Server, template: str) -> Generator[str, None, None]:
    """A migrated database for the tests of one module."""
    yield from _fresh(postgres, template)


@pytest.fixture
def fresh_dsn(postgres: Server, template: str) -> Generator[str, None, None]:
    """A migrated database for one test alone."""
    yield from _fresh(postgres, template)


@pytest.fixture
def empty_dsn(postgres: Server) -> Generator[str, None, None]:
    """A database that nobody has migrated yet."""
    yield from _fresh(postgres, "template1")


@pytest.fixture
def org() -> OrgId:
    """A tenant that no other test has."""
    return OrgId(f"org-{next(_numbers)}")


@pytest.fixture
def other_org() -> OrgId:
    return OrgId(f"org-{next(_numbers)}")


@pytest.fixture
async def database(module_dsn: str) -> AsyncGenerator[Database, None]:
    opened = Database(SHARD, module_dsn)
    await opened.open()
    yield opened
    await opened.close()


@pytest.fixture
async def fresh_database(fresh_dsn: str) -> AsyncGenerator[Database, None]:
    opened = Database(SHARD, fresh_dsn)
    await opened.open()
    yield opened
    await opened.close()


@pytest.fixture
def store(database: Database) -> Store:
    return Store(database)


@pytest.fixture
async def books(module_dsn: str) -> AsyncGenerator[Books, None]:
    opened = Database(SHARD, module_dsn, connections=1, for_books=True)
    await opened.open()
    yield Books(opened)
    await opened.close()
