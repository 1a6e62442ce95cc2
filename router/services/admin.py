"""Calls about the queues and jobs of one org, besides those of the Queue service (proto/windrow/v1/admin.proto)."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from router.buffer import Buffer
from router.codec import convert
from router.codec.org_limits import limit_message
from router.codec.status import InvalidRequest, Violation
from router.codec.validate import check_list_jobs, check_update_queue, unfit_new_ids
from router.fleet.fleet import Fleet
from router.fleet.shard_handle import ShardHandle
from router.gate.calls import ANSWER_HELD_BYTES, SMALL_ANSWER_BYTES, unary
from router.gate.tracing import current_trace
from router.route.by_org import ask_readers, change_readers, count_readers, list_readers, paused_queues, summed
from router.route.explain import explain_job, explain_queue
from router.route.restore import Refusal, Restored, restore
from shard.admin import job_pages
from shard.admin.job_pages import Page
from shard.admin.queue_admin import QueueAdmin
from shard.errors import NotOwned, QueueNotEmpty, UnknownQueue
from shard.job_record import ANSWER_BYTES_MAX
from shard.placement.slots import Placement
from shard.queue.quarantine import Quarantine
from shard.queue_settings import QueueSettings
from shard.vocabulary import JobId, OrgId, QueueName
from windrow.ids import uuid7
from windrow.v1 import admin_pb2

_PAGE_DEFAULT = 100
# How many jobs of a page are made ready to send before other calls get their turn.
_PAGE_SLICE = 10
_LIMIT_DEFAULT = 1000
# The memory of an answer that says why jobs do not run: causes with names of kinds and nodes, and with a failure.
_EXPLANATION_BYTES = 192 * 1024
# The lowest rate at which a redrive makes jobs due, in jobs per second.
_REDRIVE_RATE_MIN = 0.001
# A redrive may make jobs due this far ahead, as an Enqueue may. Without a limit, a job could become due after the year
# 9999, which does not fit into a Timestamp.
_DELAY_S_MAX = 3650 * 86_400
_REFUSALS = {
    Refusal.NOT_FOUND: admin_pb2.RESTORE_REFUSAL_NOT_FOUND,
    Refusal.LIVE: admin_pb2.RESTORE_REFUSAL_LIVE,
    Refusal.NEW_ID: admin_pb2.RESTORE_REFUSAL_BAD_NEW_ID,
    Refusal.SIGNAL: admin_pb2.RESTORE_REFUSAL_SIGNAL,
}


class AdminService:
    service_name = "windrow.v1.Admin"

    def __init__(self, fleet: Fleet, buffer: Buffer) -> None:
        self._fleet = fleet
        self._buffer = buffer

    @unary(answer_bytes=SMALL_ANSWER_BYTES)
    async def CreateQueue(self, request: admin_pb2.CreateQueueRequest) -> admin_pb2.CreateQueueResponse:
        org, queue, settings = OrgId(request.org), QueueName(request.queue), convert.queue_settings(request.config)

        async def create(member: ShardHandle, placement: Placement) -> admin_pb2.QueueInfo:
            admin = member.require_writable().queue_admin
            record = await admin.create_queue(org, queue, settings, epoch=placement.epoch)
            return convert.queue_info(org, record, member.name)

        return admin_pb2.CreateQueueResponse(queue=await self._fleet.write(org, create))

    @unary(check_update_queue, answer_bytes=SMALL_ANSWER_BYTES)
    async def UpdateQueue(self, request: admin_pb2.UpdateQueueRequest) -> admin_pb2.UpdateQueueResponse:
        config, reset = convert.queue_changes(request)
        org, queue, settings = OrgId(request.org), QueueName(request.queue), convert.queue_settings(config)
        return admin_pb2.UpdateQueueResponse(queue=await self._alter(org, queue, settings, reset=reset))

    @unary(answer_bytes=SMALL_ANSWER_BYTES)
    async def GetQueue(self, request: admin_pb2.GetQueueRequest) -> admin_pb2.GetQueueResponse:
        org = OrgId(request.org)

        async def get(member: ShardHandle) -> admin_pb2.QueueInfo:
            record = await member.queue_admin.get_queue(org, QueueName(request.queue))
            return convert.queue_info(org, record, member.name)

        return admin_pb2.GetQueueResponse(queue=await self._fleet.read(org, get))

    @unary(answer_bytes=ANSWER_HELD_BYTES)
    async def ListQueues(self, request: admin_pb2.ListQueuesRequest) -> admin_pb2.ListQueuesResponse:
        org = OrgId(request.org)

        async def list_queues(member: ShardHandle) -> admin_pb2.ListQueuesResponse:
            records, token = await member.queue_admin.list_queues(
                org, page_size=request.page_size or _PAGE_DEFAULT, page_token=request.page_token
            )
            return admin_pb2.ListQueuesResponse(
                queues=[convert.queue_info(org, record, member.name) for record in records],
                next_page_token=token,
            )

        return await self._fleet.read(org, list_queues)

    @unary(answer_bytes=SMALL_ANSWER_BYTES)
    async def DeleteQueue(self, request: admin_pb2.DeleteQueueRequest) -> admin_pb2.DeleteQueueResponse:
        org, queue = OrgId(request.org), QueueName(request.queue)

        async def delete(member: ShardHandle, placement: Placement) -> None:
            for name in placement.sources:
                # Jobs that leave the source after this check arrive on the writer, where delete_queue finds them.
                if await self._fleet.placed(name).require_up().queue_admin.holds_jobs(org, queue):
                    raise QueueNotEmpty(org, queue)
            await member.require_writable().queue_admin.delete_queue(org, queue, epoch=placement.epoch)

        await self._fleet.write(org, delete)
        return admin_pb2.DeleteQueueResponse()

    @unary(answer_bytes=SMALL_ANSWER_BYTES)
    async def PauseQueue(self, request: admin_pb2.PauseQueueRequest) -> admin_pb2.PauseQueueResponse:
        return admin_pb2.PauseQueueResponse(queue=await self._set_paused(request.org, request.queue, paused=True))

    @unary(answer_bytes=SMALL_ANSWER_BYTES)
    async def ResumeQueue(self, request: admin_pb2.ResumeQueueRequest) -> admin_pb2.ResumeQueueResponse:
        return admin_pb2.ResumeQueueResponse(queue=await self._set_paused(request.org, request.queue, paused=False))

    @unary(answer_bytes=SMALL_ANSWER_BYTES)
    async def PurgeQueue(self, request: admin_pb2.PurgeQueueRequest) -> admin_pb2.PurgeQueueResponse:
        org, queue, limit = OrgId(request.org), QueueName(request.queue), request.limit or _LIMIT_DEFAULT

        async def purge(member: ShardHandle, limit_left: int) -> int:
            return await member.queue_admin.purge_queue(org, queue, limit=limit_left, include_dead=request.include_dead)

        cancelled = await change_readers(self._fleet, org, queue, limit, purge)
        return admin_pb2.PurgeQueueResponse(cancelled=cancelled, limit_reached=cancelled >= limit)

    @unary(check_list_jobs, answer_bytes=ANSWER_HELD_BYTES)
    async def ListJobs(self, request: admin_pb2.ListJobsRequest) -> admin_pb2.ListJobsResponse:
        wanted, page_size = convert.wanted(request), request.page_size or _PAGE_DEFAULT

        async def page(member: ShardHandle, token: str) -> Page:
            return await member.queue_admin.list_jobs(wanted, page_size=page_size, page_token=token)

        listed = await list_readers(self._fleet, wanted, page, page_size=page_size, page_token=request.page_token)
        response = admin_pb2.ListJobsResponse(unavailable_shards=listed.unavailable)
        room, until = ANSWER_BYTES_MAX, listed.until
        for at, (shard, record, key) in enumerate(listed.jobs, start=1):
            # A page of 1,000 jobs takes 30 ms: let other calls run in between.
            if at % _PAGE_SLICE == 0:
                await asyncio.sleep(0)
            job = convert.job(record, shard)
            room -= job.ByteSize()
            response.jobs.append(job)
            # Each shard limits only its own part of the page. All parts together may be too large for one answer.
            if room <= 0 and at < len(listed.jobs):
                until = key
                break
        response.next_page_token = "" if until is None else job_pages.pack(*until)
        return response

    @unary(answer_bytes=SMALL_ANSWER_BYTES)
    async def CountJobs(self, request: admin_pb2.CountJobsRequest) -> admin_pb2.CountJobsResponse:
        part, away = await count_readers(self._fleet, convert.wanted_count(request), page_token=request.page_token)
        return admin_pb2.CountJobsResponse(count=part.count, next_page_token=part.next_token, unavailable_shards=away)

    @unary(answer_bytes=ANSWER_HELD_BYTES)
    async def RestoreJobs(self, request: admin_pb2.RestoreJobsRequest) -> admin_pb2.RestoreJobsResponse:
        jobs = list(request.jobs)
        violations = unfit_new_ids(jobs)
        if violations:
            raise InvalidRequest(violations)
        restored = await restore(
            self._fleet,
            OrgId(request.org),
            [JobId(job.id) for job in jobs],
            [JobId(job.new_id or uuid7()) for job in jobs],
            trace=current_trace(),
        )
        return admin_pb2.RestoreJobsResponse(results=map(_restore_result, restored))

    @unary(answer_bytes=SMALL_ANSWER_BYTES)
    async def RedriveQueue(self, request: admin_pb2.RedriveQueueRequest) -> admin_pb2.RedriveQueueResponse:
        org, queue, limit = OrgId(request.org), QueueName(request.queue), request.limit or _LIMIT_DEFAULT
        if 0 < request.per_second < _REDRIVE_RATE_MIN:
            why = f"must be 0, or {_REDRIVE_RATE_MIN:g} or more, not {request.per_second:g}"
            raise InvalidRequest([Violation("per_second", why)])
        if request.already_redriven and not request.per_second:
            raise InvalidRequest([Violation("already_redriven", "must be 0 without per_second")])
        if request.per_second and request.already_redriven > (most := int(_DELAY_S_MAX * request.per_second) - limit):
            why = f"must be at most {most:,} at {request.per_second:g} jobs per second and a limit of {limit:,}"
            told = f"{why}, not {request.already_redriven:,}: no job may become due more than 3,650 days ahead"
            raise InvalidRequest([Violation("already_redriven", told)])

        async def redrive(member: ShardHandle, limit_left: int) -> int:
            count = await member.queue_admin.redrive(
                org,
                queue,
                kind=request.kind,
                died_after=convert.moment(request.died_after) if request.HasField("died_after") else None,
                died_before=convert.moment(request.died_before) if request.HasField("died_before") else None,
                limit=limit_left,
                gap_us=round(1_000_000 / request.per_second) if request.per_second else 0,
                ahead=request.already_redriven + limit - limit_left,
            )
            if count:
                await member.room.may_have_jobs(org, queue)
            return count

        redriven = await change_readers(self._fleet, org, queue, limit, redrive)
        return admin_pb2.RedriveQueueResponse(redriven=redriven, limit_reached=redriven >= limit)

    @unary(answer_bytes=ANSWER_HELD_BYTES)
    async def GetStats(self, request: admin_pb2.GetStatsRequest) -> admin_pb2.GetStatsResponse:
        org = OrgId(request.org)
        queue = QueueName(request.queue) if request.queue else None
        asked = await ask_readers(
            self._fleet,
            org,
            lambda member: member.queue_admin.stats(org, queue, include_finished=request.include_finished),
            finished=request.include_finished,
        )
        return admin_pb2.GetStatsResponse(
            queues=[
                convert.queue_stats(total)
                for total in summed([counts for _, counts in asked.answers], paused=paused_queues(asked))
            ],
            unavailable_shards=asked.unavailable,
        )

    @unary(answer_bytes=ANSWER_HELD_BYTES)
    async def ListQuarantines(self, request: admin_pb2.ListQuarantinesRequest) -> admin_pb2.ListQuarantinesResponse:
        org, queue = OrgId(request.org), QueueName(request.queue) if request.queue else None
        found = await self._fleet.read(org, lambda member: member.store.quarantines(org, queue))
        return admin_pb2.ListQuarantinesResponse(quarantines=map(convert.quarantine, found))

    @unary(answer_bytes=SMALL_ANSWER_BYTES)
    async def QuarantineKind(self, request: admin_pb2.QuarantineKindRequest) -> admin_pb2.QuarantineKindResponse:
        org, queue = OrgId(request.org), QueueName(request.queue)

        async def add(member: ShardHandle, placement: Placement) -> None:
            act = partial(
                Quarantine.add, org=org, queue=queue, kind=request.kind, reason=request.reason, epoch=placement.epoch
            )
            await act(member.require_writable().store.quarantine)
            await self._on_sources(placement, lambda source: act(source.store.quarantine, draining=True))

        await self._fleet.write(org, add)
        return admin_pb2.QuarantineKindResponse()

    @unary(answer_bytes=SMALL_ANSWER_BYTES)
    async def ReleaseKind(self, request: admin_pb2.ReleaseKindRequest) -> admin_pb2.ReleaseKindResponse:
        org, queue = OrgId(request.org), QueueName(request.queue)

        async def release(member: ShardHandle, placement: Placement) -> bool:
            act = partial(Quarantine.release, org=org, queue=queue, kind=request.kind, epoch=placement.epoch)
            released = await act(member.require_writable().store.quarantine)
            await self._on_sources(placement, lambda source: act(source.store.quarantine, draining=True))
            return released

        return admin_pb2.ReleaseKindResponse(released=await self._fleet.write(org, release))

    @unary(answer_bytes=_EXPLANATION_BYTES)
    async def ExplainJob(self, request: admin_pb2.ExplainJobRequest) -> admin_pb2.ExplainJobResponse:
        return await explain_job(self._fleet, self._buffer, OrgId(request.org), JobId(request.id))

    @unary(answer_bytes=_EXPLANATION_BYTES)
    async def ExplainQueue(self, request: admin_pb2.ExplainQueueRequest) -> admin_pb2.ExplainQueueResponse:
        return await explain_queue(self._fleet, self._buffer, OrgId(request.org), QueueName(request.queue))

    @unary(answer_bytes=ANSWER_HELD_BYTES)
    async def ListLimits(self, request: admin_pb2.ListLimitsRequest) -> admin_pb2.ListLimitsResponse:
        table = await self._fleet.newest_limits()
        return admin_pb2.ListLimitsResponse(limits=map(limit_message, table.all_of(OrgId(request.org))))

    async def _on_sources(self, placement: Placement, change: Callable[[ShardHandle], Awaitable[object]]) -> None:
        """Makes a change of a queue on the shards from which jobs of the queue are still moving."""
        for name in placement.sources:
            source = self._fleet.placed(name).require_writable()
            # The source may not have this queue, or the org's move may have ended by now.
            with contextlib.suppress(NotOwned, UnknownQueue):
                await change(source)

    async def _set_paused(self, org: str, queue: str, *, paused: bool) -> admin_pb2.QueueInfo:
        return await self._alter(OrgId(org), QueueName(queue), QueueSettings(paused=paused))

    async def _alter(
        self, org: OrgId, queue: QueueName, settings: QueueSettings, *, reset: Sequence[str] = ()
    ) -> admin_pb2.QueueInfo:
        """Changes a queue on the shard that takes the org's new jobs, then on the shards from which jobs of the org are
        still moving."""

        async def alter(member: ShardHandle, placement: Placement) -> admin_pb2.QueueInfo:
            changed = partial(
                QueueAdmin.alter_queue,
                org=org,
                queue=queue,
                settings=settings,
                reset=reset,
                epoch=placement.epoch,
            )
            record = await changed(member.require_writable().queue_admin)

            async def on_source(source: ShardHandle) -> None:
                await changed(source.queue_admin, draining=True)
                if settings.paused is False:
                    await source.room.may_have_jobs(org, queue)

            await self._on_sources(placement, on_source)
            if settings.paused is False:
                await member.room.may_have_jobs(org, queue)
            return convert.queue_info(org, record, member.name)

        return await self._fleet.write(org, alter)


def _restore_result(restored: Restored | Refusal) -> admin_pb2.RestoreResult:
    if isinstance(restored, Refusal):
        return admin_pb2.RestoreResult(refusal=_REFUSALS[restored])
    job = admin_pb2.RestoredJob(id=restored.id, duplicate=restored.duplicate)
    return admin_pb2.RestoreResult(restored=job)
