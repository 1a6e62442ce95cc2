"""The balancer as a process: it leads or stands by, and follows the cluster file. balancer/controller.py does the work
of a process that leads."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping

from balancer.controller import Controller
from balancer.settings import pace_of
from balancer.shards import open_shards
from shard.errors import ShardUnavailable
from shard.placement.catalog import Move
from shard.placement.cluster_file import Cluster
from shard.placement.file_watcher import WatchedFile, next_usable
from shard.postgres.leader_lock import LeaderSession, leader_session

_log = logging.getLogger(__name__)

_RETRY_S = 1.0


class AnotherLeads(Exception):
    """Another process leads; the message says which one."""


async def balance(file: WatchedFile, cluster: Cluster, *, stop: asyncio.Event) -> None:
    """Whenever this process leads, moves slots to where the cluster file wants them, until `stop` is set. Then
    continues the moves that must not be left half done, until they are at a safe point. `cluster` is the present
    content of the file. Changes of the file are applied as soon as they are noticed."""
    while not stop.is_set():
        ending = asyncio.Event()
        balancing = asyncio.create_task(_Balancer(cluster, ending).run())
        following = asyncio.create_task(next_usable(file, cluster, judge=pace_of))
        stopped = asyncio.create_task(stop.wait())
        try:
            await asyncio.wait({balancing, following, stopped}, return_when=asyncio.FIRST_COMPLETED)
            ending.set()
            await balancing
            if following.done():
                cluster = following.result()
        finally:
            for task in (balancing, following, stopped):
                task.cancel()
            await asyncio.wait({balancing, following, stopped})


async def balance_once(cluster: Cluster, *, stop: asyncio.Event) -> Mapping[Move, str]:
    """Moves slots to where the cluster file wants them. Returns when nothing is left to do, or soon after `stop` is
    set. Returns the moves that the file itself blocks, and why. Raises AnotherLeads, Misconfigured. Raises
    ShardUnavailable if the catalog cannot be reached."""
    async with leader_session(cluster.catalog_dsn, cluster.digest) as session:
        if not await session.lead():
            raise AnotherLeads(await session.leader() or "it has just ended")
        return await _Balancer(cluster, stop).lead(session, once=True)


class _Balancer:
    """Moves slots to where one version of the cluster file wants them, until `ending` is set."""

    def __init__(self, cluster: Cluster, ending: asyncio.Event) -> None:
        self._cluster = cluster
        self._ending = ending

    async def run(self) -> None:
        """Leads whenever no other process does."""
        problem = ""
        while not self._ending.is_set():
            try:
                async with leader_session(self._cluster.catalog_dsn, self._cluster.digest) as session:
                    problem = ""
                    if await self._wait_for_leadership(session):
                        await self.lead(session, once=False)
            except ShardUnavailable as error:
                if str(error) != problem:
                    problem = str(error)
                    _log.warning("cannot lead: %s", error)
                await self._rest()
            except Exception:  # noqa: BLE001 - whatever it is, the next try may succeed
                _log.exception("unexpected error while leading; trying again")
                await self._rest()

    async def lead(self, session: LeaderSession, *, once: bool) -> Mapping[Move, str]:
        """Leads until `ending` is set or, with `once`, until nothing is left to do. Returns what `balance_once`
        returns. As soon as another process may lead, cancels everything that this process does, and raises
        ShardUnavailable."""
        async with open_shards(self._cluster) as shards:
            _log.info("leads, with cluster file %s", self._cluster.digest)
            controller = Controller(self._cluster, shards, pace=pace_of(self._cluster), once=once)
            running = asyncio.create_task(controller.run())
            holding = asyncio.create_task(session.hold())
            ended = asyncio.create_task(self._ending.wait())
            try:
                await asyncio.wait({running, holding, ended}, return_when=asyncio.FIRST_COMPLETED)
                controller.end()
                await asyncio.wait({running, holding}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in (running, holding, ended):
                    task.cancel()
                await asyncio.wait({running, holding, ended})
            if not holding.cancelled():
                holding.result()
            if not running.cancelled():
                running.result()
            return controller.held

    async def _wait_for_leadership(self, session: LeaderSession) -> bool:
        """Waits until this process leads. Returns False if `ending` was set first."""
        logged = False
        while not self._ending.is_set():
            if await session.lead():
                return True
            if not logged and (leader := await session.leader()) is not None:
                logged = True
                _log.info("stands by: %s leads", leader)
            await self._rest()
        return False

    async def _rest(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_RETRY_S):
                await self._ending.wait()
