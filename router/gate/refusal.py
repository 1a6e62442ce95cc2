"""Refusals: errors become the statuses of calls. Unexpected errors are logged, and so is how many requests were refused
for a reason that an operator may want to know."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable
from typing import NoReturn

from google.rpc.status_pb2 import Status
from grpc_status import rpc_status

from router.codec.status import INTERNAL, Undecodable, status_of
from router.gate.admission import Context
from router.gate.auth.principal import Unauthenticated

_log = logging.getLogger(__name__)
# Refusals of one kind are logged at most once in this time.
_REFUSALS_LOG_S = 60.0


def refusal(context: Context, error: Exception) -> tuple[Awaitable[NoReturn], int]:
    """Returns an awaitable that ends the call with the status of the error, and that status's code.

    The awaitable raises an exception. gRPC keeps that exception with the call, and the exception keeps the frames that
    it passes through. So the caller must leave the `except` block and delete its references to the context and the
    request before it awaits. Otherwise these objects would form a reference cycle. Garbage collections are rare in a
    router process.
    """
    status = status_for(error)
    ending = context.abort_with_status(rpc_status.to_status(status))
    return ending, status.code


class _Refusals:
    """Counts calls that were refused for one reason, and logs the count at most once a minute."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._count = 0
        self._next_s = 0.0

    def count(self) -> None:
        now_s = asyncio.get_running_loop().time()
        self._count += 1
        if now_s >= self._next_s:
            _log.warning("refused %d %s", self._count, self._what)
            self._count, self._next_s = 0, now_s + _REFUSALS_LOG_S


_undecodable = _Refusals("request(s) that cannot be decoded")
_unauthenticated = _Refusals("call(s) whose callers did not prove who they are")


def status_for(error: Exception) -> Status:
    """Returns the status for an error, logs the error if it is unexpected, and drops its traceback."""
    status = status_of(error)
    if status.code == INTERNAL:
        _log.error("a call failed unexpectedly", exc_info=error)
    elif isinstance(error, Undecodable):
        _undecodable.count()
    elif isinstance(error, Unauthenticated):
        _unauthenticated.count()
    drop_references(error)
    return status


def drop_references(error: BaseException) -> None:
    """Removes tracebacks and contexts from an error: their frames refer to the call, which refers to the error."""
    current: BaseException | None = error
    while current is not None:
        context = current.__context__
        current.__traceback__ = current.__context__ = None
        current = context
