"""The checker's input and output."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from proof.history import History

# The system may adjust the machine's wall clock from time to time, by at most this many seconds.
CLOCK_S = 0.05
CLOCK_US = round(CLOCK_S * 1e6)


class State(enum.StrEnum):
    """The state of a job in its row. LIVE: blocked, scheduled, ready or leased."""

    LIVE = "live"
    SUCCEEDED = "succeeded"
    DEAD = "dead"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True, kw_only=True)
class Past:
    """One ended attempt, from the job's history. Times are of the shard's clock."""

    lease: int
    outcome: str
    leased_at_us: int
    ended_at_us: int


class RunName(NamedTuple):
    """The name by which a job refers to the run of a schedule that stored the job: the schedule's name, the nominal
    instant, and the number of the terms (`Terms`) under which the job was stored."""

    schedule: str
    at_us: int
    terms: int = 0


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
    # The newest 50 attempts, the oldest first.
    past: Sequence[Past] = ()
    # Whether the job is on its way to another shard. It may have arrived there already.
    departing: bool = False
    # The run of a schedule that stored the job. None: no schedule stored it.
    run: RunName | None = None
    # The time at which the job was stored.
    stored_us: int = 0
    # The signal with which the job of a node succeeded. None: no signal ended the job.
    signal: str | None = None
    # The time at which the job was cancelled because no signal had come in time. None: the job was not cancelled for
    # this reason.
    unsignalled_us: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """One workflow, as a shard's tables have it."""

    workflow: str
    org: str
    shard: str
    state: str
    # The state of each node, callbacks included, by the id of its job.
    nodes: Mapping[str, str]
    # The names of the nodes that jobs of the workflow have added, by the ids of the nodes' jobs.
    added: Mapping[str, str] = field(default_factory=dict[str, str])
    # The ids of the jobs that the end of the workflow releases.
    callbacks: frozenset[str] = frozenset()
    # The workflow that this one retries. Empty: this workflow is no retry.
    retry_of: str = ""
    # The names of all nodes, by the ids of the nodes' jobs.
    names: Mapping[str, str] = field(default_factory=dict[str, str])
    is_paused: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """The timing of a schedule, and its policies."""

    # The number of these terms, which the jobs stored under them have as an attribute.
    number: int = 0
    # The interval of the schedule. The instants of the schedule are all times 1970 + n × `every_us` + `offset_us`
    # between its creation and its end, where n is a whole number.
    every_us: int
    offset_us: int = 0
    # The reasons for which the schedule's policies may skip an instant.
    skips_for: frozenset[str]
    # Whether the overlap policy cancels the job of the previous run.
    cancels: bool = False


class ChangeKind(enum.StrEnum):
    PAUSE = "pause"
    RESUME = "resume"
    ALTER = "alter"
    # For workflows only.
    CANCEL = "cancel"


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One try of a call that changes a schedule or a workflow. Times are of the shards' clock."""

    kind: ChangeKind
    began_us: int
    # None: the call was not answered, so it may have been executed at any later time, or not at all.
    ended_us: int | None
    # The terms to which the call alters the schedule. None: the call does not alter the schedule.
    terms: Terms | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Backfill:
    """One try of a call of BackfillSchedule. Times are of the shards' clock."""

    # The range of the backfill. The range does not include its end.
    begin_us: int
    end_us: int
    # Whether the overlap policy of the backfill may skip instants.
    may_skip: bool
    began_us: int
    # None: the call was not answered, so it may have been executed at any later time, or not at all.
    ended_us: int | None
    # The number of instants in the answer. None: there was no answer.
    instants: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """A schedule that the test run created, or tried to create. Times are of the shards' clock."""

    org: str
    name: str
    # The terms with which the schedule was created.
    terms: Terms
    ends_us: int
    # Changes, made one after another.
    changes: Sequence[Change] = ()
    # The jobs in the answers to calls of TriggerSchedule, by request id. No jobs: the request was not answered.
    triggers: Mapping[str, Sequence[str]] = field(default_factory=dict[str, Sequence[str]])
    # Backfills. A backfill is never made at the same time as another backfill or a change.
    backfills: Sequence[Backfill] = ()
    # How many calls were answered NOT_FOUND after a router had said that the schedule exists.
    denied: int = 0
    # Whether a router said that the schedule exists.
    acknowledged: bool = True

    @property
    def alterations(self) -> list[tuple[int, int | None, Terms]]:
        """The calls that alter the schedule: for each its beginning, its end and the new terms."""
        return [(one.began_us, one.ended_us, one.terms) for one in self.changes if one.terms is not None]


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatedFlow:
    """A workflow that operators changed. Times are of the shards' clock."""

    workflow: str
    org: str
    # Changes, made one after another. A pause that had no effect, because the workflow had ended, is not among them.
    changes: Sequence[Change] = ()
    # The time at which the first call that cancels the workflow began, by the monotonic clock. None: there was no such
    # call.
    cancelling_s: float | None = None
    # The state of the workflow in the answer to the cancel. Empty: the cancel was not answered.
    ended_as: str = ""
    # `retry`: the id of the workflow that retries this one. Empty: nobody retried it. `retried`: whether the call that
    # retries it was answered.
    retry: str = ""
    retried: bool = False


