"""The methods of Client for the admin service, and what they return."""

from __future__ import annotations

import enum
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, TypedDict, TypeVar, Unpack

from google.protobuf.field_mask_pb2 import FieldMask
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp
from grpc import StatusCode

from windrow.calls import ADMIN_FINAL, Calls, Method
from windrow.causes import JobExplanation, QueueExplanation, read_job, read_queue
from windrow.channels import Stub
from windrow.errors import (
    TRANSIENT,
    AlreadyExists,
    InvalidRequest,
    Span,
    Unavailable,
    WindrowError,
    ids_in_error,
    invalid_argument,
    renamed,
)
from windrow.ids import uuid7
from windrow.jobs import JobRecord, JobState, listed_ids, read_record, state_value
from windrow.limits import Limit, LimitMeasure, measure_number, read_limit
from windrow.new_jobs import RetryPolicy, read_retry, retry_message
from windrow.payloads import checked_text, moment, named_duration, named_timestamp
from windrow.v1 import admin_pb2, cluster_pb2, job_pb2, limits_pb2

# The contract's limit on the items of a page, and on the jobs of one restore call.
_PAGE_MAX = 1000
# The limit of one purge or redrive call: a larger call would hold its locks for too long.
_CHANGE_MAX = 1000
# If a purge or redrive has failed, the client repeats the call only after the refusals in _NOT_DONE, which say that
# nothing was done (docs/errors.md). After any other failure, whatever its status, the call may have changed jobs, and a
# second call would change further jobs.
_ANY = frozenset(StatusCode)
_NOT_DONE = ("ROUTER_FULL", "TOO_MANY_CHANGES")

_Request = TypeVar("_Request", bound=Message)
_Response = TypeVar("_Response")


class QueueOptions(TypedDict, total=False):
    """The settings that a call gives to a queue. QueueRecord says what each setting means. When a queue is created,
    None means the default. When a queue is changed, None means no change."""

    retry: RetryPolicy | None
    max_attempts: int | None
    retention_days: int | None
    group_concurrency: int | None
    ageing_seconds: int | None
    quarantine_after: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueRecord:
    """A queue with the settings that are in effect, including the defaults."""

    queue: str
    retry: RetryPolicy | None
    max_attempts: int
    # For how many days finished jobs are kept.
    retention_days: int
    # How many jobs of one group may run at a time.
    group_concurrency: int
    # A ready job of priority p is moved to priority 1 after (p - 1) times this number of seconds. None: priorities do
    # not age.
    ageing_seconds: int | None
    # A kind of the queue's jobs is quarantined after this many crashes. None: never.
    quarantine_after: int | None
    # The queue gives no jobs until it is resumed.
    paused: bool
    created_at: datetime
    # The shard that takes the org's new jobs.
    shard: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Quarantine:
    """A quarantined kind of a queue's jobs: the jobs of this kind are set aside, and no consumer gets them."""

    queue: str
    kind: str
    since: datetime
    # How many crashes led to the quarantine, plus how many trials have crashed since then.
    crashes: int
    # Why an operator quarantined the kind.
    reason: str
    # An operator quarantined the kind, and only release_kind releases it.
    by_operator: bool
    # When the next trial is let through. None: a trial is under way, or there will be none.
    next_trial_at: datetime | None
    # The id of the trial that is under way, and the time when this trial was let through.
    trial_id: str | None
    trial_since: datetime | None
    # How many jobs are set aside, up to 1,000. `at_least`: more jobs than that are set aside.
    set_aside: int
    at_least: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class JobPage:
    """One page of a list of jobs. A page may have fewer jobs than the caller asked for, even none, although more pages
    follow."""

    jobs: Sequence[JobRecord]
    # Pass this token to list_jobs to get the next page. It is empty on the last page.
    next_page_token: str
    # Shards of the org that did not answer: their jobs are missing.
    unavailable_shards: Sequence[str]


