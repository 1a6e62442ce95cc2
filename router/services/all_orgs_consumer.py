"""A consumer of all orgs. It claims nothing itself: its pool decides whose jobs it gets (router/fleet/org_pool.py)."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from router.buffer import Account
from router.codec.fast_write import Delivery
from router.fleet.fleet import Fleet
from router.fleet.org_pool import OrgPool
from router.services.consumer import Receiver
from shard.vocabulary import OrgId, QueueName


class AllOrgsConsumer:
    """Takes jobs of all orgs for one receiver while `serve` runs, as Consumer does for one org. `account` is the
    receiver's own. The memory of received jobs counts for their orgs, on parts of this account (Account.of), so that no
    org can fill all the memory."""

    def __init__(
        self,
        fleet: Fleet,
        receiver: Receiver,
        account: Account,
        *,
        queues: Sequence[QueueName],
        worker: str,
        window_us: int,
        kinds: Sequence[str] = (),
        credit: int = 0,
    ) -> None:
        self.queues = queues
        self.kinds = kinds
        self.worker = worker
        self.window_us = window_us
        self.credit = credit
        self.account = account
        self.idle = True
        self._pools = fleet.pools
        self._receiver = receiver
        self._pool: OrgPool | None = None
        self._closed = False

    @property
    def all_orgs(self) -> bool:
        return True

    @property
    def takes_once(self) -> bool:
        return False

    @property
    def full(self) -> bool:
        return self._receiver.is_full()

    def account_of(self, org: OrgId) -> Account:
        return self.account.of(org)

    async def serve(self) -> None:
        """Gets jobs until cancelled."""
        self._pool = self._pools.enter(self)
        await asyncio.Event().wait()

    def add_credit(self, jobs: int) -> None:
        self.credit += jobs
        self.wake()

    def keep_places(self, jobs: int) -> None:
        self.credit -= jobs

    def free_places(self, unused: int) -> None:
        if unused:
            self.add_credit(unused)

    def wake(self) -> None:
        if self._pool is not None and not self._closed:
            self._pool.able(self)

    def give(self, jobs: Delivery) -> None:
        if self._pool is not None:
            self._pool.handed(jobs, self.window_us)
        self.take(jobs)

    def take(self, jobs: Delivery) -> None:
        if self._closed:
            self.release(jobs)
            return
        self._receiver.receive(jobs)

    def sent(self, jobs: Sequence[Delivery], count: int) -> None:
        """Gives back the memory of jobs that the client has got, and wakes the consumer. The jobs have `count`
        bytes."""
        for delivery in jobs:
            self.account_of(delivery.org).give_back(delivery.bytes)
        self.wake()

    def take_back(self, jobs: Delivery) -> None:
        """Releases jobs that were not sent, and gets their credit back."""
        self.release(jobs)
        self.add_credit(len(jobs.ids))

    def release(self, jobs: Delivery) -> None:
        """Releases the leases of jobs that were not sent. Their attempts do not count, and their orgs are charged
        nothing."""
        jobs.store.release_soon(jobs.org, jobs.leases())
        if jobs.on_unsent is not None:
            jobs.on_unsent(len(jobs.ids))
        if self._pool is not None:
            self._pool.returned(jobs)
        self.account_of(jobs.org).give_back(jobs.bytes)

    def close(self) -> None:
        self._closed = True
        self.idle = False
        if self._pool is not None:
            self._pool.leave(self)
