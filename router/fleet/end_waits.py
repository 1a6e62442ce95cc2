"""Where callers wait for the ends of jobs on one shard, and what wakes them. Waking a caller is only a hint (I7): the
woken caller looks at its job itself.

An ack, a nack or a cancel through this router wakes callers at once. The other routers are told which jobs are awaited,
and a router that settles an awaited job rings the doorbell. These hints miss some ends (a purge, a death by expiry, a
move to another shard, a lost notification). To find these ends, the awaited jobs are looked at again from time to time,
many in one statement. While nobody waits, the shard is not queried, and settling only checks that nobody waits.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import logging
from collections import OrderedDict
from collections.abc import Collection, Iterable

from shard.attempts import attempt
from shard.errors import ShardUnavailable
from shard.job_id import to_hex
from shard.queue.doorbell import Doorbell
from shard.queue.store import Store
from shard.vocabulary import JobId, OrgId

# A job is looked at when the wait begins, because the job may have ended before. The pause until the next look is as
# long as the wait has lasted, within these bounds.
_LOOK_S_MIN = 0.1
_LOOK_S_MAX = 2.0
# The most jobs of one statement, and the pause after it.
_JOBS_MAX = 1000
_PAUSE_S = 0.020
# How long another router's wait is remembered: somewhat longer than a wait can last. At most _ELSEWHERE_MAX such waits
# are remembered.
_ELSEWHERE_S = 70.0
_ELSEWHERE_MAX = 100_000


class _Wait:
    __slots__ = ("began_s", "job", "org", "woken")

    def __init__(self, org: OrgId, job: str, began_s: float, woken: asyncio.Future[None]) -> None:
        self.org = org
        self.job = job
        self.began_s = began_s
        self.woken = woken

    def wake(self) -> None:
        if not self.woken.done():
            self.woken.set_result(None)


class EndWaits:
    """The callers of this router that wait for the ends of jobs of one shard. The owner of this object runs `run`."""

    def __init__(self, store: Store, doorbell: Doorbell) -> None:
        self._store = store
        self._doorbell = doorbell
        self._by_job: dict[str, set[_Wait]] = {}
        # When each wait's job is looked at next. Waits that are over stay in this list until that time.
        self._looks: list[tuple[float, int, _Wait]] = []
        self._numbers = itertools.count()
        self._came = asyncio.Event()
        # Jobs that callers of other routers wait for, each with the time until which this router remembers the job. The
        # earliest time is first.
        self._elsewhere = OrderedDict[str, float]()
        store.on_settled = self.settled

    async def until_ended(self, org: OrgId, job_id: JobId) -> None:
        """Waits until the job, which was live on this shard, may have ended or left the shard. The caller must set a
        limit to the time of this wait."""
        loop = asyncio.get_running_loop()
        wait = _Wait(org, to_hex(job_id), loop.time(), loop.create_future())
        waits = self._by_job.setdefault(wait.job, set())
        waits.add(wait)
        self._look_at(wait, wait.began_s)
        self._came.set()
        self._doorbell.tell_awaited([wait.job])
        try:
            await wait.woken
        finally:
            waits.discard(wait)
            if not waits and self._by_job.get(wait.job) is waits:
                del self._by_job[wait.job]

    def wake_all(self) -> None:
        """Wakes all callers. Each then looks for its job on the org's current shards."""
        self.ended(list(self._by_job))

    def ended(self, jobs: Collection[str]) -> None:
        """Wakes the callers that wait for these jobs, because the jobs may have ended."""
        for job in jobs:
            for wait in self._by_job.get(job, ()):
                wait.wake()

    def awaited_elsewhere(self, jobs: Collection[str]) -> None:
        """Call this when another router reports that its callers wait for the ends of these jobs."""
        now_s = asyncio.get_running_loop().time()
        for job in jobs:
            self._elsewhere[job] = now_s + _ELSEWHERE_S
            # Keep the jobs in the order of their times.
            self._elsewhere.move_to_end(job)
        while self._elsewhere:
            job, until_s = next(iter(self._elsewhere.items()))
            if until_s > now_s and len(self._elsewhere) <= _ELSEWHERE_MAX:
                break
            del self._elsewhere[job]

    def settled(self, jobs: Iterable[str]) -> None:
        if not (self._by_job or self._elsewhere):
            return
        settled = list(jobs)
        self.ended(settled)
        awaited = [job for job in settled if self._elsewhere.pop(job, None) is not None]
        if awaited:
            self._doorbell.tell_ended(awaited)

    async def run(self) -> None:
        """Looks at awaited jobs again and again, until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            pause_s = self._looks[0][0] - loop.time() if self._looks else None
            if pause_s is None or pause_s > 0:
                self._came.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(pause_s):
                        await self._came.wait()
                continue
            what = f"look for the ends of jobs of shard {self._store.name!r}"
            await attempt(what, self._look, level=logging.DEBUG)
            await asyncio.sleep(_PAUSE_S)

    async def _look(self) -> None:
        """Looks at the jobs whose next look is due, and wakes the callers whose jobs are no longer live on the
        shard."""
        now_s = asyncio.get_running_loop().time()
        waits: list[_Wait] = []
        while self._looks and self._looks[0][0] <= now_s and len(waits) < _JOBS_MAX:
            _, _, wait = heapq.heappop(self._looks)
            if not wait.woken.done():
                waits.append(wait)
                # Set the time of the next look before the statement, which may fail.
                self._look_at(wait, now_s + min(max(now_s - wait.began_s, _LOOK_S_MIN), _LOOK_S_MAX))
        if not waits:
            return
        jobs = list(dict.fromkeys((wait.org, wait.job) for wait in waits))
        try:
            ended = {jobs[position] for position in await self._store.find_ended(jobs)}
        except ShardUnavailable:
            # Wake the callers. Each of them then looks at its job itself, and answers that the shard is away.
            for wait in waits:
                wait.wake()
            raise
        for wait in waits:
            if (wait.org, wait.job) in ended:
                wait.wake()

    def _look_at(self, wait: _Wait, when_s: float) -> None:
        heapq.heappush(self._looks, (when_s, next(self._numbers), wait))
