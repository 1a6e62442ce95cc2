"""A cluster file for databases of the test, and balancers that follow the file: in the test's process, or in processes
of their own."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import subprocess
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from balancer.service import balance
from shard.admin.queue_admin import QueueAdmin
from shard.placement import catalog, identity
from shard.placement.catalog import Catalog, Move
from shard.placement.cluster_file import Cluster, read_cluster
from shard.placement.file_watcher import WatchedFile
from shard.placement.slots import SLOTS, slot_of
from shard.postgres.pool import Database
from shard.queue.store import Store
from shard.vocabulary import NewJobs, OrgId, ShardName, Slot
from tests import preloaded
from tests.conftest import CLUSTER, SHARD
from tests.jobs import ids_of, some_jobs
from tests.postgres import Server
from tests.routers import PATIENCE_S

T = TypeVar("T")
_numbers = itertools.count(1)


@dataclass(kw_only=True)
class Field:
    """The databases and the cluster file. Shard s1 has the catalog, and at first every slot. The other databases are
    empty until the file names them."""

    config: Path
    dsns: dict[ShardName, str]
    databases: dict[ShardName, Database] = field(default_factory=dict[ShardName, Database])
    _known: Catalog | None = None

    def write(self, more: str = "", **shards: Mapping[str, object]) -> Cluster:
        """Writes a file that names these shards, each with its settings. Each DSN is in a file of its own."""
        text = f'[cluster]\nname = "{CLUSTER}"\n'
        for name, keys in shards.items():
            text += f"\n[[shard]]\nname = '{name}'\n"
            for key, value in {"dsn": self.dsns[ShardName(name)], **keys}.items():
                text += f"{key} = '''{value}'''\n" if isinstance(value, str) else f"{key} = {value}\n"
        other = self.config.with_suffix(".new")
        other.write_text(f"{text}\n{more}")
        os.replace(other, self.config)
        return self.cluster

    @property
    def cluster(self) -> Cluster:
        return read_cluster(self.config)

    @property
    def catalog(self) -> Database:
        return self.databases[SHARD]

    async def known(self) -> Catalog:
        self._known = await catalog.read(self.catalog, self._known)
        return self._known

    async def slots(self) -> Counter[str]:
        """Returns, for each shard, the number of slots that are at rest on it. The number of slots that move has the
        key "moving"."""
        slots = (await self.known()).slots[:SLOTS]
        # Slots that changed together share one placement object, so there are few different objects.
        placements = {id(one): one for one in slots}
        counted = Counter[str]()
        for number, count in Counter(map(id, slots)).items():
            one = placements[number]
            counted[one.reads[0] if one.at_rest else "moving"] += count
        return counted

    async def until(self, holds: Callable[[Counter[str]], object]) -> Counter[str]:
        """Waits until the condition holds for the numbers that `slots` returns. Returns these numbers."""
        return await until(self.slots, holds)

    async def admit(self, shard: ShardName) -> None:
        """Admits the shard, as the first process that contacts the shard would."""
        await identity.admit(self.databases[shard], self.catalog, cluster=CLUSTER)

    async def begin(self, source: ShardName, target: ShardName, slots: Iterable[int]) -> Move:
        move = await catalog.begin_move(self.catalog, await self.known(), map(Slot, slots), target=target)
        assert move is not None
        assert move.source == source
        return move

    async def enqueue(self, orgs: int, jobs: int = 1, *, among: range = range(SLOTS)) -> dict[OrgId, NewJobs]:
        """Enqueues `jobs` jobs for each of `orgs` orgs, whose slots are in `among`."""
        known = await self.known()
        stored: dict[OrgId, NewJobs] = {}
        names = (OrgId(f"org-{number}") for number in itertools.count())
        for org in itertools.islice((name for name in names if slot_of(name) in among), orgs):
            placement = known.placement(org)
            stored[org] = some_jobs(org, jobs)
            store = Store(self.databases[placement.writes[0]])
            assert await store.enqueue(stored[org], epoch=placement.epoch) == {}
        return stored

    async def count_jobs(self, shard: str) -> int:
        database = self.databases[ShardName(shard)]
        if await database.run(b"SELECT WHERE to_regclass('windrow.job') IS NULL", {}):
            return 0
        rows = await database.run(b"SELECT count(*) FROM windrow.job", {})
        return int(rows[0][0])

    async def assert_all_there(self, stored: Mapping[OrgId, NewJobs]) -> None:
        """Asserts that every job is on the shard where its org is at rest, and that the books balance (I5)."""
        known = await self.known()
        for org, jobs in stored.items():
            (shard,) = known.placement(org).reads
            records = await Store(self.databases[shard]).get(org, ids_of(jobs), include_payload=False)
            assert len(records) == len(jobs)
        found = 0
        for name in {shard for placement in known.slots for shard in placement.reads}:
            for entry in await QueueAdmin(self.databases[name]).check():
                assert entry.balanced, entry
            found += await self.count_jobs(name)
        assert found == sum(map(len, stored.values()))


@contextlib.asynccontextmanager
async def open_field(folder: Path, first_dsn: str, postgres: Server, *others: str) -> AsyncGenerator[Field, None]:
    made = {ShardName(name): f"field_{next(_numbers)}_{name}" for name in others}
    dsns = {SHARD: first_dsn} | {name: postgres.create(database) for name, database in made.items()}
    databases = {name: Database(name, dsn) for name, dsn in dsns.items()}
    try:
        for database in databases.values():
            await database.open()
        yield Field(config=folder / "cluster.toml", dsns=dsns, databases=databases)
    finally:
        for database in databases.values():
            await database.close()
        for name in made.values():
            postgres.drop(name)


async def until(look: Callable[[], Awaitable[T]], holds: Callable[[T], object]) -> T:
    """Calls the function again and again until the condition holds for its result. Returns this result."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            seen = await look()
            if holds(seen):
                return seen
            # Each call reads the placement of 16,384 slots.
            await asyncio.sleep(0.05)


@contextlib.asynccontextmanager
async def balanced(at: Field) -> AsyncGenerator[asyncio.Event, None]:
    """Runs a balancer during the block."""
    file = WatchedFile(at.config)
    stop = asyncio.Event()
    balancing = asyncio.create_task(balance(file, file.read(), stop=stop))
    try:
        yield stop
        stop.set()
        async with asyncio.timeout(PATIENCE_S):
            await balancing
    finally:
        balancing.cancel()
        await asyncio.wait({balancing})


@dataclass(kw_only=True)
class Process:
    process: subprocess.Popen[str]
    log: Path

    async def says(self, words: str) -> str:
        """Waits for a line with these words. Returns the line."""

        async def lines() -> list[str]:
            assert self.process.poll() is None or words in self.log.read_text(), self.log.read_text()
            return [line for line in self.log.read_text().splitlines() if words in line]

        return (await until(lines, bool))[0]


@contextlib.contextmanager
def balancer_process(config: Path, *arguments: str) -> Generator[Process, None, None]:
    """Runs `windrow balancer`. Kills it at the end of the block, unless it has ended."""
    log = config.parent / f"balancer-{next(_numbers)}.log"
    command = ("-m", "cli.main", "balancer", "--config", config, *arguments)
    with log.open("w") as errors, preloaded.start(*command, stderr=errors) as process:
        try:
            yield Process(process=process, log=log)
        finally:
            process.kill()
