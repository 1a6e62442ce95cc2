"""Handlers that hang are timed out, give their places back, and leave no memory behind, in each way in which handlers
can run."""

from __future__ import annotations

import asyncio
import os
import statistics
import threading
import time
from dataclasses import dataclass

import psutil
import pytest

from tests.effort import trials
from tests.unit import isolated_handlers
from tests.unit.client_fake import FakeRouter
from tests.unit.test_client_worker import running
from tests.unit.test_worker_processes import PATIENCE_S, alive
from windrow import Client, Job, Worker
from windrow.handlers import CallNext
from windrow.payloads import Payload

THOROUGH = int(os.environ.get("WINDROW_HANGING", "1000"))


@dataclass(frozen=True)
class Hanging:
    """`count` handlers that hang at the same time, each until its timeout."""

    count: int
    timeout_s: float


# Two cores take some seconds to start a thousand processes, which need 6 GiB and 4,096 open files.
CASES = {
    "async def": Hanging(trials(200, thorough=THOROUGH), trials(1, thorough=100) / 50),
    "def": Hanging(trials(200, thorough=THOROUGH), trials(1, thorough=100) / 50),
    "process": Hanging(trials(8, thorough=THOROUGH), trials(2, thorough=60)),
}


def rss_mib() -> float:
    return psutil.Process().memory_info().rss / 2**20


@pytest.mark.thorough
@pytest.mark.parametrize("kind", CASES)
async def test_handlers_that_hang_time_out_and_leave_their_places_and_no_memory(
    router: FakeRouter, client: Client, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    count, timeout_s = CASES[kind].count, CASES[kind].timeout_s
    held_s: list[float] = []

    async def timed(job: Job, call_next: CallNext) -> Payload:
        began_s = time.monotonic()
        try:
            return await call_next(job)
        finally:
            if job.kind == "hang":
                held_s.append(time.monotonic() - began_s)

    # A busy machine takes long to start a thousand handlers. The window is long, so that no lease expires before that.
    worker = Worker(client, "q", concurrency=count, prefetch=0, visibility_window=300, middleware=[timed])
    over = threading.Event()

    async def hang(job: Job) -> None:
        await asyncio.Event().wait()

    def hang_in_a_thread(job: Job) -> None:
        over.wait(timeout_s + PATIENCE_S)

    match kind:
        case "async def":
            worker.handler("hang", timeout=timeout_s)(hang)
        case "def":
            worker.handler("hang", timeout=timeout_s)(hang_in_a_thread)
        case _:
            worker.handler("hang", isolate="process", timeout=timeout_s)(isolated_handlers.hang)
    all_at_once = asyncio.Barrier(count)

    @worker.handler("waits for all places")
    async def waits(job: Job) -> None:
        await all_at_once.wait()

    hanging = [router.give("hang") for _ in range(count)]
    before_mib, began_s = rss_mib(), time.monotonic()
    async with running(worker, within_s=timeout_s + PATIENCE_S):
        async with asyncio.timeout(timeout_s + PATIENCE_S):
            while len(router.nacks()) < count:
                await router.next_news()
            after = [router.give("waits for all places") for _ in range(count)]
            while not {job.id for job in after} <= set(router.settled("Ack")):
                await router.next_news()
        all_s = time.monotonic() - began_s
        over.set()
    assert {line.rpartition(": ")[2].partition(";")[0] for line in caplog.messages if "attempt 1" in line} == {
        f"the handler did not finish within {timeout_s:g} s"
    }
    nacks = router.nacks()
    assert {nack.lease for nack in nacks} == {job.lease for job in hanging}
    assert {nack.failure.type for nack in nacks} == {"windrow.TimedOut"}
    reported = {extend.progress.note for message in router.of("Consume") for extend in message.extends}
    pids = {int(note) for note in reported if note}
    await router.until(lambda: not any(map(alive, pids)))
    print(
        f"{count} handlers ({kind}) with a timeout of {timeout_s:g} s: each held its place for "
        f"{statistics.median(held_s):.2f} s (median), {max(held_s):.2f} s (at most), "
        f"{sum(one > timeout_s + 1 for one in held_s)} longer than {timeout_s + 1:g} s; all places were used again "
        f"{all_s:.1f} s after the start; {len(pids)} processes began; memory {before_mib:.0f} -> {rss_mib():.0f} MiB"
    )
    # The worker may keep a few objects for each handler.
    assert rss_mib() - before_mib < 50 + count / 10
