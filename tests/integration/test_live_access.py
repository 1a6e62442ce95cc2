"""The key of a stream or of a waiting call is revoked or expires. Keys are changed under load. The catalog is away."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import grpc
import pytest
from google.rpc.error_details_pb2 import ErrorInfo

import windrow
from shard.admin import api_keys
from shard.postgres.pool import Database
from shard.vocabulary import CATALOG, OrgId
from tests.access import IN_ORG, bearer
from tests.effort import trials
from tests.postgres import Server
from tests.routers import PATIENCE_S, Routers, running_routers, write_cluster
from tests.streams import QUEUE, Stream, client, detail, new_job, start, until, window
from windrow.v1 import job_pb2, queue_pb2, queue_pb2_grpc

ORG = OrgId("acme")
# With this number of connections, each process gets a connection, except in about one of a million runs.
STREAMS = 20
UNAUTHENTICATED, UNAVAILABLE = grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.UNAVAILABLE


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    routers: Routers
    catalog_name: str
    catalog_dsn: str

    @contextlib.asynccontextmanager
    async def catalog(self) -> AsyncGenerator[Database, None]:
        database = Database(CATALOG, self.catalog_dsn, connections=1)
        await database.open()
        yield database
        await database.close()

    async def new_key(self, *, expires_in_s: int | None = None) -> str:
        async with self.catalog() as database:
            _, text = await api_keys.create(database, org=ORG, scopes=IN_ORG, name="", expires_in_s=expires_in_s)
        return text

    async def revoke(self, key: str) -> None:
        parsed = api_keys.parse(key)
        assert parsed is not None
        async with self.catalog() as database:
            await api_keys.revoke(database, parsed.id)


@contextlib.contextmanager
def cluster_with(
    postgres: Server, folder: Path, name: str, auth: str = "", *, processes: int = 2
) -> Generator[Cluster, None, None]:
    catalog = f"{name}_catalog"
    config = write_cluster(
        folder / "cluster.toml", {"s1": postgres.create(f"{name}_s1")}, catalog_dsn=postgres.create(catalog)
    )
    config.write_text(f"{config.read_text()}\n[auth]\n{auth}\n")
    with running_routers(config, processes=processes) as routers:
        yield Cluster(routers=routers, catalog_name=catalog, catalog_dsn=postgres.dsn(catalog))


@pytest.fixture(scope="module")
def cluster(postgres: Server, tmp_path_factory: pytest.TempPathFactory) -> Generator[Cluster, None, None]:
    with cluster_with(postgres, tmp_path_factory.mktemp("live"), "live") as running:
        yield running


class WithToken:
    """Calls the Queue service with a token in each call."""

    def __init__(self, queue: queue_pb2_grpc.QueueAsyncStub, token: str, name: str) -> None:
        self._queue = queue
        self._name = name
        self._metadata = bearer(token)

    def Consume(self) -> object:  # noqa: N802
        return self._queue.Consume(metadata=self._metadata)

    async def enqueue(self, *payloads: bytes) -> list[str]:
        request = queue_pb2.EnqueueRequest(
            org=ORG, jobs=[new_job(queue=self._name, payload=payload) for payload in payloads]
        )
        answer = await self._queue.Enqueue(request, timeout=PATIENCE_S, metadata=self._metadata)
        return [result.id for result in answer.results]

    async def dequeue(self, *, wait_s: float = 0) -> list[str]:
        request = queue_pb2.DequeueRequest(
            org=ORG, queues=[self._name], max_jobs=1000, visibility_window=window(3600), wait=window(wait_s)
        )
        answer = await self._queue.Dequeue(request, timeout=2 * PATIENCE_S, metadata=self._metadata)
        assert all(job.attempt == 1 for job in answer.jobs)
        return [job.id for job in answer.jobs]

    async def until_ended(self, job: str) -> None:
        request = queue_pb2.WaitJobRequest(org=ORG, id=job, wait=window(60))
        await self._queue.WaitJob(request, timeout=2 * PATIENCE_S, metadata=self._metadata)

    async def are_leased(self, count: int, jobs: Sequence[str]) -> bool:
        """Returns whether at least this many of the jobs are leased."""
        request = queue_pb2.GetJobsRequest(org=ORG, ids=jobs)
        answer = await self._queue.GetJobs(request, timeout=PATIENCE_S, metadata=self._metadata)
        return [job.state for job in answer.jobs].count(job_pb2.JOB_STATE_LEASED) >= count


@contextlib.asynccontextmanager
async def calls(
    cluster: Cluster, token: str, name: str = QUEUE, *options: tuple[str, object]
) -> AsyncGenerator[WithToken, None]:
    async with client(cluster.routers.address, *options) as connected:
        yield WithToken(connected.queue, token, name)


@contextlib.asynccontextmanager
async def stream(
    cluster: Cluster, token: str, name: str = QUEUE, *, reads: bool = True
) -> AsyncGenerator[Stream, None]:
    """Opens a stream over its own connection. If the stream is not read, the connection's flow-control windows stay
    small. Otherwise gRPC may enlarge the windows until they hold all the jobs."""
    async with calls(cluster, token, name, *(() if reads else (("grpc.http2.bdp_probe", 0),))) as queue:
        opened = Stream(queue, reads=reads)  # type: ignore[arg-type]
        await opened.send(start=start(ORG, name, window_s=3600), credit=1000)
        # The headers say that the router serves the stream.
        await opened._call.initial_metadata()
        yield opened
        await opened.cancel()


def reason_of(error: grpc.aio.AioRpcError) -> str:
    info = detail(error, ErrorInfo())
    return "" if info is None else info.reason


async def test_a_revoked_key_ends_its_streams_on_every_router_process_and_no_others(cluster: Cluster) -> None:
    revoked, other = await cluster.new_key(), await cluster.new_key()
    async with contextlib.AsyncExitStack() as stack:
        streams = [await stack.enter_async_context(stream(cluster, revoked)) for _ in range(STREAMS)]
        of_other = await stack.enter_async_context(stream(cluster, other))
        await cluster.revoke(revoked)
        for one in streams:
            error = await one.refusal()
            assert (error.code(), reason_of(error)) == (UNAUTHENTICATED, "CREDENTIALS_REVOKED")
        async with calls(cluster, other) as queue:
            (job,) = await queue.enqueue(b"")
        assert [one.id for one in await of_other.until_jobs(1)] == [job]


async def test_jobs_that_a_revoked_stream_was_not_sent_are_released_at_once(cluster: Cluster) -> None:
    revoked, other = await cluster.new_key(), await cluster.new_key()
    async with calls(cluster, other, "unsent") as queue:
        stored = await queue.enqueue(*[bytes(100_000)] * 100)
        async with stream(cluster, revoked, "unsent", reads=False) as unread:
            # The client's flow-control windows have no room for all of these jobs.
            await until(lambda: queue.are_leased(60, stored), "the router took jobs that it cannot send")
            await cluster.revoke(revoked)
            taken = set[str]()

            async def take() -> bool:
                taken.update(await queue.dequeue())
                return len(taken) >= 40

            # Unless the router releases the unsent jobs, they stay leased for an hour.
            await until(take, "other consumers get what was not sent")
            unread.read()
            assert await unread.end() is UNAUTHENTICATED


async def test_waiting_calls_of_a_revoked_key_end(cluster: Cluster) -> None:
    key = await cluster.new_key()
    async with calls(cluster, key, "waiting") as queue:
        # After these calls, the process that serves this connection knows the key.
        (job,) = await queue.enqueue(b"")
        assert await queue.dequeue() == [job]
        waiting = [asyncio.create_task(queue.dequeue(wait_s=60)), asyncio.create_task(queue.until_ended(job))]
        await asyncio.sleep(0)
        # Calls of one connection begin in the order in which they were sent. So the waiting calls have begun when this
        # call is answered.
        assert await queue.are_leased(1, [job])
        await cluster.revoke(key)
        for call in waiting:
            with pytest.raises(grpc.aio.AioRpcError) as ended:
                await call
            assert (ended.value.code(), reason_of(ended.value)) == (UNAUTHENTICATED, "CREDENTIALS_REVOKED")


async def test_a_stream_ends_when_its_key_expires(cluster: Cluster) -> None:
    async with stream(cluster, await cluster.new_key(expires_in_s=2)) as expiring:
        error = await expiring.refusal()
        assert (error.code(), reason_of(error)) == (UNAUTHENTICATED, "CREDENTIALS_EXPIRED")


@pytest.mark.thorough
async def test_keys_are_replaced_under_load_without_a_failed_call(cluster: Cluster) -> None:
    current = await cluster.new_key()
    stop = asyncio.Event()
    # `keys`: the key that each producer has now. `done`: how many jobs each producer has stored.
    keys, done = [""] * 4, [0] * 4

    async def produce(at: int) -> None:
        def token() -> str:
            keys[at] = current
            return current

        async with windrow.Client(cluster.routers.address, org=ORG, token=token) as producer:
            while not stop.is_set():
                await producer.enqueue("rotation", "greet")
                done[at] += 1

    async with asyncio.TaskGroup() as group:
        producers = [group.create_task(produce(at)) for at in range(len(done))]

        def all_use_it() -> bool:
            return set(keys) == {current}

        def all_went_on(since: list[int]) -> bool:
            return all(now > before for now, before in zip(done, since, strict=True))

        async def until_or_failed(holds: Callable[[], bool]) -> None:
            await until(lambda: holds() or any(task.done() for task in producers), "every producer goes on")

        for _ in range(trials(8, thorough=200)):
            # Wait for the producers, so that at most one key is revoked during one call of a producer.
            await until_or_failed(all_use_it)
            await until_or_failed(partial(all_went_on, list(done)))
            before, current = current, await cluster.new_key()
            await cluster.revoke(before)
        stop.set()


async def test_a_worker_goes_on_with_the_next_token_when_its_key_is_revoked(cluster: Cluster) -> None:
    current = await cluster.new_key()
    handled = asyncio.Queue[bytes]()
    async with windrow.Client(cluster.routers.address, org=ORG, token=lambda: current) as connected:
        worker = windrow.Worker(connected, "rotating")

        @worker.handler("greet")
        async def greet(job: windrow.Job) -> None:
            await handled.put(job.payload)

        running = asyncio.create_task(worker.run())
        try:
            await connected.enqueue("rotating", "greet", b"first")
            async with asyncio.timeout(PATIENCE_S):
                assert await handled.get() == b"first"
                before, current = current, await cluster.new_key()
                await cluster.revoke(before)
                await connected.enqueue("rotating", "greet", b"second")
                assert await handled.get() == b"second"
        finally:
            worker.stop()
            await running


async def test_a_worker_whose_key_was_revoked_ends_with_the_reason(cluster: Cluster) -> None:
    key = await cluster.new_key()
    async with windrow.Client(cluster.routers.address, org=ORG, token=key) as connected:
        worker = windrow.Worker(connected, "revoked")

        @worker.handler("greet")
        async def greet(_: windrow.Job) -> None:
            pass

        running = asyncio.create_task(worker.run())
        job = await connected.enqueue("revoked", "greet")
        await connected.wait(job.id, timeout=PATIENCE_S)
        await cluster.revoke(key)
        async with asyncio.timeout(PATIENCE_S):
            with pytest.raises(windrow.Unauthenticated) as ended:
                await running
        assert ended.value.reason == "CREDENTIALS_REVOKED"
        assert key not in repr(ended.value)


async def test_while_the_catalog_is_away_known_keys_work_for_a_stated_time_and_unknown_ones_are_unavailable(
    postgres: Server, tmp_path: Path
) -> None:
    with cluster_with(postgres, tmp_path, "away", "api_keys_trusted_seconds = 20", processes=1) as cluster:
        known, unknown = await cluster.new_key(), await cluster.new_key()
        async with stream(cluster, known) as lasting, calls(cluster, unknown) as strange:
            with postgres.away(cluster.catalog_name):
                async with calls(cluster, known) as queue:
                    await queue.enqueue(b"")
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await strange.enqueue(b"")
                assert refused.value.code() is UNAVAILABLE
                error = await lasting.refusal()
                assert (error.code(), reason_of(error)) == (UNAVAILABLE, "SHARD_UNAVAILABLE")
                async with calls(cluster, known) as queue:
                    with pytest.raises(grpc.aio.AioRpcError) as refused:
                        await queue.enqueue(b"")
                assert refused.value.code() is UNAVAILABLE

            async def works() -> bool:
                with contextlib.suppress(grpc.aio.AioRpcError):
                    return bool(await strange.enqueue(b""))
                return False

            await until(works, "the catalog is back")
