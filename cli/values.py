"""Parses and formats values of the command line: durations, times, leases, ids, retry policies. No I/O.

Every parser raises `typer.BadParameter`, whose message has the option, the value, and the correct form.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta

import typer

from shard.vocabulary import RETENTION_MAX

AGEING_S_MAX = 604_800
_UNITS_US = {"us": 1, "ms": 1000, "s": 10**6, "m": 60 * 10**6, "h": 3600 * 10**6, "d": 86_400 * 10**6}
_PART = re.compile(r"(\d+(?:\.\d+)?)(us|ms|s|m|h|d)")
_DURATION = re.compile(rf"(?:{_PART.pattern})+")
_ID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}")
_DAYS = re.compile(r"([0-9]{1,4})d")
_RETENTIONS = {"none": 0, "7y": 2557}
_FACTOR = re.compile(r"([x~])(\d+(?:\.\d+)?)")

# Fields of a job that users may mistake for attributes in --where, each with the option that selects jobs by this
# field.
_FIELD_OPTIONS = {"queue": "QUEUE or --queue", "kind": "--kind", "state": "--state", "priority": ""}


def duration(value: str | timedelta) -> timedelta:
    """Parses a duration such as 10s, 1m30s or 1.5h; the units are us, ms, s, m, h and d."""
    if isinstance(value, timedelta):  # Typer passes an option's default, too.
        return value
    if value == "0":
        return timedelta()
    if not _DURATION.fullmatch(value):
        raise typer.BadParameter(
            f"{value!r} is not a duration: write a number and a unit (us, ms, s, m, h, d), such as 500ms, 10s or 1h30m"
        )
    try:
        return timedelta(microseconds=sum(float(number) * _UNITS_US[unit] for number, unit in _PART.findall(value)))
    except OverflowError:
        raise typer.BadParameter(f"{value!r} is too long") from None


def timeout(value: str | timedelta) -> timedelta:
    """Parses the time that a call may take."""
    span = duration(value)
    if not span:
        raise typer.BadParameter(f"{value!r} is no time for a call: write a longer one, such as 10s")
    return span


def ageing(value: str | int) -> int:
    """Parses the ageing of priorities, and returns its whole seconds."""
    if isinstance(value, int):  # Typer passes an option's default, too.
        return value
    seconds, rest = divmod(duration(value), timedelta(seconds=1))
    if rest or not 1 <= seconds <= AGEING_S_MAX:
        raise typer.BadParameter(f"{value!r}: must be 1s to 7d, in whole seconds")
    return seconds


def exact(value: timedelta) -> str:
    """Formats a duration exactly, as `duration` parses it."""
    left_us = value // timedelta(microseconds=1)
    text = ""
    for unit, unit_us in reversed(_UNITS_US.items()):
        count, left_us = divmod(left_us, unit_us)
        text += f"{count}{unit}" if count else ""
    return text or "0s"


def retention(value: str | int) -> int:
    """Parses a retention. Returns its number of days."""
    if isinstance(value, int):
        return value
    if value in _RETENTIONS:
        return _RETENTIONS[value]
    found = _DAYS.fullmatch(value)
    if found is None or int(found[1]) > RETENTION_MAX:
        raise typer.BadParameter(
            f"{value!r} is not a retention: write a whole number of days up to {RETENTION_MAX}d, such as 14d, or "
            f"{' or '.join(_RETENTIONS)}"
        )
    return int(found[1])


def retention_text(days: int) -> str:
    """Formats a retention as `retention` parses it."""
    return next((text for text, value in _RETENTIONS.items() if value == days), f"{days}d")


def rough(value: timedelta) -> str:
    """Formats a duration for people, in its two largest units."""
    total_s = value.total_seconds()
    if total_s < 1:
        return f"{total_s * 1000:.0f}ms"
    if total_s < 10:
        return f"{total_s:.1f}s"
    minutes, seconds = divmod(round(total_s), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    parts = [(days, "d"), (hours, "h"), (minutes, "m"), (seconds, "s")]
    first = next(at for at, (count, _) in enumerate(parts) if count)
    return "".join(f"{count}{unit}" for count, unit in parts[first : first + 2] if count)


def moment(value: str | datetime) -> datetime:
    """Parses an ISO 8601 time such as 2026-11-20T09:30:00Z. Without an offset it is in this machine's time zone."""
    if isinstance(value, datetime):
        return value
    try:
        return datetime.fromisoformat(value).astimezone()
    except (ValueError, OverflowError):
        raise typer.BadParameter(
            f"{value!r} is not a time: write it as in ISO 8601, such as 2026-11-20T09:30:00Z"
        ) from None


def past_moment(value: str | datetime) -> datetime:
    """Parses a time in the past. Accepts what `moment` accepts, and a duration such as 1h, which means 1 hour ago."""
    if isinstance(value, datetime):
        return value
    if _DURATION.fullmatch(value):
        with suppress(OverflowError):
            return datetime.now().astimezone() - duration(value)
    try:
        return moment(value)
    except typer.BadParameter as error:
        raise typer.BadParameter(f"{error.message}, or how long ago it was, such as 1h or 7d") from None


