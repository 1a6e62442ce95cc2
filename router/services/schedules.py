"""Calls about the schedules of one org (proto/windrow/v1/schedules.proto)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from itertools import islice

from router.calculator import Calculator
from router.codec import schedules as codec
from router.codec.convert import STATES, moment
from router.fleet.fleet import Fleet
from router.fleet.schedules import have_ended
from router.fleet.shard_handle import ShardHandle
from router.gate.calls import ANSWER_HELD_BYTES, SMALL_ANSWER_BYTES, unary
from router.route import by_id
from shard.errors import ShardError
from shard.placement.slots import Placement
from shard.schedule import Overlap, Run, ScheduleName
from shard.schedules import calendar
from shard.schedules.schedule_admin import Found
from shard.vocabulary import JobId, Micros, OrgId
from windrow.v1 import job_pb2, schedules_pb2

_PAGE_DEFAULT = 100
_PREVIEW_DEFAULT = 10
# How many of a schedule's next instants an answer about the schedule has.
_NEXT = 5
# The memory of an answer with one schedule: its template may have a payload of 64 KiB, and 32 attributes.
_SCHEDULE_BYTES = 128 * 1024


class SchedulesService:
    service_name = "windrow.v1.Schedules"

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        # Finding 100 instants of a rare date takes 25 ms, which is too long for the event loop.
        self._previews = Calculator("previews of schedules")

    @unary(codec.check_create, answer_bytes=_SCHEDULE_BYTES)
    async def CreateSchedule(
        self, request: schedules_pb2.CreateScheduleRequest
    ) -> schedules_pb2.CreateScheduleResponse:
        org, name = OrgId(request.org), ScheduleName(request.name)
        spec, template = codec.spec(request.spec), codec.template(request.job)

        async def create(member: ShardHandle, placement: Placement) -> Found:
            admin = member.require_writable().schedule_admin
            return await admin.create(org, name, spec, template, paused=request.paused, epoch=placement.epoch)

        return schedules_pb2.CreateScheduleResponse(schedule=await self._changed(org, create))

    @unary(codec.check_update, answer_bytes=_SCHEDULE_BYTES)
    async def UpdateSchedule(
        self, request: schedules_pb2.UpdateScheduleRequest
    ) -> schedules_pb2.UpdateScheduleResponse:
        org, name, change = OrgId(request.org), ScheduleName(request.name), codec.change(request)

        async def update(member: ShardHandle, placement: Placement) -> Found:
            return await member.require_writable().schedule_admin.update(org, name, change, epoch=placement.epoch)

        return schedules_pb2.UpdateScheduleResponse(schedule=await self._changed(org, update))

    @unary(answer_bytes=ANSWER_HELD_BYTES)
    async def GetSchedule(self, request: schedules_pb2.GetScheduleRequest) -> schedules_pb2.GetScheduleResponse:
        org = OrgId(request.org)

        async def get(member: ShardHandle) -> tuple[schedules_pb2.ScheduleInfo, Sequence[Run]]:
            found = await member.schedule_admin.get(org, ScheduleName(request.name))
            return _info(found, member), await member.schedule_admin.runs(org, found.schedule.id)

        info, runs = await self._fleet.read(org, get)
        states = await self._states(org, runs)
        return schedules_pb2.GetScheduleResponse(schedule=info, runs=[codec.run_message(run, states) for run in runs])

    @unary(answer_bytes=ANSWER_HELD_BYTES)
    async def ListSchedules(self, request: schedules_pb2.ListSchedulesRequest) -> schedules_pb2.ListSchedulesResponse:
        org = OrgId(request.org)

        async def list_schedules(member: ShardHandle) -> schedules_pb2.ListSchedulesResponse:
            found, token = await member.schedule_admin.list(
                org,
                declared_by=request.declared_by,
                page_size=request.page_size or _PAGE_DEFAULT,
                page_token=request.page_token,
            )
            return schedules_pb2.ListSchedulesResponse(
                schedules=[_info(one, member) for one in found], next_page_token=token
            )

        return await self._fleet.read(org, list_schedules)

    @unary(answer_bytes=SMALL_ANSWER_BYTES)
    async def DeleteSchedule(
        self, request: schedules_pb2.DeleteScheduleRequest
    ) -> schedules_pb2.DeleteScheduleResponse:
        org, name = OrgId(request.org), ScheduleName(request.name)

        async def delete(member: ShardHandle, placement: Placement) -> None:
            await member.require_writable().schedule_admin.delete(org, name, epoch=placement.epoch)

        await self._fleet.write(org, delete)
        return schedules_pb2.DeleteScheduleResponse()

    @unary(answer_bytes=_SCHEDULE_BYTES)
    async def PauseSchedule(self, request: schedules_pb2.PauseScheduleRequest) -> schedules_pb2.PauseScheduleResponse:
        schedule = await self._set_paused(request.org, request.name, paused=True)
        return schedules_pb2.PauseScheduleResponse(schedule=schedule)

    @unary(answer_bytes=_SCHEDULE_BYTES)
    async def ResumeSchedule(
        self, request: schedules_pb2.ResumeScheduleRequest
    ) -> schedules_pb2.ResumeScheduleResponse:
        schedule = await self._set_paused(request.org, request.name, paused=False)
        return schedules_pb2.ResumeScheduleResponse(schedule=schedule)

    @unary(answer_bytes=SMALL_ANSWER_BYTES)
    async def TriggerSchedule(
        self, request: schedules_pb2.TriggerScheduleRequest
    ) -> schedules_pb2.TriggerScheduleResponse:
        org, name = OrgId(request.org), ScheduleName(request.name)

        async def trigger(member: ShardHandle, placement: Placement) -> tuple[JobId, bool]:
            admin = member.require_open().schedule_admin
            return await admin.trigger(org, name, request=request.request_id or None, epoch=placement.epoch)

        job_id, duplicate = await self._fleet.write(org, trigger)
        return schedules_pb2.TriggerScheduleResponse(job_id=job_id, duplicate=duplicate)

    @unary(codec.check_backfill, answer_bytes=SMALL_ANSWER_BYTES)
    async def BackfillSchedule(
        self, request: schedules_pb2.BackfillScheduleRequest
    ) -> schedules_pb2.BackfillScheduleResponse:
        org, name = OrgId(request.org), ScheduleName(request.name)
        begin, end = moment(request.begin), moment(request.end)
        overlap = codec.overlap(request.overlap, Overlap.ALLOW)

        async def backfill(member: ShardHandle, placement: Placement) -> schedules_pb2.BackfillScheduleResponse:
            async def ended_elsewhere(job: JobId) -> bool:
                return await have_ended([self._fleet.placed(source) for source in placement.sources], org, job)

            admin = member.require_open().schedule_admin
            done = await admin.backfill(
                org,
                name,
                begin=begin,
                end=end,
                overlap=overlap,
                epoch=placement.epoch,
                ended_elsewhere=ended_elsewhere,
            )
            return schedules_pb2.BackfillScheduleResponse(
                stored=done.stored, buffered=done.buffered, skipped=done.skipped, known=done.known
            )

        return await self._fleet.write(org, backfill)

    @unary(codec.check_preview, answer_bytes=SMALL_ANSWER_BYTES)
    async def PreviewSchedule(
        self, request: schedules_pb2.PreviewScheduleRequest
    ) -> schedules_pb2.PreviewScheduleResponse:
        org = OrgId(request.org)
        if request.WhichOneof("of") == "spec":
            timing = codec.spec(request.spec).timing
            now = await self._fleet.read(org, lambda member: member.schedule_admin.now(org))
        else:
            name = ScheduleName(request.name)
            found = await self._fleet.read(org, lambda member: member.schedule_admin.get(org, name))
            timing, now = found.schedule.spec.timing, found.now
        after = moment(request.after) if request.HasField("after") else now
        count = request.count or _PREVIEW_DEFAULT

        def instants() -> list[Micros]:
            return list(islice(calendar.after(timing, after), count))

        times = await self._previews.run(org, instants)
        return schedules_pb2.PreviewScheduleResponse(times=codec.times(times))

    async def _changed(
        self, org: OrgId, act: Callable[[ShardHandle, Placement], Awaitable[Found]]
    ) -> schedules_pb2.ScheduleInfo:
        """Makes a change on the shard that takes the org's new jobs, and returns the schedule."""

        async def changed(member: ShardHandle, placement: Placement) -> schedules_pb2.ScheduleInfo:
            return _info(await act(member, placement), member)

        return await self._fleet.write(org, changed)

    async def _set_paused(self, org: str, name: str, *, paused: bool) -> schedules_pb2.ScheduleInfo:
        async def act(member: ShardHandle, placement: Placement) -> Found:
            admin = member.require_writable().schedule_admin
            return await admin.set_paused(OrgId(org), ScheduleName(name), paused=paused, epoch=placement.epoch)

        return await self._changed(OrgId(org), act)

    async def _states(self, org: OrgId, runs: Sequence[Run]) -> dict[JobId, job_pb2.JobState.ValueType]:
        """Returns the states of the jobs of these runs, without jobs whose shards do not answer."""
        ids = [run.job_id for run in runs if run.job_id is not None]

        async def ask(member: ShardHandle, positions: Sequence[int]) -> dict[int, str]:
            wanted = [ids[at] for at in positions]
            records = await member.store.get(org, wanted, include_payload=False, bytes_max=0)
            return {ids.index(record.id): record.state for record in records}

        if not ids:
            return {}
        try:
            found = await by_id.find(self._fleet, org, ids, ask)
        except ShardError:
            return {}
        return {ids[at]: STATES[state] for at, state in found.answers.items()}


def _info(found: Found, member: ShardHandle) -> schedules_pb2.ScheduleInfo:
    schedule, now = found
    upcoming: Sequence[Micros] = ()
    if schedule.paused_at is None:
        # Leave out an instant that is due already: it is about to be decided.
        upcoming = list(islice(calendar.after(schedule.spec.timing, now), _NEXT))
    return codec.info(schedule, upcoming, member.name)
