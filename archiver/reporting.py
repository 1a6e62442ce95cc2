"""Reports each pass to the log, and also to OpenTelemetry if its standard environment variables ask for metrics
(shard/telemetry.py)."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Generator
from typing import TypeAlias

from archiver.run import AnotherArchives, Pass
from shard import telemetry
from shard.errors import ClocksDiffer
from shard.vocabulary import ShardName

Listener: TypeAlias = Callable[[ShardName, Pass | Exception], None]

_log = logging.getLogger(__name__)


def log(shard: ShardName, outcome: Pass | Exception) -> None:
    if isinstance(outcome, Pass):
        _log.log(logging.INFO if outcome.did_something else logging.DEBUG, "%s", outcome)
        for why in outcome.stuck:
            _log.error("%s", why)
        for why in outcome.in_use:
            _log.warning("shard %r: %s; the next pass tries again", shard, why)
        for why in outcome.not_exported:
            _log.error("shard %r: %s", shard, why)
    elif isinstance(outcome, AnotherArchives):
        _log.info("%s", outcome)
    elif isinstance(outcome, ClocksDiffer):
        _log.error("%s", outcome)
    else:
        _log.warning("shard %r: the pass failed: %s", shard, outcome)


@contextlib.contextmanager
def metrics() -> Generator[Listener, None, None]:
    """Yields a listener for passes. When the block ends, sends the metrics that have not been sent yet."""
    if not telemetry.is_on("METRICS"):
        yield lambda _shard, _outcome: None
        return
    # Import this only when it is needed: the import takes a fifth of the command's start-up time.
    from archiver.metrics import Metrics

    recorder = Metrics()
    try:
        yield recorder.record
    finally:
        recorder.close()
