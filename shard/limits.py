"""The limits that operators set, and which limit applies to which org and queue. A limit bounds how much an org may
enqueue in an interval, how many of its jobs may start in an interval, how many of its jobs may be leased at the same
time, or how large its backlog may be. Pure: no I/O, no clock."""

from __future__ import annotations

import enum
import math
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from shard.vocabulary import OrgId, QueueName

# How many limits a cluster may have, defaults included. Every router process has a copy of all of them.
LIMITS_MAX = 10_000
# The org in the key of a default limit. A default applies to each org separately.
EVERY_ORG = OrgId("")
# Stands for all queues of an org together.
ALL_QUEUES = QueueName("")


class Measure(enum.StrEnum):
    """What a limit counts."""

    JOBS = "jobs"
    # The bytes of payloads and attributes.
    BYTES = "bytes"
    # Leases: jobs that are given to consumers.
    STARTS = "starts"
    # Jobs that are leased at the same time.
    IN_FLIGHT = "in_flight"
    # Jobs that have not ended, and the bytes of their payloads and attributes.
    BACKLOG = "backlog"
    BACKLOG_BYTES = "backlog_bytes"

    @property
    def has_interval(self) -> bool:
        """Whether a limit of this measure counts what happens in an interval. The other limits count what exists at the
        same time."""
        return self not in _AT_A_TIME


# Limits of the measures in these two tuples can refuse enqueues. An enqueue takes tokens from the buckets of the
# measures in ENQUEUED; the measures in BACKLOG have no buckets. Limits of all other measures delay jobs, and refuse no
# call.
ENQUEUED = (Measure.JOBS, Measure.BYTES)
BACKLOG = (Measure.BACKLOG, Measure.BACKLOG_BYTES)
# The measures that have no interval, each with the words that follow its number in messages.
_AT_A_TIME = {
    Measure.IN_FLIGHT: "jobs in flight",
    Measure.BACKLOG: "jobs that have not ended",
    Measure.BACKLOG_BYTES: "bytes of jobs that have not ended",
}


class LimitKey(NamedTuple):
    """What identifies a limit."""

    org: OrgId
    queue: QueueName
    measure: Measure

    def __str__(self) -> str:
        queue = f"queue {self.queue!r} of " if self.queue else ""
        return f"{self.measure} of {queue}{f'org {self.org!r}' if self.org else 'each org'}"


class Limit(NamedTuple):
    """A limit. A bucket holds up to `amount` tokens. An empty bucket is full after `interval_us`. A limit without an
    interval has no bucket, and its `interval_us` is 0."""

    key: LimitKey
    amount: int
    interval_us: int
    # Each change of any limit gets a higher version than the change before.
    version: int

    @property
    def tokens_per_s(self) -> float:
        return self.amount * 1e6 / self.interval_us if self.interval_us else math.inf

    def __str__(self) -> str:
        if not self.key.measure.has_interval:
            return f"{self.amount:,} {_AT_A_TIME[self.key.measure]}"
        return f"{self.amount:,} {self.key.measure} per {self.interval_us / 1e6:g} s"


class InFlightLimits(NamedTuple):
    """How many jobs of an org, and of one of its queues, may be leased at the same time. None: no limit."""

    of_org: int | None
    of_queue: int | None


class LimitTable:
    """All limits of a cluster, as of `version`."""

    def __init__(self, limits: Iterable[Limit] = (), *, version: int = 0) -> None:
        self.version = version
        self.limits: Mapping[LimitKey, Limit] = {limit.key: limit for limit in limits}
        # The queues that have limits, by org. ALL_QUEUES is among them if the org as a whole has a limit.
        self._queues: dict[OrgId, set[QueueName]] = {}
        for org, queue, _ in self.limits:
            self._queues.setdefault(org, set()).add(queue)
        self._every = self._queues.get(EVERY_ORG, set())
        # The orgs that have limits of single queues.
        self._by_queue = {org for org, queues in self._queues.items() if queues != {ALL_QUEUES}}

    def only(self, measures: Collection[Measure]) -> LimitTable:
        """Returns the limits that count one of these measures."""
        limits = [limit for limit in self.limits.values() if limit.key.measure in measures]
        return LimitTable(limits, version=self.version)

    def is_limited(self, org: OrgId) -> bool:
        """Returns whether any limit applies to the org or for a queue of it."""
        return bool(self._every) or org in self._queues

    def limits_queues(self, org: OrgId) -> bool:
        """Returns whether any limit applies to a single queue of the org."""
        return org in self._by_queue or EVERY_ORG in self._by_queue

    def of(self, org: OrgId, queue: QueueName = ALL_QUEUES) -> list[Limit]:
        """Returns the limits that apply to the org as a whole, or for one of its queues. There is at most one for each
        measure: the org's own limit or, if the org has none, the default."""
        if queue not in self._every and queue not in self._queues.get(org, ()):
            return []
        limits = self.limits
        found = (
            limits.get(LimitKey(org, queue, measure)) or limits.get(LimitKey(EVERY_ORG, queue, measure))
            for measure in Measure
        )
        return [limit for limit in found if limit is not None]

    def all_of(self, org: OrgId) -> list[Limit]:
        """Returns all limits that apply to the org as a whole, and then those for its queues, by name."""
        queues = sorted(self._every | self._queues.get(org, set()))
        return [limit for queue in queues for limit in self.of(org, queue)]
