"""Consume streams for tests: what has arrived, how a stream ended, and functions that wait for messages or for the
end."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import grpc
import psycopg
from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2, status_pb2

from tests.jobs import job_id, job_message
from tests.routers import PATIENCE_S
from windrow.v1 import admin_pb2, admin_pb2_grpc, cluster_pb2, cluster_pb2_grpc, job_pb2, queue_pb2, queue_pb2_grpc

QUEUE = "mail"
OK, STALE, NOT_FOUND = job_pb2.JOB_ANSWER_OK, job_pb2.JOB_ANSWER_STALE, job_pb2.JOB_ANSWER_NOT_FOUND
CANCELLED = job_pb2.JOB_ANSWER_CANCELLED
_numbers = itertools.count(1)


def window(seconds: float) -> Duration:
    return Duration(seconds=int(seconds), nanos=round(seconds % 1 * 1e9))


def new_job(**fields: object) -> job_pb2.NewJob:
    whole: dict[str, object] = {"id": job_id(), "queue": QUEUE, "kind": "greet", **fields}
    return job_message(**whole)


def start(
    org: str | None, *queues: str, window_s: float = 60, worker: str = "", kinds: Sequence[str] = ()
) -> queue_pb2.ConsumeStart:
    """Returns the start of a stream. `org` None: a stream for all orgs."""
    begun = queue_pb2.ConsumeStart(
        queues=queues or [QUEUE], visibility_window=window(window_s), worker=worker, kinds=kinds
    )
    if org is None:
        begun.all_orgs = True
    else:
        begun.org = org
    return begun


def acks(jobs: Iterable[job_pb2.LeasedJob]) -> list[queue_pb2.Ack]:
    return [queue_pb2.Ack(lease=job.lease) for job in jobs]


def extends(*leases: bytes) -> list[queue_pb2.Extend]:
    return [queue_pb2.Extend(lease=lease) for lease in leases]


def answers_of(settled: queue_pb2.Settled, leases: Sequence[bytes]) -> list[job_pb2.JobAnswer.ValueType]:
    """Returns what the answer to a message says about each lease in the message."""
    not_ok = {one.lease: one.answer for one in settled.not_ok}
    assert not_ok.keys() <= set(leases)
    return [not_ok.get(lease, OK) for lease in leases]


def refused_fields(error: grpc.aio.AioRpcError) -> list[str]:
    """Returns the fields that the error's BadRequest names."""
    bad = detail(error, error_details_pb2.BadRequest())
    return [] if bad is None else [violation.field for violation in bad.field_violations]


def retry_after_s(error: grpc.aio.AioRpcError) -> float | None:
    """Returns the delay in the error's RetryInfo; None: it has none."""
    info = detail(error, error_details_pb2.RetryInfo())
    return None if info is None else info.retry_delay.ToNanoseconds() / 1e9


def detail(error: grpc.aio.AioRpcError, into: Any) -> Any:
    metadata = cast("Sequence[tuple[str, str | bytes]]", error.trailing_metadata() or ())
    for key, value in metadata:
        if key == "grpc-status-details-bin":
            assert isinstance(value, bytes)
            for packed in status_pb2.Status.FromString(value).details:
                if packed.Unpack(into):
                    return into
    return None


