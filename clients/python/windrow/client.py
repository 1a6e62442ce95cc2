"""The asyncio client, and its methods that enqueue jobs, lease them, look them up and wait for them. The client's other
methods are in lease_calls.py (to settle and extend leases), job_changes.py (changes of stored jobs), admin.py (the
admin service), schedules.py and workflow_calls.py. calls.py has retries and connections.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import ClassVar, Self, Unpack

from opentelemetry import trace

from windrow.batches import Batch, Together, calls_of, progress
from windrow.calls import TRY_S, Calls, error_of
from windrow.channels import MESSAGE_BYTES_MAX
from windrow.coalescer import Coalescer, Coalescers
from windrow.errors import (
    DeadlineExceeded,
    InvalidJob,
    InvalidRequest,
    NotFound,
    ResourceExhausted,
    RouterError,
    Span,
    Unavailable,
    Violation,
    WindrowError,
    alone,
    ids_in_error,
    invalid_argument,
    shifted,
)
from windrow.job_changes import JobChanges
from windrow.job_rules import JOBS_MAX, PAYLOAD_BYTES_MAX
from windrow.jobs import (
    ENDED,
    Answer,
    Enqueued,
    Job,
    JobRecord,
    listed_ids,
    newly_stored,
    read_leased,
    read_record,
    state_of,
)
from windrow.lease_calls import LeaseCalls, send_acks
from windrow.limits import LIMIT_REACHED
from windrow.new_jobs import JobOptions, NewJob, enqueue_request, new_message
from windrow.payloads import Payload, checked_functions, checked_text, duration, named_duration, named_seconds
from windrow.schedules import ScheduleCalls
from windrow.server_info import ServerInfo, read_server_info
from windrow.tls import Tls
from windrow.tokens import Token, tokens_of
from windrow.tracing import Tracing
from windrow.v1 import job_pb2, queue_pb2, server_pb2
from windrow.workflow_calls import WorkflowCalls

ADDRESS_DEFAULT = "127.0.0.1:7419"
ADDRESS_VARIABLE = "WINDROW_ADDRESS"
WAIT_S_MAX = 60.0
# dequeue() and wait() make no further call if less than this remains of their waiting time.
_WORTH_WAITING_S = 0.1
# A large request delays the other requests on its connection. So the client splits an independent request that has more
# bytes than this, although a router would accept 16 MiB.
_SPLIT_BYTES = 8 * 1024 * 1024
_SPLIT_CALLS_MAX = 4
# How many shared calls may run at the same time per connection.
_SHARED_CALLS = 2

# An EnqueueResult that has only an id adds its id and this many bytes to a response: two tags and two lengths. Each
# length takes one byte, because ids have less than 124 bytes.
_RESULT_BYTES = 4

CallNext = Callable[[Sequence[NewJob]], Awaitable[list[Enqueued]]]
Middleware = Callable[[Sequence[NewJob], CallNext], Awaitable[list[Enqueued]]]


class Client(LeaseCalls, JobChanges, ScheduleCalls, WorkflowCalls):
    """The queues and jobs of one org. Make one client for each event loop and share it: calls run concurrently.

    - `address`: HOST:PORT, or grpcs://HOST:PORT for TLS; default $WINDROW_ADDRESS, or 127.0.0.1:7419 if that is not
      set.
    - `timeout` (s, or timedelta; default 30 s): the time for a whole call with all its tries.
    - `try_timeout` (s, or timedelta; default 10 s): the time for one try.
    - `channels` (1 to 64; default 1): the number of connections. The client uses them in turn. Several router processes
      share one port, and a connection reaches one of them.
    - `tls` (True, the path of a CA's PEM file, or a Tls; default: as the environment says): see tls.py.
    - `token` (default $WINDROW_TOKEN): proves who calls, if the cluster asks for a proof. Pass an API key, or a
      function that returns a token. The function may be async; otherwise it runs in a thread. If a router refuses a
      token, the client calls the function again. If the function returns another token, the client repeats the call
      with that token. Without TLS, the client sends a token to this machine only, unless `tls` is False.
    - `create_spans`, `tracer_provider`: see tracing.py.
    - `middleware`: functions `async def middleware(jobs, call_next)` that run around every enqueue and enqueue_many,
      for example to add attributes to every job. The first function is the outermost. `await call_next(jobs)` stores
      the jobs and returns an Enqueued for each. enqueue_batch calls no middleware, because a repeated batch must have
      the same jobs. The relay of an outbox calls none either: it sends the jobs as they were added.

    Every method may raise a WindrowError (see errors.py). A call that raised an error may still have taken effect. It
    is safe to call the method again with the same leases, job ids or NewJobs. But enqueue, trigger_schedule and
    restore_jobs make new ids in each call unless the caller gives them. So give the ids yourself, or pass the error's
    `made_ids` to the second call. Otherwise the second call may store a second job.
    """

    # testing.py sets another class.
    _calls_class: ClassVar[type[Calls]] = Calls

    def __init__(
        self,
        address: str | None = None,
        *,
        org: str,
        timeout: Span = 30.0,
        try_timeout: Span = TRY_S,
        channels: int = 1,
        tls: Tls | Path | str | bool | None = None,
        token: Token | None = None,
        create_spans: bool = True,
        tracer_provider: trace.TracerProvider | None = None,
        middleware: Sequence[Middleware] = (),
    ) -> None:
        address = address or os.environ.get(ADDRESS_VARIABLE) or ADDRESS_DEFAULT
        self.org = _checked_org(org)
        self.calls = self._calls_class(
            address,
            channels=channels,
            tls=tls,
            tokens=tokens_of(token),
            timeout_s=named_seconds("timeout", timeout),
            try_s=named_seconds("try_timeout", try_timeout),
        )
        self.tracing = Tracing(provider=tracer_provider, address=self.calls.address, create_spans=create_spans)
        self._middleware = checked_functions("middleware", middleware)
        self._owns_calls = True
        self._enqueues = Coalescers[job_pb2.NewJob, Enqueued](
            self.calls,
            lambda org, on_idle: Coalescer(
                self.calls,
                lambda jobs, left_s: _enqueue_shared(self.calls, org, jobs, left_s),
                items_max=JOBS_MAX,
                calls_max=_SHARED_CALLS * channels,
                on_idle=on_idle,
            ),
        )
        self._acks = Coalescers[queue_pb2.Ack, Answer](
            self.calls,
            lambda org, on_idle: Coalescer(
                self.calls,
                lambda acks, left_s: send_acks(self.calls, org, acks, left_s),
                items_max=JOBS_MAX,
                calls_max=_SHARED_CALLS * channels,
                on_idle=on_idle,
            ),
        )

    def for_org(self, org: str) -> Self:
        """Returns a client of another org over the same connections. The connections stay open until this client is
        closed; closing the returned client does nothing."""
        other = object.__new__(type(self))
        other.org = _checked_org(org)
        other.calls = self.calls
        other.tracing = self.tracing
        other._middleware = self._middleware
        other._enqueues = self._enqueues
        other._acks = self._acks
        other._owns_calls = False
        return other

    async def close(self) -> None:
        """Closes the connections. Calls that are under way raise ClientClosed."""
        if self._owns_calls:
            await self.calls.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def enqueue(self, queue: str, kind: str, payload: Payload = b"", **options: Unpack[JobOptions]) -> Enqueued:
        """Stores one job durably. `options` are the other fields of NewJob. Returns after the job is committed.

        Jobs that are enqueued at the same time share calls of at most 1,000 jobs. No job waits for other jobs to join
        its call, and each job has its own outcome. If the caller is cancelled before the job is sent, the job is not
        stored. If the caller is cancelled later, the job may be stored.

        Raises InvalidJob. After DeadlineExceeded or Unavailable, the job may be stored. To retry without storing a
        second job, pass the error's `made_ids[0]` as `id`. Other ways: pass the same `id` (windrow.uuid7()) or
        `dedup_key` from the first call on, or make a NewJob and pass it to enqueue_many.
        """
        (stored,) = await self._through_middleware(self._store_one)([NewJob(queue, kind, payload, **options)])
        return stored

    async def _store_one(self, jobs: Sequence[NewJob]) -> list[Enqueued]:
        (job,) = jobs
        message = new_message(job)
        with self.tracing.sending((message,)), ids_in_error((message.id,)):
            return [await self._enqueues.put(self.org, message, _size(message))]

    async def enqueue_many(self, jobs: Iterable[NewJob], *, independent: bool = False) -> list[Enqueued]:
        """Stores at most 1,000 jobs, with at most 16 MiB in total: all jobs or none. Returns an Enqueued for each job,
        in the order of the jobs.

        `independent`: each job is stored or refused by itself; the Enqueued of a job that was not stored has an
        `error`. The number of jobs is then unlimited: the client sends them in several calls, and makes a few of these
        calls at the same time. Raises an error only if all calls fail.
        """

        async def store(jobs: Sequence[NewJob]) -> list[Enqueued]:
            return await self.send(enqueue_request(self.org, jobs, independent=independent))

        if isinstance(jobs, NewJob):
            raise invalid_argument("jobs", "must be a list of jobs, not one job; `enqueue` stores one")
        listed = list(jobs)
        if not listed:
            return []
        if len(listed) > JOBS_MAX and not independent:
            raise InvalidRequest(
                f"{len(listed):,} jobs: at most {JOBS_MAX:,} can be stored together, all or none; "
                "independent=True stores them in several calls"
            )
        return await self._through_middleware(store)(listed)

    def _through_middleware(self, store: CallNext) -> CallNext:
        for middleware in reversed(self._middleware):
            store = _around(middleware, store)
        return store

    async def enqueue_batch(
        self, jobs: Iterable[NewJob], *, batch: str, on_progress: Callable[[Batch], object] | None = None
    ) -> Batch:
        """Stores any number of jobs, such as a million from a generator, a few calls at a time. Calls `on_progress`
        after each 1,000 jobs or less.

        `batch` is a windrow.uuid7() that the caller keeps. Job n is stored with the id windrow.nth_id(batch, n), even
        if it has an id of its own. If a call is larger than a limit allows, the client sends the call's jobs in smaller
        calls. After an error, or if the program died, call enqueue_batch again with the same batch and jobs within 7
        days: jobs that are stored already are not stored again. Raises InvalidJob for the first job that breaks a rule;
        other jobs of the batch may be stored by then. Raises InvalidRequest if the batch was used for other jobs.
        Middleware is not called."""
        done = Batch()
        for calls in calls_of(self.org, jobs, batch):
            outcomes = await self.send_together(calls)
            for step in progress(done, calls, outcomes):
                done = step
                if on_progress is not None:
                    on_progress(done)
        return done

    async def send_together(self, calls: Together) -> list[list[Enqueued] | BaseException]:
        """Stores the jobs of a few calls of a batch. Returns the outcome of each call. If a call is larger than a limit
        allows, sends the call's jobs in parts, one after another."""
        requests = [request for _, request in calls]
        outcomes = await asyncio.gather(*map(self.send, requests), return_exceptions=True)
        for at, (request, outcome) in enumerate(zip(requests, outcomes, strict=True)):
            if isinstance(outcome, ResourceExhausted) and (size := _part_of(request, outcome)):
                try:
                    outcomes[at] = await self._send_in_turn(request, size)
                except WindrowError as error:
                    outcomes[at] = error
        return outcomes

    async def _send_in_turn(self, request: queue_pb2.EnqueueRequest, size: int) -> list[Enqueued]:
        stored: list[Enqueued] = []
        while (first := len(stored)) < len(request.jobs):
            part = queue_pb2.EnqueueRequest(org=request.org, jobs=request.jobs[first : first + size])
            try:
                stored += await self.send(part)
            except InvalidRequest as error:
                raise type(error)(str(error), shifted(error.violations, first)) from error
            except ResourceExhausted as error:
                if not (smaller := _part_of(part, error)):
                    raise
                size = smaller
        return stored

    async def send(self, request: queue_pb2.EnqueueRequest, *, timeout: Span | None = None) -> list[Enqueued]:
        """Stores the jobs of a prepared request: the low-level form of enqueue_many. Splits a large independent request
        into several calls.

        `timeout` (s, or timedelta): the time for each call with all its tries, instead of the client's `timeout`.
        """
        timeout_s = None if timeout is None else named_seconds("timeout", timeout)
        with self.tracing.sending(request.jobs):
            if request.independent and (len(request.jobs) > JOBS_MAX or request.ByteSize() > _SPLIT_BYTES):
                return await self._send_parts(request, timeout_s)
            _size(request)
            response = await self.calls.call(lambda stub: stub.Enqueue, request, timeout_s=timeout_s)
            return _enqueued(request, response, first=0)

    async def _send_parts(self, request: queue_pb2.EnqueueRequest, timeout_s: float | None) -> list[Enqueued]:
        parts: list[tuple[int, queue_pb2.EnqueueRequest]] = []
        size = 0
        for at, job in enumerate(request.jobs):
            size += job.ByteSize()
            if not parts or len(parts[-1][1].jobs) == JOBS_MAX or size > _SPLIT_BYTES:
                parts.append((at, queue_pb2.EnqueueRequest(org=request.org, independent=True)))
                size = job.ByteSize()
            parts[-1][1].jobs.append(job)
        turns = asyncio.Semaphore(_SPLIT_CALLS_MAX)
        failures: list[WindrowError] = []

        async def send(first: int, part: queue_pb2.EnqueueRequest) -> list[Enqueued]:
            async with turns:
                try:
                    response = await self.calls.call(lambda stub: stub.Enqueue, part, timeout_s=timeout_s)
                except WindrowError as error:
                    failures.append(error)
                    return [Enqueued(id=job.id, error=error) for job in part.jobs]
            return _enqueued(part, response, first=first)

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(send(first, part)) for first, part in parts]
        if len(failures) == len(parts):
            raise failures[0]
        return [stored for task in tasks for stored in task.result()]

    async def dequeue(
        self,
        queues: str | Iterable[str],
        *,
        max_jobs: int = 1,
        visibility_window: Span = 30.0,
        worker: str = "",
        wait: Span = 0.0,
    ) -> list[Job]:
        """Leases up to `max_jobs` (1 to 1,000) due jobs and returns them. If no job is due, waits up to `wait` (s, or
        timedelta; at most 60 s; default 0: no wait) until the first job falls due. Returns an empty list if no job
        falls due in this time.

        The jobs stay invisible to other consumers for `visibility_window` (100 ms to 12 h; default 30 s). To know when
        this window ends, measure the time with a monotonic clock, from the moment before this call. If you pass `wait`,
        measure from the moment when this call returns. `worker` is the name to store in the attempt history.
        """
        if max_jobs < 1:
            # The router would read 0 as the default, which is 1. But a caller that passes the number of its free places
            # wants no job if it has no free place.
            raise invalid_argument("max_jobs", f"must be 1 to 1,000, not {max_jobs}")
        listed = [queues] if isinstance(queues, str) else queues
        request = queue_pb2.DequeueRequest(
            org=self.org,
            queues=[checked_text(f"queues[{at}]", queue) for at, queue in enumerate(listed)],
            max_jobs=max_jobs,
            visibility_window=named_duration("visibility_window", visibility_window),
            worker=checked_text("worker", worker),
        )
        wait_s = named_seconds("wait", wait)
        if not 0 <= wait_s <= WAIT_S_MAX:
            raise invalid_argument("wait", f"must be 0 s to {WAIT_S_MAX:g} s, not {wait_s} s")

        deadline = time.monotonic() + wait_s
        while True:
            response = await self.calls.call(
                lambda stub: stub.Dequeue, request, wait_s=wait_s, before_try=partial(_set_wait, request)
            )
            wait_s = deadline - time.monotonic()
            if response.jobs or wait_s < _WORTH_WAITING_S:
                return [read_leased(job) for job in response.jobs]
            # A router that shuts down answers early. Wait for the remaining time at another router.
            await asyncio.sleep(random.uniform(0.2, 0.5) * _WORTH_WAITING_S)

    async def get_jobs(self, ids: Iterable[str], *, include_payload: bool = False) -> dict[str, JobRecord]:
        """Looks jobs up by id. Returns a record for each job that this org has, in any state.

        Payload and result are None unless `include_payload` is true. Also raises Unavailable if a job was not found and
        one of the org's shards did not answer.
        """
        listed = listed_ids(ids)
        found: dict[str, JobRecord] = {}
        for at in range(0, len(listed), JOBS_MAX):
            remaining = listed[at : at + JOBS_MAX]
            while remaining:
                request = queue_pb2.GetJobsRequest(org=self.org, ids=remaining, include_payload=include_payload)
                response = await self.calls.call(lambda stub: stub.GetJobs, request)
                found.update((job.id, read_record(job, with_payload=include_payload)) for job in response.jobs)
                if response.unavailable_shards and not {*found, *response.omitted_ids}.issuperset(remaining):
                    shards = ", ".join(response.unavailable_shards)
                    raise Unavailable(f"some jobs were not found, and these shards of the org did not answer: {shards}")
                if len(response.omitted_ids) >= len(remaining):
                    raise RouterError(
                        f"GetJobs at {self.calls.address} had no room for even one of {len(remaining)} jobs"
                    )
                remaining = list(response.omitted_ids)
        return found

    async def find_job(self, queue: str, dedup_key: str, *, include_payload: bool = False) -> JobRecord | None:
        """Looks a job up by its dedup key. Returns the job for which the key counts now: an enqueue with this key would
        be a duplicate of that job. Returns None if there is no such job. The key may count for two jobs: as the live
        key of one job, and for the dedup window of the other. In this case, returns the job with the live key."""
        request = queue_pb2.FindJobRequest(
            org=self.org,
            queue=checked_text("queue", queue),
            dedup_key=checked_text("dedup_key", dedup_key),
            include_payload=include_payload,
        )
        response = await self.calls.call(lambda stub: stub.FindJob, request)
        return read_record(response.job, with_payload=include_payload) if response.HasField("job") else None

    async def wait(self, id: str, *, timeout: Span) -> JobRecord:  # noqa: A002
        """Waits until a job has ended, which means that it has succeeded, died or was cancelled. Returns its record,
        with payload and result.

        `timeout` (s, or timedelta): how long to wait. Raises DeadlineExceeded when this time is over. Raises NotFound
        if this org has no such job."""
        request = queue_pb2.WaitJobRequest(org=self.org, id=checked_text("id", id), include_payload=True)
        timeout_s = named_seconds("timeout", timeout)
        deadline = time.monotonic() + timeout_s
        left_s = timeout_s
        while True:
            response = await self.calls.call(
                lambda stub: stub.WaitJob,
                request,
                wait_s=max(0.0, min(left_s, WAIT_S_MAX)),
                before_try=partial(_set_wait, request),
            )
            if not response.HasField("job"):
                raise NotFound(f"org {self.org!r} has no job {id}")
            record = read_record(response.job, with_payload=True)
            if record.state in ENDED:
                return record
            left_s = deadline - time.monotonic()
            if left_s < _WORTH_WAITING_S:
                raise DeadlineExceeded(f"job {id} is still {record.state.value}: {timeout_s:g} s are over")
            # A router that shuts down answers early. Wait for the remaining time at another router.
            await asyncio.sleep(random.uniform(0.2, 0.5) * _WORTH_WAITING_S)

    async def server_info(self) -> ServerInfo:
        """Returns the version and the limits of the router that answers. The router answers this call even if no shard
        does."""
        request = server_pb2.GetServerInfoRequest()
        return read_server_info(await self.calls.call(lambda stub: stub.GetServerInfo, request))


