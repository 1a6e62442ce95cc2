"""A schedule, which stores jobs at instants of a calendar, and its runs. Pure: no I/O.

All times are microseconds since 1970 by the clock of a shard's Postgres. shard/schedules/ decides when a schedule
fires, and what happens then.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NewType

from shard.job_record import NOT_REPEATED
from shard.vocabulary import JOB_CONTENT, JobId, Micros, OrgId

# A UUID, as canonical lower-case text.
ScheduleId = NewType("ScheduleId", str)
ScheduleName = NewType("ScheduleName", str)

SCHEDULES_MAX = 10_000
# How many runs of a schedule may wait for the end of an earlier run.
BUFFERED_MAX = 100
# Upper bound for the instants that a schedule stores late in one transaction, after an outage.
CATCH_UP_MAX = 1000
# How many instants one backfill may have.
BACKFILL_MAX = 1000
# How many runs of a schedule are kept. Runs of backfills are kept in addition to these, for as long as shards accept
# ids of that age.
RUNS_KEPT = 20
PREVIEW_MAX = 100


class Overlap(enum.Enum):
    """What happens to a run that is due while the job of the previous run is live."""

    # The run is stored.
    ALLOW = "allow"
    # The run is skipped.
    SKIP = "skip"
    # The run waits until that job has ended. If a run waits already, the new run is skipped.
    BUFFER_ONE = "buffer_one"
    # The run waits. If BUFFERED_MAX runs wait already, the new run is skipped.
    BUFFER_ALL = "buffer_all"
    # The live job is cancelled, and the run is stored.
    CANCEL_RUNNING = "cancel_running"


class CatchUp(enum.Enum):
    """Which instants are stored late, if nobody could store them in time. The other instants are skipped."""

    LATEST = "latest"
    # The instants of the last `catch_up_window_us`, at most CATCH_UP_MAX.
    WINDOW = "window"
    # The newest CATCH_UP_MAX instants.
    ALL = "all"


class RunCause(enum.Enum):
    """Why a run was decided."""

    SCHEDULE = "schedule"
    # No router could store the run in time, so it is late, or was decided together with later runs.
    CATCH_UP = "catch_up"
    TRIGGER = "trigger"
    BACKFILL = "backfill"


class RunOutcome(enum.Enum):
    STORED = "stored"
    # The run waits until the job of the previous run has ended.
    BUFFERED = "buffered"
    SKIPPED = "skipped"


class SkipReason(enum.Enum):
    OVERLAP = "overlap"
    CATCH_UP = "catch_up"
    PAUSE = "pause"
    # The shard lost history, and may have stored this run before the loss.
    RECOVERED = "recovered"


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """When a schedule fires. Exactly one of `cron`, `interval_us` and `at` is given. No instant is before `start`, and
    every instant is before `end`. `jitter_us`: the longest time by which a run may be stored later than its instant."""

    # Five fields, or six with the seconds first.
    cron: str | None = None
    interval_us: int | None = None
    at: Micros | None = None
    # A name of the IANA time zone database.
    zone: str = "UTC"
    start: Micros | None = None
    end: Micros | None = None
    jitter_us: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleSpec:
    """What operators may set, besides the template of the jobs."""

    timing: Timing
    overlap: Overlap = Overlap.SKIP
    catch_up: CatchUp = CatchUp.LATEST
    catch_up_window_us: int | None = None
    note: str = ""
    declared_by: str = ""


# The columns of windrow.schedule that store a ScheduleSpec, each with its type.
SPEC_COLUMNS: Mapping[str, str] = {
    "cron": "text",
    "interval_us": "bigint",
    "once_at": "timestamptz",
    "zone": "text",
    "starts_at": "timestamptz",
    "ends_at": "timestamptz",
    "jitter_us": "bigint",
    "overlap": "text",
    "catch_up": "text",
    "catch_up_window_us": "bigint",
    "note": "text",
    "declared_by": "text",
}


def spec_values(spec: ScheduleSpec) -> dict[str, object]:
    """Returns the value of each of SPEC_COLUMNS for this spec."""
    timing = spec.timing
    values = (
        *(timing.cron, timing.interval_us, timing.at, timing.zone, timing.start, timing.end, timing.jitter_us),
        *(spec.overlap.value, spec.catch_up.value, spec.catch_up_window_us, spec.note, spec.declared_by),
    )
    return dict(zip(SPEC_COLUMNS, values, strict=True))


def spec_of(values: Sequence[Any]) -> ScheduleSpec:
    """Returns the spec with these values of SPEC_COLUMNS."""
    cron, interval_us, at, zone, start, end, jitter_us, overlap, catch_up, window_us, note, declared_by = values
    return ScheduleSpec(
        timing=Timing(cron=cron, interval_us=interval_us, at=at, zone=zone, start=start, end=end, jitter_us=jitter_us),
        overlap=Overlap(overlap),
        catch_up=CatchUp(catch_up),
        catch_up_window_us=window_us,
        note=note,
        declared_by=declared_by,
    )


# The columns of windrow.schedule that hold the template: what each job of the schedule gets, except its identity.
TEMPLATE_COLUMNS = ("queue", "priority", "max_attempts", *(name for name in JOB_CONTENT if name not in NOT_REPEATED))
Template = Mapping[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleRecord:
    """A schedule as a shard has stored it."""

    id: ScheduleId
    org: OrgId
    name: ScheduleName
    spec: ScheduleSpec
    template: Template
    created_at: Micros
    paused_at: Micros | None
    next_at: Micros | None
    last_at: Micros | None
    last_job: JobId | None
    buffered: int


class Run(NamedTuple):
    """A run of a schedule, or several instants that were skipped together: all instants from `at` to `through`, both
    included."""

    at: Micros
    cause: RunCause
    outcome: RunOutcome
    through: Micros | None = None
    skipped_for: SkipReason | None = None
    job_id: JobId | None = None
    decided_at: Micros = Micros(0)


class ScheduledRun(NamedTuple):
    """What a job stores about its run. `previous`: the instant of the run that was stored before this run."""

    schedule: ScheduleName
    at: Micros
    previous: Micros | None
    cause: RunCause

    def to_json(self) -> str:
        told = {"schedule": self.schedule, "at": self.at, "previous": self.previous, "cause": self.cause.value}
        return json.dumps({name: value for name, value in told.items() if value is not None}, separators=(",", ":"))

    @classmethod
    def from_json(cls, stored: str) -> ScheduledRun:
        """Returns the run that a job stores. Ignores other fields, which a newer release may have stored."""
        told = json.loads(stored)
        return cls(told["schedule"], told["at"], told.get("previous"), RunCause(told["cause"]))
