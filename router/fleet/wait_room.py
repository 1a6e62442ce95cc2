"""Where consumers wait for jobs on one shard, and what wakes them. Waking a consumer is only a hint (I7). A consumer
that is woken and finds no job waits again. A consumer that no hint has woken is woken by the sweep.

Consumers are woken by an enqueue through this router, by the doorbell of another router, by a timer for a job that a
probe has found, and by the sweep. An enqueue may also hand its jobs over to consumers, so that no claim is needed
(router/fleet/handover.py). While no consumer waits, the shard is not queried.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

from router.fleet.all_orgs import AllOrgs
from router.fleet.ready_orgs import ReadyOrgs
from router.fleet.waiter import AwaitedQueue, Waiter, Watcher
from shard.errors import NoAnswer, ShardError
from shard.limits import InFlightLimits
from shard.queue.doorbell import Doorbell
from shard.queue.pending_enqueue import Handover
from shard.queue.queue_walk import org_number
from shard.queue.store import Store
from shard.queue.sweep import Due
from shard.vocabulary import NewJobs, OrgId, QueueId, QueueName

# A sweep sets no timer for a job that is due only after the time of this many sweeps. Such a timer is not needed: a
# later sweep finds the job before it is due, and a probe sets its own timer. Without this bound, each sweep might set
# thousands of timers again.
_SOON_SWEEPS = 3
# The pause between two probes.
_PAUSE_S = 0.010
# Without a particular reason, a queue is probed again only if its last probe is older than this.
_PROBE_AGE_S_MIN = 1.0

_UNAWAITED_MAX = 100_000
# Each time that `note_waiters` has noted this many consumers, it lets other tasks run.
_NOTED_AT_ONCE = 100

_Key = tuple[OrgId, QueueName]


class WaitRoom:
    """The consumers of this router that wait for jobs of one shard. Its owner calls `sweep` every `sweep_s` seconds.
    `pools` has the consumers that take jobs of all orgs, and `ready_orgs` finds jobs for these consumers."""

    def __init__(
        self, store: Store, doorbell: Doorbell, pools: AllOrgs, ready_orgs: ReadyOrgs, *, sweep_s: float
    ) -> None:
        # Whether the shard's state allows consumers to get jobs. If not, consumers stay in the room but take no jobs.
        self.gives = True
        self._store = store
        self._doorbell = doorbell
        self._pools = pools
        self._ready_orgs = ready_orgs
        self._soon_s = _SOON_SWEEPS * sweep_s
        self._queues: dict[_Key, AwaitedQueue[Waiter]] = {}
        self._by_number: dict[QueueId, _Key] = {}
        # Queues that no consumer in this room waited for when another router's doorbell named them.
        self._unawaited: set[QueueId] = set()
        self._to_probe: set[_Key] = set()
        # The queues whose jobs a limit of jobs in flight holds back, each with the number of its org.
        self._full: dict[_Key, int] = {}
        # `on_ready` is called when jobs of a queue can be handed over to a consumer. `on_gone` is called when no
        # consumer waits for the queue any more.
        self.on_ready: Callable[[OrgId, QueueName], None] = _ignore
        self.on_gone: Callable[[OrgId, QueueName], None] = _ignore
        self._probing = asyncio.Event()
        store.on_visible = self._visible

    # ── Consumers ────────────────────────────────────────────────────────────────────────────────────────────────────

    def enter(self, waiter: Waiter) -> None:
        """Adds a waiter. From now on, hints wake it, and jobs are handed over to it while it is idle and has credit."""
        self._note(waiter)
        for queue in waiter.queues:
            self._queues.setdefault((waiter.org, queue), AwaitedQueue()).enter(waiter)

    def leave(self, waiter: Waiter) -> None:
        """Removes a waiter. If there may be jobs that this waiter has not taken, wakes another waiter."""
        for queue in waiter.queues:
            key = waiter.org, queue
            awaited = self._queues.get(key)
            if awaited is None:
                continue
            awaited.leave(waiter)
            if not awaited.waiters:
                # The backlog and the hold timer have a meaning only while consumers wait for the queue.
                awaited.backlog = False
                if awaited.hold_timer is not None:
                    awaited.hold_timer.cancel()
                    awaited.hold_timer = None
                self._drop_if_unused(key, awaited)
                self.on_gone(*key)
            elif awaited.backlog or waiter.looking:
                # The waiter may have been woken for a job that it will not take now: wake another waiter.
                self._wake(key, 1)

    def _drop_if_unused(self, key: _Key, awaited: AwaitedQueue[Waiter]) -> None:
        if awaited.waiters or awaited.watchers:
            return
        if awaited.due_timer is not None:
            awaited.due_timer.cancel()
        if awaited.number is not None:
            self._by_number.pop(awaited.number, None)
        del self._queues[key]

    def watch(self, org: OrgId, queue: QueueName, watcher: Watcher) -> None:
        """From now on, wakes this watcher whenever the queue may have ready jobs. Perhaps nothing wakes the watcher for
        jobs that are ready already: look for these jobs after this call."""
        self._queues.setdefault((org, queue), AwaitedQueue()).watchers.add(watcher)
        # A probe finds out when the next job falls due.
        self._probe_soon([(org, queue)])

    def unwatch(self, org: OrgId, queue: QueueName, watcher: Watcher) -> None:
        awaited = self._queues.get((org, queue))
        if awaited is not None:
            awaited.watchers.discard(watcher)
            self._drop_if_unused((org, queue), awaited)

    async def note_waiters(self) -> None:
        """Records that all consumers in the room were seen. The owner of the room calls this every NOTE_S seconds."""
        waiters = {waiter: None for awaited in self._queues.values() for waiter in awaited.waiters}
        for number, waiter in enumerate(waiters):
            self._note(waiter)
            if number % _NOTED_AT_ONCE == 0:
                await asyncio.sleep(0)

    def _note(self, waiter: Waiter) -> None:
        self._store.consumers_seen.note(waiter.org, waiter.queues, waiter.kinds)

    def queue(self, org: OrgId, queue: QueueName) -> AwaitedQueue[Waiter] | None:
        """Returns the waiters and watchers of this queue, or None if the queue has none."""
        return self._queues.get((org, queue))

    def orgs(self) -> set[OrgId]:
        """Returns the orgs whose consumers wait in this room, or whose queues somebody watches."""
        return {org for org, _ in self._queues}

    @property
    def is_empty(self) -> bool:
        return not self._queues

    def has_credit(self, waiter: Waiter) -> None:
        """Call this when a waiter that had no credit has credit again. From now on, jobs of its queues may wake the
        waiter."""
        for queue in waiter.queues:
            awaited = self._queues.get((waiter.org, queue))
            if awaited is not None:
                awaited.has_credit(waiter)

    def rests(self, waiter: Waiter) -> None:
        """Call this when a waiter is idle and has got credit. Calls `on_ready` for those of the waiter's queues in
        which no older job waits, because new jobs of these queues can be handed over to the waiter."""
        for queue in waiter.queues:
            awaited = self._queues.get((waiter.org, queue))
            if awaited is not None and not awaited.backlog:
                self.on_ready(waiter.org, queue)

    def ready(self) -> Iterator[tuple[OrgId, QueueName]]:
        """Returns the queues whose jobs can be handed over to a consumer."""
        for key, awaited in self._queues.items():
            if not awaited.backlog and any(waiter.idle and waiter.credit > 0 for waiter in awaited.able):
                yield key

    def wake_all(self) -> None:
        """Wakes all consumers. Each then claims, and enters the rooms of its org's current shards."""
        self.wake_orgs(self.orgs())

    def wake_orgs(self, orgs: Collection[OrgId]) -> None:
        """Wakes all consumers of these orgs. Each then claims, and enters the rooms of its org's current shards."""
        for (org, _), awaited in self._queues.items():
            if org in orgs:
                for waiter in awaited.waiters:
                    waiter.wake()
                for watcher in awaited.watchers:
                    watcher.wake()

    def hold(self, org: OrgId, queues: Iterable[QueueName], for_s: float) -> None:
        """Call this when a limit holds the jobs of these queues back. For `for_s` seconds, no consumer is woken for
        these queues. After that, one consumer of each queue is woken."""
        loop = asyncio.get_running_loop()
        for queue in queues:
            awaited = self._queues.get((org, queue))
            if awaited is not None:
                # Nobody claims the queue's jobs for now, so they count as a backlog: newer jobs must not be handed over
                # before them.
                awaited.backlog = True
                if awaited.hold_timer is None:
                    awaited.hold_timer = loop.call_later(for_s, self._end_hold, (org, queue))

    def end_holds(self) -> None:
        """Wakes a consumer of each queue whose jobs were held back. Call this when the limits have changed."""
        for key, awaited in self._queues.items():
            if awaited.hold_timer is not None:
                awaited.hold_timer.cancel()
                self._end_hold(key)
        self.lease_ended(None)

    async def hold_if_full(self, org: OrgId, queues: Sequence[QueueName], limits: InFlightLimits) -> bool:
        """Call this after a claim of these queues has got fewer jobs than it asked for. If as many jobs are in flight
        as one of these limits allows, returns True. Then no consumer is woken for these queues until a lease of the org
        has ended."""
        number = next(iter(self._store.names.known(org, queues)), None)
        if number is None:
            return False
        keys = [(org, queue) for queue in queues]
        # Set `_full` first: otherwise a lease that ends while the shard counts would be missed.
        self._full.update(dict.fromkeys(keys, org_number(number)))
        is_full = False
        try:
            counts = await self._store.count_in_flight(org, queues[0], limits)
            is_full = any(most is not None and most == count for most, count in zip(limits, counts, strict=True))
        except NoAnswer:
            # The caller looks for jobs again, and that claim shows whether a limit has room.
            pass
        finally:
            for key in keys:
                if not is_full:
                    self._full.pop(key, None)
                elif (awaited := self._queues.get(key)) is not None:
                    awaited.backlog = True
        # A key is missing in `_full` if a lease has ended during the count, or if another caller has found room.
        # Nothing will wake a consumer for this key later. So return False: the caller must look for jobs again.
        return is_full and all(key in self._full for key in keys)

    def is_full(self, org: OrgId, queue: QueueName) -> bool:
        """Returns whether a limit of jobs in flight holds the jobs of this queue back."""
        return (org, queue) in self._full

    def lease_ended(self, numbers: Collection[QueueId] | None) -> None:
        """Call this when leases of these queues have ended, or may have ended. Then a limit of jobs in flight, of a
        queue or of its org, may allow more leases again. `numbers` is None if the leases may be of any queue."""
        if not self._full:
            return
        orgs = None if numbers is None else {org_number(number) for number in numbers}
        for key in [key for key, number in self._full.items() if orgs is None or number in orgs]:
            del self._full[key]
            self._wake(key, 1)
            if self._pools.serves(key[1]):
                self._pools.found(self._store.name, *key)

    def _end_hold(self, key: _Key) -> None:
        awaited = self._queues.get(key)
        if awaited is not None:
            awaited.hold_timer = None
            self._wake(key, 1)

    def found_all(self, waiter: Waiter, queues: Sequence[QueueName], *, woken: bool) -> None:
        """Call this after the waiter has taken all due jobs of these queues. A probe then finds out when the next job
        is due. `woken` says that a hint had woken the waiter. The hint may have been about a job that is due later, so
        the probe must not be skipped."""
        for queue in queues:
            awaited = self._queues.get((waiter.org, queue))
            if awaited is not None:
                awaited.backlog = False
        if woken:
            self._probe_soon([(waiter.org, queue) for queue in queues])
        else:
            self._probe_old(waiter)

    def found_more(self, waiter: Waiter, queues: Sequence[QueueName]) -> None:
        """Wakes another consumer, because there may be more jobs. Call this after the waiter has taken as many jobs of
        these queues as it could."""
        for queue in queues:
            awaited = self._queues.get((waiter.org, queue))
            if awaited is not None:
                awaited.backlog = True
                self._wake((waiter.org, queue), 1)

    def is_empty_for(self, waiter: Waiter) -> bool:
        """Returns whether the waiter need not claim: for each of its queues, another consumer has found no jobs and
        still waits, or the jobs are held back."""
        for queue in waiter.queues:
            awaited = self._queues.get((waiter.org, queue))
            if awaited is not None and self._is_held((waiter.org, queue), awaited):
                continue
            first = None if awaited is None or awaited.backlog else next(iter(awaited.able), None)
            if first is None or not first.idle:
                return False
        self._probe_old(waiter)
        return True

    def has_backlog(self, waiter: Waiter) -> bool:
        """Returns whether one of the waiter's queues may have jobs that no consumer had room for, and that are not held
        back."""
        return any(
            awaited.backlog and not self._is_held((waiter.org, queue), awaited)
            for queue in waiter.queues
            if (awaited := self._queues.get((waiter.org, queue))) is not None
        )

    def _is_held(self, key: _Key, awaited: AwaitedQueue[Waiter]) -> bool:
        return awaited.hold_timer is not None or self.is_full(*key)

    # ── New jobs ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def stored(self, jobs: NewJobs, duplicates: Collection[int], handover: Handover | None) -> None:
        """Wakes consumers for new jobs whose insert has committed. The jobs at the positions `duplicates` are not
        new."""
        # If some of the offered jobs were not handed over, the consumers that were to take them may have claimed before
        # the commit. So wake consumers as if no job had been offered. But an offered job that waits for a group slot
        # counts as handed over, because it needs no consumer until it gets the slot.
        takers: Collection[int] = ()
        if handover is not None and handover.is_complete:
            takers = handover.takers
        if len(takers) == len(jobs) or len(duplicates) == len(jobs):
            return
        remaining = Counter(jobs.queues)
        if takers or duplicates:
            remaining.subtract(jobs.queues[at] for at in {*takers, *duplicates})
        ring: list[QueueName] = []
        later = bool(jobs.delay_us or jobs.run_at_us)
        for queue, count in remaining.items():
            if count > 0:
                key = jobs.org, queue
                if later:
                    self._probe_soon([key])
                room = self._wake(key, count)
                if room < count and self._pools.serves(queue) and not self.is_full(*key):
                    room += self._pools.room(queue, count - room)
                    self._ready_orgs.stored(jobs.org, queue, later=later)
                if room < count or later:
                    ring.append(queue)
        if ring:
            self._doorbell.ring(self._store.names.known(jobs.org, ring))

    def on_doorbell(self, numbers: Collection[QueueId] | None) -> None:
        """Wakes consumers of these queues, because another router's doorbell rang for them. If `numbers` is None, the
        doorbell may have rung for any queue."""
        self._ready_orgs.rang(numbers)
        if not self._queues:
            return
        if numbers is None:
            self._probe_soon(list(self._queues))
            return
        for number in numbers:
            key = self._by_number.get(number)
            if key is not None:
                self._wake(key, 1)
            elif number not in self._unawaited:
                if len(self._unawaited) >= _UNAWAITED_MAX:
                    self._unawaited.clear()
                self._unawaited.add(number)
                # A consumer may have begun to wait for this queue before the queue was created and got its number.
                self._probe_soon([key for key, queue in self._queues.items() if queue.number is None])

    def arrived(self, numbers: Collection[QueueId]) -> None:
        """Looks for jobs of these queues that arrived from another shard, and wakes their consumers."""
        self._store.arrived(numbers)
        self.on_doorbell(numbers)
        # A probe finds the jobs that are due later: no other hint would wake consumers for those jobs.
        self._probe_soon([key for number in numbers if (key := self._by_number.get(number)) is not None])

    async def may_have_jobs(self, org: OrgId, queue: QueueName) -> None:
        """Looks for due jobs of this queue, and rings the doorbell of the other routers. Call this when jobs may have
        become due without an enqueue: the queue was resumed, or its dead jobs were redriven."""
        self._probe_soon([(org, queue)])
        if self._pools.serves(queue):
            self._ready_orgs.stored(org, queue, later=False)
        # A resume or a redrive does not need the queue's number, unlike an enqueue. So perhaps this process does not
        # know the number yet: ask the shard for it.
        with contextlib.suppress(ShardError):
            self._doorbell.ring((await self._store.names.find([(org, queue)])).values())

    def _visible(self, numbers: set[QueueId]) -> None:
        """Wakes consumers of this router and of other routers, because jobs of these queues can be claimed again."""
        if not numbers:
            return
        self._doorbell.ring(numbers, lease_ended=True)
        self.lease_ended(numbers)
        self._ready_orgs.rang(numbers)
        self._probe_soon([key for number in numbers if (key := self._by_number.get(number)) is not None])

    def _wake(self, key: _Key, jobs: int) -> int:
        """Wakes consumers until they have room for `jobs` jobs. Returns how many jobs they have room for."""
        awaited = self._queues.get(key)
        if awaited is None:
            return 0
        for watcher in awaited.watchers:
            watcher.wake()
        if not awaited.waiters:
            return 0
        if self._is_held(key, awaited):
            awaited.backlog = True
            return 0
        room = 0
        for _ in range(len(awaited.able)):
            if room >= jobs:
                return room
            waiter = next(iter(awaited.able))
            if waiter.credit <= 0:
                del awaited.able[waiter]
                continue
            awaited.served(waiter)
            if not waiter.promised:
                waiter.wake()
                if not waiter.full:
                    room += waiter.credit
        awaited.backlog = awaited.backlog or room < jobs
        return room

    # ── Probes and sweeps ────────────────────────────────────────────────────────────────────────────────────────────

    async def run(self) -> None:
        """Makes the requested probes until cancelled."""
        while True:
            await self._probing.wait()
            self._probing.clear()
            keys, self._to_probe = self._to_probe, set()
            try:
                numbers = await self._numbers(keys)
                if numbers:
                    self._expect(await self._store.sweeper.probe(numbers))
            except ShardError:
                # The next sweep finds what this probe would have found.
                pass
            await asyncio.sleep(_PAUSE_S)

    async def sweep(self) -> bool:
        """Finds due jobs that all hints have missed, and corrects the store's claim floors. Also wakes consumers that a
        limit of jobs in flight has held back, because leases may have expired. Returns whether a sweep of the shard's
        workflows may find work."""
        self.lease_ended(None)
        await self._numbers(list(self._queues))
        due = await self._store.sweep(self._by_number)
        self._expect(due, within_s=self._soon_s)
        return due.workflows_wait

    async def _numbers(self, keys: Iterable[_Key]) -> list[QueueId]:
        """Returns the numbers of those queues among `keys` that exist and that somebody waits for."""
        numbers: list[QueueId] = []
        for key, number in (await self._store.names.find([key for key in keys if key in self._queues])).items():
            awaited = self._queues.get(key)
            if awaited is not None:
                if awaited.number is None:
                    # Record that these consumers were seen: this was impossible while the queue did not exist.
                    for waiter in awaited.waiters:
                        self._note(waiter)
                awaited.number = number
                self._by_number[number] = key
                numbers.append(number)
        return numbers

    def _expect(self, due: Due, *, within_s: float = math.inf) -> None:
        """Wakes the consumers of queues with due jobs, and sets timers for queues whose next job is due within
        `within_s` seconds. Ignores queues whose next job is due later."""
        loop = asyncio.get_running_loop()
        for number, when in due.first.items():
            key = self._by_number.get(number)
            awaited = self._queues.get(key) if key is not None else None
            if key is None or awaited is None:
                continue
            # Both times are by the shard's clock, which may differ from this machine's clock: use only their
            # difference.
            left_s = (when - due.now) / 1_000_000
            if left_s > within_s:
                continue
            if awaited.due_timer is not None:
                awaited.due_timer.cancel()
                awaited.due_timer = None
            if left_s <= 0:
                self._wake(key, 1)
            else:
                # When the consumer has taken the job and finds no other job, it asks for a new probe.
                awaited.due_timer = loop.call_later(left_s, self._fall_due, key)

    def _fall_due(self, key: _Key) -> None:
        self._wake(key, 1)
        awaited = self._queues.get(key)
        if awaited is not None and awaited.watchers:
            # Probe again: the timer may have fired a little early, and a watcher that finds no job does not ask for a
            # probe.
            self._probe_soon([key])

    def _probe_old(self, waiter: Waiter) -> None:
        """Probes those of the waiter's queues whose last probe is older than 1 s. For the other queues the timers are
        still right, because every change since their last probe has rung a doorbell or asked for a probe."""
        now_s = asyncio.get_running_loop().time()
        for queue in waiter.queues:
            awaited = self._queues.get((waiter.org, queue))
            if awaited is not None and now_s - awaited.probed_s > _PROBE_AGE_S_MIN:
                awaited.probed_s = now_s
                self._probe_soon([(waiter.org, queue)])

    def _probe_soon(self, keys: Iterable[_Key]) -> None:
        self._to_probe.update(keys)
        if self._to_probe:
            self._probing.set()


def _ignore(_org: OrgId, _queue: QueueName) -> None:
    """The default of WaitRoom.on_ready and on_gone."""