async def _enqueue_shared(
    calls: Calls, org: str, jobs: Sequence[job_pb2.NewJob], timeout_s: float
) -> list[Enqueued | WindrowError]:
    # A call with a single job is not independent. So if the job is refused, the whole call fails, with an error that
    # names the address and the number of tries.
    request = queue_pb2.EnqueueRequest(org=org, jobs=jobs, independent=len(jobs) > 1)
    # Do not retry the call if a limit refuses it: the coalescer sends its jobs again later, and lets other jobs go
    # first.
    response = await calls.call(lambda stub: stub.Enqueue, request, timeout_s=timeout_s, final_reason=LIMIT_REACHED)
    results: list[Enqueued | WindrowError] = []
    for at, stored in enumerate(_enqueued(request, response, first=0)):
        error = stored.error
        results.append(stored if error is None else alone(error, at) if isinstance(error, InvalidRequest) else error)
    return results


def _size(message: queue_pb2.EnqueueRequest | job_pb2.NewJob) -> int:
    """Returns a message's size in bytes. Raises InvalidRequest if the message is too large for a call."""
    size = message.ByteSize()
    if size > MESSAGE_BYTES_MAX:
        for at, job in enumerate(message.jobs if isinstance(message, queue_pb2.EnqueueRequest) else (message,)):
            if len(job.template.payload) > PAYLOAD_BYTES_MAX:
                path = f"jobs[{at}].template.payload"
                fault = f"must be at most {PAYLOAD_BYTES_MAX} bytes, not {len(job.template.payload)}"
                raise InvalidJob(f"{path}: {fault}", [Violation(path, fault)])
        raise InvalidRequest(
            f"the request has {size:,} bytes; at most {MESSAGE_BYTES_MAX:,} can be stored together, all or none; "
            "independent=True stores the jobs in several calls"
        )
    return size


