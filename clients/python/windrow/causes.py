"""Why a job or a queue does not run: the answers of explain_job and explain_queue. No I/O."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, TypeAlias, cast

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

from windrow.failures import Failure, read_failure
from windrow.jobs import AttemptOutcome, JobState, outcome_of, state_of
from windrow.payloads import moment
from windrow.v1 import admin_pb2, cause_pb2, job_pb2

Figure: TypeAlias = (
    bool | int | float | str | Sequence[str] | datetime | timedelta | Failure | JobState | AttemptOutcome | None
)
_UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """One cause. `str(cause)` is a sentence for people.

    `name` is the cause's name in proto/windrow/v1/cause.proto, such as "jobs_ahead" or "no_consumer". `figures` has the
    fields of the cause's message: numbers, texts, times and durations. A value of None means: not known. A router of a
    later release may send a cause that this release does not know: its name is then "unknown"."""

    name: str
    figures: Mapping[str, Figure]
    # The cause explains a queue, and not a job.
    of_queue: bool = False

    def __str__(self) -> str:
        sentence = _OF_QUEUES.get(self.name) if self.of_queue else None
        sentence = sentence or _SENTENCES.get(self.name)
        return f"{self.name}: upgrade the client to read this cause" if sentence is None else sentence(self.figures)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobExplanation:
    """Why a job does not run."""

    # UNKNOWN: the job was deleted, or no shard that answered has it.
    state: JobState
    # Empty if the state is UNKNOWN.
    queue: str
    kind: str
    shard: str
    # At least one cause. The most decisive cause comes first.
    causes: Sequence[Cause]
    # The earliest time at which the job can run. None: this time is not known, or the job runs already, or it will
    # never run again.
    runs_at: datetime | None


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueExplanation:
    """Why a queue gives no jobs, or which jobs it would give."""

    # At least one cause. The most decisive cause comes first.
    causes: Sequence[Cause]
    # The earliest time at which the next job of the queue can run. None: this time is not known.
    runs_at: datetime | None


def read_job(message: admin_pb2.ExplainJobResponse) -> JobExplanation:
    return JobExplanation(
        state=state_of(message.state),
        queue=message.queue,
        kind=message.kind,
        shard=message.shard,
        causes=read_causes(message.causes),
        runs_at=moment(message.runs_at) if message.HasField("runs_at") else None,
    )


def read_queue(message: admin_pb2.ExplainQueueResponse) -> QueueExplanation:
    return QueueExplanation(
        causes=read_causes(message.causes, of_queue=True),
        runs_at=moment(message.runs_at) if message.HasField("runs_at") else None,
    )


def read_causes(messages: Iterable[cause_pb2.Cause], *, of_queue: bool = False) -> list[Cause]:
    """Converts causes. `of_queue` says that the causes explain a queue, and not a job."""
    return [_read(message, of_queue) for message in messages]


def _read(message: cause_pb2.Cause, of_queue: bool) -> Cause:
    name = message.WhichOneof("cause")
    if name is None:
        return Cause(name=_UNKNOWN, figures={}, of_queue=of_queue)
    inner = cast("Message", getattr(message, name))
    figures: dict[str, Figure] = {}
    for field in inner.DESCRIPTOR.fields:
        if field.message_type is not None and not inner.HasField(field.name):
            figures[field.name] = None
        else:
            figures[field.name] = _figure(
                getattr(inner, field.name), enum=None if field.enum_type is None else field.enum_type.name
            )
    return Cause(name=name, figures=figures, of_queue=of_queue)


def _figure(value: Any, *, enum: str | None) -> Figure:
    """`enum`: the name of the value's enum. None: the value does not belong to an enum."""
    match value:
        case Timestamp():
            return moment(value)
        case Duration():
            return value.ToTimedelta()
        case job_pb2.Failure():
            return read_failure(value)
        case int() if enum is not None:
            return state_of(value) if enum == job_pb2.JobState.DESCRIPTOR.name else outcome_of(value)
        case bool() | int() | float() | str():
            return value
        case _:
            return list(cast("Iterable[str]", value))


# ── For people ───────────────────────────────────────────────────────────────────────────────────────────────────────

_Figures: TypeAlias = Mapping[str, Any]


def _time(time: datetime | None) -> str:
    return "an unknown time" if time is None else f"{time:%Y-%m-%d %H:%M:%SZ}"


def _span(span: timedelta | None) -> str:
    if span is None:
        return "few minutes"
    seconds = round(span.total_seconds())
    if not seconds:
        return "less than 1 s"
    return f"{seconds // 60} min" if seconds % 60 == 0 else f"{seconds} s"


