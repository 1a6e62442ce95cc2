"""Bytes, and what stands for them: payloads, results, error texts, spans and times. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, TypeAlias

from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from windrow.errors import Span

ERROR_BYTES_MAX = 8192
RESULT_BYTES_MAX = 65536

Payload: TypeAlias = bytes | bytearray | memoryview | str | Mapping[str, Any] | Sequence[Any] | int | float | None
"""Bytes go as they are, str as UTF-8, and anything else as JSON: so None is `null`."""


def encode(value: Payload, *, what: str = "payload") -> bytes:
    """The bytes that stand for a value. Raises ValueError or TypeError for what JSON has no form for, NaN included;
    `what` it is to be is said then."""
    if isinstance(value, bytes):
        return value
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, bytearray | memoryview):
        return bytes(value)
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
    except TypeError as error:
        raise TypeError(_no_json(what, value, str(error))) from error
    except RecursionError as error:
        raise ValueError(_no_json(what, value, "it is nested too deeply")) from error
    except ValueError as error:
        raise ValueError(_no_json(what, value, str(error))) from error


def _no_json(what: str, value: object, why: str) -> str:
    return f"a {what} is bytes, str, or what JSON can hold, and this {type(value).__name__} is none of them: {why}"


def encode_result(value: Payload) -> bytes:
    """Same for what a handler returned: None is no result. ValueError: more than 64 KiB."""
    result = b"" if value is None else encode(value, what="result")
    if len(result) > RESULT_BYTES_MAX:
        raise ValueError(f"a result of {len(result):,} bytes; at most {RESULT_BYTES_MAX:,} are kept")
    return result


def error_text(text: str, *, bytes_max: int = ERROR_BYTES_MAX) -> str:
    """The end of an error's text, in the form a Nack takes: no NUL, no half characters."""
    data = text.replace("\0", "�").encode(errors="replace")
    return data[-bytes_max:].decode(errors="ignore")


def seconds(span: Span) -> float:
    """Raises TypeError."""
    try:
        # Not float(), which takes "5".
        return span.total_seconds() if isinstance(span, timedelta) else span * 1.0
    except TypeError as error:
        raise TypeError(_no_span(span)) from error


def duration(span: Span) -> Duration:
    """Raises TypeError, and ValueError for what is no length of time, such as NaN."""
    message = Duration()
    if isinstance(span, timedelta):
        message.FromTimedelta(span)
    else:
        try:
            message.FromNanoseconds(round(seconds(span) * 1e9))
        except (OverflowError, ValueError) as error:
            raise ValueError(_no_span(span)) from error
    return message


def _no_span(span: object) -> str:
    return f"{span!r} is neither a number of seconds nor a timedelta"


def timestamp(time: datetime) -> Timestamp:
    """Raises TypeError, and ValueError for a time without a zone: which moment it means is anyone's guess."""
    try:
        zone = time.tzinfo
    except AttributeError as error:
        raise TypeError(f"{time!r} is no datetime; write one with a time zone, such as datetime.now(UTC)") from error
    if zone is None:
        raise ValueError(f"{time!r} has no time zone; write datetime.now(UTC) or .astimezone()")
    message = Timestamp()
    message.FromDatetime(time)
    return message


def moment(message: Timestamp) -> datetime:
    """To the microsecond, in UTC."""
    # A third of ToDatetime's time; a double holds today's microseconds exactly enough to round to them.
    return datetime.fromtimestamp(message.seconds + message.nanos / 1e9, UTC)
