"""Reads what decides when a job, or the first job of a queue, is leased: for ExplainJob and ExplainQueue."""

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

# Ready jobs are counted up to this number, so that the call takes no longer for a large backlog.
COUNTED_MAX = 1_000
# How many jobs of each priority are looked at that become visible later.
_NEXT_MAX = 100
# How many quarantined kinds of a queue are named.
_KINDS_MAX = 20


class ConsumersOf(NamedTuple):
    """Which consumers of a queue were recorded on a shard (shard/queue/consumers_seen.py)."""

    # When one was seen last, of any kind, and one that takes the kind in question.
    any_at: Micros | None
    kind_at: Micros | None
    # The kinds of those that were seen within SEEN_US.
    kinds: Sequence[str]


class GroupFacts(NamedTuple):
    """Why a job waits for a slot of its group."""

    group: str
    # How many jobs of the group may be leased, how many have a slot, and how many of these are leased.
    concurrency: int
    taken: int
    leased: int
    # The job whose lease ends first, or else the one with the first slot. None: no slot is taken.
    holder_id: JobId | None
    worker: str | None
    # When its lease ends. None: it is not leased.
    until: Micros | None
    # How many jobs of the group wait before it; at most COUNTED_MAX + 1.
    ahead: int


class BlockedFacts(NamedTuple):
    """What a blocked job waits for, in the order of explain_blocked.sql's columns."""

    # The name of its node.
    node: str
    # Whether its workflow is paused.
    paused: bool
    # Some of the nodes that have not ended. None: there is none.
    waits_for: Sequence[str] | None
    # How many there are; at most COUNTED_MAX + 1.
    left: int


class QuarantineFacts(NamedTuple):
    """A quarantined kind, in the order of list_quarantines.sql's columns."""

    queue: QueueName
    kind: str
    since: Micros
    crashes: int
    # None: crashes caused the quarantine, and not an operator.
    reason: str | None
    # None: a trial is under way, or there are none.
    next_trial_at: Micros | None
    trial_id: JobId | None
    trial_at: Micros | None
    # How many jobs are set aside, at most COUNTED_MAX + 1.
    set_aside: int


class LiveFacts(NamedTuple):
    """What decides when a live job is leased, at one moment."""

    now: Micros
    visible_at: Micros
    # Whether it has a lease, which may have expired.
    leased: bool
    gives_jobs: bool
    # How many ready jobs come before it, with a smaller priority and with the same one; together at most
    # COUNTED_MAX + 1.
    more_urgent: int
    earlier: int
    # When it is moved to priority 1, because it has waited for so long. None: never, or it has that priority.
    goes_first_at: Micros | None
    # Whether it waits for a slot of its group, or is set aside.
    waits: bool
    consumers: ConsumersOf


class JobFacts(NamedTuple):
    """What a shard knows about a job."""

    # None: the job was deleted at the end of its retention, and only its id is known.
    record: JobRecord | None
    # Only of a live job that is not on its way to another shard.
    live: LiveFacts | None = None
    # Whether it is on its way to another shard.
    departing: bool = False
    # Only of a job that waits for a slot of its group.
    group: GroupFacts | None = None
    # Only of a blocked job.
    blocked: BlockedFacts | None = None
    # Only of a live job of a kind that is quarantined, and that is not let through.
    quarantine: QuarantineFacts | None = None


class QueueFacts(NamedTuple):
    """What a queue would give now."""

    now: Micros
    gives_jobs: bool
    # How many jobs are ready, at most COUNTED_MAX + 1, and the one that is claimed first.
    ready: int
    first_id: JobId | None
    first_kind: str | None
    first_visible_at: Micros | None
    # How many jobs wait for slots of their groups, at most COUNTED_MAX + 1.
    waiting: int
    # These describe the first jobs of each priority that become visible later: how many are leased, when the first of
    # these leases ends, and when the first scheduled job is due.
    leased: int
    first_deadline: Micros | None
    next_due: Micros | None
    # False: there are more such jobs.
    complete: bool
    consumers: ConsumersOf
    # The kinds that are quarantined.
    quarantines: Sequence[QuarantineFacts] = ()


async def read_live(
    database: Database, org: OrgId, queue: QueueName, job_id: JobId, *, floors: Sequence[Micros]
) -> tuple[LiveFacts | None, bool]:
    """Returns what decides when the job is leased, None if it is not live in this queue; and whether it is on its way
    to another shard. `floors`: from where claims look, by priority. Raises ShardUnavailable."""
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
    """Returns what the job waits for; None if it does not wait for a slot of its group. Raises ShardUnavailable."""
    parameters = {"org": org, "queue": queue, "id": job_id, "jobs_max": COUNTED_MAX + 1}
    for row in await database.run(statements.EXPLAIN_GROUP, parameters):
        return GroupFacts._make(row)
    return None


async def read_quarantines(
    database: Database, org: OrgId, queue: QueueName | None, kind: str = "", *, kinds_max: int = _KINDS_MAX
) -> list[QuarantineFacts]:
    """Returns the quarantined kinds of a queue of the org, or of all its queues, by name, or this kind only. Raises
    ShardUnavailable."""
    parameters = {
        "org": org,
        "queue": queue or "",
        "kind": kind,
        "jobs_max": COUNTED_MAX + 1,
        "kinds_max": kinds_max,
    }
    return list(map(QuarantineFacts._make, await database.run(statements.LIST_QUARANTINES, parameters)))


async def read_blocked(database: Database, org: OrgId, of: NodeOf) -> BlockedFacts | None:
    """Returns what the job of this node waits for; None if this shard does not have its workflow. Raises
    ShardUnavailable."""
    parameters = {"org": org, "workflow": of.workflow, "node": of.node, "left_max": COUNTED_MAX + 1}
    for row in await database.run(statements.EXPLAIN_BLOCKED, parameters):
        return BlockedFacts._make(row)
    return None


async def read_queue(
    database: Database, org: OrgId, queue: QueueName, *, floors: Sequence[Micros]
) -> QueueFacts | None:
    """Returns None if the org has no such queue here. Raises ShardUnavailable."""
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
