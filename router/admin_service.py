"""The service that operators call (proto/windrow/v1/admin.proto)."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Sequence
from functools import partial

from router import convert
from router.calls import ANSWER_HELD_BYTES, DEADLINE_S_MAX, seconds_left, unary
from router.fleet import Fleet
from router.gate import Context
from router.member import Member
from router.reloading import Reloading
from router.restoring import Refusal, Restored, restore
from router.scatter import ask_readers, change_readers, list_readers, paused_queues, summed
from router.status import InvalidRequest
from router.tracing import current_trace
from router.validation import check, unfit_new_ids
from shard import listing
from shard.books import Books, OrgBooks
from shard.catalog import Catalog, Holding
from shard.errors import DiskFull, NotOwned, QueueNotEmpty, ShardError, ShardUnavailable, UnknownQueue
from shard.listing import Page
from shard.placement import Placement
from shard.records import ANSWER_BYTES_MAX
from shard.retry import Policy
from shard.vocabulary import JobId, OrgId, QueueName, ShardName
from windrow.ids import uuid7
from windrow.v1 import admin_pb2

_PAGE_DEFAULT = 100
_LIMIT_DEFAULT = 1000
_BOOKS_A_MESSAGE = 500
_PROBE_S = 2.0
_REFUSALS = {
    Refusal.NOT_FOUND: admin_pb2.RESTORE_REFUSAL_NOT_FOUND,
    Refusal.LIVE: admin_pb2.RESTORE_REFUSAL_LIVE,
    Refusal.NEW_ID: admin_pb2.RESTORE_REFUSAL_NEW_ID,
}


class AdminService:
    service_name = "windrow.v1.Admin"

    def __init__(self, fleet: Fleet, reloading: Reloading) -> None:
        self._fleet = fleet
        self._reloading = reloading

    @unary()
    async def CreateQueue(self, request: admin_pb2.CreateQueueRequest) -> admin_pb2.CreateQueueResponse:
        org, queue, config = OrgId(request.org), QueueName(request.queue), request.config

        async def create(member: Member, placement: Placement) -> admin_pb2.QueueInfo:
            record = await member.to_change().books.create_queue(
                org,
                queue,
                retry=convert.own_policy(config),
                max_attempts=convert.own_max_attempts(config),
                retention=convert.own_retention(config),
                epoch=placement.epoch,
            )
            return convert.queue_info(org, record, member.name)

        return admin_pb2.CreateQueueResponse(queue=await self._fleet.write(org, create))

    @unary()
    async def AlterQueue(self, request: admin_pb2.AlterQueueRequest) -> admin_pb2.AlterQueueResponse:
        config = request.config
        info = await self._alter(
            OrgId(request.org),
            QueueName(request.queue),
            retry=convert.own_policy(config),
            max_attempts=convert.own_max_attempts(config),
            retention=convert.own_retention(config),
            reset=list(request.reset),
        )
        return admin_pb2.AlterQueueResponse(queue=info)

    @unary()
    async def GetQueue(self, request: admin_pb2.GetQueueRequest) -> admin_pb2.GetQueueResponse:
        org = OrgId(request.org)
        member = await self._home(org)
        record = await member.books.get_queue(org, QueueName(request.queue))
        return admin_pb2.GetQueueResponse(queue=convert.queue_info(org, record, member.name))

    @unary()
    async def ListQueues(self, request: admin_pb2.ListQueuesRequest) -> admin_pb2.ListQueuesResponse:
        org = OrgId(request.org)
        member = await self._home(org)
        records, token = await member.books.list_queues(
            org, page_size=request.page_size or _PAGE_DEFAULT, page_token=request.page_token
        )
        return admin_pb2.ListQueuesResponse(
            queues=[convert.queue_info(org, record, member.name) for record in records],
            next_page_token=token,
        )

    @unary()
    async def DeleteQueue(self, request: admin_pb2.DeleteQueueRequest) -> admin_pb2.DeleteQueueResponse:
        org, queue = OrgId(request.org), QueueName(request.queue)

        async def delete(member: Member, placement: Placement) -> None:
            for name in placement.sources:
                # What leaves there after this look is found here.
                if await self._fleet.placed(name).to_look_at().books.holds_jobs(org, queue):
                    raise QueueNotEmpty(org, queue)
            await member.to_change().books.delete_queue(org, queue, epoch=placement.epoch)

        await self._fleet.write(org, delete)
        return admin_pb2.DeleteQueueResponse()

    @unary()
    async def PauseQueue(self, request: admin_pb2.PauseQueueRequest) -> admin_pb2.PauseQueueResponse:
        return admin_pb2.PauseQueueResponse(queue=await self._set_paused(request.org, request.queue, paused=True))

    @unary()
    async def ResumeQueue(self, request: admin_pb2.ResumeQueueRequest) -> admin_pb2.ResumeQueueResponse:
        return admin_pb2.ResumeQueueResponse(queue=await self._set_paused(request.org, request.queue, paused=False))

    @unary()
    async def PurgeQueue(self, request: admin_pb2.PurgeQueueRequest) -> admin_pb2.PurgeQueueResponse:
        org, queue, limit = OrgId(request.org), QueueName(request.queue), request.limit or _LIMIT_DEFAULT

        async def purge(member: Member, most: int) -> int:
            return await member.books.purge_queue(org, queue, limit=most, include_dead=request.include_dead)

        cancelled = await change_readers(self._fleet, org, queue, limit, purge)
        return admin_pb2.PurgeQueueResponse(cancelled=cancelled, more=cancelled >= limit)

    @unary(answer_bytes=ANSWER_HELD_BYTES)
    async def ListJobs(self, request: admin_pb2.ListJobsRequest) -> admin_pb2.ListJobsResponse:
        wanted, page_size = convert.wanted(request), request.page_size or _PAGE_DEFAULT

        async def page(member: Member, token: str) -> Page:
            return await member.books.list_jobs(wanted, page_size=page_size, page_token=token)

        listed = await list_readers(self._fleet, wanted, page, page_size=page_size, page_token=request.page_token)
        response = admin_pb2.ListJobsResponse(unavailable_shards=listed.unavailable)
        room, until = ANSWER_BYTES_MAX, listed.until
        for at, (shard, record, key) in enumerate(listed.jobs, start=1):
            job = convert.job(record, shard)
            room -= job.ByteSize()
            response.jobs.append(job)
            # Each shard's part has its own bound.
            if room <= 0 and at < len(listed.jobs):
                until = key
                break
        response.next_page_token = "" if until is None else listing.pack(*until)
        return response

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

    @unary()
    async def RedriveJobs(self, request: admin_pb2.RedriveJobsRequest) -> admin_pb2.RedriveJobsResponse:
        org, queue, limit = OrgId(request.org), QueueName(request.queue), request.limit or _LIMIT_DEFAULT

        async def redrive(member: Member, most: int) -> int:
            count = await member.books.redrive(
                org,
                queue,
                kind=request.kind,
                died_after=convert.moment(request.died_after) if request.HasField("died_after") else None,
                died_before=convert.moment(request.died_before) if request.HasField("died_before") else None,
                limit=most,
            )
            if count:
                member.room.brought(org, queue)
            return count

        redriven = await change_readers(self._fleet, org, queue, limit, redrive)
        return admin_pb2.RedriveJobsResponse(redriven=redriven, more=redriven >= limit)

    @unary()
    async def GetStats(self, request: admin_pb2.GetStatsRequest) -> admin_pb2.GetStatsResponse:
        org = OrgId(request.org)
        queue = QueueName(request.queue) if request.queue else None
        asked = await ask_readers(
            self._fleet,
            org,
            lambda member: member.books.stats(org, queue, include_finished=request.include_finished),
            finished=request.include_finished,
        )
        return admin_pb2.GetStatsResponse(
            queues=[
                convert.queue_stats(one)
                for one in summed([counts for _, counts in asked.answers], paused=paused_queues(asked))
            ],
            unavailable_shards=asked.unavailable,
        )

    @unary()
    async def ListShards(self, request: admin_pb2.ListShardsRequest) -> admin_pb2.ListShardsResponse:
        members, holdings = self._fleet.shards(), self._fleet.holdings()
        shards = await asyncio.gather(
            *(self._probe(member, holdings.get(name, Holding())) for name, member in members.items())
        )
        unnamed = [
            _info(name, holding, error="the cluster file of this router does not name it")
            for name, holding in holdings.items()
            if name not in members
        ]
        return admin_pb2.ListShardsResponse(shards=[*shards, *unnamed], cluster_file=self._cluster_file())

    async def CheckShard(
        self, request: admin_pb2.CheckShardRequest, context: Context
    ) -> AsyncGenerator[admin_pb2.CheckShardResponse, None]:
        check(request)
        async with asyncio.timeout(seconds_left(context, at_most=5 * DEADLINE_S_MAX)):
            member = self._fleet.member(request.shard)
            before = await self._fleet.newest_catalog()
            books = await member.books.check()
            after = await self._fleet.newest_catalog()
        homes = _homes_of_strays(member.name, books, before, after)
        for at in range(0, len(books), _BOOKS_A_MESSAGE):
            yield admin_pb2.CheckShardResponse(
                orgs=[
                    convert.org_books(one, lives_on=homes.get(one.org, "")) for one in books[at : at + _BOOKS_A_MESSAGE]
                ]
            )

    async def _home(self, org: OrgId) -> Member:
        """The shard that has the org's queue configurations. Others may have old ones, so the catalog is asked; while
        it is away no move goes on, and this router's copy of it will do."""
        with contextlib.suppress(ShardUnavailable):
            await self._fleet.is_current(org, self._fleet.placement(org))
        return self._fleet.writer(self._fleet.placement(org)).to_look_at()

    async def _set_paused(self, org: str, queue: str, *, paused: bool) -> admin_pb2.QueueInfo:
        return await self._alter(OrgId(org), QueueName(queue), paused=paused)

    async def _alter(
        self,
        org: OrgId,
        queue: QueueName,
        *,
        retry: Policy | None = None,
        max_attempts: int | None = None,
        retention: int | None = None,
        paused: bool | None = None,
        reset: Sequence[str] = (),
    ) -> admin_pb2.QueueInfo:
        """Changes a queue where the org's jobs go, then where the last of them are that went elsewhere before."""

        async def alter(member: Member, placement: Placement) -> admin_pb2.QueueInfo:
            changed = partial(
                Books.alter_queue,
                org=org,
                queue=queue,
                retry=retry,
                max_attempts=max_attempts,
                retention=retention,
                paused=paused,
                reset=reset,
                epoch=placement.epoch,
            )
            record = await changed(member.to_change().books)
            for name in placement.sources:
                source = self._fleet.placed(name).to_change()
                # It may have no such queue, or be beyond this move by now.
                with contextlib.suppress(NotOwned, UnknownQueue):
                    await changed(source.books, draining=True)
                    if paused is False:
                        source.room.brought(org, queue)
            if paused is False:
                member.room.brought(org, queue)
            return convert.queue_info(org, record, member.name)

        return await self._fleet.write(org, alter)

    async def _probe(self, member: Member, holding: Holding) -> admin_pb2.ShardInfo:
        """One shard's state; its troubles are told, never raised."""
        entry = member.entry
        info = _info(entry.name, holding, error=member.trouble)
        info.state, info.weight = convert.SHARD_STATES[entry.state], entry.weight
        info.labels.update(entry.labels)
        try:
            began = time.perf_counter()
            async with asyncio.timeout(_PROBE_S):
                info.postgres_version, info.schema_version = await member.to_look_at().books.versions()
                info.latency.CopyFrom(convert.duration(round((time.perf_counter() - began) * 1e6)))
                # It answers, but is of no use to anybody while its clock is behind.
                member.store.clock.check()
                info.reachable = True
                await member.books.probe_disk()
        except DiskFull as error:
            info.disk_full, info.error = True, str(error)
        except TimeoutError:
            info.error = f"no answer within {_PROBE_S:g} s"
        except ShardError as error:
            info.error = str(error)
        return info

    def _cluster_file(self) -> admin_pb2.ClusterFile:
        told = self._reloading
        file = admin_pb2.ClusterFile(digest=told.cluster.digest, needs_restart=told.needs_restart)
        file.in_force_since.FromDatetime(told.since)
        if told.refusal is not None:
            file.refusal.why, file.refusal.digest = told.refusal.why, told.refusal.digest
            file.refusal.at.FromDatetime(told.refusal.at)
        return file


