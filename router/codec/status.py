"""Maps errors to gRPC statuses, with google.rpc details that programs can read. Pure.

INVALID_ARGUMENT carries BadRequest (field violations by path). Errors that may be retried carry RetryInfo. Every error
carries ErrorInfo with a reason of errors.proto.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from google.protobuf import any_pb2, duration_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2

from router.codec.org_limits import reached_message
from shard import errors
from windrow.org_header import ORG_HEADER
from windrow.v1 import errors_pb2 as reasons
from windrow.v1 import limits_pb2

DOMAIN = "windrow"
# A status is sent in HTTP headers, and clients accept only 8 KiB of headers: a longer status would arrive as another
# error.
_VIOLATIONS_BYTES_MAX = 4000
_MESSAGE_CHARS_MAX = 500
_SHOWN_CHARS_MAX = 128
_TIMED_OUT_RETRY_S = 1.0
INTERNAL: int = code_pb2.INTERNAL
INVALID_ARGUMENT: int = code_pb2.INVALID_ARGUMENT
RESOURCE_EXHAUSTED: int = code_pb2.RESOURCE_EXHAUSTED
# The gRPC code of each reason.
CODES: dict[reasons.ErrorReason.ValueType, int] = {
    reasons.ERROR_REASON_INVALID_REQUEST: INVALID_ARGUMENT,
    reasons.ERROR_REASON_UNDECODABLE_REQUEST: INVALID_ARGUMENT,
    reasons.ERROR_REASON_MESSAGE_TOO_LARGE: INVALID_ARGUMENT,
    reasons.ERROR_REASON_ORG_MISMATCH: INVALID_ARGUMENT,
    reasons.ERROR_REASON_CREDENTIALS_MISSING: code_pb2.UNAUTHENTICATED,
    reasons.ERROR_REASON_CREDENTIALS_INVALID: code_pb2.UNAUTHENTICATED,
    reasons.ERROR_REASON_CREDENTIALS_EXPIRED: code_pb2.UNAUTHENTICATED,
    reasons.ERROR_REASON_CREDENTIALS_REVOKED: code_pb2.UNAUTHENTICATED,
    reasons.ERROR_REASON_SCOPE_MISSING: code_pb2.PERMISSION_DENIED,
    reasons.ERROR_REASON_ORG_FORBIDDEN: code_pb2.PERMISSION_DENIED,
    reasons.ERROR_REASON_QUEUE_NOT_FOUND: code_pb2.NOT_FOUND,
    reasons.ERROR_REASON_JOB_NOT_FOUND: code_pb2.NOT_FOUND,
    reasons.ERROR_REASON_QUEUE_EXISTS: code_pb2.ALREADY_EXISTS,
    reasons.ERROR_REASON_QUEUE_NOT_EMPTY: code_pb2.FAILED_PRECONDITION,
    reasons.ERROR_REASON_TOO_MANY_QUEUES: RESOURCE_EXHAUSTED,
    reasons.ERROR_REASON_TOO_MANY_RETENTIONS: RESOURCE_EXHAUSTED,
    reasons.ERROR_REASON_LIMIT_REACHED: RESOURCE_EXHAUSTED,
    reasons.ERROR_REASON_SCHEDULE_NOT_FOUND: code_pb2.NOT_FOUND,
    reasons.ERROR_REASON_SCHEDULE_EXISTS: code_pb2.ALREADY_EXISTS,
    reasons.ERROR_REASON_TOO_MANY_SCHEDULES: RESOURCE_EXHAUSTED,
    reasons.ERROR_REASON_WORKFLOW_NOT_FOUND: code_pb2.NOT_FOUND,
    reasons.ERROR_REASON_WORKFLOW_EXISTS: code_pb2.ALREADY_EXISTS,
    reasons.ERROR_REASON_NODE_NOT_FOUND: code_pb2.NOT_FOUND,
    reasons.ERROR_REASON_NODE_ENDED: code_pb2.FAILED_PRECONDITION,
    reasons.ERROR_REASON_WORKFLOW_ENDED: code_pb2.FAILED_PRECONDITION,
    reasons.ERROR_REASON_LEASE_ENDED: code_pb2.FAILED_PRECONDITION,
    reasons.ERROR_REASON_NODE_EXISTS: code_pb2.ALREADY_EXISTS,
    reasons.ERROR_REASON_TOO_MANY_NODES: RESOURCE_EXHAUSTED,
    reasons.ERROR_REASON_NOT_SIGNALLED: code_pb2.FAILED_PRECONDITION,
    reasons.ERROR_REASON_NOT_RETRYABLE: code_pb2.FAILED_PRECONDITION,
    reasons.ERROR_REASON_SHARD_NOT_FOUND: code_pb2.NOT_FOUND,
    reasons.ERROR_REASON_SHARD_UNAVAILABLE: code_pb2.UNAVAILABLE,
    reasons.ERROR_REASON_DISK_FULL: code_pb2.UNAVAILABLE,
    reasons.ERROR_REASON_ROW_LOCKED: code_pb2.UNAVAILABLE,
    reasons.ERROR_REASON_CLOCK_SET_BACK: code_pb2.UNAVAILABLE,
    reasons.ERROR_REASON_PLACEMENT_CHANGING: code_pb2.UNAVAILABLE,
    reasons.ERROR_REASON_SHARD_BUSY: RESOURCE_EXHAUSTED,
    reasons.ERROR_REASON_MISCONFIGURED: code_pb2.FAILED_PRECONDITION,
    reasons.ERROR_REASON_ROUTER_FULL: RESOURCE_EXHAUSTED,
    reasons.ERROR_REASON_TOO_MANY_CHANGES: RESOURCE_EXHAUSTED,
    reasons.ERROR_REASON_TOKEN_KEYS_UNAVAILABLE: code_pb2.UNAVAILABLE,
    reasons.ERROR_REASON_ROUTER_SHUTTING_DOWN: code_pb2.UNAVAILABLE,
    reasons.ERROR_REASON_STREAM_EXPIRED: code_pb2.UNAVAILABLE,
    reasons.ERROR_REASON_REQUEST_LATE: code_pb2.DEADLINE_EXCEEDED,
    reasons.ERROR_REASON_CALL_TIMED_OUT: code_pb2.DEADLINE_EXCEEDED,
    reasons.ERROR_REASON_INTERNAL_ERROR: INTERNAL,
}


_Detail: TypeAlias = error_details_pb2.BadRequest | error_details_pb2.RetryInfo | limits_pb2.LimitReached


class Violation(NamedTuple):
    """What is wrong with one field of a request."""

    # The path from the request's root, such as jobs[3].template.queue.
    field: str
    description: str


class InvalidRequest(Exception):
    """The request breaks the contract; nothing was stored."""

    def __init__(self, violations: Sequence[Violation]) -> None:
        first = violations[0]
        more = f" (and {len(violations) - 1} more)" if len(violations) > 1 else ""
        super().__init__(f"{first.field}: {first.description}{more}")
        self.violations = violations


class OrgMismatch(InvalidRequest):
    """The metadata windrow-org names another org than the request. `field`: the path of the request's org."""

    def __init__(self, field: str, org: str, header: str | bytes) -> None:
        # Neither org has been checked yet, so both may have any length.
        told, named = org[:_SHOWN_CHARS_MAX], header[:_SHOWN_CHARS_MAX]
        super().__init__([Violation(field, f"is {told!r}, but the metadata {ORG_HEADER} says {named!r}")])


