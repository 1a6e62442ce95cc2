"""Fixtures for all tests: one server for the session, a migrated database for each module, an org for each test.

The tests of a module share its database and use different orgs. A test that breaks or counts a whole database uses
`fresh_dsn`, a database of its own. This module also decides which tests a run has, and the order of their files.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import gc
import hashlib
import itertools
import os
import shutil
import signal
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Coroutine, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, is_hypothesis_test, settings

from embedded import BinariesNotFound, Cluster
from embedded.cluster import TEMPLATE_VARIABLE
from shard.admin.queue_admin import QueueAdmin
from shard.placement import catalog, identity
from shard.postgres import partitions, schema
from shard.postgres.pool import Database
from shard.queue.store import Store
from shard.vocabulary import OrgId, ShardName
from tests.durations import remember, seconds_of_files
from tests.effort import SEED, THOROUGH, TURN, TURNS, waiting
from tests.memory import use_memory
from tests.postgres import EMPTY, SPARE, Server, hash_once, open_server

# Set this before gRPC is imported. If the tests run as root, this process forks to start servers, and gRPC's fork
# handlers may crash the child.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
use_memory()
# A shell makes background processes ignore Ctrl-C. Without this line, every process that the tests start would inherit
# that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

SHARD = ShardName("s1")
CLUSTER = "tests"
_FOUNDED = "founded"
# The variable with the path of the file that workers lock while they collect.
_COLLECTING = "WINDROW_TEST_COLLECTING"
_numbers = itertools.count(1)

# The examples that Hypothesis generates use a database, so a slow or large example is not a fault.
_QUIET = (HealthCheck.too_slow, HealthCheck.data_too_large)
settings.register_profile("usual", deadline=None, print_blob=True, suppress_health_check=_QUIET)
settings.register_profile("thorough", settings.get_profile("usual"), max_examples=1500)
settings.load_profile("thorough" if THOROUGH else "usual")

# A thorough run has 1 in _PART tests.
_PART = int(os.environ.get("WINDROW_TEST_PART", "1"))
# No test begins later than this many minutes after the first one.
_MINUTES = float(os.environ.get("WINDROW_TEST_MINUTES", "inf"))
_began_s = time.monotonic()
# The sum of the reported times of each test file, in seconds.
_took_s: dict[str, float] = defaultdict(float)
# For skipped tests that need a program: which program is missing, and how to install it.
_not_installed: set[str] = set()


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Makes the data folder that the clusters of all workers copy. A run without workers makes none, because the few
    tests of such a run start few clusters."""
    if config.option.dist == "no" or hasattr(config, "workerinput") or config.option.collectonly:
        return
    folder = tempfile.mkdtemp(prefix="windrow-template-")
    config.add_cleanup(lambda: shutil.rmtree(folder))
    Path(folder).chmod(0o755)
    with contextlib.suppress(BinariesNotFound), Cluster("template", root=Path(folder)) as template:
        hash_once(template.superuser_dsn, template.superuser_dsn, template.dsn)
        os.environ[TEMPLATE_VARIABLE] = str(template.folder)
    os.environ[_COLLECTING] = str(Path(folder, "collecting"))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Lets one worker collect first, and then all other workers at the same time. In a new checkout the first worker
    compiles every test module; workers that collected at the same time would compile all modules too."""
    with contextlib.ExitStack() as stack:
        # Otherwise, garbage collections would look through the collected tests again and again, and free nothing.
        gc.disable()
        stack.callback(gc.enable)
        if place := os.environ.get(_COLLECTING):
            lock = stack.enter_context(open(place, "a"))
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                fcntl.flock(lock, fcntl.LOCK_SH)
        return (yield)


def pytest_collection_finish() -> None:
    """Excludes the modules and the collected tests from all later garbage collections, because they are needed until
    the end of the run. Makes collections rare: with the usual thresholds, collections took a fifteenth of the workers'
    time, and found little."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


