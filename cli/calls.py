"""Calls to a router: one channel, a deadline on every call, and every failure as one sentence that says what to do."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Generator, Iterator
from datetime import timedelta
from typing import TypeVar, cast

# Its own log lines would stand between ours; what it has to say is in the error.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2

from cli.exits import CommandFailed, ExitCode
from windrow.address import fault_of
from windrow.v1.admin_pb2_grpc import AdminStub
from windrow.v1.queue_pb2_grpc import QueueStub

_Request = TypeVar("_Request")
_Response = TypeVar("_Response")
_LOOPBACK = re.compile(r"localhost|127\.[0-9.]+|\[::1\]")
_DETAILS = "grpc-status-details-bin"
# Messages within a request, and the fields that are not options of the same name.
_WITHIN = ("jobs", "acks", "nacks", "config")
_TYPED = {
    "org": "ORG",
    "queue": "QUEUE",
    "queues": "QUEUE",
    "kind": "KIND",
    "payload": "PAYLOAD",
    "ids": "ID",
    "visibility_window": "--window",
    "max_jobs": "--max",
    "attributes": "--attribute",
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


class Router:
    """A connection to the routers at one address. Every call raises CommandFailed."""

    def __init__(self, address: str, channel: grpc.Channel, timeout: timedelta) -> None:
        self._address = address
        self._timeout_s = timeout.total_seconds()
        self.queue = QueueStub(channel)
        self.admin = AdminStub(channel)
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
        """`wait_s`: how long the router was asked to wait, on top of what a call may take."""
        try:
            return method(request, timeout=self._timeout_s + wait_s)
        except grpc.RpcError as error:
            raise self._failed(error, wait_s) from error

    def stream(
        self, method: grpc.UnaryStreamMultiCallable[_Request, _Response], request: _Request
    ) -> Iterator[_Response]:
        try:
            yield from method(request, timeout=self._timeout_s)
        except grpc.RpcError as error:
            raise self._failed(error) from error

    def serves(self) -> bool:
        """What the router says of its own health."""
        answer = self.call(self._check_health, health_pb2.HealthCheckRequest())
        return answer.status == health_pb2.HealthCheckResponse.SERVING

    def _failed(self, error: grpc.RpcError, wait_s: float = 0.0) -> CommandFailed:
        # What a call raises is both.
        call = cast("grpc.Call", error)
        code, message = call.code(), call.details() or ""
        details = _details(call)
        if code is grpc.StatusCode.UNAVAILABLE and details is None:
            return CommandFailed(
                # Of what gRPC says the end is the reason, and the rest is how it got there.
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
                f"what answers at {self._address} does not know this call: it is no router, or older than this "
                "command; upgrade the routers first",
                ExitCode.UNAVAILABLE,
            )
        if details is not None and (retry_s := _retry_after_s(details)) is not None:
            message += f"; try again in {retry_s:g} s"
        violations = _violations(details)
        return CommandFailed(
            "the router refused the request" if violations else message or code.name,
            _CODES.get(code, ExitCode.UNAVAILABLE),
            particulars=violations,
        )


@contextlib.contextmanager
def connect(address: str, timeout: timedelta) -> Generator[Router, None, None]:
    """A connection, made by the first call and closed at the end of the scope."""
    if fault := fault_of(address):
        raise CommandFailed(fault, ExitCode.USAGE)
    host, _, _ = address.rpartition(":")
    options = [
        ("grpc.max_receive_message_length", -1),
        # A proxy that the environment names leads out of this machine.
        ("grpc.enable_http_proxy", 0 if _LOOPBACK.fullmatch(host) else 1),
    ]
    with grpc.insecure_channel(address, options=options) as channel:
        yield Router(address, channel, timeout)


def _details(error: grpc.Call) -> status_pb2.Status | None:
    """What a router says of its error beyond the sentence; None where no router said it."""
    for key, value in error.trailing_metadata() or ():
        if key == _DETAILS and isinstance(value, bytes):
            with contextlib.suppress(DecodeError):
                return status_pb2.Status.FromString(value)
    return None


def _violations(details: status_pb2.Status | None) -> list[str]:
    bad = error_details_pb2.BadRequest()
    return [
        f"{_as_typed(violation.field)}: {violation.description}"
        for detail in (details.details if details is not None else ())
        if detail.Unpack(bad)
        for violation in bad.field_violations
    ]


def _as_typed(field: str) -> str:
    """The argument or option that a field was given by: --retry for jobs[0].retry.exponential.max_delay."""
    parts = [part.partition("[") for part in field.split(".")]
    name, _, index = next((part for part in parts if part[0] not in _WITHIN), parts[-1])
    if name in ("lease", "leases"):
        # They are no text, and so not in what is said of them.
        _, _, index = parts[0]
        return f"LEASE number {int(index.rstrip(']')) + 1}"
    return _TYPED.get(name) or f"--{name.replace('_', '-')}"


def _retry_after_s(details: status_pb2.Status) -> float | None:
    info = error_details_pb2.RetryInfo()
    for detail in details.details:
        if detail.Unpack(info):
            return float(info.retry_delay.ToMilliseconds()) / 1000
    return None
