"""Sends the audit log's changes as OTLP log records, through OpenTelemetry's SDK. Imported only if log records are
wanted. The table in the database is the audit log; this is only a copy. While the collector does not answer, the copy
may miss records, but no change is refused."""

from __future__ import annotations

import json
import os
import threading
import time

from opentelemetry._logs import LogRecord, SeverityNumber
from opentelemetry.exporter.otlp.proto.grpc._log_exporter import OTLPLogExporter
from opentelemetry.sdk._logs import LoggerProvider
from opentelemetry.sdk._logs.export import BatchLogRecordProcessor
from opentelemetry.sdk.resources import Resource

from shard.admin.audit import End, Intent

_CLOSE_S_MAX = 3.0


class AuditExport:
    def __init__(self) -> None:
        service = {"service.name": os.environ.get("OTEL_SERVICE_NAME", "windrow-router")}
        self._provider = LoggerProvider(resource=Resource.create(service))
        self._provider.add_log_record_processor(BatchLogRecordProcessor(OTLPLogExporter()))
        self._logger = self._provider.get_logger("windrow.audit")

    def send(self, intent: Intent, end: End) -> None:
        """Sends a change that has ended."""
        self._logger.emit(
            LogRecord(  # pyrefly: ignore[direct-abstract-base-instantiation]
                timestamp=time.time_ns(),
                severity_number=SeverityNumber.INFO,
                severity_text="INFO",
                event_name="windrow.audit",
                body=f"{intent.principal} called {intent.method}: {end.outcome}",
                attributes={
                    "windrow.audit.id": intent.id,
                    "windrow.audit.principal": intent.principal,
                    "client.address": intent.peer,
                    "rpc.method": intent.method,
                    "windrow.org": intent.org,
                    "windrow.queue": intent.queue,
                    "windrow.audit.request": json.dumps(intent.request),
                    "windrow.audit.outcome": end.outcome,
                    **{f"windrow.audit.count.{what}": many for what, many in end.counts.items()},
                },
            )
        )

    def close(self) -> None:
        # Shut down in a thread with a time limit, as in spans.py.
        closing = threading.Thread(target=self._provider.shutdown, daemon=True)
        closing.start()
        closing.join(_CLOSE_S_MAX)
