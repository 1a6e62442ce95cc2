"""Two shards, and balancers that die. The first shard has the catalog and, at first, every slot."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from balancer.move import Mover, Pace, Progress
from shard.admin.queue_admin import QueueAdmin
from shard.placement import catalog, identity
from shard.placement.catalog import Catalog, Move
from shard.postgres.connection import Connection
from shard.postgres.pool import Database, Rows
from shard.queue.store import Store
from shard.vocabulary import JobId, OrgId, ShardName, Slot
from tests.conftest import CLUSTER, SHARD
from tests.effort import trials

A, B = SHARD, ShardName("s2")
# Chunks are small and there are no pauses, so that a move has many steps in a short time.
PACE = Pace(rows_max=4, rest=0.0, poll_s=0.01)


@dataclass(kw_only=True)
class Pair:
    dsns: Mapping[ShardName, str]
    databases: Mapping[ShardName, Database]
    books: Mapping[ShardName, QueueAdmin]
    _known: Catalog | None = None

    @property
    def catalog(self) -> Database:
        return self.databases[A]

    def store(self, shard: ShardName) -> Store:
        """Returns a store like that of a router that has just started."""
        return Store(self.databases[shard])

    def mover(self, move: Move, report: Callable[[Progress], None] = lambda _: None) -> Mover:
        return Mover(self.catalog, self.databases, move.epoch, pace=PACE, report=report)

    async def begin(self, orgs: Sequence[OrgId], *, target: ShardName) -> Move:
        known = await self.known()
        move = await catalog.begin_move(self.catalog, known, {known.slot(org) for org in orgs}, target=target)
        assert move is not None
        return move

    async def move(self, orgs: Sequence[OrgId], *, target: ShardName) -> Move:
        move = await self.begin(orgs, target=target)
        await self.mover(move).finish()
        return move

    async def balance(self) -> None:
        """Asserts that the books of both shards balance (I5)."""
        for books in self.books.values():
            for entry in await books.check():
                assert entry.balanced, entry

    async def known(self) -> Catalog:
        self._known = await catalog.read(self.catalog, self._known)
        return self._known

    async def placement(self, org: OrgId) -> tuple[tuple[ShardName, ...], tuple[ShardName, ...]]:
        placement = (await self.known()).placement(org)
        return placement.writes, placement.reads

    async def slots(self, slots: Sequence[Slot]) -> dict[ShardName, list[tuple[object, ...]]]:
        """Returns what each shard knows about these slots."""
        return {
            name: await database.run(
                b"SELECT slot, state, epoch, chunk FROM windrow.owned_slot WHERE slot = ANY (%(slots)s) ORDER BY slot",
                {"slots": list(slots)},
            )
            for name, database in self.databases.items()
        }

    async def jobs(self, org: OrgId, ids: Sequence[JobId]) -> dict[tuple[ShardName, JobId], Any]:
        """Returns these jobs as each shard has them. Leaves out departing jobs."""
        found: dict[tuple[ShardName, JobId], Any] = {}
        for name, database in self.databases.items():
            departing = {row[0] for row in await database.run(b"SELECT id::text FROM windrow.departing", {})}
            for record in await self.store(name).get(org, ids, include_payload=True):
                if record.id not in departing:
                    found[name, record.id] = record
        return found


@contextlib.asynccontextmanager
async def open_pair(first_dsn: str, second_dsn: str) -> AsyncGenerator[Pair, None]:
    """The first shard is migrated and owns every slot; the second is empty."""
    dsns = {A: first_dsn, B: second_dsn}
    databases = {name: Database(name, dsn) for name, dsn in dsns.items()}
    books = {name: Database(name, dsn, connections=1, may_scan=True) for name, dsn in dsns.items()}
    try:
        for database in (*databases.values(), *books.values()):
            await database.open()
        await identity.admit(databases[B], databases[A], cluster=CLUSTER)
        yield Pair(
            dsns=dsns, databases=databases, books={name: QueueAdmin(database) for name, database in books.items()}
        )
    finally:
        for database in (*databases.values(), *books.values()):
            await database.close()


class Died(Exception):
    """A balancer has died at the act that its Fate names."""


@dataclass(kw_only=True)
class Fate:
    """Counts a balancer's acts on all databases, and ends the balancer at one of them. `how` says at which moment the
    balancer ends. "before": before the act. "rolled back": after the act's statements and before their commit.
    "unheard": after the commit, but before the balancer knows of the commit. "cancelled": during the act. "cut": the
    balancer loses its connections to the database, but may continue.

    A statement that only reads counts as an act only if `how` is "cut". If a balancer dies at a read, the databases are
    the same as if it died before its next change."""

    at: int
    how: str
    acts: int = 0
    # Called after each act.
    after: Callable[[str], Awaitable[None]] | None = None
    names: list[str] = field(default_factory=list[str])

    def comes(self, *, reads: bool = False) -> bool:
        self.acts += not reads or self.how == "cut"
        return self.acts == self.at and (not reads or self.how == "cut")


_CHANGES = re.compile(rb"\b(INSERT|UPDATE|DELETE)\b")


def deaths(how: str) -> Iterator[int]:
    """Yields the numbers of the acts at which a balancer dies, in ascending order. A reconnect after a cut takes long,
    so only a thorough run cuts at every act, and other runs cut at every third act."""
    return itertools.count(1, trials(3, thorough=1) if how == "cut" else 1)


class Mortal(Database):
    def __init__(self, name: ShardName, dsn: str, fate: Fate) -> None:
        super().__init__(name, dsn, connections=1)
        self._dsn = dsn
        self._fate = fate

    async def run(self, statement: bytes, parameters: Mapping[str, object]) -> Rows:
        fate = self._fate
        name = getattr(statement, "name", "statement")
        fate.names.append(name)
        if fate.comes(reads=_CHANGES.search(statement) is None):
            match fate.how:
                case "before":
                    raise Died
                case "rolled back":
                    async with super().transaction() as connection:
                        await connection.run(statement, parameters)
                        raise Died
                case "unheard":
                    await super().run(statement, parameters)
                    raise Died
                case "cancelled":
                    leave()
                case _:
                    await self._cut()
        rows = await super().run(statement, parameters)
        if fate.after is not None:
            await fate.after(name)
        return rows

    @contextlib.asynccontextmanager
    async def transaction(self) -> AsyncGenerator[Connection]:
        fate = self._fate
        comes = fate.comes()
        fate.names.append("transaction")
        if comes and fate.how == "before":
            raise Died
        async with super().transaction() as connection:
            if comes and fate.how == "cut":
                await self._cut()
            yield connection
            if comes and fate.how == "rolled back":
                raise Died
            if comes and fate.how == "cancelled":
                leave()
        if comes and fate.how == "unheard":
            raise Died
        if fate.after is not None:
            await fate.after("transaction")

    async def _cut(self) -> None:
        other = Database(self.name, self._dsn, connections=1)
        await other.open()
        await other.run(
            b"SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            b"WHERE datname = current_database() AND backend_type = 'client backend' AND pid <> pg_backend_pid()",
            {},
        )
        await other.close()


def leave() -> None:
    """Makes asyncio cancel this task at its next await."""
    task = asyncio.current_task()
    assert task is not None
    task.cancel()


@contextlib.asynccontextmanager
async def mortal_mover(pair: Pair, move: Move, fate: Fate) -> AsyncGenerator[Mover, None]:
    """Yields the mover of a balancer that has this fate. The mover shares nothing with the pair, as if it was a process
    of its own."""
    catalog_database = Mortal(A, pair.dsns[A], fate)
    shards = {name: Mortal(name, dsn, fate) for name, dsn in pair.dsns.items()}
    databases = [catalog_database, *shards.values()]
    try:
        for database in databases:
            await database.open()
        yield Mover(catalog_database, shards, move.epoch, pace=PACE, report=lambda _: None)
    finally:
        for database in databases:
            await database.close()
