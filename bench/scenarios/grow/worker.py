"""`python -m bench.scenarios.grow.worker`: runs a `windrow.Worker` for each org of this process. The handlers only
record which jobs they got. Before the process ends, its workers ack all jobs that they have."""

from __future__ import annotations

import asyncio
import gc

import windrow
from bench.scenarios.grow.producer import CHANNELS
from bench.scenarios.grow.retries import overheard
from bench.systems.on_routers import QUEUE
from proof.clients.site import Orders, Site, main
from proof.history import Recorder, Verb, leased

_CONCURRENCY = 10
# As in router/process/child.py: thousands of streams are alive, and each full garbage collection would stop the
# measurement for a second.
_COLLECT_AFTER = 10_000, 10, 10


def _worker(client: windrow.Client, site: Site, recorder: Recorder) -> windrow.Worker:
    worker = windrow.Worker(client, [QUEUE], concurrency=_CONCURRENCY, visibility_window=site.window_s)
    stream = recorder.begin(Verb.CONSUME, client.org, {"window_s": site.window_s})

    @worker.handler("no-op")
    async def no_op(job: windrow.Job) -> None:
        recorder.got(stream, [leased(lease=job.lease, attempt=job.attempt, payload=job.payload)])
        # The worker does not report the outcome of the ack, so this call has no end in the history.
        recorder.begin(Verb.ACK, client.org, {"leases": [job.lease.hex()]})

    return worker


async def _work(site: Site, orders: Orders) -> None:
    gc.set_threshold(*_COLLECT_AFTER)
    made = windrow.Client(site.address, org=site.orgs[0], channels=CHANNELS, create_spans=False)
    with site.recorder() as recorder, overheard(recorder):
        async with made as client, asyncio.TaskGroup() as group:
            workers = [_worker(client.for_org(org), site, recorder) for org in site.orgs[site.mine :: site.places]]
            for worker in workers:
                group.create_task(worker.run())
            await orders.over.wait()
            for worker in workers:
                worker.stop()


if __name__ == "__main__":
    main(_work)
