"""A consumer claims the due jobs of its queues, then waits in the wait rooms of its org's shards for more."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from itertools import product
from typing import Protocol, TypedDict

from router.buffer import Account
from router.codec import fast_write
from router.codec.fast_write import Delivery
from router.fleet.fleet import Fleet
from router.fleet.shard_handle import ShardHandle
from router.fleet.starts import Held, hold_s, look_again_s
from shard.errors import NoAnswer
from shard.queue.claim import CLAIM_BYTES_MAX, CLAIM_BYTES_MIN, bytes_most
from shard.vocabulary import OrgId, QueueName, ShardName

_JOBS_MAX = 1000


class ConsumerFields(TypedDict):
    """What every consumer says about itself."""

    queues: Sequence[QueueName]
    worker: str
    window_us: int
    kinds: Sequence[str]


class Receiver(Protocol):
    """A Consume stream or a Dequeue, which takes the jobs of its consumer."""

    @property
    def takes_once(self) -> bool:
        """Whether the first delivery is also the last one, as for a Dequeue."""
        ...

    def receive(self, jobs: Delivery) -> None:
        """Takes jobs that are leased to this consumer."""
        ...

    def is_full(self) -> bool:
        """Whether the receiver can take no more jobs for now."""
        ...

    async def reserve(self, count: int, shard: ShardName) -> None:
        """Waits until the receiver can take more jobs, and its account holds `count` more bytes for a claim on this
        shard."""
        ...


class Consumer:
    """Finds jobs for one receiver.

    `credit` is how many more jobs the consumer takes. `serve` finds jobs until it is cancelled, `serve_first` until the
    first jobs have come. After `close`, jobs that still arrive are released. `account` holds the memory of received
    jobs until they have been sent. `kinds`: the kinds of jobs that the consumer takes; empty: all kinds.
    """

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
        kinds: Sequence[str] = (),
        credit: int = 0,
    ) -> None:
        self.org = org
        self.queues = queues
        self.kinds = kinds
        self.worker = worker
        self.window_us = window_us
        self.credit = credit
        self.account = account
        self.idle = False
        self.promised = False
        # Whether `serve` waits for credit.
        self._waits_for_credit = False
        self._fleet = fleet
        self._receiver = receiver
        self._woken = asyncio.Event()
        self._entered: list[ShardHandle] = []
        self._claiming = False
        self._only_first = False
        self._received_any = False
        self._stopped_waiting = False
        self._closed = False

    def add_credit(self, jobs: int) -> None:
        self._raise_credit(jobs)
        if self._waits_for_credit or (self.idle and any(member.room.has_backlog(self) for member in self._entered)):
            self.wake()
        elif self.idle:
            self._tell_ready()

    def keep_places(self, jobs: int) -> None:
        self.credit -= jobs
        if self.takes_once:
            self.idle = False
            self.promised = True

    def free_places(self, unused: int) -> None:
        self.promised = False
        if unused:
            self._raise_credit(unused)
            self.wake()

    def _raise_credit(self, jobs: int) -> None:
        had_none = self.credit <= 0
        self.credit += jobs
        if had_none:
            for member in self._entered:
                member.room.has_credit(self)

    @property
    def all_orgs(self) -> bool:
        return False

    def account_of(self, org: OrgId) -> Account:
        return self.account

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
        if self.promised and not self._stopped_waiting:
            # The consumer's only delivery is already on its way, so there is nothing to look for.
            return
        # The consumer will now claim jobs itself: no jobs are handed over to it until it rests again.
        self.idle = False
        self._woken.set()

    def give(self, jobs: Delivery) -> None:
        if self._closed:
            self.release(jobs)
            return
        self._receiver.receive(jobs)
        self._received_any = True
        if self._only_first:
            self.wake()

    def take_back(self, jobs: Delivery) -> None:
        """Releases jobs that were not sent, and gets their credit back."""
        self.release(jobs)
        self.add_credit(len(jobs.ids))

    def sent(self, jobs: Sequence[Delivery], count: int) -> None:
        """Gives back the memory of jobs that the client has got. The jobs have `count` bytes."""
        self.account.give_back(count)

    def release(self, jobs: Delivery) -> None:
        """Releases the leases of jobs that were not sent. These leases count neither as attempts nor towards a limit of
        starts."""
        jobs.store.release_soon(self.org, jobs.leases())
        if jobs.on_unsent is not None:
            jobs.on_unsent(len(jobs.ids))
        self.account.give_back(jobs.bytes)

    async def serve(self) -> None:
        """Finds jobs until cancelled. Raises NoAnswer."""
        is_new = True
        while True:
            while self.credit <= 0:
                self._woken.clear()
                self._waits_for_credit = True
                await self._woken.wait()
                self._waits_for_credit = False
            if not await self._look(is_new=is_new):
                await self._rest()
            is_new = False

    async def serve_first(self) -> None:
        """Finds jobs until the first delivery has come or `stop_waiting` is called. Raises NoAnswer, RouterFull."""
        self._only_first = True
        more = await self._look(is_new=True)
        while not self._is_served():
            if not more:
                await self._rest()
            if not self._is_served():
                more = await self._look(is_new=False)

    def _is_served(self) -> bool:
        return self._received_any or self._stopped_waiting

    def stop_waiting(self) -> None:
        """Ends `serve_first`, with or without jobs."""
        self._stopped_waiting = True
        self.wake()

    async def _look(self, *, is_new: bool) -> bool:
        """Claims due jobs on all shards of the org. Returns whether there may be more. `is_new`: this consumer has not
        looked before."""
        self._woken.clear()
        members = self._fleet.shards_to_claim_from(self.org)
        self._enter(members)
        if is_new and all(member.room.is_empty_for(self) for member in members):
            # Other consumers of these queues have found nothing and still wait: a claim would find nothing either.
            return False
        self._claiming = True
        more = await self.claim(members, woken=not is_new)
        self._claiming = False
        return more

    async def _rest(self) -> None:
        self.idle = True
        self._tell_ready()
        await self._woken.wait()
        self.idle = False

    def _tell_ready(self) -> None:
        """Tells the wait rooms that jobs can be handed over to this consumer."""
        for member in self._entered:
            member.room.rests(self)

    async def claim(self, members: Sequence[ShardHandle], *, woken: bool = False) -> bool:
        """Claims jobs from these shards, up to the credit. Returns whether there may be more. `woken`: the consumer was
        woken, perhaps by a job that is due later: a probe must find out when that job is due. Raises NoAnswer if no
        shard answers.
        """
        unavailable = set[ShardName]()
        brought = False
        most = min(self.credit, _JOBS_MAX)
        # One limit for all shards together: the jobs of a Dequeue go into one message.
        room = CLAIM_BYTES_MAX
        turns = deque(product(members, self._fleet.starts.split(self.org, self.queues)))
        while turns:
            member, part = turns.popleft()
            queues, buckets, in_flight = part
            if not member.room.gives:
                continue
            if hold_s(buckets) > 0:
                member.room.hold(self.org, queues, look_again_s(buckets))
                continue
            # Before the claim leases jobs, reserve the memory that they may take, so that leased jobs are never refused
            # for lack of room. After the claim, the account holds what the jobs really take.
            shard = member.store.name
            reserved = bytes_most(most)
            if not brought:
                await self._receiver.reserve(reserved, shard)
            elif not self.account.take_in_turn(reserved, shard=shard):
                # Jobs that have come from another shard must not wait for memory for this shard's jobs.
                return True
            try:
                room_for = min(self.credit, most)
                if room_for <= 0:
                    return True
                claimed = await self._fleet.starts.claim(
                    member.store,
                    self.org,
                    part,
                    max_jobs=room_for,
                    window_us=self.window_us,
                    worker=self.worker,
                    bytes_max=room,
                )
                if isinstance(claimed, Held):
                    if claimed.locked is not None and not self._entered:
                        # The call does not wait, so nothing would look again. No jobs would mean that none is due.
                        raise claimed.locked
                    member.room.hold(self.org, queues, claimed.for_s)
                    continue
                taken = claimed.result
                if taken.jobs:
                    brought = True
                    self.credit -= len(taken.jobs)
                    most -= len(taken.jobs)
                    delivery = fast_write.claimed(member.store, self.org, taken.jobs)
                    if claimed.put_back is not None:
                        delivery = delivery._replace(on_unsent=claimed.put_back)
                    self.account.hold(delivery.bytes)
                    self.give(delivery)
            except NoAnswer:
                # Take the jobs of the other shards. When this shard is back, its sweep wakes the consumer.
                unavailable.add(shard)
                if len(unavailable) == len(members):
                    raise
                continue
            finally:
                self.account.give_back(reserved, shard=shard)
            room -= taken.bytes
            # The claim ended at a limit (credit, Permit, bytes or statements): there may be more jobs.
            if not claimed.is_short or room < CLAIM_BYTES_MIN:
                if self._entered:
                    member.room.found_more(self, queues)
                if taken.cut or claimed.max_jobs == room_for or room < CLAIM_BYTES_MIN:
                    return True
                # The claim took all that its Permit allowed. The next Permit may allow more, but the other queues get
                # their turn first.
                turns.append((member, part))
            elif self._entered:
                if in_flight is None:
                    member.room.found_all(self, queues, woken=woken)
                elif not await member.room.hold_if_full(self.org, queues, in_flight):
                    # Perhaps a lease has ended since the claim: only a probe tells whether there are more jobs.
                    member.room.found_all(self, queues, woken=True)
        return False

    def close(self) -> None:
        self._closed = True
        self.idle = False
        self._enter([])

    def _enter(self, members: Sequence[ShardHandle]) -> None:
        """Enters the wait rooms of these shards, and leaves all others."""
        if members == self._entered:
            return
        for member in self._entered:
            if member not in members:
                member.room.leave(self)
        for member in members:
            if member not in self._entered:
                member.room.enter(self)
        self._entered = list(members)
