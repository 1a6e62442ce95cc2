"""Spans and W3C Trace Context for enqueueing and handling jobs. This module has no exporter, and needs only the
OpenTelemetry API.

Follows the semantic conventions for messaging spans (opentelemetry.io/docs/specs/semconv/messaging/messaging-spans):

- Enqueueing one job makes a span `send <queue>` (PRODUCER). The job carries the context of this span.
- Enqueueing a batch inside a recorded span makes a span `create <queue>` (PRODUCER) for each job, and one
  `send <queue>` (CLIENT) with links to all of them. Each job carries the context of its own span. Outside a recorded
  span, or with `create_spans=False`, all jobs of the batch carry the context of `send <queue>`.
- A worker runs a handler in a span `process <queue>` (CONSUMER). This span is about one job. So the job's context is
  the parent of the span, and also a link, as the conventions ask. A span around the worker itself becomes a second
  link.
- A batch handler has one span `process <queue>` for its batch, with links to all jobs' contexts and no parent.

Dequeues and acks have no spans: the worker, and not the user, decides when it dequeues or acks a batch. Without an
OpenTelemetry SDK no spans are made, but the current trace context is still written into the jobs.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress

from opentelemetry import trace
from opentelemetry.trace import (
    Link,
    NoOpTracerProvider,
    ProxyTracerProvider,
    Span,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
)
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from windrow.jobs import Job
from windrow.v1 import job_pb2

Attributes = dict[str, str | int]
_W3C = TraceContextTextMapPropagator()
_TRACESTATE_BYTES_MAX = 512


class Tracing:
    """The spans of one client."""

    def __init__(self, *, provider: trace.TracerProvider | None, address: str, create_spans: bool) -> None:
        self._provider = provider
        self._tracer = trace.get_tracer("windrow", tracer_provider=provider)
        self._create_spans = create_spans
        host, _, port = address.rpartition(":")
        self._common: Attributes = {"messaging.system": "windrow", "server.address": host or address}
        if port.isdecimal():
            self._common["server.port"] = int(port)

    @contextmanager
    def sending(self, jobs: Sequence[job_pb2.NewJob]) -> Generator[None]:
        """Wraps the call that stores the jobs. Gives a trace context to each job that has none."""
        around = trace.get_current_span()
        if not self.has_sdk():
            context = around.get_span_context()
            if context.is_valid:
                _stamp(jobs, trace_context(context))
            yield
            return
        queue = _shared_queue(jobs)
        created: list[Link] = []
        if len(jobs) > 1 and self._create_spans and around.is_recording():
            created = [Link(self._create(job)) for job in jobs]
        attributes = self._attributes("send", queue)
        if len(jobs) == 1:
            attributes["messaging.message.id"] = jobs[0].id
        else:
            attributes["messaging.batch.message_count"] = len(jobs)
        span = self._tracer.start_span(
            f"send {queue}" if queue else "send",
            kind=SpanKind.CLIENT if created else SpanKind.PRODUCER,
            attributes=attributes,
            links=created,
        )
        with trace.use_span(span, end_on_exit=True, record_exception=False, set_status_on_exception=False):
            if not created:
                _stamp(jobs, trace_context(span.get_span_context()))
            try:
                yield
            except Exception as error:
                fail(span, error)
                raise

    @contextmanager
    def processing(self, job: Job) -> Generator[Span]:
        """Wraps the handler of a job that carries a trace, or any handler if an SDK makes spans."""
        records = self.has_sdk()
        around = trace.get_current_span().get_span_context()
        parent = (
            _W3C.extract({"traceparent": job.traceparent, "tracestate": job.tracestate}) if job.traceparent else None
        )
        creation = trace.get_current_span(parent).get_span_context() if parent is not None else None
        links = [Link(context) for context in (creation, around) if context is not None and context.is_valid]
        attributes: Attributes | None = None
        if records:
            attributes = self._attributes("process", job.queue)
            attributes["messaging.message.id"] = job.id
        span = self._tracer.start_span(
            f"process {job.queue}",
            # Pass an empty context and not None, so that a job without a trace begins a new trace, outside the current
            # span.
            context=parent if parent is not None else trace.set_span_in_context(trace.INVALID_SPAN),
            kind=SpanKind.CONSUMER,
            attributes=attributes,
            links=links if attributes is not None else None,
        )
        with trace.use_span(span, end_on_exit=True, record_exception=False, set_status_on_exception=False):
            yield span

    @contextmanager
    def processing_batch(self, jobs: Sequence[Job]) -> Generator[Span]:
        """Wraps a handler of many jobs in one span. The span has no parent, and has a link to the span of each job."""
        queues = {job.queue for job in jobs}
        queue = jobs[0].queue if len(queues) == 1 else ""
        attributes = self._attributes("process", queue)
        attributes["messaging.batch.message_count"] = len(jobs)
        carried = [
            trace.get_current_span(
                _W3C.extract({"traceparent": job.traceparent, "tracestate": job.tracestate})
            ).get_span_context()
            for job in jobs
            if job.traceparent
        ]
        span = self._tracer.start_span(
            f"process {queue}" if queue else "process",
            context=trace.set_span_in_context(trace.INVALID_SPAN),
            kind=SpanKind.CONSUMER,
            attributes=attributes,
            links=[Link(context) for context in carried if context.is_valid],
        )
        with trace.use_span(span, end_on_exit=True, record_exception=False, set_status_on_exception=False):
            yield span

    def has_sdk(self) -> bool:
        """Returns whether spans are recorded. Reads the environment while no SDK is set, so call it rarely."""
        provider = self._provider or trace.get_tracer_provider()
        return not isinstance(provider, ProxyTracerProvider | NoOpTracerProvider)

    def _create(self, job: job_pb2.NewJob) -> SpanContext:
        if job.HasField("trace"):
            carried = _W3C.extract({"traceparent": job.trace.traceparent, "tracestate": job.trace.tracestate})
            return trace.get_current_span(carried).get_span_context()
        queue = job.template.queue
        attributes = self._attributes("create", queue)
        attributes["messaging.message.id"] = job.id
        span = self._tracer.start_span(f"create {queue}", kind=SpanKind.PRODUCER, attributes=attributes)
        span.end()
        context = span.get_span_context()
        _stamp([job], trace_context(context))
        return context

    def _attributes(self, operation: str, queue: str) -> Attributes:
        attributes: Attributes = {
            **self._common,
            "messaging.operation.name": operation,
            "messaging.operation.type": operation,
        }
        if queue:
            attributes["messaging.destination.name"] = queue
        return attributes


def fail(span: Span, error: BaseException) -> None:
    """Marks a span as failed, following the conventions for recording errors."""
    if span.is_recording():
        span.set_attribute("error.type", type(error).__qualname__)
        text = ""
        # The __str__ of a handler's error may raise.
        with suppress(BaseException):
            text = str(error)[:500]
        span.set_status(Status(StatusCode.ERROR, text))


def headers() -> tuple[tuple[str, str], ...] | None:
    """Returns the current trace as gRPC metadata, or None if there is no trace."""
    if not trace.get_current_span().get_span_context().is_valid:
        return None
    carrier: dict[str, str] = {}
    _W3C.inject(carrier)
    return tuple(carrier.items())


def trace_context(context: SpanContext) -> job_pb2.TraceContext | None:
    """Returns the trace context that a job carries, or None if there is no trace."""
    if not context.is_valid:
        return None
    state = context.trace_state.to_header() if context.trace_state else ""
    # Drop a tracestate that the router would refuse, because the job matters more than its trace.
    if len(state) > _TRACESTATE_BYTES_MAX or not state.isascii() or not state.isprintable():
        state = ""
    parent = f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"
    return job_pb2.TraceContext(traceparent=parent, tracestate=state)


def _stamp(jobs: Sequence[job_pb2.NewJob], context: job_pb2.TraceContext | None) -> None:
    if context is None:
        return
    for job in jobs:
        if not job.HasField("trace"):
            job.trace.CopyFrom(context)


def _shared_queue(jobs: Sequence[job_pb2.NewJob]) -> str:
    queue = jobs[0].template.queue
    return queue if all(job.template.queue == queue for job in jobs) else ""
