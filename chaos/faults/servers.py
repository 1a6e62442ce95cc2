"""Faults of Postgres servers: servers are killed or frozen, a backend crashes a server, a server has no free
connections, a server fails over, or rows stay locked."""

from __future__ import annotations

import abc
import asyncio
import contextlib
import random
import time
from collections.abc import Sequence
from typing import LiteralString

import psycopg

from chaos.faults.fault import Fault, shards
from chaos.stage import Cast, Stage
from embedded import EmbeddedError
from proof.postgres import Node, until

_UP_S_MAX = 60.0
_SYNCHRONOUS_S_MAX = 5.0
# Matches the connections of balancers and of routers.
_OURS = "application_name LIKE 'windrow%'"
_BUSY_QUEUE: LiteralString = """
SELECT j.queue_id, q.org FROM windrow.job j JOIN windrow.queue q USING (queue_id)
WHERE j.lease IS NOT NULL AND j.visible_at > now() ORDER BY j.leased_at DESC LIMIT 1
"""
_KEYED_QUEUE: LiteralString = """
SELECT d.queue_id, q.org FROM windrow.dedup d JOIN windrow.queue q USING (queue_id) ORDER BY d.until DESC LIMIT 1
"""
_LOCK_JOBS: LiteralString = """
SELECT id::text FROM windrow.job
WHERE queue_id = %s AND lease IS NOT NULL AND visible_at > now() FOR UPDATE SKIP LOCKED
"""
_LOCK_KEYS: LiteralString = "SELECT key FROM windrow.dedup WHERE queue_id = %s LIMIT 10 FOR UPDATE SKIP LOCKED"
_KEYS_SHARE = 0.3
_LOCKED_MIN = 5
_LOOKS_MAX, _LOOK_S = 200, 0.01


class _ShardFault(Fault):
    @classmethod
    def targets(cls, cast: Cast) -> Sequence[str]:
        return shards(cast)

    @property
    def primary(self) -> Node:
        return self.stage.shards[self.target].primary


class KillPostgres(_ShardFault):
    name = "kill-postgres"

    async def inject(self) -> None:
        node = self.primary
        if self.luck.random() < 0.5:
            node.kill()
        else:
            # Kill the postmaster alone. Its backends finish their statements, and then end.
            await asyncio.to_thread(node.cluster.kill)

    async def heal(self) -> None:
        await self.primary.start()


class FreezePostgres(_ShardFault):
    name = "freeze-postgres"
    seconds = (1.0, 8.0)

    async def inject(self) -> None:
        self.primary.freeze()

    async def heal(self) -> None:
        self.primary.thaw()


class KillBackend(_ShardFault):
    """Kills one backend with SIGKILL. The postmaster then ends all other backends, and recovers."""

    name = "kill-backend"
    seconds = (0.0, 0.0)

    async def inject(self) -> None:
        # A killed walsender causes the same crash, so it may be chosen. Sort by pid, because psutil's order is
        # arbitrary.
        backends = sorted(self.primary.processes()[1:], key=lambda process: process.pid)
        if backends:
            self.luck.choice(backends).kill()

    async def heal(self) -> None:
        await until(lambda: _answers(self.primary), f"{self.target} has recovered", within_s=_UP_S_MAX)


class _AgainAndAgain(_ShardFault):
    """Repeats `do` until the fault is healed."""

    over = False
    _doing: asyncio.Task[None] | None = None

    async def inject(self) -> None:
        self._doing = asyncio.create_task(self._go_on())

    async def heal(self) -> None:
        self.over = True
        if self._doing is not None:
            # Wait for the thread: it cannot be cancelled, and would continue while the fault is healed.
            await self._doing

    async def _go_on(self) -> None:
        while not self.over:
            # Another fault may have made the server unavailable.
            with contextlib.suppress(psycopg.Error, EmbeddedError):
                await asyncio.to_thread(self.do)
            await asyncio.sleep(self.luck.uniform(0.05, 0.5))

    @abc.abstractmethod
    def do(self) -> None:
        """Does the harm once. Runs in a thread, and ends soon after `over` is set."""