class AccessRefused(Exception):
    """The caller did not prove who it is, or may not make this call. This is the base class of the errors of
    router/gate/auth. The message holds no secret."""

    reason: reasons.ErrorReason.ValueType


class KeysUnavailable(Exception):
    """The router has no keys to verify tokens with. This says nothing about the caller's token."""

    retry_after_s = 5.0


class ShuttingDown(Exception):
    """This router process drains: it ends its streams and takes no new calls."""

    retry_after_s = 0.0

    def __init__(self) -> None:
        super().__init__("this router process is shutting down; call again to reach another one")


class StreamExpired(Exception):
    """This stream has been open for as long as a stream may be."""

    retry_after_s = 0.0

    def __init__(self) -> None:
        super().__init__("this router ends streams after some minutes; open another one")


class RequestLate(Exception):
    """The request, or the first message of a stream, did not arrive completely in time."""

    def __init__(self, limit_s: float, *, what: str = "the request") -> None:
        super().__init__(f"{what} did not arrive completely within {limit_s:g} s")


class MessageTooLarge(Exception):
    """A request or a message of a stream has more bytes than the contract allows. It was not decoded. `request_id`: the
    id by which a message of a stream is answered; 0 if there is none."""

    def __init__(self, size: int, limit: int, request_id: int = 0) -> None:
        super().__init__(
            f"the message has {size:,} bytes, and at most {limit:,} are allowed: send its jobs or leases in several "
            "messages"
        )
        self.request_id = request_id


