"""The balancer as a process: leads or stands by, and follows the cluster file. What it does when it leads is
balancer/balancing.py's."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping

from balancer.balancing import Balancing
from balancer.settings import pace_of
from balancer.shards import open_shards
from shard.catalog import Move
from shard.cluster import Cluster
from shard.errors import ShardUnavailable
from shard.following import FollowedFile, next_usable
from shard.leading import Candidate, candidacy

_log = logging.getLogger(__name__)

_TRY_S = 1.0


class AnotherLeads(Exception):
    """The message says who."""


async def balance(file: FollowedFile, cluster: Cluster, *, stop: asyncio.Event) -> None:
    """Makes the cluster as its file wants it, whenever this process leads, until `stop` is set; then what must not be
    left half done is finished. `cluster` is what the file said; a change is taken up when it is noticed."""
    while not stop.is_set():
        ending = asyncio.Event()
        keeping = asyncio.create_task(_Balancer(cluster, ending).keep())
        following = asyncio.create_task(next_usable(file, cluster, judge=pace_of))
        stopped = asyncio.create_task(stop.wait())
        try:
            await asyncio.wait({keeping, following, stopped}, return_when=asyncio.FIRST_COMPLETED)
            ending.set()
            await keeping
            if following.done():
                cluster = following.result()
        finally:
            for task in (keeping, following, stopped):
                task.cancel()
            await asyncio.wait({keeping, following, stopped})


async def balance_once(cluster: Cluster, *, stop: asyncio.Event) -> Mapping[Move, str]:
    """Makes the cluster as its file wants it, and returns when it is, or soon after `stop` is set. Answers the moves
    that the file itself keeps from going on, and why. Raises AnotherLeads, ShardUnavailable if the catalog cannot be
    reached, Misconfigured."""
    async with candidacy(cluster.catalog_dsn, cluster.digest) as candidate:
        if not await candidate.lead():
            raise AnotherLeads(await candidate.leader() or "it has just ended")
        return await _Balancer(cluster, stop).lead(candidate, once=True)


class _Balancer:
    """By one cluster file, until it is told to end."""

    def __init__(self, cluster: Cluster, ending: asyncio.Event) -> None:
        self._cluster = cluster
        self._ending = ending

    async def keep(self) -> None:
        """Leads whenever no other does."""
        trouble = ""
        while not self._ending.is_set():
            try:
                async with candidacy(self._cluster.catalog_dsn, self._cluster.digest) as candidate:
                    trouble = ""
                    if await self._wait_for_turn(candidate):
                        await self.lead(candidate, once=False)
            except ShardUnavailable as error:
                if str(error) != trouble:
                    trouble = str(error)
                    _log.warning("does not lead: %s", error)
                await self._rest()
            except Exception:  # noqa: BLE001 - whatever it is, the next try may do
                _log.exception("leads no more")
                await self._rest()

    async def lead(self, candidate: Candidate, *, once: bool) -> Mapping[Move, str]:
        """Once: until nothing is left to do. Answers what `balance_once` does. Raises ShardUnavailable as soon as
        another may lead: then nothing of it goes on."""
        async with open_shards(self._cluster) as shards:
            _log.info("leads, by cluster file %s", self._cluster.digest)
            balancing = Balancing(self._cluster, shards, pace=pace_of(self._cluster), once=once)
            running = asyncio.create_task(balancing.run())
            holding = asyncio.create_task(candidate.hold())
            told = asyncio.create_task(self._ending.wait())
            try:
                await asyncio.wait({running, holding, told}, return_when=asyncio.FIRST_COMPLETED)
                balancing.end()
                await asyncio.wait({running, holding}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in (running, holding, told):
                    task.cancel()
                await asyncio.wait({running, holding, told})
            if not holding.cancelled():
                holding.result()
            if not running.cancelled():
                running.result()
            return balancing.held

    async def _wait_for_turn(self, candidate: Candidate) -> bool:
        """False: it is told to end."""
        said = False
        while not self._ending.is_set():
            if await candidate.lead():
                return True
            if not said and (leader := await candidate.leader()) is not None:
                said = True
                _log.info("stands by: %s leads", leader)
            await self._rest()
        return False

    async def _rest(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_TRY_S):
                await self._ending.wait()
