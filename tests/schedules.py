"""Schedules for tests: one shard's, and how time passes for them."""

from __future__ import annotations

from shard.postgres.pool import Database
from shard.queue.store import Store
from shard.schedule import ScheduleName, ScheduleSpec, Template, Timing
from shard.schedules import calendar
from shard.schedules.firing import Fired, Firing
from shard.schedules.schedule_admin import Found, ScheduleAdmin
from shard.vocabulary import JobId, Micros, OrgId

DAILY = ScheduleName("daily")
HOUR_US = 3_600_000_000
DAY_US = 24 * HOUR_US
# Each hour since 1970.
HOURLY = Timing(interval_us=HOUR_US)


def template(*, queue: str = "mail", payload: bytes = b"hello") -> Template:
    return {
        "queue": queue,
        "priority": None,
        "max_attempts": 3,
        "kind": "send",
        "payload": payload,
        "attributes": '{"from": "schedule"}',
        "retry": None,
        "max_runtime_us": None,
    }


class Shard:
    """The schedules of one shard, as one router knows them."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self.store = Store(database)
        self.admin = ScheduleAdmin(database, self.store)
        self.firing = Firing(database, self.store)

    async def create(
        self, org: OrgId, spec: ScheduleSpec, name: ScheduleName = DAILY, *, epoch: int = 1, queue: str = "mail"
    ) -> Found:
        return await self.admin.create(org, name, spec, template(queue=queue), paused=False, epoch=epoch)

    async def fire(self) -> Fired:
        """Fires all that is due. Returns the sum."""
        total = Fired()
        while True:
            fired = await self.firing.fire()
            total.taken += fired.taken
            total.jobs += fired.jobs
            total.needed += fired.needed
            if not fired.taken or fired.needed:
                return total

    async def set_back(self, org: OrgId, by_us: int, name: ScheduleName = DAILY) -> Micros:
        """Lets the schedule be as if no router had run for so long. Returns its next instant then."""
        found = await self.admin.get(org, name)
        at = calendar.following(found.schedule.spec.timing, Micros(found.now - by_us))
        assert at is not None
        await self.database.run(
            b"UPDATE windrow.schedule SET next_at = timestamptz 'epoch' + %(at)s * interval '1 us', wake_at = now() "
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

    async def jobs(self, org: OrgId) -> list[tuple[JobId, str]]:
        """Returns the ids and the runs of the org's live jobs, in the order of the runs' instants."""
        rows = await self.database.run(
            b"SELECT j.id::text, j.scheduled_run FROM windrow.job j JOIN windrow.queue q USING (queue_id) "
            b"WHERE q.org = %(org)s ORDER BY (j.scheduled_run::jsonb ->> 'at')::bigint",
            {"org": org},
        )
        return [(JobId(job), run) for job, run in rows]
