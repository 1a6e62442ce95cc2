"""Limits of how much orgs may enqueue: what operators set, and which limit counts for whom. Pure: no I/O, no clock."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from shard.vocabulary import OrgId, QueueName

# How many limits a cluster may have, defaults included. Every router process has a copy of all of them.
LIMITS_MAX = 10_000
# Stands for all orgs, each with a bucket of its own.
EVERY_ORG = OrgId("")
# Stands for all queues of an org together.
ALL_QUEUES = QueueName("")


class Measure(enum.StrEnum):
    """What a limit counts."""

    JOBS = "jobs"
    # Of payloads and attributes.
    BYTES = "bytes"


class LimitKey(NamedTuple):
    """What identifies a limit."""

    org: OrgId
    queue: QueueName
    measure: Measure

    def __str__(self) -> str:
        queue = f"queue {self.queue!r} of " if self.queue else ""
        return f"{self.measure} of {queue}{f'org {self.org!r}' if self.org else 'each org'}"


class Limit(NamedTuple):
    """A limit. A bucket holds up to `amount` tokens, and an empty one is full after `interval_us`."""

    key: LimitKey
    amount: int
    interval_us: int
    # Later changes of any limit have higher versions.
    version: int

    @property
    def tokens_per_s(self) -> float:
        return self.amount * 1e6 / self.interval_us

    def __str__(self) -> str:
        return f"{self.amount:,} {self.key.measure} per {self.interval_us / 1e6:g} s"


class LimitTable:
    """All limits of a cluster, as of `version`."""

    def __init__(self, limits: Iterable[Limit] = (), *, version: int = 0) -> None:
        self.version = version
        self.limits: Mapping[LimitKey, Limit] = {limit.key: limit for limit in limits}
        self._queues: dict[OrgId, set[QueueName]] = {}
        for key in self.limits:
            self._queues.setdefault(key.org, set()).add(key.queue)

    def is_limited(self, org: OrgId) -> bool:
        """Returns whether any limit counts for the org or for a queue of it."""
        return EVERY_ORG in self._queues or org in self._queues

    def of(self, org: OrgId, queue: QueueName = ALL_QUEUES) -> list[Limit]:
        """Returns the limits that count for the org as a whole, or for one of its queues, at most one of each measure:
        the org's own, or else the default."""
        found = (self.limits.get(LimitKey(org, queue, measure)) for measure in Measure)
        defaults = (self.limits.get(LimitKey(EVERY_ORG, queue, measure)) for measure in Measure)
        return [limit for own, default in zip(found, defaults, strict=True) if (limit := own or default) is not None]

    def limited_queues(self, org: OrgId) -> list[QueueName]:
        """Returns the queues for which `of` returns limits, by name. ALL_QUEUES comes first, if it is one of them."""
        return sorted(self._queues.get(org, set()) | self._queues.get(EVERY_ORG, set()))
