from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import pairwise
from math import log1p

import grpc
from windrow.ids import new_id
from windrow.v1 import job_pb2, queue_pb2, queue_pb2_grpc

from examples.pushes.totals import Push

QUEUE = "pushes"
KIND = "push"
_WINDOW = 500
_DELAYED_EVERY = 10
_DELAY_S_MAX = 5.0


def delays_s(pushes: Sequence[Push]) -> list[float]:
    seen: dict[str, int] = {}
    gaps: list[int] = []
    for push in pushes:
        gaps.append(push.at - seen.get(push.repo, push.at))
        seen[push.repo] = push.at
    longest = max(gaps, default=0) or 1
    return [
        _DELAY_S_MAX * log1p(gap) / log1p(longest) if number % _DELAYED_EVERY == 0 else 0.0
        for number, gap in enumerate(gaps, start=1)
    ]


async def produce(address: str, pushes: Sequence[Push], *, seconds: float, acknowledged: Callable[[str, Sequence[str]], None], retried: Callable[[str], None]) -> None:
    delays = delays_s(pushes)
    began = time.monotonic()
    async with grpc.aio.insecure_channel(address) as channel:
        stub = queue_pb2_grpc.QueueStub(channel)

        async def send(org: str, jobs):
            while True:
                try:
                    await stub.Enqueue(queue_pb2.EnqueueRequest(org=org, jobs=jobs), timeout=5)
                except grpc.aio.AioRpcError as e:
                    retried(str(e.code()))
                    await asyncio.sleep(0.1)
                else:
                    acknowledged(org, [j.id for j in jobs])
                    return

        size = min(_WINDOW, max(1, len(pushes)//200)) if seconds else _WINDOW
        for at in range(0, len(pushes), size):
            by_org = defaultdict(list)
            for push, delay in zip(pushes[at:at+size], delays[at:at+size]):
                j = job_pb2.NewJob(id=new_id(), queue=QUEUE, kind=KIND, payload=push.to_json())
                if delay: j.delay.FromNanoseconds(int(delay*1e9))
                by_org[push.org].append(j)
            async with asyncio.TaskGroup() as g:
                for org, jobs in by_org.items():
                    g.create_task(send(org, jobs))
            if seconds:
                await asyncio.sleep(max(0, began + seconds*(at+size)/len(pushes) - time.monotonic()))
