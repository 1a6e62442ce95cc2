"""The service that producers and consumers call (proto/windrow/v1/queue.proto)."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from itertools import chain
from typing import cast

import grpc

from router import convert, wire
from router.calls import Context, Gate, refusal, unary
from router.consuming import Consumer, give_back
from router.fleet import Fleet
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
from windrow.v1 import job_pb2, queue_pb2

_JOB_PATH = re.compile(r"jobs\[(\d+)\]")


def _judged_by_method(_request: queue_pb2.EnqueueRequest) -> None:
    """An Enqueue may be independent: which rules it breaks is for its jobs to answer, one by one."""


class QueueService:
    service_name = "windrow.v1.Queue"

    def __init__(self, fleet: Fleet, gate: Gate) -> None:
        self._fleet = fleet
        self._leases = Leases(fleet)
        self.gate = gate
        self._draining = asyncio.Event()
        self._waiting: set[Consumer] = set()

    @unary(_judged_by_method)
    async def Enqueue(self, request: queue_pb2.EnqueueRequest) -> queue_pb2.EnqueueResponse | bytes:
        plain = plain_jobs(request)
        if plain is not None:
            trace = current_trace()
            if trace is not None:
                plain.traces = dict.fromkeys(range(len(plain)), trace) | plain.traces
            try:
                known = await store(self._fleet, plain, hand=True)
            except (BadIds, TooManyQueues):
                # Nothing was stored. Whose fault it is, and what to say of it, is found out the long way.
                pass
            else:
                if not known:
                    return wire.stored(plain.ids)
                return queue_pb2.EnqueueResponse(results=convert.enqueue_results(plain.ids, known))
        # Kept, for each look at request.jobs makes new objects.
        jobs = list(request.jobs)
        violations = enqueue_violations(request)
        if not request.independent:
            if violations:
                raise InvalidRequest(violations)
            return queue_pb2.EnqueueResponse(results=await self._enqueue(request.org, jobs, range(len(jobs))))
        bad = _by_job(violations)
        results = {at: _error(violations) for at, violations in bad.items()}
        good = [at for at in range(len(jobs)) if at not in bad]
        while good:
            try:
                stored = await self._enqueue(request.org, jobs, good)
            except InvalidRequest as error:
                # Only the shard knows which ids will not do: those jobs fall out, and the others go again.
                late = _by_job(error.violations)
                results.update((at, _error(violations)) for at, violations in late.items())
                good = [at for at in good if at not in late]
            except TooManyQueues as error:
                told = queue_pb2.JobError(code=RESOURCE_EXHAUSTED, message=str(error))
                unmade = {at for at in good if jobs[at].queue in error.queues}
                results.update((at, queue_pb2.EnqueueResult(error=told)) for at in unmade)
                good = [at for at in good if at not in unmade]
            else:
                results.update(zip(good, stored, strict=True))
                break
        return queue_pb2.EnqueueResponse(results=[results[at] for at in range(len(jobs))])

    async def _enqueue(
        self, org: str, jobs: Sequence[job_pb2.NewJob], positions: Sequence[int]
    ) -> list[queue_pb2.EnqueueResult]:
        """Stores the jobs at these positions of the request. Raises InvalidRequest, by the request's paths."""
        columns = convert.new_jobs(OrgId(org), [jobs[at] for at in positions], trace=current_trace())
        try:
            known = await store(self._fleet, columns, hand=False)
        except BadIds as error:
            late = [Violation(f"jobs[{positions[at]}].id", str(error)) for at in error.positions]
            raise InvalidRequest(late) from error
        return convert.enqueue_results(columns.ids, known)

    @unary(check_dequeue)
    async def Dequeue(self, request: queue_pb2.DequeueRequest) -> bytes:
        window_us = convert.window_us(request)
        received = _Received()
        consumer = Consumer(
            self._fleet,
            received,
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
                await consumer.claim(self._fleet.givers(consumer.org))
        except BaseException:
            consumer.close()
            received.give_back(consumer.org)
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
            with self.gate.waiting(consumer.org):
                await consumer.serve_first()
        finally:
            self._waiting.discard(consumer)
            over.cancel()

    def drain(self) -> None:
        """Ends all waiting: this router is about to end."""
        self._draining.set()
        for consumer in self._waiting:
            consumer.over()

    async def Consume(self, request_iterator: AsyncIterator[queue_pb2.ConsumeRequest], context: Context) -> None:
        try:
            await self._consume(request_iterator, context)
            return
        except grpc.aio.InternalError:
            # gRPC could not send a message: the client has cancelled, or is gone. There is nobody to tell.
            return
        except Exception as error:  # noqa: BLE001 - told to the caller
            refused = refusal(context, error)
        del request_iterator, context
        await refused

    async def _consume(self, request_iterator: AsyncIterator[queue_pb2.ConsumeRequest], context: Context) -> None:
        # Its messages come from a generator, which keeps the last one until it is closed.
        generator = cast("AsyncGenerator[queue_pb2.ConsumeRequest]", aiter(request_iterator))
        async with contextlib.aclosing(generator) as requests:
            # Whose it is, its first message says. Until then it is one of its connection's.
            with self.gate.stream(context.peer()):
                first = await first_message(requests, self._draining)
            if first is not None:
                with self.gate.stream(first.start.org):
                    await Stream(self._fleet, first, requests, context).run(self._draining)

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

    @unary()
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


class _Received:
    """The jobs of one Dequeue."""

    def __init__(self) -> None:
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
        """At once."""

    def give_back(self, org: OrgId) -> None:
        for jobs in self.jobs:
            give_back(org, jobs)


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
