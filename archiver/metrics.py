"""Records metrics of passes with OpenTelemetry's SDK, and sends them by OTLP. This module is imported only if metrics
are wanted."""

from __future__ import annotations

import os

from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
from opentelemetry.sdk.resources import Resource

from archiver.run import Pass
from shard.vocabulary import ShardName

_CLOSE_MS_MAX = 3000


class Metrics:
    """Counts passes. Sends the metrics on `close`, and before that every minute or at the interval that
    OTEL_METRIC_EXPORT_INTERVAL sets."""

    def __init__(self) -> None:
        service = {"service.name": os.environ.get("OTEL_SERVICE_NAME", "windrow-archiver")}
        self._provider = MeterProvider(
            [PeriodicExportingMetricReader(OTLPMetricExporter())], resource=Resource.create(service)
        )
        meter = self._provider.get_meter("windrow.archiver")
        self._pass_s = meter.create_histogram(
            "windrow.archiver.pass.duration", unit="s", description="Passes, by shard and how they ended."
        )
        self._locked_s = meter.create_histogram(
            "windrow.archiver.lock.duration",
            unit="s",
            description="For each pass, the longest time for which enqueues and acks may have waited.",
        )
        self._jobs = meter.create_counter(
            "windrow.archiver.jobs", unit="{job}", description="Jobs, by shard and what was done with them."
        )
        self._bytes = meter.create_counter(
            "windrow.archiver.bytes",
            unit="By",
            description="Size of the days that turned cold, of exports, and of days dropped.",
        )

    def record(self, shard: ShardName, outcome: Pass | Exception) -> None:
        if not isinstance(outcome, Pass):
            self._pass_s.record(0.0, {"shard": shard, "outcome": type(outcome).__name__})
            return
        self._pass_s.record(
            outcome.seconds, {"shard": shard, "outcome": "something left" if outcome.left_something else "done"}
        )
        self._locked_s.record(outcome.locked_s_max, {"shard": shard})
        days = (("turned cold", outcome.turned_cold), ("exported", outcome.exported), ("dropped", outcome.dropped))
        for what, aged in days:
            self._jobs.add(sum(day.jobs for day in aged), {"shard": shard, "what": what})
            self._bytes.add(sum(day.bytes for day in aged), {"shard": shard, "what": what})
        for what, jobs in (
            ("expired", outcome.jobs_expired),
            ("dead too long", outcome.dead_jobs_cancelled),
            ("released and dropped", outcome.released_jobs_dropped),
        ):
            self._jobs.add(jobs, {"shard": shard, "what": what})

    def close(self) -> None:
        """Sends what was recorded since the metrics were sent last."""
        self._provider.shutdown(timeout_millis=_CLOSE_MS_MAX)
