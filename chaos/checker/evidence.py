"""What the checker is given, and what it answers."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

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


@dataclass(frozen=True, slots=True, kw_only=True)
class OrgBooks:
    """One org's books on one shard, as `windrow check` reads them."""

    shard: str
    org: str
    accepted: int
    balanced: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    history: History
    rows: Sequence[Row]
    books: Sequence[OrgBooks]
    # From then on every due job must come on time: faults are healed, and leases from before have ended.
    calm_s: float
    # How late a job may come by then: the sweep's interval and what the machine may take.
    late_s_max: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    invariant: str
    what: str
