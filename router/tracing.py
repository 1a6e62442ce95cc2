"""OpenTelemetry in the router: set up by the standard environment variables, and nothing at all without them.

On when OTEL_TRACES_EXPORTER=otlp, or when OTEL_EXPORTER_OTLP_ENDPOINT or OTEL_EXPORTER_OTLP_TRACES_ENDPOINT is
set; off with OTEL_SDK_DISABLED=true or OTEL_TRACES_EXPORTER=none. Sampling follows OTEL_TRACES_SAMPLER.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Generator
from typing import TYPE_CHECKING

import grpc
from opentelemetry import trace
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

_CLOSE_S_MAX = 3.0
_PROPAGATOR = TraceContextTextMapPropagator()


def wanted() -> bool:
    exporter = os.environ.get("OTEL_TRACES_EXPORTER", "").lower()
    if os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true" or exporter == "none":
        return False
    return exporter == "otlp" or any(
        os.environ.get(name) for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
    )


class Tracing:
    """The router's server spans. Made once; `close` sends what is left."""

    def __init__(self) -> None:
        self._provider: TracerProvider | None = None
        self._tracer: trace.Tracer | None = None

    def start(self) -> None:
        if not wanted():
            return
        # Only here: they take a fifth of the time in which a router starts.
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        service = {"service.name": os.environ.get("OTEL_SERVICE_NAME", "windrow-router")}
        self._provider = TracerProvider(resource=Resource.create(service))
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        trace.set_tracer_provider(self._provider)
        self._tracer = trace.get_tracer("windrow.router")

    def close(self) -> None:
        if self._provider is not None:
            # Beside us: with the collector away it would try for longer than a drain may take.
            closing = threading.Thread(target=self._provider.shutdown, daemon=True)
            closing.start()
            closing.join(_CLOSE_S_MAX)

    @property
    def off(self) -> bool:
        return self._tracer is None

    @contextlib.contextmanager
    def span(
        self, service: str, method: str, context: grpc.aio.ServicerContext[object, object]
    ) -> Generator[None, None, None]:
        """A SERVER span around one call, under the caller's span if the call's metadata names one."""
        if self._tracer is None:
            yield
            return
        carrier = {key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)}
        with self._tracer.start_as_current_span(
            f"{service}/{method}",
            context=_PROPAGATOR.extract(carrier),
            kind=trace.SpanKind.SERVER,
            attributes={"rpc.system.name": "grpc", "rpc.method": f"{service}/{method}"},
        ):
            yield


def current_trace() -> str | None:
    """The current span as W3C text, `traceparent tracestate`, to be stored with a job; None when nothing is
    recorded."""
    if not trace.get_current_span().is_recording():
        return None
    carrier: dict[str, str] = {}
    _PROPAGATOR.inject(carrier)
    return f"{carrier['traceparent']} {carrier.get('tracestate', '')}".rstrip()
