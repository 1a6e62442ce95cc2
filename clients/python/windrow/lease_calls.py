"""The methods of Client that end or extend leases: ack, nack, extend, release and snooze."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import overload

from windrow.calls import Calls
from windrow.coalescer import Coalescers
from windrow.errors import InvalidRequest, Span, invalid_argument
from windrow.failures import Failure, failure_message, failure_of, stack_of
from windrow.job_changes import in_parts
from windrow.job_log import LOG_BYTES_MAX
from windrow.job_rules import JOBS_MAX
from windrow.jobs import Answer, Job, answers, listed_jobs
from windrow.payloads import NOTE_BYTES_MAX, REASON_BYTES_MAX, Payload, clipped, encode_result, named_duration
from windrow.reports import Progress, report_of
from windrow.v1 import queue_pb2

# How many bytes of results or failures the client sends in one call.
_PART_BYTES_MAX = 8 * 1024 * 1024
_NO_FAILURE = Failure()


class LeaseCalls:
    """The calls with which a consumer ends or extends the leases of jobs of this org or of other orgs."""

    org: str
    calls: Calls
    _acks: Coalescers[queue_pb2.Ack, Answer]

    @overload
    async def ack(self, jobs: Job, *, result: Payload = None) -> Answer: ...
    @overload
    async def ack(self, jobs: Iterable[Job], *, result: Payload = None) -> list[Answer]: ...
    @overload
    async def ack(self, jobs: Job | Iterable[Job], *, result: Payload = None) -> Answer | list[Answer]: ...
    async def ack(self, jobs: Job | Iterable[Job], *, result: Payload = None) -> Answer | list[Answer]:
        """Finishes one job or several. `result` (at most 64 KiB) is stored with each job; get_jobs returns it.

        Acks of single jobs that are made at the same time share calls, as enqueues do.

        Returns Answer.STALE for a job whose lease had ended: nothing was changed, and another consumer may have the
        job.
        """
        try:
            encoded = encode_result(result)
        except (TypeError, ValueError) as error:
            raise invalid_argument("result", error) from error

        if isinstance(jobs, Job):
            ack = queue_pb2.Ack(lease=jobs.lease, result=encoded, log=_log_of(jobs))
            return await self._acks.put(jobs.org or self.org, ack, ack.ByteSize() + 16)

        async def send(org: str, part: Sequence[Job]) -> Sequence[int]:
            acks = [queue_pb2.Ack(lease=job.lease, result=encoded, log=_log_of(job)) for job in part]
            response = await self.calls.call(lambda stub: stub.Ack, queue_pb2.AckRequest(org=org, acks=acks))
            return response.answers

        return await self._each(jobs, send, entry_bytes=len(encoded))

    @overload
    async def nack(
        self,
        jobs: Job,
        *,
        error: str | BaseException | Failure = "",
        retry_after: Span | None = None,
        permanent: bool = False,
    ) -> Answer: ...
    @overload
    async def nack(
        self,
        jobs: Iterable[Job],
        *,
        error: str | BaseException | Failure = "",
        retry_after: Span | None = None,
        permanent: bool = False,
    ) -> list[Answer]: ...
    @overload
    async def nack(
        self,
        jobs: Job | Iterable[Job],
        *,
        error: str | BaseException | Failure = "",
        retry_after: Span | None = None,
        permanent: bool = False,
    ) -> Answer | list[Answer]: ...
    async def nack(
        self,
        jobs: Job | Iterable[Job],
        *,
        error: str | BaseException | Failure = "",
        retry_after: Span | None = None,
        permanent: bool = False,
    ) -> Answer | list[Answer]:
        """Ends attempts that failed. The jobs run again after `retry_after` (s, or timedelta). Without `retry_after`,
        they run again after the delay of their retry policy. A job that has no more attempts is dead; with `permanent`,
        every job is dead at once.

        `error` is stored in the attempt history. It may be an exception, which is stored with its type, message and
        stack; a str, which is stored as the message; or a Failure.
        """
        failure = _failure(error, permanent=permanent)
        if failure.permanent and retry_after is not None:
            raise InvalidRequest("retry_after is given for a permanent failure; a dead job does not run again")
        template = queue_pb2.Nack()
        if failure != _NO_FAILURE:
            template.failure.CopyFrom(failure_message(failure))
        if retry_after is not None:
            template.retry_after.CopyFrom(named_duration("retry_after", retry_after))

        async def send(org: str, part: Sequence[Job]) -> Sequence[int]:
            request = queue_pb2.NackRequest(org=org)
            for job in part:
                nack = request.nacks.add()
                nack.CopyFrom(template)
                nack.lease, nack.log = job.lease, _log_of(job)
            return (await self.calls.call(lambda stub: stub.Nack, request)).answers

        # The request repeats the failure, which may be 40 KiB long, for each job.
        return await self._each(jobs, send, entry_bytes=template.ByteSize())

    @overload
    async def extend(
        self, jobs: Job, *, visibility_window: Span = 30.0, progress: Progress | None = None, checkpoint: Payload = None
    ) -> Answer: ...
    @overload
    async def extend(
        self,
        jobs: Iterable[Job],
        *,
        visibility_window: Span = 30.0,
        progress: Progress | None = None,
        checkpoint: Payload = None,
    ) -> list[Answer]: ...
    @overload
    async def extend(
        self,
        jobs: Job | Iterable[Job],
        *,
        visibility_window: Span = 30.0,
        progress: Progress | None = None,
        checkpoint: Payload = None,
    ) -> Answer | list[Answer]: ...
    async def extend(
        self,
        jobs: Job | Iterable[Job],
        *,
        visibility_window: Span = 30.0,
        progress: Progress | None = None,
        checkpoint: Payload = None,
    ) -> Answer | list[Answer]:
        """Extends leases: each lease then lasts for at least `visibility_window` from now. Never shortens a lease. Also
        stores `progress` and `checkpoint` for the jobs, as Job.report does."""
        window = named_duration("visibility_window", visibility_window)
        try:
            report = report_of(progress, checkpoint)
        except (TypeError, ValueError) as error:
            raise InvalidRequest(str(error)) from error

        async def send(org: str, part: Sequence[Job]) -> Sequence[int]:
            request = queue_pb2.ExtendRequest(org=org, visibility_window=window)
            for job in part:
                report.write(request.extends.add(lease=job.lease, log=_log_of(job)))
            return (await self.calls.call(lambda stub: stub.Extend, request)).answers

        return await self._each(jobs, send, entry_bytes=len(report.checkpoint or b"") + NOTE_BYTES_MAX)

    @overload
    async def release(self, jobs: Job) -> Answer: ...
    @overload
    async def release(self, jobs: Iterable[Job]) -> list[Answer]: ...
    @overload
    async def release(self, jobs: Job | Iterable[Job]) -> Answer | list[Answer]: ...
    async def release(self, jobs: Job | Iterable[Job]) -> Answer | list[Answer]:
        """Gives jobs back at once, without counting the attempt."""
        listed = jobs if isinstance(jobs, Job) else listed_jobs(jobs)
        if any(job.logged.count for job in ([listed] if isinstance(listed, Job) else listed)):
            # A release cannot carry a log. A snooze of 0 s has the same effect, and can carry one.
            return await self.snooze(listed, after=0.0)

        async def send(org: str, part: Sequence[Job]) -> Sequence[int]:
            request = queue_pb2.ReleaseRequest(org=org, leases=[job.lease for job in part])
            return (await self.calls.call(lambda stub: stub.Release, request)).answers

        return await self._each(listed, send)

    @overload
    async def snooze(self, jobs: Job, *, after: Span, reason: str = "") -> Answer: ...
    @overload
    async def snooze(self, jobs: Iterable[Job], *, after: Span, reason: str = "") -> list[Answer]: ...
    @overload
    async def snooze(self, jobs: Job | Iterable[Job], *, after: Span, reason: str = "") -> Answer | list[Answer]: ...
    async def snooze(self, jobs: Job | Iterable[Job], *, after: Span, reason: str = "") -> Answer | list[Answer]:
        """Gives jobs back for a while, without counting the attempt. `after` (s, or timedelta): the time after which
        the jobs may run again.

        The first 1 KiB of `reason` is stored in the attempt history."""
        delay, why = named_duration("after", after), clipped(reason, REASON_BYTES_MAX)

        async def send(org: str, part: Sequence[Job]) -> Sequence[int]:
            request = queue_pb2.SnoozeRequest(
                org=org,
                snoozes=[queue_pb2.Snooze(lease=job.lease, after=delay, reason=why, log=_log_of(job)) for job in part],
            )
            return (await self.calls.call(lambda stub: stub.Snooze, request)).answers

        return await self._each(jobs, send, entry_bytes=len(why))

    async def _each(
        self,
        jobs: Job | Iterable[Job],
        send: Callable[[str, Sequence[Job]], Awaitable[Sequence[int]]],
        *,
        entry_bytes: int = 0,
    ) -> Answer | list[Answer]:
        """Sends one job, or many jobs in parts. `send` gets an org and jobs of that org. `entry_bytes`: how many bytes
        a request has for each job, besides the job's lease and log."""
        if isinstance(jobs, Job):
            (answer,) = answers(await send(jobs.org or self.org, [jobs]))
            return answer
        count_max = min(JOBS_MAX, _PART_BYTES_MAX // (entry_bytes + LOG_BYTES_MAX))
        listed = listed_jobs(jobs)
        # A worker of all orgs has jobs of many orgs, and not only of this client's org.
        places: dict[str, list[int]] = {}
        for at, job in enumerate(listed):
            places.setdefault(job.org or self.org, []).append(at)
        results = [Answer.UNKNOWN] * len(listed)
        for org, ats in places.items():
            answered = await in_parts([listed[at] for at in ats], partial(send, org), count_max=count_max)
            for at, answer in zip(ats, answered, strict=True):
                results[at] = answer
        return results


async def send_acks(calls: Calls, org: str, acks: Sequence[queue_pb2.Ack], timeout_s: float) -> list[Answer]:
    request = queue_pb2.AckRequest(org=org, acks=acks)
    return answers((await calls.call(lambda stub: stub.Ack, request, timeout_s=timeout_s)).answers)


def _log_of(job: Job) -> str:
    return job.logged.read()[0] if job.logged.count else ""


def _failure(error: str | BaseException | Failure, *, permanent: bool) -> Failure:
    match error:
        case Failure():
            return replace(error, permanent=error.permanent or permanent)
        case BaseException():
            return failure_of(error, stack=stack_of(error, error.__traceback__), permanent=permanent)
        case _:
            return Failure(message=error, permanent=permanent)
