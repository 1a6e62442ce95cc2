"""Exemplars of the durations of calls: for each method and each bucket of its histogram, the trace of the last recorded
call that fell into that bucket. They are written to a file in the folder of the metrics, because prometheus_client
keeps no exemplars for several processes. The scrape endpoint adds them to its answer (router/process/metrics.py)."""

from __future__ import annotations

import bisect
import json
import logging
import os
import time
from pathlib import Path

from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor
from opentelemetry.trace import SpanKind, format_trace_id
from prometheus_client.utils import floatToGoString

from shard import metrics

_log = logging.getLogger(__name__)
# The file is written at most once in this time.
_PAUSE_S = 1.0
_SERIES = "windrow_call_duration_seconds_bucket"
_BUCKETS = [*metrics.SECONDS, float("inf")]


class Exemplars(SpanProcessor):
    """Gets each recorded server span when it ends. `folder`: the metrics' folder."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / f"exemplars_{os.getpid()}.json"
        # By method and bucket: the series and its labels, the trace, the seconds, and when the call ended (Unix time).
        # The scrape endpoint reads these values in this form.
        self._last: dict[tuple[str, float], tuple[str, dict[str, str], str, float, float]] = {}
        self._written_s = 0.0

    def on_end(self, span: ReadableSpan) -> None:
        context = span.get_span_context()
        if span.kind is not SpanKind.SERVER or context is None or span.start_time is None or span.end_time is None:
            return
        seconds, ended_s = (span.end_time - span.start_time) / 1e9, span.end_time / 1e9
        bucket = _BUCKETS[bisect.bisect_left(_BUCKETS, seconds)]
        labels = {"method": span.name, "le": floatToGoString(bucket)}  # type: ignore[no-untyped-call]
        self._last[span.name, bucket] = _SERIES, labels, format_trace_id(context.trace_id), seconds, ended_s
        if time.monotonic() - self._written_s >= _PAUSE_S:
            self._written_s = time.monotonic()
            new = self._file.with_suffix(".new")
            try:
                new.write_text(json.dumps(list(self._last.values())))
                new.replace(self._file)
            except OSError as error:
                # The span ends inside the call: an error here would replace the call's answer.
                _log.debug("exemplars were not written: %s", error)
