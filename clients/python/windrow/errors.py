"""The client's errors, as one tree of classes. They do not depend on gRPC's classes: calls.py converts gRPC's errors.

    WindrowError
    ├── InvalidRequest        correct the request: .violations names the fields; nothing was stored
    │   └── InvalidJob        correct a job in the request
    ├── AlreadyExists         the thing to create exists already
    ├── NotFound              this org has no such thing
    ├── FailedPrecondition    the current state does not allow this
    ├── PermissionDenied      the caller may not do this: ask an administrator for a key that allows it
    │   └── Unauthenticated   the router does not know the caller: give the client a valid token
    ├── TlsFailed             no connection, because of TLS: correct the address, tls= or the certificates
    ├── RouterTooOld          the router does not know this call: upgrade the routers first, then their clients
    ├── Unavailable           no router or shard answered; try again later, after .retry_after seconds if set
    ├── ResourceExhausted     too much at once: try again after .retry_after seconds; if that is None, send less
    ├── DeadlineExceeded      the time ran out; the call may have taken effect: try again with the same ids
    ├── RouterError           the router failed with any other status: INTERNAL, UNKNOWN, ...
    └── ClientClosed          this client was closed, or belongs to another event loop or process

Retry and Kill are not errors: a handler raises them to choose what happens to its job (outcomes.py).
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Generator, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from windrow.limits import LimitReached

Span = timedelta | float
"""A length of time: a timedelta, or seconds."""


class Violation(NamedTuple):
    """One fault in a request. `field` is a path from the request's root, such as `jobs[3].template.queue`."""

    field: str
    description: str


class WindrowError(Exception):
    """Any failure of a call.

    `retry_after`: the seconds that the router asked to wait, or None. `reason`: why the call failed, for programs, such
    as "SHARD_UNAVAILABLE" (docs/errors.md); empty if the error does not come from a router. `limit`: the limit that had
    no room for the jobs, or None. `details`: the router's message without the call and its tries, to be shown to
    people; empty if the error is not about one call. `made_ids`: the ids that the call sent: the job's id for enqueue,
    the request_id for trigger_schedule, the new_ids for restore_jobs. The failed call may have taken effect. A second
    call with these ids does not repeat what the first call has done.
    """

    retry_after: float | None = None
    reason: str = ""
    limit: LimitReached | None = None
    details: str = ""
    made_ids: Sequence[str] = ()


class InvalidRequest(WindrowError):
    """The request can never succeed as it is. Nothing was stored."""

    def __init__(self, message: str, violations: Iterable[Violation] = ()) -> None:
        super().__init__(message)
        self.violations = tuple(violations)


class InvalidJob(InvalidRequest):
    """A job in the request can never be stored as it is. No job was stored, unless the request was independent."""


class AlreadyExists(WindrowError):
    """The thing to create exists already."""


class NotFound(WindrowError):
    """This org has no such thing."""


class FailedPrecondition(WindrowError):
    """The current state does not allow the call."""


class PermissionDenied(WindrowError):
    """The caller may not do this: its token is for another org, or lacks a scope."""


class Unauthenticated(PermissionDenied):
    """The call has no token, or its token is wrong, expired or revoked."""


class TlsFailed(WindrowError):
    """The settings of client and router allow no connection. One speaks TLS and the other does not, or one does not
    accept the other's certificate. The message says what is wrong, and what to do."""


class RouterTooOld(WindrowError):
    """The router does not know this call."""


class Unavailable(WindrowError):
    """No router could be reached, or the router could not reach the org's shard."""


class ResourceExhausted(WindrowError):
    """The router is full, the shard is busy, the message is larger than the router accepts, the org would have too many
    queues or schedules, for example, or the org has reached a limit of what it may enqueue (`limit`)."""


class DeadlineExceeded(WindrowError):
    """The time ran out. The call may have taken effect; trying the call again with the same ids is safe."""


class RouterError(WindrowError):
    """Any other status; the message names it."""


class ClientClosed(WindrowError):
    """The client cannot be used: it was closed, or made in another event loop or before a fork."""


