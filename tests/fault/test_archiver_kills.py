"""kill -9 of the archiver at random moments while jobs finish: no job is lost or doubled, the books balance, and the
next pass continues (I1, I5)."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from pathlib import Path

import pytest

from archiver import export
from archiver.export_location import ExportLocation
from archiver.object_store import Files
from shard.admin.queue_admin import QueueAdmin
from shard.postgres import statements
from shard.postgres.leader_lock import ARCHIVER
from shard.postgres.pool import Database
from shard.queue.settle import Settlement
from shard.queue.store import Store
from shard.vocabulary import OrgId, ShardName
from tests.balancers import Field, open_field, until
from tests.effort import luck_of, trials
from tests.jobs import lease_jobs, some_jobs
from tests.postgres import Server
from tests.routers import CHECKOUT
from tests.timemachine import make_day

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(1800)]

A = ShardName("s1")
KILLS = trials(3, thorough=40)
DAYS, JOBS = range(2, 50, 3), 100
# The duration of a pass over this many days on an idle machine.
PASS_S = 1.0
EXPORTING_S = 3.0

_FINISHED = b"""
WITH made AS (
    INSERT INTO windrow.finished (
        id, queue_id, enqueued_at, run_at, finished_at, lease, leased_at, priority, attempt, state, kind, payload,
        worker, retention
    )
    SELECT
        gen_random_uuid(),
        q.queue_id, f.at, f.at, f.at, 1, f.at, 5, 1, 'succeeded', 'greet', 'x', 'w', 30
    FROM windrow.queue q
    CROSS JOIN LATERAL (SELECT now() - %(days)s * interval '1 day' AS at) f
    CROSS JOIN generate_series(1, %(jobs)s)
    WHERE q.org = %(org)s
)
INSERT INTO windrow.tally (org_id, accepted)
SELECT q.org_id, %(jobs)s FROM windrow.queue q WHERE q.org = %(org)s
"""
_THERE = b"""
SELECT count(*), count(DISTINCT id) FROM (SELECT id FROM windrow.finished UNION ALL SELECT id FROM windrow.cold) f
"""


@pytest.fixture
async def field(tmp_path: Path, fresh_dsn: str, postgres: Server) -> AsyncGenerator[Field, None]:
    async with open_field(tmp_path, fresh_dsn, postgres) as opened:
        yield opened


@dataclass(slots=True, kw_only=True)
class Load:
    """The jobs of one org. They finish on the current day and on past days."""

    field: Field
    org: OrgId
    accepted: int = 0

    @property
    def database(self) -> Database:
        return self.field.databases[A]

    async def finish_some(self) -> None:
        store = Store(self.database)
        await store.enqueue(some_jobs(self.org, JOBS))
        await store.settle(Settlement.ack(self.org, [lease for _, lease in await lease_jobs(store, self.org)]))
        self.accepted += JOBS

    async def add_days(self) -> None:
        for days in DAYS:
            await make_day(self.database, retention=30, before="now", days=days)
            await self.database.run(_FINISHED, {"days": days, "jobs": JOBS, "org": self.org})
            self.accepted += JOBS

    async def check(self) -> None:
        (books,) = [found for found in await QueueAdmin(self.database).check() if found.org == self.org]
        assert (books.accepted, books.balanced) == (self.accepted, True)
        assert await self.database.run(_THERE, {}) == [(self.accepted - books.expired,) * 2]


@pytest.mark.parametrize("exports", [False, True])
async def test_an_archiver_that_is_killed_at_any_moment_leaves_every_job_where_it_was_or_where_it_was_to_be(
    field: Field, org: OrgId, tmp_path: Path, exports: bool
) -> None:
    place = tmp_path / "export"
    field.write(f"[archiver]\nexport = '{place}'\n" if exports else "", s1={})
    load, luck = Load(field=field, org=org), luck_of("archiver")
    await load.finish_some()
    for _ in range(KILLS):
        await load.add_days()
        archiver = await start(field.config)
        # If the archiver ends while this process sleeps, the test does not see that the archiver was the leader.
        await until(lambda: leading(load.database), lambda leaders: leaders or archiver.returncode is not None)  # noqa: B023
        finishing = asyncio.create_task(load.finish_some())
        try:
            await asyncio.wait_for(archiver.wait(), luck.uniform(0, EXPORTING_S if exports else PASS_S))
        except TimeoutError:
            # The archiver may have ended at this moment.
            with contextlib.suppress(ProcessLookupError):
                archiver.kill()
            await archiver.wait()
        await finishing
        # Wait until the statements of the archiver's session have ended.
        await until(lambda: busy(load.database), lambda sessions: not sessions)
        await load.check()
    archiver = await start(field.config)
    assert await archiver.wait() == 0
    await load.check()
    assert await load.database.run(b"SELECT count(DISTINCT day) FROM windrow.archived", {}) == [
        (len([days for days in DAYS if days <= 30]),)
    ]
    if exports:
        # The exports contain every dropped job exactly once.
        checked = list(export.check_all(Files(ExportLocation.parse(str(place)))))
        assert {one.trouble for one in checked} == {""}
        (books,) = [found for found in await QueueAdmin(load.database).check() if found.org == org]
        assert sum(one.manifest.rows for one in checked if one.manifest is not None) == books.expired


async def start(config: Path) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "cli.main", "archiver", "--once", "--config", str(config)), cwd=CHECKOUT
    )


async def leading(database: Database) -> int:
    return len(await database.run(statements.READ_LEADER, {"lock": ARCHIVER.lock}))


async def busy(database: Database) -> int:
    """Returns how many other sessions have an open transaction."""
    rows = await database.run(
        b"""
        SELECT count(*) FROM pg_stat_activity
        WHERE datname = current_database() AND state <> 'idle' AND pid <> pg_backend_pid()
        """,
        {},
    )
    return int(rows[0][0])
