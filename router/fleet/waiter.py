"""What the wait room of a shard needs to know about a consumer that waits for jobs, a watcher that only wants to know
of jobs, and a queue for which they wait."""

from __future__ import annotations

import asyncio
import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from router.buffer import Account
from router.codec.fast_write import Delivery
from shard.vocabulary import OrgId, QueueId, QueueName


class Waiter(Protocol):
    """A consumer, as the wait room sees it."""

    @property
    def org(self) -> OrgId: ...
    @property
    def queues(self) -> Sequence[QueueName]: ...
    @property
    def kinds(self) -> Sequence[str]:
        """The kinds for which the consumer has handlers; empty: for all kinds. The consumer gets jobs of other kinds
        too."""
        ...

    @property
    def worker(self) -> str: ...
    @property
    def window_us(self) -> int: ...
    @property
    def account(self) -> Account:
        """The consumer's share of the buffer. Jobs on their way to the consumer count in it."""
        ...

    @property
    def all_orgs(self) -> bool:
        """Whether it takes jobs of all orgs. If so, the leases that it gets name their orgs, and each org has an
        account of its own for its jobs."""
        ...

    def account_of(self, org: OrgId) -> Account:
        """Returns the account that pays for jobs of this org."""
        ...

    # How many more jobs it takes.
    credit: int
    # Whether it has found no jobs and waits.
    idle: bool
    # Whether it takes only one delivery, and this delivery is on its way: then nothing else wakes it.
    promised: bool

    @property
    def takes_once(self) -> bool:
        """Whether it takes only one delivery."""
        ...

    @property
    def full(self) -> bool:
        """Whether it takes no jobs, whatever its credit, until its client has read what was sent to it."""
        ...

    @property
    def looking(self) -> bool:
        """Whether it was woken or is claiming, and has not reported yet what it found."""
        ...

    def wake(self) -> None:
        """Notifies the waiter that there may be jobs."""
        ...

    def give(self, jobs: Delivery) -> None:
        """Gives the waiter jobs that are leased to it. Its credit has been reduced already."""
        ...


class Watcher(Protocol):
    """Somebody who wants to know when a queue may have ready jobs, and who takes no jobs."""

    def wake(self) -> None:
        """Notifies the watcher that there may be jobs, or that it may have to watch on other shards."""
        ...


@dataclass(slots=True)
class AwaitedQueue:
    """A queue that at least one consumer waits for, or that somebody watches."""

    # The most recently served consumer comes last.
    waiters: OrderedDict[Waiter, None] = field(default_factory=OrderedDict[Waiter, None])
    watchers: set[Watcher] = field(default_factory=set[Watcher])
    # Whether there may be jobs that no waiting consumer had room for.
    backlog: bool = False
    probed_s: float = -math.inf
    number: QueueId | None = None
    # Fires when the next job is due.
    due_timer: asyncio.TimerHandle | None = None
    # While it runs, a limit holds the jobs of this queue back.
    hold_timer: asyncio.TimerHandle | None = None
