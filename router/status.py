"""The one table from errors to gRPC statuses, with google.rpc details that programs can read. Pure.

INVALID_ARGUMENT carries BadRequest (field violations by path), what may be retried carries RetryInfo, and
everything carries ErrorInfo with a reason in capitals.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import NamedTuple

from google.protobuf import any_pb2, duration_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2

from shard import errors
from shard.coalescing import TooManyWaiting

DOMAIN = "windrow"
# A status travels in HTTP headers, of which clients take 8 KiB: a longer one would reach them as another error.
_VIOLATIONS_BYTES_MAX = 4000
_MESSAGE_CHARS_MAX = 500
INTERNAL: int = code_pb2.INTERNAL
INVALID_ARGUMENT: int = code_pb2.INVALID_ARGUMENT
RESOURCE_EXHAUSTED: int = code_pb2.RESOURCE_EXHAUSTED


class Violation(NamedTuple):
    """What is wrong with one field of a request."""

    # From the request's root, such as jobs[3].queue.
    field: str
    description: str


class InvalidRequest(Exception):
    """The request breaks the contract; nothing was stored."""

    def __init__(self, violations: Sequence[Violation]) -> None:
        first = violations[0]
        more = f" (and {len(violations) - 1} more)" if len(violations) > 1 else ""
        super().__init__(f"{first.field}: {first.description}{more}")
        self.violations = violations


class ShuttingDown(Exception):
    """This router ends its streams, and is about to end itself."""


class RequestLate(Exception):
    """The request has not come whole in time."""

    def __init__(self, limit_s: float) -> None:
        super().__init__(f"the request has not come whole within {limit_s:g} s")


class Undecodable(Exception):
    """These bytes are no message of the contract."""

    def __init__(self, size: int) -> None:
        super().__init__(
            f"the request's {size:,} bytes are not the message that this method takes: they cannot be decoded"
        )


class RouterFull(Exception):
    """This process has as many calls inside as it takes, of the caller's org or of all."""

    def __init__(self, what: str, places_max: int) -> None:
        super().__init__(
            f"this router process takes {places_max:,} {what} at a time, and never more of one org than it has room "
            "left for others; try again, or start more processes"
        )


def status_of(error: BaseException) -> status_pb2.Status:
    """The status that tells the caller of this error. What is not in the table is INTERNAL, and says nothing of its
    inside."""
    match error:
        case InvalidRequest():
            bad = error_details_pb2.BadRequest()
            for field, description in error.violations:
                bad.field_violations.add(field=field, description=description)
                if bad.ByteSize() > _VIOLATIONS_BYTES_MAX:
                    del bad.field_violations[-1]
                    break
            return _status(code_pb2.INVALID_ARGUMENT, str(error), "INVALID_REQUEST", bad)
        case errors.RowLocked():
            return _status(code_pb2.UNAVAILABLE, str(error), "ROW_LOCKED", retry_info(error.retry_after_s))
        case errors.ClockSetBack():
            return _status(code_pb2.UNAVAILABLE, str(error), "CLOCK_SET_BACK", retry_info(error.retry_after_s))
        case errors.ShardUnavailable():
            return _status(code_pb2.UNAVAILABLE, str(error), "SHARD_UNAVAILABLE", retry_info(error.retry_after_s))
        case RequestLate():
            return _status(code_pb2.DEADLINE_EXCEEDED, str(error), "REQUEST_LATE")
        case Undecodable():
            return _status(code_pb2.INVALID_ARGUMENT, str(error), "UNDECODABLE_REQUEST")
        case RouterFull():
            return _status(code_pb2.RESOURCE_EXHAUSTED, str(error), "ROUTER_FULL", retry_info(0.5))
        case TooManyWaiting():
            return _status(code_pb2.RESOURCE_EXHAUSTED, str(error), "SHARD_BUSY", retry_info(0.5))
        case ShuttingDown():
            message = "this router process shuts down; call again to reach another"
            return _status(code_pb2.UNAVAILABLE, message, "ROUTER_SHUTS_DOWN", retry_info(0.0))
        case errors.NotOwned():
            return _status(code_pb2.UNAVAILABLE, str(error), "PLACEMENT_CHANGING", retry_info(0.2))
        case errors.UnknownQueue():
            return _status(code_pb2.NOT_FOUND, str(error), "UNKNOWN_QUEUE")
        case errors.QueueExists():
            return _status(code_pb2.ALREADY_EXISTS, str(error), "QUEUE_EXISTS")
        case errors.QueueNotEmpty():
            return _status(code_pb2.FAILED_PRECONDITION, str(error), "QUEUE_NOT_EMPTY")
        case errors.TooManyQueues():
            return _status(RESOURCE_EXHAUSTED, str(error), "TOO_MANY_QUEUES")
        case errors.UnknownShard():
            return _status(code_pb2.NOT_FOUND, str(error), "UNKNOWN_SHARD")
        case errors.BadPageToken():
            return status_of(InvalidRequest([Violation("page_token", str(error))]))
        case errors.Misconfigured():
            return _status(code_pb2.FAILED_PRECONDITION, str(error), "MISCONFIGURED")
        case asyncio.TimeoutError():
            return _status(code_pb2.DEADLINE_EXCEEDED, "the shard did not answer in time", "DEADLINE_EXCEEDED")
        case _:
            return _status(code_pb2.INTERNAL, "internal error; the router's log has the details", "INTERNAL")


def retry_info(after_s: float) -> error_details_pb2.RetryInfo:
    delay = duration_pb2.Duration(seconds=int(after_s), nanos=int(after_s % 1 * 1e9))
    return error_details_pb2.RetryInfo(retry_delay=delay)


def _status(
    code: int, message: str, reason: str, *details: error_details_pb2.BadRequest | error_details_pb2.RetryInfo
) -> status_pb2.Status:
    status = status_pb2.Status(code=code, message=message[:_MESSAGE_CHARS_MAX])
    for detail in (error_details_pb2.ErrorInfo(reason=reason, domain=DOMAIN), *details):
        packed = any_pb2.Any()
        packed.Pack(detail)
        status.details.append(packed)
    return status
