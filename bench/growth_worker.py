"""`python -m bench.growth_worker SITE`: a `windrow.Worker` with a stream for each of its orgs. Its handler does nothing
but write down which job it has. Ends with its input, when all is acked."""

from __future__ import annotations

import asyncio
import time

import windrow
from bench.evidence import Recorder, Sight
from bench.growth import CHANNELS, Site, main
from bench.payloads import stamp_ns
from bench.systems.windrow import QUEUE
from bench.tally import Tally

_CONCURRENCY = 10


async def _work(site: Site, recorder: Recorder, tally: Tally, over: asyncio.Event) -> None:
    async def no_op(job: windrow.Job) -> None:
        recorder.saw(Sight.TAKEN, job.id, at_ns=time.monotonic_ns(), due_ns=stamp_ns(job.payload))
        tally.take(1)

    async with windrow.Client(site.address, org=site.run, channels=CHANNELS, create_spans=False) as client:
        workers = [
            windrow.Worker(client.for_org(site.org(number)), [QUEUE], concurrency=_CONCURRENCY)
            for number in site.numbers
        ]
        async with asyncio.TaskGroup() as group:
            for worker in workers:
                worker.handler("no-op")(no_op)
                group.create_task(worker.run())
            print("ready", flush=True)
            await over.wait()
            for worker in workers:
                worker.stop()


if __name__ == "__main__":
    main(_work)
