"""Converts between the messages of proto/windrow/v1 and the columns and records of the shard. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, assert_never, cast

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

from router.codec.status import InvalidRequest, Violation
from shard import retry_policy
from shard.admin.job_counts import WantedCount
from shard.admin.job_pages import Wanted
from shard.admin.org_figures import OrgFigures, OrgSort, WantedOrgs
from shard.admin.queue_admin import OrgBooks, QueueCounts, QueueRecord
from shard.job_record import JobRecord
from shard.lease_token import MalformedLease, parse_token
from shard.placement.cluster_file import ShardState
from shard.queue.explain import COUNTED_MAX, QuarantineFacts
from shard.queue_settings import QueueSettings
from shard.schedule import RunCause, ScheduledRun, Template
from shard.vocabulary import (
    GROUP_CONCURRENCY_DEFAULT,
    MAX_ATTEMPTS_DEFAULT,
    PRIORITY_DEFAULT,
    RETENTION_DEFAULT,
    Alteration,
    Answer,
    Claimed,
    Failure,
    JobState,
    Known,
    Lease,
    Micros,
    NewJobs,
    OrgId,
    Outcome,
    Progress,
    QueueName,
    ShardName,
)
from shard.workflow import Fault, NodeOf
from windrow.ids import uuid7
from windrow.rules import Rule, limit
from windrow.v1 import admin_pb2, cluster_pb2, job_pb2, queue_pb2

WINDOW_DEFAULT_US = 30_000_000
# The path of a field mask that means every field (AIP-134).
ALL_FIELDS = "*"
# Control characters except tab and line ends.
_PRINTABLE = dict.fromkeys(set(range(32)) - set(b"\t\n\r"), "\ufffd")
# The values of settings that were not given for a queue. A setting that this table does not name has no default.
_QUEUE_DEFAULTS: Mapping[str, int] = {
    "max_attempts": MAX_ATTEMPTS_DEFAULT,
    "retention_days": RETENTION_DEFAULT,
    "group_concurrency": GROUP_CONCURRENCY_DEFAULT,
}
_DEDUP_WINDOW_DEFAULT_US = 86_400_000_000
_FAILURE_BYTES_MAX = tuple(
    limit(job_pb2.Failure, field, Rule.STRING_MAX_BYTES) for field in ("type", "message", "stack")
)

# Each value of the contract's enums has the name of the Python value, after a prefix.
ANSWERS: dict[Answer, job_pb2.JobAnswer.ValueType] = {
    answer: job_pb2.JobAnswer.Value(f"JOB_ANSWER_{answer.name}") for answer in Answer if answer is not Answer.DEPARTING
}
STATES = {state.value: job_pb2.JobState.Value(f"JOB_STATE_{state.name}") for state in JobState}
STATES_BY_NUMBER = {number: JobState(name) for name, number in STATES.items()}
OUTCOMES = {outcome: job_pb2.AttemptOutcome.Value(f"ATTEMPT_OUTCOME_{outcome.name}") for outcome in Outcome}
RUN_CAUSES = {cause: job_pb2.RunCause.Value(f"RUN_CAUSE_{cause.name}") for cause in RunCause}
_ORG_SORTS = {cluster_pb2.OrgSort.Value(f"ORG_SORT_{sort.name}"): sort for sort in OrgSort}
_ORGS_AGE_DEFAULT_US = 60_000_000
SHARD_STATES = {state: cluster_pb2.ShardState.Value(f"SHARD_STATE_{state.name}") for state in ShardState}


# ── Times ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def timestamp(us: int) -> Timestamp:
    return Timestamp(seconds=us // 1_000_000, nanos=us % 1_000_000 * 1000)


def duration(us: int) -> Duration:
    return Duration(seconds=us // 1_000_000, nanos=us % 1_000_000 * 1000)


def micros(value: Timestamp | Duration) -> int:
    return value.seconds * 1_000_000 + value.nanos // 1000


def moment(value: Timestamp) -> Micros:
    return Micros(micros(value))


def window_us(
    request: queue_pb2.DequeueRequest | queue_pb2.ExtendRequest | queue_pb2.ConsumeStart | queue_pb2.ConsumeRequest,
    default_us: int = WINDOW_DEFAULT_US,
) -> int:
    return micros(request.visibility_window) if request.HasField("visibility_window") else default_us


# ── Jobs in ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def new_jobs(org: OrgId, jobs: Sequence[job_pb2.NewJob], *, trace: str | None) -> NewJobs:
    """Returns the columns of valid jobs. Jobs without a trace of their own get `trace`."""
    templates = [job.template for job in jobs]
    columns = NewJobs(
        org=org,
        ids=[job.id or uuid7() for job in jobs],
        queues=cast("list[QueueName]", [template.queue for template in templates]),
        kinds=[template.kind for template in templates],
        payloads=[template.payload for template in templates],
    )
    for at, template in enumerate(templates):
        if template.priority:
            columns.priorities[at] = template.priority
        if template.attributes:
            columns.attributes[at] = json.dumps(dict(template.attributes))
        if template.max_attempts:
            columns.max_attempts[at] = template.max_attempts
        if template.HasField("max_runtime"):
            columns.max_runtimes_us[at] = micros(template.max_runtime)
        if template.group:
            columns.groups[at] = template.group
        if template.HasField("retry"):
            columns.retries[at] = retry_policy.to_json(policy(template.retry))
    for at, job in enumerate(jobs):
        match job.WhichOneof("when"):
            case "delay":
                columns.delay_us[at] = micros(job.delay)
            case "run_at":
                columns.run_at_us[at] = micros(job.run_at)
            case None:
                pass
        if job.HasField("expires_at"):
            columns.expires_at_us[at] = micros(job.expires_at)
        if job.HasField("dedup"):
            dedup = job.dedup
            if dedup.while_live:
                columns.live_keys[at] = dedup.key
            else:
                columns.dedup_keys[at] = dedup.key
                window = micros(dedup.window) if dedup.HasField("window") else _DEDUP_WINDOW_DEFAULT_US
                columns.dedup_window_us[at] = window
        if job.HasField("trace") and job.trace.traceparent:
            columns.traces[at] = f"{job.trace.traceparent} {job.trace.tracestate}".rstrip()
        elif trace is not None:
            columns.traces[at] = trace
    return columns


def alteration(request: queue_pb2.AlterJobsRequest) -> Alteration:
    return Alteration(
        priority=request.priority or None,
        run_at_us=micros(request.run_at) if request.HasField("run_at") else None,
        delay_us=micros(request.delay) if request.HasField("delay") else None,
        attributes=json.dumps(dict(request.attributes.values)) if request.HasField("attributes") else None,
    )


def policy(message: job_pb2.RetryPolicy) -> retry_policy.Policy:
    """Returns the retry policy of a message, with its defaults filled in."""
    which = message.WhichOneof("policy")
    match which:
        case "fixed":
            return retry_policy.Fixed(delay_us=micros(message.fixed.delay))
        case "exponential":
            given, default = message.exponential, retry_policy.Exponential()
            return retry_policy.Exponential(
                initial_us=micros(given.initial_delay) if given.HasField("initial_delay") else default.initial_us,
                multiplier=given.multiplier or default.multiplier,
                max_us=micros(given.max_delay) if given.HasField("max_delay") else default.max_us,
                jitter=given.jitter if given.HasField("jitter") else default.jitter,
            )
        case None:
            return retry_policy.DEFAULT
        case _:
            assert_never(which)


def queue_settings(config: admin_pb2.QueueConfig) -> QueueSettings:
    """Returns the settings that the message has. They have the names of the message's fields."""
    given = {field.name: value for field, value in config.ListFields()}
    if config.HasField("retry"):
        given["retry"] = retry_policy.to_json(policy(config.retry))
    return QueueSettings(**given)


