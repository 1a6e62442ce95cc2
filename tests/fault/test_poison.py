"""A kind of job that kills its workers, among kinds that do not: it is quarantined, and the workers of the pool
continue with the other kinds."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncGenerator, AsyncIterator

import pytest
import pytest_asyncio

import windrow
from cli.local import LocalCluster, local_cluster
from embedded import BinariesNotFound
from tests.fault.poison_worker import INNOCENT, POISON, QUEUE
from tests.fault.test_schedules import until
from tests.routers import CHECKOUT, PATIENCE_S

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(240)]

ORG = "acme"
WORKERS, AFTER = 3, 3
POISONED, INNOCENTS = 4, 30


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster() -> AsyncIterator[LocalCluster]:
    try:
        async with local_cluster(root=None, shards=["s1"], processes=2, listen="127.0.0.1:0") as running:
            yield running
    except BinariesNotFound as error:
        pytest.skip(str(error))


class Workers:
    """Processes of tests/fault/poison_worker.py. A process that dies is started again, as a supervisor does."""

    def __init__(self) -> None:
        self.deaths = 0

    async def keep(self, *arguments: str) -> None:
        """Keeps one process up, until it is cancelled."""
        command = [sys.executable, "-m", "tests.fault.poison_worker", *arguments]
        while True:
            process = await asyncio.create_subprocess_exec(*command, cwd=CHECKOUT)
            try:
                await process.wait()
                self.deaths += 1
            finally:
                if process.returncode is None:
                    process.kill()
                    await process.wait()

    @contextlib.asynccontextmanager
    async def running(self, *arguments: str) -> AsyncGenerator[None, None]:
        tasks = [asyncio.create_task(self.keep(*arguments)) for _ in range(WORKERS)]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_kind_that_kills_its_workers_is_quarantined_and_the_pool_goes_on(cluster: LocalCluster) -> None:
    workers = Workers()
    async with windrow.Client(cluster.address, org=ORG, timeout=PATIENCE_S) as client:
        await client.create_queue(QUEUE, quarantine_after=AFTER)
        poisoned = [(await client.enqueue(QUEUE, POISON, b"")).id for _ in range(POISONED)]
        innocent = [(await client.enqueue(QUEUE, kind, b"")).id for kind in INNOCENT for _ in range(INNOCENTS)]

        async def all_done(ids: list[str]) -> bool:
            jobs = await client.get_jobs(ids)
            return all(jobs[one].state is windrow.JobState.SUCCEEDED for one in ids)

        async def is_set_aside() -> bool:
            found = await client.list_quarantines()
            return [(one.kind, one.set_aside) for one in found if one.kind == POISON] == [(POISON, len(poisoned))]

        async with workers.running(cluster.address, ORG):
            await until(is_set_aside, "the kind is quarantined")
            await until(lambda: all_done(innocent), "the jobs of the other kinds are done")
            (quarantine,) = await client.list_quarantines()
            assert (quarantine.kind, quarantine.by_operator) == (POISON, False)
            assert quarantine.crashes >= AFTER

            async def more() -> None:
                """Enqueues more jobs of all kinds, and waits until the jobs of the other kinds are done."""
                poisoned.extend([(await client.enqueue(QUEUE, POISON, b"")).id for _ in range(POISONED)])
                ids = [(await client.enqueue(QUEUE, kind, b"")).id for kind in INNOCENT for _ in range(INNOCENTS)]
                await until(lambda: all_done(ids), "the pool runs on")
                await until(is_set_aside, "no worker has any of the kind")

            # When these jobs come, the other router process may not have heard of the quarantine yet.
            await more()
            deaths = workers.deaths
            before = {one: job.attempt for one, job in (await client.get_jobs(poisoned)).items()}
            # From now on no job of this kind is handed over to waiting workers.
            await more()
            await more()
            after = await client.get_jobs(poisoned)
            assert workers.deaths == deaths
            assert {one: job.attempt for one, job in after.items()} == dict.fromkeys(poisoned, 0) | before
            assert {job.state for job in after.values()} == {windrow.JobState.READY}
            why = await client.explain_job(poisoned[-1])
            assert why.causes[0].name == "quarantine"
        # Deploy workers that survive these jobs.
        async with workers.running(cluster.address, ORG, "mended"):
            assert await client.release_kind(QUEUE, POISON)
            await until(lambda: all_done(poisoned), "the released jobs are done")
        assert await client.list_quarantines() == []
