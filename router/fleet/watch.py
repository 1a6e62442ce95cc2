"""Watches a queue of an org, or of all orgs, on the shards that may have its jobs. A Watch gets only hints (I7): its
owner must look for jobs itself."""

from __future__ import annotations

import asyncio

from router.fleet.fleet import Fleet
from router.fleet.shard_handle import ShardHandle
from shard.vocabulary import OrgId, QueueName


class Watch:
    """`woken` is set when the queue may have got ready jobs, or may have moved to other shards. Then call `enter`
    again, and look for jobs. `org` None: all orgs. Call `leave` at the end."""

    def __init__(self, fleet: Fleet, org: OrgId | None, queue: QueueName) -> None:
        self.woken = asyncio.Event()
        self._fleet = fleet
        self._org = org
        self._queue = queue
        self._entered: list[ShardHandle] = []

    def wake(self) -> None:
        self.woken.set()

    def enter(self) -> None:
        """From now on, lets the org's current shards wake this watch."""
        if self._org is None:
            self._fleet.pools.watch(self._queue, self)
            return
        shards = self._fleet.shards()
        members = [shards[name] for name in self._fleet.placement(self._org).reads if name in shards]
        for member in self._entered:
            if member not in members:
                member.room.unwatch(self._org, self._queue, self)
        for member in members:
            if member not in self._entered:
                member.room.watch(self._org, self._queue, self)
        self._entered = members

    def leave(self) -> None:
        if self._org is None:
            self._fleet.pools.unwatch(self._queue, self)
            return
        for member in self._entered:
            member.room.unwatch(self._org, self._queue, self)
        self._entered = []
