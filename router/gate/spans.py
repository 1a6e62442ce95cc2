"""Server spans, made with OpenTelemetry's SDK and exported by OTLP. Imported only if tracing is on, because loading the
SDK would take a fifth of a router's start-up time."""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path

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

from router.gate.exemplars import Exemplars

_CLOSE_S_MAX = 3.0
_PROPAGATOR = TraceContextTextMapPropagator()
_CARRIED = frozenset(_PROPAGATOR.fields)
_NOTHING = Context()
_RANDOM = RandomIdGenerator()


class Spans:
    """Server spans of calls, configured by the standard environment variables. `close` exports the remaining spans."""

    def __init__(self) -> None:
        self._ids = _TraceIds()
        service = {"service.name": os.environ.get("OTEL_SERVICE_NAME", "windrow-router")}
        self._provider = TracerProvider(resource=Resource.create(service), id_generator=self._ids)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        # The variable is set if metrics are served (router/process/metrics.py).
        if (folder := os.environ.get("PROMETHEUS_MULTIPROC_DIR")) is not None:
            self._provider.add_span_processor(Exemplars(Path(folder)))
        trace.set_tracer_provider(self._provider)
        self._tracer = trace.get_tracer("windrow.router")

    def close(self) -> None:
        # Shut down in a thread with a time limit: if the collector does not answer, shutdown() tries for longer than
        # the process may still take after its drain.
        closing = threading.Thread(target=self._provider.shutdown, daemon=True)
        closing.start()
        closing.join(_CLOSE_S_MAX)

    def begin(
        self, name: str, context: grpc.aio.ServicerContext[object, object]
    ) -> contextlib.AbstractContextManager[object] | None:
        """Returns a SERVER span to enter around one call, as a child of the caller's span if the metadata names one.
        Returns None if the call is not sampled, because this is four times as fast as a span that records nothing."""
        around, trace_id = _NOTHING, 0
        carrier = {key: value for key, value in context.invocation_metadata() or () if key in _CARRIED}
        if carrier:
            around = _PROPAGATOR.extract(carrier)
            # 0 if the caller sent no valid trace id.
            trace_id = trace.get_current_span(around).get_span_context().trace_id
        trace_id = trace_id or _RANDOM.generate_trace_id()
        attributes: dict[str, AttributeValue] = {"rpc.system.name": "grpc", "rpc.method": name}
        # The tracer asks the sampler again for the few recorded calls. The tracer gets the same result, because the
        # trace id is the same.
        sampled = self._provider.sampler.should_sample(around, trace_id, name, trace.SpanKind.SERVER, attributes)
        if sampled.decision is Decision.DROP:
            return None
        self._ids.trace_id = trace_id
        return self._tracer.start_as_current_span(
            name, context=around, kind=trace.SpanKind.SERVER, attributes=attributes
        )


class _TraceIds(RandomIdGenerator):
    """Gives a span the trace id that the sampler has decided about."""

    trace_id = 0

    def generate_trace_id(self) -> int:
        return self.trace_id
