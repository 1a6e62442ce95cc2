"""Counts the jobs of each queue of a shard, for the metrics of routers. The largest queues have figures of their own,
and one set of sums stands for all other queues (docs/decisions/0071-metrics-name-the-largest-queues.md)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from shard.admin import statements
from shard.postgres.pool import Database
from shard.vocabulary import OrgId, QueueName

# How many of the largest queues have figures of their own.
NAMED_MAX = 200
# One org gets more than 1/_SHARES of the named queues only if the queues of other orgs leave room. An org with many
# full queues must not hide the queues of other orgs.
_SHARES = 4


class QueueFigures(NamedTuple):
    """The figures of one queue, or of several queues together, in the order of the columns of
    read_queue_figures.sql."""

    # None: these are the figures of several queues.
    org: OrgId | None
    queue: QueueName | None
    scheduled: int
    ready: int
    leased: int
    dead: int
    # For how long the oldest job that a claim would get had been ready when the jobs were counted. None: no claim would
    # get a job.
    oldest_ready_s: float | None

    def plus(self, other: QueueFigures) -> QueueFigures:
        """Returns these figures combined with the figures of `other`, without the name of a queue."""
        ages = [age for age in (self.oldest_ready_s, other.oldest_ready_s) if age is not None]
        return QueueFigures(
            None,
            None,
            self.scheduled + other.scheduled,
            self.ready + other.ready,
            self.leased + other.leased,
            self.dead + other.dead,
            max(ages, default=None),
        )


async def measure(database: Database, *, max_age_us: int) -> list[QueueFigures]:
    """Returns the figures, the largest queues first. Counts the jobs again only if the last count is older than
    `max_age_us`, because a count reads every unfinished job. Raises ShardUnavailable."""
    await database.run(
        statements.MEASURE_QUEUES, {"max_age_us": max_age_us, "named_max": NAMED_MAX, "share": share_of(NAMED_MAX)}
    )
    return [QueueFigures._make(row) for row in await database.run(statements.READ_QUEUE_FIGURES, {})]


def share_of(named_max: int) -> int:
    """Returns how many of the `named_max` named queues may belong to one org, if other orgs have enough queues for the
    rest."""
    return max(1, named_max // _SHARES)


def folded(figures: Sequence[QueueFigures], *, named_max: int) -> list[QueueFigures]:
    """Returns the figures of `named_max` queues with their names, and the sums of all other queues. `figures`: the
    largest queues first. Queues that exceed their org's share get a name only if names remain."""
    share = share_of(named_max)
    ranks = Counter[OrgId | None]()
    within: list[int] = []
    beyond: list[int] = []
    for at, one in enumerate(figures):
        if one.org is not None:
            ranks[one.org] += 1
            (within if ranks[one.org] <= share else beyond).append(at)
    named = set([*within, *beyond][:named_max])
    others = QueueFigures(None, None, 0, 0, 0, 0, None)
    for at, one in enumerate(figures):
        if at not in named:
            others = others.plus(one)
    return [*(figures[at] for at in sorted(named)), others]
