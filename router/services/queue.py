"""The service that producers and consumers call (proto/windrow/v1/queue.proto)."""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import re
from collections import defaultdict
from collections.abc import AsyncGenerator, Sequence
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

from google.protobuf.message import Message

from router.codec import convert, fast_write
from router.codec.fast_write import Delivery
from router.codec.lease_verbs import ACK, VERBS, LeaseVerb, not_ok
from router.codec.status import InvalidRequest, Violation, status_of
from router.codec.validate import check, check_ack, check_alter, check_dequeue, plain_jobs, violations_of
from router.fleet.fleet import Fleet
from router.fleet.shard_handle import ShardHandle
from router.gate.admission import Context, Gate
from router.gate.auth.access import access_of
from router.gate.call import Call, current_call
from router.gate.calls import (
    ANSWER_HELD_BYTES,
    RESERVED_BY_METHOD,
    SMALL_ANSWER_BYTES,
    Received,
    for_each,
    unary,
)
from router.gate.org_check import check_all_orgs, check_org
from router.gate.tracing import current_trace
from router.route.by_id import Found, decide, find
from router.route.by_lease import Leases
from router.route.by_org import find_keyed
from router.route.enqueue import describe, store
from router.route.shared import Shared
from router.services.consume_stream import Stream, first_message
from router.services.consumer import Consumer
from router.services.server_info import server_info
from shard.errors import BadIds, LimitReached, TooManyQueues
from shard.job_record import ANSWER_BYTES_MAX, JobRecord
from shard.vocabulary import LIVE, Answer, JobId, JobState, OrgId, QueueName, ShardName
from windrow.rules import Rule, limit
from windrow.v1 import queue_pb2, server_pb2

_CONSUME = access_of(queue_pb2.DESCRIPTOR.services_by_name["Queue"].methods_by_name["Consume"])
# The memory of an EnqueueResult for a job that was stored, and for a job that was refused: status_of bounds the message
# and the violations of an error.
_RESULT_BYTES = 64
REFUSAL_BYTES = 7 * 1024
_QUEUES_MAX = limit(queue_pb2.ConsumeStart, "queues", Rule.REPEATED_MAX_ITEMS)
_JOB_PATH = re.compile(r"jobs\[(\d+)\]")
_FoundJobs = Found[tuple[ShardName, JobRecord]]


class _Look(NamedTuple):
    """One job, and how much of it is wanted."""

    org: OrgId
    job_id: JobId
    include_payload: bool
    bytes_max: int


def _checked_by_method(_request: queue_pb2.EnqueueRequest) -> None:
    """Checks nothing. Enqueue checks its request itself, because an independent Enqueue accepts or refuses each job
    alone."""


