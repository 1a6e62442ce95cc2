"""An OpenTelemetry collector in the test's process: stores what is exported to it, and waits for spans and log
records."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import grpc
from opentelemetry.proto.collector.logs.v1 import logs_service_pb2, logs_service_pb2_grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.logs.v1.logs_pb2 import LogRecord
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from tests.routers import PATIENCE_S


@dataclass(frozen=True, slots=True, kw_only=True)
class Received:
    """One span, and the service that sent it."""

    service: str
    span: Span

    @property
    def trace(self) -> str:
        return self.span.trace_id.hex()

    def is_child_of(self, parent: Received) -> bool:
        return (self.span.trace_id, self.span.parent_span_id) == (parent.span.trace_id, parent.span.span_id)


class _Logs(logs_service_pb2_grpc.LogsServiceServicer):
    def __init__(self, keep: Callable[[list[LogRecord]], None]) -> None:
        self._keep = keep

    def Export(  # noqa: N802 - as the service calls it  # pyrefly: ignore[bad-override]
        self, request: logs_service_pb2.ExportLogsServiceRequest, context: grpc.ServicerContext
    ) -> logs_service_pb2.ExportLogsServiceResponse:
        del context
        scopes = [scope for resource in request.resource_logs for scope in resource.scope_logs]
        self._keep([record for scope in scopes for record in scope.log_records])
        return logs_service_pb2.ExportLogsServiceResponse()


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Keeps every span and every log record that is exported to it."""

    def __init__(self) -> None:
        self.port = 0
        self.logs = _Logs(self._keep_records)
        self._records: list[LogRecord] = []
        self._received: list[Received] = []
        self._more = threading.Condition()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def Export(  # noqa: N802 - as the service calls it  # pyrefly: ignore[bad-override]
        self, request: trace_service_pb2.ExportTraceServiceRequest, context: grpc.ServicerContext
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        del context
        with self._more:
            for resource in request.resource_spans:
                names = {one.key: one.value.string_value for one in resource.resource.attributes}
                self._received += [
                    Received(service=names["service.name"], span=span)
                    for scope in resource.scope_spans
                    for span in scope.spans
                ]
            self._more.notify_all()
        return trace_service_pb2.ExportTraceServiceResponse()

    def _keep_records(self, records: list[LogRecord]) -> None:
        with self._more:
            self._records += records
            self._more.notify_all()

    def records(self, count: int) -> list[LogRecord]:
        """Waits for this many log records. Returns all records that have arrived."""
        with self._more:
            assert self._more.wait_for(lambda: len(self._records) >= count, PATIENCE_S), f"only {self._records}"
            return list(self._records)

    def spans(self) -> list[Received]:
        with self._more:
            return list(self._received)

    def one(self, name: str, fits: Callable[[Received], bool] = lambda _: True) -> Received:
        """Waits for the only span with this name that matches."""
        with self._more:
            found: list[Received] = []

            def arrived() -> bool:
                found[:] = [one for one in self._received if one.span.name == name and fits(one)]
                return bool(found)

            assert self._more.wait_for(arrived, PATIENCE_S), f"no span {name!r} in {self._received}"
            assert len(found) == 1
            return found[0]


def collecting(port: int) -> Generator[Collector, None, None]:
    servicer = Collector()
    server = grpc.server(ThreadPoolExecutor(2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(servicer, server)  # type: ignore[no-untyped-call]
    logs_service_pb2_grpc.add_LogsServiceServicer_to_server(servicer.logs, server)  # type: ignore[no-untyped-call]
    servicer.port = server.add_insecure_port(f"127.0.0.1:{port}")
    server.start()
    yield servicer
    server.stop(None).wait()
