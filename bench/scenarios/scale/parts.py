"""`python -m bench.scenarios.scale.parts`: runs parts of many router processes in one process. The parts use the
catalog and shards as a router does, over real connections. There is no gRPC, and there are no clients.

The first line of the input names the parts. The process prints `ready`, and how many seconds and CPU seconds it took to
make the parts. Then the process answers each further line with a line of JSON. It ends when its input ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import logging
import sys
import threading
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import uvloop

from router.buffer import Account, Buffer
from router.codec.fast_write import Delivery
from router.fleet.catalog_copy import CatalogCopy
from router.fleet.fleet import Fleet
from router.process.child import _GC_THRESHOLDS
from router.route import enqueue
from router.services.consumer import Consumer
from shard.errors import ShardUnavailable
from shard.placement import catalog
from shard.placement.cluster_file import read_cluster
from shard.postgres import schema
from shard.postgres.pool import Database
from shard.queue.doorbell import Doorbell
from shard.queue.settle import Settlement
from shard.vocabulary import NewJobs, OrgId, QueueId, QueueName, ShardName
from windrow.ids import uuid7
from windrow.v1 import queue_pb2

CLUSTER = "scale"
ORG, QUEUE = OrgId("scale"), QueueName("work")
_SWEEP_S = 3.0
_WINDOW_US = 30_000_000
_RETRY_S = 1.0
_BUFFER_BYTES = 2**30
_VALUES_MAX = 1000


class Parts(Protocol):
    async def open(self) -> None:
        """Makes the parts."""
        ...

    async def told(self) -> object:
        """Returns what the parts have seen since the last call of `told`."""
        ...


class Copies:
    """Copies of the catalog. Each copy stands for the copy of one router process. `told` returns the epochs that the
    copies have seen, each with the time at which a copy saw the epoch."""

    def __init__(self, *, dsn: str, count: int, shards: Sequence[str]) -> None:
        self._weights = {ShardName(name): 1.0 for name in shards}
        self._dsn = dsn
        self._count = count
        self._seen: list[tuple[int, float]] = []
        self._running: list[asyncio.Task[None]] = []

    async def open(self) -> None:
        self._running += await asyncio.gather(*(self._begin() for _ in range(self._count)))

    async def _begin(self) -> asyncio.Task[None]:
        """Finds the catalog as a starting router does."""
        copy = CatalogCopy(self._dsn, lambda _, after: self._see(after.epoch), *[lambda _: None] * 3)
        await copy.database.open()
        while True:
            try:
                await catalog.is_founded(copy.database, cluster=CLUSTER)
                await schema.migrate(copy.database, cluster=None)
                await copy.begin(await catalog.found(copy.database, cluster=CLUSTER, weights=self._weights))
            except ShardUnavailable:
                await asyncio.sleep(_RETRY_S)
                continue
            self._see(copy.current.epoch)
            return asyncio.create_task(copy.run())

    def _see(self, epoch: int) -> None:
        self._seen.append((epoch, time.monotonic()))

    async def told(self) -> object:
        seen, self._seen = self._seen, []
        return seen


class Bells:
    """Doorbells of one shard. Each doorbell stands for the doorbell of one router process. `told` returns how many µs
    each ring took. To make this possible, a ring contains the time at which it was requested, in µs, instead of a
    queue's id."""

    def __init__(self, *, dsn: str, count: int) -> None:
        self._database = Database(ShardName("shard"), dsn, connections=2)
        self._not_listening = count
        self._all_listen = asyncio.Event()
        self._late_us: list[int] = []
        self._bells = [
            Doorbell(
                self._database,
                dsn,
                on_ring=self._hear,
                on_arrival=lambda _: None,
                on_migration=self._listen,
            )
            for _ in range(count)
        ]
        self._running: list[asyncio.Task[None]] = []

    async def open(self) -> None:
        await self._database.open()
        self._running += [asyncio.create_task(bell.run()) for bell in self._bells]
        await self._all_listen.wait()

    def _listen(self) -> None:
        self._not_listening -= 1
        if not self._not_listening:
            self._all_listen.set()

    def _hear(self, queues: Collection[QueueId] | None) -> None:
        now_us = _now_us()
        self._late_us += [now_us - asked_us for asked_us in queues or ()]

    async def ring(self, *, per_s: float, seconds: float) -> None:
        """Rings the first of the doorbells `per_s` times a second."""
        async for _ in _paced(per_s, seconds):
            self._bells[0].ring([QueueId(_now_us())])

    async def told(self) -> object:
        late_us, self._late_us = self._late_us, []
        return _thinned(late_us)


