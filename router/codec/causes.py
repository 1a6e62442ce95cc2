"""Decides why a job or a queue does not run, from what a shard and this router know: which causes there are, and in
which order. Pure.

The order says what must end first. Causes of the job itself come first, then causes that hold back its queue, then
causes about the consumers, then the jobs that run before this job. Every job has at least one cause.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from router.codec import convert
from shard.job_record import Attempt, JobRecord
from shard.queue.consumers_seen import SEEN_US
from shard.queue.explain import (
    COUNTED_MAX,
    BlockedFacts,
    ConsumersOf,
    GroupFacts,
    JobFacts,
    LiveFacts,
    QuarantineFacts,
    QueueFacts,
)
from shard.vocabulary import LIVE, MAX_ATTEMPTS_DEFAULT, Failure, JobState, Micros, Outcome, ShardName
from shard.workflow import NodeOf
from windrow.v1 import admin_pb2, job_pb2
from windrow.v1 import cause_pb2 as causes
from windrow.v1.cause_pb2 import Cause

# The reason of a job that was cancelled because its expires_at had passed (expire_unrun.sql, expire_waiting.sql).
EXPIRED_REASON = "past its expires_at"
# The reason of a job that waited for a signal, and was cancelled because its expires_at had passed.
UNSIGNALLED_REASON = "no signal came in time"
_KINDS_MAX = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """The consumers that are connected to this router process, and wait for jobs of a queue or run some of its jobs."""

    # The kinds that each of these consumers takes; empty: all kinds.
    kinds: Sequence[Collection[str]] = ()
    # Whether one of these consumers has found no more jobs, and has room for some.
    has_room: bool = False

    def takes(self, kind: str) -> bool:
        return any(not taken or kind in taken for taken in self.kinds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What this router process knows about an org and its queue."""

    # Shards of the org that do not answer or give no jobs, and why.
    troubles: Sequence[tuple[ShardName, str]] = ()
    # The shard from which the org moves, and the shard to which it moves. None: the org does not move.
    move: tuple[ShardName, ShardName] | None = None
    waiting: Waiting = Waiting()
    # How much of this process's memory the org holds, if its claims wait for more memory. None: its claims do not wait.
    share: causes.RouterShareCause | None = None
    # How far the org is ahead of other orgs, if consumers of all orgs serve the other orgs first because of that. None:
    # these consumers serve no other org first.
    fair_share: causes.FairShareCause | None = None
    # The limits of starts that have no room.
    start_limits: Sequence[causes.StartLimitCause] = ()
    # The limits of jobs in flight that have no room.
    in_flight_limits: Sequence[causes.InFlightLimitCause] = ()


def of_job(facts: JobFacts, shard: ShardName, around: Surroundings) -> admin_pb2.ExplainJobResponse:
    """Explains a job that this shard has, or had."""
    record = facts.record
    if record is None:
        return admin_pb2.ExplainJobResponse(causes=[Cause(finished=causes.FinishedCause())])
    state = JobState(record.state)
    runs_at: Micros | None = None
    if facts.departing:
        found = [_on_its_way(shard, around), *([_dead(record)] if state is JobState.DEAD else [])]
    elif facts.live is not None:
        state = _state(facts.live)
        # If there are no facts about the node, its workflow is on another shard: then assume that the node waits for a
        # signal.
        if record.may_await_signal and (facts.signal is None or facts.signal.is_signal):
            found = _signal(record, facts.live, facts.signal, around)
        else:
            found, runs_at = _of_live(record, facts.live, facts.group, facts.quarantine, around)
    elif state is JobState.DEAD:
        found = [_dead(record)]
    elif state is JobState.BLOCKED:
        found = [_blocked(record, facts.blocked), *_moving(around)]
    else:
        assert state not in LIVE
        found = _finished(record, state)
    return admin_pb2.ExplainJobResponse(
        state=convert.STATES[state.value],
        queue=record.queue,
        kind=record.kind,
        shard=shard,
        causes=found,
        runs_at=None if runs_at is None else convert.timestamp(runs_at),
    )


