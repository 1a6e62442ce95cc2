"""The vocabulary of the queue as types. Pure: no I/O, no clock. proto, SQL and docs/concepts.md use the same words."""

from __future__ import annotations

import enum
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple, NewType, get_args, get_origin

OrgId = NewType("OrgId", str)
QueueName = NewType("QueueName", str)
# A UUIDv7 as canonical lower-case text.
JobId = NewType("JobId", str)
ShardName = NewType("ShardName", str)
Slot = NewType("Slot", int)
# The number of a queue of an org in one shard's database. On another shard, the same queue has another number.
QueueId = NewType("QueueId", int)
# Microseconds since 1970-01-01 UTC, by the clock of a shard's Postgres.
Micros = NewType("Micros", int)
HOUR_US = 3_600_000_000

# Stands for the catalog's database where a shard's name is expected.
CATALOG = ShardName("catalog")
PRIORITIES = range(1, 10)
PRIORITY_DEFAULT = 5
MAX_ATTEMPTS_DEFAULT = 20
# How many jobs of one group may be leased at the same time, if the queue has no setting for this.
GROUP_CONCURRENCY_DEFAULT = 1
# The retention in days of jobs whose queue and org set none ({{retention_of}} in shard/postgres/sql_loader.py). The
# database function kept_days repeats it (tests/unit/test_database_functions.py). With a retention of 0 days, finished
# jobs are dropped when their day has turned cold.
RETENTION_DEFAULT = 30
RETENTION_MAX = 3650
# How many different retentions the queues and orgs of one shard may have. The number is bounded, because an enqueue
# looks for its ids in each hot day of each retention.
RETENTIONS_MAX = 32
# How old the time in the id of a new job or workflow may be, and therefore how long a repeated enqueue is recognised by
# its id.
HORIZON_DAYS = 7
# The retentions that every shard has.
STANDARD_RETENTIONS = (0, 1, 7, 30, 90, 365, 2557)


class JobState(enum.Enum):
    """The state of a job. proto/windrow/v1/job.proto says which calls move a job out of each state."""

    # The job waits for other nodes of its workflow.
    BLOCKED = "blocked"
    SCHEDULED = "scheduled"
    READY = "ready"
    LEASED = "leased"
    SUCCEEDED = "succeeded"
    DEAD = "dead"
    CANCELLED = "cancelled"


LIVE = frozenset({JobState.BLOCKED, JobState.SCHEDULED, JobState.READY, JobState.LEASED})
# Finished jobs remain on the shard where they finished, even if their org moves to another shard.
FINISHED = frozenset({JobState.SUCCEEDED, JobState.CANCELLED})


class Outcome(enum.Enum):
    """How an attempt ended."""

    ACKED = "acked"
    NACKED = "nacked"
    EXPIRED = "expired"
    RELEASED = "released"
    # Expired, because the attempt had lasted for the job's max_runtime.
    TIMED_OUT = "timed_out"
    # The job was cancelled during the attempt.
    CANCELLED = "cancelled"


class Answer(enum.Enum):
    """The result of a call for one of its jobs."""

    OK = "ok"
    STALE = "stale"
    NOT_FOUND = "not_found"
    CANCELLED = "cancelled"
    # The job is on its way to another shard. The router then asks the other shard, and after that this shard again.
    # Clients never see this answer.
    DEPARTING = "departing"


class Signalled(NamedTuple):
    """The result of a signal for a job. `is_first`: whether this signal counts. If this signal does not count, and the
    answer is OK, the job had a signal before."""

    answer: Answer
    is_first: bool


class Known(NamedTuple):
    """A known job that an enqueue found instead of storing a duplicate. `differs`: the known job has the id that was
    sent, but another queue, kind or payload."""

    state: JobState
    differs: bool


class Progress(NamedTuple):
    """How far an attempt has come, as its worker reported it. `total` 0: not known."""

    done: int = 0
    total: int = 0
    note: str = ""

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> Progress:
        """Returns the progress that a job has. Ignores other fields, which a newer release may have stored."""
        return cls(**{name: stored[name] for name in cls._fields if name in stored})

    def to_json(self) -> str:
        """Returns the JSON that the job stores: the fields that are not empty."""
        return _without_empty(self)


class Failure(NamedTuple):
    """Why an attempt failed, as its worker reported it. `permanent`: no later attempt can succeed."""

    type: str = ""
    message: str = ""
    stack: str = ""
    permanent: bool = False

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> Failure:
        """Returns the failure that the attempt history has. Ignores other fields, which a newer release may have
        stored."""
        return cls(**{name: stored[name] for name in cls._fields if name in stored})

    def to_json(self) -> str:
        """Returns the JSON that the attempt history stores: the fields that are not empty."""
        return _without_empty(self)


def _without_empty(stored: Progress | Failure) -> str:
    told = {name: value for name, value in stored._asdict().items() if value}
    return json.dumps(told, ensure_ascii=False, separators=(",", ":"))


