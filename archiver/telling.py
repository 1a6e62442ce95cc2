"""Who hears of each pass: the log, and OpenTelemetry where the standard environment variables want metrics.

On when OTEL_METRICS_EXPORTER=otlp, or when OTEL_EXPORTER_OTLP_ENDPOINT or OTEL_EXPORTER_OTLP_METRICS_ENDPOINT is
set; off with OTEL_SDK_DISABLED=true or OTEL_METRICS_EXPORTER=none.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Generator
from typing import TypeAlias

from archiver.passing import AnotherArchives, Pass
from shard.vocabulary import ShardName

Listener: TypeAlias = Callable[[ShardName, Pass | Exception], None]

_log = logging.getLogger(__name__)


def log(shard: ShardName, outcome: Pass | Exception) -> None:
    if isinstance(outcome, Pass):
        _log.log(logging.INFO if outcome.did_something else logging.DEBUG, "%s", outcome)
        for why in outcome.stuck:
            _log.error("%s", why)
        for why in outcome.in_use:
            _log.warning("shard %r: %s; it is tried again", shard, why)
        for why in outcome.not_exported:
            _log.error("shard %r: %s", shard, why)
    elif isinstance(outcome, AnotherArchives):
        _log.info("%s", outcome)
    else:
        _log.warning("shard %r has had no whole pass: %s", shard, outcome)


@contextlib.contextmanager
def metrics() -> Generator[Listener, None, None]:
    """What is left is sent when the block ends."""
    if not _wanted():
        yield lambda _shard, _outcome: None
        return
    # A fifth of the time in which the command starts.
    from archiver.metrics import Metrics

    made = Metrics()
    try:
        yield made.record
    finally:
        made.close()


def _wanted() -> bool:
    exporter = os.environ.get("OTEL_METRICS_EXPORTER", "").lower()
    if os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true" or exporter == "none":
        return False
    return exporter == "otlp" or any(
        os.environ.get(name) for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT")
    )