# A retry cannot help after these errors, so they end a worker. After any other error, a worker connects again.
FATAL = (InvalidRequest, PermissionDenied, TlsFailed, RouterTooOld, ClientClosed)
# A later retry may succeed without anybody's help.
TRANSIENT = (Unavailable, ResourceExhausted, DeadlineExceeded, RouterError)

# The error class for each google.rpc.Code. Any other code becomes a RouterError.
_BY_CODE: dict[int, type[WindrowError]] = {
    4: DeadlineExceeded,
    5: NotFound,
    6: AlreadyExists,
    7: PermissionDenied,
    8: ResourceExhausted,
    9: FailedPrecondition,
    10: Unavailable,
    12: RouterTooOld,
    14: Unavailable,
    16: Unauthenticated,
}
_INVALID_ARGUMENT = 3
_IN_JOB = re.compile(r"jobs\[(\d+)\]")
# Matches the path of one part of a shared call. The parts may come from different callers.
_IN_PART = re.compile(r"(?:jobs|acks)\[(\d+)\]")


def from_code(code: int, message: str, violations: Iterable[Violation] = ()) -> WindrowError:
    """Returns the error for a google.rpc.Code."""
    if code == _INVALID_ARGUMENT:
        found = tuple(violations)
        # The message often contains the first violation already.
        unmentioned = [f"{field}: {description}" for field, description in found if field not in message]
        if len(unmentioned) > 5:
            unmentioned[5:] = [f"and {len(unmentioned) - 5} more"]
        text = f"{message} ({'; '.join(unmentioned)})" if unmentioned else message
        in_job = any(_IN_JOB.match(violation.field) for violation in found)
        return InvalidJob(text, found) if in_job else InvalidRequest(text, found)
    return _BY_CODE.get(code, RouterError)(message)


@contextlib.contextmanager
def ids_in_error(ids: Sequence[str]) -> Generator[None]:
    """If the call raises a WindrowError, sets `made_ids` of the error, so that the caller can make the call again with
    these ids."""
    try:
        yield
    except WindrowError as error:
        error.made_ids = ids
        raise


def invalid_argument(name: str, fault: object) -> InvalidRequest:
    """Returns the error for an argument that cannot be sent."""
    return InvalidRequest(f"{name}: {fault}", [Violation(name, str(fault))])


def renamed(error: InvalidRequest, names: Mapping[str, str]) -> InvalidRequest:
    """Returns the error with the names of the caller's arguments in place of the names of the request's fields."""

    def in_text(text: str) -> str:
        for field, name in names.items():
            text = text.replace(f"{field}: ", f"{name}: ")
        return text

    violations = [Violation(names.get(field, field), description) for field, description in error.violations]
    mine = type(error)(in_text(str(error)), violations)
    mine.reason = error.reason
    mine.details = in_text(error.details)
    return mine


def shifted(violations: Iterable[Violation], by: int) -> list[Violation]:
    """Adds `by` to the job indexes of violations, for a request that was sent in several parts."""

    def moved(match: re.Match[str]) -> str:
        return f"jobs[{int(match[1]) + by}]"

    return [Violation(_IN_JOB.sub(moved, field, count=1), description) for field, description in violations]


def alone(error: InvalidRequest, at: int) -> InvalidRequest:
    """Returns the error that the call would have got if part `at` had been the only part of the call."""

    def first(match: re.Match[str]) -> str:
        return match[0].replace(match[1], "0") if int(match[1]) == at else match[0]

    own = [found for found in error.violations if (path := _IN_PART.match(found.field)) and int(path[1]) == at]
    renamed = [Violation(_IN_PART.sub(first, field, count=1), _IN_PART.sub(first, text)) for field, text in own]
    mine = type(error)("; ".join(f"{field}: {text}" for field, text in renamed), renamed)
    mine.reason = error.reason
    return mine


def blamed_parts(error: InvalidRequest) -> set[int]:
    """Returns the indexes of the parts that caused the refusal, or an empty set if anything else caused it."""
    paths = [_IN_PART.match(violation.field) for violation in error.violations]
    return {int(path[1]) for path in paths if path} if all(paths) else set()
