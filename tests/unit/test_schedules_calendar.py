"""The instants of schedules, compared with an oracle that looks at every minute and knows nothing of cronsim."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from itertools import islice, pairwise, takewhile
from zoneinfo import ZoneInfo

import pytest

from shard.schedule import ScheduleId, Timing
from shard.schedules import calendar
from shard.vocabulary import Micros
from tests.effort import luck_of, trials

MINUTE = timedelta(minutes=1)
DAY = timedelta(days=1)
DAY_US = 86_400_000_000
# Zones whose clocks change by an hour, by half an hour, at midnight, by a whole day, four times a year, or never.
ZONES = (
    *("Europe/Paris", "America/New_York", "Australia/Lord_Howe", "America/Sao_Paulo", "Pacific/Apia"),
    *("Africa/Casablanca", "Atlantic/Azores", "America/Havana", "Asia/Kolkata", "UTC"),
)
YEARS = range(1995, trials(1995, thorough=2031))
# In 2011 Samoa skipped a day.
YEAR, YEAR_OF_SAMOA = 2018, 2011
EXPRESSIONS = (
    *("* * * * *", "*/7 * * * *", "0 * * * *", "30 */2 * * *", "*/30 1-3 * * *", "0 8 * * 1-5", "30 2 * * *"),
    *("0,30 2,3 * * *", "0 0 * * *", "15 0 * * 0", "59 23 * * *", "0 1 * * *", "30 1 * 3,10,11 *", "45 1,2 28-31 * *"),
    *("0 0 1 * 1", "5 4 */2 * *", "0 12 29 2 *", "10-20/5 0-3 * * 6,0"),
)

# How many expressions are tried around each change of the clocks.
DRAWN = trials(7, thorough=len(EXPRESSIONS))


# ── The oracle ───────────────────────────────────────────────────────────────────────────────────────────────────────


def numbers(text: str, first: int, last: int) -> set[int]:
    found: set[int] = set()
    for part in text.split(","):
        span, _, step = part.partition("/")
        low, _, high = (f"{first}-{last}" if span == "*" else span).partition("-")
        found.update(range(int(low), int(high or low) + 1, int(step or 1)))
    return found


class Expression:
    """Five fields, as Debian's cron reads them."""

    def __init__(self, text: str) -> None:
        minute, hour, day, month, weekday = text.split()
        self.minutes, self.hours = numbers(minute, 0, 59), numbers(hour, 0, 23)
        self.days, self.months = numbers(day, 1, 31), numbers(month, 1, 12)
        self.weekdays = {number % 7 for number in numbers(weekday, 0, 7)}
        self.both_days = day.startswith("*") or weekday.startswith("*")
        # A fixed time comes exactly once a day, even if the clocks skip it or show it twice.
        self.is_fixed = not minute.startswith("*") and not hour.startswith("*")

    def has_date(self, wall: datetime) -> bool:
        days = [wall.day in self.days, wall.isoweekday() % 7 in self.weekdays]
        return wall.month in self.months and (all(days) if self.both_days else any(days))

    def has_time(self, wall: datetime) -> bool:
        return wall.minute in self.minutes and wall.hour in self.hours


def walls(zone: ZoneInfo, first: datetime, last: datetime) -> list[tuple[datetime, datetime]]:
    """Returns each minute from a day before `first` until just before `last`, each with the local time of the zone at
    this minute."""
    minutes = (last - first + DAY) // MINUTE
    moments = [first - DAY + number * MINUTE for number in range(minutes)]
    return [(at, at.astimezone(zone).replace(tzinfo=None)) for at in moments]


def oracle(expression: Expression, shown: list[tuple[datetime, datetime]], first: datetime) -> list[datetime]:
    """Returns the instants from `first` on. Looks at each of the minutes in `shown`."""
    if not expression.is_fixed:
        return [at for at, wall in shown if at >= first and expression.has_time(wall) and expression.has_date(wall)]
    found: list[datetime] = []
    # The latest time that the clock has shown.
    latest = shown[0][1]
    for at, wall in shown[1:]:
        # Looks at every minute that the wall clock skipped, and then at the minute `wall`. If the clock has already
        # shown `wall`, there is nothing to look at.
        passed, fires = latest + MINUTE, False
        while passed <= wall:
            fires |= expression.has_time(passed) and expression.has_date(passed)
            passed += MINUTE
        latest = max(latest, wall)
        if fires and at >= first:
            found.append(at)
    return found


def changes(zone: ZoneInfo, year: int) -> Iterator[datetime]:
    """Yields the hours of a year before which the clocks of this zone are set."""
    hours = [datetime(year, 1, 1, tzinfo=UTC) + timedelta(hours=number) for number in range(366 * 24 + 1)]
    for (at, before), (_, after) in pairwise((hour, hour.astimezone(zone).utcoffset()) for hour in hours):
        if before != after and at.year == year:
            yield at


