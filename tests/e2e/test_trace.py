"""One trace from a producer through a router and a shard to a worker, as a collector receives it."""

from __future__ import annotations

import asyncio
import socket
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from google.protobuf.duration_pb2 import Duration
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.samples import Exemplar

from tests.collector import Collector, Received, collecting
from tests.e2e.conftest import RunningCluster
from tests.jobs import job_id, job_message
from tests.routers import PATIENCE_S, Routers, metrics_of, running_routers, stubs, until, write_cluster
from windrow import Client, Job, Worker, uuid7
from windrow.v1 import job_pb2, queue_pb2

QUEUE = "mail"
# This variable makes the exporter send spans soon. By default it sends them after five seconds.
SOON = {"OTEL_BSP_SCHEDULE_DELAY": "50"}


@pytest.fixture
def config(cluster: RunningCluster, tmp_path: Path) -> Path:
    return write_cluster(tmp_path / "cluster.toml", cluster.dsns, name="windrow")


@pytest.fixture
def traced(config: Path, collector: Collector) -> Iterator[Routers]:
    """Starts routers that export spans."""
    with running_routers(config, environ={"OTEL_EXPORTER_OTLP_ENDPOINT": collector.endpoint, **SOON}) as routers:
        yield routers


@pytest.fixture
def provider(collector: Collector) -> Iterator[TracerProvider]:
    """Yields a tracer provider like the one that an application configures."""
    made = TracerProvider(resource=Resource.create({"service.name": "shop"}))
    made.add_span_processor(SimpleSpanProcessor(OTLPSpanExporter(endpoint=collector.endpoint)))
    yield made
    made.shutdown()


async def test_one_trace_leads_from_the_producer_to_the_worker(
    traced: Routers, collector: Collector, provider: TracerProvider
) -> None:
    async with Client(traced.address, org=f"org-{uuid7()}", tracer_provider=provider) as client:
        with provider.get_tracer("shop").start_as_current_span("checkout"):
            stored = await client.enqueue(QUEUE, "greet")
        worker, handled = Worker(client, [QUEUE]), asyncio.Event()

        @worker.handler("greet")
        async def greet(_: Job) -> None:
            with provider.get_tracer("shop").start_as_current_span("greeting"):
                handled.set()

        running = asyncio.create_task(worker.run())
        await asyncio.wait_for(handled.wait(), PATIENCE_S)
        worker.stop()
        await asyncio.wait_for(running, PATIENCE_S)

    def received() -> list[Received]:
        checkout = collector.one("checkout")
        send = collector.one(f"send {QUEUE}", lambda one: one.is_child_of(checkout))
        serve = collector.one("windrow.v1.Queue/Enqueue", lambda one: one.is_child_of(send))
        shard = next(
            collector.one(name, lambda one: one.is_child_of(serve))
            for name in ("enqueue_plain s1", "enqueue_plain s2")
            if name in {one.span.name for one in collector.spans()} or name == "enqueue_plain s2"
        )
        process = collector.one(f"process {QUEUE}", lambda one: one.is_child_of(send))
        greeting = collector.one("greeting", lambda one: one.is_child_of(process))
        return [checkout, send, serve, shard, process, greeting]

    spans = await asyncio.to_thread(received)
    assert {one.trace for one in spans} == {spans[0].trace}
    assert [(one.service, one.span.kind) for one in spans] == [
        ("shop", Span.SPAN_KIND_INTERNAL),
        ("shop", Span.SPAN_KIND_PRODUCER),
        ("windrow-router", Span.SPAN_KIND_SERVER),
        ("windrow-router", Span.SPAN_KIND_CLIENT),
        ("shop", Span.SPAN_KIND_CONSUMER),
        ("shop", Span.SPAN_KIND_INTERNAL),
    ]
    _, send, _, shard, process, _ = spans
    assert [(link.trace_id, link.span_id) for link in process.span.links] == [(send.span.trace_id, send.span.span_id)]
    assert attributes(shard)["db.system.name"] == "postgresql"
    assert attributes(process)["messaging.message.id"] == stored.id


def attributes(received: Received) -> dict[str, str]:
    return {one.key: one.value.string_value for one in received.span.attributes}


def test_a_job_carries_the_trace_of_its_producer_or_of_the_call_that_stored_it(
    traced: Routers, collector: Collector
) -> None:
    org = f"org-{uuid7()}"
    own = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    around = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    jobs = [
        job_message(
            id=job_id(), queue=QUEUE, kind="with", trace=job_pb2.TraceContext(traceparent=own, tracestate="a=1,b=2")
        ),
        job_message(id=job_id(), queue=QUEUE, kind="without"),
    ]
    with stubs(traced.address) as both:
        request = queue_pb2.EnqueueRequest(org=org, jobs=jobs)
        both.queue.Enqueue(request, timeout=PATIENCE_S, metadata=(("traceparent", around),))
        leased = both.queue.Dequeue(
            queue_pb2.DequeueRequest(org=org, queues=[QUEUE], max_jobs=2, visibility_window=Duration(seconds=60)),
            timeout=PATIENCE_S,
        ).jobs
    traces = {job.kind: job.trace for job in leased}
    assert (traces["with"].traceparent, traces["with"].tracestate) == (own, "a=1,b=2")
    serve = collector.one("windrow.v1.Queue/Enqueue", lambda one: one.trace == around.split("-")[1])
    assert traces["without"].traceparent == f"00-{serve.trace}-{serve.span.span_id.hex()}-01"