def of_unknown_job(around: Surroundings) -> admin_pb2.ExplainJobResponse:
    """Explains a job that is on none of the shards that answered."""
    return admin_pb2.ExplainJobResponse(causes=_down(around))


def of_queue(facts: QueueFacts | None, around: Surroundings) -> admin_pb2.ExplainQueueResponse:
    """Explains a queue. `facts` None: no shard of its org answers."""
    if facts is None:
        return admin_pb2.ExplainQueueResponse(causes=_down(around))
    waiting = [*map(_quarantine, facts.quarantines), *_group_backlog(facts), *_in_flight(facts), *_next_due(facts)]
    holding = _holding(facts.gives_jobs, facts.first_kind, facts.consumers, facts.now, around)
    runs_at: Micros | None = None
    if facts.first_visible_at is not None and facts.first_id is not None:
        backlog = causes.BacklogCause(
            ready=min(facts.ready, COUNTED_MAX),
            at_least=facts.ready > COUNTED_MAX,
            first_id=facts.first_id,
            first_ready_since=convert.timestamp(facts.first_visible_at),
            consumer_waits=around.waiting.has_room,
        )
        runs_at = None if holding or around.share or around.fair_share else facts.now
        found = [*holding, *_moving(around), *_share(around, facts), Cause(backlog=backlog), *waiting]
    else:
        runs_at = None if holding else facts.next_due
        found = [*(waiting or [Cause(empty=causes.EmptyCause())]), *holding, *_moving(around)]
    return admin_pb2.ExplainQueueResponse(causes=found, runs_at=None if runs_at is None else convert.timestamp(runs_at))


# ── Jobs ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _state(live: LiveFacts) -> JobState:
    if live.visible_at <= live.now:
        return JobState.READY
    return JobState.LEASED if live.leased else JobState.SCHEDULED


def _of_live(
    record: JobRecord,
    live: LiveFacts,
    group: GroupFacts | None,
    quarantine: QuarantineFacts | None,
    around: Surroundings,
) -> tuple[list[Cause], Micros | None]:
    """Returns the causes of a live job, and when it runs if that is known."""
    state = _state(live)
    attempt, max_attempts = record.attempt, record.max_attempts or MAX_ATTEMPTS_DEFAULT
    if state is JobState.LEASED:
        leased = causes.LeasedCause(
            worker=record.worker or "",
            leased_at=None if record.leased_at is None else convert.timestamp(record.leased_at),
            deadline=convert.timestamp(live.visible_at),
            attempt=attempt,
            max_attempts=max_attempts,
        )
        return [Cause(leased=leased)], None
    if record.expires_at is not None and record.expires_at <= max(live.now, live.visible_at):
        return [_expired(record.expires_at)], None
    if attempt >= max_attempts:
        exhausted = causes.OutOfAttemptsCause(attempt=attempt, max_attempts=max_attempts)
        return [Cause(out_of_attempts=exhausted)], None
    holding = _holding(live.gives_jobs, record.kind, live.consumers, live.now, around)
    if quarantine is not None:
        holding.insert(0, _quarantine(quarantine))
    if state is JobState.SCHEDULED:
        last = next(iter(record.attempts()[-1:]), None)
        until = _until(record, live.visible_at, last)
        runs_at = None if holding else live.visible_at
        if _was_snoozed(last) and any(cause.HasField("kind_not_taken") for cause in holding):
            # The job is snoozed again each time that it is due, for as long as no consumer takes its kind.
            return [*holding, until], None
        return [until, *holding, *_moving(around)], runs_at
    if group is not None:
        return [_group(group), *holding, *_moving(around)], None
    found = [*holding, *_moving(around), *_share(around, live)]
    if live.more_urgent + live.earlier:
        return [*found, _ahead(live)], None
    if not holding:
        found.append(Cause(due=causes.DueCause(consumer_waits=around.waiting.has_room)))
    return found, None if holding or around.share or around.fair_share else live.now