def micros(moment: datetime) -> Micros:
    return Micros((moment - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1))


def instants(timing: Timing, first: datetime, last: datetime) -> list[datetime]:
    ends = micros(last)
    found = takewhile(lambda at: at < ends, calendar.after(timing, Micros(micros(first) - 1)))
    return [datetime.fromtimestamp(at / 1e6, UTC) for at in found]


@pytest.mark.thorough
@pytest.mark.parametrize("name", ZONES)
def test_cron_fires_at_the_minutes_that_the_oracle_names_around_all_changes_of_the_clocks(name: str) -> None:
    zone = ZoneInfo(name)
    years = [YEAR_OF_SAMOA if name == "Pacific/Apia" else YEAR, *YEARS]
    spans = [(at - DAY, at + DAY) for year in years for at in changes(zone, year)]
    spans.append((datetime(2026, 2, 27, tzinfo=UTC), datetime(2026, 3, 2, tzinfo=UTC)))
    luck = luck_of(name)
    for first, last in spans:
        # The span does not begin at midnight UTC, so that the test covers other times of the day.
        begin = first + timedelta(minutes=luck.randrange(600))
        shown = walls(zone, begin, last)
        for text in luck.sample(EXPRESSIONS, DRAWN):
            timing = Timing(cron=text, zone=name)
            assert calendar.faults(timing) == []
            expected = oracle(Expression(text), shown, begin)
            assert instants(timing, begin, last) == expected, (text, begin)
            backwards = list(takewhile(micros(begin).__le__, calendar.until(timing, Micros(micros(last) - 1))))
            assert backwards[::-1] == [micros(at) for at in expected], (text, begin)


@pytest.mark.parametrize(
    ("zone", "wall", "utc"),
    [
        # The clocks skip 2:00 to 3:00 on 29 March, and show 2:00 to 3:00 twice on 25 October.
        ("Europe/Paris", "30 2 29 3 *", "2026-03-29T01:00"),
        ("Europe/Paris", "30 2 25 10 *", "2026-10-25T00:30"),
        ("America/New_York", "30 2 8 3 *", "2026-03-08T07:00"),
        ("America/New_York", "30 1 1 11 *", "2026-11-01T05:30"),
    ],
)
def test_a_time_that_is_skipped_comes_right_after_and_one_that_is_shown_twice_comes_first(
    zone: str, wall: str, utc: str
) -> None:
    after = datetime(2026, 1, 1, tzinfo=UTC)
    (at,) = islice(calendar.after(Timing(cron=wall, zone=zone), micros(after)), 1)
    assert at == micros(datetime.fromisoformat(utc).replace(tzinfo=UTC))


def test_with_six_fields_the_first_is_the_second() -> None:
    timing = Timing(cron="*/20 30 9 * * *", zone="Europe/Paris")
    first = datetime(2026, 6, 1, tzinfo=UTC)
    found = instants(timing, first, first + DAY)
    assert [f"{at:%H:%M:%S}" for at in found] == ["07:30:00", "07:30:20", "07:30:40"]


def test_an_interval_counts_from_its_start_or_from_1970() -> None:
    span_us = 7 * 3_600_000_000
    assert next(calendar.after(Timing(interval_us=span_us), Micros(0))) == span_us
    anchored = Timing(interval_us=span_us, start=Micros(1000))
    assert list(islice(calendar.after(anchored, Micros(0)), 2)) == [1000, 1000 + span_us]
    assert list(calendar.until(anchored, Micros(1000 + span_us))) == [1000 + span_us, 1000]
    assert list(calendar.until(anchored, Micros(999))) == []


def test_no_instant_is_before_the_start_or_at_the_end() -> None:
    start, end = micros(datetime(2026, 1, 1, tzinfo=UTC)), micros(datetime(2026, 1, 3, tzinfo=UTC))
    timing = Timing(cron="0 0 * * *", start=start, end=end)
    assert list(calendar.after(timing, Micros(0))) == [start, start + DAY_US]
    assert list(calendar.until(timing, Micros(end * 2))) == [start + DAY_US, start]


def test_a_single_date_comes_once() -> None:
    timing = Timing(at=Micros(5_000_000))
    assert list(calendar.after(timing, Micros(0))) == [5_000_000]
    assert list(calendar.after(timing, Micros(5_000_000))) == []
    assert list(calendar.until(timing, Micros(5_000_000))) == [5_000_000]


