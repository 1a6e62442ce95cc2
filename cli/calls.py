"""Makes calls to a router: over one channel, and with a deadline for every call. The message of every failure is one
sentence that says what to do."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Generator, Iterator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Protocol, TypeVar, cast

# gRPC's log lines would mix with our output, and the errors have the same information.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2

from cli import profiles
from cli.exits import CommandFailed, ExitCode, RequestRefused
from windrow import errors, handshake, tls
from windrow.address import address_fault, split_scheme, stays_here, uses_proxy
from windrow.limits import LimitReached, read_reached
from windrow.org_header import org_metadata
from windrow.tls import Tls
from windrow.v1 import limits_pb2, server_pb2
from windrow.v1.admin_pb2_grpc import AdminStub
from windrow.v1.cluster_pb2_grpc import ClusterStub
from windrow.v1.queue_pb2_grpc import QueueStub
from windrow.v1.schedules_pb2_grpc import SchedulesStub
from windrow.v1.workflows_pb2_grpc import WorkflowsStub

if TYPE_CHECKING:
    from windrow import SyncClient

_Request = TypeVar("_Request")
_Response = TypeVar("_Response")
# The contract's limit on the items of a page.
_PAGE_MAX = 1000
_DETAILS = "grpc-status-details-bin"
# _WITHIN: the fields that hold one submessage. The names of options leave out these fields, and also lists of
# submessages.
# _TYPED: fields, or paths of fields, whose option or argument has another name.
_WITHIN = ("template", "dedup", "failure", "config", "spec", "job")
_TYPED = {
    "org": "ORG",
    "queue": "QUEUE",
    "queues": "QUEUE",
    "kind": "KIND",
    "payload": "PAYLOAD",
    "ids": "ID",
    "name": "NAME",
    "node": "NODE",
    "weight": "WEIGHT",
    "timing": "--cron / --every / --at",
    "interval": "--per",
    "spec.interval": "--every",
    "time_zone": "--tz",
    "visibility_window": "--window",
    "max_jobs": "--max",
    # The fields of a Failure.
    "message": "--error",
    # The fields of a Dedup.
    "key": "--dedup-key",
    "window": "--dedup-window",
    "while_live": "--while-live",
    "attributes": "--attribute",
    "states": "--state",
}
_CODES = {
    grpc.StatusCode.INVALID_ARGUMENT: ExitCode.USAGE,
    grpc.StatusCode.OUT_OF_RANGE: ExitCode.USAGE,
    grpc.StatusCode.NOT_FOUND: ExitCode.NOT_FOUND,
    grpc.StatusCode.ALREADY_EXISTS: ExitCode.REFUSED,
    grpc.StatusCode.FAILED_PRECONDITION: ExitCode.REFUSED,
    grpc.StatusCode.ABORTED: ExitCode.REFUSED,
    grpc.StatusCode.PERMISSION_DENIED: ExitCode.REFUSED,
    grpc.StatusCode.UNAUTHENTICATED: ExitCode.REFUSED,
}


class _PageRequest(Protocol):
    page_size: int
    page_token: str


class _Page(Protocol):
    next_page_token: str


_AnyPageRequest = TypeVar("_AnyPageRequest", bound=_PageRequest)
_AnyPage = TypeVar("_AnyPage", bound=_Page)


class TooMuch(CommandFailed):
    """A router refused a call that asks for too much: trying the call again does not help. `limit`: the limit that the
    call exceeds, if a limit is the reason."""

    def __init__(self, message: str, *, limit: LimitReached | None) -> None:
        super().__init__(message, ExitCode.REFUSED)
        self.limit = limit


class Router:
    """A connection to the routers at one address. Every call raises CommandFailed. `why_not` returns the reason for
    which TLS prevents a connection, or None if TLS does not prevent it."""

    def __init__(
        self,
        address: str,
        channel: grpc.Channel,
        timeout: timedelta,
        *,
        token: str | None,
        why_not: Callable[[], str | None],
    ) -> None:
        self._address = address
        self._token_metadata = () if token is None else (("authorization", f"Bearer {token}"),)
        self._why_not = why_not
        self._timeout_s = timeout.total_seconds()
        self.queue = QueueStub(channel)
        self.admin = AdminStub(channel)
        self.cluster = ClusterStub(channel)
        self.schedules = SchedulesStub(channel)
        self.workflows = WorkflowsStub(channel)
        self._check_health: grpc.UnaryUnaryMultiCallable[
            health_pb2.HealthCheckRequest, health_pb2.HealthCheckResponse
        ] = channel.unary_unary(
            "/grpc.health.v1.Health/Check",
            request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=health_pb2.HealthCheckResponse.FromString,
        )

    def call(
        self, method: grpc.UnaryUnaryMultiCallable[_Request, _Response], request: _Request, *, wait_s: float = 0.0
    ) -> _Response:
        """Makes a call. `wait_s`: how long the request lets the router wait for jobs. This time is added to the call's
        timeout."""
        try:
            return method(request, timeout=self._timeout_s + wait_s, metadata=self._metadata(request))
        except grpc.RpcError as error:
            raise self._failed(error, wait_s) from error

    def pages(
        self, method: grpc.UnaryUnaryMultiCallable[_AnyPageRequest, _AnyPage], request: _AnyPageRequest
    ) -> Iterator[_AnyPage]:
        """Calls a method that returns a list, for one page after another, until the list ends. Changes the request."""
        request.page_size = _PAGE_MAX
        while True:
            page = self.call(method, request)
            yield page
            if not page.next_page_token:
                return
            request.page_token = page.next_page_token

    def stream(
        self, method: grpc.UnaryStreamMultiCallable[_Request, _Response], request: _Request
    ) -> Iterator[_Response]:
        try:
            yield from method(request, timeout=self._timeout_s, metadata=self._metadata(request))
        except grpc.RpcError as error:
            raise self._failed(error) from error

    def serves(self) -> bool:
        """Returns whether the router reports that it serves."""
        answer = self.call(self._check_health, health_pb2.HealthCheckRequest())
        return answer.status == health_pb2.HealthCheckResponse.SERVING

    def _metadata(self, request: object) -> tuple[tuple[str, str], ...]:
        org = getattr(request, "org", "")
        return self._token_metadata + (org_metadata(org) if org else ())

    def _failed(self, error: grpc.RpcError, wait_s: float = 0.0) -> CommandFailed:
        # The error that a call raises is also a `grpc.Call`.
        call = cast("grpc.Call", error)
        code, message = call.code(), call.details() or ""
        details = _details(call)
        if code is grpc.StatusCode.UNAVAILABLE and details is None:
            if why := self._why_not():
                return CommandFailed(f"no connection to {self._address}: {why}", ExitCode.UNAVAILABLE)
            return CommandFailed(
                # The reason is at the end of gRPC's message.
                f"no router at {self._address} ({message.rpartition(': ')[2].strip('[]') or 'no answer'}): "
                "start one with ./run up, or set WINDROW_ADDRESS",
                ExitCode.UNAVAILABLE,
            )
        if code is grpc.StatusCode.DEADLINE_EXCEEDED:
            return CommandFailed(
                f"no answer from {self._address} within {self._timeout_s + wait_s:g} s: "
                "try again, or allow more with --timeout",
                ExitCode.UNAVAILABLE,
                particulars=[message] if details is not None else [],
            )
        if code is grpc.StatusCode.UNIMPLEMENTED:
            return CommandFailed(
                f"the server at {self._address} does not know this call: it is not a router, or older than this "
                "command; upgrade the routers first",
                ExitCode.UNAVAILABLE,
            )
        if code is grpc.StatusCode.UNAUTHENTICATED:
            return CommandFailed(f"{message}; {profiles.where_tokens_are()}", ExitCode.REFUSED)
        retry_s = None if details is None else _retry_after_s(details)
        if retry_s is not None:
            # Some messages already say when to try again.
            message += "" if "try again in" in message else f"; try again in {retry_s:g} s"
        elif code is grpc.StatusCode.RESOURCE_EXHAUSTED:
            return TooMuch(message or code.name, limit=None if details is None else _limit_reached(details))
        if violations := _violations(details):
            return _refused(violations)
        return CommandFailed(message or code.name, _CODES.get(code, ExitCode.UNAVAILABLE))


@contextlib.contextmanager
def connect(address: str, timeout: timedelta) -> Generator[Router, None, None]:
    """Yields a connection, which the first call opens. Closes it at the end."""
    address, chosen = _route(address)
    options: list[tuple[str, int | str]] = [
        ("grpc.max_receive_message_length", -1),
        ("grpc.enable_http_proxy", int(uses_proxy(address))),
    ]
    pem = None
    if chosen is None:
        opened = grpc.insecure_channel(address, options=options)
    else:
        try:
            pem = tls.read(chosen)
        except errors.InvalidRequest as error:
            raise CommandFailed(str(error), ExitCode.USAGE) from error
        if chosen.server_name is not None:
            options.append(("grpc.ssl_target_name_override", chosen.server_name))
        opened = grpc.secure_channel(address, tls.credentials(pem), options=options)
    with opened as channel:
        yield Router(
            address,
            channel,
            timeout,
            token=profiles.token_of_calls(),
            why_not=lambda: handshake.fault(address, chosen, pem),
        )


def _route(address: str) -> tuple[str, Tls | None]:
    """Returns HOST:PORT, and how to connect to this address. Raises CommandFailed."""
    address, secure = split_scheme(address)
    if fault := address_fault(address):
        raise CommandFailed(fault, ExitCode.USAGE)
    try:
        chosen = profiles.tls(secure=secure)
    except errors.InvalidRequest as error:
        raise CommandFailed(str(error), ExitCode.USAGE) from error
    if chosen is None and profiles.token_of_calls() and not stays_here(address):
        raise CommandFailed(
            f"the token would go to {address} in plain text: write the address as grpcs://{address}, or name the CA of "
            "the router's certificate (WINDROW_TLS_CA)",
            ExitCode.USAGE,
        )
    return address, chosen


@contextlib.contextmanager
def connect_client(address: str, org: str, timeout: timedelta) -> Generator[SyncClient, None, None]:
    """Yields the Python client, for commands that make many calls, because the client retries calls. The client's
    errors become CommandFailed."""
    # Import here: an import at the top of the module would make the start of every command a third longer.
    from windrow import SyncClient

    with connect(address, timeout) as router:
        # Make one call without the client first: if no router runs, the client would try for the whole timeout.
        router.call(router.queue.GetServerInfo, server_pb2.GetServerInfoRequest())
    try:
        host_and_port, chosen = _route(address)
        token = profiles.token_of_calls()
        with SyncClient(host_and_port, org=org, timeout=timeout, tls=chosen or False, token=token) as client:
            yield client
    except errors.WindrowError as error:
        raise _failure(error) from error


def _failure(error: errors.WindrowError) -> CommandFailed:
    match error:
        case errors.InvalidRequest() if error.violations:
            return _refused(error.violations)
        case errors.Unauthenticated():
            return CommandFailed(f"{error.details or error}; {profiles.where_tokens_are()}", ExitCode.REFUSED)
        case errors.InvalidRequest():
            code = ExitCode.USAGE
        case errors.NotFound():
            code = ExitCode.NOT_FOUND
        case errors.AlreadyExists() | errors.FailedPrecondition() | errors.PermissionDenied():
            code = ExitCode.REFUSED
        case errors.ResourceExhausted(retry_after=None):
            code = ExitCode.REFUSED
        case _:
            return CommandFailed(str(error), ExitCode.UNAVAILABLE)
    # Leave out which call failed and how often it was tried, because that does not help a user who made a mistake.
    return CommandFailed(error.details or str(error), code)


def _details(error: grpc.Call) -> status_pb2.Status | None:
    """Returns the error details of a router; None if the error does not come from a router."""
    for key, value in error.trailing_metadata() or ():
        if key == _DETAILS and isinstance(value, bytes):
            with contextlib.suppress(DecodeError):
                return status_pb2.Status.FromString(value)
    return None


def _refused(violations: Sequence[tuple[str, str]]) -> RequestRefused:
    particulars = [f"{as_typed(field)}: {description}" for field, description in violations]
    return RequestRefused(violations, particulars=particulars)


def _violations(details: status_pb2.Status | None) -> list[tuple[str, str]]:
    bad = error_details_pb2.BadRequest()
    return [
        (violation.field, violation.description)
        for detail in (details.details if details is not None else ())
        if detail.Unpack(bad)
        for violation in bad.field_violations
    ]


def as_typed(field: str) -> str:
    """Returns the command's argument or option for a field of the request. For example, returns --retry for
    jobs[0].template.retry.exponential.max_delay."""
    parts = [part.partition("[") for part in field.split(".")]
    outer = (part for part in parts[:-1] if part[0] not in _WITHIN and not part[2][:1].isdigit())
    name, _, index = next(outer, parts[-1])
    if name in ("lease", "leases"):
        # Leases are bytes, so violations do not quote them. Name the lease by its position.
        _, _, index = parts[0]
        return f"LEASE number {int(index.rstrip(']')) + 1}"
    return _TYPED.get(field) or _TYPED.get(name) or f"--{name.replace('_', '-')}"


def _limit_reached(details: status_pb2.Status) -> LimitReached | None:
    reached = limits_pb2.LimitReached()
    return next((read_reached(reached) for detail in details.details if detail.Unpack(reached)), None)


def _retry_after_s(details: status_pb2.Status) -> float | None:
    info = error_details_pb2.RetryInfo()
    for detail in details.details:
        if detail.Unpack(info):
            return float(info.retry_delay.ToMilliseconds()) / 1000
    return None
