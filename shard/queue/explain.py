"""Reads the facts that decide when a job, or the first job of a queue, is leased. ExplainJob and ExplainQueue use these
facts. router/codec/causes.py derives the causes from them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from shard.job_record import JobRecord
from shard.postgres import arrays
from shard.postgres.pool import Database
from shard.queue import statements
from shard.queue.consumers_seen import SEEN_US
from shard.vocabulary import JobId, Micros, OrgId, QueueName
from shard.workflow import NodeOf

# Ready jobs are counted only up to this number, so that the call is fast even if the backlog is large.
COUNTED_MAX = 1_000
# The explanation of a queue looks at no more than this many jobs of each priority that become visible later.
_NEXT_MAX = 100
# How many quarantined kinds of a queue are named.
_KINDS_MAX = 20


class ConsumersOf(NamedTuple):
    """Which consumers of a queue were recorded on a shard (shard/queue/consumers_seen.py)."""

    # When any consumer was last seen, and when a consumer that takes the kind in question was last seen. None: no such
    # consumer is recorded.
    any_at: Micros | None
    kind_at: Micros | None
    # The kinds of the consumers that were seen within SEEN_US.
    kinds: Sequence[str]


class GroupFacts(NamedTuple):
    """Why a job waits for a slot of its group."""

    group: str
    # How many jobs of the group may be leased at the same time, how many have a group slot, and how many of those are
    # leased.
    concurrency: int
    taken: int
    leased: int
    # The job of the group whose lease ends first. If no job of the group is leased, the job with the first slot. None:
    # no slot is taken.
    holder_id: JobId | None
    worker: str | None
    # The time at which the lease of that job ends. None: that job is not leased.
    until: Micros | None
    # How many jobs of the group wait before the explained job; at most COUNTED_MAX + 1.
    ahead: int


class BlockedFacts(NamedTuple):
    """What the job of a node waits for, in the order of explain_blocked.sql's columns."""

    # The name of its node, and whether the node waits for a signal.
    node: str
    is_signal: bool
    # Whether the node, which is blocked, has its signal already.
    has_signal: bool
    # Whether its workflow is paused.
    paused: bool
    # The names of some nodes for which the node waits and which have not ended. None: there is no such node.
    waits_for: Sequence[str] | None
    # How many such nodes there are; at most COUNTED_MAX + 1.
    left: int


class QuarantineFacts(NamedTuple):
    """A quarantined kind, in the order of list_quarantines.sql's columns."""

    queue: QueueName
    kind: str
    since: Micros
    crashes: int
    # None: crashes caused the quarantine; no operator ordered it.
    reason: str | None
    # None: a trial has not ended yet, or no trials are made.
    next_trial_at: Micros | None
    trial_id: JobId | None
    trial_at: Micros | None
    # How many jobs are set aside, at most COUNTED_MAX + 1.
    set_aside: int


class LiveFacts(NamedTuple):
    """What decides when a live job is leased, at one moment."""

    now: Micros
    visible_at: Micros
    # Whether the job has a lease, which may have expired.
    leased: bool
    gives_jobs: bool
    # How many ready jobs with a smaller priority, and how many with the same priority, come before this job; together
    # at most COUNTED_MAX + 1.
    more_urgent: int
    earlier: int
    # The time at which ageing moves the job to priority 1. None: the job is never moved, or has priority 1 already.
    goes_first_at: Micros | None
    # Whether the job waits for a slot of its group, or is set aside.
    waits: bool
    consumers: ConsumersOf


class JobFacts(NamedTuple):
    """What a shard knows about a job."""

    # None: the job was deleted at the end of its retention, and only its id is known.
    record: JobRecord | None
    # Only for a live job that is not on its way to another shard.
    live: LiveFacts | None = None
    # Whether the job is on its way to another shard.
    departing: bool = False
    # Only for a job that waits for a slot of its group.
    group: GroupFacts | None = None
    # Only for a blocked job.
    blocked: BlockedFacts | None = None
    # Only for a live job whose kind is quarantined, unless the job is the trial of its kind.
    quarantine: QuarantineFacts | None = None
    # Only for a job that may wait for a signal.
    signal: BlockedFacts | None = None