class Release(NamedTuple):
    """The release of a node of a workflow, with the time by the shard's clock."""

    workflow: str
    job: str
    at_us: int
    # The time at which the transaction of the release began.
    began_us: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredSchedule:
    """A schedule, as a shard's tables have it."""

    id: str
    org: str
    name: str
    shard: str
    created_us: int


class Run(NamedTuple):
    """A record that a shard once had about a run, or about instants that were skipped together. In the second case, the
    instants are those from `at_us` to `through_us`, both included."""

    schedule_id: str
    at_us: int
    through_us: int | None
    # `stored`, `buffered` or `skipped`, as in the table.
    outcome: str
    skipped_for: str | None
    job: str | None
    # The time at which the transaction that made this decision began.
    decided_us: int
    # The id of the TriggerSchedule request that asked for the run. None: no such request.
    request: str | None = None
    # `schedule`, `catch_up`, `trigger` or `backfill`, as in the table.
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
    """The catalog's placement of slots at the beginning of the test run, or after one step of a move."""

    at_s: float
    slots: Sequence[int]
    writes: Sequence[str]
    reads: Sequence[str]
    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Owned:
    """A change of what a shard knows about slots: the shard now owns the slots, does not own them any more, or has sent
    or received a chunk of their jobs."""

    shard: str
    at_s: float
    slots: Sequence[int]
    # `owned` or `draining`, as in the table.
    state: str
    epoch: int
    chunk: int
    # Whether a move is bringing the slot to this shard, and the source still has jobs of the slot.
    arriving: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A router's answers about one org at the end of the run."""

    org: str
    # The id and the state of each job in the answer. If the answer names a job twice, this list has the job twice.
    jobs: Sequence[tuple[str, State]]
    # The router's counts of all jobs of the org.
    counted: Mapping[State, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class InForce:
    """A router's report that it uses the cluster file with this digest."""

    at_s: float
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Files:
    """Cluster files, by their digests."""

    in_force: Sequence[InForce] = ()
    # Files that no process may use.
    unusable: frozenset[str] = frozenset()
    # The file that is in force at the end.
    last: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Alone:
    """A fault without any other fault at the same time or shortly before."""

    fault: str
    began_s: float
    # The time at which the fault was healed.
    ended_s: float
    # The orgs that were affected, if the fault affects only some orgs.
    orgs: Sequence[str] = ()


class Key(NamedTuple):
    """One dedup key of one queue, and the job that it stands for."""

    org: str
    queue: str
    key: str
    job: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Version:
    """The contents of a shard's database, read while nobody else was connected."""

    rows: Sequence[Row]
    keys: frozenset[Key]
    # What the shard had recorded about its slots until that time.
    owned: Sequence[Owned]
    schedules: Sequence[StoredSchedule] = ()
    # The ids of the workflows in the database. A move also moves workflows, but not their finished jobs.
    flows: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """A router's report about a shard."""

    at_s: float
    reachable: bool
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """The replacement of a shard's database by an older copy of itself. An operator then accepted the loss."""

    shard: str
    # `backup`: the older copy. `replaced`: the replaced database in its last state.
    backup: Version
    replaced: Version
    copied_s: float
    # The time from which the replaced database could not be reached any more. Calls that began later used the backup.
    swapped_s: float
    # Between `back_s` and `accepting_s`, the backup could be reached, and nobody had begun to accept the loss.
    back_s: float
    accepting_s: float
    # The time at which the command that accepts the loss had ended.
    accepted_s: float
    # What routers reported about the shard until an operator began to accept the loss.
    told: Sequence[Health] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    history: History
    rows: Sequence[Row]
    books: Sequence[OrgBooks]
    flows: Sequence[Flow] = ()
    operated: Sequence[OperatedFlow] = ()
    # The releases of nodes. A node that was stored unblocked has no release.
    releases: Sequence[Release] = ()
    schedules: Sequence[Schedule] = ()
    stored_schedules: Sequence[StoredSchedule] = ()
    # All records of runs that any shard ever had. A move copies these records.
    runs: frozenset[Run] = frozenset()
    # The placements of slots, in the order of the catalog's commits.
    placed: Sequence[Placed] = ()
    # The changes of what shards know about slots. The changes of one shard are in the order of its commits.
    owned: Sequence[Owned] = ()
    # For each org that has its own slot, the number of this slot.
    pins: Mapping[str, int] = field(default_factory=dict[str, int])
    # A router's answers about every org. None: no router was asked.
    found: Sequence[Found] | None = None
    files: Files = field(default_factory=Files)
    alone: Sequence[Alone] = ()
    # None: no backup was restored.
    restored: Restored | None = None
    # How long a call may take on this machine without a fault.
    answer_s_max: float = 2.0
    # The largest resident memory that was seen for each router process, by process id.
    resident_bytes: Mapping[int, int] = field(default_factory=dict[int, int])
    # The bound for the resident memory. None: no bound was given.
    resident_bytes_max: int | None = None
    # The time from which every due job must be delivered on time, because faults are over and earlier leases have
    # ended. None: deliveries are not checked.
    calm_s: float | None = None
    # How late a job may be delivered after `calm_s`: the sweep interval, plus the delay that a slow machine may cause.
    late_s_max: float = 0.0
    # Whether no process was killed, and every client shut down properly.
    faultless: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    invariant: str
    what: str
    # True: a restored backup explains this, so it does not count as a violation.
    excused: bool = False