def attributes(pairs: Iterable[str], *, option: str = "--attribute") -> dict[str, str]:
    """Parses key=value pairs."""
    found: dict[str, str] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not key or not equals:
            raise typer.BadParameter(f"{pair!r} is not KEY=VALUE", param_hint=f"'{option}'")
        if key in found:
            raise typer.BadParameter(f"{key!r} is given twice", param_hint=f"'{option}'")
        found[key] = value
    return found


def fields_among(keys: Iterable[str]) -> Iterator[str]:
    """Yields a hint for each key of --where that is also the name of a job's field."""
    for key in keys:
        if (option := _FIELD_OPTIONS.get(key)) is not None:
            instead = f"use {option}" if option else "no option selects jobs by it"
            yield f"--where {key}=… means an attribute named {key!r}, not the job's {key}: {instead}"


def job_ids(values: Iterable[str], *, instead: str = "") -> list[str]:
    """Parses job ids. Returns them in canonical lower-case text. `instead`: a hint at the end of an error."""
    ids = [value.strip().lower() for value in values]
    for job_id in ids:
        if not _ID.fullmatch(job_id):
            raise typer.BadParameter(
                f"{job_id!r} is not a job id: ids are UUIDs of version 7, such as "
                f"019a9f5e-7c1d-7a41-8f0e-3f2b6d1c9a55{instead}",
                param_hint="'ID'",
            )
    return ids


def workflow_id(text: str) -> str:
    """Parses the id of a workflow. Returns it in canonical lower-case text."""
    return _uuid7(text, "the id of a workflow")


def request_id(text: str) -> str:
    """Parses the id of a request that may be repeated. Returns it in canonical lower-case text."""
    return _uuid7(text, "the id of a request")


def _uuid7(text: str, what: str) -> str:
    plain = text.strip().lower()
    if not _ID.fullmatch(plain):
        raise typer.BadParameter(
            f"{text!r} is not {what}: those are UUIDs of version 7, such as 019a9f5e-7c1d-7a41-8f0e-3f2b6d1c9a55"
        )
    return plain


def leases(values: Iterable[str]) -> list[bytes]:
    """Parses lease tokens from base64, in either alphabet, padded or not."""
    tokens: list[bytes] = []
    for value in values:
        plain = value.strip().replace("-", "+").replace("_", "/").rstrip("=")
        try:
            token = base64.b64decode(plain + "=" * (-len(plain) % 4), validate=True)
        except binascii.Error:
            token = b""
        if not token:
            raise typer.BadParameter(
                f"{value!r} is not a lease: copy one that `windrow dequeue` printed", param_hint="'LEASE'"
            )
        tokens.append(token)
    return tokens


def lease_text(token: bytes) -> str:
    return base64.b64encode(token).decode()


@dataclass(frozen=True, slots=True, kw_only=True)
class Retry:
    """A retry policy: a fixed delay `first`; or, if `last` is set, delays that grow by `multiplier` from `first` to
    `last`."""

    first: timedelta
    last: timedelta | None = None
    multiplier: float = 2.0
    jitter: float = 0.1


def retry(value: str | Retry) -> Retry:
    """Parses a retry policy.

    10s: always after 10 s. 1s..1h: after 1 s, 2 s, 4 s … up to 1 h. 1s..1h,x3,~0.2: tripling, with ±20 % jitter.
    """
    if isinstance(value, Retry):
        return value
    delays, *factors = value.split(",")
    first, dots, last = delays.partition("..")
    found = [_FACTOR.fullmatch(factor) for factor in factors]
    by_sign = {match[1]: float(match[2]) for match in found if match is not None}
    try:
        spans = [duration(first), duration(last)] if dots else [duration(first)]
    except typer.BadParameter:
        spans = []
    if not spans or (factors and not dots) or None in found or len(by_sign) < len(found):
        raise typer.BadParameter(
            f"{value!r} is not a retry policy: write a delay, such as 10s, or a range, such as 1s..1h or 1s..1h,x3,~0.2"
        )
    if spans[-1] < spans[0]:
        raise typer.BadParameter(f"{value!r} ends with a shorter delay than it begins with: write {last}..{first}")
    if not dots:
        return Retry(first=spans[0])
    return Retry(
        first=spans[0],
        last=spans[1],
        multiplier=by_sign.get("x", 2.0),
        jitter=by_sign.get("~", 0.1),
    )


def retry_text(policy: Retry) -> str:
    """Formats a retry policy as `retry` parses it."""
    if policy.last is None:
        return exact(policy.first)
    return f"{exact(policy.first)}..{exact(policy.last)},x{policy.multiplier:g},~{policy.jitter:g}"


def words(values: Sequence[str], lines: Iterable[str]) -> list[str]:
    """Returns the values; or, if the only value is `-`, one value for each line that is not blank."""
    if list(values) != ["-"]:
        return list(values)
    return [line.strip() for line in lines if line.strip()]
