"""Redrives at a limited rate: the jobs become due one after another, also if several calls redrive them. All jobs are
on one shard."""

from __future__ import annotations

from datetime import timedelta
from itertools import pairwise

import pytest

import windrow
from shard.admin.queue_admin import QueueAdmin
from shard.postgres.pool import Database
from shard.queue.settle import Nack, Settlement
from shard.queue.store import Store
from shard.vocabulary import Failure, OrgId
from tests.command import windrow as command
from tests.jobs import QUEUE, ids_of, lease_jobs, some_jobs
from tests.postgres import Server
from tests.routers import running_routers, write_cluster

SECOND_US = 1_000_000


async def some_dead(store: Store, org: OrgId, count: int) -> list[str]:
    """Makes dead jobs. Returns their ids in the order of their deaths."""
    died: list[str] = []
    for _ in range(count):
        await store.enqueue(jobs := some_jobs(org, 1))
        ((_, lease),) = await lease_jobs(store, org)
        await store.settle(Settlement.nack(org, [Nack(lease=lease, failure=Failure(permanent=True))]))
        died += ids_of(jobs)
    return died


async def test_jobs_become_due_one_after_another_in_the_order_of_their_deaths(
    database: Database, books: QueueAdmin, org: OrgId
) -> None:
    store = Store(database)
    died = await some_dead(store, org, 5)
    every = {"kind": "", "died_after": None, "died_before": None}
    assert await books.redrive(org, QUEUE, **every, limit=3, gap_us=60 * SECOND_US) == 3  # type: ignore[arg-type]
    assert await books.redrive(org, QUEUE, **every, limit=9, gap_us=60 * SECOND_US, ahead=3) == 2  # type: ignore[arg-type]
    rows = await database.run(
        b"""
        SELECT j.id::text, (extract(epoch FROM j.run_at) * 1000000)::bigint, j.visible_at = j.run_at
        FROM windrow.job j JOIN windrow.queue q USING (queue_id) WHERE q.org = %(org)s ORDER BY j.run_at
        """,
        {"org": org},
    )
    assert [job_id for job_id, _, _ in rows] == died
    gaps = [later - earlier for (_, earlier, _), (_, later, _) in pairwise(rows)]
    # The third gap is between the jobs of two calls, so it includes the time between these calls.
    assert (gaps[0], gaps[1], gaps[3]) == (60 * SECOND_US,) * 3
    assert gaps[2] >= 60 * SECOND_US
    assert all(visible for _, _, visible in rows)
    # Only the first job is ready.
    assert [job.id for job, _ in await lease_jobs(store, org)] == died[:1]
    (found,) = [entry for entry in await books.check() if entry.org == org]
    assert (found.scheduled, found.leased, found.dead, found.balanced) == (4, 1, 0, True)


async def test_without_a_rate_all_jobs_are_ready_at_once(database: Database, books: QueueAdmin, org: OrgId) -> None:
    store = Store(database)
    died = await some_dead(store, org, 3)
    assert await books.redrive(org, QUEUE, kind="", died_after=None, died_before=None, limit=9, ahead=7) == 3
    assert sorted(job.id for job, _ in await lease_jobs(store, org)) == sorted(died)


async def test_the_client_and_the_command_redrive_at_a_rate(
    postgres: Server, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    # With this maximum, the redrive needs several calls.
    monkeypatch.setattr("windrow.admin._CHANGE_MAX", 2)
    config = write_cluster(tmp_path_factory.mktemp("rate") / "cluster.toml", {"s1": postgres.create("rate")})
    with running_routers(config) as routers:
        async with windrow.Client(routers.address, org="acme") as client:

            async def dies() -> None:
                await client.enqueue("mail", "k")
                (job,) = await client.dequeue("mail", wait=5)
                await client.nack(job, error="no", permanent=True)

            for _ in range(5):
                await dies()
            for refused in (-1, 0.0001, 1e9):
                with pytest.raises(windrow.InvalidRequest, match="per_second"):
                    await client.redrive_queue("mail", per_second=refused)
            assert await client.redrive_queue("mail", per_second=0.01) == 5
            counts = (await client.stats("mail")).queues["mail"]
            assert (counts.ready, counts.scheduled, counts.dead) == (1, 4, 0)
            page = await client.list_jobs("mail", state=windrow.JobState.SCHEDULED)
            gaps = [later.run_at - earlier.run_at for earlier, later in pairwise(page.jobs)]
            assert all(timedelta(seconds=100) <= gap < timedelta(seconds=190) for gap in gaps)
            (first,) = await client.dequeue("mail", wait=5)
            await client.nack(first, error="no", permanent=True)
            redrive = ("jobs", "redrive", "acme", "--per-second", "0.01", "--yes", "--address", routers.address)
            assert command(*redrive, "--where", "a=b").code == 2
            assert command(*redrive, "--kind", "k").code == 2
            done = command(*redrive, "--queue", "mail", "--kind", "k", "--died-after", "1h", "--json")
            assert done.documents == [{"redriven": 1, "skipped": 0}]
            # Without a rate, a call must not say how many jobs the earlier calls have redriven.
            for _ in range(3):
                await dies()
            assert await client.redrive_queue("mail") == 3
