"""The outcomes that a worker reports about a lease. Each outcome can write itself into a message of the stream.
Handlers raise Retry, Snooze or Kill to choose an outcome."""

from __future__ import annotations

import abc
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import lru_cache
from itertools import chain
from typing import ClassVar

from windrow.errors import Span
from windrow.failures import Failure, failure_message, failure_of, frames_of, stack_of, type_name
from windrow.payloads import REASON_BYTES_MAX, clipped, duration, seconds
from windrow.reports import Report
from windrow.v1 import queue_pb2

_AFTER_S_MAX = 3650 * 86400


class Action(abc.ABC):
    """An outcome of a lease. The subclass names the verb with which the worker sends the outcome."""

    __slots__ = ()
    verb: ClassVar[str]
    # Whether the lease continues after this outcome.
    is_extend: ClassVar[bool] = False

    @property
    def size(self) -> int:
        """How many bytes the outcome's texts have when they are sent."""
        return 0

    @abc.abstractmethod
    def write(self, request: queue_pb2.ConsumeRequest, lease: bytes, log: str) -> None:
        """Adds an entry about this lease to the request, with the lines that the attempt has logged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Done(Action):
    """The job finished, with a result of at most 64 KiB."""

    verb = "ack"
    result: bytes = b""

    @property
    def size(self) -> int:
        return len(self.result)

    def write(self, request: queue_pb2.ConsumeRequest, lease: bytes, log: str) -> None:
        request.acks.add(lease=lease, result=self.result, log=log)


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed(Action):
    """The attempt failed. `retry_after_s` None: the retry policy decides when the job runs again."""

    verb = "nack"
    failure: Failure
    retry_after_s: float | None = None

    @property
    def size(self) -> int:
        # Count the bytes of the texts as they are sent: a character may have four bytes, and long texts are shortened.
        return failure_message(self.failure).ByteSize()

    def write(self, request: queue_pb2.ConsumeRequest, lease: bytes, log: str) -> None:
        nack = request.nacks.add(lease=lease, failure=failure_message(self.failure), log=log)
        if self.retry_after_s is not None:
            nack.retry_after.CopyFrom(duration(self.retry_after_s))


@dataclass(frozen=True, slots=True, kw_only=True)
class Extended(Action):
    """The lease is extended. `report`: what the handler has reported, which is sent with the extend."""

    verb = "extend"
    is_extend = True
    report: Report | None = None

    @property
    def size(self) -> int:
        return 0 if self.report is None else self.report.size

    def write(self, request: queue_pb2.ConsumeRequest, lease: bytes, log: str) -> None:
        extend = request.extends.add(lease=lease, log=log)
        if self.report is not None:
            self.report.write(extend)


@dataclass(frozen=True, slots=True, kw_only=True)
class Snoozed(Action):
    """The job is given back for a while, without counting the attempt. `reason` has at most 1 KiB."""

    verb = "snooze"
    after_s: float
    reason: str = ""

    @property
    def size(self) -> int:
        return len(self.reason.encode())

    def write(self, request: queue_pb2.ConsumeRequest, lease: bytes, log: str) -> None:
        request.snoozes.add(lease=lease, after=duration(self.after_s), reason=self.reason, log=log)


class Released(Action):
    """The job is given back at once, without counting the attempt."""

    verb = "release"

    def write(self, request: queue_pb2.ConsumeRequest, lease: bytes, log: str) -> None:
        if log:
            # A release cannot carry a log. A snooze of 0 s has the same effect, and can carry one.
            request.snoozes.add(lease=lease, log=log)
        else:
            request.releases.append(lease)


class Waits(Action):
    """The job waits for nodes of its workflow. The call that added them has ended the lease, so nothing is sent."""

    verb = "wait"

    def write(self, request: queue_pb2.ConsumeRequest, lease: bytes, log: str) -> None:
        raise AssertionError("a lease that has ended has no outcome to report")


# This is by far the most frequent outcome, so all jobs without a result share one object.
DONE = Done()


def is_chosen(action: Action) -> bool:
    """Returns whether the handler has certainly chosen this outcome. Returns False if a cancelled handler may have this
    outcome only because it returned early, or because its clean-up failed."""
    match action:
        case Done():
            return False
        case Failed():
            return action.failure.permanent or action.retry_after_s is not None
        case _:
            return True


def acks_of(leases: Sequence[bytes]) -> bytes:
    """Returns acks without result and log as bytes that can be merged into a ConsumeRequest. The generated code would
    write the same bytes for the field `acks`, but would take ten times as long."""
    return b"".join(chain.from_iterable(zip(map(_ack_head, map(len, leases)), leases, strict=True)))


@lru_cache(maxsize=256)
def _ack_head(lease_bytes: int) -> bytes:
    """Returns the bytes that come before a lease of this length."""
    request = queue_pb2.ConsumeRequest(acks=[queue_pb2.Ack(lease=bytes(lease_bytes))])
    return request.SerializeToString()[: -lease_bytes or None]


class Outcome(Exception):
    """What a handler raises to choose the outcome of its job."""

    # Whether this outcome is an error in the job's span.
    is_failure = False

    def action(self) -> Action:
        """Returns the outcome to report. May raise any error, because a subclass may have changed anything."""
        raise NotImplementedError

    def _failure(self, *, message: str, permanent: bool = False) -> Failure:
        """Returns the failure to store. `message` is used if no reason was given. The names Retry and Kill say nothing
        about the cause. So if a Retry or Kill was raised from an error, the failure has the type of that error."""
        failure = failure_of(self, message=message, permanent=permanent)
        if type(self) in (Retry, Kill):
            cause = self.__cause__
            failure = replace(failure, type="" if cause is None else type_name(type(cause)))
        return failure


class Retry(Outcome):
    """Raised by a handler: nack the job, and run it again.

    `after` is a timedelta or seconds; without it the job's retry policy sets the delay. This counts as an attempt: a
    job without remaining attempts is dead. `reason` is stored in the attempt history. Raises ValueError if `after` is
    negative or more than 3,650 days.
    """

    def __init__(self, reason: str = "", *, after: Span | None = None) -> None:
        super().__init__(reason)
        self.after = None if after is None else _checked(after)

    def action(self) -> Failed:
        # Validate again: a subclass may have set a delay that no nack can carry.
        return Failed(
            failure=self._failure(message="the handler asked for a retry"),
            retry_after_s=None if self.after is None else seconds(_checked(self.after)),
        )


class Snooze(Outcome):
    """Raised by a handler: the job cannot be worked on yet. It runs again after `after` (a timedelta, or seconds).

    Nothing has failed: the attempt does not count, so a job can be snoozed for ever. `reason` is stored in the attempt
    history (1 KiB). Raises ValueError if `after` is negative or more than 3,650 days.
    """

    def __init__(self, reason: str = "", *, after: Span) -> None:
        super().__init__(reason)
        self.after = _checked(after)

    def action(self) -> Snoozed:
        # Validate again: a subclass may have set a delay that no snooze can carry.
        return Snoozed(after_s=seconds(_checked(self.after)), reason=clipped(str(self), REASON_BYTES_MAX))


class Waiting(Outcome):
    """Raised by wait_for: the lease has ended, and the job waits for nodes of its workflow. A handler must not catch
    this exception, because any other outcome of the handler would be dropped. Nothing has failed, and the attempt does
    not count."""

    def __init__(self, nodes: int) -> None:
        super().__init__(nodes)
        self.nodes = nodes

    def __str__(self) -> str:
        return f"waits for nodes that it has added ({self.nodes:,})"

    def action(self) -> Waits:
        return Waits()


class Kill(Outcome):
    """Raised by a handler: the failure is permanent. The job is dead at once, even if it has remaining attempts.
    `reason` is stored in the attempt history."""

    is_failure = True

    def __init__(self, reason: str = "") -> None:
        super().__init__(reason)

    def action(self) -> Failed:
        return Failed(failure=self._failure(message="the handler gave the job up", permanent=True))


def _checked(after: Span) -> Span:
    """Returns the delay. Raises ValueError if the delay is negative or too long. Raises TypeError if it is not a
    delay."""
    given: object = after
    if not isinstance(given, (int, float, timedelta)):
        raise TypeError(f"after: {given!r} is neither a number of seconds nor a timedelta")
    after_s = after.total_seconds() if isinstance(after, timedelta) else after
    if not 0 <= after_s <= _AFTER_S_MAX:
        raise ValueError(f"after must be 0 s to 3,650 days, not {after!r}")
    return after


def action_of(error: BaseException, *, runners: Collection[str]) -> tuple[Action, BaseException]:
    """Returns the outcome to report for a handler's error, and the error to log. `runners`: files that call handlers.

    Raises nothing, even if the error's own methods raise.
    """
    try:
        if not isinstance(error, Outcome):
            return Failed(failure=failure_of(error, stack=stack_of(error, frames_of(error, runners=runners)))), error
        action = error.action()
        if isinstance(action, Failed) and error.__cause__ is not None:
            # The handler has raised this outcome from another error (`raise … from error`). That error says more.
            stack = stack_of(error, frames_of(error, runners=runners))
            action = replace(action, failure=replace(action.failure, stack=stack))
        return action, error
    except BaseException as worse:  # noqa: BLE001 - such as the AttributeError of a Retry whose __init__ was never called
        failure = Failure(type=type(error).__qualname__, message="its text cannot be read")
        with suppress(BaseException):
            # The stack includes the first error, as the context of the second.
            failure = failure_of(worse, stack=stack_of(worse, frames_of(worse, runners=runners)))
        return Failed(failure=replace(failure, permanent=isinstance(error, Kill))), worse