def queue_changes(request: admin_pb2.UpdateQueueRequest) -> tuple[admin_pb2.QueueConfig, list[str]]:
    """Returns the fields to set, and the names of the fields to reset to their defaults."""
    paths = set(request.update_mask.paths)
    if not paths:
        return request.config, []
    changed, reset = admin_pb2.QueueConfig(), list[str]()
    changed.CopyFrom(request.config)
    # Typed as a plain message, so that type checkers accept any text as the name of a field.
    message = cast("Message", changed)
    for field in changed.DESCRIPTOR.fields:
        if not paths & {field.name, ALL_FIELDS}:
            message.ClearField(field.name)
        elif not message.HasField(field.name):
            reset.append(field.name)
    return changed, reset


def policy_message(stored: retry_policy.Policy) -> job_pb2.RetryPolicy:
    match stored:
        case retry_policy.Fixed():
            return job_pb2.RetryPolicy(fixed=job_pb2.FixedRetry(delay=duration(stored.delay_us)))
        case retry_policy.Exponential():
            return job_pb2.RetryPolicy(
                exponential=job_pb2.ExponentialRetry(
                    initial_delay=duration(stored.initial_us),
                    multiplier=stored.multiplier,
                    max_delay=duration(stored.max_us),
                    jitter=stored.jitter,
                )
            )
        case _:
            assert_never(stored)


