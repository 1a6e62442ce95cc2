"""Compares two clusters call by call: a cluster that holds many jobs, and an empty cluster. One caller calls each
cluster."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import grpc
import psycopg

from bench.payloads import stamped
from bench.spread import Spread, percentile, ratio, spread
from bench.stage import Stage
from bench.system import Wrong
from bench.systems.on_routers import CALL_S_MAX, QUEUE
from proof.table import Table
from windrow.ids import uuid7
from windrow.v1 import admin_pb2, admin_pb2_grpc, job_pb2, queue_pb2, queue_pb2_grpc


class Cycle(NamedTuple):
    """How long the calls of one batch took."""

    claim_ms: float
    ack_ms: float


# The clusters take turns after this many calls, so that other load on the machine affects both.
_STRIDE = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One run: for each kind of call, p50 and p99 in ms on the cluster that holds jobs and on the empty cluster."""

    # The jobs that the first cluster holds.
    depth: str | int
    run: int
    there_ms: Mapping[str, tuple[float, float]]
    empty_ms: Mapping[str, tuple[float, float]]

    def __str__(self) -> str:
        found = [
            f"{verb} p99 {p99:.2f} ms (empty {self.empty_ms[verb][1]:.2f})" for verb, (_, p99) in self.there_ms.items()
        ]
        return f"{_label(self.depth)}, run {self.run}: {', '.join(found)}"


class Probe:
    """A client of a cluster with one shard, made by `open_probe`. Its jobs belong to an org of its own."""

    def __init__(self, stage: Stage, channel: grpc.aio.Channel) -> None:
        ((_, self.dsn),) = stage.dsns.items()
        self.org = f"bench-{secrets.token_hex(6)}"
        self._queue = queue_pb2_grpc.QueueStub(channel)

    async def cycles(self, batch: int, calls: int) -> list[Cycle]:
        """Enqueues, leases and acks `calls` batches, one after another."""
        request = queue_pb2.DequeueRequest(org=self.org, queues=[QUEUE], max_jobs=batch, worker="bench")
        cycles: list[Cycle] = []
        for _ in range(calls):
            jobs = [
                job_pb2.NewJob(id=uuid7(), template=job_pb2.JobTemplate(queue=QUEUE, kind="no-op", payload=payload))
                for payload in stamped(batch)
            ]
            await self._queue.Enqueue(queue_pb2.EnqueueRequest(org=self.org, jobs=jobs), timeout=CALL_S_MAX)
            began_s = time.monotonic()
            taken = (await self._queue.Dequeue(request, timeout=CALL_S_MAX)).jobs
            claim_ms = (time.monotonic() - began_s) * 1000
            if len(taken) != batch:
                raise Wrong(f"a Dequeue of {batch} gave {len(taken)} jobs, where at least {batch} were ready")
            acks = queue_pb2.AckRequest(org=self.org, acks=[queue_pb2.Ack(lease=job.lease) for job in taken])
            began_s = time.monotonic()
            await self._queue.Ack(acks, timeout=CALL_S_MAX)
            cycles.append(Cycle(claim_ms, (time.monotonic() - began_s) * 1000))
        return cycles

    def number(self, query: str) -> int:
        """Returns the number that a query on the shard's database finds."""
        with psycopg.connect(self.dsn, autocommit=True) as connection:
            ((found,),) = connection.execute(query.encode()).fetchall()
        return int(found)


async def compare(there: Probe, empty: Probe, *, depth: str | int, run: int, batch: int, calls: int) -> Compared:
    cycles: tuple[list[Cycle], list[Cycle]] = ([], [])
    while len(cycles[0]) < calls:
        for probe, found in zip((there, empty), cycles, strict=True):
            found += await probe.cycles(batch, _STRIDE)
    there_ms, empty_ms = map(_middle_and_tail, cycles)
    return Compared(depth=depth, run=run, there_ms=there_ms, empty_ms=empty_ms)


def _middle_and_tail(cycles: Sequence[Cycle]) -> dict[str, tuple[float, float]]:
    times_ms = {"claim": sorted(one.claim_ms for one in cycles), "ack": sorted(one.ack_ms for one in cycles)}
    return {verb: (percentile(ordered, 0.5), percentile(ordered, 0.99)) for verb, ordered in times_ms.items()}


def ratio_to_empty(samples: Sequence[Compared], verb: str, at: int) -> Spread:
    """Returns the spread of the runs' ratios to the empty cluster. `at`: 0 for p50, 1 for p99."""
    there = {sample.run: sample.there_ms[verb][at] for sample in samples}
    found = ratio(there, {sample.run: sample.empty_ms[verb][at] for sample in samples})
    assert found is not None
    return found


def table(samples: Sequence[Compared], *, title: str, note: str) -> Table:
    rows: list[tuple[str, ...]] = []
    for depth in dict.fromkeys(sample.depth for sample in samples):
        found = [sample for sample in samples if sample.depth == depth]
        for verb in found[0].there_ms:
            for at, name in enumerate(("p50", "p99")):
                there = spread(sample.there_ms[verb][at] for sample in found).text(".2f")
                empty = spread(sample.empty_ms[verb][at] for sample in found).text(".2f")
                times = ratio_to_empty(found, verb, at).text(".2f")
                rows.append((_label(depth), verb, name, there, empty, times))
    head = ("beside", "", "", "there (min – max)", "empty cluster (min – max)", "there ÷ empty (min – max)")
    return Table(title=title, head=head, rows=rows, note=note)


def _label(depth: str | int) -> str:
    return depth if isinstance(depth, str) else f"{depth:,} finished"


@contextlib.asynccontextmanager
async def open_probe(stage: Stage) -> AsyncGenerator[Probe, None]:
    channel = grpc.aio.insecure_channel(stage.routers.address)
    async with channel:
        probe = Probe(stage, channel)
        request = admin_pb2.CreateQueueRequest(org=probe.org, queue=QUEUE)
        await admin_pb2_grpc.AdminStub(channel).CreateQueue(request, timeout=CALL_S_MAX)
        yield probe
