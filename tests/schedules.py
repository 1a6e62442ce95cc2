"""The schedules of one shard, for tests, and functions that make time pass for these schedules."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from shard.postgres.pool import Database
from shard.queue.settle import Settlement
from shard.queue.store import Store
from shard.schedule import TEMPLATE_COLUMNS, Run, ScheduleName, ScheduleSpec, Template, Timing
from shard.schedules import calendar
from shard.schedules.due_schedules import DueSchedules, Fired
from shard.schedules.schedule_admin import Found, ScheduleAdmin
from shard.vocabulary import Answer, JobId, Micros, OrgId
from tests.jobs import lease_jobs

DAILY = ScheduleName("daily")
HOUR_US = 3_600_000_000
DAY_US = 24 * HOUR_US
# The time since the latest instant of `hourly`, and the time until its next instant.
HALF_US = HOUR_US // 2


def template(*, queue: str = "mail", payload: bytes = b"hello") -> Template:
    """Returns a template. A column that is not named here is not set."""
    given = {
        "queue": queue,
        "max_attempts": 3,
        "kind": "send",
        "payload": payload,
        "attributes": '{"from": "schedule"}',
    }
    return dict.fromkeys(TEMPLATE_COLUMNS) | given


class StoredJob(NamedTuple):
    """A live job, with the data about its run that is in its row."""

    id: JobId
    at: Micros
    previous: Micros | None
    cause: str


class Shard:
    """The schedules of one shard, as one router knows them."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self.store = Store(database)
        self.admin = ScheduleAdmin(database, self.store)
        self.due = DueSchedules(database, self.store)

    async def hourly(self, **more: Any) -> Timing:
        """Returns a timing with an instant in each hour for the last 40 days. The latest instant was half an hour ago,
        so that a test ends long before the next instant."""
        ((now,),) = await self.database.run(b"SELECT now()", {})
        return Timing(interval_us=HOUR_US, start=Micros(now - HALF_US - 960 * HOUR_US), **more)

    async def create(
        self, org: OrgId, spec: ScheduleSpec, name: ScheduleName = DAILY, *, epoch: int = 1, queue: str = "mail"
    ) -> Found:
        return await self.admin.create(org, name, spec, template(queue=queue), paused=False, epoch=epoch)

    async def fire(self) -> Fired:
        """Fires all due schedules. Returns the sum of the results."""
        total = Fired()
        while True:
            fired = await self.due.fire()
            total.taken += fired.taken
            total.jobs += fired.jobs
            total.needed += fired.needed
            if not fired.taken or fired.needed:
                return total

    async def set_back(self, org: OrgId, by_us: int, name: ScheduleName = DAILY) -> Micros:
        """Changes the schedule as if no router had run for this long. Returns the next instant of the schedule after
        this change."""
        at = await self.set_back_paused(org, by_us, name)
        await self.wake(org, name)
        return at

    async def set_back_paused(self, org: OrgId, by_us: int, name: ScheduleName = DAILY) -> Micros:
        """Changes a paused schedule, which no router fires, as if it had been paused for this long. Returns the next
        instant of the schedule after this change."""
        found = await self.admin.get(org, name)
        at = calendar.following(found.schedule.spec.timing, Micros(found.now - by_us))
        assert at is not None
        await self.database.run(
            b"UPDATE windrow.schedule SET next_at = timestamptz 'epoch' + %(at)s * interval '1 us' "
            b"WHERE id = %(id)s::uuid",
            {"at": at, "id": found.schedule.id},
        )
        return at

    async def wake(self, org: OrgId, name: ScheduleName = DAILY) -> None:
        """Lets a router look at the schedule now."""
        found = await self.admin.get(org, name)
        await self.database.run(
            b"UPDATE windrow.schedule SET wake_at = now() WHERE id = %(id)s::uuid", {"id": found.schedule.id}
        )

    async def runs(self, org: OrgId, name: ScheduleName = DAILY) -> list[Run]:
        """Returns what is known of the schedule's runs, the earliest first."""
        found = await self.admin.get(org, name)
        return (await self.admin.runs(org, found.schedule.id))[::-1]

    async def jobs(self, org: OrgId) -> list[StoredJob]:
        """Returns the org's live jobs, in the order of their runs' instants."""
        return await jobs_of(self.database, org)

    async def end_job(self, org: OrgId) -> None:
        """Leases a job of the org, and acks it."""
        ((_, lease),) = await lease_jobs(self.store, org, queue="mail", max_jobs=1)
        assert await self.store.settle(Settlement.ack(org, [lease], [b""])) == [Answer.OK]


async def jobs_of(database: Database, org: OrgId) -> list[StoredJob]:
    rows = await database.run(
        b"SELECT j.id::text, j.scheduled_run FROM windrow.job j JOIN windrow.queue q USING (queue_id) "
        b"WHERE q.org = %(org)s ORDER BY (j.scheduled_run::jsonb ->> 'at')::bigint, j.id",
        {"org": org},
    )
    runs = [(job, json.loads(told)) for job, told in rows]
    return [StoredJob(job, run["at"], run.get("previous"), run["cause"]) for job, run in runs]
