"""Finds the orgs that have ready jobs on one shard, in the queues that consumers of this process take for all orgs. The
results are hints (I7), like those of the wait room: a claim or the sweep corrects a wrong hint.

Nothing is written to the shard for these hints. This process knows of new jobs from its own enqueues and from the
doorbells of other routers, which ring in any case. A probe finds out when a queue's next job falls due. A first walk
over the ready index finds the jobs that were stored earlier. After that, each sweep continues the walk for some
milliseconds from where the last sweep ended. So the sweeps find, sooner or later, every job whose hint was lost. While
nobody takes jobs of all orgs, none of this runs.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace

from shard.errors import ShardError
from shard.queue.queue_walk import Found, name_id_of
from shard.queue.store import Store
from shard.vocabulary import Micros, OrgId, QueueId, QueueName

# How many queues one statement of a walk covers. Such a statement takes about 5 ms.
_STEP_QUEUES = 500
# How long one sweep may walk, in all its statements together.
_SWEEP_S = 0.060
# The pause after a probe, and the pause after a failure. The next probe covers all queues that are added during the
# pause.
_PAUSE_S = 0.010
_FAILED_PAUSE_S = 0.5
# A job is not remembered if it falls due only after the time of this many sweeps and two whole walks: a later sweep
# finds it before it is due.
_SOON_SWEEPS = 3
# If there are more queues to probe than this, all of them are dropped, and the walk begins again. At most this many
# queues with jobs that fall due soon are remembered. A later sweep finds the others.
_QUEUES_MAX = 100_000


@dataclass(slots=True)
class _Name:
    """A queue name that consumers of this process take for all orgs."""

    # None: as far as this process knows, no queue of the shard has this name yet.
    name_id: int | None = None
    # Where the walk of this name continues. None: at the beginning.
    after: QueueId | None = None
    # Whether a walk has reached the end since a consumer first took this name, and since hints were last lost.
    walked: bool = False
    walk_began_s: float = 0.0
    # How long the last whole walk took.
    cycle_s: float = 0.0


class ReadyOrgs:
    """`on_ready` is called with an org and a queue that may have ready jobs. The owner of this object runs `run` while
    the shard is up, and calls `sweep` every `sweep_s` seconds."""

    def __init__(
        self,
        store: Store,
        *,
        sweep_s: float,
        on_ready: Callable[[OrgId, QueueName], None],
    ) -> None:
        self._store = store
        self._soon_s = _SOON_SWEEPS * sweep_s
        self._on_ready = on_ready
        self._names: dict[QueueName, _Name] = {}
        self._by_name_id: dict[int, QueueName] = {}
        # Ids of queue names that a doorbell has named and that no consumer of this process takes.
        self._others: set[int] = set()
        self._find_names = False
        self._to_probe: set[QueueId] = set()
        # Queues whose next job is due soon, and the time of that job by the event loop's clock. An entry of the heap
        # `_dues` is valid only if `_due_s` has the same time for its queue.
        self._due_s: dict[QueueId, float] = {}
        self._dues: list[tuple[float, QueueId]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._has_work = asyncio.Event()

    # ── What is taken for all orgs ───────────────────────────────────────────────────────────────────────────────────

    def serve(self, queues: Iterable[QueueName]) -> None:
        """From now on, finds the orgs that have ready jobs in these queues."""
        for queue in queues:
            self._names.setdefault(queue, _Name())
        self._find_names = True
        self._has_work.set()

    def leave(self, queues: Iterable[QueueName]) -> None:
        """Call this when no consumer takes these queues for all orgs any more."""
        for queue in queues:
            name = self._names.pop(queue, None)
            if name is not None and name.name_id is not None:
                self._by_name_id.pop(name.name_id, None)
                self._others.add(name.name_id)

    def walk_again(self) -> None:
        """Walks over all queues from the beginning, because hints may have been lost."""
        # Make new objects, because a step that runs now sets the fields of the old objects when it ends.
        self._names = {queue: replace(name, after=None, walked=False) for queue, name in self._names.items()}
        self._find_names = bool(self._names)
        self._others.clear()
        if self._names:
            self._has_work.set()

    # ── Hints ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def rang(self, numbers: Collection[QueueId] | None) -> None:
        """Looks for jobs of these queues. Call this when these queues may have new jobs, including jobs that are due
        later. `numbers` is None if any queue may have new jobs."""
        if not self._names:
            return
        if numbers is None:
            self.walk_again()
            return
        for number in numbers:
            name_id = name_id_of(number)
            if name_id in self._by_name_id:
                self._to_probe.add(number)
            elif name_id not in self._others:
                if len(self._others) >= _QUEUES_MAX:
                    self._others.clear()
                self._others.add(name_id)
                if any(name.name_id is None for name in self._names.values()):
                    # This may be the first queue with one of the names that this process takes: look for the ids of
                    # these names again.
                    self._find_names = True
        if len(self._to_probe) > _QUEUES_MAX:
            self._to_probe.clear()
            self.walk_again()
        elif self._to_probe or self._find_names:
            self._has_work.set()

    def stored(self, org: OrgId, queue: QueueName, *, later: bool) -> None:
        """Call this when this process has stored jobs of a queue that is taken for all orgs. `later` says that some of
        these jobs may be due later."""
        numbers = self._store.names.known(org, [queue])
        if later and numbers:
            self.rang(numbers)
        else:
            self._on_ready(org, queue)

    def emptied(self, org: OrgId, queues: Iterable[QueueName]) -> None:
        """Finds out when the next jobs of these queues are due. Call this when a claim has probably taken their last
        ready jobs."""
        numbers = self._store.names.known(org, list(queues))
        self._store.emptied(numbers)
        self.rang(numbers)

    # ── Looking ──────────────────────────────────────────────────────────────────────────────────────────────────────

    async def run(self) -> None:
        """Looks for the jobs that the hints point to, until cancelled."""
        self.walk_again()
        try:
            while True:
                await self._has_work.wait()
                self._has_work.clear()
                pause_s = _PAUSE_S
                try:
                    await self._find()
                except ShardError:
                    # The hints are lost. When the shard answers again, a new walk finds the jobs.
                    self.walk_again()
                    pause_s = _FAILED_PAUSE_S
                await asyncio.sleep(pause_s)
        finally:
            self._to_probe.clear()
            self._due_s.clear()
            self._dues.clear()
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

    async def _find(self) -> None:
        if self._find_names:
            self._find_names = False
            await self._name()
        if self._to_probe:
            numbers, self._to_probe = self._to_probe, set()
            await self._probe(numbers)
        for queue, name in list(self._names.items()):
            if not name.walked and name.name_id is not None:
                await self._step(queue, name)
                if not name.walked:
                    self._has_work.set()

    async def _name(self) -> None:
        unknown = [queue for queue, name in self._names.items() if name.name_id is None]
        if unknown:
            for queue, name_id in (await self._store.walk.name_ids(unknown)).items():
                if (name := self._names.get(queue)) is not None:
                    name.name_id = name_id
                    self._by_name_id[name_id] = queue
                    self._others.discard(name_id)
                    # Walk: a queue of this name may have got jobs before this process knew the id of the name.
                    name.walked = False

    async def _probe(self, numbers: Collection[QueueId]) -> None:
        due = await self._store.sweeper.probe(numbers)
        names = await self._store.names.names_of(due.first.keys())
        self._expect(due.now, [Found(number, names[number][0], due.first[number]) for number in names])

    async def sweep(self) -> None:
        """Continues the walks, and so finds the jobs that all hints have missed. Raises ShardUnavailable."""
        names = [(queue, name) for queue, name in self._names.items() if name.walked]
        if any(name.name_id is None for name in self._names.values()):
            self._find_names = True
            self._has_work.set()
        clock = asyncio.get_running_loop().time
        for queue, name in names:
            until_s = clock() + _SWEEP_S / len(names)
            while name.name_id is not None and name.walked:
                await self._step(queue, name)
                if name.after is None or clock() > until_s:
                    break

    async def _step(self, queue: QueueName, name: _Name) -> None:
        """Makes the next step of a walk."""
        assert name.name_id is not None
        clock = asyncio.get_running_loop().time
        if name.after is None:
            name.walk_began_s = clock()
        walked = await self._store.walk.walk(queue, name.name_id, after=name.after, queues_max=_STEP_QUEUES)
        self._expect(walked.now, walked.found)
        name.after = walked.after
        if walked.after is None:
            name.cycle_s = clock() - name.walk_began_s
            name.walked = True

    def _expect(self, now: Micros, found: Iterable[Found]) -> None:
        """Reports the queues with ready jobs, and remembers those with jobs that fall due soon."""
        now_s = asyncio.get_running_loop().time()
        for queue_id, org, first_us in found:
            queue = self._by_name_id.get(name_id_of(queue_id))
            if first_us is None or queue is None:
                continue
            # Both times are by the shard's clock, which may differ from this machine's clock: use only their
            # difference.
            left_s = (first_us - now) / 1_000_000
            if left_s <= 0:
                self._due_s.pop(queue_id, None)
                self._on_ready(org, queue)
            elif left_s <= self._soon_s + 2 * self._names[queue].cycle_s and len(self._due_s) < _QUEUES_MAX:
                self._due_s[queue_id] = now_s + left_s
                heapq.heappush(self._dues, (now_s + left_s, queue_id))
        self._set_timer()

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if len(self._dues) > 2 * len(self._due_s) + 1000:
            self._dues = [(due_s, number) for number, due_s in self._due_s.items()]
            heapq.heapify(self._dues)
        while self._dues and self._due_s.get(self._dues[0][1]) != self._dues[0][0]:
            heapq.heappop(self._dues)
        if self._dues:
            self._timer = asyncio.get_running_loop().call_at(self._dues[0][0], self._fall_due)

    def _fall_due(self) -> None:
        self._timer = None
        now_s = asyncio.get_running_loop().time()
        fallen: set[QueueId] = set()
        while self._dues and self._dues[0][0] <= now_s:
            due_s, number = heapq.heappop(self._dues)
            if self._due_s.get(number) == due_s:
                del self._due_s[number]
                fallen.add(number)
        # Probe these queues, because the answer to the probe names their orgs.
        self.rang(fallen)
        self._set_timer()