class QueueService:
    service_name = "windrow.v1.Queue"

    def __init__(self, fleet: Fleet, gate: Gate, *, stream_s_max: float = math.inf) -> None:
        self._fleet = fleet
        self._leases = Leases(fleet)
        self._gate = gate
        self._stream_s_max = stream_s_max
        self._draining = asyncio.Event()
        self._waiting: set[Consumer] = set()
        # The timeouts of the calls that wait for the end of a job.
        self._timeouts: set[asyncio.Timeout] = set()
        # Many calls may wait for the end of one job. All of them look at the job when they begin, and when it has
        # ended, so they share these look-ups.
        self._awaited = Shared(self._find_one)
        # Ack, Nack, Extend and so on.
        for verb in VERBS:
            rules = check_ack if verb.method == "Ack" else check
            setattr(self, verb.method, unary(rules, answer_bytes=SMALL_ANSWER_BYTES)(partial(self._settle, verb)))

    @unary(_checked_by_method, answer_bytes=for_each(queue_pb2.EnqueueRequest, "jobs", _RESULT_BYTES))
    async def Enqueue(self, request: queue_pb2.EnqueueRequest) -> queue_pb2.EnqueueResponse | bytes:
        results: dict[int, queue_pb2.EnqueueResult] = {}
        # The positions that the jobs of `columns` have in the request.
        positions: Sequence[int] = range(len(request.jobs))
        columns = plain_jobs(request)
        trace = current_trace()
        if columns is None:
            violations = violations_of(request)
            if violations and not request.independent:
                raise InvalidRequest(violations)
            # Copied once: each iteration over request.jobs makes new Python objects.
            jobs = list(request.jobs)
            by_job = _by_job(violations)
            if by_job:
                await current_call().reserve(len(by_job) * REFUSAL_BYTES)
            results = {at: _error(found) for at, found in by_job.items()}
            positions = [at for at in positions if at not in results]
            columns = convert.new_jobs(OrgId(request.org), [jobs[at] for at in positions], trace=trace)
        elif trace is not None:
            columns.traces = dict.fromkeys(range(len(columns)), trace) | columns.traces
        while len(columns):
            refused: dict[int, queue_pb2.EnqueueResult] = {}
            try:
                duplicates = await store(self._fleet, columns, hand=True, independent=request.independent)
            except BadIds as error:
                violations = [
                    Violation(f"jobs[{positions[at]}].id", error.about(columns.ids[at])) for at in error.positions
                ]
                if not request.independent:
                    raise InvalidRequest(violations) from error
                refused = {at: _error([violation]) for at, violation in zip(error.positions, violations, strict=True)}
            except TooManyQueues as error:
                if not request.independent:
                    raise
                refusal = queue_pb2.EnqueueResult(error=status_of(error))
                refused = {at: refusal for at, queue in enumerate(columns.queues) if queue in error.queues}
            except LimitReached as error:
                if not request.independent:
                    raise
                refused = dict.fromkeys(error.positions, queue_pb2.EnqueueResult(error=status_of(error)))
            else:
                if not duplicates and not results:
                    return fast_write.stored(columns.ids)
                known = await describe(self._fleet, columns, duplicates) if duplicates else {}
                results.update(zip(positions, convert.enqueue_results(columns.ids, duplicates, known), strict=True))
                break
            # The shard refused these jobs and stored nothing. Send only the remaining jobs again.
            await current_call().reserve(sum(result.ByteSize() for result in refused.values()))
            results.update((positions[at], result) for at, result in refused.items())
            remaining = [at for at in range(len(columns)) if at not in refused]
            positions = [positions[at] for at in remaining]
            columns = columns.only(remaining)
        return queue_pb2.EnqueueResponse(results=[results[at] for at in range(len(request.jobs))])

    @unary(check_dequeue, answer_bytes=RESERVED_BY_METHOD)
    async def Dequeue(self, request: queue_pb2.DequeueRequest) -> bytes:
        window_us = convert.window_us(request)
        wait_s = convert.micros(request.wait) / 1_000_000 if request.HasField("wait") else None
        # If this call fails, nothing is leased, and the caller may send the request again.
        refused = await self._ack_before(request) if request.acks else ()
        received = _FirstJobs(current_call())
        consumer = Consumer(
            self._fleet,
            received,
            received.account,
            org=OrgId(request.org),
            queues=[QueueName(queue) for queue in request.queues],
            worker=request.worker,
            window_us=window_us,
            kinds=tuple(request.kinds),
            credit=request.max_jobs or 1,
        )
        # Drop the acks: their results may be large, and the call may wait for a minute.
        del request
        try:
            if wait_s is not None:
                await self._wait_for_first(consumer, wait_s)
            else:
                members = self._fleet.shards_to_claim_from(consumer.org)
                for member in members:
                    member.store.consumers_seen.note(consumer.org, consumer.queues, consumer.kinds)
                await consumer.claim(members)
        except BaseException:
            consumer.close()
            for jobs in received.jobs:
                consumer.release(jobs)
            raise
        consumer.close()
        other_fields = queue_pb2.DequeueResponse(visibility_window=convert.duration(window_us), not_ok=refused)
        if received.jobs:
            other_fields.lease_deadline.CopyFrom(convert.timestamp(received.jobs[0].deadline))
        encoded_jobs = chain.from_iterable(delivery.jobs for delivery in received.jobs)
        return b"".join([*encoded_jobs, other_fields.SerializeToString()])

    async def _ack_before(self, request: queue_pb2.DequeueRequest) -> list[queue_pb2.LeaseAnswer]:
        """Finishes the jobs that a Dequeue acks. Returns the leases whose answer is not OK."""
        acks = request.acks
        answers = await self._leases.settle(OrgId(request.org), ACK, acks, field="acks", window_us=0)
        refused = not_ok([acks], answers)
        # The call now holds memory for the refused leases, which its answer repeats, and no longer for the acks.
        call, kept = current_call(), sum(one.ByteSize() for one in refused)
        call.set(call.held - sum(ack.ByteSize() for ack in acks) + kept)
        return refused

    async def _wait_for_first(self, consumer: Consumer, wait_s: float) -> None:
        """Waits until the first jobs have come, `wait_s` is over, or this router drains."""
        timer = asyncio.get_running_loop().call_later(0 if self._draining.is_set() else wait_s, consumer.stop_waiting)
        self._waiting.add(consumer)
        try:
            with self._gate.waiting(current_call(), len(consumer.queues)):
                await consumer.serve_first()
        finally:
            self._waiting.discard(consumer)
            timer.cancel()

    def drain(self) -> None:
        """Ends all waiting calls and streams, because this router is about to end."""
        self._draining.set()
        for consumer in self._waiting:
            consumer.stop_waiting()
        for timeout in self._timeouts:
            if not timeout.expired():
                timeout.reschedule(0)

    async def Consume(self, messages: AsyncGenerator[Received, None], context: Context) -> None:
        async with contextlib.aclosing(messages):
            call = current_call()
            # The first message names the org. Until it comes, the stream counts for its connection instead of an org.
            with self._gate.stream(call.peer):
                first = await first_message(messages, self._draining)
            if first is not None:
                if first.message.HasField("start"):
                    # Check the org first, so that a stream never counts for an org that its caller may not use.
                    if first.message.start.all_orgs:
                        check_all_orgs(call, context, _CONSUME, field="start.org")
                    else:
                        check_org(call, context, first.message.start.org, field="start.org")
                # The number of queues has not been checked yet.
                queues = min(len(first.message.start.queues), _QUEUES_MAX)
                with self._gate.stream(first.message.start.org, queues):
                    stream = Stream(self._fleet, self._gate, call, first, messages, context)
                    # The stream drops its own reference as soon as it has handled the message.
                    del first
                    # The random part prevents streams that began together from ending together.
                    await stream.run(self._draining, ends_after_s=self._stream_s_max * random.uniform(0.7, 1.0))

    async def _settle(self, verb: LeaseVerb, request: Any) -> Message:
        window_us = convert.window_us(request) if isinstance(request, queue_pb2.ExtendRequest) else 0
        field = verb.request_field
        answers = await self._leases.settle(
            OrgId(request.org), verb, getattr(request, field), field=field, window_us=window_us
        )
        return verb.response(answers=answers)

    @unary(answer_bytes=ANSWER_HELD_BYTES)
    async def GetJobs(self, request: queue_pb2.GetJobsRequest) -> queue_pb2.GetJobsResponse:
        ids = [JobId(job_id) for job_id in dict.fromkeys(request.ids)]
        found = await self._find(OrgId(request.org), ids, include_payload=request.include_payload)
        response = queue_pb2.GetJobsResponse(unavailable_shards=found.unavailable)
        room = ANSWER_BYTES_MAX
        for at, job_id in enumerate(ids):
            if at in found.answers:
                shard, record = found.answers[at]
                if record.whole and room > 0:
                    job = convert.job(record, shard)
                    room -= job.ByteSize()
                    response.jobs.append(job)
                else:
                    response.omitted_ids.append(job_id)
            elif not found.unavailable:
                # While a shard does not answer, the job may be on that shard, and "not found" would be a guess.
                response.not_found_ids.append(job_id)
        return response

    @unary(answer_bytes=ANSWER_HELD_BYTES)
    async def FindJob(self, request: queue_pb2.FindJobRequest) -> queue_pb2.FindJobResponse:
        org = OrgId(request.org)
        for live in (True, False):
            job_id = await find_keyed(self._fleet, org, QueueName(request.queue), request.dedup_key, live=live)
            if job_id is not None:
                found = await self._find(org, [job_id], include_payload=request.include_payload)
                found.require(1)
                # A key may outlive its job.
                if found.answers:
                    shard, record = found.answers[0]
                    return queue_pb2.FindJobResponse(job=convert.job(record, shard))
        return queue_pb2.FindJobResponse()

    @unary(answer_bytes=RESERVED_BY_METHOD)
    async def WaitJob(self, request: queue_pb2.WaitJobRequest) -> queue_pb2.WaitJobResponse:
        org, job_id = OrgId(request.org), JobId(request.id)
        if request.HasField("wait"):
            await self._until_ended(org, job_id, convert.micros(request.wait) / 1_000_000)
        # Read the job only now: many calls may wait, each for a long time.
        await current_call().reserve(ANSWER_HELD_BYTES)
        found = await self._awaited.get(_Look(org, job_id, request.include_payload, ANSWER_BYTES_MAX))
        found.require(1)
        if not found.answers:
            return queue_pb2.WaitJobResponse()
        shard, record = found.answers[0]
        return queue_pb2.WaitJobResponse(job=convert.job(record, shard))

    async def _until_ended(self, org: OrgId, job_id: JobId, wait_s: float) -> None:
        """Waits until the job is not live, `wait_s` is over, or this router drains."""
        timeout = asyncio.timeout(0 if self._draining.is_set() else wait_s)
        with self._gate.waiting(current_call()), contextlib.suppress(TimeoutError):
            async with timeout:
                self._timeouts.add(timeout)
                try:
                    while (found := await self._awaited.get(_Look(org, job_id, False, 0))).answers:
                        shard, record = found.answers[0]
                        if JobState(record.state) not in LIVE:
                            return
                        await self._fleet.placed(shard).require_up().ends.until_ended(org, job_id)
                finally:
                    self._timeouts.discard(timeout)

    async def _find_one(self, look: _Look) -> _FoundJobs:
        return await self._find(look.org, [look.job_id], include_payload=look.include_payload, bytes_max=look.bytes_max)

    async def _find(
        self, org: OrgId, ids: Sequence[JobId], *, include_payload: bool, bytes_max: int = ANSWER_BYTES_MAX
    ) -> _FoundJobs:
        """Looks jobs up on every shard that may know them. Raises ShardUnavailable if no shard answers."""
        position_of = {job_id: at for at, job_id in enumerate(ids)}

        async def get(member: ShardHandle, positions: Sequence[int]) -> dict[int, tuple[ShardName, JobRecord]]:
            wanted = [ids[at] for at in positions]
            records = await member.store.get(org, wanted, include_payload=include_payload, bytes_max=bytes_max)
            return {position_of[record.id]: (member.name, record) for record in records}

        return await find(self._fleet, org, ids, get)

    @unary(answer_bytes=SMALL_ANSWER_BYTES)
    async def CancelJobs(self, request: queue_pb2.CancelJobsRequest) -> queue_pb2.CancelJobsResponse:
        org = OrgId(request.org)
        ids = [JobId(job_id) for job_id in request.ids]

        async def cancel(member: ShardHandle, positions: Sequence[int]) -> list[Answer]:
            return await member.store.cancel(org, [ids[at] for at in positions], reason=request.reason)

        answers = await decide(self._fleet, org, ids, cancel)
        return queue_pb2.CancelJobsResponse(answers=[convert.ANSWERS[answer] for answer in answers])

    @unary(check_alter, answer_bytes=SMALL_ANSWER_BYTES)
    async def AlterJobs(self, request: queue_pb2.AlterJobsRequest) -> queue_pb2.AlterJobsResponse:
        org = OrgId(request.org)
        ids = [JobId(job_id) for job_id in request.ids]
        alteration = convert.alteration(request)

        async def alter(member: ShardHandle, positions: Sequence[int]) -> list[Answer]:
            return await member.store.alter(org, [ids[at] for at in positions], alteration)

        answers = await decide(self._fleet, org, ids, alter)
        return queue_pb2.AlterJobsResponse(answers=[convert.ANSWERS[answer] for answer in answers])

    @unary(answer_bytes=SMALL_ANSWER_BYTES)
    async def RedriveJobs(self, request: queue_pb2.RedriveJobsRequest) -> queue_pb2.RedriveJobsResponse:
        org = OrgId(request.org)
        ids = [JobId(job_id) for job_id in request.ids]

        async def redrive(member: ShardHandle, positions: Sequence[int]) -> list[Answer]:
            return await member.store.redrive(org, [ids[at] for at in positions])

        answers = await decide(self._fleet, org, ids, redrive)
        return queue_pb2.RedriveJobsResponse(answers=[convert.ANSWERS[answer] for answer in answers])

    @unary(answer_bytes=SMALL_ANSWER_BYTES)
    async def GetServerInfo(self, _: server_pb2.GetServerInfoRequest) -> server_pb2.GetServerInfoResponse:
        return server_info()