class QueueFacts(NamedTuple):
    """What a queue would give now."""

    now: Micros
    gives_jobs: bool
    # How many jobs are ready, at most COUNTED_MAX + 1. The next fields describe the ready job that is claimed first.
    ready: int
    first_id: JobId | None
    first_kind: str | None
    first_visible_at: Micros | None
    # How many jobs wait for slots of their groups, at most COUNTED_MAX + 1.
    waiting: int
    # These fields describe the first jobs of each priority that become visible later: how many are leased, the time at
    # which the first of these leases ends, and the time at which the first scheduled job is due.
    leased: int
    first_deadline: Micros | None
    next_due: Micros | None
    # False: not all jobs that become visible later were looked at.
    complete: bool
    consumers: ConsumersOf
    # The kinds that are quarantined.
    quarantines: Sequence[QuarantineFacts] = ()


async def read_live(
    database: Database, org: OrgId, queue: QueueName, job_id: JobId, *, floors: Sequence[Micros]
) -> tuple[LiveFacts | None, bool]:
    """Returns the facts that decide when the job is leased, and whether the job is on its way to another shard. The
    facts are None if the job is not live in this queue. `floors`: the floors at which claims start, by priority. Raises
    ShardUnavailable."""
    parameters = {**_parameters(org, queue, floors), "id": job_id}
    for (
        now,
        visible_at,
        leased,
        gives_jobs,
        departing,
        more_urgent,
        earlier,
        first_at,
        waits,
        *seen,
    ) in await database.run(statements.EXPLAIN_JOB, parameters):
        if visible_at is None:
            return None, departing
        consumers = _consumers(*seen)
        facts = LiveFacts(now, visible_at, leased, gives_jobs, more_urgent, earlier, first_at, waits, consumers)
        return facts, departing
    return None, False


async def read_group(database: Database, org: OrgId, queue: QueueName, job_id: JobId) -> GroupFacts | None:
    """Returns the facts about the group for whose slot the job waits. None: the job does not wait for a slot of its
    group. Raises ShardUnavailable."""
    parameters = {"org": org, "queue": queue, "id": job_id, "jobs_max": COUNTED_MAX + 1}
    for row in await database.run(statements.EXPLAIN_GROUP, parameters):
        return GroupFacts._make(row)
    return None


async def read_quarantines(
    database: Database, org: OrgId, queue: QueueName | None, kind: str = "", *, kinds_max: int = _KINDS_MAX
) -> list[QuarantineFacts]:
    """Returns the quarantined kinds of a queue of the org, sorted by name. `queue`: None means all queues of the org.
    `kind`: if it is not empty, only this kind is returned. Raises ShardUnavailable."""
    parameters = {
        "org": org,
        "queue": queue or "",
        "kind": kind,
        "jobs_max": COUNTED_MAX + 1,
        "kinds_max": kinds_max,
    }
    return list(map(QuarantineFacts._make, await database.run(statements.LIST_QUARANTINES, parameters)))


async def read_blocked(database: Database, org: OrgId, of: NodeOf) -> BlockedFacts | None:
    """Returns the facts about what the job of this node waits for. None: this shard does not have the
    workflow. Raises ShardUnavailable."""
    parameters = {"org": org, "workflow": of.workflow, "node": of.node, "left_max": COUNTED_MAX + 1}
    for row in await database.run(statements.EXPLAIN_BLOCKED, parameters):
        return BlockedFacts._make(row)
    return None


async def read_queue(
    database: Database, org: OrgId, queue: QueueName, *, floors: Sequence[Micros]
) -> QueueFacts | None:
    """Returns the facts about a queue: the jobs that it would give now, and its next jobs. None: the org has no such
    queue on this shard. Raises ShardUnavailable."""
    parameters = {**_parameters(org, queue, floors), "next_max": _NEXT_MAX}
    for row in await database.run(statements.EXPLAIN_QUEUE, parameters):
        quarantines = await read_quarantines(database, org, queue)
        return QueueFacts._make((*row[:-3], _consumers(*row[-3:]), quarantines))
    return None


async def was_deleted(database: Database, org: OrgId, job_id: JobId) -> bool:
    """Returns whether the org had a job with this id that was deleted at the end of its retention. Ids are remembered
    for as long as an enqueue with them may be repeated. Raises ShardUnavailable."""
    return bool(await database.run(statements.FIND_PAST_ID, {"org": org, "id": job_id}))


def _parameters(org: OrgId, queue: QueueName, floors: Sequence[Micros]) -> dict[str, object]:
    return {
        "org": org,
        "queue": queue,
        "floors_us": arrays.numbers(floors),
        "jobs_max": COUNTED_MAX + 1,
        "seen_us": SEEN_US,
    }


def _consumers(any_at: Micros | None, kind_at: Micros | None, kinds: list[str] | None) -> ConsumersOf:
    return ConsumersOf(any_at, kind_at, kinds or ())
