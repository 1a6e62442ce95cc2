"""The words of the queue, as types. Pure: no I/O, no clock. The same words in proto, SQL and docs/concepts.md."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, NewType

OrgId = NewType("OrgId", str)
QueueName = NewType("QueueName", str)
# A UUIDv7 as canonical lower-case text.
JobId = NewType("JobId", str)
ShardName = NewType("ShardName", str)
Slot = NewType("Slot", int)
# Number of an (org, queue) inside one shard's database; means nothing elsewhere.
QueueId = NewType("QueueId", int)
# Microseconds since 1970-01-01 UTC, by the clock of a shard's Postgres.
Micros = NewType("Micros", int)

# By this name what keeps the placement is spoken of as if it were a shard.
CATALOG = ShardName("catalog")
PRIORITIES = range(1, 10)
PRIORITY_DEFAULT = 5
MAX_ATTEMPTS_DEFAULT = 20
# Days; shard/sql says it too, wherever jobs finish.
RETENTION_DEFAULT = 30


class JobState(enum.Enum):
    """Where a job stands. Who moves it out of each state is said in proto/windrow/v1/job.proto."""

    SCHEDULED = "scheduled"
    READY = "ready"
    LEASED = "leased"
    SUCCEEDED = "succeeded"
    DEAD = "dead"
    CANCELLED = "cancelled"


LIVE = frozenset({JobState.SCHEDULED, JobState.READY, JobState.LEASED})
# Where they have finished they stay, also when their org moves to another shard.
FINISHED = frozenset({JobState.SUCCEEDED, JobState.CANCELLED})


class Outcome(enum.Enum):
    """How an attempt ended."""

    ACKED = "acked"
    NACKED = "nacked"
    EXPIRED = "expired"
    RELEASED = "released"


class Answer(enum.Enum):
    """What became of one job named in a call."""

    OK = "ok"
    STALE = "stale"
    NOT_FOUND = "not_found"
    # On its way to another shard: to be asked for there, and then here again. Told to routers alone.
    DEPARTING = "departing"


@dataclass(slots=True, kw_only=True)
class NewJobs:
    """Jobs of one org to be stored, as columns: what Postgres is sent, with no object made for a job on the way.

    The first columns have one entry for each job. The others are sparse, from a job's position to its value: most
    batches use none of them. Times and spans are in microseconds. `attributes` and `retries` are JSON texts.
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

    def __len__(self) -> int:
        return len(self.ids)

    def only(self, positions: Sequence[int]) -> NewJobs:
        """The jobs at these positions, as a batch of their own."""
        part = NewJobs(org=self.org)
        for name in ("ids", "queues", "kinds", "payloads"):
            column = getattr(self, name)
            setattr(part, name, [column[at] for at in positions])
        for name in SPARSE_COLUMNS:
            column = getattr(self, name)
            if column:
                setattr(part, name, {new: column[old] for new, old in enumerate(positions) if old in column})
        return part


SPARSE_COLUMNS = (
    "priorities",
    "attributes",
    "run_at_us",
    "delay_us",
    "expires_at_us",
    "max_attempts",
    "retries",
    "dedup_keys",
    "dedup_window_us",
    "traces",
)


class Claimed(NamedTuple):
    """A job under a fresh lease, in the order of claim.sql's columns, the queue by its name."""

    id: JobId
    queue: QueueName
    kind: str
    payload: bytes
    attributes: str | None
    priority: int
    attempt: int
    max_attempts: int | None
    enqueued_at: Micros
    run_at: Micros
    trace: str | None
    lease: int
    leased_at: Micros
    deadline: Micros
    expired: bool


class Lease(NamedTuple):
    """One consumer's claim on one job: which job, and the number that fences it."""

    # 32 hex digits, without dashes.
    job_hex: str
    number: int