class JobConditions(TypedDict, total=False):
    """The arguments of list_jobs that iter_jobs also accepts."""

    state: JobState | None
    states: Iterable[JobState]
    kind: str
    created_after: datetime | None
    created_before: datetime | None
    attributes: Mapping[str, str] | None
    include_payload: bool
    page_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueStats:
    """How many jobs of a queue are in each state."""

    queue: str
    blocked: int
    scheduled: int
    ready: int
    leased: int
    dead: int
    # None: the call did not ask for these counts.
    succeeded: int | None
    cancelled: int | None
    # How long the oldest ready job has been due. None: no job is ready.
    oldest_ready_age: timedelta | None
    # When the next scheduled job is due. None: no job is scheduled.
    next_due: datetime | None
    paused: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """The counts of each queue, by the queue's name."""

    queues: Mapping[str, QueueStats]
    # Shards of the org that did not answer: their jobs are not counted.
    unavailable_shards: Sequence[str]


class RestoreRefusal(enum.Enum):
    """Why a job was not restored."""

    # This org has no such job, or no longer has it.
    NOT_FOUND = "not_found"
    # The job is blocked, scheduled, ready or leased.
    LIVE = "live"
    # The time in the new id is too old, or too far in the future.
    BAD_NEW_ID = "bad_new_id"
    # The job belongs to a workflow node that waited for a signal. Such a job never runs.
    SIGNAL = "signal"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """The result of restore_jobs for one job."""

    # The old job.
    id: str
    new_id: str
    # A job with the new id existed already. Nothing was stored.
    duplicate: bool = False
    # Why nothing was stored. None: there is a new job.
    refusal: RestoreRefusal | None = None


