"""Spans and trace contexts, as the messaging conventions name them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from tests.unit.client_fake import FakeRouter, failing, fake_router
from windrow import Client, Job, NewJob, Worker
from windrow.tracing import trace_context
from windrow.v1.job_pb2 import TraceContext

TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
async def router() -> AsyncIterator[FakeRouter]:
    async with fake_router() as running:
        yield running


@pytest.fixture
def spans() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def provider(spans: InMemorySpanExporter) -> TracerProvider:
    made = TracerProvider()
    made.add_span_processor(SimpleSpanProcessor(spans))
    return made


@pytest.fixture
async def client(router: FakeRouter, provider: TracerProvider) -> AsyncIterator[Client]:
    async with Client(router.address, org="acme", tracer_provider=provider) as made:
        yield made


def traceparent_of(context: trace.SpanContext | None) -> str:
    told = trace_context(context or trace.INVALID_SPAN_CONTEXT)
    return told.traceparent if told else ""


def context_of(span: ReadableSpan) -> str:
    """Returns the traceparent of a job that is made under this span."""
    return traceparent_of(span.get_span_context())


def named(spans: InMemorySpanExporter, name: str) -> list[ReadableSpan]:
    return [span for span in spans.get_finished_spans() if span.name == name]


async def test_one_job_carries_the_context_of_its_send_span(
    router: FakeRouter, client: Client, spans: InMemorySpanExporter
) -> None:
    stored = await client.enqueue("emails", "send")
    (span,) = spans.get_finished_spans()
    assert (span.name, span.kind) == ("send emails", SpanKind.PRODUCER)
    attributes = dict(span.attributes or {})
    assert attributes.pop("server.port") == int(router.address.split(":")[1])
    assert attributes == {
        "messaging.system": "windrow",
        "messaging.operation.name": "send",
        "messaging.operation.type": "send",
        "messaging.destination.name": "emails",
        "messaging.message.id": stored.id,
        "server.address": "127.0.0.1",
    }
    assert router.of("Enqueue")[0].jobs[0].trace.traceparent == context_of(span)
    assert router.metadata[0]["traceparent"] == context_of(span)


async def test_a_batch_inside_a_span_has_a_create_span_for_each_job(
    router: FakeRouter, client: Client, spans: InMemorySpanExporter, provider: TracerProvider
) -> None:
    with provider.get_tracer("test").start_as_current_span("request") as around:
        await client.enqueue_many([NewJob("emails", "send") for _ in range(3)])
    created = named(spans, "create emails")
    (sent,) = named(spans, "send emails")
    assert [span.kind for span in created] == [SpanKind.PRODUCER] * 3
    assert sent.kind is SpanKind.CLIENT
    assert (sent.attributes or {})["messaging.batch.message_count"] == 3
    assert [job.trace.traceparent for job in router.of("Enqueue")[0].jobs] == [context_of(span) for span in created]
    assert [link.context for link in sent.links] == [span.get_span_context() for span in created]
    assert all(span.parent == around.get_span_context() for span in (sent, *created))


async def test_a_batch_outside_any_span_shares_its_send_span(
    router: FakeRouter, client: Client, spans: InMemorySpanExporter
) -> None:
    await client.enqueue_many([NewJob("a", "k"), NewJob("b", "k")])
    (sent,) = spans.get_finished_spans()
    assert (sent.name, sent.kind) == ("send", SpanKind.PRODUCER)
    assert "messaging.destination.name" not in (sent.attributes or {})
    assert {job.trace.traceparent for job in router.of("Enqueue")[0].jobs} == {context_of(sent)}


async def test_a_failed_send_says_so(router: FakeRouter, client: Client, spans: InMemorySpanExporter) -> None:
    router.scripts["Enqueue"] = failing(1, grpc.StatusCode.PERMISSION_DENIED, router, "Enqueue")
    with pytest.raises(Exception, match="PERMISSION_DENIED"):
        await client.enqueue("emails", "send")
    (span,) = spans.get_finished_spans()
    assert span.status.status_code is StatusCode.ERROR
    assert (span.attributes or {})["error.type"] == "PermissionDenied"


async def test_a_handler_runs_under_a_span_of_its_jobs_trace(
    router: FakeRouter, client: Client, spans: InMemorySpanExporter
) -> None:
    worker = Worker(client, "q")
    inside: list[trace.SpanContext] = []

    @worker.handler("ok", "plain")
    async def ok(job: Job) -> None:
        inside.append(trace.get_current_span().get_span_context())

    @worker.handler("bad")
    def bad(job: Job) -> None:
        inside.append(trace.get_current_span().get_span_context())
        raise ValueError("no")

    router.give("ok", trace=TraceContext(traceparent=TRACEPARENT, tracestate="a=b"))
    router.give("bad", trace=TraceContext(traceparent=TRACEPARENT))
    router.give("plain")
    task = asyncio.create_task(worker.run())
    await router.until(lambda: len(router.settled("Ack") + router.settled("Nack")) == 3)
    worker.stop()
    await task
    processed = named(spans, "process q")
    assert {context_of(span) for span in processed} == {traceparent_of(context) for context in inside}
    of_trace = [span for span in processed if span.parent]
    assert len(of_trace) == 2
    for span in of_trace:
        assert span.kind is SpanKind.CONSUMER
        assert span.parent is not None
        assert f"00-{span.parent.trace_id:032x}-{span.parent.span_id:016x}-01" == TRACEPARENT
        assert [link.context for link in span.links] == [span.parent]
        assert (span.attributes or {})["messaging.operation.type"] == "process"
    assert sorted(str((span.attributes or {}).get("error.type", "")) for span in of_trace) == ["", "ValueError"]


async def test_an_error_that_fails_at_its_own_words_marks_its_span_all_the_same(
    router: FakeRouter, client: Client, spans: InMemorySpanExporter
) -> None:
    class WordlessError(Exception):
        def __str__(self) -> str:
            raise TypeError("no words")

    worker = Worker(client, "q")

    @worker.handler("bad")
    async def bad(job: Job) -> None:
        raise WordlessError

    router.give("bad")
    task = asyncio.create_task(worker.run())
    await router.until(router.nacks)
    worker.stop()
    await task
    (span,) = named(spans, "process q")
    assert span.status.status_code is StatusCode.ERROR
    assert str((span.attributes or {})["error.type"]).endswith("WordlessError")


async def test_without_an_sdk_no_trace_is_made_but_one_is_handed_on(router: FakeRouter) -> None:
    async with Client(router.address, org="acme") as client:
        await client.enqueue("q", "k")
        assert not router.of("Enqueue")[0].jobs[0].HasField("trace")
        assert "traceparent" not in router.metadata[0]
        carried = trace.NonRecordingSpan(
            trace.SpanContext(trace_id=1, span_id=2, is_remote=True, trace_flags=trace.TraceFlags(1))
        )
        with trace.use_span(carried):
            await client.enqueue_many([NewJob("q", "k"), NewJob("q", "k")])
        expected = "00-00000000000000000000000000000001-0000000000000002-01"
        assert {job.trace.traceparent for job in router.of("Enqueue")[1].jobs} == {expected}
        assert router.metadata[1]["traceparent"] == expected


def test_a_tracestate_that_would_be_refused_stays_behind() -> None:
    state = trace.TraceState([(f"k{at}", "v" * 100) for at in range(10)])
    told = trace_context(trace.SpanContext(1, 2, is_remote=False, trace_state=state))
    assert told is not None
    assert told.tracestate == ""
    assert told.traceparent
