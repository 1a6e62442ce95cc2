"""The promises of this process to one sibling: places at this process's consumers, for jobs that the sibling stores.
Routers of other supervisors get no promises: they learn of new jobs by the doorbell (shard/queue/doorbell.py)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from router.codec.fast_write import Delivery
from router.fleet.shares import Share
from router.fleet.siblings.asks import JOBS_MAX, KEPT_S_MAX
from router.fleet.siblings.frame import Answer, Ask, Leased, Outcome, Place, QueueKey
from router.fleet.siblings.link import Link
from shard.fair_quota import FairQuota
from shard.lease_token import lease_of
from shard.queue.store import Store
from shard.vocabulary import Lease, OrgId, QueueName, ShardName

# When a sibling has ended, its enqueues may still be running in Postgres. After each of these times, the jobs that they
# may have leased are released.
_RELEASES_AFTER_S = 1.0, 10.0


class Consumers(Protocol):
    """The consumers of this process that wait for jobs of one shard."""

    @property
    def store(self) -> Store: ...

    def deal(self, org: OrgId, queue: QueueName, sizes: Sequence[int]) -> list[Share]:
        """Keeps places for jobs with payloads of these sizes: see router.fleet.shares."""
        ...


@dataclass(slots=True, kw_only=True, eq=False)
class _Kept:
    store: Store
    org: OrgId
    ids: Sequence[str]
    shares: Sequence[Share]
    until_s: float
    # Whether the waiters have got their credit back because the outcome did not come for a long time.
    given_up: bool = False

    def end(self) -> None:
        """Ends the shares without jobs, because as far as this process knows, no job was leased to the waiters."""
        if not self.given_up:
            self.given_up = True
            for share in self.shares:
                share.end(None)

    def leases(self) -> list[Lease]:
        """Returns the leases that the sibling's enqueue may make."""
        taken: list[Lease] = []
        for share in self.shares:
            ids = self.ids[len(taken) : len(taken) + share.count]
            taken += [lease_of(job_id, share.taker.number) for job_id in ids]
        return taken


class Promises:
    """`consumers` returns the consumers of a shard, or None if this process does not use the shard. `on_in_vain` is
    called with a queue when the sibling gets fewer places in it than it asked for."""

    def __init__(
        self, link: Link, consumers: Callable[[ShardName], Consumers | None], on_in_vain: Callable[[QueueKey], None]
    ) -> None:
        self._link = link
        self._consumers = consumers
        self._on_in_vain = on_in_vain
        # The kept places, by the number of the ask that asked for them. The oldest ask is first.
        self._kept: dict[int, _Kept] = {}
        self._jobs = FairQuota(JOBS_MAX)
        self._timer: asyncio.TimerHandle | None = None

    def on_ask(self, ask: Ask) -> None:
        """Keeps places for the jobs of the ask, and answers it. Raises ValueError if the number of the ask was used
        before."""
        number, key, ids, sizes, until_s = ask
        if number in self._kept:
            raise ValueError(f"ask {number} came twice")
        consumers = self._consumers(key.shard)
        shares: list[Share] = []
        in_time = time.monotonic() <= until_s
        if consumers is not None and in_time and self._jobs.fits(key.org, len(ids)):
            shares = consumers.deal(key.org, key.queue, sizes)
        count = sum(share.count for share in shares)
        if count < len(ids):
            self._on_in_vain(key)
        if consumers is not None and shares:
            loop = asyncio.get_running_loop()
            end_s = loop.time() + KEPT_S_MAX
            self._kept[number] = _Kept(store=consumers.store, org=key.org, ids=ids, shares=shares, until_s=end_s)
            self._jobs.take(key.org, count)
            if self._timer is None:
                self._timer = loop.call_at(end_s, self._give_up)
        places = [Place(*share.taker, share.count) for share in shares]
        self._link.out.answers.append(Answer(number, places))
        self._link.send_soon()

    def _give_up(self) -> None:
        """Ends promises that are too old: gives their waiters the credit back, and releases the jobs that may have been
        leased to these waiters."""
        loop = asyncio.get_running_loop()
        self._timer = None
        for kept in self._kept.values():
            if kept.given_up:
                continue
            if kept.until_s > loop.time():
                self._timer = loop.call_at(kept.until_s, self._give_up)
                return
            kept.end()
            # If the insert commits later, the outcome says so, and on_outcome releases the jobs of the insert.
            kept.store.release_soon(kept.org, kept.leases())

    def on_outcome(self, outcome: Outcome) -> None:
        """Gives the waiters the jobs that were leased to them. Raises ValueError."""
        number, leased = outcome
        kept = self._kept.get(number)
        if kept is None:
            raise ValueError(f"outcome {number} is of no promise")
        deliveries = _deliveries(kept, leased) if leased else [None] * len(kept.shares)
        del self._kept[number]
        self._jobs.give_back(kept.org, sum(share.count for share in kept.shares))
        if kept.until_s <= asyncio.get_running_loop().time():
            # This process was stopped for a while, and the sibling may have released the jobs.
            kept.end()
        if kept.given_up:
            for delivery in deliveries:
                if delivery is not None:
                    kept.store.release_soon(kept.org, delivery.leases())
        else:
            for share, delivery in zip(kept.shares, deliveries, strict=True):
                share.end(delivery)
        if leased:
            self._link.out.received.append(number)
            self._link.send_soon()

    def close(self) -> None:
        """Call this when the sibling is gone. Its enqueues may still lease jobs. These jobs are released twice: when
        the enqueues have probably ended, and some seconds later."""
        if self._timer is not None:
            self._timer.cancel()
        kept, self._kept = self._kept, {}
        for one in kept.values():
            one.end()
            for after_s in _RELEASES_AFTER_S:
                asyncio.get_running_loop().call_later(after_s, one.store.release_soon, one.org, one.leases())


def _deliveries(kept: _Kept, leased: Sequence[Leased]) -> list[Delivery | None]:
    """Returns the jobs of each share, or None for a share to which no job was leased. Raises ValueError if `leased`
    does not fit the promise."""
    if len(leased) != len(kept.shares):
        raise ValueError(f"an outcome is about {len(leased)} consumer(s) instead of {len(kept.shares)}")
    deliveries: list[Delivery | None] = []
    at = 0
    for share, (deadline, positions, jobs) in zip(kept.shares, leased, strict=True):
        ids = kept.ids[at : at + share.count]
        at += share.count
        if positions is not None:
            if list(positions) != sorted({position for position in positions if position < share.count}):
                raise ValueError(f"an outcome is about jobs {positions} of {share.count}")
            ids = [ids[position] for position in positions]
        if len(ids) != len(jobs):
            raise ValueError(f"an outcome has {len(jobs)} job(s) instead of {len(ids)}")
        if ids:
            deliveries.append(Delivery(kept.store, share.taker.number, deadline, ids, list(jobs)))
        else:
            deliveries.append(None)
    return deliveries