class Undecodable(Exception):
    """The request's bytes are not a valid protobuf message of the method's type."""

    def __init__(self, size: int) -> None:
        super().__init__(
            f"the request of {size:,} bytes cannot be decoded: it is not the protobuf message that this method takes"
        )


class RouterFull(Exception):
    """This process can take no more calls or bytes, in total or from the caller's org or connection."""

    retry_after_s = 0.5

    def __init__(self, what: str, limit: int) -> None:
        super().__init__(
            f"this router process takes {limit:,} {what} at a time, and from one org never more than it has room left "
            "for others; try again, or start more processes"
        )


class TooManyChanges(Exception):
    """The callers of an org make audited changes faster than one org may."""

    def __init__(self, org: str, per_s: float, retry_after_s: float) -> None:
        super().__init__(
            f"org {org!r} makes more than {per_s:g} changes a second through this router process, each of which the "
            "audit log keeps: change more jobs in each call"
        )
        self.retry_after_s = retry_after_s


# The reason that is sent with each error. A subclass without a row has the reason of its nearest base class with a row.
# An error with `retry_after_s` is sent with RetryInfo.
_REASONS: dict[type[BaseException], reasons.ErrorReason.ValueType] = {
    InvalidRequest: reasons.ERROR_REASON_INVALID_REQUEST,
    OrgMismatch: reasons.ERROR_REASON_ORG_MISMATCH,
    Undecodable: reasons.ERROR_REASON_UNDECODABLE_REQUEST,
    MessageTooLarge: reasons.ERROR_REASON_MESSAGE_TOO_LARGE,
    RequestLate: reasons.ERROR_REASON_REQUEST_LATE,
    RouterFull: reasons.ERROR_REASON_ROUTER_FULL,
    TooManyChanges: reasons.ERROR_REASON_TOO_MANY_CHANGES,
    KeysUnavailable: reasons.ERROR_REASON_TOKEN_KEYS_UNAVAILABLE,
    ShuttingDown: reasons.ERROR_REASON_ROUTER_SHUTTING_DOWN,
    StreamExpired: reasons.ERROR_REASON_STREAM_EXPIRED,
    TimeoutError: reasons.ERROR_REASON_CALL_TIMED_OUT,
    errors.TooManyWaiting: reasons.ERROR_REASON_SHARD_BUSY,
    errors.ShardUnavailable: reasons.ERROR_REASON_SHARD_UNAVAILABLE,
    errors.RowLocked: reasons.ERROR_REASON_ROW_LOCKED,
    errors.PlacementChanging: reasons.ERROR_REASON_PLACEMENT_CHANGING,
    errors.ClockSetBack: reasons.ERROR_REASON_CLOCK_SET_BACK,
    errors.DiskFull: reasons.ERROR_REASON_DISK_FULL,
    errors.UnknownQueue: reasons.ERROR_REASON_QUEUE_NOT_FOUND,
    errors.UnknownJob: reasons.ERROR_REASON_JOB_NOT_FOUND,
    errors.QueueExists: reasons.ERROR_REASON_QUEUE_EXISTS,
    errors.QueueNotEmpty: reasons.ERROR_REASON_QUEUE_NOT_EMPTY,
    errors.TooManyQueues: reasons.ERROR_REASON_TOO_MANY_QUEUES,
    errors.TooManyRetentions: reasons.ERROR_REASON_TOO_MANY_RETENTIONS,
    errors.LimitReached: reasons.ERROR_REASON_LIMIT_REACHED,
    errors.TooManyQuarantines: reasons.ERROR_REASON_LIMIT_REACHED,
    errors.TooManyLimits: reasons.ERROR_REASON_LIMIT_REACHED,
    errors.TooManyWeights: reasons.ERROR_REASON_LIMIT_REACHED,
    errors.UnknownSchedule: reasons.ERROR_REASON_SCHEDULE_NOT_FOUND,
    errors.ScheduleExists: reasons.ERROR_REASON_SCHEDULE_EXISTS,
    errors.TooManySchedules: reasons.ERROR_REASON_TOO_MANY_SCHEDULES,
    errors.UnknownWorkflow: reasons.ERROR_REASON_WORKFLOW_NOT_FOUND,
    errors.WorkflowExists: reasons.ERROR_REASON_WORKFLOW_EXISTS,
    errors.UnknownNode: reasons.ERROR_REASON_NODE_NOT_FOUND,
    errors.NodeEnded: reasons.ERROR_REASON_NODE_ENDED,
    errors.NotSignalled: reasons.ERROR_REASON_NOT_SIGNALLED,
    errors.WorkflowEnded: reasons.ERROR_REASON_WORKFLOW_ENDED,
    errors.LeaseEnded: reasons.ERROR_REASON_LEASE_ENDED,
    errors.NodeExists: reasons.ERROR_REASON_NODE_EXISTS,
    errors.TooManyNodes: reasons.ERROR_REASON_TOO_MANY_NODES,
    errors.NotRetryable: reasons.ERROR_REASON_NOT_RETRYABLE,
    errors.UnknownShard: reasons.ERROR_REASON_SHARD_NOT_FOUND,
    errors.Misconfigured: reasons.ERROR_REASON_MISCONFIGURED,
}


