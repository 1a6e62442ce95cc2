"""The checker's input and output."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from proof.history import History


class State(enum.StrEnum):
    """The table or state of a row. LIVE: scheduled, ready or leased."""

    LIVE = "live"
    SUCCEEDED = "succeeded"
    DEAD = "dead"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True, kw_only=True)
class Past:
    """One ended attempt, from the job's history. Times are the shard's clock."""

    lease: int
    outcome: str
    leased_at_us: int
    ended_at_us: int


class RunName(NamedTuple):
    """What a job says of the run of a schedule that stored it: the schedule's name, the nominal instant, and the number
    of the terms (Terms) by which it was stored."""

    schedule: str
    at_us: int
    terms: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One job, as in a shard's tables."""

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
    # On its way to another shard: set aside here, and perhaps already there.
    departing: bool = False
    # None: no schedule stored it.
    run: RunName | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """One workflow, as in a shard's tables."""

    workflow: str
    org: str
    shard: str
    state: str
    # The state of each node, by the id of its job; callbacks too.
    nodes: Mapping[str, str]
    # The names of the nodes that its jobs have added, by the ids of their jobs.
    added: Mapping[str, str] = field(default_factory=dict[str, str])
    # The jobs that are released when it ends.
    callbacks: frozenset[str] = frozenset()
    # The workflow that it retries. Empty: it retries none.
    retry_of: str = ""
    # The names of all nodes, by the ids of their jobs.
    names: Mapping[str, str] = field(default_factory=dict[str, str])
    is_paused: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """When a schedule fires, and what it does then."""

    # Its jobs have it as an attribute.
    number: int = 0
    # It fires at each multiple of this since 1970, and `offset_us` later, after its creation and before its end.
    every_us: int
    offset_us: int = 0
    # The reasons for which its policies may skip an instant.
    skips_for: frozenset[str]
    # Its overlap policy cancels the job of the run before.
    cancels: bool = False


class ChangeKind(enum.StrEnum):
    PAUSE = "pause"
    RESUME = "resume"
    ALTER = "alter"
    # Only of a workflow.
    CANCEL = "cancel"


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One call that was to change a schedule or a workflow, made once. Times are the shards' clock."""

    kind: ChangeKind
    began_us: int
    # None: it was not answered, so it may have been executed at any later time, or not at all.
    ended_us: int | None
    # What the schedule was altered to.
    terms: Terms | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Backfill:
    """One call of BackfillSchedule, made once. Times are the shards' clock."""

    # Its range, without the end.
    begin_us: int
    end_us: int
    # Its overlap policy may skip instants.
    may_skip: bool
    began_us: int
    # None: it was not answered, so it may have been executed at any later time, or not at all.
    ended_us: int | None
    # The number of instants that the answer tells of.
    instants: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """A schedule that the run created, or tried to create. Times are the shards' clock."""

    org: str
    name: str
    # With which it was created.
    terms: Terms
    ends_us: int
    # One after another.
    changes: Sequence[Change] = ()
    # The jobs with which calls of TriggerSchedule were answered, by their request ids. Empty: none was.
    triggers: Mapping[str, Sequence[str]] = field(default_factory=dict[str, Sequence[str]])
    # Neither beside each other nor beside changes.
    backfills: Sequence[Backfill] = ()
    # How many calls were told that there is no such schedule, after a router had said that it exists.
    denied: int = 0
    # Whether a router said that it exists.
    acknowledged: bool = True

    @property
    def alterations(self) -> list[tuple[int, int | None, Terms]]:
        """The calls that were to alter it: their beginnings and ends, and to what."""
        return [(one.began_us, one.ended_us, one.terms) for one in self.changes if one.terms is not None]


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatedFlow:
    """A workflow that operators changed. Times are the shards' clock."""

    workflow: str
    org: str
    # One after another. Calls that paused nothing, because it had ended, are not among them.
    changes: Sequence[Change] = ()
    # When the first call began that was to cancel it, by the monotonic clock. None: there was none.
    cancelling_s: float | None = None
    # Its state in the answer to the cancel. Empty: it was not answered.
    ended_as: str = ""
    # The id of the workflow that was to retry it, and whether that was answered. Empty: nobody retried it.
    retry: str = ""
    retried: bool = False


class Release(NamedTuple):
    """A node of a workflow was released, by a shard's clock."""

    workflow: str
    job: str
    at_us: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredSchedule:
    """A schedule, as in a shard's tables."""

    id: str
    org: str
    name: str
    shard: str
    created_us: int


