"""Conversions between Python values and the wire: payloads, results, error texts, spans and times. No I/O."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Any, TypeAlias, TypeVar

from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from windrow.errors import InvalidRequest, Span, invalid_argument

FAILURE_TYPE_BYTES_MAX, FAILURE_MESSAGE_BYTES_MAX, FAILURE_STACK_BYTES_MAX = 256, 8192, 32768
RESULT_BYTES_MAX = 65536
CHECKPOINT_BYTES_MAX, NOTE_BYTES_MAX, REASON_BYTES_MAX = 65536, 1024, 1024
# How many characters an error shows on either side of a lone surrogate.
_SHOWN_CHARS = 20
_SHOWN_CHARS_MAX = 100

_FunctionT = TypeVar("_FunctionT")

Payload: TypeAlias = bytes | bytearray | memoryview | str | Mapping[str, Any] | Sequence[Any] | int | float | None
"""Bytes are sent as they are, str as UTF-8, and anything else as JSON: None becomes `null`."""


def encode(value: Payload, *, what: str = "payload") -> bytes:
    """Returns the bytes for a value. Raises TypeError or ValueError if JSON cannot represent the value, as with NaN;
    `what` names the value in the error."""
    if isinstance(value, bytes):
        return value
    if isinstance(value, bytearray | memoryview):
        return bytes(value)
    try:
        if isinstance(value, str):
            return value.encode()
        return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"a {what} {no_unicode(error)}") from error
    except TypeError as error:
        raise TypeError(_no_json(what, value, str(error))) from error
    except RecursionError as error:
        raise ValueError(_no_json(what, value, "it is nested too deeply")) from error
    except ValueError as error:
        raise ValueError(_no_json(what, value, str(error))) from error


def _no_json(what: str, value: object, why: str) -> str:
    # A batch handler may return exceptions, so somebody may do the same in a handler of single jobs.
    if what == "result" and isinstance(value, BaseException):
        why = "an exception is no result: raise it, or nack the job with it"
    return f"a {what} is bytes, str, or what JSON can hold, and this {type(value).__name__} is none of them: {why}"


def no_unicode(error: UnicodeEncodeError) -> str:
    """Returns a text that says why a str cannot be sent, and that shows the characters that cannot be encoded."""
    text, at = error.object, error.start
    near = text[max(0, at - _SHOWN_CHARS) : at + _SHOWN_CHARS]
    return f"must not have lone surrogates, which UTF-8 cannot encode, not {near!r}"


def shown(value: object) -> str:
    """Returns a value as an error shows it. Shortens a long value."""
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARS_MAX else text[:_SHOWN_CHARS_MAX] + "…"


def checked_text(name: str, text: str) -> str:
    """Returns an argument that must be a str. Raises InvalidRequest, which names the argument, if it is another type or
    no Unicode text."""
    given: object = text
    if not isinstance(given, str):
        raise invalid_argument(name, f"must be a str, not {shown(given)}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise invalid_argument(name, no_unicode(error)) from error
    return text


def checked_count(name: str, count: object, least: int, most: int) -> int:
    """Returns an argument that must be an int between two bounds. Raises InvalidRequest, which names the argument."""
    if not isinstance(count, int):
        raise InvalidRequest(f"{name} must be an int, not {shown(count)}")
    if not least <= count <= most:
        raise InvalidRequest(f"{name} must be {least} to {most:,}, not {count}")
    return count


def checked_functions(name: str, functions: Sequence[_FunctionT]) -> tuple[_FunctionT, ...]:
    """Returns an argument that must be a sequence of functions. Raises InvalidRequest, which names the argument."""
    given: object = functions
    if not isinstance(given, Sequence) or not all(callable(one) for one in functions):
        raise InvalidRequest(f"{name} must be a sequence of functions, not {shown(given)}")
    return tuple(functions)


def encode_result(value: Payload) -> bytes:
    """Returns the bytes for a handler's return value; None means no result. Raises TypeError or ValueError as encode()
    does, and ValueError for a result of more than 64 KiB."""
    result = b"" if value is None else encode(value, what="result")
    if len(result) > RESULT_BYTES_MAX:
        raise ValueError(f"the result has {len(result):,} bytes; at most {RESULT_BYTES_MAX:,} are allowed")
    return result


def clipped(text: str, bytes_max: int, *, keep_end: bool = False) -> str:
    """Returns a text as a Failure or a Progress accepts it: at most `bytes_max` bytes of UTF-8, without NUL. Cuts off
    the end of a longer text, or its beginning if `keep_end` is true."""
    data = text.replace("\0", "�").encode(errors="replace")
    if len(data) <= bytes_max:
        return data.decode()
    return (data[-bytes_max:] if keep_end else data[:bytes_max]).decode(errors="ignore")


def seconds(span: Span) -> float:
    """Returns a span in seconds. Raises TypeError."""
    try:
        # Do not use float(), which accepts "5".
        return span.total_seconds() if isinstance(span, timedelta) else span * 1.0
    except TypeError as error:
        raise TypeError(_no_span(span)) from error


def named_seconds(name: str, span: Span) -> float:
    """Converts an argument that is a span to seconds. Raises InvalidRequest, which names the argument."""
    try:
        return seconds(span)
    except TypeError as error:
        raise invalid_argument(name, error) from error


def duration(span: Span) -> Duration:
    """Returns a span as a protobuf Duration. Raises TypeError. Raises ValueError for NaN and infinity."""
    message = Duration()
    if isinstance(span, timedelta):
        message.FromTimedelta(span)
    else:
        try:
            message.FromNanoseconds(round(seconds(span) * 1e9))
        except (OverflowError, ValueError) as error:
            raise ValueError(_no_span(span)) from error
    return message


def named_duration(name: str, span: Span) -> Duration:
    """Converts an argument that is a span to a Duration. Raises InvalidRequest, which names the argument."""
    try:
        return duration(span)
    except (TypeError, ValueError) as error:
        raise invalid_argument(name, error) from error


def _no_span(span: object) -> str:
    return f"{span!r} is neither a number of seconds nor a timedelta"


def timestamp(time: datetime) -> Timestamp:
    """Returns a time as a protobuf Timestamp. Raises TypeError. Raises ValueError for a time without a zone, because
    such a time is ambiguous, and for a time whose year in UTC is not 1 to 9999."""
    try:
        zone = time.tzinfo
    except AttributeError as error:
        raise TypeError(f"{time!r} is not a datetime; write one with a time zone, such as datetime.now(UTC)") from error
    if zone is None:
        raise ValueError(f"{time!r} has no time zone; write datetime.now(UTC) or .astimezone()")
    message = Timestamp()
    try:
        message.FromDatetime(time)
    except OverflowError as error:
        raise ValueError(f"{time!r} is not in the years 1 to 9999 in UTC") from error
    return message


def named_timestamp(name: str, time: datetime) -> Timestamp:
    """Converts an argument that is a time to a Timestamp. Raises InvalidRequest, which names the argument."""
    try:
        return timestamp(time)
    except (TypeError, ValueError) as error:
        raise invalid_argument(name, error) from error


def moment(message: Timestamp) -> datetime:
    """Returns a Timestamp as a datetime in UTC, to the microsecond."""
    return _moment(message.seconds, message.nanos)


# Jobs that were enqueued together have the same time.
@lru_cache(maxsize=64)
def _moment(seconds: int, nanos: int) -> datetime:
    # This is three times as fast as ToDatetime(). A double is exact enough for the microseconds of today's times.
    return datetime.fromtimestamp(seconds + nanos / 1e9, UTC)
