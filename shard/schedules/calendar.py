"""Computes the instants of a schedule. Pure: no I/O, and no clock, because the caller passes every moment.

Cronsim reads the cron expressions, with the rules of Debian's cron about daylight saving. When clocks are set forward,
they skip some times, and when they are set back, they show some times twice. If neither the minute nor the hour begins
with `*`, a skipped time counts at the moment when the clocks are set forward, and a time that is shown twice counts
once. For other expressions of five fields, and for all expressions with seconds, a skipped time does not count, and a
time that is shown twice counts twice.
"""

from __future__ import annotations

import difflib
import functools
import hashlib
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta, tzinfo
from itertools import islice, takewhile
from typing import NamedTuple
from zoneinfo import ZoneInfo, available_timezones

from cronsim import CronSim, CronSimError
from cronsim.cronsim import FIELD_NAMES, Field

from shard.schedule import ScheduleId, Timing
from shard.vocabulary import Micros

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
# The first and the last time that instants may have. Both are well inside the range with which CronSim and datetime can
# compute.
_FIRST, _LAST = datetime(1971, 1, 1, tzinfo=UTC), datetime(9000, 1, 1, tzinfo=UTC)
# The length of the first span of time in a search backwards. Each later span is twice as long as the one before.
_BACK_US = 64_000_000
# The maximum number of instants that are read from one span. A span of `_BACK_US` does not have more instants.
_BACK_MAX = 64
_EXPRESSION_CHARS_MAX = 256
_INTERVAL_US_MIN = 1_000_000
_INTERVAL_US_MAX = 3650 * 86_400_000_000
JITTER_US_MAX = 86_400_000_000
# The values of each field of a cron expression, in words.
_VALUES = (
    *("0 to 59", "0 to 59", "0 to 23", "1 to 31, L for the last day, LW for the last weekday"),
    *("1 to 12 or JAN to DEC", "0 to 7 or SUN to SAT, with #2 for the second of a month, and L for the last"),
)


class Fault(NamedTuple):
    """What is wrong with one field of a Timing."""

    field: str
    description: str


def faults(timing: Timing) -> list[Fault]:
    """Returns everything that is wrong with a timing. Returns an empty list if the timing is valid and has an
    instant."""
    found: list[Fault] = []
    given = [value is not None for value in (timing.cron, timing.interval_us, timing.at)]
    if sum(given) != 1:
        found.append(Fault("timing", "must have exactly one of cron, interval and at"))
    zone_fault = _zone_fault(timing.zone)
    if zone_fault:
        found.append(Fault("time_zone", zone_fault))
    if timing.cron is not None and (cron_fault := _cron_fault(timing.cron)):
        found.append(Fault("cron", cron_fault))
    if timing.interval_us is not None and not _INTERVAL_US_MIN <= timing.interval_us <= _INTERVAL_US_MAX:
        found.append(Fault("interval", "must be 1 s to 3,650 days"))
    if not 0 <= timing.jitter_us <= JITTER_US_MAX:
        found.append(Fault("jitter", "must be 0 s to 1 day"))
    for field, moment in (("at", timing.at), ("start", timing.start), ("end", timing.end)):
        if moment is not None and not _micros(_FIRST) <= moment <= _micros(_LAST):
            found.append(Fault(field, "must be in the years 1971 to 8999"))
    if timing.start is not None and timing.end is not None and timing.end <= timing.start:
        found.append(Fault("end", "must be after start"))
    if not found and next(after(timing, Micros(_micros(_FIRST) - 1)), None) is None:
        field = "cron" if timing.cron is not None else "end"
        found.append(Fault(field, "leaves no instant at which the schedule would fire"))
    return found


def after(timing: Timing, moment: Micros) -> Iterator[Micros]:
    """Yields the instants after this moment, in order. The timing must be valid."""
    floor = moment if timing.start is None else max(moment, timing.start - 1)
    for at in _instants_after(timing, floor):
        if timing.end is not None and at >= timing.end:
            return
        yield Micros(at)


def until(timing: Timing, moment: Micros) -> Iterator[Micros]:
    """Yields the instants up to this moment, the latest first. The timing must be valid."""
    ceiling = moment if timing.end is None else min(moment, timing.end - 1)
    for at in _instants_until(timing, ceiling):
        if timing.start is not None and at < timing.start:
            return
        yield Micros(at)


def following(timing: Timing, moment: Micros) -> Micros | None:
    """Returns the first instant after this moment; None if there is none."""
    return next(after(timing, moment), None)


def due(timing: Timing, schedule: ScheduleId, at: Micros) -> Micros:
    """Returns the time at which the run of this instant is to be stored. The time is later than the instant by less
    than the jitter. The difference is always the same for the same instant."""
    if not timing.jitter_us:
        return at
    digest = hashlib.blake2b(f"{schedule} {at}".encode(), digest_size=8).digest()
    return Micros(at + int.from_bytes(digest) % timing.jitter_us)