def _until(record: JobRecord, until: Micros, last: Attempt | None) -> Cause:
    """Returns why a scheduled job waits."""
    if last is not None and last.outcome is Outcome.NACKED and last.attempt == record.attempt:
        backing_off = causes.BackingOffCause(
            attempt=record.attempt,
            max_attempts=record.max_attempts or MAX_ATTEMPTS_DEFAULT,
            failure=_failure(last.failure),
            next_try=convert.timestamp(until),
        )
        return Cause(backing_off=backing_off)
    reason = last.failure.message if _was_snoozed(last) and last is not None and last.failure is not None else ""
    return Cause(scheduled=causes.ScheduledCause(until=convert.timestamp(until), reason=reason))


def _was_snoozed(last: Attempt | None) -> bool:
    return last is not None and last.outcome is Outcome.RELEASED


def _group(group: GroupFacts) -> Cause:
    return Cause(
        group=causes.GroupCause(
            group=group.group,
            concurrency=group.concurrency,
            taken=group.taken,
            leased=group.leased,
            holder_id=group.holder_id or "",
            worker=(group.worker or "") if group.until is not None else "",
            until=None if group.until is None else convert.timestamp(group.until),
            ahead=min(group.ahead, COUNTED_MAX),
            at_least=group.ahead > COUNTED_MAX,
        )
    )


def _quarantine(quarantine: QuarantineFacts) -> Cause:
    at = quarantine.next_trial_at
    return Cause(
        quarantine=causes.QuarantineCause(
            kind=quarantine.kind,
            since=convert.timestamp(quarantine.since),
            crashes=quarantine.crashes,
            reason=quarantine.reason or "",
            by_operator=quarantine.reason is not None,
            next_trial_at=None if at is None else convert.timestamp(at),
            trial_id=quarantine.trial_id or "",
            set_aside=min(quarantine.set_aside, COUNTED_MAX),
            at_least=quarantine.set_aside > COUNTED_MAX,
        )
    )


def _blocked(record: JobRecord, blocked: BlockedFacts | None) -> Cause:
    """Returns what a blocked job waits for. `blocked` None: the workflow is on another shard."""
    message = causes.BlockedCause()
    if record.workflow_node is not None:
        message.workflow_id = NodeOf.parse(record.workflow_node).workflow
    if blocked is not None:
        message.node, message.paused = blocked.node, blocked.paused and not blocked.left
        message.waits_for.extend(blocked.waits_for or ())
        message.has_signal = blocked.has_signal
        message.left, message.at_least = min(blocked.left, COUNTED_MAX), blocked.left > COUNTED_MAX
    return Cause(blocked=message)


def _signal(record: JobRecord, live: LiveFacts, node: BlockedFacts | None, around: Surroundings) -> list[Cause]:
    """Returns why a job waits for a signal. When the time for the signal is over, the node ends only after a claim has
    found the job. So causes that hold back the queue also delay the end of the node."""
    assert record.workflow_node is not None
    assert record.expires_at is not None
    signal = causes.SignalCause(
        workflow_id=NodeOf.parse(record.workflow_node).workflow,
        node="" if node is None else node.node,
        until=convert.timestamp(record.expires_at),
    )
    return [
        Cause(signal=signal),
        *_holding(live.gives_jobs, None, live.consumers, live.now, around),
        *_moving(around),
    ]


def _ahead(live: LiveFacts) -> Cause:
    more_urgent = min(live.more_urgent, COUNTED_MAX)
    return Cause(
        jobs_ahead=causes.JobsAheadCause(
            more_urgent=more_urgent,
            earlier=min(live.earlier, COUNTED_MAX - more_urgent),
            at_least=live.more_urgent + live.earlier > COUNTED_MAX,
            goes_first_at=None if live.goes_first_at is None else convert.timestamp(live.goes_first_at),
        )
    )


def _dead(record: JobRecord) -> Cause:
    dead = causes.DeadCause(
        at=None if record.finished_at is None else convert.timestamp(record.finished_at),
        attempt=record.attempt,
        max_attempts=record.max_attempts or MAX_ATTEMPTS_DEFAULT,
        reason=record.reason or "",
    )
    for last in record.attempts()[-1:]:
        dead.last_outcome = convert.OUTCOMES[last.outcome]
        if (failure := _failure(last.failure)) is not None:
            dead.failure.CopyFrom(failure)
    return Cause(dead=dead)


