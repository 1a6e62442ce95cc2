"""Tests what KEDA gets from a router. There are two shards, and the tests can cut one of them off. There are two
routers, which learn of each other's work only by the doorbell. No router sweeps, so that every push comes from a
notification."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import statistics
import time
from collections.abc import AsyncGenerator, AsyncIterator, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import grpc
import pytest

from proof.certificates import Authority
from proof.proxy import Proxy, open_proxy_before, through
from router.codec.scaler import METRIC
from router.keda import externalscaler_pb2 as keda
from router.keda import externalscaler_pb2_grpc as keda_grpc
from tests.effort import trials
from tests.postgres import Server
from tests.routers import PATIENCE_S, Routers, running_routers, write_cluster
from tests.streams import QUEUE, Client, acks, client, new_job, refused_fields, window
from windrow.v1 import admin_pb2, queue_pb2

SHARDS = ("s1", "s2")
NEVER_S = 3600.0
# StreamIsActive promises a push within this time.
PUSH_S_MAX = 2.0
_numbers = itertools.count(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    near: Routers
    far: Routers


@pytest.fixture(scope="module")
def cluster(postgres: Server, tmp_path_factory: pytest.TempPathFactory) -> Generator[Cluster, None, None]:
    dsns = {shard: postgres.create(f"scaler_{shard}") for shard in SHARDS}
    config = write_cluster(tmp_path_factory.mktemp("scaler") / "cluster.toml", dsns, sweep_seconds=NEVER_S)
    with running_routers(config) as near, running_routers(config) as far:
        yield Cluster(near=near, far=far)


@pytest.fixture
async def near(cluster: Cluster) -> AsyncGenerator[Client, None]:
    async with client(cluster.near.address) as opened:
        yield opened


@pytest.fixture
async def far(cluster: Cluster) -> AsyncGenerator[Client, None]:
    async with client(cluster.far.address) as opened:
        yield opened


def org_of() -> str:
    return f"org-k{next(_numbers)}"


def asked(org: str | None, queue: str = QUEUE, **more: str) -> keda.ScaledObjectRef:
    """Returns what KEDA sends, including some keys that only KEDA itself uses. `org` None: all orgs."""
    metadata = {"scalerAddress": "windrow:7419", "queue": queue, "jobsPerWorker": "10", **more}
    metadata |= {"allOrgs": "true"} if org is None else {"org": org}
    return keda.ScaledObjectRef(name="workers", namespace="shop", scalerMetadata=metadata)


def scaler(of: Client) -> keda_grpc.ExternalScalerAsyncStub:
    return keda_grpc.ExternalScalerStub(of.channel)


async def is_active(of: Client, org: str | None, queue: str = QUEUE) -> bool:
    return (await scaler(of).IsActive(asked(org, queue), timeout=PATIENCE_S)).result


async def value(of: Client, org: str | None, queue: str = QUEUE) -> float:
    request = keda.GetMetricsRequest(scaledObjectRef=asked(org, queue), metricName=METRIC)
    (metric,) = (await scaler(of).GetMetrics(request, timeout=PATIENCE_S)).metricValues
    assert (metric.metricName, metric.metricValue) == (METRIC, metric.metricValueFloat)
    return metric.metricValueFloat


@contextlib.asynccontextmanager
async def pushes(of: Client, org: str | None, queue: str = QUEUE) -> AsyncGenerator[AsyncIterator[bool], None]:
    """Yields what a stream pushes, until the end of the block."""
    stream: Any = scaler(of).StreamIsActive(asked(org, queue))

    async def said() -> AsyncGenerator[bool, None]:
        async for message in stream:
            yield message.result

    try:
        yield said()
    finally:
        stream.cancel()


async def next_of(stream: AsyncIterator[bool], *, within_s: float = PATIENCE_S) -> bool:
    async with asyncio.timeout(within_s):
        return await anext(stream)


async def refusal(call: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await call
    return refused.value


# ── What is refused ──────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("change", "field", "words"),
    [
        ({"org": None}, "org", 'set allOrgs to "true"'),
        ({"org": ""}, "org", "not ''"),
        ({"org": "a b"}, "org", "not 'a b'"),
        ({"org": "x" * 129}, "org", "1 to 128"),
        ({"allOrgs": "true"}, "org", "remove one of them"),
        ({"allOrgs": "yes"}, "allOrgs", "not 'yes'"),
        ({"queue": None}, "queue", "is missing"),
        ({"queue": "-mail"}, "queue", "not '-mail'"),
        ({"jobsPerWorker": None}, "jobsPerWorker", "is missing"),
        ({"jobsPerWorker": "0"}, "jobsPerWorker", "not '0'"),
        ({"jobsPerWorker": "-3"}, "jobsPerWorker", "not '-3'"),
        ({"jobsPerWorker": "2.5"}, "jobsPerWorker", "not '2.5'"),
        ({"jobsPerWorker": "٣"}, "jobsPerWorker", "from 1 to 100,000"),
        ({"jobsPerWorker": "100001"}, "jobsPerWorker", "not '100001'"),
    ],
)
async def test_metadata_that_is_wrong_is_refused_with_its_value_and_what_to_do(
    near: Client, change: dict[str, str | None], field: str, words: str
) -> None:
    metadata = {**asked("acme").scalerMetadata, **change}
    request = keda.ScaledObjectRef(scalerMetadata={key: value for key, value in metadata.items() if value is not None})
    metrics = keda.GetMetricsRequest(scaledObjectRef=request, metricName=METRIC)
    stub = scaler(near)
    calls: list[tuple[str, Any]] = [
        ("", stub.IsActive(request)),
        ("", stub.GetMetricSpec(request)),
        ("scaledObjectRef.", stub.GetMetrics(metrics)),
        ("", anext(aiter(cast("Any", stub.StreamIsActive(request))))),
    ]
    for path, call in calls:
        error = await refusal(call)
        assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert refused_fields(error) == [f"{path}scalerMetadata.{field}"]
        assert words in (error.details() or "")


async def test_metadata_of_any_size_is_not_taken(near: Client) -> None:
    stub = scaler(near)
    for request in (
        asked("acme", caCert="x" * 65_536),
        asked("acme", **{f"key-{number}": "" for number in range(100)}),
    ):
        error = await refusal(stub.IsActive(request))
        assert (error.code(), refused_fields(error)) == (grpc.StatusCode.INVALID_ARGUMENT, ["scalerMetadata"])


async def test_another_metric_is_refused(near: Client) -> None:
    request = keda.GetMetricsRequest(scaledObjectRef=asked("acme"), metricName="s0-jobs")
    error = await refusal(scaler(near).GetMetrics(request))
    assert (error.code(), refused_fields(error)) == (grpc.StatusCode.INVALID_ARGUMENT, ["metricName"])


async def test_the_call_that_keda_does_without_is_answered_as_it_expects(near: Client) -> None:
    call: Any = near.channel.unary_stream("/externalscaler.ExternalScaler/StreamMetricSpec")
    error = await refusal(anext(aiter(call(asked("acme").SerializeToString()))))
    assert error.code() == grpc.StatusCode.UNIMPLEMENTED


# ── What is counted ──────────────────────────────────────────────────────────────────────────────────────────────────


async def test_the_target_is_what_the_metadata_says(near: Client) -> None:
    (spec,) = (await scaler(near).GetMetricSpec(asked("acme", jobsPerWorker="25"), timeout=PATIENCE_S)).metricSpecs
    assert (spec.metricName, spec.targetSize, spec.targetSizeFloat) == (METRIC, 25, 25.0)


async def test_an_org_or_a_queue_that_never_was_has_no_work(near: Client) -> None:
    assert not await is_active(near, org_of())
    assert await value(near, org_of()) == 0
    assert not await is_active(near, None, "never-was")
    assert await value(near, None, "never-was") == 0


async def test_ready_and_leased_jobs_count_and_others_do_not(near: Client) -> None:
    org, later = org_of(), window(3600)
    await near.enqueue(org, *(new_job() for _ in range(5)), *(new_job(priority=2) for _ in range(3)))
    await near.enqueue(org, *(new_job(delay=later) for _ in range(4)), new_job(queue="other"))
    await near.enqueue(org_of(), *(new_job() for _ in range(9)))
    leased = await near.dequeue(org, max_jobs=6)
    # A router reuses a count for one second. The router has not counted these jobs before, so the next call makes a new
    # count.
    assert await value(near, org) == 8
    assert await is_active(near, org)
    await near.queue.Ack(queue_pb2.AckRequest(org=org, acks=acks(leased)), timeout=PATIENCE_S)
    leased = await near.dequeue(org, max_jobs=6)
    assert len(leased) == 2
    # All remaining jobs are leased. KEDA must not stop the workers that hold these leases.
    assert await is_active(near, org)
    await near.queue.Ack(queue_pb2.AckRequest(org=org, acks=acks(leased)), timeout=PATIENCE_S)
    assert not await is_active(near, org)


async def test_jobs_of_a_paused_queue_call_no_workers(near: Client) -> None:
    org = org_of()
    await near.enqueue(org, new_job(), new_job())
    await near.admin.PauseQueue(admin_pb2.PauseQueueRequest(org=org, queue=QUEUE), timeout=PATIENCE_S)
    assert not await is_active(near, org)
    assert await value(near, org) == 0


async def test_all_orgs_of_all_shards_count_together(near: Client, far: Client) -> None:
    queue = f"all-{next(_numbers)}"
    for shard in SHARDS:
        for _ in range(3):
            org = await near.org_on(shard)
            await near.enqueue(org, *(new_job(queue=queue) for _ in range(4)))
            assert len(await near.dequeue(org, queue, max_jobs=1)) == 1
    for of in (near, far):
        assert await value(of, None, queue) == 24
        assert await is_active(of, None, queue)


async def test_a_count_ends_where_more_workers_make_no_difference(near: Client) -> None:
    org = org_of()
    for _ in range(2):
        await near.enqueue(org, *(new_job() for _ in range(600)))
    request = keda.GetMetricsRequest(scaledObjectRef=asked(org, jobsPerWorker="1"), metricName=METRIC)
    (metric,) = (await scaler(near).GetMetrics(request, timeout=PATIENCE_S)).metricValues
    assert metric.metricValue == 1000


# ── What is pushed, and when ─────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("all_orgs", [False, True], ids=["of-one-org", "of-all-orgs"])
async def test_the_first_ready_job_is_pushed_within_two_seconds(near: Client, far: Client, all_orgs: bool) -> None:
    for through_router in (near, far):
        org, queue = org_of(), f"push-{next(_numbers)}"
        async with pushes(near, None if all_orgs else org, queue) as stream:
            assert await next_of(stream) is False
            await through_router.enqueue(org, new_job(queue=queue))
            assert await next_of(stream, within_s=PUSH_S_MAX) is True


@pytest.mark.thorough
@pytest.mark.parametrize("all_orgs", [False, True], ids=["of-one-org", "of-all-orgs"])
async def test_most_pushes_come_far_sooner(near: Client, far: Client, all_orgs: bool) -> None:
    """With `-s` the test prints the figures of docs/performance.md: the time from just before the enqueue to the
    arrival of the push."""
    took_s: list[float] = []
    for _ in range(trials(20, thorough=200)):
        org, queue = org_of(), f"soon-{next(_numbers)}"
        async with pushes(near, None if all_orgs else org, queue) as stream:
            assert await next_of(stream) is False
            began_s = time.monotonic()
            await far.enqueue(org, new_job(queue=queue))
            assert await next_of(stream) is True
            took_s.append(time.monotonic() - began_s)
    p50, *_, p99 = statistics.quantiles(took_s, n=100)[49:]
    print(f"{len(took_s)} pushes: p50 {p50 * 1000:.0f} ms, p99 {p99 * 1000:.0f} ms, max {max(took_s) * 1000:.0f} ms")
    assert p50 < PUSH_S_MAX / 4


@pytest.mark.parametrize("all_orgs", [False, True], ids=["of-one-org", "of-all-orgs"])
async def test_a_job_that_falls_due_is_pushed_within_two_seconds(near: Client, far: Client, all_orgs: bool) -> None:
    org, queue = org_of(), f"due-{next(_numbers)}"
    await far.enqueue(org, new_job(queue=queue, delay=window(1)))
    began_s = time.monotonic()
    async with pushes(near, None if all_orgs else org, queue) as stream:
        assert await next_of(stream) is False
        assert await next_of(stream, within_s=1 + PUSH_S_MAX) is True
        assert time.monotonic() - began_s > 0.9


async def test_a_queue_that_is_resumed_is_pushed(near: Client, far: Client) -> None:
    org = org_of()
    await near.enqueue(org, new_job())
    await near.admin.PauseQueue(admin_pb2.PauseQueueRequest(org=org, queue=QUEUE), timeout=PATIENCE_S)
    async with pushes(near, org) as stream:
        assert await next_of(stream) is False
        await far.admin.ResumeQueue(admin_pb2.ResumeQueueRequest(org=org, queue=QUEUE), timeout=PATIENCE_S)
        assert await next_of(stream, within_s=PUSH_S_MAX) is True


async def test_when_the_jobs_are_gone_that_is_pushed_and_the_next_job_too(near: Client) -> None:
    org = org_of()
    await near.enqueue(org)
    async with pushes(near, org) as stream:
        assert await next_of(stream) is True
        leased = await near.dequeue(org)
        await near.queue.Ack(queue_pb2.AckRequest(org=org, acks=acks(leased)), timeout=PATIENCE_S)
        assert await next_of(stream) is False
        await near.enqueue(org)
        assert await next_of(stream, within_s=PUSH_S_MAX) is True


async def test_consumers_get_their_jobs_beside_a_watched_queue(near: Client, far: Client) -> None:
    org = org_of()
    async with pushes(near, org) as stream, far.stream(org, credit=10) as consumer:
        assert await next_of(stream) is False
        for count in range(1, 6):
            await near.enqueue(org)
            await consumer.until_jobs(count)
    # The watch has ended, and consumers still get their jobs.
    async with near.stream(org, credit=10) as consumer:
        await near.enqueue(org)
        await consumer.until_jobs(1)


async def test_streams_beyond_an_orgs_share_are_refused(near: Client) -> None:
    org = org_of()
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(500):
            stream = await stack.enter_async_context(pushes(near, org))
            assert await next_of(stream) is False
        error = await refusal(anext(aiter(cast("Any", scaler(near).StreamIsActive(asked(org))))))
        assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        other = await stack.enter_async_context(pushes(near, org_of()))
        assert await next_of(other) is False


# ── A shard away, and a router that ends ─────────────────────────────────────────────────────────────────────────────


@pytest.fixture
async def partly(postgres: Server, tmp_path: Path) -> AsyncGenerator[tuple[Client, Proxy], None]:
    """A router, and a proxy in front of its shard s2."""
    dsns = {shard: postgres.create(f"scaler_{next(_numbers)}_{shard}") for shard in SHARDS}
    async with open_proxy_before(dsns["s2"]) as proxy:
        dsns["s2"] = through(dsns["s2"], proxy)
        config = write_cluster(tmp_path / "cluster.toml", dsns)
        with contextlib.ExitStack() as stack:
            routers = await asyncio.to_thread(stack.enter_context, running_routers(config))
            async with client(routers.address) as opened:
                yield opened, proxy
            await asyncio.to_thread(stack.close)


async def test_a_shard_away_takes_no_workers_away_and_hides_nothing_of_others(partly: tuple[Client, Proxy]) -> None:
    near, proxy = partly
    here, there = await near.org_on("s1"), await near.org_on("s2")
    await near.enqueue(there)
    async with pushes(near, None) as all_orgs, pushes(near, there) as of_there:
        assert await next_of(all_orgs) is True
        assert await next_of(of_there) is True
        proxy.closed = True
        proxy.cut_all()
        # The router cannot answer for an org of the shard that is away. It cannot answer for all orgs either: the other
        # shard has no work, but the shard that is away may have some.
        for org in (there, None):
            assert (await refusal(is_active(near, org))).code() == grpc.StatusCode.UNAVAILABLE
        assert (await refusal(value(near, there))).code() == grpc.StatusCode.UNAVAILABLE
        await near.enqueue(here)
        assert await is_active(near, None)
        assert await value(near, None) == 1
        leased = await near.dequeue(here)
        await near.queue.Ack(queue_pb2.AckRequest(org=here, acks=acks(leased)), timeout=PATIENCE_S)
        proxy.closed = False
        while True:
            with contextlib.suppress(grpc.aio.AioRpcError):
                leased = await near.dequeue(there)
                await near.queue.Ack(queue_pb2.AckRequest(org=there, acks=acks(leased)), timeout=PATIENCE_S)
                break
        # The streams pushed nothing during the outage. Their first push after the outage is true.
        assert await next_of(all_orgs) is False
        assert await next_of(of_there) is False


async def test_a_router_that_ends_ends_the_streams_in_order_and_keda_calls_again_at_once(
    postgres: Server, tmp_path: Path
) -> None:
    config = write_cluster(tmp_path / "cluster.toml", {"s1": postgres.create(f"scaler_{next(_numbers)}")})
    with contextlib.ExitStack() as stack:
        routers = await asyncio.to_thread(stack.enter_context, running_routers(config))
        async with client(routers.address) as near:
            stream: Any = scaler(near).StreamIsActive(asked(org_of()))
            assert (await stream.read()).result is False
            routers.supervisor.terminate()
            # After each error KEDA would wait twice as long before its next call.
            assert await stream.read() is grpc.aio.EOF
            assert await stream.code() == grpc.StatusCode.OK
        await asyncio.to_thread(stack.close)


# ── Certificates, which are all that KEDA can show ───────────────────────────────────────────────────────────────────


async def test_kedas_certificate_says_whose_jobs_it_may_count(postgres: Server, tmp_path: Path) -> None:
    authority = Authority()
    authority.sign().save(tmp_path / "tls.crt", tmp_path / "tls.key")
    ca = authority.saved(tmp_path / "ca.crt")
    config = write_cluster(tmp_path / "cluster.toml", {"s1": postgres.create(f"scaler_{next(_numbers)}")})
    config.write_text(
        f"{config.read_text()}\n[tls]\ncertificate = '{tmp_path / 'tls.crt'}'\nkey = '{tmp_path / 'tls.key'}'\n"
        f"client_ca = '{ca}'\n"
        "[[auth.certificate]]\nsubject = 'CN=keda-shop'\norg = 'shop'\nscopes = ['read']\n"
        "[[auth.certificate]]\nsubject = 'CN=keda'\nall_orgs = true\nscopes = ['read', 'cluster']\n"
        "[[auth.certificate]]\nsubject = 'CN=worker'\norg = 'shop'\nscopes = ['consume']\n"
    )
    with contextlib.ExitStack() as stack:
        routers = await asyncio.to_thread(stack.enter_context, running_routers(config))
        said: dict[tuple[str, str | None], object] = {}
        for name in ("keda-shop", "keda", "worker"):
            certificate, key = tmp_path / f"{name}.crt", tmp_path / f"{name}.key"
            authority.sign(name).save(certificate, key)
            credentials = grpc.ssl_channel_credentials(ca.read_bytes(), key.read_bytes(), certificate.read_bytes())
            async with grpc.aio.secure_channel(routers.address, credentials) as channel:
                stub = keda_grpc.ExternalScalerStub(channel)
                for org in ("shop", "bank", None):
                    try:
                        said[name, org] = (await stub.IsActive(asked(org), timeout=PATIENCE_S)).result
                    except grpc.aio.AioRpcError as error:
                        said[name, org] = error.code()
        denied = grpc.StatusCode.PERMISSION_DENIED
        assert said == {
            ("keda-shop", "shop"): False,
            ("keda-shop", "bank"): denied,
            ("keda-shop", None): denied,
            ("keda", "shop"): False,
            ("keda", "bank"): False,
            ("keda", None): False,
            ("worker", "shop"): denied,
            ("worker", "bank"): denied,
            ("worker", None): denied,
        }
        await asyncio.to_thread(stack.close)
