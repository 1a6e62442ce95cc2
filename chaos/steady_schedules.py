"""Many schedules that nobody changes. Each schedule fires every 15 minutes, and skips no instant. The schedules'
instants are spread evenly over the 15 minutes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from chaos.operator_calls import TRY_S, is_created
from proof.checker.evidence import Schedule, Terms
from proof.clients import calls
from proof.clients.site import QUEUE
from proof.history import payload_of
from proof.postgres import ask
from windrow.v1 import job_pb2, schedules_pb2, schedules_pb2_grpc

_EVERY_S = 900
# The start of the first schedule, from which its intervals are counted. Routers refuse times before 1971.
_FIRST_S = 1_000_000_000


class SteadySchedules:
    """All steady schedules. `dsns`: the DSNs of the shards' databases. SQL statements store most of the schedules in
    the tables, because a call for each schedule would take longer than the run. No slot may move while `create` and
    `set_end` run."""

    def __init__(
        self,
        stubs: Sequence[schedules_pb2_grpc.SchedulesAsyncStub],
        orgs: Sequence[str],
        dsns: Sequence[str],
        *,
        count: int,
    ) -> None:
        self._stubs = stubs
        self._orgs = orgs
        self._dsns = dsns
        self._count = count
        # Set by `set_end`.
        self._end_s: int

    @property
    def seen(self) -> list[Schedule]:
        return [self._seen(number) for number in range(self._count)]

    async def create(self) -> None:
        """Creates the first schedule of each org by a call, and the org's other schedules as copies of the first
        schedule's row."""
        for number in range(min(self._count, len(self._orgs))):
            while not await self._create(number):
                pass
        copies = _copies(self._count, len(self._orgs))
        stored = [await asyncio.to_thread(ask, dsn, copies) for dsn in self._dsns]
        assert sum(count for ((count,),) in stored) == self._count, stored

    async def set_end(self, end_s: int) -> None:
        """Lets all schedules end at this time of the system's clock. `create` cannot set the end, because it is not
        known in advance how long the creation takes."""
        for dsn in self._dsns:
            await asyncio.to_thread(ask, dsn, _ending(end_s))
        self._end_s = end_s

    async def _create(self, number: int) -> bool:
        spec = schedules_pb2.ScheduleSpec(
            interval=calls.duration(_EVERY_S),
            overlap=schedules_pb2.OVERLAP_POLICY_ALLOW,
            catch_up=schedules_pb2.CATCH_UP_POLICY_ALL,
        )
        # The intervals of a schedule are counted from its start.
        spec.start.FromSeconds(self._offset_s(number))
        org, name = self._org(number), _name(number)
        job = job_pb2.JobTemplate(queue=QUEUE, kind="work", payload=payload_of(org, name, 0), attributes={"terms": "0"})
        request = schedules_pb2.CreateScheduleRequest(org=org, name=name, spec=spec, job=job)
        stub = self._stubs[number % len(self._stubs)]
        return await is_created(stub.CreateSchedule(request, timeout=TRY_S))

    def _seen(self, number: int) -> Schedule:
        terms = Terms(
            every_us=_EVERY_S * 1_000_000, offset_us=self._offset_s(number) * 1_000_000, skips_for=frozenset()
        )
        return Schedule(
            org=self._org(number),
            name=_name(number),
            terms=terms,
            ends_us=self._end_s * 1_000_000,
            acknowledged=True,
        )

    def _org(self, number: int) -> str:
        return self._orgs[number % len(self._orgs)]

    def _offset_s(self, number: int) -> int:
        return _FIRST_S + number * _EVERY_S // self._count


def _name(number: int) -> str:
    return f"steady-{number}"


def _copies(count: int, orgs: int) -> str:
    """Returns the statement that copies the first schedule of each org to the org's schedules with higher numbers. The
    statement returns how many schedules the shard has then."""
    return f"""
    WITH copied AS (
        INSERT INTO windrow.schedule
        SELECT (jsonb_populate_record(s, jsonb_build_object(
            'id', gen_random_uuid(), 'name', c.name, 'created_at', now(), 'starts_at', to_timestamp(c.first_s),
            'payload', '\\x' || encode(convert_to(o.org || ' ' || c.name || ' ', 'UTF8'), 'hex'),
            'next_at', c.next_at, 'wake_at', c.next_at, 'last_at', NULL, 'last_job', NULL, 'decided', 0
        ))).*
        FROM windrow.schedule s
        JOIN windrow.org o USING (org_id)
        CROSS JOIN generate_series(substr(s.name, 8)::bigint + {orgs}, {count} - 1, {orgs}) AS number
        CROSS JOIN LATERAL (
            SELECT
                'steady-' || number AS name, first_s,
                to_timestamp(first_s + {_EVERY_S} * ceil((extract(epoch FROM now()) - first_s) / {_EVERY_S})) AS next_at
            FROM (SELECT {_FIRST_S} + number * {_EVERY_S} / {count} AS first_s) f
        ) c
        WHERE s.name LIKE 'steady-%'
        RETURNING 1
    )
    SELECT count(*) + (SELECT count(*) FROM windrow.schedule s WHERE s.name LIKE 'steady-%') FROM copied
    """


def _ending(end_s: int) -> str:
    """Returns the statement that sets the end of a shard's steady schedules. No instant is at the end or after it."""
    return f"""
    UPDATE windrow.schedule
    SET ends_at = e.at,
        next_at = CASE WHEN next_at < e.at THEN next_at END,
        wake_at = CASE WHEN next_at < e.at THEN wake_at END
    FROM (SELECT to_timestamp({end_s}) AS at) e
    WHERE name LIKE 'steady-%'
    """