def printable(text: str) -> str:
    """Replaces control characters: in JSON each of them would take six bytes."""
    return text.translate(_PRINTABLE)


def failure(message: job_pb2.Failure) -> Failure:
    """Converts a valid failure. Control characters are replaced, and the texts still keep the limits of the contract,
    so that an answer with 50 failures stays below 4 MiB."""
    type_, text, stack = (
        _printable_within(given, most)
        for given, most in zip((message.type, message.message, message.stack), _FAILURE_BYTES_MAX, strict=True)
    )
    return Failure(type=type_, message=text, stack=stack, permanent=message.permanent)


def _printable_within(text: str, bytes_max: int) -> str:
    """Replaces control characters as `printable` does, and then cuts the text to `bytes_max` bytes: the replacement,
    U+FFFD, has three bytes, so the text may have grown."""
    shown = printable(text)
    return shown if shown == text else shown.encode()[:bytes_max].decode(errors="ignore")


def progress(message: job_pb2.Progress) -> Progress:
    return Progress(done=message.done, total=message.total, note=printable(message.note))


def failure_message(stored: Failure) -> job_pb2.Failure:
    return job_pb2.Failure(**stored._asdict())


def leases(tokens: Iterable[bytes], *, field: str) -> list[tuple[int, Lease]]:
    """Parses lease tokens into shard tags and leases. `field` is the path of a token in the request, with {} for its
    position. Raises InvalidRequest."""
    parsed: list[tuple[int, Lease]] = []
    violations: list[Violation] = []
    for at, data in enumerate(tokens):
        try:
            parsed.append(parse_token(data))
        except MalformedLease as error:
            violations.append(Violation(field.format(at), str(error)))
    if violations:
        raise InvalidRequest(violations)
    return parsed


def wanted(request: admin_pb2.ListJobsRequest) -> Wanted:
    return Wanted(
        org=OrgId(request.org),
        queue=QueueName(request.queue) if request.queue else None,
        state=STATES_BY_NUMBER[request.state] if request.HasField("state") else None,
        states=frozenset(STATES_BY_NUMBER[state] for state in request.states),
        kind=request.kind,
        made_after=moment(request.created_after) if request.HasField("created_after") else None,
        made_before=moment(request.created_before) if request.HasField("created_before") else None,
        attributes=json.dumps(dict(request.attributes)) if request.attributes else None,
        include_payload=request.include_payload,
    )


def wanted_count(request: admin_pb2.CountJobsRequest) -> WantedCount:
    return WantedCount(
        org=OrgId(request.org),
        queue=QueueName(request.queue) if request.queue else None,
        states=frozenset(STATES_BY_NUMBER[state] for state in request.states),
        kind=request.kind,
        made_after=moment(request.created_after) if request.HasField("created_after") else None,
        made_before=moment(request.created_before) if request.HasField("created_before") else None,
        attributes=json.dumps(dict(request.attributes)) if request.attributes else None,
        died_after=moment(request.died_after) if request.HasField("died_after") else None,
        died_before=moment(request.died_before) if request.HasField("died_before") else None,
        not_killed=request.not_killed,
    )


# ── Jobs out ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def leased_job(job: Claimed, org: OrgId) -> job_pb2.LeasedJob:
    """Returns a claimed job without its lease, id, payload and group, because jobs of one claim differ in these
    fields."""
    message = job_pb2.LeasedJob(
        org=org,
        queue=job.queue,
        kind=job.kind,
        priority=job.priority,
        attempt=job.attempt,
        max_attempts=job.max_attempts or MAX_ATTEMPTS_DEFAULT,
        enqueued_at=timestamp(job.enqueued_at),
        run_at=timestamp(job.run_at),
    )
    if job.attributes is not None:
        message.attributes.update(json.loads(job.attributes))
    if job.trace is not None:
        message.trace.traceparent, _, message.trace.tracestate = job.trace.partition(" ")
    if job.max_runtime_us is not None:
        message.max_runtime.CopyFrom(duration(job.max_runtime_us))
    if job.checkpoint is not None:
        message.checkpoint = job.checkpoint
    if job.scheduled_run is not None:
        message.scheduled_run.CopyFrom(scheduled_run(job.scheduled_run))
    if job.workflow_node is not None:
        message.workflow.CopyFrom(workflow_node(job.workflow_node))
    return message


