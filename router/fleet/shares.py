"""Deals new jobs out to the consumers that wait for a queue. Places for the jobs are kept at the consumers until it is
known which jobs were leased to them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from router.buffer import Account
from router.codec.fast_write import Delivery
from router.fleet.waiter import AwaitedQueue, Recipient
from shard.lease_token import draw_number
from shard.queue.claim import CLAIM_BYTES_MAX, JOB_BYTES
from shard.queue.pending_enqueue import Taker
from shard.vocabulary import OrgId

_W = TypeVar("_W", bound=Recipient)


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """Places for `count` jobs at one waiter. `end` must be called exactly once: until then the places count against the
    waiter's credit, and the account holds `held` bytes for the jobs."""

    waiter: Recipient
    account: Account
    taker: Taker
    count: int
    held: int

    def end(self, jobs: Delivery | None) -> None:
        """Gives the waiter the jobs that were leased to it, and gives the credit for the other places back. `jobs` is
        None if no job was leased to it."""
        self.waiter.free_places(self.count - (len(jobs.ids) if jobs is not None else 0))
        if jobs is not None:
            self.account.hold(jobs.bytes)
            self.waiter.give(jobs)
        self.account.give_back(self.held)


def deal(awaited: AwaitedQueue[_W] | None, org: OrgId, sizes: Sequence[int]) -> list[Share]:
    """Keeps places for new jobs of an org with payloads of these sizes at idle waiters of the queue. The first share is
    for the first jobs, and so on; the last jobs get no place if there are not enough places."""
    if awaited is None or awaited.backlog:
        return []
    willing = _willing(awaited, len(sizes))
    shares: list[Share] = []
    dealt = 0
    for turn, waiter in enumerate(willing):
        left = len(sizes) - dealt
        if not left:
            break
        # Deal the jobs evenly, one share to each waiter. A waiter that gets a share comes last in the next deal.
        count = min(waiter.credit, -(-left // (len(willing) - turn)))
        if waiter.takes_once:
            # The waiter's answer is a single message of limited size.
            count = _first_bytes(sizes[dealt : dealt + count])
        held = sum(sizes[dealt : dealt + count]) + JOB_BYTES * count
        account = waiter.account_of(org)
        if not account.take(held):
            # The waiter's part of the buffer is full of jobs that its client has not read yet.
            continue
        waiter.keep_places(count)
        awaited.served(waiter)
        taker = Taker(draw_number(), waiter.worker, waiter.window_us)
        shares.append(Share(waiter=waiter, account=account, taker=taker, count=count, held=held))
        dealt += count
    return shares


def _willing(awaited: AwaitedQueue[_W], most: int) -> list[_W]:
    """Returns up to `most` waiters that can be handed jobs, the least recently served first."""
    willing: list[_W] = []
    spent: list[_W] = []
    for waiter in awaited.able:
        if waiter.credit <= 0:
            spent.append(waiter)
        elif waiter.idle and not waiter.full:
            willing.append(waiter)
            if len(willing) == most:
                break
    for waiter in spent:
        del awaited.able[waiter]
    return willing


def _first_bytes(sizes: Sequence[int]) -> int:
    """Returns how many of these jobs fit into one answer. As in a claim, the job that reaches the limit is the last."""
    room = CLAIM_BYTES_MAX
    for count, size in enumerate(sizes):
        if room <= 0:
            return count
        room -= size
    return len(sizes)
