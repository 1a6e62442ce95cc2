"""Explains why a job or a queue does not run: asks the org's shards, and looks at what this router process knows about
its own consumers. router/codec/causes.py decides which causes hold."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

from router.buffer import Buffer
from router.codec import causes, convert
from router.codec.causes import Surroundings, Waiting
from router.fleet.fleet import Fleet
from router.fleet.shard_handle import ShardHandle
from router.fleet.starts import SpentLimit
from router.fleet.waiter import Recipient
from router.route.by_id import find
from router.route.by_org import Asked, ask_readers
from shard.errors import NoAnswer, ShardUnavailable, UnknownJob
from shard.limits import ALL_QUEUES
from shard.queue.explain import COUNTED_MAX, ConsumersOf, JobFacts, QueueFacts
from shard.vocabulary import CATALOG, JobId, OrgId, QueueName, ShardName
from windrow.v1 import admin_pb2
from windrow.v1.cause_pb2 import FairShareCause, InFlightLimitCause, RouterShareCause, StartLimitCause


async def explain_job(fleet: Fleet, buffer: Buffer, org: OrgId, job_id: JobId) -> admin_pb2.ExplainJobResponse:
    """Raises UnknownJob if all shards answer and none knows the job, and TooManyWaiting if a shard is busy."""

    async def ask(member: ShardHandle, _: Sequence[int]) -> Mapping[int, tuple[ShardHandle, JobFacts]]:
        facts = await member.store.explain_job(org, job_id)
        return {} if facts is None else {0: (member, facts)}

    try:
        found = await find(fleet, org, [job_id], ask)
    except ShardUnavailable:
        return causes.of_unknown_job(Surroundings(troubles=_troubles(fleet, fleet.placement(org).reads)))
    if not found.answers:
        if not found.refusals:
            raise UnknownJob(org, job_id)
        for refusal in found.refusals.values():
            # A busy shard must not be reported as a shard that does not answer.
            if not isinstance(refusal, ShardUnavailable):
                raise refusal
        return causes.of_unknown_job(Surroundings(troubles=_troubles(fleet, found.unavailable)))
    member, facts = found.answers[0]
    queue = None if facts.record is None else facts.record.queue
    return causes.of_job(facts, member.name, await _surroundings(fleet, buffer, org, queue, [member], away=()))


async def explain_queue(fleet: Fleet, buffer: Buffer, org: OrgId, queue: QueueName) -> admin_pb2.ExplainQueueResponse:
    """Raises UnknownQueue if no shard that answers knows the queue."""
    try:
        asked = await ask_readers(fleet, org, lambda member: member.store.explain_queue(org, queue))
    except ShardUnavailable:
        reads = fleet.placement(org).reads
        return causes.of_queue(None, Surroundings(troubles=_troubles(fleet, reads)))
    members = [fleet.placed(name) for name, _ in asked.answers]
    around = await _surroundings(fleet, buffer, org, queue, members, away=asked.unavailable)
    return causes.of_queue(_together(asked), around)


async def _surroundings(
    fleet: Fleet,
    buffer: Buffer,
    org: OrgId,
    queue: QueueName | None,
    members: Sequence[ShardHandle],
    *,
    away: Collection[ShardName],
) -> Surroundings:
    """Returns what this process knows about an org and its queue on these shards. `away`: other shards of the org,
    which did not answer."""
    placement = fleet.placement(org)
    waiting: dict[Recipient, None] = {
        waiter: None
        for member in members
        if queue is not None and (awaited := member.room.queue(org, queue)) is not None
        for waiter in awaited.waiters
    }
    if queue is not None:
        for consumer in fleet.pools.waiters(queue):
            waiting[consumer] = None
    ahead = None if queue is None else fleet.pools.ahead(org, queue)
    waits_for_memory = any(buffer.waits(org, member.name) for member in members)
    return Surroundings(
        troubles=[*_troubles(fleet, away), *((member.name, why) for member in members if (why := _gives_none(member)))],
        # `reads` has the shards in the order in which jobs move.
        move=(placement.reads[0], placement.reads[-1]) if len(placement.reads) > len(placement.writes) else None,
        waiting=Waiting(
            kinds=[waiter.kinds for waiter in waiting],
            has_room=any(waiter.idle and waiter.credit > 0 and not waiter.full for waiter in waiting),
        ),
        share=RouterShareCause(held_bytes=buffer.held_by(org), all_held_bytes=buffer.held, max_bytes=buffer.bytes_max)
        if waits_for_memory
        else None,
        fair_share=None
        if ahead is None
        else FairShareCause(ahead=convert.duration(round(ahead[0] * 1e6)), weight=ahead[1]),
        start_limits=[] if queue is None else [_start_limit(spent) for spent in await fleet.starts.spent(org, queue)],
        in_flight_limits=[] if queue is None else await _in_flight_limits(fleet, org, queue, members),
    )


async def _in_flight_limits(
    fleet: Fleet, org: OrgId, queue: QueueName, members: Sequence[ShardHandle]
) -> list[InFlightLimitCause]:
    """Returns the limits that have no room on one of these shards. Leaves out a shard that does not answer."""
    found: dict[QueueName, InFlightLimitCause] = {}
    limits = fleet.starts.in_flight(org, queue)
    for member in members if limits is not None else ():
        assert limits is not None
        try:
            of_org, of_queue = await member.store.count_in_flight(org, queue, limits)
        except NoAnswer:
            continue
        for whose, most, count in ((ALL_QUEUES, limits.of_org, of_org), (queue, limits.of_queue, of_queue)):
            if most is not None and count == most:
                found[whose] = InFlightLimitCause(queue=whose, amount=most, usage=most)
    return list(found.values())


def _start_limit(spent: SpentLimit) -> StartLimitCause:
    limit = spent.limit
    return StartLimitCause(
        queue=limit.key.queue,
        amount=limit.amount,
        interval=convert.duration(limit.interval_us),
        usage=limit.amount,
        next_start=convert.duration(math.ceil(spent.next_s * 1e6)),
    )


def _troubles(fleet: Fleet, names: Collection[ShardName]) -> list[tuple[ShardName, str]]:
    """Returns why these shards do not answer."""
    return [(name, _why_away(fleet, name)) for name in names]


def _why_away(fleet: Fleet, name: ShardName) -> str:
    if name == CATALOG:
        return "the catalog does not answer"
    try:
        fleet.placed(name).require_up()
    except ShardUnavailable as error:
        return error.why
    return "its database does not answer"


def _gives_none(member: ShardHandle) -> str | None:
    """Returns why the shard gives no jobs, although it answers. None: it gives jobs."""
    if not member.room.gives:
        return f"its state is {member.entry.state.word}"
    return member.store.clock.trouble


def _together(asked: Asked[QueueFacts]) -> QueueFacts:
    """Merges the facts about a queue that the shards of an org have. The writer says which kinds are quarantined, and
    whether the queue gives jobs, because the writer has the org's queue configurations."""
    answers = dict(asked.answers)
    facts = list(answers.values())
    first = next((one for one in facts if one.ready), facts[0])
    writer = answers.get(asked.placement.writes[0], facts[-1])
    deadlines = [one.first_deadline for one in facts if one.first_deadline is not None]
    dues = [one.next_due for one in facts if one.next_due is not None]
    seen = [one.consumers.any_at for one in facts if one.consumers.any_at is not None]
    takers = [one.consumers.kind_at for one in facts if one.consumers.kind_at is not None]
    return first._replace(
        gives_jobs=writer.gives_jobs,
        ready=min(sum(one.ready for one in facts), COUNTED_MAX + 1),
        leased=sum(one.leased for one in facts),
        first_deadline=min(deadlines, default=None),
        next_due=min(dues, default=None),
        complete=all(one.complete for one in facts),
        quarantines=writer.quarantines,
        consumers=ConsumersOf(
            any_at=max(seen, default=None),
            kind_at=max(takers, default=None),
            kinds=sorted({kind for one in facts for kind in one.consumers.kinds}),
        ),
    )
