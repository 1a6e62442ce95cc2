"""What can go wrong, as one tree. Refuses to know gRPC's objects: calls.py takes those apart.

    WindrowError
    ├── InvalidRequest        mend the request: .violations says where; nothing was stored
    │   └── InvalidJob        ... it is in a job
    ├── AlreadyExists         it is there
    ├── NotFound              no such thing in this org
    ├── FailedPrecondition    the state it is in forbids this
    ├── PermissionDenied      ask whoever gives out access
    ├── RouterTooOld          the router does not know this call: upgrade the routers first, then their clients
    ├── Unavailable           no router or shard answered; try again later, .retry_after s if set
    ├── ResourceExhausted     too much at once: try again after .retry_after s; where that is None, with less
    ├── DeadlineExceeded      the time ran out; whether the call took effect is not known: try again with the same ids
    ├── RouterError           the router failed in a way it has no name for: INTERNAL, UNKNOWN, ...
    └── ClientClosed          this client was closed, or belongs to another event loop or process

Retry and Kill are no errors: a handler raises them to say what is to become of its job.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from datetime import timedelta
from typing import NamedTuple

Span = timedelta | float
"""A length of time: a timedelta, or seconds."""


class Violation(NamedTuple):
    """One thing that is wrong with a request. `field` is a path from its root, such as `jobs[3].queue`."""

    field: str
    description: str


class WindrowError(Exception):
    """Any failure of a call. `retry_after`: what the router asked to wait, in seconds, if it did."""

    retry_after: float | None = None


class InvalidRequest(WindrowError):
    """The request can never succeed as it is. Nothing was stored."""

    def __init__(self, message: str, violations: Iterable[Violation] = ()) -> None:
        super().__init__(message)
        self.violations = tuple(violations)


class InvalidJob(InvalidRequest):
    """A job in the request can never be stored as it is. Unless the request was independent, no job of it was."""


class AlreadyExists(WindrowError):
    """It is there already."""


class NotFound(WindrowError):
    """This org has no such thing."""


class FailedPrecondition(WindrowError):
    """The state it is in forbids the call."""


class PermissionDenied(WindrowError):
    """The caller is not known, or may not do this."""


class RouterTooOld(WindrowError):
    """The router does not know this call."""


class Unavailable(WindrowError):
    """No router could be reached, or the router could not reach the org's shard."""


class ResourceExhausted(WindrowError):
    """The router is full; or the message was larger than it takes, or the org would have too many queues."""


class DeadlineExceeded(WindrowError):
    """The time ran out. The call may have taken effect; trying it again with the same ids is safe."""


class RouterError(WindrowError):
    """A status that has no better name here; the message has it."""


class ClientClosed(WindrowError):
    """The client cannot be used: closed, or made in another event loop or before a fork."""


# Those that time may heal: a worker waits, any other error ends it.
TRANSIENT = (Unavailable, ResourceExhausted, DeadlineExceeded, RouterError)

# By google.rpc.Code. What is not here is a RouterError.
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
    16: PermissionDenied,
}
_INVALID_ARGUMENT = 3
_RETRY_AFTER_MAX_S = 3650 * 86400
_IN_JOB = re.compile(r"jobs\[(\d+)\]")
# The parts of a call that may have been given by different callers.
_IN_PART = re.compile(r"(?:jobs|acks)\[(\d+)\]")


def from_code(code: int, message: str, violations: Iterable[Violation] = ()) -> WindrowError:
    """The error for a google.rpc.Code."""
    if code == _INVALID_ARGUMENT:
        found = tuple(violations)
        # A message often tells the first of them already.
        untold = [f"{field}: {description}" for field, description in found if field not in message]
        what = "; ".join(untold[:5]) + (f"; and {len(untold) - 5} more" if len(untold) > 5 else "")
        text = f"{message} ({what})" if what else message
        in_job = any(_IN_JOB.match(violation.field) for violation in found)
        return InvalidJob(text, found) if in_job else InvalidRequest(text, found)
    return _BY_CODE.get(code, RouterError)(message)


def shifted(violations: Iterable[Violation], by: int) -> list[Violation]:
    """The same violations for a request of which the judged one was a part, `by` jobs from the start."""

    def moved(match: re.Match[str]) -> str:
        return f"jobs[{int(match[1]) + by}]"

    return [Violation(_IN_JOB.sub(moved, field, count=1), description) for field, description in violations]


def alone(error: InvalidRequest, at: int) -> InvalidRequest:
    """What the part at `at` of the refused call would have been told, had it been alone in it."""

    def first(match: re.Match[str]) -> str:
        return match[0].replace(match[1], "0") if int(match[1]) == at else match[0]

    own = [found for found in error.violations if (path := _IN_PART.match(found.field)) and int(path[1]) == at]
    told = [Violation(_IN_PART.sub(first, field, count=1), _IN_PART.sub(first, text)) for field, text in own]
    return type(error)("; ".join(f"{field}: {text}" for field, text in told), told)


def blamed(error: InvalidRequest) -> set[int]:
    """The parts of the refused call that it was refused for; none: it was for something else."""
    paths = [_IN_PART.match(violation.field) for violation in error.violations]
    return {int(path[1]) for path in paths if path} if all(paths) else set()


class Retry(Exception):
    """Raised by a handler: nack the job, and run it again.

    `after` is a timedelta or seconds; without it the job's retry policy says when. Counts as an attempt, and a job that
    is out of attempts is dead all the same. `reason` is kept in the attempt history.
    """

    def __init__(self, reason: str = "", *, after: Span | None = None) -> None:
        super().__init__(reason)
        after_s = after.total_seconds() if isinstance(after, timedelta) else after
        if after_s is not None and not 0 <= after_s <= _RETRY_AFTER_MAX_S:
            raise ValueError(f"after must be 0 s to 3,650 days, not {after!r}")
        self.after = after


class Kill(Exception):
    """Raised by a handler: the job is dead at once, whatever attempts are left. `reason` is kept with it."""

    def __init__(self, reason: str = "") -> None:
        super().__init__(reason)