@dataclass(slots=True, kw_only=True)
class NewJobs:
    """New jobs of one org as columns, in the form in which they are sent to Postgres. There is no object for a single
    job.

    `ids`, `queues`, `kinds` and `payloads` have one entry for each job. The other columns are sparse: they map a job's
    position to its value, because most batches do not use them. Times and durations are in microseconds. `attributes`
    and `retries` are JSON texts.
    """

    org: OrgId
    ids: list[str] = field(default_factory=list[str])
    queues: list[QueueName] = field(default_factory=list[QueueName])
    kinds: list[str] = field(default_factory=list[str])
    payloads: list[bytes] = field(default_factory=list[bytes])
    priorities: dict[int, int] = field(default_factory=dict[int, int])
    attributes: dict[int, str] = field(default_factory=dict[int, str])
    run_at_us: dict[int, int] = field(default_factory=dict[int, int])
    delay_us: dict[int, int] = field(default_factory=dict[int, int])
    expires_at_us: dict[int, int] = field(default_factory=dict[int, int])
    max_attempts: dict[int, int] = field(default_factory=dict[int, int])
    retries: dict[int, str] = field(default_factory=dict[int, str])
    dedup_keys: dict[int, str] = field(default_factory=dict[int, str])
    dedup_window_us: dict[int, int] = field(default_factory=dict[int, int])
    traces: dict[int, str] = field(default_factory=dict[int, str])
    live_keys: dict[int, str] = field(default_factory=dict[int, str])
    max_runtimes_us: dict[int, int] = field(default_factory=dict[int, int])
    groups: dict[int, str] = field(default_factory=dict[int, str])

    def __len__(self) -> int:
        return len(self.ids)

    def sizes(self, positions: Sequence[int]) -> list[int]:
        """Returns the number of bytes of each job's payload and attributes."""
        if not self.attributes:
            return [len(self.payloads[at]) for at in positions]
        # The JSON text of attributes is ASCII.
        return [len(self.payloads[at]) + len(self.attributes.get(at, "")) for at in positions]

    def only(self, positions: Sequence[int]) -> NewJobs:
        """Returns the jobs at these positions as a batch of their own."""
        part = NewJobs(org=self.org)
        for name in ("ids", "queues", "kinds", "payloads"):
            column = getattr(self, name)
            setattr(part, name, [column[at] for at in positions])
        for name in SPARSE_COLUMNS:
            column = getattr(self, name)
            if column:
                setattr(part, name, {new: column[old] for new, old in enumerate(positions) if old in column})
        return part


# The sparse columns of NewJobs, each with the type of its values.
SPARSE_COLUMNS: Mapping[str, type] = {
    column.name: get_args(column.default_factory)[1]
    for column in fields(NewJobs)
    if get_origin(column.default_factory) is dict
}
# The content that a job has from its producer: each column of the tables of jobs, with the column of NewJobs that fills
# it. Only alter.sql changes such content. Every statement that stores or moves a job includes all these columns
# (shard/postgres/sql_loader.py).
JOB_CONTENT: Mapping[str, str] = {
    "kind": "kinds",
    "payload": "payloads",
    "attributes": "attributes",
    "retry": "retries",
    "dedup_key": "dedup_keys",
    "trace": "traces",
    # A dedup key that counts while its job is live. A job has this key or a dedup_key, not both.
    "live_key": "live_keys",
    "max_runtime_us": "max_runtimes_us",
    # At most group_concurrency (a setting of the queue) jobs of one queue and group are leased at the same time.
    "group_key": "groups",
}
# What consumers report while they hold a lease (Extend): columns of the tables of jobs.
REPORTED = ("progress", "checkpoint")
# What a job stores about the run of a schedule that stored it: columns of the tables of jobs (shard/schedule.py).
OF_SCHEDULES = ("scheduled_run",)
# Which node of a workflow a job is: a column of the tables of jobs (shard/workflow.py).
OF_WORKFLOWS = ("workflow_node",)


class Alteration(NamedTuple):
    """A change of a job that is blocked, scheduled or ready. None: the value is not changed. At most one of `run_at_us`
    and `delay_us` is given."""

    priority: int | None = None
    run_at_us: int | None = None
    delay_us: int | None = None
    # All new attributes, as JSON.
    attributes: str | None = None


class Claimed(NamedTuple):
    """A job with a new lease. The fields have the order of claim.sql's columns, with the queue's name instead of its
    id."""

    id: JobId
    queue: QueueName
    priority: int
    attempt: int
    max_attempts: int | None
    enqueued_at: Micros
    run_at: Micros
    lease: int
    leased_at: Micros
    deadline: Micros
    expired: bool
    kind: str
    payload: bytes
    attributes: str | None = None
    trace: str | None = None
    max_runtime_us: int | None = None
    group_key: str | None = None
    checkpoint: bytes | None = None
    scheduled_run: str | None = None
    workflow_node: str | None = None
    # The previous lease of the job, and its consumer, if that lease has expired.
    expired_lease: int | None = None
    expired_worker: str | None = None


class Lease(NamedTuple):
    """One consumer's lease of one job: the job, and the number of the lease. Another lease of the job has another
    number."""

    # 32 hex digits, without dashes.
    job_hex: str
    number: int