def _jobs(count: int) -> str:
    return "1 job" if count == 1 else f"{count:,} jobs"


def _attempts(of: _Figures) -> str:
    return f"attempt {of['attempt']} of {of['max_attempts']}"


def _failed(failure: Failure | None) -> str:
    told = "" if failure is None else ": ".join(filter(None, (failure.type, failure.message)))
    return next((f": {line}" for line in told.strip().splitlines()), "")


def _last_seen(time: datetime | None) -> str:
    return "" if time is None else f"; the last one was seen at {_time(time)}"


def _finished(of: _Figures) -> str:
    if of["state"] is JobState.UNKNOWN:
        return "the job has ended, and was deleted at the end of its retention"
    how = "succeeded" if of["state"] is JobState.SUCCEEDED else "was cancelled"
    # If the caller gave no reason, the router stores "cancelled".
    reason = f": {of['reason']}" if of["reason"] not in ("", "cancelled") else ""
    return f"the job {how} at {_time(of['at'])}{reason}"


def _dead(of: _Figures) -> str:
    return f"the job died at {_time(of['at'])}, after {_attempts(of)}: {of['reason']}{_failed(of['failure'])}"


def _leased(of: _Figures) -> str:
    worker = f"worker {of['worker']!r}" if of["worker"] else "a consumer without a name"
    return f"{worker} has the job since {_time(of['leased_at'])}, until {_time(of['deadline'])} ({_attempts(of)})"


def _scheduled(of: _Figures) -> str:
    reason = f": {of['reason']}" if of["reason"] else ""
    return f"not due before {_time(of['until'])}{reason}"


def _backing_off(of: _Figures) -> str:
    return f"waits until {_time(of['next_try'])} after {_attempts(of)} has failed{_failed(of['failure'])}"


def _moving(of: _Figures) -> str:
    way = f"from shard {of['source']!r}" + (f" to {of['target']!r}" if of["target"] else "")
    return f"the job is on its way {way}" if of["on_its_way"] else f"the org moves {way}; consumers get jobs from both"


def _kind_not_taken(of: _Figures) -> str:
    taken = ", ".join(map(repr, of["taken_kinds"])) or "none"
    return (
        f"no consumer that was seen in the last {_span(of['seen_within'])} takes the kind {of['kind']!r}; they take "
        f"{taken}{_last_seen(of['last_seen'])}"
    )


def _jobs_ahead(of: _Figures) -> str:
    moved = "" if of["goes_first_at"] is None else f"; it is moved before them at {_time(of['goes_first_at'])}"
    if of["at_least"]:
        return f"more than {_jobs(of['more_urgent'] + of['earlier'])} of the queue come first{moved}"
    parts = [
        f"{_jobs(count)} {which}"
        for count, which in ((of["more_urgent"], "more urgent"), (of["earlier"], "of the same priority, earlier"))
        if count
    ]
    return f"these come first: {' and '.join(parts)}{moved}"


def _due(of: _Figures) -> str:
    return "nothing holds the job: " + (
        "a consumer waits, and gets it now" if of["consumer_waits"] else "the next consumer that has room gets it"
    )


def _in_flight(of: _Figures) -> str:
    least = "at least " if of["at_least"] else ""
    first = _time(of["first_deadline"])
    return f"consumers have {least}{_jobs(of['leased'])} of the queue; the first lease ends at {first}"


def _backlog(of: _Figures) -> str:
    least = "more than " if of["at_least"] else ""
    waits = "; a consumer waits for jobs" if of["consumer_waits"] else ""
    first = f"the first is {of['first_id']}, since {_time(of['first_ready_since'])}"
    return f"{least}{_jobs(of['ready'])} ready; {first}{waits}"


def _group(of: _Figures) -> str:
    ahead = f"{'more than ' if of['at_least'] else ''}{_jobs(of['ahead'])} before it"
    held = f"waits for group {of['group']!r}, of which {_jobs(of['concurrency'])} may run at a time"
    if not of["holder_id"]:
        return f"{held}: {ahead}"
    if of["until"] is None:
        return f"{held}: job {of['holder_id']} has a place, and is ready or waits for its retry; {ahead}"
    worker = f"worker {of['worker']!r}" if of["worker"] else "a consumer without a name"
    return f"{held}: {worker} has job {of['holder_id']} until {_time(of['until'])}; {ahead}"


