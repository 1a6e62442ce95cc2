"""What the wait room of a shard needs to know about a consumer that waits for jobs, a watcher that only wants to know
of jobs, and a queue for which they wait."""

from __future__ import annotations

import asyncio
import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from router.buffer import Account
from router.codec.fast_write import Delivery
from shard.vocabulary import OrgId, QueueId, QueueName


class Recipient(Protocol):
    """A consumer, as hand-overs see it."""

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
    def all_orgs(self) -> bool:
        """Whether the consumer takes jobs of all orgs. If so, the leases that it gets name their orgs, and each org has
        an account of its own for its jobs."""
        ...

    def account_of(self, org: OrgId) -> Account:
        """Returns the account that counts the consumer's jobs of this org in the buffer. The account also counts the
        jobs that are on their way to the consumer."""
        ...

    @property
    def credit(self) -> int:
        """How many more jobs the consumer takes."""
        ...

    @property
    def idle(self) -> bool:
        """Whether the consumer has found no jobs and waits."""
        ...

    @property
    def takes_once(self) -> bool:
        """Whether the consumer takes only one delivery."""
        ...

    @property
    def full(self) -> bool:
        """Whether the consumer takes no jobs for now, even if it has credit, because its client has not read enough of
        what was sent."""
        ...

    def keep_places(self, jobs: int) -> None:
        """Reduces the consumer's credit by these jobs, which may be on their way to it. The caller must call
        `free_places` later."""
        ...

    def free_places(self, unused: int) -> None:
        """Call this after `keep_places`, when it is known which jobs come. If there are unused places, gives the
        consumer back the credit for these places, and wakes it."""
        ...

    def give(self, jobs: Delivery) -> None:
        """Gives the consumer jobs that are leased to it. Its credit has been reduced already."""
        ...


class Waiter(Recipient, Protocol):
    """A consumer of one org, as the wait room sees it."""

    @property
    def org(self) -> OrgId: ...
    @property
    def promised(self) -> bool:
        """Whether the waiter takes only one delivery, and this delivery is on its way: then nothing else wakes it."""
        ...

    @property
    def looking(self) -> bool:
        """Whether the waiter was woken or is claiming, and has not reported yet what it found."""
        ...

    def wake(self) -> None:
        """Notifies the waiter that there may be jobs."""
        ...


class Watcher(Protocol):
    """Somebody who wants to know when a queue may have ready jobs, and who takes no jobs."""

    def wake(self) -> None:
        """Notifies the watcher that there may be jobs, or that it may have to watch on other shards."""
        ...


_W = TypeVar("_W", bound=Recipient)


@dataclass(slots=True)
class AwaitedQueue(Generic[_W]):
    """A queue that at least one consumer waits for, or that somebody watches."""

    waiters: dict[_W, None] = field(default_factory=dict[_W, None])
    # The waiters that may have credit. The most recently served one comes last. A waiter that has no credit when its
    # turn comes is removed, so that no later search looks at it again.
    able: OrderedDict[_W, None] = field(default_factory=OrderedDict[_W, None])
    watchers: set[Watcher] = field(default_factory=set[Watcher])
    # Whether there may be jobs that no waiting consumer had room for.
    backlog: bool = False
    probed_s: float = -math.inf
    number: QueueId | None = None
    # The timer that fires when the next job is due.
    due_timer: asyncio.TimerHandle | None = None
    # While this timer runs, a limit holds the jobs of this queue back.
    hold_timer: asyncio.TimerHandle | None = None

    def enter(self, waiter: _W) -> None:
        self.waiters[waiter] = self.able[waiter] = None

    def leave(self, waiter: _W) -> None:
        self.waiters.pop(waiter, None)
        self.able.pop(waiter, None)

    def has_credit(self, waiter: _W) -> None:
        """Call this when the waiter has credit again. If it had no credit when its turn came, it is served next,
        because all others have been served since its own last turn."""
        if waiter in self.waiters and waiter not in self.able:
            self.able[waiter] = None
            self.able.move_to_end(waiter, last=False)

    def served(self, waiter: _W) -> None:
        """Puts the waiter last, because it was woken or gets jobs."""
        self.able.move_to_end(waiter)