class _FirstJobs:
    """Receives the jobs of one Dequeue."""

    def __init__(self, account: Call) -> None:
        self.account = account
        self.jobs: list[Delivery] = []

    def receive(self, jobs: Delivery) -> None:
        self.jobs.append(jobs)

    @property
    def takes_once(self) -> bool:
        return True

    def is_full(self) -> bool:
        """Returns False: the credit of a Dequeue already limits its jobs."""
        return False

    async def reserve(self, count: int, shard: ShardName) -> None:
        """Waits until the call holds this many more bytes. Raises RouterFull after 5 s."""
        await self.account.reserve(count, shard=shard)


def _by_job(violations: Sequence[Violation]) -> dict[int, list[Violation]]:
    """Returns the violations of each job by the job's position. Raises InvalidRequest if a violation concerns the whole
    call."""
    call_violations = [violation for violation in violations if not _JOB_PATH.match(violation.field)]
    if call_violations:
        raise InvalidRequest(call_violations)
    by_job: dict[int, list[Violation]] = defaultdict(list)
    for violation in violations:
        path = _JOB_PATH.match(violation.field)
        if path:
            by_job[int(path[1])].append(violation)
    return by_job


def _error(violations: Sequence[Violation]) -> queue_pb2.EnqueueResult:
    return queue_pb2.EnqueueResult(error=status_of(InvalidRequest(violations)))