class AdminCalls:
    """The calls about the queues of one org and about their jobs, for operators and dashboards."""

    org: str
    calls: Calls

    async def list_queues(self) -> list[QueueRecord]:
        """Returns all queues of the org, in the order of their names. An org that does not exist yet has no queues."""
        queues: list[QueueRecord] = []
        token = ""
        while True:
            request = admin_pb2.ListQueuesRequest(org=self.org, page_size=_PAGE_MAX, page_token=token)
            response = await self._ask(lambda stub: stub.ListQueues, request)
            queues += map(_read_queue, response.queues)
            token = response.next_page_token
            if not token:
                return queues

    async def get_queue(self, queue: str) -> QueueRecord:
        """Returns one queue. Raises NotFound."""
        request = admin_pb2.GetQueueRequest(org=self.org, queue=queue)
        return _read_queue((await self._ask(lambda stub: stub.GetQueue, request)).queue)

    async def create_queue(self, queue: str, **settings: Unpack[QueueOptions]) -> QueueRecord:
        """Creates a queue with these settings; None: the default. A queue that is not created like this gets the
        defaults when its first job is stored.

        Raises AlreadyExists if the queue exists, even if the first try of this call created it and the answer to that
        try was lost."""
        request = admin_pb2.CreateQueueRequest(org=self.org, queue=queue, config=_config(settings))
        return _read_queue((await self._ask(lambda stub: stub.CreateQueue, request)).queue)

    async def update_queue(
        self, queue: str, *, reset: Iterable[str] = (), **settings: Unpack[QueueOptions]
    ) -> QueueRecord:
        """Changes the given settings, also for the jobs that the queue has already. `reset` names settings to put back
        to their defaults, such as "retry". Raises NotFound."""
        config = _config(settings)
        given = [field.name for field, _ in config.ListFields()]
        resets = list(reset)
        if both := set(given).intersection(resets):
            raise invalid_argument("reset", f"names {min(both)!r}, which is given a value too")
        mask = FieldMask(paths=[*given, *resets])
        request = admin_pb2.UpdateQueueRequest(org=self.org, queue=queue, config=config, update_mask=mask)
        # Only the paths from `reset` can be wrong, so name that argument in the error.
        paths = ["update_mask.paths", *(f"update_mask.paths[{at}]" for at in range(len(mask.paths)))]
        response = await self._ask(lambda stub: stub.UpdateQueue, request, arguments=dict.fromkeys(paths, "reset"))
        return _read_queue(response.queue)

    async def put_queue(self, queue: str, **settings: Unpack[QueueOptions]) -> QueueRecord:
        """Creates a queue with these settings, or gives these settings to the queue if it exists. The method is for
        programs that set up their queues when they start. None: a new queue gets the default, and an existing queue
        keeps its setting. Several processes may call it at the same time. Raises NotFound if somebody deletes the queue
        meanwhile."""
        try:
            return await self.create_queue(queue, **settings)
        except AlreadyExists:
            if not _config(settings).ListFields():
                return await self.get_queue(queue)
            return await self.update_queue(queue, **settings)

    async def pause_queue(self, queue: str) -> QueueRecord:
        """Pauses a queue: consumers get no more of its jobs. Enqueues, acks and leases continue. Raises NotFound."""
        request = admin_pb2.PauseQueueRequest(org=self.org, queue=queue)
        return _read_queue((await self._ask(lambda stub: stub.PauseQueue, request)).queue)

    async def resume_queue(self, queue: str) -> QueueRecord:
        """Ends a pause. Raises NotFound."""
        request = admin_pb2.ResumeQueueRequest(org=self.org, queue=queue)
        return _read_queue((await self._ask(lambda stub: stub.ResumeQueue, request)).queue)

    async def delete_queue(self, queue: str) -> None:
        """Deletes a queue and its settings. The finished jobs of the queue can still be found. Raises NotFound. Raises
        FailedPrecondition if the queue holds jobs that are live or dead."""
        await self._ask(lambda stub: stub.DeleteQueue, admin_pb2.DeleteQueueRequest(org=self.org, queue=queue))

    async def list_quarantines(self, queue: str = "") -> list[Quarantine]:
        """Returns the quarantined kinds of a queue, or of all queues of the org."""
        request = admin_pb2.ListQuarantinesRequest(org=self.org, queue=queue)
        response = await self._ask(lambda stub: stub.ListQuarantines, request)
        return list(map(_read_quarantine, response.quarantines))

    async def quarantine_kind(self, queue: str, kind: str, *, reason: str = "") -> None:
        """Sets the jobs of this kind aside until release_kind is called. Raises NotFound."""
        request = admin_pb2.QuarantineKindRequest(
            org=self.org,
            queue=checked_text("queue", queue),
            kind=checked_text("kind", kind),
            reason=checked_text("reason", reason),
        )
        await self._ask(lambda stub: stub.QuarantineKind, request)

    async def release_kind(self, queue: str, kind: str) -> bool:
        """Ends the quarantine of a kind: within seconds its jobs are ready again. Returns whether the kind was
        quarantined. Raises NotFound."""
        request = admin_pb2.ReleaseKindRequest(org=self.org, queue=queue, kind=kind)
        return (await self._ask(lambda stub: stub.ReleaseKind, request)).released

    async def purge_queue(self, queue: str, *, include_dead: bool = False, limit: int | None = None) -> int:
        """Cancels the queue's jobs that are not leased, at most `limit` jobs. Leased jobs may finish. Returns how many
        jobs it cancelled. Raises NotFound.

        A purge makes several calls to the router. If one of them fails and may have cancelled jobs, the client does not
        try it again, because a second try could cancel further jobs. The error says how many jobs the purge had
        cancelled before the failed call. Look at `stats` before you call again.
        """

        async def purge(count: int) -> tuple[int, bool]:
            request = admin_pb2.PurgeQueueRequest(org=self.org, queue=queue, include_dead=include_dead, limit=count)
            response = await self._ask(lambda stub: stub.PurgeQueue, request, final=_ANY, refusals=_NOT_DONE)
            return response.cancelled, response.limit_reached

        return await _in_steps(purge, _checked_limit(limit), done="cancelled")

    async def list_jobs(
        self,
        queue: str = "",
        *,
        state: JobState | None = None,
        states: Iterable[JobState] = (),
        kind: str = "",
        created_after: datetime | None = None,
        created_before: datetime | None = None,
        attributes: Mapping[str, str] | None = None,
        include_payload: bool = False,
        page_size: int = 100,
        page_token: str = "",
    ) -> JobPage:
        """Returns a page of the org's jobs without leasing them, the newest first. If you pass `queue` and one live
        `state`, the jobs come in the order in which they will be claimed. Instead of `state`, you can pass `states`:
        list_jobs then returns jobs in any of these states, always the newest first. A job is returned only if it meets
        all conditions.

        `attributes`: returns only jobs that have all of these attributes, always the newest first.

        **A page may be empty although more pages follow**: if the org has thousands of jobs, the router searches for
        only some milliseconds per page. So read on until `next_page_token` is empty, or use iter_jobs.

        `created_after` (inclusive) and `created_before` are compared with the times in the job ids. `page_size` is 1 to
        1,000. For the next page, pass the same conditions and the page's `next_page_token`. Raises NotFound if `queue`
        is given and does not exist."""
        if not 1 <= page_size <= _PAGE_MAX:
            raise invalid_argument("page_size", f"must be 1 to {_PAGE_MAX:,}, not {page_size}")
        request = admin_pb2.ListJobsRequest(
            org=self.org,
            queue=queue,
            kind=kind,
            page_size=page_size,
            page_token=page_token,
            include_payload=include_payload,
            attributes=attributes,
        )
        if state is not None:
            request.state = state_number("state", state)
        any_of = frozenset(states)
        request.states.extend(sorted(state_number("states", one) for one in any_of))
        set_time(request.created_after, "created_after", created_after)
        set_time(request.created_before, "created_before", created_before)
        response = await self._ask(lambda stub: stub.ListJobs, request)
        jobs = [read_record(job, with_payload=include_payload) for job in response.jobs]
        wanted = dict[str, str](attributes or {}).items()
        return JobPage(
            # A router without the feature JOB_SEARCH ignores these two conditions, and lists other jobs too.
            jobs=[job for job in jobs if wanted <= job.attributes.items() and (not any_of or job.state in any_of)],
            next_page_token=response.next_page_token,
            unavailable_shards=list(response.unavailable_shards),
        )

    async def iter_jobs(self, queue: str = "", **conditions: Unpack[JobConditions]) -> AsyncIterator[JobRecord]:
        """Yields the jobs of all pages of list_jobs. Asks for the next page only after it has yielded all jobs of a
        page. A job that is stored or changes its state meanwhile may be left out. Raises what list_jobs raises, and
        Unavailable if a shard of the org does not answer."""
        token = ""
        while True:
            page = await self.list_jobs(queue, page_token=token, **conditions)
            refuse_away(self.org, page.unavailable_shards, "did not list its jobs")
            for job in page.jobs:
                yield job
            token = page.next_page_token
            if not token:
                return

    async def redrive_queue(
        self,
        queue: str,
        *,
        kind: str = "",
        died_after: datetime | None = None,
        died_before: datetime | None = None,
        limit: int | None = None,
        per_second: float = 0.0,
    ) -> int:
        """Makes the queue's dead jobs that meet all conditions ready again; their attempts are counted from 1 again.
        The job that died first is redriven first. Redrives at most as many jobs as are dead when the method begins,
        because redriven jobs may die again meanwhile. Returns how many jobs it redrove. `per_second`: how many of the
        jobs become due per second; a job that is not due yet is scheduled. 0: all jobs become due at once. Raises
        NotFound, Unavailable. A failed call is not tried again, for the reason that purge_queue gives."""
        conditions = admin_pb2.RedriveQueueRequest(per_second=per_second)
        redriven = 0
        set_time(conditions.died_after, "died_after", died_after)
        set_time(conditions.died_before, "died_before", died_before)

        async def redrive(count: int) -> tuple[int, bool]:
            nonlocal redriven
            request = admin_pb2.RedriveQueueRequest(org=self.org, queue=queue, kind=kind, limit=count)
            request.MergeFrom(conditions)
            if per_second:
                request.already_redriven = redriven
            response = await self._ask(lambda stub: stub.RedriveQueue, request, final=_ANY, refusals=_NOT_DONE)
            redriven += response.redriven
            return response.redriven, response.limit_reached

        left = _checked_limit(limit)
        stats = await self._stats(queue, verb="RedriveQueue")
        if stats.unavailable_shards:
            shards = ", ".join(stats.unavailable_shards)
            raise Unavailable(f"queue {queue!r}: these shards of the org did not count its dead jobs: {shards}")
        dead = stats.queues[queue].dead
        return await _in_steps(redrive, dead if left is None else min(left, dead), done="redriven")

    async def restore_jobs(self, ids: Iterable[str], *, new_ids: Iterable[str] | None = None) -> list[Restored]:
        """Stores finished and dead jobs once more, as new jobs that are due now; the old jobs stay as they are. Returns
        a result for each job.

        `new_ids`: the ids of the new jobs, each from windrow.uuid7(); None: the client makes them. If you call
        restore_jobs again after an error, pass the same `new_ids`, so that no second copy is stored. The error has them
        in `made_ids`."""
        old = listed_ids(ids)
        new = [uuid7() for _ in old] if new_ids is None else listed_ids(new_ids, "new_ids")
        if len(new) != len(old):
            raise invalid_argument("new_ids", f"has {len(new):,} ids for {len(old):,} jobs; give one for each")
        results: list[Restored] = []
        for at in range(0, len(old), _PAGE_MAX):
            pairs = list(zip(old[at : at + _PAGE_MAX], new[at : at + _PAGE_MAX], strict=True))
            jobs = [admin_pb2.RestoreJob(id=one, new_id=new_id) for one, new_id in pairs]
            request = admin_pb2.RestoreJobsRequest(org=self.org, jobs=jobs)
            with ids_in_error(new):
                response = await self._ask(lambda stub: stub.RestoreJobs, request)
            results += [
                _read_restored(one, new_id, result)
                for (one, new_id), result in zip(pairs, response.results, strict=True)
            ]
        return results

    async def stats(self, queue: str = "", *, include_finished: bool = False) -> Stats:
        """Counts the jobs in each state, for one queue or for all queues of the org (the first 1,000 by name).

        `include_finished`: counts finished jobs too. This is slow if there are many finished jobs, because all of them
        are scanned. Raises NotFound if `queue` is given and does not exist."""
        return await self._stats(queue, include_finished=include_finished)

    async def _stats(self, queue: str, *, include_finished: bool = False, verb: str = "") -> Stats:
        request = admin_pb2.GetStatsRequest(org=self.org, queue=queue, include_finished=include_finished)
        response = await self._ask(lambda stub: stub.GetStats, request, verb=verb)
        return Stats(
            queues={one.queue: _read_stats(one, with_finished=include_finished) for one in response.queues},
            unavailable_shards=list(response.unavailable_shards),
        )

    async def explain_job(self, job_id: str) -> JobExplanation:
        """Says why a job does not run now, and when it will run, if that is known. Raises NotFound."""
        request = admin_pb2.ExplainJobRequest(org=self.org, id=job_id)
        return read_job(await self._ask(lambda stub: stub.ExplainJob, request))

    async def explain_queue(self, queue: str) -> QueueExplanation:
        """Says why a queue gives no jobs now, or what it would give. Only the first jobs of the queue are examined, so
        the call is quick even for a queue with millions of jobs. Raises NotFound."""
        request = admin_pb2.ExplainQueueRequest(org=self.org, queue=queue)
        return read_queue(await self._ask(lambda stub: stub.ExplainQueue, request))

    async def list_limits(self) -> list[Limit]:
        """Returns the limits that apply to the org: its own limits, and the cluster's defaults where it has no limit of
        its own."""
        request = admin_pb2.ListLimitsRequest(org=self.org)
        return [read_limit(limit) for limit in (await self._ask(lambda stub: stub.ListLimits, request)).limits]

    async def set_limit(
        self, measure: LimitMeasure, amount: int, *, per: Span | None = None, queue: str = "", every_org: bool = False
    ) -> Limit:
        """Sets a limit of the org, or of one of its queues. JOBS, BYTES and STARTS limit what the org or the queue may
        enqueue or start: `amount` (at least 1) in each interval `per` (s, or timedelta; 1 s to 24 h). The other
        measures take no `per`: IN_FLIGHT limits how many jobs may be leased at the same time. BACKLOG limits how many
        jobs have not ended, and BACKLOG_BYTES limits how many bytes these jobs have. `every_org`: sets the default for
        each org that has no such limit of its own.

        The limit is in force on every router within 2 s. Needs the scope `cluster`. Raises ResourceExhausted if the
        cluster has 10,000 limits."""
        request = cluster_pb2.SetLimitRequest(org="" if every_org else self.org, queue=queue, measure=_measure(measure))
        try:
            request.amount = amount
        except (TypeError, ValueError) as error:
            raise invalid_argument("amount", error) from error
        if per is not None:
            request.interval.CopyFrom(named_duration("per", per))
        response = await self._ask(lambda stub: stub.SetLimit, request, arguments={"interval": "per"})
        return read_limit(response.limit)

    async def clear_limit(self, measure: LimitMeasure, *, queue: str = "", every_org: bool = False) -> bool:
        """Removes a limit. Returns False if the limit was not set. Needs the scope `cluster`."""
        request = cluster_pb2.ClearLimitRequest(
            org="" if every_org else self.org, queue=queue, measure=_measure(measure)
        )
        return (await self._ask(lambda stub: stub.ClearLimit, request)).cleared

    async def list_all_limits(self) -> list[Limit]:
        """Returns all limits of the cluster, the defaults first. Needs the scope `cluster`."""
        response = await self._ask(lambda stub: stub.ListAllLimits, cluster_pb2.ListAllLimitsRequest())
        return [read_limit(limit) for limit in response.limits]

    async def _ask(
        self,
        method: Callable[[Stub], Method[_Request, _Response]],
        request: _Request,
        *,
        verb: str = "",
        final: Collection[StatusCode] = ADMIN_FINAL,
        refusals: Collection[str] = (),
        arguments: Mapping[str, str] | None = None,
    ) -> _Response:
        """`final` and `refusals`: see Calls.call. `arguments` maps fields of the request to the caller's arguments, if
        their names differ."""
        try:
            return await self.calls.call(method, request, final=final, refusals=refusals, verb=verb)
        except InvalidRequest as error:
            if arguments is None:
                raise
            raise renamed(error, arguments) from error.__cause__


