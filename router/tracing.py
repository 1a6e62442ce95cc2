"""OpenTelemetry in the router: set up by the standard environment variables, and nothing at all without them.

On when OTEL_TRACES_EXPORTER=otlp, or when OTEL_EXPORTER_OTLP_ENDPOINT or OTEL_EXPORTER_OTLP_TRACES_ENDPOINT is
set; off with OTEL_SDK_DISABLED=true or OTEL_TRACES_EXPORTER=none. Sampling follows OTEL_TRACES_SAMPLER.
"""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

import grpc
from opentelemetry import trace
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

if TYPE_CHECKING:
    from router.spans import Spans

_PROPAGATOR = TraceContextTextMapPropagator()


def wanted() -> bool:
    exporter = os.environ.get("OTEL_TRACES_EXPORTER", "").lower()
    if os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true" or exporter == "none":
        return False
    return exporter == "otlp" or any(
        os.environ.get(name) for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
    )


class Tracing:
    """The router's server spans, if any are wanted."""

    def __init__(self) -> None:
        self._spans: Spans | None = None

    def start(self) -> None:
        if wanted():
            from router.spans import Spans

            self._spans = Spans()

    def close(self) -> None:
        if self._spans is not None:
            self._spans.close()

    def begin(
        self, name: str, context: grpc.aio.ServicerContext[object, object]
    ) -> contextlib.AbstractContextManager[object] | None:
        """A span to be entered around one call of the method `name`; None if the call is not to be recorded."""
        return None if self._spans is None else self._spans.begin(name, context)


def current_trace() -> str | None:
    """The current span as W3C text, `traceparent tracestate`, to be stored with a job; None when nothing is
    recorded."""
    if not trace.get_current_span().is_recording():
        return None
    carrier: dict[str, str] = {}
    _PROPAGATOR.inject(carrier)
    return f"{carrier['traceparent']} {carrier.get('tracestate', '')}".rstrip()