def job(record: JobRecord, shard: ShardName) -> job_pb2.Job:
    message = job_pb2.Job(
        id=record.id,
        queue=record.queue,
        kind=record.kind,
        state=STATES[record.state],
        payload=record.payload or b"",
        attributes=json.loads(record.attributes or "{}"),
        priority=record.priority,
        enqueued_at=timestamp(record.enqueued_at),
        # A blocked job has no time to run.
        run_at=None if record.state == JobState.BLOCKED.value else timestamp(record.run_at),
        attempt=record.attempt,
        max_attempts=record.max_attempts or MAX_ATTEMPTS_DEFAULT,
        retry=policy_message(retry_policy.from_json(record.retry)),
        dedup_key=record.dedup_key or record.live_key or "",
        dedup_while_live=record.live_key is not None,
        worker=record.worker or "",
        result=record.result or b"",
        reason=record.reason or "",
        shard=shard,
        checkpoint=record.checkpoint or b"",
        log=record.log(),
        group=record.group_key or "",
    )
    if record.progress is not None:
        message.progress.CopyFrom(job_pb2.Progress(**Progress.from_json(json.loads(record.progress))._asdict()))
    if record.expires_at is not None:
        message.expires_at.CopyFrom(timestamp(record.expires_at))
    if record.max_runtime_us is not None:
        message.max_runtime.CopyFrom(duration(record.max_runtime_us))
    if record.scheduled_run is not None:
        message.scheduled_run.CopyFrom(scheduled_run(record.scheduled_run))
    if record.workflow_node is not None:
        message.workflow.CopyFrom(workflow_node(record.workflow_node))
    if record.state == "leased" and record.deadline is not None:
        message.lease_deadline.CopyFrom(timestamp(record.deadline))
    if record.finished_at is not None:
        message.finished_at.CopyFrom(timestamp(record.finished_at))
    for attempt in record.attempts():
        message.attempts.add(
            attempt=attempt.attempt,
            worker=attempt.worker,
            leased_at=timestamp(attempt.leased_at),
            ended_at=timestamp(attempt.ended_at),
            outcome=OUTCOMES[attempt.outcome],
            failure=None if attempt.failure is None else failure_message(attempt.failure),
            log=attempt.log,
        )
    return message


def template_message(stored: Template) -> job_pb2.JobTemplate:
    """Returns a template as it was given, but with defaults filled in for the priority, and for the retry policy if one
    was given."""
    values = cast("Mapping[str, str | None]", stored)
    message = job_pb2.JobTemplate(
        queue=str(values["queue"]),
        kind=str(values["kind"]),
        payload=cast("bytes", stored["payload"] or b""),
        attributes=json.loads(values["attributes"] or "{}"),
        priority=cast("int", stored["priority"] or PRIORITY_DEFAULT),
        max_attempts=cast("int", stored["max_attempts"] or 0),
        group=values["group_key"] or "",
    )
    if values["retry"] is not None:
        message.retry.CopyFrom(policy_message(retry_policy.from_json(values["retry"])))
    if stored["max_runtime_us"] is not None:
        message.max_runtime.CopyFrom(duration(cast("int", stored["max_runtime_us"])))
    return message


def scheduled_run(stored: str) -> job_pb2.ScheduledRun:
    """Returns what a job says about the run of a schedule that stored it."""
    run = ScheduledRun.from_json(stored)
    message = job_pb2.ScheduledRun(schedule=run.schedule, at=timestamp(run.at), cause=RUN_CAUSES[run.cause])
    if run.previous is not None:
        message.previous_at.CopyFrom(timestamp(run.previous))
    return message


def workflow_node(stored: str) -> job_pb2.WorkflowNode:
    """Returns what a job says about its workflow."""
    of = NodeOf.parse(stored)
    return job_pb2.WorkflowNode(workflow_id=of.workflow, node=of.node)


def workflow_fault(fault: Fault) -> cluster_pb2.WorkflowFault:
    return cluster_pb2.WorkflowFault(org=fault.org, workflow_id=fault.workflow, node=fault.node, what=fault.what)


# ── Queues and counts out ────────────────────────────────────────────────────────────────────────────────────────────