class Run(NamedTuple):
    """What a shard once recorded of a run, or of instants that were skipped together: those from `at_us` through
    `through_us`."""

    schedule_id: str
    at_us: int
    through_us: int | None
    # stored, buffered or skipped, as in the table.
    outcome: str
    skipped_for: str | None
    job: str | None
    # When the transaction began that decided this.
    decided_us: int
    # The call of TriggerSchedule that wanted it. None: none did.
    request: str | None = None
    # schedule, catch_up, trigger or backfill, as in the table.
    cause: str = "schedule"


@dataclass(frozen=True, slots=True, kw_only=True)
class OrgBooks:
    """One org's books on one shard, as `windrow check` reads them."""

    shard: str
    org: str
    accepted: int
    balanced: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """The catalog's placement of slots: at the beginning, or after one step of a move."""

    at_s: float
    slots: Sequence[int]
    writes: Sequence[str]
    reads: Sequence[str]
    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Owned:
    """A change of what a shard knows about slots: that it owns them, that it does not any more, or that a chunk has
    left or arrived."""

    shard: str
    at_s: float
    slots: Sequence[int]
    # owned or draining, as in the table.
    state: str
    epoch: int
    chunk: int
    # The slot arrives by a move, and the source has jobs of it left.
    arriving: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a router answers about one org at the end of the run."""

    org: str
    # The state of each job that was asked for, by id, as often as the answer names it.
    jobs: Sequence[tuple[str, State]]
    # The counts of all its jobs.
    counted: Mapping[State, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class InForce:
    """A router reported that it uses the cluster file with this digest."""

    at_s: float
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Files:
    """Cluster files, by their digests."""

    in_force: Sequence[InForce] = ()
    # Files that no process may use.
    unusable: frozenset[str] = frozenset()
    # The file at the end.
    last: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Alone:
    """A fault during which, and for a while before, there was no other fault."""

    fault: str
    began_s: float
    # When everything was repaired.
    ended_s: float
    # The orgs that were affected, if others were not.
    orgs: Sequence[str] = ()


class Key(NamedTuple):
    """One dedup key of one queue, and the job that it stands for."""

    org: str
    queue: str
    key: str
    job: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Version:
    """The contents of a shard's database at a time when nobody was connected to it."""

    rows: Sequence[Row]
    keys: frozenset[Key]
    # What the shard had recorded about its slots by then.
    owned: Sequence[Owned]
    schedules: Sequence[StoredSchedule] = ()
    # The ids of its workflows. A move takes them along, but not their finished jobs.
    flows: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """A router's report about a shard."""

    at_s: float
    reachable: bool
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """During the run a shard's database was replaced by an older copy of itself, and the loss was accepted."""

    shard: str
    # The copy, and the replaced database in its last state.
    backup: Version
    replaced: Version
    copied_s: float
    # From this time on the newer database could not be reached; calls that began later used the older one.
    swapped_s: float
    # The time in which the older one could be reached and nobody had accepted it.
    back_s: float
    accepting_s: float
    # When the command that accepts it had ended.
    accepted_s: float
    # What routers reported about the shard in this time.
    told: Sequence[Health] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    history: History
    rows: Sequence[Row]
    books: Sequence[OrgBooks]
    flows: Sequence[Flow] = ()
    operated: Sequence[OperatedFlow] = ()
    # Without those of nodes that were free when they were stored.
    releases: Sequence[Release] = ()
    schedules: Sequence[Schedule] = ()
    stored_schedules: Sequence[StoredSchedule] = ()
    # All that was ever recorded, on any shard. A move copies runs.
    runs: frozenset[Run] = frozenset()
    # In the order of the catalog's commits.
    placed: Sequence[Placed] = ()
    # For each shard, in the order of its commits.
    owned: Sequence[Owned] = ()
    # The slots of orgs that have one of their own.
    pins: Mapping[str, int] = field(default_factory=dict[str, int])
    # For every org; None: it was not read.
    found: Sequence[Found] | None = None
    files: Files = field(default_factory=Files)
    alone: Sequence[Alone] = ()
    # None: no backup was restored.
    restored: Restored | None = None
    # How long a call may take on this machine without a fault.
    answer_s_max: float = 2.0
    # The largest resident memory that was seen of each router process, by process id.
    resident_bytes: Mapping[int, int] = field(default_factory=dict[int, int])
    # None: no bound was given.
    resident_bytes_max: int | None = None
    # From this time on every due job must be delivered on time: faults are over, and earlier leases have ended. None:
    # deliveries are not checked.
    calm_s: float | None = None
    # How late a job may then be delivered: the sweep interval, and what the machine may add.
    late_s_max: float = 0.0
    # Nothing was killed, and clients ended in order.
    faultless: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    invariant: str
    what: str
    # True: it is explained by a restored backup that lacks this, and so is no violation.
    excused: bool = False