def test_jitter_is_bounded_spread_and_always_the_same() -> None:
    timing = Timing(interval_us=60_000_000, jitter_us=10_000_000)
    schedule = ScheduleId("0b0a7a4e-9d0b-4b7e-8a55-0d1e8f6f2a11")
    delays = [calendar.due(timing, schedule, at) - at for at in islice(calendar.after(timing, Micros(0)), 200)]
    assert delays == [calendar.due(timing, schedule, at) - at for at in islice(calendar.after(timing, Micros(0)), 200)]
    assert 0 <= min(delays) < 1_000_000
    assert 9_000_000 < max(delays) < 10_000_000
    other = ScheduleId("0b0a7a4e-9d0b-4b7e-8a55-0d1e8f6f2a12")
    assert calendar.due(timing, other, Micros(60_000_000)) != calendar.due(timing, schedule, Micros(60_000_000))


@pytest.mark.parametrize(
    ("cron", "words"),
    [
        ("60 * * * *", "field 1 (minute) must not be '60'"),
        ("* 24 * * *", "field 2 (hour) must not be '24'"),
        ("* * 0 * *", "field 3 (day of month) must not be '0'"),
        ("* * * FOO *", "field 4 (month) must not be 'FOO'"),
        ("* * * * MON#6", "field 5 (day of week) must not be 'MON#6'"),
        ("60 * * * * *", "field 1 (second) must not be '60'"),
        ("5-1 * * * *", "field 1 (minute) must not be '5-1'"),
        ("*/0 * * * *", "field 1 (minute) must not be '*/0'"),
        (",, * * * *", "field 1 (minute) must not be ',,'"),
        ("* * * * MON#2/2", "field 5 (day of week)"),
        ("0 0 31 2 *", "names days that never come"),
        ("", "must have five fields"),
        ("@daily", "must have five fields"),
        ("1," * 200 + "1 * * * *", "at most 256 characters"),
    ],
)
def test_a_bad_expression_is_told_with_its_field(cron: str, words: str) -> None:
    (fault,) = calendar.faults(Timing(cron=cron))
    assert fault.field == "cron"
    assert words in fault.description


@pytest.mark.parametrize(
    ("zone", "hint"),
    [
        ("Europe/Pariss", "did you mean 'Europe/Paris'?"),
        ("europe/paris", "did you mean 'Europe/Paris'?"),
        ("paris", "did you mean 'Europe/Paris'?"),
        ("New York", "did you mean 'America/New_York'?"),
        ("../../etc/passwd", "such as 'Europe/Paris' or 'UTC'"),
        ("x" * 1000, "such as"),
        ("", "such as"),
    ],
)
def test_an_unknown_time_zone_is_told_with_the_one_that_may_be_meant(zone: str, hint: str) -> None:
    (fault,) = calendar.faults(Timing(cron="0 0 * * *", zone=zone))
    assert fault.field == "time_zone"
    assert hint in fault.description
    assert len(fault.description) < 300


def test_what_has_no_instant_at_all_is_refused() -> None:
    start = micros(datetime(2026, 1, 2, tzinfo=UTC))
    timing = Timing(cron="0 0 1 1 *", start=start, end=Micros(start + DAY_US))
    (fault,) = calendar.faults(timing)
    assert "no instant" in fault.description


@pytest.mark.parametrize("moment", [datetime.min.replace(tzinfo=UTC), datetime.max.replace(tzinfo=UTC)])
@pytest.mark.parametrize(
    "timing", [Timing(cron="* * * * *"), Timing(interval_us=1_000_000), Timing(cron="0 0 29 2 1#5")]
)
def test_a_moment_at_the_end_of_time_takes_no_longer(timing: Timing, moment: datetime) -> None:
    # It would take hours to look at each minute.
    assert len(list(islice(calendar.after(timing, micros(moment)), 3))) == (3 if moment.year == 1 else 0)
    assert len(list(islice(calendar.until(timing, micros(moment)), 3))) == (0 if moment.year == 1 else 3)


def test_the_latest_instants_are_found_without_those_before() -> None:
    """The schedule has an instant in each second of February, 2.4 million a year. The test looks back from March."""
    march = micros(datetime(2026, 3, 20, tzinfo=UTC))
    latest = micros(datetime(2026, 2, 28, 23, 59, 59, tzinfo=UTC))
    timing = Timing(cron="* * * * 2 *")
    assert list(islice(calendar.until(timing, march), 200)) == [latest - n * 1_000_000 for n in range(200)]


def test_instants_come_in_order_without_end() -> None:
    found = list(
        islice(
            calendar.after(Timing(cron="* * * * *", zone="Europe/Paris"), micros(datetime(2026, 3, 29, tzinfo=UTC))),
            200,
        )
    )
    assert {later - earlier for earlier, later in pairwise(found)} == {60_000_000}
