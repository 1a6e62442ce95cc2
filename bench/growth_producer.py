"""`python -m bench.growth_producer SITE`: enqueues by the Python client at a steady pace, for all orgs, whatever became
of the calls before.

A few orgs are watched: they are called again and again, so that it shows for how long one cannot enqueue. Ends with its
input, and with the calls that are under way.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable

import windrow
from bench.evidence import Recorder, Sight, Verb
from bench.growth import CHANNELS, Site, code_of, main
from bench.growth_figures import BATCH, WATCHED_SHARE, watched
from bench.payloads import stamped
from bench.systems.windrow import QUEUE
from bench.tally import Tally

# Calls under way. More wait, and it counts: they are due all the same.
_CALLS_MAX = 2000


class Producer:
    def __init__(self, site: Site, recorder: Recorder, tally: Tally, over: asyncio.Event) -> None:
        self._site = site
        self._recorder = recorder
        self._tally = tally
        self._over = over
        self._client = windrow.Client(site.address, org=site.run, channels=CHANNELS, create_spans=False)
        self._turns = asyncio.Semaphore(_CALLS_MAX)

    async def run(self) -> None:
        looked_at = watched(self._site.orgs)
        others = sorted(set(range(self._site.orgs)).difference(looked_at))
        luck = random.Random(self._site.name)
        turn = 0

        def any_other() -> int:
            return luck.choice(others)

        def next_watched() -> int:
            nonlocal turn
            turn += 1
            return looked_at[turn % len(looked_at)]

        print("ready", flush=True)
        rate = self._site.jobs_per_s
        async with self._client, asyncio.TaskGroup() as group:
            group.create_task(self._pace(group, rate * (1 - WATCHED_SHARE) / BATCH, BATCH, any_other))
            group.create_task(self._pace(group, rate * WATCHED_SHARE, 1, next_watched))

    async def _pace(self, group: asyncio.TaskGroup, calls_per_s: float, jobs: int, org: Callable[[], int]) -> None:
        """The load is open."""
        due_s = time.monotonic()
        while True:
            due_s += 1 / calls_per_s
            try:
                async with asyncio.timeout(max(0.0, due_s - time.monotonic())):
                    await self._over.wait()
                return
            except TimeoutError:
                group.create_task(self._enqueue(org(), jobs, round(due_s * 1e9)))

    async def _enqueue(self, org: int, count: int, due_ns: int) -> None:
        jobs = [windrow.NewJob(QUEUE, "no-op", payload) for payload in stamped(count, at_ns=due_ns)]
        for job in jobs:
            self._recorder.saw(Sight.OFFERED, job.id)
        code = 0
        async with self._turns:
            try:
                await self._client.for_org(self._site.org(org)).enqueue_many(jobs)
            except windrow.WindrowError as error:
                code = code_of(error)
        ended_ns = time.monotonic_ns()
        self._recorder.called(Verb.ENQUEUE, org, due_ns=due_ns, ended_ns=ended_ns, code=code)
        if code == 0:
            for job in jobs:
                self._recorder.saw(Sight.STORED, job.id, at_ns=ended_ns)
            self._tally.finish(count)


async def _work(site: Site, recorder: Recorder, tally: Tally, over: asyncio.Event) -> None:
    await Producer(site, recorder, tally, over).run()


if __name__ == "__main__":
    main(_work)