async def _in_steps(change: Callable[[int], Awaitable[tuple[int, bool]]], limit: int | None, *, done: str) -> int:
    """Changes jobs in bounded steps, at most `limit` in all. `change` is called with the number of jobs that it may
    change. `change` returns how many jobs it has changed, and whether there may be more jobs to change. _in_steps
    returns how many jobs were changed in all. `done` is a word for error messages, such as "cancelled", that says what
    was done to the jobs."""
    count = 0
    while limit is None or count < limit:
        step = _CHANGE_MAX if limit is None else min(_CHANGE_MAX, limit - count)
        try:
            changed, more = await change(step)
        except WindrowError as error:
            if not count and not isinstance(error, TRANSIENT):
                raise
            doubt = f"; {count:,} jobs were {done} before"
            if isinstance(error, TRANSIENT) and error.reason not in _NOT_DONE:
                doubt += f", and this call may have {done} up to {step:,} more: check the counts, then call again"
            error.args = (f"{error}{doubt}",)
            error.details += doubt if error.details else ""
            raise
        count += changed
        if not more:
            break
    return count


def refuse_away(org: str, shards: Sequence[str], what: str) -> None:
    """Raises Unavailable if shards of the org did not answer."""
    if shards:
        raise Unavailable(f"org {org!r}: these shards {what}: {', '.join(shards)}")