class Fleets:
    """Fleets. Each fleet stands for the fleet of one router process, and can have a consumer of one queue. `told`
    returns how many µs jobs took to reach a consumer."""

    def __init__(self, *, config: str, count: int, connections: int) -> None:
        cluster = read_cluster(Path(config))
        self._buffer = Buffer(_BUFFER_BYTES)
        self._fleets = [
            Fleet(cluster, connections_per_shard=connections, sweep_s=_SWEEP_S, buffer=self._buffer)
            for _ in range(count)
        ]
        self._late_us: list[int] = []
        self._running: list[asyncio.Task[None]] = []

    async def open(self) -> None:
        opened = [asyncio.Event() for _ in self._fleets]
        for fleet, event in zip(self._fleets, opened, strict=True):
            self._running.append(asyncio.create_task(fleet.run(event)))
        # A fleet is open after 5 s even if shards are not up, so wait for each shard.
        for fleet, event in zip(self._fleets, opened, strict=True):
            await event.wait()
            for shard in fleet.shards().values():
                await shard.up.wait()

    async def consume(self, *, skip: int) -> None:
        """Starts one consumer in each fleet, except in the first `skip` fleets."""
        for fleet in self._fleets[skip:]:
            sink = _Sink(self._late_us)
            consumer = Consumer(
                fleet,
                sink,
                Account(self._buffer, org=ORG, peer=""),
                org=ORG,
                queues=(QUEUE,),
                worker="bench",
                window_us=_WINDOW_US,
                credit=1,
            )
            sink.consumer = consumer
            self._running.append(asyncio.create_task(consumer.serve()))

    async def enqueue(self, *, per_s: float, seconds: float) -> int:
        """Stores single jobs through the first fleet. Returns how many jobs it stored."""
        jobs = 0
        async for _ in _paced(per_s, seconds):
            new = NewJobs(org=ORG, ids=[uuid7()], queues=[QUEUE], kinds=["no-op"], payloads=[b"%d" % _now_us()])
            await enqueue.store(self._fleets[0], new, hand=True)
            jobs += 1
        return jobs

    async def told(self) -> object:
        late_us = self._late_us[:]
        self._late_us.clear()
        return _thinned(late_us)


class _Sink:
    """Acks each job when it comes."""

    takes_once = False

    def __init__(self, late_us: list[int]) -> None:
        self.consumer: Consumer | None = None
        self._late_us = late_us
        self._acks: set[asyncio.Task[None]] = set()

    def receive(self, jobs: Delivery) -> None:
        now_us = _now_us()
        received = queue_pb2.DequeueResponse.FromString(b"".join(jobs.jobs))
        self._late_us += [now_us - int(job.payload) for job in received.jobs]
        task = asyncio.create_task(self._finish(jobs))
        self._acks.add(task)
        task.add_done_callback(self._acks.discard)

    async def _finish(self, jobs: Delivery) -> None:
        assert self.consumer is not None
        await jobs.store.settle(Settlement.ack(self.consumer.org, jobs.leases(), [None] * len(jobs.ids)))
        self.consumer.account.give_back(jobs.bytes)
        self.consumer.add_credit(len(jobs.ids))

    def is_full(self) -> bool:
        return False

    async def reserve(self, count: int, shard: ShardName) -> None:
        assert self.consumer is not None
        await self.consumer.account.reserve(count, patiently=True, shard=shard)


def _now_us() -> int:
    # All processes of a machine have the same monotonic clock.
    return time.monotonic_ns() // 1000


def _thinned(late_us: list[int]) -> dict[str, object]:
    """Returns the number of values, and at most _VALUES_MAX of the values, which have the same distribution as all
    values. An answer should be one short line, so it cannot contain all values."""
    late_us.sort()
    step = -(-len(late_us) // _VALUES_MAX) or 1
    return {"count": len(late_us), "late_us": late_us[step - 1 :: step]}


async def _paced(per_s: float, seconds: float) -> AsyncGenerator[None]:
    """Yields `per_s` times a second. If the generator is late, it yields without a pause until it has caught up."""
    began_s = time.monotonic()
    for turn in range(round(per_s * seconds)):
        await asyncio.sleep(max(0.0, began_s + turn / per_s - time.monotonic()))
        yield


_PARTS: Mapping[str, Callable[..., Parts]] = {"copies": Copies, "bells": Bells, "fleets": Fleets}


async def _run() -> None:
    lines: asyncio.Queue[str] = asyncio.Queue()
    threading.Thread(
        target=_read, args=(asyncio.get_running_loop(), lines, asyncio.current_task()), daemon=True
    ).start()
    order: dict[str, Any] = json.loads(await lines.get())
    parts = _PARTS[order.pop("parts")](**order)
    began_s, cpu_s = time.monotonic(), time.process_time()
    await parts.open()
    # These times do not include the start of the interpreter.
    print(f"ready {time.monotonic() - began_s:.3f} {time.process_time() - cpu_s:.3f}", flush=True)
    while True:
        order = json.loads(await lines.get())
        act: Callable[..., Awaitable[object]] = getattr(parts, order.pop("verb"))
        print(json.dumps(await act(**order)), flush=True)


def _read(loop: asyncio.AbstractEventLoop, lines: asyncio.Queue[str], task: asyncio.Task[None]) -> None:
    """Reads lines into the queue. Cancels the task when the input ends, even if the task waits for something else."""
    for line in sys.stdin:
        loop.call_soon_threadsafe(lines.put_nowait, line)
    loop.call_soon_threadsafe(task.cancel)


def main() -> None:
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    gc.freeze()
    gc.set_threshold(*_GC_THRESHOLDS)
    with contextlib.suppress(asyncio.CancelledError):
        uvloop.run(_run())


if __name__ == "__main__":
    main()
