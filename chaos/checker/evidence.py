"""What the checker is given, and what it answers."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from chaos.history import History


class State(enum.StrEnum):
    """Where a row stands. LIVE: scheduled, ready or leased."""

    LIVE = "live"
    SUCCEEDED = "succeeded"
    DEAD = "dead"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True, kw_only=True)
class Past:
    """One ended attempt, as the job's history has it. Times by the shard's clock."""

    lease: int
    outcome: str
    leased_at_us: int
    ended_at_us: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One job, as a shard's tables have it."""

    job: str
    org: str
    queue: str
    shard: str
    state: State
    key: str = ""
    # The latest lease.
    lease: int | None = None
    leased_at_us: int | None = None
    # Oldest first; the newest 50.
    past: Sequence[Past] = ()
    # On its way to another shard: set aside here, and perhaps there by now.
    departing: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class OrgBooks:
    """One org's books on one shard, as `windrow check` reads them."""

    shard: str
    org: str
    accepted: int
    balanced: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """The catalog puts slots somewhere: a cluster's beginning, or one step of a move."""

    at_s: float
    slots: Sequence[int]
    writes: Sequence[str]
    reads: Sequence[str]
    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Owned:
    """A shard comes to know something of slots: that it owns them, that it does no longer, or that a chunk has left or
    come."""

    shard: str
    at_s: float
    slots: Sequence[int]
    # owned or draining, as the table has it.
    state: str
    epoch: int
    chunk: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a router finds when all is over, of one org."""

    org: str
    # What it says of each job that was asked for, by id; as often as it names it.
    jobs: Sequence[tuple[str, State]]
    # Of all its jobs.
    counted: Mapping[State, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class InForce:
    """A router said that it goes by the cluster file with this digest."""

    at_s: float
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Files:
    """Cluster files, by their digests."""

    in_force: Sequence[InForce] = ()
    # Those that nobody may go by.
    unusable: frozenset[str] = frozenset()
    # That was there in the end.
    last: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Alone:
    """A fault beside which nothing else was done to the cluster, also for a while before it."""

    fault: str
    began_s: float
    # When all was whole again.
    ended_s: float
    # The orgs that it struck, where it struck some and not others.
    orgs: Sequence[str] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    history: History
    rows: Sequence[Row]
    books: Sequence[OrgBooks]
    # In the order of the catalog's commits.
    placed: Sequence[Placed] = ()
    # Of each shard in the order of its commits.
    owned: Sequence[Owned] = ()
    # The slots of orgs that have one of their own.
    pins: Mapping[str, int] = field(default_factory=dict[str, int])
    # Of every org; None: nobody has looked.
    found: Sequence[Found] | None = None
    files: Files = field(default_factory=Files)
    alone: Sequence[Alone] = ()
    # How long a call may take that nothing hinders, on this machine.
    answer_s_max: float = 2.0
    # The most resident memory that each router process was seen to have, by process id.
    resident_bytes: Mapping[int, int] = field(default_factory=dict[int, int])
    # None: no bound was given.
    resident_bytes_max: int | None = None
    # From then on every due job must come on time: faults are healed, and leases from before have ended.
    calm_s: float
    # How late a job may come by then: the sweep's interval and what the machine may take.
    late_s_max: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    invariant: str
    what: str