def _checked_limit(limit: int | None) -> int | None:
    if limit is not None and limit < 0:
        raise invalid_argument("limit", f"must be 0 or more, or None for all, not {limit}")
    return limit


def _measure(measure: LimitMeasure) -> limits_pb2.LimitMeasure.ValueType:
    try:
        return measure_number(measure)
    except KeyError as error:
        measures = ", ".join(f"LimitMeasure.{one.name}" for one in LimitMeasure if one is not LimitMeasure.UNKNOWN)
        raise invalid_argument("measure", f"must be one of {measures}, not {measure!r}") from error


def _config(settings: QueueOptions) -> admin_pb2.QueueConfig:
    if unknown := settings.keys() - QueueOptions.__annotations__.keys():
        raise TypeError(f"a queue has no setting {min(unknown)!r}, only {', '.join(QueueOptions.__annotations__)}")
    numbers: dict[str, Any] = {name: value for name, value in settings.items() if name != "retry"}
    retry = settings.get("retry")
    try:
        policy = None if retry is None else retry_message(retry)
    except (TypeError, ValueError) as error:
        raise invalid_argument("retry", error) from error
    return admin_pb2.QueueConfig(retry=policy, **numbers)


def state_number(name: str, state: JobState) -> job_pb2.JobState.ValueType:
    try:
        return state_value(state)
    except KeyError as error:
        states = ", ".join(f"JobState.{one.name}" for one in JobState if one is not JobState.UNKNOWN)
        raise invalid_argument(name, f"must be one of {states}, not {state!r}") from error


