"""`python -m chaos.clients.poller`: a worker that takes jobs of any org by Dequeue, and settles them by unary calls.
Before it settles a job of a workflow, it may add nodes to the workflow."""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from contextlib import AsyncExitStack

from chaos.clients.adder import Adder
from proof.clients import calls
from proof.clients.fates import NACK_DELAY_S_MAX, Fate, draw, pick_org
from proof.clients.site import QUEUE, Orders, Site, main
from proof.history import Verb

_CALLERS = 8
_CHANNELS = 3
_WAIT_S_MAX = 1.0
_JOBS_MAX = 20
_WORK_S = 0.05


class Poller:
    def __init__(self, site: Site, orders: Orders, made: calls.Calls, adder: Adder) -> None:
        self._site = site
        self._orders = orders
        self._orgs = list(site.orgs)
        self._calls = made
        self._adder = adder

    async def call_on(self, luck: random.Random) -> None:
        while not self._orders.over.is_set():
            org = pick_org(luck, self._orgs)
            jobs = await self._calls.dequeue(
                org,
                QUEUE,
                max_jobs=luck.randint(1, _JOBS_MAX),
                window_s=self._site.window_s,
                wait_s=luck.choice((0.0, luck.uniform(0.0, _WAIT_S_MAX))),
                worker=self._site.name,
            )
            forgotten = await asyncio.gather(*(self._adder.add(org, job, luck) for job in jobs))
            by_fate: defaultdict[Fate, list[bytes]] = defaultdict(list)
            for job, is_forgotten in zip(jobs, forgotten, strict=True):
                if not is_forgotten:
                    by_fate[draw(luck, calm=self._orders.calm.is_set())].append(job.lease)
            await asyncio.gather(*(self._settle(fate, org, leases, luck) for fate, leases in by_fate.items()))
            if not jobs:
                # Also pause if no router answers. Otherwise this process would flood the routers with calls.
                await self._orders.pause(luck.uniform(0.0, 0.1))

    async def _settle(self, fate: Fate, org: str, leases: list[bytes], luck: random.Random) -> None:
        window_s = self._site.window_s
        match fate:
            case Fate.ACK:
                await self._orders.pause(luck.expovariate(1 / _WORK_S))
                await self._calls.settle(Verb.ACK, org, leases)
            case Fate.NACK:
                await self._calls.settle(Verb.NACK, org, leases, span_s=luck.uniform(0.0, NACK_DELAY_S_MAX))
            case Fate.KILL:
                await self._calls.settle(Verb.KILL, org, leases)
            case Fate.RELEASE:
                await self._calls.settle(Verb.RELEASE, org, leases)
            case Fate.EXTEND:
                for _ in range(luck.randint(1, 4)):
                    await self._orders.pause(window_s * luck.uniform(0.3, 0.7))
                    await self._calls.settle(Verb.EXTEND, org, leases, span_s=window_s)
                await self._calls.settle(Verb.ACK, org, leases)
            case Fate.OVERSLEEP:
                await self._orders.pause(window_s * luck.uniform(0.9, 1.5))
                await self._calls.settle(Verb.ACK, org, leases)
            case Fate.FORGET:
                pass


async def _work(site: Site, orders: Orders) -> None:
    async with AsyncExitStack() as stack:
        channels = [await stack.enter_async_context(calls.connect(site.address)) for _ in range(_CHANNELS)]
        recorder = stack.enter_context(site.recorder())
        made = calls.Calls(channels, recorder)
        async with asyncio.TaskGroup() as group:
            poller = Poller(site, orders, made, Adder(site, orders, made, group))
            for caller in range(_CALLERS):
                group.create_task(poller.call_on(site.luck(str(caller))))


if __name__ == "__main__":
    main(_work)
