"""The failure that a nack reports, which says why an attempt failed. This module makes a Failure from an exception. No
I/O."""

from __future__ import annotations

import itertools
import traceback
from collections.abc import Collection
from dataclasses import dataclass
from types import TracebackType

from windrow.payloads import FAILURE_MESSAGE_BYTES_MAX, FAILURE_STACK_BYTES_MAX, FAILURE_TYPE_BYTES_MAX, clipped
from windrow.v1 import job_pb2

# The first line of a stack whose oldest frames do not fit.
_CUT = "... (older frames are left out)\n"
# A traceback may be extremely long, for example after an error in a deep recursion.
_STACK_PARTS_MAX = 10_000
# The message of an error is also stored separately. So a long message in the stack is shortened, so that it does not
# use up the space of the frames.
_PART_CHARS_MAX = 1_000
_BARE_MODULES = frozenset({"builtins", "__main__"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why an attempt failed. Longer texts are shortened: a message keeps its beginning, and a stack keeps its end."""

    # The kind of error, such as an exception class. At most 256 bytes.
    type: str = ""
    # At most 8 KiB.
    message: str = ""
    # At most 32 KiB. A job keeps the stacks of its newest 5 attempts.
    stack: str = ""
    # No later attempt can succeed: the job is dead at once.
    permanent: bool = False

    @property
    def summary(self) -> str:
        """The type and the first line of the message."""
        return ": ".join(filter(None, (self.type, self.message.partition("\n")[0])))


class TimedOut(Exception):
    """A handler did not finish within its `timeout`, or within its job's max_runtime. The traceback shows where the
    handler was at that time, unless the handler ran in a process."""

    __module__ = "windrow"


def failure_of(error: BaseException, *, message: str = "", stack: str = "", permanent: bool = False) -> Failure:
    """Returns the failure of an exception. `message` is used if the exception has no text."""
    try:
        text = str(error)
    except BaseException:  # noqa: BLE001 - an exception's __str__ may raise anything
        # The same text as in a traceback.
        text = "<exception str() failed>"
    text = clipped(text or message, FAILURE_MESSAGE_BYTES_MAX)
    return Failure(type=type_name(type(error)), message=text, stack=stack, permanent=permanent)


def type_name(kind: type[BaseException]) -> str:
    """Returns the name of an exception class as a traceback shows it."""
    return kind.__qualname__ if kind.__module__ in _BARE_MODULES else f"{kind.__module__}.{kind.__qualname__}"


def stack_of(error: BaseException, frames: TracebackType | None) -> str:
    """Returns the traceback of an exception as text. It begins at `frames`, and includes the causes of the exception.
    If the traceback is too long, returns only its newest frames."""
    described = traceback.TracebackException(type(error), error, frames)
    text = "".join(map(_shortened, itertools.islice(described.format(), _STACK_PARTS_MAX))).rstrip()
    newest = clipped(text, FAILURE_STACK_BYTES_MAX - len(_CUT), keep_end=True)
    if len(newest) == len(text):
        return newest
    # Begin with a whole line.
    return _CUT + newest.partition("\n")[2]


def frames_of(error: BaseException, *, runners: Collection[str]) -> TracebackType | None:
    """Returns the traceback, beginning at the handler. `runners` are the files that call handlers: the frames of these
    files are left out."""
    handler = frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        if frame.tb_frame.f_code.co_filename in runners:
            handler = frame.tb_next
        frame = frame.tb_next
    return handler


def places_of(frames: TracebackType) -> str:
    """Returns where the first and the newest frame of a traceback are, on one line."""
    first, *others = traceback.extract_tb(frames)
    return ", ".join(f"in {frame.name} ({frame.filename}:{frame.lineno})" for frame in (first, *others[-1:]))


def _shortened(part: str) -> str:
    return part if len(part) <= _PART_CHARS_MAX else part[:_PART_CHARS_MAX] + "…\n"


def failure_message(failure: Failure) -> job_pb2.Failure:
    return job_pb2.Failure(
        type=clipped(failure.type, FAILURE_TYPE_BYTES_MAX, keep_end=True),
        message=clipped(failure.message, FAILURE_MESSAGE_BYTES_MAX),
        stack=clipped(failure.stack, FAILURE_STACK_BYTES_MAX, keep_end=True),
        permanent=failure.permanent,
    )


def read_failure(message: job_pb2.Failure) -> Failure:
    return Failure(type=message.type, message=message.message, stack=message.stack, permanent=message.permanent)