def pytest_unconfigure() -> None:
    # Otherwise extension modules find their objects alive when the process exits, and print that the objects have
    # leaked.
    gc.unfreeze()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Chooses the tests of a run, and the order of the files. Each worker makes the same choice."""
    for item in items:
        if is_hypothesis_test(getattr(item, "obj", None)):
            item.add_marker("thorough")
    if THOROUGH:
        chosen = {item for item in items if item.get_closest_marker("thorough") and _drawn(item.nodeid) % _PART == 0}
        config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
        items[:] = [item for item in items if item in chosen]
    elif TURN is not None:
        left = waiting(map(_turns_in, items), int(TURN))
        config.hook.pytest_deselected(items=[items[place] for place in left])
        items[:] = [item for place, item in enumerate(items) if place not in left]
    if THOROUGH and SEED:
        # The order is random, because there may not be enough minutes for all tests. With another seed, other tests run
        # first.
        items.sort(key=lambda item: _drawn(_file_of(item.nodeid)))
    elif hasattr(config, "workerinput"):
        # The slowest files come first, so that no worker still runs a slow file when all other workers are done.
        seconds = seconds_of_files()
        items.sort(key=lambda item: -seconds.get(_file_of(item.nodeid), 0))


def _turns_in(item: pytest.Item) -> int | None:
    mark = item.get_closest_marker("turns")
    return TURNS.get(item.path.parent.name) if mark is None else int(mark.args[0])


def _drawn(name: str) -> int:
    """Returns a number that looks random, but depends only on the seed and the name."""
    return int.from_bytes(hashlib.sha256(f"{SEED} {name}".encode()).digest())


def _file_of(nodeid: str) -> str:
    return nodeid.partition("::")[0]


def pytest_runtest_setup() -> None:
    if time.monotonic() - _began_s > _MINUTES * 60:
        pytest.skip("the time for this run is over")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _took_s[_file_of(report.nodeid)] += report.duration
    if report.skipped and isinstance(report.longrepr, tuple) and " is not installed: " in report.longrepr[2]:
        _not_installed.add(report.longrepr[2].removeprefix("Skipped: "))  # pyrefly: ignore[missing-attribute]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Prints how to install the programs that skipped tests lack."""
    for why in sorted(_not_installed):
        terminalreporter.write_line(f"skipped: {why}")


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Remembers how long each file took. Does nothing in a run without workers, because such a run may have run only
    some tests of a file."""
    options = session.config.option
    if options.dist != "no" and not hasattr(session.config, "workerinput") and not THOROUGH and not options.keyword:
        remember(_took_s)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    # If tests run in parallel, this text is sent to another process as UTF-8. UTF-8 cannot contain half of a surrogate
    # pair.
    report.sections = [(name, text.encode(errors="backslashreplace").decode()) for name, text in report.sections]
    return report


@pytest.fixture(scope="session")
def postgres() -> Iterator[Server]:
    """A server with the template of most databases. The template is migrated once, because a migration takes far longer
    than a copy."""

    async def migrate(dsn: str) -> None:
        async with connected(dsn) as database:
            await schema.migrate(database, cluster=None)
            await partitions.make_ahead(database)

    with open_server() as server:
        _finish(migrate(server.create(SPARE, template=EMPTY)))
        yield server


@pytest.fixture(scope="session")
def template(postgres: Server) -> str:
    """The name of a database that is migrated and owns every slot. It is only copied, never written to."""

    async def found(dsn: str) -> None:
        async with connected(dsn) as database:
            known = await catalog.found(database, cluster=CLUSTER, weights={SHARD: 1})
            await identity.admit(database, database, cluster=CLUSTER)
            await catalog.grant_slots(database, known)
            # In production autovacuum does this after a while. Without statistics, joins with the 16,384 slots get slow
            # plans.
            await database.run(b"ANALYZE windrow.owned_slot", {})

    _finish(found(postgres.create(_FOUNDED)))
    return _FOUNDED


def _finish(work: Coroutine[Any, Any, None]) -> None:
    """Runs the coroutine in a thread, because a fixture that another fixture requests by name may be set up while an
    event loop runs."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(asyncio.run, work).result()


@contextlib.asynccontextmanager
async def connected(dsn: str) -> AsyncGenerator[Database, None]:
    database = Database(SHARD, dsn, connections=1)
    await database.open()
    yield database
    await database.close()


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
def spare_dsn(postgres: Server) -> Generator[str, None, None]:
    """A migrated database that belongs to no shard yet."""
    yield from _fresh(postgres, SPARE)


@pytest.fixture
def empty_dsn(postgres: Server) -> Generator[str, None, None]:
    """A database without a schema."""
    yield from _fresh(postgres, EMPTY)


@pytest.fixture
def org() -> OrgId:
    """An org that no other test uses."""
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
async def books(module_dsn: str) -> AsyncGenerator[QueueAdmin, None]:
    opened = Database(SHARD, module_dsn, connections=1, may_scan=True)
    await opened.open()
    yield QueueAdmin(opened)
    await opened.close()
