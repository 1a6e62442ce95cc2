"""Decides what a schedule does at a given time: which instants are stored as jobs, which wait, and which are skipped.
Pure: the caller gives the shard's time, and stores what is decided.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import assert_never

from shard.schedule import (
    BUFFERED_MAX,
    CATCH_UP_MAX,
    CatchUp,
    Overlap,
    Run,
    RunCause,
    RunOutcome,
    ScheduleId,
    ScheduleSpec,
    SkipReason,
    Timing,
)
from shard.schedules import calendar
from shard.vocabulary import Micros

# A run that is stored more than this time after it was due counts as catch-up.
LATE_US = 60_000_000
# How often a router checks whether the job that a buffered run waits for has ended.
BUFFER_LOOK_US = 1_000_000
# With jitter, an instant is late only if this time has passed since the end of its jitter, because a router needs some
# time to store the run.
_IN_TIME_US = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Present:
    """The state of a schedule that may be due, as its shard has it."""

    now: Micros
    # The first instant that is not decided. None: there is no such instant.
    next_at: Micros | None
    # Whether the job of the previous run is live.
    running: bool
    buffered: int


@dataclass(slots=True, kw_only=True)
class Plan:
    """What is to be done with a schedule."""

    # In the order of their instants. Job ids and times of decisions are not filled in.
    runs: list[Run] = field(default_factory=list[Run])
    next_at: Micros | None
    wake_at: Micros | None
    buffered: int
    # Whether the first buffered run is to be stored, before `runs`.
    promotes: bool = False
    # Whether the job of the previous run must be cancelled first. If so, nothing else is to be done.
    cancels: bool = False


def plan(schedule: ScheduleId, spec: ScheduleSpec, present: Present) -> Plan:
    """Returns the plan for a schedule at the present time."""
    timing, now, next_at = spec.timing, present.now, present.next_at
    line = _Line(running=present.running, buffered=present.buffered)
    promotes = line.promote()
    due: Sequence[Micros] = ()
    runs: list[Run] = []
    latest, since = (None, now) if next_at is None else _latest_due(schedule, timing, next_at, now)
    if next_at is not None and latest is None and calendar.due(timing, schedule, next_at) <= now:
        next_at, latest = _moved(timing, next_at)
    if next_at is not None and latest is not None:
        if present.running and spec.overlap is Overlap.CANCEL_RUNNING:
            return Plan(next_at=next_at, wake_at=now, buffered=present.buffered, cancels=True)
        in_time_from = latest if not timing.jitter_us else min(latest, now - timing.jitter_us - _IN_TIME_US)
        due = _kept(spec, next_at, latest, in_time_from, now)
        if due[0] > next_at:
            runs.append(_skipped(timing, next_at, due[0]))
        for at in due:
            is_late = at < in_time_from or now - since > LATE_US
            runs.append(line.add(at, spec.overlap, RunCause.CATCH_UP if is_late else RunCause.SCHEDULE, last=latest))
        next_at = calendar.following(timing, latest)
    wake_at = None if next_at is None else calendar.due(timing, schedule, next_at)
    if line.buffered:
        look_at = Micros(now + BUFFER_LOOK_US)
        wake_at = look_at if wake_at is None else min(wake_at, look_at)
    return Plan(runs=runs, next_at=next_at, wake_at=wake_at, buffered=line.buffered, promotes=promotes)


def backfill(instants: Iterable[Micros], overlap: Overlap, *, running: bool, buffered: int) -> tuple[list[Run], int]:
    """Returns the runs of a backfill of these instants, and how many runs are buffered after the backfill."""
    line = _Line(running=running, buffered=buffered)
    ordered = sorted(instants)
    return [line.add(at, overlap, RunCause.BACKFILL, last=ordered[-1]) for at in ordered], line.buffered


def skip_due(
    schedule: ScheduleId, timing: Timing, next_at: Micros | None, now: Micros, *, reason: SkipReason
) -> tuple[Run | None, Micros | None]:
    """Decides to skip all undecided instants that are due, such as the instants of a pause that ends now. Returns the
    run that records the skip, and the first instant after the skipped instants."""
    latest = None if next_at is None else _latest_due(schedule, timing, next_at, now)[0]
    return (None, next_at) if latest is None else skip_until(timing, next_at, latest, reason=reason)


def skip_until(
    timing: Timing, next_at: Micros | None, moment: Micros, *, reason: SkipReason
) -> tuple[Run | None, Micros | None]:
    """Decides to skip all undecided instants until this moment, even if their jitter is not over. Returns the run that
    records the skip, and the first instant after the skipped instants."""
    after = calendar.following(timing, moment)
    if next_at is None or next_at > moment:
        return None, next_at
    run = _skipped(timing, next_at, Micros(moment + 1) if after is None else after)
    return run._replace(skipped_for=reason, cause=RunCause.SCHEDULE), after


@dataclass(slots=True, kw_only=True)
class _Line:
    """Decides the runs of one schedule, one after another, by its overlap policy."""

    running: bool
    buffered: int

    def promote(self) -> bool:
        """Returns whether the first buffered run can be stored now. If so, counts this run as running."""
        if self.running or not self.buffered:
            return False
        self.running = True
        self.buffered -= 1
        return True

    def add(self, at: Micros, overlap: Overlap, cause: RunCause, *, last: Micros) -> Run:
        """Decides one run. `last`: the instant of the last run that is decided together with this run."""
        match overlap:
            case Overlap.ALLOW:
                return Run(at, cause, RunOutcome.STORED)
            case Overlap.CANCEL_RUNNING:
                # Only the last run is stored, because each earlier run would be cancelled at once by the next one.
                if at == last:
                    return Run(at, cause, RunOutcome.STORED)
                room = 0
            case Overlap.SKIP:
                room = 0
            case Overlap.BUFFER_ONE:
                room = 1
            case Overlap.BUFFER_ALL:
                room = BUFFERED_MAX
            case _:
                assert_never(overlap)
        if overlap is not Overlap.CANCEL_RUNNING and not self.running and not self.buffered:
            self.running = True
            return Run(at, cause, RunOutcome.STORED)
        if self.buffered < room:
            self.buffered += 1
            return Run(at, cause, RunOutcome.BUFFERED)
        return Run(at, cause, RunOutcome.SKIPPED, skipped_for=SkipReason.OVERLAP)


def _latest_due(schedule: ScheduleId, timing: Timing, next_at: Micros, now: Micros) -> tuple[Micros | None, Micros]:
    """Returns the latest instant that is due, and the time at which it became due. Runs are stored in the order of
    their instants. So an instant is due when its own jitter and the jitter of each earlier instant are over. Checks at
    most CATCH_UP_MAX instants whose jitter may not be over. If there are more, the next call finds them."""
    # If an instant is as old as `jitter_us`, its jitter is over in any case.
    latest = next(calendar.until(timing, Micros(now - timing.jitter_us)), None)
    if latest is not None and latest < next_at:
        latest = None
    since = now if latest is None else calendar.due(timing, schedule, latest)
    for at in islice(calendar.after(timing, Micros(next_at - 1) if latest is None else latest), CATCH_UP_MAX):
        due = calendar.due(timing, schedule, at)
        if due > now:
            break
        since = due if latest is None else max(since, due)
        latest = at
    return latest, since


def _moved(timing: Timing, next_at: Micros) -> tuple[Micros, Micros | None]:
    """Decides about an instant that the calendar does not have any more, because the rules of the time zone have
    changed. Returns the first instant that is not decided, and the latest instant that is due. If the calendar now has
    the instant at an earlier time, its run is stored at once. If the calendar has it at a later time, its run waits
    until then."""
    before = next(calendar.until(timing, next_at), None)
    behind = calendar.following(timing, next_at)
    if behind is None or (before is not None and next_at - before < behind - next_at):
        return next_at, next_at
    return behind, None


def _kept(spec: ScheduleSpec, next_at: Micros, latest: Micros, in_time_from: int, now: Micros) -> list[Micros]:
    """Returns the instants from `next_at` to `latest` (included) that are not too late to be stored, in order. Always
    returns at least `latest`. The instants from `in_time_from` on are not late at all."""
    match spec.catch_up:
        case CatchUp.LATEST:
            oldest = in_time_from
        case CatchUp.WINDOW:
            oldest = min(in_time_from, now - (spec.catch_up_window_us or 0))
        case CatchUp.ALL:
            oldest = next_at
        case _:
            assert_never(spec.catch_up)
    oldest = max(oldest, next_at)
    if oldest >= latest:
        return [latest]
    kept: list[Micros] = []
    for at in calendar.until(spec.timing, latest):
        if len(kept) == CATCH_UP_MAX or at < oldest:
            break
        kept.append(at)
    return kept[::-1]


def _skipped(timing: Timing, first: Micros, before: Micros) -> Run:
    """Returns the run that records the instants from `first` up to, but not including, `before` as skipped."""
    last = next(calendar.until(timing, Micros(before - 1)), first)
    through = last if last > first else None
    return Run(first, RunCause.CATCH_UP, RunOutcome.SKIPPED, through=through, skipped_for=SkipReason.CATCH_UP)
