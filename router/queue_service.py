"""The service that producers and consumers call (proto/windrow/v1/queue.proto)."""

# The types that `unary` makes keep no parameter names, and gRPC passes none.
# pyright: reportIncompatibleMethodOverride=false

from __future__ import annotations

import asyncio
import re
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence

from router import convert
from router.calls import Gate, unary
from router.fleet import Fleet, Member
from router.status import INVALID_ARGUMENT, InvalidRequest, Violation
from router.tracing import current_trace
from router.validation import enqueue_violations, is_plain
from shard.errors import BadIds
from shard.store import Nack
from shard.vocabulary import Answer, JobId, Lease, OrgId, QueueName
from windrow.v1 import job_pb2, queue_pb2, queue_pb2_grpc

_JOB_PATH = re.compile(r"jobs\[(\d+)\]")


def _judged_by_method(_request: queue_pb2.EnqueueRequest) -> None:
    """An Enqueue may be independent: which rules it breaks is for its jobs to answer, one by one."""


class QueueService(queue_pb2_grpc.QueueServicer):
    service_name = "windrow.v1.Queue"

    def __init__(self, fleet: Fleet, gate: Gate) -> None:
        self._fleet = fleet
        self.gate = gate

    @unary(_judged_by_method)
    async def Enqueue(self, request: queue_pb2.EnqueueRequest) -> queue_pb2.EnqueueResponse:
        # Kept, for each look at request.jobs makes new objects.
        jobs = list(request.jobs)
        plain = is_plain(request.org, jobs)
        violations = [] if plain else enqueue_violations(request)
        if not request.independent:
            if violations:
                raise InvalidRequest(violations)
            return queue_pb2.EnqueueResponse(
                results=await self._enqueue(request.org, jobs, range(len(jobs)), plain=plain)
            )
        bad = _by_job(violations)
        results = {at: _error(violations) for at, violations in bad.items()}
        good = [at for at in range(len(jobs)) if at not in bad]
        while good:
            try:
                stored = await self._enqueue(request.org, jobs, good, plain=plain)
            except InvalidRequest as error:
                # Only the shard knows which ids will not do: those jobs fall out, and the others go again.
                late = _by_job(error.violations)
                results.update((at, _error(violations)) for at, violations in late.items())
                good = [at for at in good if at not in late]
            else:
                results.update(zip(good, stored, strict=True))
                break
        return queue_pb2.EnqueueResponse(results=[results[at] for at in range(len(jobs))])

    async def _enqueue(
        self, org: str, jobs: Sequence[job_pb2.NewJob], positions: Sequence[int], *, plain: bool
    ) -> list[queue_pb2.EnqueueResult]:
        """Stores the jobs at these positions of the request. Raises InvalidRequest, by the request's paths."""
        chosen = [jobs[at] for at in positions]
        columns = convert.new_jobs(OrgId(org), chosen, trace=current_trace(), plain=plain)
        try:
            known = await self._fleet.write(columns.org, lambda member: member.store.enqueue(columns))
        except BadIds as error:
            late = [Violation(f"jobs[{positions[at]}].id", str(error)) for at in error.positions]
            raise InvalidRequest(late) from error
        return convert.enqueue_results(columns.ids, known)

    @unary()
    async def Dequeue(self, request: queue_pb2.DequeueRequest) -> queue_pb2.DequeueResponse:
        org = OrgId(request.org)
        queues = [QueueName(queue) for queue in request.queues]
        window_us = convert.window_us(request)
        wanted = request.max_jobs or 1
        response = queue_pb2.DequeueResponse()
        for member in self._fleet.readers(org):
            prefix, claimed = await member.store.claim(
                org, queues, max_jobs=wanted - len(response.jobs), window_us=window_us, worker=request.worker
            )
            convert.add_leased_jobs(response, prefix, claimed)
            if claimed:
                response.lease_deadline.CopyFrom(convert.timestamp(claimed[0].deadline))
            if len(response.jobs) >= wanted:
                break
        response.visibility_window.CopyFrom(convert.duration(window_us))
        return response

    @unary()
    async def Ack(self, request: queue_pb2.AckRequest) -> queue_pb2.AckResponse:
        org, acks = OrgId(request.org), list(request.acks)
        leases = convert.leases((ack.lease for ack in acks), field="acks[{}].lease")

        async def act(member: Member, positions: Sequence[int]) -> list[Answer]:
            results = [acks[at].result or None for at in positions]
            return await member.store.ack(org, [leases[at][1] for at in positions], results)

        return queue_pb2.AckResponse(answers=await self._ask_holders(leases, act))

    @unary()
    async def Nack(self, request: queue_pb2.NackRequest) -> queue_pb2.NackResponse:
        org, nacks = OrgId(request.org), request.nacks
        leases = convert.leases((nack.lease for nack in nacks), field="nacks[{}].lease")

        async def act(member: Member, positions: Sequence[int]) -> list[Answer]:
            return await member.store.nack(org, [_nack(leases[at][1], nacks[at]) for at in positions])

        return queue_pb2.NackResponse(answers=await self._ask_holders(leases, act))

    @unary()
    async def Extend(self, request: queue_pb2.ExtendRequest) -> queue_pb2.ExtendResponse:
        org, window_us = OrgId(request.org), convert.window_us(request)
        leases = convert.leases(request.leases, field="leases[{}]")

        async def act(member: Member, positions: Sequence[int]) -> list[Answer]:
            return await member.store.extend(org, [leases[at][1] for at in positions], window_us=window_us)

        return queue_pb2.ExtendResponse(answers=await self._ask_holders(leases, act))

    @unary()
    async def Release(self, request: queue_pb2.ReleaseRequest) -> queue_pb2.ReleaseResponse:
        org = OrgId(request.org)
        leases = convert.leases(request.leases, field="leases[{}]")

        async def act(member: Member, positions: Sequence[int]) -> list[Answer]:
            return await member.store.release(org, [leases[at][1] for at in positions])

        return queue_pb2.ReleaseResponse(answers=await self._ask_holders(leases, act))

    @unary()
    async def GetJobs(self, request: queue_pb2.GetJobsRequest) -> queue_pb2.GetJobsResponse:
        org = OrgId(request.org)
        ids = [JobId(job_id) for job_id in dict.fromkeys(request.ids)]
        found: dict[str, job_pb2.Job] = {}
        for member in self._fleet.readers(org):
            for record in await member.store.get(org, ids, include_payload=request.include_payload):
                found[record.id] = convert.job(record, member.store.name)
        return queue_pb2.GetJobsResponse(
            jobs=[found[job_id] for job_id in ids if job_id in found],
            not_found=[job_id for job_id in ids if job_id not in found],
        )

    @unary()
    async def CancelJobs(self, request: queue_pb2.CancelJobsRequest) -> queue_pb2.CancelJobsResponse:
        org = OrgId(request.org)
        ids = [JobId(job_id) for job_id in request.ids]
        answers = [Answer.NOT_FOUND] * len(ids)
        for member in self._fleet.readers(org):
            there = await member.store.cancel(org, ids, reason=request.reason)
            answers = [new if new is not Answer.NOT_FOUND else old for old, new in zip(answers, there, strict=True)]
        return queue_pb2.CancelJobsResponse(answers=[convert.ANSWERS[answer] for answer in answers])

    async def _ask_holders(
        self,
        leases: Sequence[tuple[int, Lease]],
        act: Callable[[Member, Sequence[int]], Awaitable[list[Answer]]],
    ) -> list[job_pb2.JobAnswer.ValueType]:
        """Asks every shard that the tokens name about its own; answers in the tokens' order. A shard that is not of
        this cluster has no such job."""
        positions: dict[int, list[int]] = defaultdict(list)
        for at, (tag, _) in enumerate(leases):
            positions[tag].append(at)
        answers = [job_pb2.JOB_ANSWER_NOT_FOUND] * len(leases)

        async def ask(member: Member, there: Sequence[int]) -> None:
            for at, answer in zip(there, await act(member, there), strict=True):
                answers[at] = convert.ANSWERS[answer]

        known = [(member, there) for tag, there in positions.items() if (member := self._fleet.by_tag(tag)) is not None]
        if len(known) == 1:
            await ask(*known[0])
        else:
            # All are asked to the end: which of them failed is told, and what the others did stays done.
            outcomes = await asyncio.gather(*(ask(*one) for one in known), return_exceptions=True)
            for outcome in outcomes:
                if isinstance(outcome, BaseException):
                    raise outcome
        return answers


def _nack(lease: Lease, nack: queue_pb2.Nack) -> Nack:
    delay_us = convert.micros(nack.delay) if nack.HasField("delay") else None
    return Nack(lease=lease, error=nack.error, delay_us=delay_us, kill=nack.kill)


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