class TerminateBackends(_AgainAndAgain):
    """Ends some backends with pg_terminate_backend, at any point of a transaction."""

    name = "terminate-backends"
    seconds = (0.0, 4.0)

    def do(self) -> None:
        self.primary.ask(f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE {_OURS} AND random() < 0.5")


class ExhaustConnections(_AgainAndAgain):
    """Ends the connections of routers and balancers, and takes every free connection of the server."""

    name = "exhaust-connections"

    def __init__(self, stage: Stage, target: str, luck: random.Random) -> None:
        super().__init__(stage, target, luck)
        self._taken: list[psycopg.Connection[tuple[object, ...]]] = []

    def do(self) -> None:
        self.primary.ask(f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE {_OURS}")
        # When the server has no free connection, an error ends this loop.
        while not self.over:
            self._taken.append(psycopg.connect(self.primary.cluster.dsn, connect_timeout=5))

    async def heal(self) -> None:
        await super().heal()
        for connection in self._taken:
            connection.close()


class FailOver(_ShardFault):
    """Kills a primary with SIGKILL, and promotes its standby. Later the old primary's server becomes the new
    standby."""

    name = "fail-over"
    weight = 1.5
    seconds = (2.0, 8.0)
    _promoted = False

    @classmethod
    def targets(cls, cast: Cast) -> Sequence[str]:
        return shards(cast)[:1] if cast.replicated else []

    async def inject(self) -> None:
        shard = self.stage.shards[self.target]
        # Make sure that the standby has everything that was acknowledged. Failover tools promote only a standby that
        # has everything.
        await until(
            lambda: shard.is_synchronous, f"{self.target} has a synchronous standby", within_s=_SYNCHRONOUS_S_MAX
        )
        node = self.primary
        node.kill()
        await until(lambda: not node.processes(), f"{node.name} has ended", within_s=_UP_S_MAX)
        await shard.promote()
        self._promoted = True

    async def heal(self) -> None:
        if self._promoted:
            await self.stage.shards[self.target].rebuild()
        else:
            await self.primary.start()


class LockRows(_ShardFault):
    """Opens a session that locks the rows of a few leased jobs of one org, or of dedup keys of an org. The session does
    not end until the fault is healed."""

    name = "lock-rows"
    seconds = (4.0, 7.0)
    alone = True
    _session: psycopg.Connection[tuple[object, ...]] | None = None

    async def inject(self) -> None:
        find, lock = (_KEYED_QUEUE, _LOCK_KEYS) if self.luck.random() < _KEYS_SHARE else (_BUSY_QUEUE, _LOCK_JOBS)
        session = await asyncio.to_thread(self._open)
        self._session = session
        await asyncio.to_thread(self._lock, session, find, lock)

    async def heal(self) -> None:
        if self._session is not None:
            await asyncio.to_thread(self._session.close)

    def _open(self) -> psycopg.Connection[tuple[object, ...]]:
        return psycopg.connect(self.primary.cluster.dsn, connect_timeout=5)

    def _lock(self, session: psycopg.Connection[tuple[object, ...]], find: LiteralString, lock: LiteralString) -> None:
        """Locks rows of one queue, until enough rows are locked. Looks for rows again and again, because most leased
        jobs are acked soon."""
        queue: object = None
        locked: set[object] = set()
        for _ in range(_LOOKS_MAX):
            if queue is None and (row := session.execute(find).fetchone()) is not None:
                queue, org = row
                self.orgs = [str(org)]
            if queue is not None:
                locked |= {name for (name,) in session.execute(lock, [queue])}
            if len(locked) >= _LOCKED_MIN:
                return
            time.sleep(_LOOK_S)
        if not locked:
            raise TimeoutError(f"{self.target} had no row to lock")


class FreezeStandby(_ShardFault):
    """Freezes a standby, so that commits on its primary wait."""

    name = "freeze-standby"

    @classmethod
    def targets(cls, cast: Cast) -> Sequence[str]:
        return shards(cast)[:1] if cast.replicated else []

    async def inject(self) -> None:
        if (node := self.stage.shards[self.target].standby) is not None:
            node.freeze()

    async def heal(self) -> None:
        if (node := self.stage.shards[self.target].standby) is not None:
            node.thaw()


def _answers(node: Node) -> bool:
    try:
        return node.ask("SELECT 1") == [(1,)]
    except psycopg.Error:
        return False