class Stream:
    """One Consume stream, which a separate task reads. With `reads=False`, no task reads the stream."""

    def __init__(self, queue: queue_pb2_grpc.QueueAsyncStub, *, reads: bool = True) -> None:
        self._call: Any = queue.Consume()
        self._changed = asyncio.Condition()
        self.messages: list[queue_pb2.ConsumeResponse] = []
        self.jobs: list[job_pb2.LeasedJob] = []
        self.settled: dict[int, queue_pb2.Settled] = {}
        # The newest answer for each lease that ended without this consumer.
        self.revoked: dict[bytes, job_pb2.JobAnswer.ValueType] = {}
        self.draining = False
        self.error: grpc.aio.AioRpcError | None = None
        self.ended = False
        self._reader: asyncio.Task[None] | None = None
        if reads:
            self.read()

    def read(self) -> None:
        """Begins to read."""
        self._reader = asyncio.create_task(self._read())

    async def _read(self) -> None:
        try:
            async for message in self._call:
                self.messages.append(message)
                self.jobs += message.jobs
                self.settled.update((settled.request_id, settled) for settled in message.settled)
                self.revoked.update((one.lease, one.answer) for one in message.revoked)
                self.draining |= message.draining
                await self._tell()
        except grpc.aio.AioRpcError as error:
            self.error = error
        finally:
            self.ended = True
        await self._tell()

    async def _tell(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def send(self, **fields: Any) -> None:
        """Sends a message. If the stream has ended, raises the stream's error, because gRPC would report the write as
        an internal error."""
        try:
            await self._call.write(queue_pb2.ConsumeRequest(**fields))
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            if self._reader is None:
                raise
            await self.end()
            if self.error is None:
                raise
            raise self.error from None

    async def until(self, holds: Callable[[], object], what: str, *, within_s: float = PATIENCE_S) -> None:
        """Waits for a condition on what has arrived. Raises AssertionError if the stream ends and the condition does
        not hold."""
        try:
            async with asyncio.timeout(within_s), self._changed:
                await self._changed.wait_for(lambda: holds() or self.ended)
        except TimeoutError:
            raise AssertionError(f"not within {within_s:g} s: {what}; {len(self.jobs)} job(s) came") from None
        assert holds(), f"the stream ended without: {what}: {self.error}"

    async def until_jobs(self, count: int, *, within_s: float = PATIENCE_S) -> list[job_pb2.LeasedJob]:
        """Waits for this many jobs. Returns all that have arrived."""
        await self.until(lambda: len(self.jobs) >= count, f"{count} job(s)", within_s=within_s)
        return self.jobs

    async def news(self, after: int, *, within_s: float) -> list[queue_pb2.ConsumeResponse]:
        """Waits until there are more than `after` messages. Returns the messages after the first `after` ones. Returns
        an empty list if the stream has ended or the time is over."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s), self._changed:
                await self._changed.wait_for(lambda: len(self.messages) > after or self.ended)
        return self.messages[after:]

    async def answer(self, number: int, *, within_s: float = PATIENCE_S) -> queue_pb2.Settled:
        await self.until(lambda: number in self.settled, f"an answer to message {number}", within_s=within_s)
        return self.settled[number]

    async def settle(self, number: int, **fields: Any) -> list[job_pb2.JobAnswer.ValueType]:
        """Sends a message with these acks, nacks, extends, releases and snoozes. Returns the answer for each entry, in
        this order, or an empty list if all answers are OK."""
        await self.send(request_id=number, **fields)
        settled = await self.answer(number)
        assert not settled.HasField("error"), settled
        if not settled.not_ok:
            return []
        entries = [
            entry for name in ("acks", "nacks", "extends", "releases", "snoozes") for entry in fields.get(name, ())
        ]
        return answers_of(settled, [entry if isinstance(entry, bytes) else entry.lease for entry in entries])

    async def half_close(self) -> None:
        """Closes the client's side, and waits until the router closes the router's side."""
        await self._call.done_writing()
        await self.end()

    async def end(self, *, within_s: float = PATIENCE_S) -> grpc.StatusCode:
        """Waits until the stream has ended; returns its status."""
        assert self._reader is not None
        async with asyncio.timeout(within_s):
            await asyncio.wait({self._reader})
        return cast("grpc.StatusCode", await self._call.code())

    async def refusal(self, *, within_s: float = PATIENCE_S) -> grpc.aio.AioRpcError:
        """Waits until the router has ended the stream with an error; returns the error."""
        await self.end(within_s=within_s)
        assert self.error is not None, "it ended in order"
        return self.error

    async def cancel(self) -> None:
        self._call.cancel()
        if self._reader is not None:
            await asyncio.wait({self._reader})


@dataclass(frozen=True, slots=True, kw_only=True)
class Client:
    """The services of one router, over a channel of its own."""

    channel: grpc.aio.Channel
    queue: queue_pb2_grpc.QueueAsyncStub
    admin: admin_pb2_grpc.AdminAsyncStub
    cluster: cluster_pb2_grpc.ClusterAsyncStub

    async def enqueue(self, org: str, *jobs: job_pb2.NewJob) -> list[str]:
        """Stores jobs (one if none is given). Returns their ids."""
        request = queue_pb2.EnqueueRequest(org=org, jobs=jobs or [new_job()])
        return [result.id for result in (await self.queue.Enqueue(request, timeout=PATIENCE_S)).results]

    async def dequeue(
        self, org: str, *queues: str, max_jobs: int = 1000, wait_s: float = 0, window_s: float = 60
    ) -> list[job_pb2.LeasedJob]:
        request = queue_pb2.DequeueRequest(
            org=org,
            queues=queues or [QUEUE],
            max_jobs=max_jobs,
            visibility_window=window(window_s),
            wait=window(wait_s) if wait_s else None,
        )
        return list((await self.queue.Dequeue(request, timeout=PATIENCE_S)).jobs)

    async def job(self, org: str, one: str) -> job_pb2.Job:
        (job,) = await self.get(org, one)
        return job

    async def get(self, org: str, *ids: str) -> list[job_pb2.Job]:
        answer = await self.queue.GetJobs(queue_pb2.GetJobsRequest(org=org, ids=ids), timeout=PATIENCE_S)
        assert [*answer.not_found_ids, *answer.omitted_ids] == []
        return list(answer.jobs)

    async def make_queue(self, org: str, *queues: str) -> str:
        """Creates a queue. Returns the shard that it is on."""
        shard = ""
        for queue in queues or (QUEUE,):
            made = await self.admin.CreateQueue(admin_pb2.CreateQueueRequest(org=org, queue=queue), timeout=PATIENCE_S)
            shard = made.queue.shard
        return shard

    async def org_on(self, shard: str) -> str:
        """Returns a new org that lives on this shard and has the queue `mail`."""
        for _ in range(1000):
            org = f"org-s{next(_numbers)}"
            if await self.make_queue(org) == shard:
                return org
        raise AssertionError(f"no org in a thousand lives on shard {shard!r}")

    async def balanced(self, shards: Iterable[str]) -> dict[str, cluster_pb2.OrgBooks]:
        """Returns the books of every org; asserts that they balance (I5)."""
        books: dict[str, cluster_pb2.OrgBooks] = {}
        for shard in shards:
            async for answer in self.cluster.CheckShard(cluster_pb2.CheckShardRequest(shard=shard), timeout=PATIENCE_S):
                books.update((one.org, one) for one in answer.orgs)
        assert [one for one in books.values() if not one.balanced] == []
        return books

    @contextlib.asynccontextmanager
    async def stream(
        self,
        org: str | None,
        *queues: str,
        credit: int = 0,
        window_s: float = 60,
        worker: str = "",
        reads: bool = True,
    ) -> AsyncGenerator[Stream, None]:
        """Starts a stream, which is cancelled if it has not ended by the end of the block."""
        stream = Stream(self.queue, reads=reads)
        try:
            await stream.send(start=start(org, *queues, window_s=window_s, worker=worker), credit=credit)
            yield stream
        finally:
            await stream.cancel()


@contextlib.asynccontextmanager
async def client(address: str, *more: tuple[str, object]) -> AsyncGenerator[Client, None]:
    """Opens a client that reconnects at once (by default it waits a second) and never retries by itself. `more`:
    options of gRPC."""
    options: list[tuple[str, object]] = [
        *more,
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.enable_retries", 0),
        ("grpc.initial_reconnect_backoff_ms", 10),
        ("grpc.min_reconnect_backoff_ms", 1000),
        ("grpc.max_reconnect_backoff_ms", 50),
    ]
    async with grpc.aio.insecure_channel(address, options=options) as channel:
        yield Client(
            channel=channel,
            queue=queue_pb2_grpc.QueueStub(channel),
            admin=admin_pb2_grpc.AdminStub(channel),
            cluster=cluster_pb2_grpc.ClusterStub(channel),
        )


async def until(holds: Callable[[], Any], what: str, *, within_s: float = PATIENCE_S, every_s: float = 0.02) -> None:
    """Waits until the condition, a function or a coroutine function, returns a true value. Calls it again and again."""
    try:
        async with asyncio.timeout(within_s):
            while True:
                held = holds()
                if await held if asyncio.iscoroutine(held) else held:
                    return
                await asyncio.sleep(every_s)
    except TimeoutError:
        raise AssertionError(f"not within {within_s:g} s: {what}") from None


def sql(dsns: Mapping[str, str], shard: str, statement: str, *parameters: object) -> list[tuple[Any, ...]]:
    with psycopg.connect(dsns[shard], autocommit=True) as connection:
        cursor = connection.execute(statement.encode(), parameters)
        return cursor.fetchall() if cursor.description else []