def _instants_after(timing: Timing, moment: int) -> Iterator[int]:
    if timing.at is not None:
        if timing.at > moment:
            yield timing.at
    elif timing.interval_us is not None:
        anchor = timing.start or 0
        at = anchor + max(0, (moment - anchor) // timing.interval_us + 1) * timing.interval_us
        while at <= _micros(_LAST):
            yield at
            at += timing.interval_us
    elif timing.cron is not None:
        first = _following_cron(timing.cron, timing.zone, moment)
        if first is not None:
            yield first
            yield from _cron_after(timing.cron, timing.zone, first)


def _instants_until(timing: Timing, moment: int) -> Iterator[int]:
    if timing.at is not None:
        if timing.at <= moment:
            yield timing.at
    elif timing.interval_us is not None:
        anchor = timing.start or 0
        at = anchor + (moment - anchor) // timing.interval_us * timing.interval_us
        while at >= anchor:
            yield at
            at -= timing.interval_us
    elif timing.cron is not None:
        yield from _cron_until(timing.cron, timing.zone, moment)


@functools.lru_cache(maxsize=10_000)
def _following_cron(cron: str, zone: str, moment: int) -> int | None:
    """Returns the first instant of `_cron_after`. The result is cached, because many schedules have the same expression
    and are due at the same time."""
    return next(_cron_after(cron, zone, moment), None)


def _cron_after(cron: str, zone: str, moment: int) -> Iterator[int]:
    if moment >= _micros(_LAST):
        return
    # If the clocks show a time twice, and `moment` is at the second of these times, CronSim also yields instants before
    # `moment`.
    for at in CronSim(cron, _in_zone(max(moment, _micros(_FIRST)), zone)):
        if at.year >= _LAST.year:
            return
        if (found := _micros(at)) > moment:
            yield found


def _cron_until(cron: str, zone: str, moment: int) -> Iterator[int]:
    """Yields the instants until `moment`, the latest first. Searches one span of time after another, going back in
    time. Within a span, `_cron_after` searches forwards, so that `_cron_after` and this function find the same
    instants. If a span has too many instants, only its later half is searched, because only the latest instants are
    needed."""
    last, span_us = min(moment, _micros(_LAST)), _BACK_US
    while last >= _micros(_FIRST):
        before = last - span_us
        found = list(islice(takewhile(last.__ge__, _cron_after(cron, zone, before)), _BACK_MAX + 1))
        if len(found) > _BACK_MAX:
            span_us //= 2
            continue
        yield from reversed(found)
        last, span_us = before, span_us * 2


def _in_zone(moment: int, zone: str) -> datetime:
    return (_EPOCH + timedelta(microseconds=moment)).astimezone(_zone(zone))


def _micros(moment: datetime) -> int:
    return (moment.astimezone(UTC) - _EPOCH) // timedelta(microseconds=1)


@functools.cache
def _zones() -> frozenset[str]:
    return frozenset(available_timezones())


@functools.lru_cache(maxsize=1000)
def _zone(name: str) -> tzinfo:
    # CronSim is faster with the UTC of datetime.
    return UTC if name == "UTC" else ZoneInfo(name)


def _zone_fault(name: str) -> str:
    if name in _zones():
        return ""
    shown = name if len(name) <= 64 else f"{name[:64]}…"
    by_fold = {zone.casefold(): zone for zone in _zones()}
    # For example, "paris" is close to no full name, but it is the end of a full name.
    ends = {zone.rpartition("/")[2].casefold(): zone for zone in sorted(_zones(), reverse=True)}
    wanted = name[:64].casefold().replace(" ", "_")
    close = [by_fold[wanted]] if wanted in by_fold else [ends[wanted]] if wanted in ends else []
    close = close or [by_fold[zone] for zone in difflib.get_close_matches(wanted, by_fold, n=1)]
    hint = f"; did you mean {close[0]!r}?" if close else ", such as 'Europe/Paris' or 'UTC'"
    return f"must be a name of the IANA time zone database, not {shown!r}{hint}"


def _cron_fault(expression: str) -> str:
    """Returns a description of the first fault of a cron expression. It is empty if the expression has no fault."""
    if len(expression) > _EXPRESSION_CHARS_MAX:
        return f"must have at most {_EXPRESSION_CHARS_MAX} characters"
    texts = expression.upper().split()
    if len(texts) not in (5, 6):
        return (
            "must have five fields (minute, hour, day of month, month, day of week), or six with the second first, not "
            f"{len(texts)}"
        )
    for place, text in enumerate(texts, start=1):
        field = Field(place + (5 - len(texts)))
        try:
            is_valid = bool(field.parse(text))
        except (CronSimError, AssertionError, ValueError):
            is_valid = False
        if not is_valid:
            name = FIELD_NAMES[field].replace("-", " ")
            return (
                f"its field {place} ({name}) must not be {text!r}: it takes {_VALUES[field]}; ranges such as a-b, "
                "steps such as */n, lists such as a,b; or *"
            )
    try:
        if next(CronSim(expression, _FIRST), None) is None:
            return "names days that never come"
    except CronSimError:
        return "names days that never come"
    return ""
