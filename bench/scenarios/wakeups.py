"""Measures how long an idle consumer waits for a job that an operator makes ready through another router: by a redrive,
a restore, the end of a pause, or a new run time."""

from __future__ import annotations

import argparse
import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial

import grpc
from google.protobuf.duration_pb2 import Duration

import windrow
from bench.payloads import stamped
from bench.report import Found
from bench.scenario import Bench, Scenario
from bench.spread import percentile
from bench.system import Wrong
from bench.systems.on_routers import CALL_S_MAX, QUEUE
from proof.arguments import number
from proof.table import Table
from windrow.v1 import admin_pb2, admin_pb2_grpc, job_pb2, queue_pb2, queue_pb2_grpc

# The upper bound for each p99.
_BAR_MS = 20.0
_WAIT = Duration(seconds=20)
_HOUR = Duration(seconds=3600)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    tries: int = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    call: str
    # The times in ms from the start of the call to the answer of the consumer's Dequeue.
    took: list[float]


class _Router:
    """The calls of one router."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.queue = queue_pb2_grpc.QueueStub(channel)
        self.admin = admin_pb2_grpc.AdminStub(channel)

    async def enqueue(self, org: str, *, delay: Duration | None = None) -> str:
        template = job_pb2.JobTemplate(queue=QUEUE, kind="no-op", payload=stamped(1)[0])
        job = job_pb2.NewJob(id=windrow.uuid7(), template=template, delay=delay)
        await self.queue.Enqueue(queue_pb2.EnqueueRequest(org=org, jobs=[job]), timeout=CALL_S_MAX)
        return job.id

    async def dequeue(self, org: str, *, queue: str = QUEUE, wait: Duration | None = None) -> list[job_pb2.LeasedJob]:
        request = queue_pb2.DequeueRequest(org=org, queues=[queue], max_jobs=1, wait=wait)
        return list((await self.queue.Dequeue(request, timeout=CALL_S_MAX)).jobs)


# Prepares an org through one router. Returns a call to the other router that makes a job of the org ready.
_Prepare = Callable[[_Router, _Router, str], Awaitable[Callable[[], Awaitable[object]]]]


async def _enqueue(near: _Router, far: _Router, org: str) -> Callable[[], Awaitable[object]]:
    return partial(far.enqueue, org)


async def _dead(near: _Router, org: str) -> str:
    await near.enqueue(org)
    (held,) = await near.dequeue(org)
    kill = queue_pb2.Nack(lease=held.lease, failure=job_pb2.Failure(permanent=True))
    await near.queue.Nack(queue_pb2.NackRequest(org=org, nacks=[kill]), timeout=CALL_S_MAX)
    return held.id


async def _redrive_queue(near: _Router, far: _Router, org: str) -> Callable[[], Awaitable[object]]:
    await _dead(near, org)
    request = admin_pb2.RedriveQueueRequest(org=org, queue=QUEUE)
    return lambda: far.admin.RedriveQueue(request, timeout=CALL_S_MAX)


async def _redrive_jobs(near: _Router, far: _Router, org: str) -> Callable[[], Awaitable[object]]:
    request = queue_pb2.RedriveJobsRequest(org=org, ids=[await _dead(near, org)])
    return lambda: far.queue.RedriveJobs(request, timeout=CALL_S_MAX)


async def _restore(near: _Router, far: _Router, org: str) -> Callable[[], Awaitable[object]]:
    request = admin_pb2.RestoreJobsRequest(org=org, jobs=[admin_pb2.RestoreJob(id=await _dead(near, org))])
    return lambda: far.admin.RestoreJobs(request, timeout=CALL_S_MAX)


async def _resume(near: _Router, far: _Router, org: str) -> Callable[[], Awaitable[object]]:
    await near.admin.CreateQueue(admin_pb2.CreateQueueRequest(org=org, queue=QUEUE), timeout=CALL_S_MAX)
    await near.admin.PauseQueue(admin_pb2.PauseQueueRequest(org=org, queue=QUEUE), timeout=CALL_S_MAX)
    await near.enqueue(org)
    request = admin_pb2.ResumeQueueRequest(org=org, queue=QUEUE)
    return lambda: far.admin.ResumeQueue(request, timeout=CALL_S_MAX)


async def _alter(near: _Router, far: _Router, org: str) -> Callable[[], Awaitable[object]]:
    request = queue_pb2.AlterJobsRequest(org=org, ids=[await near.enqueue(org, delay=_HOUR)], delay=Duration())
    return lambda: far.queue.AlterJobs(request, timeout=CALL_S_MAX)


_CALLS: Mapping[str, _Prepare] = {
    "Enqueue": _enqueue,
    "RedriveQueue": _redrive_queue,
    "RedriveJobs": _redrive_jobs,
    "RestoreJobs": _restore,
    "ResumeQueue": _resume,
    "AlterJobs": _alter,
}


async def measure(plan: Plan, bench: Bench) -> Found:
    took: dict[str, list[float]] = {name: [] for name in _CALLS}
    async with bench.stage(shards=1, routers=1) as stage:
        other = await stage.more_routers(1)
        async with (
            grpc.aio.insecure_channel(stage.routers.address) as here,
            grpc.aio.insecure_channel(other.address) as there,
        ):
            near, far = _Router(here), _Router(there)
            # The calls take turns, so that other load on the machine affects all of them.
            for turn in range(-10, plan.tries):
                for name, prepare in _CALLS.items():
                    one = await _waited(near, far, prepare)
                    # The first calls make connections and cached plans, and do not count.
                    if turn >= 0:
                        took[name].append(one)
    for name, found in took.items():
        ordered = sorted(found)
        bench.say(f"{name}: p50 {percentile(ordered, 0.5):.2f} ms, p99 {percentile(ordered, 0.99):.2f} ms")
    samples = [Sample(call=name, took=found) for name, found in took.items()]
    return Found(
        scenario="wakeups",
        plan=asdict(plan),
        samples=[asdict(sample) for sample in samples],
        tables=[_table(plan, samples)],
    )


async def _waited(near: _Router, far: _Router, prepare: _Prepare) -> float:
    """Returns the time in ms from the call until the consumer had the job. Each measurement uses a new org, so that the
    other router has never met the org's queue."""
    org = f"bench-{secrets.token_hex(6)}"
    act = await prepare(near, far, org)

    async def consume() -> float:
        if not await near.dequeue(org, wait=_WAIT):
            raise Wrong(f"a consumer waited {_WAIT.seconds} s in vain")
        return time.perf_counter()

    consumer = asyncio.create_task(consume())
    try:
        # Make sure that the consumer waits: a router runs the statements of an org in turn, so these calls run after
        # the consumer's first claim.
        await asyncio.sleep(0)
        for _ in range(2):
            await near.dequeue(org, queue="nothing")
        if consumer.done():
            raise Wrong("a consumer had a job before anybody made one ready")
        began_s = time.perf_counter()
        await act()
        return (await consumer - began_s) * 1000
    finally:
        consumer.cancel()
        await asyncio.wait({consumer})


def _table(plan: Plan, samples: list[Sample]) -> Table:
    rows: list[tuple[str, ...]] = []
    for sample in samples:
        ordered = sorted(sample.took)
        p50, p99 = percentile(ordered, 0.5), percentile(ordered, 0.99)
        rows.append((sample.call, f"{p50:.2f}", f"{p99:.2f}", f"{ordered[-1]:.2f}", "yes" if p99 <= _BAR_MS else "no"))
    return Table(
        title="Wake-up of an idle consumer by a call to another router, ms",
        head=("call", "p50", "p99", "worst", f"p99 at most {_BAR_MS:g} ms"),
        rows=rows,
        note=f"{plan.tries} tries of each, in turns, each in an org whose queue the other router has never met. From "
        "the start of the call to the answer of the consumer's Dequeue: the call's commit is in it.",
    )


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tries", type=number(10**6), default=Plan().tries, help="of each call; 200")


SCENARIO = Scenario(
    help="how long an idle consumer waits for a job that an operator makes ready through another router",
    options=_options,
    plan=lambda given: Plan(tries=given.tries),
    measure=measure,
    full=lambda _: Plan(),
    quick=None,
)
