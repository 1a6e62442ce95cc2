"""What every call goes through, whatever it asks: its span, its deadline, its rules, and its errors' statuses."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import Awaitable, Callable, Generator
from typing import Any, NoReturn, Protocol, TypeVar, cast

import grpc
from google.protobuf.message import Message
from google.rpc.status_pb2 import Status
from grpc_status import rpc_status

from router.status import INTERNAL, RouterFull, status_of
from router.tracing import Tracing
from router.validation import check
from shard.places import Places

_log = logging.getLogger(__name__)
_Service = TypeVar("_Service", bound="_Gated")
_Request = TypeVar("_Request", bound=Message)
_Response = TypeVar("_Response")
Context = grpc.aio.ServicerContext[Any, Any]

# A caller without a deadline of its own does not hold a connection for ever. The longest wait (60 s) has room in it.
DEADLINE_S_MAX = 75.0


# A process that is asked more at once says so, instead of growing. Of neither does an org get more than is left free.
CALLS_MAX = 4_000
STREAMS_MAX = 10_000
_UNRECORDED = contextlib.nullcontext()


class Gate:
    """The way into one router process: counts who is inside, by orgs, and traces calls."""

    def __init__(self, tracing: Tracing) -> None:
        self.tracing = tracing
        self._calls = Places(CALLS_MAX)
        self._streams = Places(STREAMS_MAX)

    @contextlib.contextmanager
    def stream(self, org: str) -> Generator[None, None, None]:
        """The way in for streams, which stay. Raises RouterFull."""
        if not self._streams.take(org):
            raise RouterFull("streams and waiting calls", STREAMS_MAX)
        try:
            yield
        finally:
            self._streams.give_back(org)

    @contextlib.contextmanager
    def waiting(self, org: str) -> Generator[None, None, None]:
        """For a call that is inside and waits for jobs: meanwhile it counts as a stream. Raises RouterFull."""
        with self.stream(org):
            self.leave(org)
            try:
                yield
            finally:
                self._calls.hold(org)

    def enter(self, org: str) -> None:
        """Raises RouterFull."""
        if not self._calls.take(org):
            raise RouterFull("calls", CALLS_MAX)

    def leave(self, org: str) -> None:
        self._calls.give_back(org)


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
                return await _inside(context, rules, method, service, request)
            except Exception as error:  # noqa: BLE001 - every error becomes a status; told logs the unexpected
                refused = refusal(context, error)
            del request, context
            return await refused

        return call

    return make


async def _inside(
    context: Context,
    rules: Callable[[Any], None],
    method: Callable[[_Service, _Request], Awaitable[_Response]],
    service: _Service,
    request: _Request,
) -> _Response:
    gate = service.gate
    # Those of no org are an operator's.
    org = getattr(request, "org", "")
    gate.enter(org)
    try:
        span = gate.tracing.begin(service.service_name, method.__name__, context)
        with span or _UNRECORDED:
            rules(request)
            if seconds_left(context) < DEADLINE_S_MAX:
                # At the caller's own deadline gRPC cancels us.
                return await method(service, request)
            async with asyncio.timeout(DEADLINE_S_MAX):
                return await method(service, request)
    finally:
        gate.leave(org)


def refusal(context: Context, error: Exception) -> Awaitable[NoReturn]:
    """Awaited, ends a call with the status of an error.

    gRPC keeps the exception that this raises with the call, and the exception keeps the frames that it goes through. So
    whoever awaits this has handled the error, and deleted its names for the call and its requests: else they would be
    a cycle, and stay until the garbage collector looks for it, which is seldom.
    """
    return context.abort_with_status(rpc_status.to_status(told(error)))  # pyright: ignore[reportUnknownMemberType]


def told(error: Exception) -> Status:
    """The status that tells the caller of this error; nothing that the error has come through is held by it any more,
    which would often be the error itself, and the request."""
    status = status_of(error)
    if status.code == INTERNAL:
        _log.error("a call failed unexpectedly", exc_info=error)
    passed: BaseException | None = error
    while passed is not None:
        before = passed.__context__
        passed.__traceback__ = passed.__context__ = None
        passed = before
    return status


def seconds_left(context: Context, *, at_most: float = DEADLINE_S_MAX) -> float:
    """The time the caller still gives, within bounds."""
    # The stubs leave out that it is None for a caller without a deadline.
    left = cast("float | None", context.time_remaining())
    return at_most if left is None else min(left, at_most)