def _finished(record: JobRecord, state: JobState) -> list[Cause]:
    finished = causes.FinishedCause(
        state=convert.STATES[state.value],
        at=None if record.finished_at is None else convert.timestamp(record.finished_at),
        reason=record.reason or "",
    )
    expired = record.expires_at is not None and record.reason in (EXPIRED_REASON, UNSIGNALLED_REASON)
    return [*([_expired(record.expires_at)] if expired and record.expires_at else []), Cause(finished=finished)]


def _expired(expires_at: Micros) -> Cause:
    return Cause(expired=causes.ExpiredCause(expires_at=convert.timestamp(expires_at)))


def _failure(failure: Failure | None) -> job_pb2.Failure | None:
    if failure is None:
        return None
    return job_pb2.Failure(type=failure.type, message=failure.message, permanent=failure.permanent)


# ── Queues ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def _in_flight(facts: QueueFacts) -> Iterable[Cause]:
    if facts.leased and facts.first_deadline is not None:
        yield Cause(
            in_flight=causes.InFlightCause(
                leased=facts.leased,
                at_least=not facts.complete,
                first_deadline=convert.timestamp(facts.first_deadline),
            )
        )


def _group_backlog(facts: QueueFacts) -> Iterable[Cause]:
    if facts.waiting:
        yield Cause(
            group_backlog=causes.GroupBacklogCause(
                jobs=min(facts.waiting, COUNTED_MAX), at_least=facts.waiting > COUNTED_MAX
            )
        )


def _next_due(facts: QueueFacts) -> Iterable[Cause]:
    if facts.next_due is not None:
        yield Cause(scheduled=causes.ScheduledCause(until=convert.timestamp(facts.next_due)))


# ── Both ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _holding(
    gives_jobs: bool, kind: str | None, consumers: ConsumersOf, now: Micros, around: Surroundings
) -> list[Cause]:
    """Returns the causes that hold back all jobs of a queue, or all its jobs of one kind, independently of the order of
    the jobs. `kind` None: returns only the causes for all jobs."""
    found = _down(around)
    if not gives_jobs:
        found.append(Cause(paused=causes.PausedCause()))
    found += [Cause(in_flight_limit=limit) for limit in around.in_flight_limits]
    found += [Cause(start_limit=limit) for limit in around.start_limits]
    since, within = now - SEEN_US, convert.duration(SEEN_US)
    if not around.waiting.kinds and (consumers.any_at is None or consumers.any_at < since):
        last_seen = None if consumers.any_at is None else convert.timestamp(consumers.any_at)
        found.append(Cause(no_consumer=causes.NoConsumerCause(seen_within=within, last_seen=last_seen)))
    elif kind is not None and not (
        around.waiting.takes(kind) or (consumers.kind_at is not None and consumers.kind_at >= since)
    ):
        taken = sorted({*consumers.kinds, *(one for kinds in around.waiting.kinds for one in kinds)})
        not_taken = causes.KindNotTakenCause(
            kind=kind,
            taken_kinds=taken[:_KINDS_MAX],
            seen_within=within,
            last_seen=None if consumers.kind_at is None else convert.timestamp(consumers.kind_at),
        )
        found.append(Cause(kind_not_taken=not_taken))
    return found


def _down(around: Surroundings) -> list[Cause]:
    return [Cause(shard_down=causes.ShardDownCause(shard=shard, reason=why)) for shard, why in around.troubles]


def _moving(around: Surroundings) -> Iterable[Cause]:
    if around.move is not None:
        source, target = around.move
        yield Cause(moving=causes.MovingCause(source=source, target=target))


def _on_its_way(source: ShardName, around: Surroundings) -> Cause:
    """Returns the cause of a job that is being moved. The target in this cause is empty if this router has not heard of
    the move."""
    target = "" if around.move is None else around.move[1]
    return Cause(moving=causes.MovingCause(source=source, target=target, on_its_way=True))


def _share(around: Surroundings, of: LiveFacts | QueueFacts) -> Iterable[Cause]:
    # A paused queue does not take part in the sharing.
    if not of.gives_jobs:
        return
    if around.share is not None:
        yield Cause(router_share=around.share)
    if around.fair_share is not None:
        yield Cause(fair_share=around.fair_share)
