"""OpenTelemetry in the router. It is configured by the standard environment variables, and is off if they are not set
(shard/telemetry.py). Sampling follows OTEL_TRACES_SAMPLER."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import grpc
from opentelemetry import trace
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from shard import telemetry

if TYPE_CHECKING:
    from router.gate.spans import Spans

_PROPAGATOR = TraceContextTextMapPropagator()


class Tracing:
    """The router's server spans, if tracing is on."""

    def __init__(self) -> None:
        self._spans: Spans | None = None

    def start(self) -> None:
        if telemetry.is_on("TRACES"):
            from router.gate.spans import Spans

            self._spans = Spans()

    def close(self) -> None:
        if self._spans is not None:
            self._spans.close()

    def begin(
        self, name: str, context: grpc.aio.ServicerContext[object, object]
    ) -> contextlib.AbstractContextManager[object] | None:
        """Returns a span to enter around one call of the method `name`, or None if the call is not sampled."""
        return None if self._spans is None else self._spans.begin(name, context)


def current_trace() -> str | None:
    """Returns the current span as W3C text, `traceparent tracestate`, to store with a job; None if it is not
    recorded."""
    if not trace.get_current_span().is_recording():
        return None
    carrier: dict[str, str] = {}
    _PROPAGATOR.inject(carrier)
    return f"{carrier['traceparent']} {carrier.get('tracestate', '')}".rstrip()