def status_of(error: BaseException) -> status_pb2.Status:
    """Returns the status for an error. An error that this module does not know becomes INTERNAL, and the status does
    not tell its message."""
    match error:
        case errors.BadSchedule():
            return status_of(InvalidRequest([Violation(error.field, error.description)]))
        case errors.NodeMayWaitForJob():
            return status_of(InvalidRequest([Violation("nodes", str(error))]))
        case errors.BadPageToken():
            return status_of(InvalidRequest([Violation("page_token", str(error))]))
        case AccessRefused():
            return _status(error.reason, str(error))
        case _:
            reason = next((_REASONS[kind] for kind in type(error).__mro__ if kind in _REASONS), None)
    if reason is None:
        return _status(reasons.ERROR_REASON_INTERNAL_ERROR, "internal error; the router's log has the details")
    details: list[_Detail] = []
    message, retry_after_s = str(error), getattr(error, "retry_after_s", None)
    match error:
        case InvalidRequest():
            details.append(_bad_request(error))
        case errors.LimitReached():
            details.append(reached_message(error))
        case TimeoutError():
            message, retry_after_s = "the shard did not answer in time", _TIMED_OUT_RETRY_S
        case _:
            pass
    if retry_after_s is not None:
        details.append(retry_info(retry_after_s))
    return _status(reason, message, *details)


def _bad_request(error: InvalidRequest) -> error_details_pb2.BadRequest:
    bad = error_details_pb2.BadRequest()
    for field, description in error.violations:
        bad.field_violations.add(field=field, description=description)
        if bad.ByteSize() > _VIOLATIONS_BYTES_MAX:
            del bad.field_violations[-1]
            break
    return bad


def retry_info(after_s: float) -> error_details_pb2.RetryInfo:
    delay = duration_pb2.Duration(seconds=int(after_s), nanos=int(after_s % 1 * 1e9))
    return error_details_pb2.RetryInfo(retry_delay=delay)


def _status(
    reason: reasons.ErrorReason.ValueType,
    message: str,
    *details: _Detail,
) -> status_pb2.Status:
    status = status_pb2.Status(code=CODES[reason], message=message[:_MESSAGE_CHARS_MAX])
    name = reasons.ErrorReason.Name(reason).removeprefix("ERROR_REASON_")
    for detail in (error_details_pb2.ErrorInfo(reason=name, domain=DOMAIN), *details):
        packed = any_pb2.Any()
        packed.Pack(detail)
        status.details.append(packed)
    return status
