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


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """One workflow, as in a shard's tables."""

    workflow: str
    org: str
    shard: str
    state: str
    # The state of each node, by the id of its job; callbacks too.
    nodes: Mapping[str, str]


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
