"""What every call goes through, whatever it asks: its span, its deadline, its rules, and its errors' statuses."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import Awaitable, Callable, Generator
from typing import Any, Protocol, TypeVar, cast

import grpc
from google.protobuf.message import Message
from grpc_status import rpc_status

from router.status import INTERNAL, RouterFull, status_of
from router.tracing import Tracing
from router.validation import check

_log = logging.getLogger(__name__)
_Service = TypeVar("_Service", bound="_Gated")
_Request = TypeVar("_Request", bound=Message)
_Response = TypeVar("_Response")
Context = grpc.aio.ServicerContext[Any, Any]

# A caller without a deadline of its own does not hold a connection for ever. The longest wait (60 s) has room in it.
DEADLINE_S_MAX = 75.0


# A process that is asked more at once says so, instead of growing.
CALLS_MAX = 4_000
STREAMS_MAX = 10_000


class Gate:
    """The way into one router process: counts the calls that are inside, and traces them."""

    def __init__(self, tracing: Tracing, *, calls_max: int = CALLS_MAX) -> None:
        self._tracing = tracing
        self._calls_max = calls_max
        self._inside = 0
        self._streams = 0

    @contextlib.contextmanager
    def stream(self) -> Generator[None, None, None]:
        """The way in for streams, which stay. Raises RouterFull."""
        if self._streams >= STREAMS_MAX:
            raise RouterFull(STREAMS_MAX)
        self._streams += 1
        try:
            yield
        finally:
            self._streams -= 1

    @contextlib.contextmanager
    def waiting(self) -> Generator[None, None, None]:
        """For a call that is inside and waits for jobs: meanwhile it counts as a stream. Raises RouterFull."""
        with self.stream():
            self._inside -= 1
            try:
                yield
            finally:
                self._inside += 1

    def __enter__(self) -> Tracing:
        """Raises RouterFull."""
        if self._inside >= self._calls_max:
            raise RouterFull(self._calls_max)
        self._inside += 1
        return self._tracing

    def __exit__(self, *_: object) -> None:
        self._inside -= 1


class _Gated(Protocol):
    @property
    def gate(self) -> Gate: ...

    @property
    def service_name(self) -> str: ...


def unary(
    rules: Callable[[Any], None] = check,
) -> Callable[
    [Callable[[_Service, _Request], Awaitable[_Response]]],
    Callable[[_Service, _Request, Context], Awaitable[_Response]],
]:
    """Makes a service's method from one that takes a request that keeps the rules, and raises what it likes."""

    def make(
        method: Callable[[_Service, _Request], Awaitable[_Response]],
    ) -> Callable[[_Service, _Request, Context], Awaitable[_Response]]:
        @functools.wraps(method)
        async def call(service: _Service, request: _Request, context: Context) -> _Response:
            try:
                with service.gate as tracing:
                    if tracing.off:
                        return await _within(context, rules, method, service, request)
                    with tracing.span(service.service_name, method.__name__, context):
                        return await _within(context, rules, method, service, request)
            except Exception as error:
                await refuse(context, error)
                raise AssertionError("unreachable: an abort raises") from error

        return call

    return make


async def _within(
    context: Context,
    rules: Callable[[Any], None],
    method: Callable[[_Service, _Request], Awaitable[_Response]],
    service: _Service,
    request: _Request,
) -> _Response:
    rules(request)
    if seconds_left(context) < DEADLINE_S_MAX:
        # At the caller's own deadline gRPC cancels us.
        return await method(service, request)
    async with asyncio.timeout(DEADLINE_S_MAX):
        return await method(service, request)


async def refuse(context: Context, error: Exception) -> None:
    """Ends a call with the status of an error."""
    status = status_of(error)
    if status.code == INTERNAL:
        _log.error("a call failed unexpectedly", exc_info=error)
    await context.abort_with_status(rpc_status.to_status(status))  # pyright: ignore[reportUnknownMemberType]


def seconds_left(context: Context, *, at_most: float = DEADLINE_S_MAX) -> float:
    """The time the caller still gives, within bounds."""
    # The stubs leave out that it is None for a caller without a deadline.
    left = cast("float | None", context.time_remaining())
    return at_most if left is None else min(left, at_most)
