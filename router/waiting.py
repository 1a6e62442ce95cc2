"""Where consumers wait for work on one shard, and who wakes them. Nothing here is truth (I7): a consumer that is woken
in vain waits again, and one that is not woken is found by the sweep.

Woken by: an enqueue of this router, the doorbell of another one, the time that a probe found a job to be due, the
sweep. An enqueue may also hand its jobs over: they are leased to those who wait in the very insert, and need no claim.
While nobody waits, nothing is asked of the shard.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import random
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from router import wire
from router.buffer import Account
from router.wire import Given
from shard.claiming import CLAIM_BYTES_MAX, JOB_BYTES
from shard.doorbell import Doorbell
from shard.enqueuing import Handed, Handover, Taker
from shard.errors import ShardError
from shard.lease import lease_of
from shard.store import Due, Store
from shard.vocabulary import PRIORITY_DEFAULT, NewJobs, OrgId, QueueId, QueueName

_log = logging.getLogger(__name__)

# How late a job may be seen that every hint has missed.
SWEEP_S = 3.0
# For jobs that are due later than this a sweep sets no timers: another one tells in time, and probes have set theirs.
# Thousands would be set anew each time, for nothing.
_SOON_S = 3 * SWEEP_S
# Between two probes.
_PAUSE_S = 0.010
# A probe that nothing in particular calls for is not made so soon after another.
_OLD_S = 1.0

_STRANGERS_MAX = 100_000

# Of leases. They need only differ: whose lease it is, the org says.
_numbers = random.Random()

_Key = tuple[OrgId, QueueName]


class Waiter(Protocol):
    """A consumer, as the room knows it."""

    @property
    def org(self) -> OrgId: ...
    @property
    def queues(self) -> Sequence[QueueName]: ...
    @property
    def worker(self) -> str: ...
    @property
    def window_us(self) -> int: ...
    @property
    def account(self) -> Account:
        """What it holds of the buffer: jobs that are on their way to it are counted there."""
        ...

    # How many more jobs it takes.
    credit: int
    # It has found nothing, and does nothing but wait.
    idle: bool
    # It takes once, and that is on its way to it: nothing else wakes it.
    promised: bool

    @property
    def takes_once(self) -> bool:
        """What it is handed first is all that it takes."""
        ...

    @property
    def full(self) -> bool:
        """Whatever its credit, it takes nothing before its consumer has read."""
        ...

    @property
    def looking(self) -> bool:
        """It was woken, or looks, and has not said what it found."""
        ...

    def wake(self) -> None:
        """There may be work."""
        ...

    def give(self, jobs: Given) -> None:
        """These jobs are leased to it, and its credit is less by as many."""
        ...


@dataclass(slots=True)
class _Queue:
    """A queue that somebody waits for."""

    # Those served last come last.
    waiters: OrderedDict[Waiter, None] = field(default_factory=OrderedDict[Waiter, None])
    # There may be jobs that nobody had room for.
    backlog: bool = False
    probed_s: float = -math.inf
    number: QueueId | None = None
    due: asyncio.TimerHandle | None = None


class _Share(NamedTuple):
    """The jobs of an enqueue that one waiter is to have. `held`: what its account holds for them until then."""

    waiter: Waiter
    taker: Taker
    positions: list[int]
    held: int


class Room:
    def __init__(self, store: Store, doorbell: Doorbell) -> None:
        # Whether the shard gives jobs at all. Who waits stays meanwhile, and takes none.
        self.gives = True
        self._store = store
        self._doorbell = doorbell
        self._queues: dict[_Key, _Queue] = {}
        self._by_number: dict[QueueId, _Key] = {}
        # Queues that nobody here waited for when another router rang for them.
        self._strangers: set[QueueId] = set()
        self._to_probe: set[_Key] = set()
        self._probing = asyncio.Event()
        store.visible = self._visible

    # ── Those who wait ───────────────────────────────────────────────────────────────────────────────────────────────

    def enter(self, waiter: Waiter) -> None:
        """From now on it is woken; while it is idle and has credit, jobs are handed to it."""
        for queue in waiter.queues:
            self._queues.setdefault((waiter.org, queue), _Queue()).waiters[waiter] = None

    def leave(self, waiter: Waiter) -> None:
        for queue in waiter.queues:
            key = waiter.org, queue
            there = self._queues.get(key)
            if there is None:
                continue
            there.waiters.pop(waiter, None)
            if not there.waiters:
                if there.due is not None:
                    there.due.cancel()
                if there.number is not None:
                    self._by_number.pop(there.number, None)
                del self._queues[key]
            elif there.backlog or waiter.looking:
                # It may have been woken for a job that it now does not take.
                self._wake(key, 1)

    def orgs(self) -> set[OrgId]:
        """Of those who wait."""
        return {org for org, _ in self._queues}

    def wake_all(self) -> None:
        """Has everybody look, and look about."""
        self.wake_those(self.orgs())

    def wake_those(self, orgs: Collection[OrgId]) -> None:
        """Has everybody of these orgs look, and look about."""
        for (org, _), there in self._queues.items():
            if org in orgs:
                for waiter in there.waiters:
                    waiter.wake()

    def found_less(self, waiter: Waiter, *, woken: bool) -> None:
        """It looked, and took all there was: what falls due later, a probe tells. `woken`: by something, which may be
        just that."""
        for queue in waiter.queues:
            there = self._queues.get((waiter.org, queue))
            if there is not None:
                there.backlog = False
        if woken:
            self._probe_soon([(waiter.org, queue) for queue in waiter.queues])
        else:
            self._probe_old(waiter)

    def found_enough(self, waiter: Waiter) -> None:
        """It took as many jobs as it could: there may be more."""
        for queue in waiter.queues:
            there = self._queues.get((waiter.org, queue))
            if there is not None:
                there.backlog = True
                self._wake((waiter.org, queue), 1)

    def is_empty_for(self, waiter: Waiter) -> bool:
        """Whether somebody has looked into all of its queues, has found nothing, and still waits there."""
        for queue in waiter.queues:
            there = self._queues.get((waiter.org, queue))
            if there is None or there.backlog or not next(iter(there.waiters)).idle:
                return False
        self._probe_old(waiter)
        return True

    def has_backlog(self, waiter: Waiter) -> bool:
        return any(
            there.backlog for queue in waiter.queues if (there := self._queues.get((waiter.org, queue))) is not None
        )

    # ── Those who bring work ─────────────────────────────────────────────────────────────────────────────────────────

    def offer(self, jobs: NewJobs) -> Handover | None:
        """Takers for jobs that are due at once and bring nothing that a claim would have to look at. None: nobody
        waits. What they are promised counts against their credit until the handover is done."""
        if not self._queues or not self.gives:
            return None
        positions: dict[QueueName, list[int]] = {}
        if len(set(jobs.queues)) == 1:
            positions[jobs.queues[0]] = list(range(len(jobs)))
        else:
            for at, queue in enumerate(jobs.queues):
                positions.setdefault(queue, []).append(at)
        takers: dict[int, Taker] = {}
        shares: list[_Share] = []
        for queue, there in positions.items():
            awaited = self._queues.get((jobs.org, queue))
            if awaited is None or awaited.backlog:
                continue
            ready = (waiter for waiter in awaited.waiters if waiter.idle and waiter.credit > 0 and not waiter.full)
            willing = list(itertools.islice(ready, len(there)))
            if jobs.priorities:
                there.sort(key=lambda at: jobs.priorities.get(at, PRIORITY_DEFAULT))
            for turn, waiter in enumerate(willing):
                if not there:
                    break
                # Dealt evenly, in one piece each; whoever got some is last the next time.
                count = min(waiter.credit, -(-len(there) // (len(willing) - turn)))
                share, there = there[:count], there[count:]
                if waiter.takes_once:
                    # Its answer is one message, which has room for so much.
                    waiter.idle = False
                    waiter.promised = True
                    fitting = _first_bytes(jobs, share)
                    share, there = share[:fitting], share[fitting:] + there
                held = sum([len(jobs.payloads[at]) for at in share]) + JOB_BYTES * len(share)
                if not waiter.account.take(held):
                    # What it has not read fills its share of this process.
                    waiter.promised = False
                    there = share + there
                    continue
                waiter.credit -= len(share)
                awaited.waiters.move_to_end(waiter)
                taker = Taker(_numbers.getrandbits(63), waiter.worker, waiter.window_us)
                takers.update(dict.fromkeys(share, taker))
                shares.append(_Share(waiter, taker, share, held))
        if not takers:
            return None
        return Handover(takers=takers, done=lambda handed: self._handed(jobs, shares, handed))

    def _handed(self, jobs: NewJobs, shares: Sequence[_Share], handed: Handed) -> None:
        leased = set(handed.positions)
        for waiter, taker, share, held in shares:
            waiter.promised = False
            got = [at for at in share if at in leased]
            if len(got) < len(share):
                waiter.credit += len(share) - len(got)
                waiter.wake()
                if not handed.sure:
                    unsure = [lease_of(jobs.ids[at], taker.number) for at in share if at not in leased]
                    self._store.release_soon(jobs.org, unsure)
            if got:
                given = wire.handed(self._store, jobs, got, taker, handed)
                waiter.account.hold(given.bytes)
                waiter.give(given)
            waiter.account.give_back(held)

    def stored(self, jobs: NewJobs, known: Collection[int], handover: Handover | None) -> None:
        """These jobs have committed, but for those at the positions `known`."""
        # Takers who were not handed theirs may have looked before it was stored: it is told of as though not offered.
        takers: Collection[int] = ()
        if handover is not None and handover.handed == len(handover.takers):
            takers = handover.takers
        if len(takers) == len(jobs) or len(known) == len(jobs):
            return
        left = Counter(jobs.queues)
        if takers or known:
            left.subtract(jobs.queues[at] for at in {*takers, *known})
        ring: list[QueueName] = []
        later = bool(jobs.delay_us or jobs.run_at_us)
        for queue, count in left.items():
            if count > 0:
                key = jobs.org, queue
                if later:
                    self._probe_soon([key])
                if self._wake(key, count) < count or later:
                    ring.append(queue)
        if ring:
            self._doorbell.ring(self._store.names.known(jobs.org, ring))

    def heard(self, numbers: Collection[QueueId] | None) -> None:
        """Another router rang."""
        if not self._queues:
            return
        if numbers is None:
            self._probe_soon(list(self._queues))
            return
        for number in numbers:
            key = self._by_number.get(number)
            if key is not None:
                self._wake(key, 1)
            elif number not in self._strangers:
                if len(self._strangers) >= _STRANGERS_MAX:
                    self._strangers.clear()
                self._strangers.add(number)
                # It may be one that somebody waits for since before it was made.
                self._probe_soon([key for key, queue in self._queues.items() if queue.number is None])

    def arrived(self, numbers: Collection[QueueId]) -> None:
        """Jobs of these queues came from another shard."""
        self._store.arrived(numbers)
        self.heard(numbers)
        # What they have that is due later, nobody is woken for.
        self._probe_soon([key for number in numbers if (key := self._by_number.get(number)) is not None])

    def brought(self, org: OrgId, queue: QueueName) -> None:
        """This queue may have work by other means than an enqueue: it was resumed, or jobs of it redriven."""
        self._doorbell.ring(self._store.names.known(org, [queue]))
        self._probe_soon([(org, queue)])

    def _visible(self, numbers: set[QueueId]) -> None:
        """Jobs of these queues came back."""
        if not numbers:
            return
        self._doorbell.ring(numbers)
        self._probe_soon([key for number in numbers if (key := self._by_number.get(number)) is not None])

    def _wake(self, key: _Key, jobs: int) -> int:
        """Wakes those who wait, until they have room for so many jobs. Answers how many they have room for."""
        there = self._queues.get(key)
        if there is None:
            return 0
        room = 0
        for waiter in list(there.waiters):
            if room >= jobs:
                return room
            if waiter.credit > 0 and not waiter.promised:
                waiter.wake()
                there.waiters.move_to_end(waiter)
                if not waiter.full:
                    room += waiter.credit
        there.backlog = there.backlog or room < jobs
        return room

    # ── Upkeep ───────────────────────────────────────────────────────────────────────────────────────────────────────

    async def run(self) -> None:
        """Probes what was asked for, soon, until cancelled."""
        while True:
            await self._probing.wait()
            self._probing.clear()
            keys, self._to_probe = self._to_probe, set()
            try:
                numbers = await self._numbers(keys)
                if numbers:
                    self._expect(await self._store.probe(numbers))
            except ShardError:
                # The sweep tries again.
                pass
            except Exception:  # noqa: BLE001 - one shard's trouble must not end this router
                _log.exception("could not look for work on shard %r", self._store.name)
            await asyncio.sleep(_PAUSE_S)

    async def sweep(self) -> None:
        """Finds what every hint has missed, and puts the store's floors where they belong."""
        await self._numbers(list(self._queues))
        self._expect(await self._store.sweep(self._by_number), within_s=_SOON_S)

    async def _numbers(self, keys: Iterable[_Key]) -> list[QueueId]:
        """Those of the awaited queues that exist."""
        numbers: list[QueueId] = []
        for key, number in (await self._store.names.find([key for key in keys if key in self._queues])).items():
            there = self._queues.get(key)
            if there is not None:
                there.number = number
                self._by_number[number] = key
                numbers.append(number)
        return numbers

    def _expect(self, due: Due, *, within_s: float = math.inf) -> None:
        """Wakes who has work now, and will wake who has some within `within_s`; of the rest others tell."""
        loop = asyncio.get_running_loop()
        for number, when in due.first.items():
            key = self._by_number.get(number)
            there = self._queues.get(key) if key is not None else None
            if key is None or there is None:
                continue
            # Two times of the shard's clock make a span, which is all that is counted here.
            left_s = (when - due.now) / 1_000_000
            if left_s > within_s:
                continue
            if there.due is not None:
                there.due.cancel()
                there.due = None
            if left_s <= 0:
                self._wake(key, 1)
            else:
                there.due = loop.call_later(left_s, self._fell_due, key)

    def _fell_due(self, key: _Key) -> None:
        # Whoever takes it, and finds no more, asks for the next time.
        self._wake(key, 1)

    def _probe_old(self, waiter: Waiter) -> None:
        """What falls due later is known of queues that were probed a moment ago: what changed since, was told."""
        now_s = asyncio.get_running_loop().time()
        for queue in waiter.queues:
            there = self._queues.get((waiter.org, queue))
            if there is not None and now_s - there.probed_s > _OLD_S:
                there.probed_s = now_s
                self._probe_soon([(waiter.org, queue)])

    def _probe_soon(self, keys: Iterable[_Key]) -> None:
        self._to_probe.update(keys)
        if self._to_probe:
            self._probing.set()


def _first_bytes(jobs: NewJobs, positions: Sequence[int]) -> int:
    """How many of these jobs fit into an answer, by the rule for claims: it ends with the job that fills it."""
    room = CLAIM_BYTES_MAX
    for count, at in enumerate(positions):
        if room <= 0:
            return count
        room -= len(jobs.payloads[at])
    return len(positions)
