"""`python -m bench.scenarios.grow.producer`: enqueues with the Python client at a steady pace, for all orgs, without
waiting for earlier calls.

A few orgs are watched: they get calls all the time, which shows for how long an org cannot enqueue. Before the process
ends, it waits for the calls that are under way.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import cycle

import windrow
from bench.payloads import BYTES
from bench.scenarios.grow.figures import BATCH, WATCHED_SHARE, watched
from bench.scenarios.grow.retries import code_of, overheard
from bench.systems.on_routers import QUEUE
from proof.clients import calls
from proof.clients.site import Orders, Site, main
from proof.history import Outcome, Recorder, Verb, payload_of

# The connections of one process. The kernel distributes them over the router processes.
CHANNELS = 4
# The most calls that are under way at the same time. Further calls wait, and the figures include this wait.
_CALLS_MAX = 2000


def new_job(org: str, queue: str = QUEUE, *, delay: timedelta | None = None) -> windrow.NewJob:
    job = windrow.uuid7()
    return windrow.NewJob(queue, "no-op", payload_of(org, job, BYTES - len(org) - len(job)), id=job, delay=delay)


async def enqueue(
    client: windrow.Client,
    recorder: Recorder,
    jobs: Sequence[windrow.NewJob],
    *,
    due_s: float | None = None,
) -> None:
    """Enqueues jobs by one call of their org's client, and records the call. Raises what the client raises."""
    number = recorder.begin(Verb.ENQUEUE, client.org, [calls.asked(job) for job in jobs], due_s=due_s)
    try:
        stored = await client.enqueue_many(jobs)
    except windrow.WindrowError as error:
        recorder.end(number, Outcome.UNKNOWN, code=code_of(error))
        raise
    recorder.end(number, Outcome.OK, answered=[{"job": one.id, "duplicate": one.duplicate} for one in stored])


class Producer:
    def __init__(self, site: Site, orders: Orders, recorder: Recorder) -> None:
        self._site = site
        self._orders = orders
        self._recorder = recorder
        self._client = windrow.Client(site.address, org=site.orgs[0], channels=CHANNELS, create_spans=False)
        self._turns = asyncio.Semaphore(_CALLS_MAX)

    async def run(self) -> None:
        orgs = self._site.orgs
        looked_at = watched(orgs)
        turns = cycle(looked_at)
        others = sorted(set(orgs).difference(looked_at))
        luck = self._site.luck()
        rate = self._site.per_s
        async with self._client, asyncio.TaskGroup() as group:
            calls_per_s = rate * (1 - WATCHED_SHARE) / BATCH
            group.create_task(self._pace(group, calls_per_s, BATCH, lambda: luck.choice(others)))
            group.create_task(self._pace(group, rate * WATCHED_SHARE, 1, lambda: next(turns)))

    async def _pace(self, group: asyncio.TaskGroup, calls_per_s: float, jobs: int, org: Callable[[], str]) -> None:
        """Starts calls at a steady pace, without waiting for their ends."""
        due_s = time.monotonic()
        while True:
            due_s += 1 / calls_per_s
            await self._orders.pause(due_s - time.monotonic())
            if self._orders.over.is_set():
                return
            group.create_task(self._enqueue(org(), jobs, due_s))

    async def _enqueue(self, org: str, count: int, due_s: float) -> None:
        async with self._turns:
            try:
                jobs = [new_job(org) for _ in range(count)]
                await enqueue(self._client.for_org(org), self._recorder, jobs, due_s=due_s)
            except windrow.WindrowError:
                # Do nothing: the history has recorded the error.
                pass


async def _work(site: Site, orders: Orders) -> None:
    with site.recorder() as recorder, overheard(recorder):
        await Producer(site, orders, recorder).run()


if __name__ == "__main__":
    main(_work)