def test_a_call_whose_caller_does_not_sample_is_not_exported(traced: Routers, collector: Collector) -> None:
    quiet, loud = "0af7651916cd43dd8448eb211c80319c", "4bf92f3577b34da6a3ce929d0e0e4736"
    with stubs(traced.address) as both:
        for trace, flags in ((quiet, "00"), (loud, "01")):
            job = job_message(id=job_id(), queue=QUEUE, kind="greet")
            request = queue_pb2.EnqueueRequest(org=f"org-{uuid7()}", jobs=[job])
            parent = f"00-{trace}-b7ad6b7169203331-{flags}"
            both.queue.Enqueue(request, timeout=PATIENCE_S, metadata=(("traceparent", parent),))
    collector.one("windrow.v1.Queue/Enqueue", lambda one: one.trace == loud)
    assert {one.trace for one in collector.spans()} & {quiet, loud} == {loud}


def test_a_scrape_leads_from_a_bucket_of_slow_calls_to_the_trace_of_one(config: Path, collector: Collector) -> None:
    config.write_text(config.read_text() + 'metrics = "127.0.0.1:0"\n')
    trace = "4bf92f3577b34da6a3ce929d0e0e4736"
    environ = {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.endpoint, **SOON}
    with running_routers(config, processes=2, environ=environ) as routers, stubs(routers.address) as both:
        request = queue_pb2.DequeueRequest(org=f"org-{uuid7()}", queues=[QUEUE], wait=Duration(nanos=300_000_000))
        parent = f"00-{trace}-b7ad6b7169203331-01"
        both.queue.Dequeue(request, timeout=PATIENCE_S, metadata=(("traceparent", parent),))
        scrape = urllib.request.Request(metrics_of(routers), headers={"Accept": "application/openmetrics-text"})

        def found() -> dict[str, Exemplar]:
            with urllib.request.urlopen(scrape, timeout=PATIENCE_S) as answer:
                text = answer.read().decode()
                families = openmetrics.text_string_to_metric_families(text)  # type: ignore[no-untyped-call]
                return {
                    f"{sample.labels['method']} {sample.labels['le']}": sample.exemplar
                    for family in families
                    for sample in family.samples
                    if sample.exemplar is not None
                }

        until(found, "the call was recorded")
        ((bucket, exemplar),) = found().items()
    method, _, le = bucket.partition(" ")
    assert (method, exemplar.labels) == ("windrow.v1.Queue/Dequeue", {"trace_id": trace})
    assert 0.3 <= exemplar.value <= float(le) <= 10


@pytest.mark.parametrize("environ", [{}, {"OTEL_SDK_DISABLED": "true"}, {"OTEL_TRACES_EXPORTER": "none"}], ids=str)
def test_nothing_is_exported_unless_it_is_asked_for(config: Path, environ: dict[str, str]) -> None:
    """The collector listens at the address to which the exporter sends by default."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", 4317))
        except OSError as error:
            pytest.skip(f"port 4317 is in use: {error}")
    if environ:
        environ = environ | {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4317"}
    for collector in collecting(4317):
        with running_routers(config, environ=environ | SOON) as routers, stubs(routers.address) as both:
            org = f"org-{uuid7()}"
            job = job_message(id=job_id(), queue=QUEUE, kind="greet")
            request = queue_pb2.EnqueueRequest(org=org, jobs=[job])
            parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
            both.queue.Enqueue(request, timeout=PATIENCE_S, metadata=(("traceparent", parent),))
            (leased,) = both.queue.Dequeue(queue_pb2.DequeueRequest(org=org, queues=[QUEUE]), timeout=PATIENCE_S).jobs
            assert not leased.HasField("trace")
        # A router that has ended sends no spans, so no span can arrive later.
        assert collector.spans() == []


def test_a_collector_that_is_away_holds_nothing_up(config: Path) -> None:
    with socket.socket() as taken:
        # The port is bound, but no program listens on it. So no other program gets the port, and connections are
        # refused.
        taken.bind(("127.0.0.1", 0))
        environ = {"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{taken.getsockname()[1]}", **SOON}
        with running_routers(config, environ=environ) as routers, stubs(routers.address) as both:
            for _ in range(20):
                job = job_message(id=job_id(), queue=QUEUE, kind="greet")
                both.queue.Enqueue(queue_pb2.EnqueueRequest(org=f"org-{uuid7()}", jobs=[job]), timeout=5)
            routers.supervisor.terminate()
            assert routers.supervisor.wait(PATIENCE_S) == 0
            # The process ended by itself.
            assert "did not end in time" not in routers.log.read_text()
