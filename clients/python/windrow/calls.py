"""Calls to the routers, with deadlines and retries. This module does not know what a job is.

Every call may be retried, because ids and lease tokens make calls idempotent. The rule for retries is in
windrow/v1/queue.proto. When a router process dies, its connections break; the next try reaches another process.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import random
import time
from collections.abc import AsyncGenerator, Callable, Collection, Coroutine, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

from google.protobuf import any_pb2
from google.protobuf.message import DecodeError, Message
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status
from grpc import StatusCode, aio

from windrow import tracing
from windrow.channels import Channels, Stub
from windrow.errors import (
    ClientClosed,
    InvalidRequest,
    TlsFailed,
    Unavailable,
    Violation,
    WindrowError,
    from_code,
    shifted,
)
from windrow.limits import LimitReached, read_reached
from windrow.org_header import org_metadata
from windrow.tls import Tls
from windrow.tokens import Metadata, Refusals, Tokens
from windrow.v1 import limits_pb2

log = logging.getLogger("windrow.client")

TRY_S = 10.0
_PAUSE_FIRST_S = 0.05
_PAUSE_MAX_S = 2.0
# A router may ask for a pause of any length. A caller that retries for ever waits no longer than this time, plus
# jitter.
ASKED_S_MAX = 30.0

# By the rule for retries, a call is not made again after one of these statuses, nor after RESOURCE_EXHAUSTED without
# RetryInfo. After CANCELLED, the call is made again, because this status comes from a router that shuts down. A caller
# that cancels its own call gets no status.
FINAL = frozenset(
    {
        StatusCode.INVALID_ARGUMENT,
        StatusCode.UNIMPLEMENTED,
        StatusCode.UNAUTHENTICATED,
        StatusCode.PERMISSION_DENIED,
    }
)

# The services other than Queue also answer with these statuses. A call is not made again after them either.
ADMIN_FINAL = FINAL | {StatusCode.NOT_FOUND, StatusCode.ALREADY_EXISTS, StatusCode.FAILED_PRECONDITION}

# The ErrorInfo.domain of the routers' errors.
_DOMAIN = "windrow"
_TOO_OLD = "this is not a router, or it is older than this client: upgrade the routers first, then their clients"

_Request = TypeVar("_Request", bound=Message)
_Response = TypeVar("_Response")
_Sent = TypeVar("_Sent")
_Received = TypeVar("_Received")


class Method(Protocol[_Request, _Response]):
    def __call__(
        self, request: _Request, /, *, timeout: float | None = None, metadata: tuple[tuple[str, str], ...] | None = None
    ) -> aio.UnaryUnaryCall[_Request, _Response]: ...


class _StreamMethod(Protocol[_Sent, _Received]):
    def __call__(
        self, *, metadata: tuple[tuple[str, str], ...] | None = None
    ) -> aio.StreamStreamCall[_Sent, _Received]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFailure:
    """The status of a failed try and its details."""

    code: StatusCode
    message: str
    violations: tuple[Violation, ...] = ()
    # How long the router asked the client to wait.
    retry_after_s: float | None = None
    # One of the reasons in docs/errors.md. Empty: the error does not come from a router.
    reason: str = ""
    limit: LimitReached | None = None

    @classmethod
    def of(cls, error: aio.AioRpcError) -> CallFailure:
        found = _read_details(_details(error))
        return cls(code=error.code(), message=error.details() or error.code().name, **found._asdict())


def pause_s(failure: CallFailure, *, tries: int, luck: float, final: Collection[StatusCode] = FINAL) -> float | None:
    """Returns how long to wait before the next try, or None if there must be no further try, for example because the
    status is in `final`. `luck` is a random number, uniform in [0, 1).

    The pause is the time that the router asked for, plus exponential backoff with full jitter
    (aws.amazon.com/builders-library/timeouts-retries-and-backoff-with-jitter). If the router asked for a time, the
    jitter spans at least half of this time, because the router asks many clients at once.
    """
    if failure.code in final:
        return None
    # Without RetryInfo, this status means that the message is too large, and not that the router is full.
    if failure.code is StatusCode.RESOURCE_EXHAUSTED and failure.retry_after_s is None:
        return None
    asked_s = failure.retry_after_s or 0.0
    own_s = min(_PAUSE_MAX_S, _PAUSE_FIRST_S * 2.0 ** min(tries - 1, 10))
    return asked_s + luck * max(own_s, asked_s / 2)


def patient_pause_s(error: WindrowError, *, own_s: float) -> float:
    """Returns the pause of a caller that retries for ever: `own_s`, or longer if the router asked for that."""
    asked_s = min(error.retry_after or 0.0, ASKED_S_MAX)
    return max(own_s, asked_s * random.uniform(1.0, 1.5))


class Calls:
    """Calls to the routers behind one address. `channels`: the number of connections."""

    def __init__(
        self,
        address: str,
        *,
        channels: int = 1,
        tls: Tls | Path | str | bool | None = None,
        tokens: Tokens | None = None,
        timeout_s: float = 30.0,
        try_s: float = TRY_S,
    ) -> None:
        if not (timeout_s > 0 and try_s > 0):
            raise InvalidRequest(f"timeouts must be more than 0 s, not {timeout_s} and {try_s}")
        self.channels = Channels(address, count=channels, tls=tls, has_token=tokens is not None)
        self.address = self.channels.address
        self.timeout_s = timeout_s
        self.try_s = try_s
        self._tokens = tokens
        self._tasks: set[asyncio.Task[None]] = set()
        # The waits that close() must end. Each of them waits for something other than a router's answer.
        self._scopes: set[asyncio.Timeout] = set()
        # True when a router has answered, or when the log says already that no router answers.
        self._heard = False
        # True when a router has answered: the address and the TLS settings are then right.
        self.answered = False

    async def call(
        self,
        method: Callable[[Stub], Method[_Request, _Response]],
        request: _Request,
        *,
        timeout_s: float | None = None,
        wait_s: float = 0.0,
        before_try: Callable[[float], object] | None = None,
        final: Collection[StatusCode] = FINAL,
        final_reason: str = "",
        refusals: Collection[str] = (),
        verb: str = "",
    ) -> _Response:
        """Makes one call, with as many tries as its timeout allows. There is no further try after an error with
        `final_reason`, or after a status in `final` unless the error's reason is in `refusals`: these reasons say that
        nothing was done. `verb` is the call's name in errors, by default its method. Raises WindrowError.

        `wait_s` is for a call that asks the router to wait for jobs. It is added to the timeouts. `before_try` is
        called before each try with the time that remains of `wait_s`.
        """
        budget_s = (self.timeout_s if timeout_s is None else timeout_s) + wait_s
        verb = verb or type(request).__name__.removesuffix("Request")
        named = _metadata(getattr(request, "org", ""))
        token: Metadata = ()
        renewed = False
        began = time.monotonic()
        tries = 0
        while True:
            spent_s = time.monotonic() - began if tries else 0.0
            if self._tokens is not None:
                token = self._tokens.known
                if not token:
                    async with self._until_closed(verb):
                        token = await self._tokens.metadata(within_s=budget_s - spent_s)
                spent_s = time.monotonic() - began
            wait_left_s = max(0.0, wait_s - spent_s)
            if before_try is not None:
                before_try(wait_left_s)
            try_s = min(budget_s - spent_s, self.try_s + wait_left_s)
            tries += 1
            try:
                response = await method(self.channels.stub())(request, timeout=try_s, metadata=named + token)
                self._heard = self.answered = True
                return response
            except aio.AioRpcError as error:
                cause = error
            except asyncio.CancelledError:
                # Closing a channel cancels its calls. A cancellation by the caller is raised again.
                task = asyncio.current_task()
                if self.closed and task is not None and not task.cancelling():
                    raise self._closed_meanwhile(verb) from None
                raise
            failure = CallFailure.of(cause)
            if failure.code is StatusCode.UNAUTHENTICATED and not renewed:
                try:
                    left_s = budget_s - (time.monotonic() - began)
                    async with self._until_closed(verb):
                        renewed = self._tokens is not None and await self._tokens.renew(token, within_s=left_s)
                except ClientClosed:
                    raise
                except Exception as error:
                    none = f"no other token: {type(error).__name__}: {error}"
                    spent_s = time.monotonic() - began
                    raise self._error(verb, failure, tries=tries, spent_s=spent_s, no_retry=none) from error
                if renewed:
                    continue
            if failure.code is StatusCode.UNAVAILABLE and not failure.reason:
                async with self._until_closed(verb):
                    fault = await self.channels.tls_fault()
                if fault is not None:
                    failure = replace(failure, message=fault)
                    if not self.answered:
                        raise TlsFailed(f"{verb} at {self.address}: {fault}") from cause
            spent_s = time.monotonic() - began
            stops = FINAL if failure.reason in refusals else final
            pause = pause_s(failure, tries=tries, luck=random.random(), final=stops)
            if pause is None or spent_s + pause >= budget_s or (final_reason and failure.reason == final_reason):
                asked_s = failure.retry_after_s or 0.0
                late = pause is not None and spent_s + asked_s >= budget_s
                why = f"a retry in {asked_s:g} s would exceed the timeout of {round(budget_s, 1):g} s" if late else ""
                raise self._error(verb, failure, tries=tries, spent_s=spent_s, no_retry=why) from cause
            if not self._heard and failure.code is StatusCode.UNAVAILABLE and not failure.reason:
                # Most likely the address is wrong. Log it now, so that the user who starts the program need not wait
                # for the timeout.
                log.warning("no router answers at %s; trying again: %s", self.address, failure.message)
            self._heard = True
            await self.pause(pause, verb)

    async def pause(self, pause_s: float, verb: str = "") -> None:
        """Sleeps. Raises ClientClosed as soon as the client is closed."""
        async with self._until_closed(verb):
            await asyncio.sleep(pause_s)

    @asynccontextmanager
    async def _until_closed(self, verb: str) -> AsyncGenerator[None]:
        """A context manager. As soon as the client is closed, it ends what is awaited in the `with` block, and raises
        ClientClosed."""
        # This raises ClientClosed if the client is closed already.
        self.loop()
        # This scope never ends by itself: close() ends it.
        scope = asyncio.timeout(None)
        try:
            async with scope:
                self._scopes.add(scope)
                yield
        except TimeoutError:
            if scope.expired():
                raise self._closed_meanwhile(verb) from None
            raise
        finally:
            self._scopes.discard(scope)

    async def close(self) -> None:
        """Closes the connections, which ends the calls under way. A second close does nothing."""
        if await self.channels.close():
            now = asyncio.get_running_loop().time()
            while self._scopes:
                self._scopes.pop().reschedule(now)
            if self._tasks:
                # These tasks end soon: their calls were just cancelled, or their scopes have just ended.
                await asyncio.wait(self._tasks)

    def refuse(self) -> None:
        """Makes all later calls raise ClientClosed, and leaves the connections open. Thread-safe."""
        self.channels.closed = True

    @property
    def closed(self) -> bool:
        return self.channels.closed

    def loop(self) -> asyncio.AbstractEventLoop:
        """Returns the running event loop; see Channels.loop."""
        return self.channels.loop()

    def spawn(self, work: Coroutine[Any, Any, None], context: contextvars.Context) -> None:
        """Runs a call that several callers share, and that passes its errors to these callers. close() waits for this
        call."""
        task = asyncio.get_running_loop().create_task(work, context=context)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def token(self) -> Metadata:
        """Returns the metadata with the token for the next stream, if this client has one. Raises what the token
        function raises. Raises DeadlineExceeded if that function takes longer than a try may."""
        if self._tokens is None:
            return ()
        async with self._until_closed("Consume"):
            return await self._tokens.metadata(within_s=self.try_s)

    async def renew_token(self, refused: Metadata) -> bool:
        """Returns whether there is a token other than the refused one. If there is, the stream may be opened again.
        Raises what token() raises."""
        if self._tokens is None:
            return False
        async with self._until_closed("Consume"):
            return await self._tokens.renew(refused, within_s=self.try_s)

    def refusals(self) -> Refusals:
        """Returns a new count of refused tokens, for a caller that tries for ever."""
        return Refusals(self._tokens)

    def open(
        self, method: Callable[[Stub], _StreamMethod[_Sent, _Received]], *, org: str | None, token: Metadata = ()
    ) -> aio.StreamStreamCall[_Sent, _Received]:
        """Opens a stream for this org (None: for all orgs) over the next connection. If the stream breaks,
        stream_error() turns the cause into a WindrowError."""
        return method(self.channels.stub())(metadata=_metadata(org) + token)

    def stream_error(self, verb: str, cause: aio.AioRpcError, *, spent_s: float) -> WindrowError:
        return self._error(verb, CallFailure.of(cause), tries=1, spent_s=spent_s)

    async def explained(self, error: WindrowError) -> WindrowError:
        """Returns the error of a stream, or a better error if TLS prevents the connection."""
        if not isinstance(error, Unavailable) or error.reason or (why := await self.channels.tls_fault()) is None:
            return error
        return (Unavailable if self.answered else TlsFailed)(f"Consume at {self.address}: {why}")

    def _closed_meanwhile(self, verb: str) -> ClientClosed:
        where = f"{verb} at {self.address}" if verb else self.address
        return ClientClosed(f"{where}: the client was closed meanwhile")

    def _error(
        self, verb: str, failure: CallFailure, *, tries: int, spent_s: float, no_retry: str = ""
    ) -> WindrowError:
        """Returns the error of a call that has failed. `no_retry` says why the call is not retried, if the status does
        not show the reason."""
        effort = f"{tries} tries in {spent_s:.1f} s" if tries > 1 else f"after {spent_s:.1f} s"
        effort += f"; {no_retry}" if no_retry else ""
        why = failure.message + self._remedy(failure)
        error = from_code(
            failure.code.value[0],
            f"{verb} at {self.address}: {why} [{failure.code.name}, {effort}]",
            failure.violations,
        )
        error.retry_after = failure.retry_after_s
        error.reason = failure.reason
        error.limit = failure.limit
        error.details = why
        return error

    def _remedy(self, failure: CallFailure) -> str:
        """Returns what the user can do about an error that the router cannot explain. Returns an empty text for any
        other error."""
        if failure.code is StatusCode.UNIMPLEMENTED:
            return f"; {_TOO_OLD}"
        if failure.code is StatusCode.UNAUTHENTICATED and self._tokens is None:
            return "; give the client a token: Client(token=…), or WINDROW_TOKEN"
        if failure.code is StatusCode.UNAVAILABLE and not failure.reason and not self.answered:
            return "; does a router run there? The address comes from Client(address=…), or WINDROW_ADDRESS"
        return ""


def _metadata(org: str | None) -> tuple[tuple[str, str], ...]:
    """Returns the metadata of a call: its org, and the current trace if there is one. `org` is None for a call about
    all orgs."""
    named = () if org is None else org_metadata(org)
    trace = tracing.headers()
    return named if trace is None else named + trace


def error_of(status: Status, *, first: int = 0) -> WindrowError:
    """Returns the error for a status within an answer. `first` is added to the job indexes of the error's
    violations."""
    found = _read_details(status.details)
    error = from_code(status.code, status.message, shifted(found.violations, first) if first else found.violations)
    error.retry_after = found.retry_after_s
    error.reason = found.reason
    error.limit = found.limit
    return error


class _Details(NamedTuple):
    """The details of an error, as CallFailure has them."""

    violations: tuple[Violation, ...]
    retry_after_s: float | None
    reason: str
    limit: LimitReached | None


def _read_details(details: Iterable[any_pb2.Any]) -> _Details:
    violations: list[Violation] = []
    retry_after_s: float | None = None
    reason = ""
    limit: LimitReached | None = None
    for detail in details:
        bad, again, info, reached = BadRequest(), RetryInfo(), ErrorInfo(), limits_pb2.LimitReached()
        if detail.Unpack(bad):
            violations += [Violation(found.field, found.description) for found in bad.field_violations]
        elif detail.Unpack(again):
            retry_after_s = max(0.0, again.retry_delay.ToNanoseconds() / 1e9)
        elif detail.Unpack(info) and info.domain == _DOMAIN:
            reason = info.reason
        elif detail.Unpack(reached):
            limit = read_reached(reached)
    return _Details(tuple(violations), retry_after_s, reason, limit)


def _details(error: aio.AioRpcError) -> list[any_pb2.Any]:
    for key, value in error.trailing_metadata() or ():
        if key == "grpc-status-details-bin" and isinstance(value, bytes):
            try:
                return list(Status.FromString(value).details)
            except DecodeError:
                return []
    return []
