"""Records what the Python client retries by itself."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import grpc

from proof.history import Outcome, Recorder, Verb
from windrow import calls, leases
from windrow.errors import WindrowError

_UNKNOWN = grpc.StatusCode.UNKNOWN.name


def code_of(error: WindrowError) -> str:
    """Returns the name of the status with which the last try ended."""
    cause = error.__cause__
    return cause.code().name if isinstance(cause, grpc.aio.AioRpcError) else _UNKNOWN


@contextmanager
def overheard(recorder: Recorder) -> Generator[None, None, None]:
    """Records each failed try that the client repeats by itself. The client does not report these tries. Therefore this
    function wraps the client's functions that decide whether to repeat a try. Also records the failures that a worker
    logs, such as a lost lease or a late ack."""

    def note(verb: Verb, code: str) -> None:
        recorder.end(recorder.begin(verb, "", None), Outcome.UNKNOWN, code=code)

    pause_s, failed = calls.pause_s, leases.Connectivity.failed

    def heard_pause_s(failure: calls.CallFailure, **rest: Any) -> float | None:
        pause = pause_s(failure, **rest)
        if pause is not None:
            note(Verb.RETRY, failure.code.name)
        return pause

    def heard_failed(self: leases.Connectivity, error: WindrowError) -> None:
        note(Verb.RETRY, code_of(error))
        failed(self, error)

    listener = _Listener(lambda: note(Verb.WORK, _UNKNOWN))
    leases.log.addHandler(listener)
    try:
        with patch.object(calls, "pause_s", heard_pause_s), patch.object(leases.Connectivity, "failed", heard_failed):
            yield
    finally:
        leases.log.removeHandler(listener)


class _Listener(logging.Handler):
    """Records the worker's warnings. Leaves out the warnings of `Connectivity`, because these are about calls that the
    worker repeats."""

    def __init__(self, note: Callable[[], None]) -> None:
        super().__init__(logging.WARNING)
        self._note = note

    def emit(self, record: logging.LogRecord) -> None:
        if "cannot be reached" not in str(record.msg):
            self._note()
            print(self.format(record), file=sys.stderr, flush=True)