def set_time(field: Timestamp, name: str, time: datetime | None) -> None:
    if time is not None:
        field.CopyFrom(named_timestamp(name, time))


def _read_queue(message: admin_pb2.QueueInfo) -> QueueRecord:
    given = {field.name: value for field, value in message.config.ListFields()}
    numbers: dict[str, Any] = {name: given.get(name) for name in QueueOptions.__annotations__ if name != "retry"}
    return QueueRecord(
        queue=message.queue,
        retry=read_retry(message.config.retry),
        paused=message.paused,
        created_at=moment(message.created_at),
        shard=message.shard,
        **numbers,
    )


def _read_quarantine(message: admin_pb2.Quarantine) -> Quarantine:
    return Quarantine(
        queue=message.queue,
        kind=message.kind,
        since=moment(message.since),
        crashes=message.crashes,
        reason=message.reason,
        by_operator=message.by_operator,
        next_trial_at=moment(message.next_trial_at) if message.HasField("next_trial_at") else None,
        trial_id=message.trial_id or None,
        trial_since=moment(message.trial_since) if message.HasField("trial_since") else None,
        set_aside=message.set_aside,
        at_least=message.at_least,
    )


def _read_stats(message: admin_pb2.QueueStats, *, with_finished: bool) -> QueueStats:
    return QueueStats(
        queue=message.queue,
        blocked=message.blocked,
        scheduled=message.scheduled,
        ready=message.ready,
        leased=message.leased,
        dead=message.dead,
        succeeded=message.succeeded if with_finished else None,
        cancelled=message.cancelled if with_finished else None,
        oldest_ready_age=message.oldest_ready_age.ToTimedelta() if message.HasField("oldest_ready_age") else None,
        next_due=moment(message.next_due) if message.HasField("next_due") else None,
        paused=message.paused,
    )


# The keys are the numbers of the enum values in the proto files. The names there have a prefix.
_REFUSALS: dict[int, RestoreRefusal] = {
    admin_pb2.RestoreRefusal.Value(f"RESTORE_REFUSAL_{refusal.name}"): refusal
    for refusal in RestoreRefusal
    if refusal is not RestoreRefusal.UNKNOWN
}


def _read_restored(old: str, new_id: str, message: admin_pb2.RestoreResult) -> Restored:
    if message.HasField("restored"):
        return Restored(id=old, new_id=message.restored.id, duplicate=message.restored.duplicate)
    return Restored(id=old, new_id=new_id, refusal=_REFUSALS.get(message.refusal, RestoreRefusal.UNKNOWN))
