"""`python -m chaos.clients.consumer`: a worker that takes jobs by Consume, one stream for each org."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

from chaos.clients.adder import Adder
from proof.clients import calls
from proof.clients.consumer import Consumer
from proof.clients.site import Orders, Site, main
from windrow.v1 import queue_pb2_grpc

_CHANNELS = 3
# The first orgs have most of the jobs. This many of them have a stream in every process, and every other org has a
# stream in one process.
_EVERYWHERE = 20


async def _work(site: Site, orders: Orders) -> None:
    async with AsyncExitStack() as stack:
        recorder = stack.enter_context(site.recorder())
        channels = [await stack.enter_async_context(calls.connect(site.address)) for _ in range(_CHANNELS)]
        stubs = [queue_pb2_grpc.QueueStub(channel) for channel in channels]
        async with asyncio.TaskGroup() as group:
            adder = Adder(site, orders, calls.Calls(channels, recorder), group)
            for at, org in enumerate(site.orgs):
                if at < _EVERYWHERE or at % site.places == site.mine:
                    stub = stubs[at % _CHANNELS]
                    group.create_task(Consumer(site, orders, stub, recorder, org=org, add=adder.add).run())


if __name__ == "__main__":
    main(_work)
