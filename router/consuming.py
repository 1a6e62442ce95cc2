"""Consumers of this router: they claim what there is, and wait in the rooms of their org's shards for more."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

from router import wire
from router.buffer import Account
from router.fleet import Fleet
from router.member import Member
from router.wire import Given
from shard.claiming import CLAIM_BYTES_MAX
from shard.errors import ShardUnavailable
from shard.vocabulary import OrgId, QueueName

_JOBS_MAX = 1000


class Receiver(Protocol):
    """Where a consumer's jobs go."""

    @property
    def takes_once(self) -> bool:
        """What comes first is all that it takes."""
        ...

    def receive(self, jobs: Given) -> None:
        """Takes jobs that are leased to it."""
        ...

    def is_full(self) -> bool:
        """Whether it should be given no more jobs for now."""
        ...

    async def has_room(self) -> None:
        """Returns once more jobs may come."""
        ...


class Consumer:
    """`credit` is how many more jobs it takes. `serve` finds them, `serve_first` only until some have come; `close` is
    the end: what comes later goes back. Jobs that it has received are held by `account` until they have been sent."""

    def __init__(
        self,
        fleet: Fleet,
        receiver: Receiver,
        account: Account,
        *,
        org: OrgId,
        queues: Sequence[QueueName],
        worker: str,
        window_us: int,
        credit: int = 0,
    ) -> None:
        self.org = org
        self.queues = queues
        self.worker = worker
        self.window_us = window_us
        self.credit = credit
        self.account = account
        self.idle = False
        self.promised = False
        # It waits for credit.
        self._starved = False
        self._fleet = fleet
        self._receiver = receiver
        self._woken = asyncio.Event()
        self._entered: list[Member] = []
        self._claiming = False
        self._only_first = False
        self._given = False
        self._over = False
        self._closed = False

    def add_credit(self, jobs: int) -> None:
        self.credit += jobs
        if self._starved or (self.idle and any(member.room.has_backlog(self) for member in self._entered)):
            self.wake()

    @property
    def takes_once(self) -> bool:
        return self._receiver.takes_once

    @property
    def full(self) -> bool:
        return self._receiver.is_full()

    @property
    def looking(self) -> bool:
        return self._claiming or self._woken.is_set()

    def wake(self) -> None:
        if self.promised and not self._over:
            # What it takes is on its way. It has no room for more beside it.
            return
        # It is about to look, and takes nothing before it has.
        self.idle = False
        self._woken.set()

    def give(self, jobs: Given) -> None:
        if self._closed:
            self.release(jobs)
            return
        self._receiver.receive(jobs)
        self._given = True
        if self._only_first:
            self.wake()

    def take_back(self, jobs: Given) -> None:
        """Gives jobs that were not sent to others, and has credit for as many."""
        self.release(jobs)
        self.add_credit(len(jobs.ids))

    def release(self, jobs: Given) -> None:
        """Gives back jobs that were not sent: their attempts do not count."""
        jobs.store.release_soon(self.org, jobs.leases())
        self.account.give_back(jobs.bytes)

    async def serve(self) -> None:
        """Finds jobs for as long as it is let. Raises ShardUnavailable."""
        came = True
        while True:
            while self.credit <= 0:
                self._woken.clear()
                self._starved = True
                await self._woken.wait()
                self._starved = False
            await self._receiver.has_room()
            if not await self._look(came=came):
                await self._rest()
            came = False

    async def serve_first(self) -> None:
        """Finds a first job, or as many as come with it; gives up when told that it is `over`. Raises
        ShardUnavailable."""
        self._only_first = True
        more = await self._look(came=True)
        while not self._has_first():
            if not more:
                await self._rest()
            if not self._has_first():
                more = await self._look(came=False)

    def _has_first(self) -> bool:
        return self._given or self._over

    def over(self) -> None:
        self._over = True
        self.wake()

    async def _look(self, *, came: bool) -> bool:
        """Takes what there is. Answers whether there may be more."""
        self._woken.clear()
        members = self._fleet.givers(self.org)
        self._enter(members)
        if came and all(member.room.is_empty_for(self) for member in members):
            # Where others wait in vain, so will it, and needs no look of its own.
            return False
        self._claiming = True
        more = await self.claim(members, woken=not came)
        self._claiming = False
        return more

    async def _rest(self) -> None:
        self.idle = True
        await self._woken.wait()
        self.idle = False

    async def claim(self, members: Sequence[Member], *, woken: bool = False) -> bool:
        """Takes what is on these shards, as far as the credit goes. Answers whether there may be more. Raises
        ShardUnavailable if it is so of all."""
        away = 0
        if not self.account.has_room():
            await self._receiver.has_room()
        # Of all shards together: what takes once is one message.
        room = CLAIM_BYTES_MAX
        for member in members:
            if not member.room.gives:
                continue
            wanted = min(self.credit, _JOBS_MAX)
            if wanted <= 0:
                return True
            try:
                taken = await member.store.claim(
                    self.org,
                    self.queues,
                    max_jobs=wanted,
                    window_us=self.window_us,
                    worker=self.worker,
                    bytes_max=room,
                    memory=self.account,
                )
            except ShardUnavailable:
                # What is on the others is worth having; its sweep tells when it is back.
                away += 1
                if away == len(members):
                    raise
                continue
            if taken.jobs:
                self.credit -= len(taken.jobs)
                given = wire.claimed(member.store, taken.jobs)
                self.account.hold(given.bytes)
                self.account.give_back(taken.held)
                self.give(given)
            # Also where an answer's room was filled: there may be more.
            if len(taken.jobs) == wanted or taken.was_full or (room := room - taken.bytes) <= 0:
                if self._entered:
                    member.room.found_enough(self)
                return True
            if self._entered:
                member.room.found_less(self, woken=woken)
        return False

    def close(self) -> None:
        self._closed = True
        self.idle = False
        self._enter([])

    def _enter(self, members: Sequence[Member]) -> None:
        """Waits in the rooms of these shards, and in no other."""
        if members == self._entered:
            return
        for member in self._entered:
            if member not in members:
                member.room.leave(self)
        for member in members:
            if member not in self._entered:
                member.room.enter(self)
        self._entered = list(members)