def _part_of(request: queue_pb2.EnqueueRequest, error: ResourceExhausted) -> int:
    """Returns how many jobs to send per call if the call was refused because it is larger than a limit. Otherwise
    returns 0."""
    if error.limit is None or error.retry_after is not None:
        return 0
    return error.limit.part_of(len(request.jobs))


def _enqueued(request: queue_pb2.EnqueueRequest, response: queue_pb2.EnqueueResponse, *, first: int) -> list[Enqueued]:
    if len(response.results) != len(request.jobs):
        raise RouterError(f"{len(request.jobs)} jobs were sent, but the router answered for {len(response.results)}")
    ids = [result.id for result in response.results]
    if "" not in ids and response.ByteSize() == sum(map(len, ids)) + len(ids) * _RESULT_BYTES:
        # An answer of this length has nothing except ids, so all jobs are newly stored.
        return newly_stored(ids)
    return [
        Enqueued(
            id=result.id,
            duplicate=result.duplicate,
            state=state_of(result.state) if result.state else None,
            differs=result.differs,
        )
        if not result.HasField("error")
        else Enqueued(id=request.jobs[at].id, error=error_of(result.error, first=first))
        for at, result in enumerate(response.results)
    ]


def _set_wait(request: queue_pb2.DequeueRequest | queue_pb2.WaitJobRequest, left_s: float) -> None:
    if left_s:
        request.wait.CopyFrom(duration(left_s))
    else:
        request.ClearField("wait")


def _checked_org(org: str) -> str:
    if not org:
        raise InvalidRequest("org is empty: every job belongs to an org")
    if not isinstance(org, str):
        raise InvalidRequest(f"org must be a str, not {org!r}")
    return checked_text("org", org)


def _around(middleware: Middleware, call_next: CallNext) -> CallNext:
    return lambda jobs: middleware(jobs, call_next)