def queue_info(org: OrgId, record: QueueRecord, shard: ShardName) -> admin_pb2.QueueInfo:
    settings: dict[str, Any] = {**_QUEUE_DEFAULTS, **record.settings.given()}
    paused = settings.pop("paused", False)
    settings["retry"] = policy_message(retry_policy.from_json(record.settings.retry))
    return admin_pb2.QueueInfo(
        org=org,
        queue=record.queue,
        config=admin_pb2.QueueConfig(**settings),
        paused=paused,
        created_at=timestamp(record.created_at),
        shard=shard,
    )


def quarantine(facts: QuarantineFacts) -> admin_pb2.Quarantine:
    return admin_pb2.Quarantine(
        queue=facts.queue,
        kind=facts.kind,
        since=timestamp(facts.since),
        crashes=facts.crashes,
        reason=facts.reason or "",
        by_operator=facts.reason is not None,
        next_trial_at=None if facts.next_trial_at is None else timestamp(facts.next_trial_at),
        trial_id=facts.trial_id or "",
        trial_since=None if facts.trial_at is None else timestamp(facts.trial_at),
        set_aside=min(facts.set_aside, COUNTED_MAX),
        at_least=facts.set_aside > COUNTED_MAX,
    )


def queue_stats(counts: QueueCounts) -> admin_pb2.QueueStats:
    message = admin_pb2.QueueStats(
        queue=counts.queue,
        blocked=counts.blocked,
        scheduled=counts.scheduled,
        ready=counts.ready,
        leased=counts.leased,
        dead=counts.dead,
        succeeded=counts.succeeded,
        cancelled=counts.cancelled,
        paused=counts.paused,
    )
    if counts.oldest_ready_age_us is not None:
        message.oldest_ready_age.CopyFrom(duration(counts.oldest_ready_age_us))
    if counts.next_due is not None:
        message.next_due.CopyFrom(timestamp(counts.next_due))
    return message


def org_books(books: OrgBooks, *, home_shard: str = "") -> cluster_pb2.OrgBooks:
    """Returns an org's books on one shard. `home_shard` names the shard where the org's live jobs belong, if that is
    another shard."""
    return cluster_pb2.OrgBooks(
        org=books.org,
        accepted=books.accepted,
        scheduled=books.scheduled,
        ready=books.ready,
        leased=books.leased,
        succeeded=books.succeeded,
        dead=books.dead,
        cancelled=books.cancelled,
        archived=books.archived,
        expired=books.expired,
        balanced=books.balanced,
        stray=books.unfinished if home_shard else 0,
        home_shard=home_shard,
    )


def enqueue_results(
    ids: Sequence[str], duplicates: Mapping[int, str], known: Mapping[int, Known]
) -> list[queue_pb2.EnqueueResult]:
    """Returns one result for each job. The keys of both mappings are the positions of the jobs. `duplicates` has the
    ids of the jobs that were known already. `known` has the states of these jobs, and says whether their content
    differs from the request."""
    results = [queue_pb2.EnqueueResult(id=duplicates.get(at, job_id)) for at, job_id in enumerate(ids)]
    for at in duplicates:
        results[at].duplicate = True
    for at, (state, differs) in known.items():
        results[at].state = STATES[state.value]
        results[at].differs = differs
    return results


def wanted_orgs(request: cluster_pb2.ListOrgsRequest) -> WantedOrgs:
    return WantedOrgs(
        search=request.search,
        sort=_ORG_SORTS.get(request.sort, OrgSort.BACKLOG),
        max_age_us=micros(request.max_age) if request.HasField("max_age") else _ORGS_AGE_DEFAULT_US,
    )


def org_figures(figures: OrgFigures, shards: Sequence[ShardName]) -> cluster_pb2.OrgFigures:
    message = cluster_pb2.OrgFigures(
        org=figures.org,
        scheduled=figures.scheduled,
        ready=figures.ready,
        leased=figures.leased,
        dead=figures.dead,
        shards=shards,
        enqueued_per_s=figures.enqueued_per_1000_s / 1000,
        ended_per_s=figures.ended_per_1000_s / 1000,
    )
    if figures.rates_over_us is not None:
        message.rates_over.CopyFrom(duration(figures.rates_over_us))
    if figures.oldest_ready_age_us is not None:
        message.oldest_ready_age.CopyFrom(duration(figures.oldest_ready_age_us))
    return message
