"""The spans of a router that traces, made by OpenTelemetry's SDK, and sent on by OTLP. Imported only where they are
wanted: the SDK takes a fifth of the time in which a router starts."""

from __future__ import annotations

import contextlib
import os
import threading

import grpc
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.trace.sampling import Decision
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

_CLOSE_S_MAX = 3.0
_PROPAGATOR = TraceContextTextMapPropagator()
_CARRIED = frozenset(_PROPAGATOR.fields)
_NOTHING = Context()
_RANDOM = RandomIdGenerator()


class Spans:
    """Server spans of calls, as the standard environment variables say. `close` sends what is left."""

    def __init__(self) -> None:
        self._ids = _TraceIds()
        service = {"service.name": os.environ.get("OTEL_SERVICE_NAME", "windrow-router")}
        self._provider = TracerProvider(resource=Resource.create(service), id_generator=self._ids)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        trace.set_tracer_provider(self._provider)
        self._tracer = trace.get_tracer("windrow.router")

    def close(self) -> None:
        # Beside us: with the collector away it would try for longer than a drain may take.
        closing = threading.Thread(target=self._provider.shutdown, daemon=True)
        closing.start()
        closing.join(_CLOSE_S_MAX)

    def begin(
        self, name: str, context: grpc.aio.ServicerContext[object, object]
    ) -> contextlib.AbstractContextManager[object] | None:
        """A SERVER span to be entered around one call, under the caller's span if the call's metadata names one; None
        if the call is not to be recorded, which costs a quarter of a span that is made and records nothing."""
        around, trace_id = _NOTHING, 0
        carrier = {key: value for key, value in context.invocation_metadata() or () if key in _CARRIED}
        if carrier:
            around = _PROPAGATOR.extract(carrier)
            # Of a caller that names none, or writes it wrongly, it is 0.
            trace_id = trace.get_current_span(around).get_span_context().trace_id
        trace_id = trace_id or _RANDOM.generate_trace_id()
        told: dict[str, AttributeValue] = {"rpc.system.name": "grpc", "rpc.method": name}
        # Asked here first, and again by the tracer for the few that are recorded: of the same trace it says the same.
        asked = self._provider.sampler.should_sample(around, trace_id, name, trace.SpanKind.SERVER, told)
        if asked.decision is Decision.DROP:
            return None
        self._ids.trace_id = trace_id
        return self._tracer.start_as_current_span(name, context=around, kind=trace.SpanKind.SERVER, attributes=told)


class _TraceIds(RandomIdGenerator):
    """Gives a span the id that its trace was judged by."""

    trace_id = 0

    def generate_trace_id(self) -> int:
        return self.trace_id