def _group_backlog(of: _Figures) -> str:
    if of["at_least"]:
        return f"more than {_jobs(of['jobs'])} wait for others of their groups to end"
    whose = "waits for others of its group" if of["jobs"] == 1 else "wait for others of their groups"
    return f"{_jobs(of['jobs'])} {whose} to end"


def _quarantine(of: _Figures) -> str:
    held = f"kind {of['kind']!r} is quarantined since {_time(of['since'])}"
    if of["by_operator"]:
        held += f" by an operator{': ' + of['reason'] if of['reason'] else ''}"
    elif of["crashes"]:
        held += f", after {of['crashes']:,} {'crash' if of['crashes'] == 1 else 'crashes'} of its workers"
    held += f"; {'more than ' if of['at_least'] else ''}{_jobs(of['set_aside'])} set aside"
    if of["trial_id"]:
        return f"{held}; job {of['trial_id']} is let through now"
    if of["next_trial_at"] is not None:
        return f"{held}; the next one is let through at {_time(of['next_trial_at'])}"
    return f"{held}, until somebody releases it"


def _start_limit(of: _Figures) -> str:
    whose = f"queue {of['queue']!r}" if of["queue"] else "the org"
    starts = "1 start" if of["amount"] == 1 else f"{of['amount']:,} starts"
    used = f"{of['usage']:,} {'is' if of['usage'] == 1 else 'are'} in use"
    return f"{whose} may have {starts} per {_span(of['interval'])}, and {used}; the next job starts in " + _span(
        of["next_start"]
    )


def _in_flight_limit(of: _Figures) -> str:
    whose = f"queue {of['queue']!r}" if of["queue"] else "the org"
    return f"{whose} may have {_jobs(of['amount'])} leased at a time, and has {of['usage']:,}: one must end first"


def _blocked(of: _Figures) -> str:
    where = f"node {of['node']!r} of workflow {of['workflow_id']}"
    if of["has_signal"]:
        where += " has its signal, and"
    if of["paused"]:
        return f"{where} waits because the workflow is paused"
    if not of["left"]:
        return f"{where} waits for the end of the workflow"
    names = ", ".join(map(repr, of["waits_for"])) + (", …" if of["left"] > len(of["waits_for"]) else "")
    least = "more than " if of["at_least"] else ""
    return f"{where} waits for {least}{of['left']:,} {'node' if of['left'] == 1 else 'nodes'}: {names}"


def _signal(of: _Figures) -> str:
    where = f"node {of['node']!r}" if of["node"] else "a node"
    return f"{where} of workflow {of['workflow_id']} waits for a signal until {_time(of['until'])}"


_SENTENCES: Mapping[str, Callable[[_Figures], str]] = {
    "finished": _finished,
    "dead": _dead,
    "expired": lambda of: f"past its expires_at, {_time(of['expires_at'])}: it is cancelled instead of run",
    "out_of_attempts": lambda of: f"no attempt is left ({_attempts(of)}): the next dequeue makes it dead",
    "leased": _leased,
    "scheduled": _scheduled,
    "backing_off": _backing_off,
    "shard_down": lambda of: f"shard {of['shard']!r} gives no jobs: {of['reason']}",
    "moving": _moving,
    "paused": lambda _: "the queue is paused",
    "no_consumer": lambda of: (
        f"no consumer of the queue was seen in the last {_span(of['seen_within'])}{_last_seen(of['last_seen'])}"
    ),
    "kind_not_taken": _kind_not_taken,
    "router_share": lambda of: (
        f"the org's claims wait for memory of the router: it holds {of['held_bytes']:,} bytes, all orgs hold "
        f"{of['all_held_bytes']:,} of {of['max_bytes']:,}"
    ),
    "fair_share": lambda of: (
        f"other orgs are served first: this one, of weight {of['weight']:g}, has had {_span(of['ahead'])} more of the "
        "time of the consumers of all orgs"
    ),
    "jobs_ahead": _jobs_ahead,
    "due": _due,
    "empty": lambda _: "the queue has no jobs that wait or run",
    "in_flight": _in_flight,
    "backlog": _backlog,
    "group": _group,
    "blocked": _blocked,
    "signal": _signal,
    "group_backlog": _group_backlog,
    "quarantine": _quarantine,
    "start_limit": _start_limit,
    "in_flight_limit": _in_flight_limit,
}
# The causes that have another sentence if they explain a queue.
_OF_QUEUES: Mapping[str, Callable[[_Figures], str]] = {
    "scheduled": lambda of: f"the next job that waits for its time is due at {_time(of['until'])}",
}