def _homes_of_strays(
    shard: ShardName, books: Sequence[OrgBooks], before: Catalog, after: Catalog
) -> dict[str, ShardName]:
    """Where the jobs of these orgs belong that are on a shard which nobody reads for them; by the catalog before and
    after they were counted: an org that moved meanwhile is left out."""
    homes: dict[str, ShardName] = {}
    for one in books:
        org = OrgId(one.org)
        placement = after.placement(org)
        # What begins so is an org that is being erased (shard/erasing.py).
        if one.unfinished and shard not in placement.reads and not org.startswith("\x7f"):
            known = before.placement(org)
            if (known.epoch, known.reads) == (placement.epoch, placement.reads):
                homes[one.org] = placement.writes[0]
    return homes


def _info(name: ShardName, holding: Holding, *, error: str) -> admin_pb2.ShardInfo:
    return admin_pb2.ShardInfo(
        name=name, slots=holding.slots, leaving_slots=holding.leaving, pinned_orgs=holding.pins, error=error
    )


def _restore_result(restored: Restored | Refusal) -> admin_pb2.RestoreResult:
    if isinstance(restored, Refusal):
        return admin_pb2.RestoreResult(refusal=_REFUSALS[restored])
    return admin_pb2.RestoreResult(id=restored.id, duplicate=restored.duplicate)
