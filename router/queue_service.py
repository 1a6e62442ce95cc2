"""The service that producers and consumers call (proto/windrow/v1/queue.proto)."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections import defaultdict
from collections.abc import AsyncGenerator, Sequence
from itertools import chain

from router import convert, wire
from router.buffer import WAIT_S_MAX
from router.calls import ANSWER_HELD_BYTES, Received, unary
from router.consuming import Consumer
from router.fleet import Fleet
from router.gate import Call, Context, Gate, current_call
from router.leases import Leases
from router.lookups import decide, find
from router.member import Member
from router.status import INVALID_ARGUMENT, RESOURCE_EXHAUSTED, InvalidRequest, Violation
from router.storing import store
from router.stream import Stream, first_message
from router.tracing import current_trace
from router.validation import check_ack, check_dequeue, enqueue_violations, plain_jobs
from router.wire import Given
from shard.errors import BadIds, TooManyQueues
from shard.records import ANSWER_BYTES_MAX, JobRecord
from shard.vocabulary import Answer, JobId, OrgId, QueueName, ShardName
from windrow.v1 import queue_pb2

_JOB_PATH = re.compile(r"jobs\[(\d+)\]")


def _judged_by_method(_request: queue_pb2.EnqueueRequest) -> None:
    """An Enqueue may be independent: which rules it breaks is for its jobs to answer, one by one."""


class QueueService:
    service_name = "windrow.v1.Queue"

    def __init__(self, fleet: Fleet, gate: Gate) -> None:
        self._fleet = fleet
        self._leases = Leases(fleet)
        self._gate = gate
        self._draining = asyncio.Event()
        self._waiting: set[Consumer] = set()

    @unary(_judged_by_method)
    async def Enqueue(self, request: queue_pb2.EnqueueRequest) -> queue_pb2.EnqueueResponse | bytes:
        results: dict[int, queue_pb2.EnqueueResult] = {}
        # The positions in the request of the jobs in `columns`.
        positions: Sequence[int] = range(len(request.jobs))
        columns = plain_jobs(request)
        is_plain = columns is not None
        trace = current_trace()
        if columns is None:
            violations = enqueue_violations(request)
            if violations and not request.independent:
                raise InvalidRequest(violations)
            # Kept, for each look at request.jobs makes new objects.
            jobs = list(request.jobs)
            results = {at: _error(found) for at, found in _by_job(violations).items()}
            positions = [at for at in positions if at not in results]
            columns = convert.new_jobs(OrgId(request.org), [jobs[at] for at in positions], trace=trace)
        elif trace is not None:
            columns.traces = dict.fromkeys(range(len(columns)), trace) | columns.traces
        while len(columns):
            refused: dict[int, queue_pb2.EnqueueResult] = {}
            try:
                known = await store(self._fleet, columns, hand=is_plain)
            except BadIds as error:
                violations = [Violation(f"jobs[{positions[at]}].id", str(error)) for at in error.positions]
                if not request.independent:
                    raise InvalidRequest(violations) from error
                refused = {at: _error([bad]) for at, bad in zip(error.positions, violations, strict=True)}
            except TooManyQueues as error:
                if not request.independent:
                    raise
                told = queue_pb2.JobError(code=RESOURCE_EXHAUSTED, message=str(error))
                refused = {
                    at: queue_pb2.EnqueueResult(error=told)
                    for at, queue in enumerate(columns.queues)
                    if queue in error.queues
                }
            else:
                if is_plain and not known and not results:
                    return wire.stored(columns.ids)
                results.update(zip(positions, convert.enqueue_results(columns.ids, known), strict=True))
                break
            # The shard has refused these, and stored nothing: the others go again without them.
            results.update((positions[at], result) for at, result in refused.items())
            left = [at for at in range(len(columns)) if at not in refused]
            positions = [positions[at] for at in left]
            columns = columns.only(left)
        return queue_pb2.EnqueueResponse(results=[results[at] for at in range(len(request.jobs))])

    @unary(check_dequeue)
    async def Dequeue(self, request: queue_pb2.DequeueRequest) -> bytes:
        window_us = convert.window_us(request)
        received = _FirstJobs(current_call())
        consumer = Consumer(
            self._fleet,
            received,
            received.account,
            org=OrgId(request.org),
            queues=[QueueName(queue) for queue in request.queues],
            worker=request.worker,
            window_us=window_us,
            credit=request.max_jobs or 1,
        )
        try:
            if request.HasField("wait"):
                await self._first(consumer, convert.micros(request.wait) / 1_000_000)
            else:
                while await consumer.claim(self._fleet.givers(consumer.org)) and not received.jobs:
                    # There was no memory for jobs; there may be some.
                    pass
        except BaseException:
            consumer.close()
            for jobs in received.jobs:
                consumer.release(jobs)
            raise
        consumer.close()
        rest = queue_pb2.DequeueResponse(visibility_window=convert.duration(window_us))
        if received.jobs:
            rest.lease_deadline.CopyFrom(convert.timestamp(received.jobs[0].deadline))
        return b"".join([*chain.from_iterable(given.jobs for given in received.jobs), rest.SerializeToString()])

    async def _first(self, consumer: Consumer, wait_s: float) -> None:
        """Until a first job has come, the time is over, or this router drains."""
        over = asyncio.get_running_loop().call_later(0 if self._draining.is_set() else wait_s, consumer.over)
        self._waiting.add(consumer)
        try:
            with self._gate.waiting(current_call()):
                await consumer.serve_first()
        finally:
            self._waiting.discard(consumer)
            over.cancel()

    def drain(self) -> None:
        """Ends all waiting: this router is about to end."""
        self._draining.set()
        for consumer in self._waiting:
            consumer.over()

    async def Consume(self, messages: AsyncGenerator[Received, None], context: Context) -> None:
        async with contextlib.aclosing(messages):
            call = current_call()
            # Whose it is, its first message says. Until then it is one of its connection's.
            with self._gate.stream(call.peer):
                first = await first_message(messages, self._draining)
            if first is not None:
                with self._gate.stream(first.message.start.org):
                    await Stream(self._fleet, self._gate, call, first, messages, context).run(self._draining)

    @unary(check_ack)
    async def Ack(self, request: queue_pb2.AckRequest) -> queue_pb2.AckResponse:
        return queue_pb2.AckResponse(answers=await self._leases.ack(OrgId(request.org), request.acks))

    @unary()
    async def Nack(self, request: queue_pb2.NackRequest) -> queue_pb2.NackResponse:
        return queue_pb2.NackResponse(answers=await self._leases.nack(OrgId(request.org), request.nacks))

    @unary()
    async def Extend(self, request: queue_pb2.ExtendRequest) -> queue_pb2.ExtendResponse:
        window_us = convert.window_us(request)
        answers = await self._leases.extend(OrgId(request.org), request.leases, window_us=window_us)
        return queue_pb2.ExtendResponse(answers=answers)

    @unary()
    async def Release(self, request: queue_pb2.ReleaseRequest) -> queue_pb2.ReleaseResponse:
        return queue_pb2.ReleaseResponse(answers=await self._leases.release(OrgId(request.org), request.leases))

    @unary(answer_bytes=ANSWER_HELD_BYTES)
    async def GetJobs(self, request: queue_pb2.GetJobsRequest) -> queue_pb2.GetJobsResponse:
        org = OrgId(request.org)
        ids = [JobId(job_id) for job_id in dict.fromkeys(request.ids)]
        places = {job_id: at for at, job_id in enumerate(ids)}

        async def get(member: Member, positions: Sequence[int]) -> dict[int, tuple[ShardName, JobRecord]]:
            records = await member.store.get(
                org,
                [ids[at] for at in positions],
                include_payload=request.include_payload,
                bytes_max=ANSWER_BYTES_MAX,
            )
            return {places[record.id]: (member.name, record) for record in records}

        found = await find(self._fleet, org, ids, get)
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
                    response.left_out.append(job_id)
            elif not found.unavailable:
                # Of those that may be where nobody answers, nothing can be said.
                response.not_found.append(job_id)
        return response

    @unary()
    async def CancelJobs(self, request: queue_pb2.CancelJobsRequest) -> queue_pb2.CancelJobsResponse:
        org = OrgId(request.org)
        ids = [JobId(job_id) for job_id in request.ids]

        async def cancel(member: Member, positions: Sequence[int]) -> list[Answer]:
            return await member.store.cancel(org, [ids[at] for at in positions], reason=request.reason)

        answers = await decide(self._fleet, org, ids, cancel)
        return queue_pb2.CancelJobsResponse(answers=[convert.ANSWERS[answer] for answer in answers])


class _FirstJobs:
    """The jobs of one Dequeue."""

    def __init__(self, account: Call) -> None:
        self.account = account
        self.jobs: list[Given] = []

    def receive(self, jobs: Given) -> None:
        self.jobs.append(jobs)

    @property
    def takes_once(self) -> bool:
        return True

    def is_full(self) -> bool:
        """Never: there is room for as many as there is credit for."""
        return False

    async def has_room(self) -> None:
        """Raises RouterFull."""
        await self.account.until_room(WAIT_S_MAX)


def _by_job(violations: Sequence[Violation]) -> dict[int, list[Violation]]:
    """The violations of each job, by its position. Raises InvalidRequest for those that are the whole call's."""
    of_call = [violation for violation in violations if not _JOB_PATH.match(violation.field)]
    if of_call:
        raise InvalidRequest(of_call)
    by_job: dict[int, list[Violation]] = defaultdict(list)
    for violation in violations:
        path = _JOB_PATH.match(violation.field)
        if path:
            by_job[int(path[1])].append(violation)
    return by_job


def _error(violations: Sequence[Violation]) -> queue_pb2.EnqueueResult:
    return queue_pb2.EnqueueResult(
        error=queue_pb2.JobError(
            code=INVALID_ARGUMENT,
            message=str(InvalidRequest(violations)),
            violations=[
                queue_pb2.FieldViolation(field=field, description=description) for field, description in violations
            ],
        )
    )
