"""Tests what the walk over all orgs' queues with one name finds, and how many pages it reads with many orgs."""

from __future__ import annotations

from collections.abc import AsyncGenerator

import pytest

from shard.postgres.pool import Database
from shard.queue import statements
from shard.queue.queue_walk import Found, name_id_of
from shard.queue.store import Store
from shard.vocabulary import OrgId, QueueName
from tests.conftest import SHARD
from tests.integration.test_plans import SETTLED, explain, run, undone
from tests.jobs import some_jobs
from tests.recorder import Recorder
from tests.timemachine import NO_HURRY

ORGS, FEW, READY = 30_000, 1_000, 10
NAME = QueueName("mail")
# Each org has a queue of this name, with one job that is due in an hour. In ten of the orgs the job is ready instead.
FILL = (
    b"INSERT INTO windrow.org (org, slot) SELECT 'org-' || n, 1 FROM generate_series(1, %(orgs)s) AS n",
    b"INSERT INTO windrow.queue_name (queue) VALUES ('mail'), ('other')",
    b"INSERT INTO windrow.queue (name_id, org_id, org, queue, slot) "
    b"SELECT n.name_id, o.org_id, o.org, n.queue, 1 FROM windrow.org o, windrow.queue_name n WHERE o.org_id > 0 "
    b"AND n.queue = 'mail'",
    b"INSERT INTO windrow.job (id, queue_id, run_at, visible_at, priority, kind, payload) "
    b"SELECT gen_random_uuid(), q.queue_id, due.at, due.at, 5, 'fill', '' FROM windrow.queue q, LATERAL (SELECT "
    b"now() + "
    b"CASE WHEN q.org_id %% %(every)s = 0 THEN -interval '1 s' ELSE interval '1 h' END AS at) due",
)


@pytest.fixture
async def recorder(fresh_dsn: str) -> AsyncGenerator[Recorder, None]:
    opened = Recorder(SHARD, fresh_dsn, connections=1)
    await opened.open()
    yield opened
    await opened.close()


async def fill(database: Database, orgs: int) -> None:
    for statement in FILL:
        await database.run(statement, {"orgs": orgs, "every": orgs // READY})


async def walk_all(database: Database, *, step: int) -> list[Found]:
    store = Store(database)
    name_id = (await store.walk.name_ids([NAME]))[NAME]
    found: list[Found] = []
    after = None
    while True:
        walked = await store.walk.walk(NAME, name_id, after=after, queues_max=step)
        found += walked.found
        if (after := walked.after) is None:
            return found


async def test_a_step_reads_as_much_as_it_returns_however_many_orgs_there_are(recorder: Recorder) -> None:
    await fill(recorder, ORGS)
    found = await walk_all(recorder, step=5_000)
    now = (await recorder.run(b"SELECT now()", {}))[0][0]
    assert len({one.org for one in found}) == len(found) == ORGS
    assert sum(one.first_us is not None and one.first_us <= now for one in found) == READY
    statement, parameters = recorder.last(statements.WALK_QUEUES)
    async with recorder.transaction() as connection:
        await connection.execute(NO_HURRY)
        for _ in range(SETTLED):
            await run(connection, (statement, {**parameters, "queues": 100}))
        middle = found[len(found) // 2].queue_id
        with undone(connection):
            plan = await explain(connection, (statement, {**parameters, "first": middle, "queues": 100}))
    assert plan.generic
    assert plan.indexes() <= {"job_ready", "queue_pkey"}
    assert not any(node["Node Type"] == "Seq Scan" for node in plan.nodes())
    # For each queue the walk reads an index entry, the first job, and the row of the queue. The walk reads only one
    # lane of the queue.
    assert plan.buffers < 100 * 25


async def test_the_walk_goes_over_every_queue_of_the_name_once_and_over_no_other(recorder: Recorder) -> None:
    await fill(recorder, FEW)
    store = Store(recorder)
    org = OrgId("org-5")
    await store.enqueue(some_jobs(org, 3, queue="other"))
    found = await walk_all(recorder, step=77)
    assert [one.queue_id for one in found] == sorted({one.queue_id for one in found})
    assert len({name_id_of(one.queue_id) for one in found}) == 1
    assert len(found) == FEW


async def test_a_paused_queue_is_found_without_a_time(recorder: Recorder) -> None:
    await fill(recorder, FEW)
    await recorder.run(b"UPDATE windrow.queue SET paused = true WHERE org = 'org-100'", {})
    found = {one.org: one for one in await walk_all(recorder, step=5_000)}
    assert found[OrgId("org-100")].first_us is None
    assert found[OrgId("org-200")].first_us is not None
