"""The methods of Client that change stored jobs. Some take the ids of the jobs; others change all jobs that meet
conditions. Jobs that meet conditions are found page by page and changed by their ids, in small steps. Each step is
short, and its changes stay if a later step fails (docs/decisions/0033-attributes-have-no-index.md)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from typing import TypeVar

from windrow.admin import AdminCalls, refuse_away, set_time, state_number
from windrow.errors import InvalidRequest, Span, invalid_argument
from windrow.job_rules import JOBS_MAX
from windrow.jobs import Answer, JobRecord, JobState, answers, listed_ids
from windrow.payloads import checked_text, duration, named_timestamp
from windrow.v1 import admin_pb2, queue_pb2

_PAGE_MAX = 1000
# A step finds the jobs of one page and changes them. Then the client rests for _REST times the duration of the step,
# because consumers come first.
_STEP_MAX = 200
_REST = 50
# The client rests no longer than this time: a slow call may be due to a shard that was away, and not to load.
_REST_S_MAX = 2.0
_PRIORITY_MAX = 9
# How many jobs a BulkChange shows.
_FIRST_MAX = 5
_WAITING = frozenset({JobState.SCHEDULED, JobState.READY})
_DEAD = frozenset({JobState.DEAD})
_UNFINISHED = _WAITING | _DEAD | {JobState.LEASED, JobState.BLOCKED}

# The conditions of a JobFilter that are times. CountJobsRequest has fields of the same names.
_TIMES = ("created_after", "created_before", "died_after", "died_before")

_Item = TypeVar("_Item")


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFilter:
    """Conditions for jobs of one org. A job must meet all of them. A field that is empty or None sets no condition."""

    queue: str = ""
    kind: str = ""
    # The job is in any of these states. Empty: the job is in any state in which the change can be made.
    states: Collection[JobState] = ()
    # The job has all of these attributes, each with this value.
    attributes: Mapping[str, str] = field(default_factory=dict[str, str])
    # The time in the job's id is at or after `created_after`, and before `created_before`.
    created_after: datetime | None = None
    created_before: datetime | None = None
    # The job is dead, and died at or after `died_after`, and before `died_before`.
    died_after: datetime | None = None
    died_before: datetime | None = None
    # Leaves out jobs whose last attempt failed permanently (by Kill, or by a nack with `permanent`).
    not_killed: bool = False

    def __post_init__(self) -> None:
        for name in ("queue", "kind"):
            checked_text(name, getattr(self, name))
        for key, value in self.attributes.items():
            if not isinstance(value, str):
                raise invalid_argument(f"attributes[{key!r}]", f"must be a text, not {value!r}")
            checked_text("attributes", key)
            checked_text(f"attributes[{key!r}]", value)
        for name in _TIMES:
            if (given := getattr(self, name)) is not None:
                named_timestamp(name, given)

    @property
    def is_empty(self) -> bool:
        """Whether the filter has no condition except `states` and `not_killed`, which only narrow other conditions."""
        return self == JobFilter(states=self.states, not_killed=self.not_killed)

    def allows(self, job: JobRecord) -> bool:
        """Returns whether a job meets the conditions that ListJobs does not have."""
        if self.not_killed and job.attempts and job.attempts[-1].failure and job.attempts[-1].failure.permanent:
            return False
        if self.died_after is None and self.died_before is None:
            return True
        died_at = job.finished_at
        return (
            died_at is not None
            and (self.died_after is None or died_at >= self.died_after)
            and (self.died_before is None or died_at < self.died_before)
        )


_ALL = JobFilter()


@dataclass(frozen=True, slots=True, kw_only=True)
class BulkChange:
    """The progress of a change to all jobs that meet some conditions."""

    # How many jobs met the conditions.
    found: int = 0
    # How many of the found jobs were changed. A dry run changes no jobs.
    changed: int = 0
    # How many of the found jobs were not changed, because their state had changed meanwhile.
    skipped: int = 0
    # The first few of the jobs that were found.
    first: Sequence[JobRecord] = field(default=(), repr=False)


OnProgress = Callable[[BulkChange], object]


class JobChanges(AdminCalls):
    """The methods that change stored jobs of one org, and that count the jobs that meet conditions."""

    async def count_jobs(self, where: JobFilter = _ALL, *, on_progress: Callable[[int], object] | None = None) -> int:
        """Counts the jobs that meet the conditions. If `where.states` is empty, counts jobs in every state. Makes many
        short calls, which take some seconds for a million jobs; `on_progress` gets the count so far. With `died_after`,
        `died_before` or `not_killed`, only dead jobs are counted.

        Each job is counted once. A job whose state changes during the count may be missed. Raises Unavailable if a
        shard of the org does not answer. Raises NotFound if `where.queue` does not exist."""
        request = admin_pb2.CountJobsRequest(
            org=self.org,
            queue=where.queue,
            kind=where.kind,
            states=sorted(state_number("states", state) for state in frozenset(where.states)),
            attributes=where.attributes,
            not_killed=where.not_killed,
        )
        for name in _TIMES:
            set_time(getattr(request, name), name, getattr(where, name))
        count = 0
        while True:
            response = await self._ask(lambda stub: stub.CountJobs, request)
            refuse_away(self.org, response.unavailable_shards, "did not count its jobs")
            count += response.count
            if on_progress is not None:
                on_progress(count)
            request.page_token = response.next_page_token
            if not request.page_token:
                return count

    async def cancel_jobs(self, ids: Iterable[str], *, reason: str = "") -> list[Answer]:
        """Cancels jobs that have not finished, and ends their leases. Returns STALE for a job that had succeeded."""
        checked_text("reason", reason)

        async def send(part: Sequence[str]) -> Sequence[int]:
            request = queue_pb2.CancelJobsRequest(org=self.org, ids=part, reason=reason)
            return (await self.calls.call(lambda stub: stub.CancelJobs, request)).answers

        return await in_parts(listed_ids(ids), send)

    async def alter_jobs(
        self,
        ids: Iterable[str],
        *,
        priority: int = 0,
        run_at: datetime | None = None,
        delay: Span | None = None,
        attributes: Mapping[str, str] | None = None,
    ) -> list[Answer]:
        """Changes jobs that wait: their priority, the time when they run (`run_at`, or now plus `delay`), and all their
        attributes. 0 and None change nothing. Returns STALE for a job that is leased or dead or has succeeded, and
        CANCELLED for a cancelled job. Raises InvalidRequest for a value that cannot be sent."""
        change = _alteration(self.org, priority, run_at, delay, attributes)

        async def send(part: Sequence[str]) -> Sequence[int]:
            request = queue_pb2.AlterJobsRequest(ids=part)
            request.MergeFrom(change)
            return (await self.calls.call(lambda stub: stub.AlterJobs, request)).answers

        return await in_parts(listed_ids(ids), send)

    async def redrive_jobs(self, ids: Iterable[str]) -> list[Answer]:
        """Makes dead jobs ready again; their attempts are counted from 1 again. Returns CANCELLED for a cancelled job,
        and STALE for any other job that is not dead. If the first try of this call redrove the job, and the answer to
        that try was lost, returns STALE too."""

        async def send(part: Sequence[str]) -> Sequence[int]:
            request = queue_pb2.RedriveJobsRequest(org=self.org, ids=part)
            return (await self.calls.call(lambda stub: stub.RedriveJobs, request)).answers

        return await in_parts(listed_ids(ids), send)

    async def cancel_where(
        self,
        where: JobFilter,
        *,
        reason: str = "",
        limit: int | None = None,
        dry_run: bool = False,
        on_progress: OnProgress | None = None,
    ) -> BulkChange:
        """Cancels the jobs that meet the conditions, at most `limit` jobs, in small steps with pauses. A job that
        begins to meet the conditions meanwhile may be missed. At least one condition must be given in addition to
        `states` and `not_killed`.

        `dry_run`: only finds the jobs. `on_progress` is called after each step. After an error, call again: cancelled
        jobs stay cancelled, and are not found again. Raises Unavailable if a shard of the org does not answer. Raises
        NotFound if `where.queue` does not exist."""
        cancel = partial(self.cancel_jobs, reason=reason)
        return await self._change(where, _UNFINISHED, cancel, limit, dry_run, on_progress)

    async def alter_where(
        self,
        where: JobFilter,
        *,
        priority: int = 0,
        run_at: datetime | None = None,
        delay: Span | None = None,
        attributes: Mapping[str, str] | None = None,
        limit: int | None = None,
        dry_run: bool = False,
        on_progress: OnProgress | None = None,
    ) -> BulkChange:
        """Changes the jobs that wait and meet the conditions. Each job is changed as in alter_jobs; the steps, `limit`,
        `dry_run` and `on_progress` are as in cancel_where.

        Skips a job that already has the wanted values, so that a repeated call continues where the first one stopped.
        With `delay`, no job is skipped, because each call counts the delay from the time of that call."""
        if not priority and run_at is None and delay is None and attributes is None:
            raise invalid_argument("priority", "must be set, unless run_at, delay or attributes is")
        # Check the values before a dry run too.
        _alteration(self.org, priority, run_at, delay, attributes)
        now = datetime.now(UTC)

        def needs_it(job: JobRecord) -> bool:
            return (
                delay is not None
                or (priority not in (0, job.priority))
                or (run_at is not None and run_at != job.run_at and not (run_at <= now and job.state is JobState.READY))
                or (attributes is not None and dict(attributes) != dict(job.attributes))
            )

        alter = partial(self.alter_jobs, priority=priority, run_at=run_at, delay=delay, attributes=attributes)
        # A blocked job has no time yet that could be changed.
        possible = _WAITING | {JobState.BLOCKED} if run_at is None and delay is None else _WAITING
        return await self._change(where, possible, alter, limit, dry_run, on_progress, needs_it)

    async def redrive_where(
        self,
        where: JobFilter,
        *,
        limit: int | None = None,
        dry_run: bool = False,
        on_progress: OnProgress | None = None,
    ) -> BulkChange:
        """Makes the dead jobs that meet the conditions ready again. Each job is redriven as in redrive_jobs; the steps,
        `limit`, `dry_run` and `on_progress` are as in cancel_where. A job that dies again meanwhile is not redriven
        again. A repeated call redrives that job, unless `where.died_before` excludes it. For a whole queue,
        redrive_queue is faster."""
        return await self._change(where, _DEAD, self.redrive_jobs, limit, dry_run, on_progress)

    async def _change(
        self,
        where: JobFilter,
        possible: frozenset[JobState],
        act: Callable[[Sequence[str]], Awaitable[list[Answer]]],
        limit: int | None,
        dry_run: bool,
        on_progress: OnProgress | None,
        needs_it: Callable[[JobRecord], bool] = lambda _: True,
    ) -> BulkChange:
        """`possible`: the states in which `act` can change a job."""
        states = frozenset(where.states) or possible
        if not states <= possible:
            names = ", ".join(state.value for state in JobState if state in possible)
            raise invalid_argument("states", f"only jobs that are {names} can be changed so")
        if where.is_empty:
            raise invalid_argument("where", "has no condition, which would mean every job of the org: give one")
        if limit is not None and limit < 1:
            raise invalid_argument("limit", f"must be 1 or more, or None for all, not {limit}")
        so_far, token = BulkChange(), ""
        while True:
            # The list is ordered by id. So a job keeps its place in the list when it is changed, and the next page
            # begins after the jobs of this page.
            began_s = time.monotonic()
            page = await self.list_jobs(
                where.queue,
                states=states,
                kind=where.kind,
                attributes=where.attributes,
                created_after=where.created_after,
                created_before=where.created_before,
                page_size=_PAGE_MAX if dry_run else _STEP_MAX,
                page_token=token,
            )
            refuse_away(self.org, page.unavailable_shards, "did not list its jobs")
            jobs = [job for job in page.jobs if where.allows(job) and needs_it(job)]
            jobs = jobs if limit is None else jobs[: limit - so_far.found]
            done = [] if dry_run or not jobs else await act([job.id for job in jobs])
            so_far = BulkChange(
                found=so_far.found + len(jobs),
                changed=so_far.changed + done.count(Answer.OK),
                skipped=so_far.skipped + len(done) - done.count(Answer.OK),
                first=(*so_far.first, *jobs)[:_FIRST_MAX],
            )
            if on_progress is not None:
                on_progress(so_far)
            token = page.next_page_token
            if not token or so_far.found == limit:
                return so_far
            # Do not rest if there was nothing to change.
            if done:
                await asyncio.sleep(min(_REST_S_MAX, _REST * (time.monotonic() - began_s)))


async def in_parts(
    items: Sequence[_Item], send: Callable[[Sequence[_Item]], Awaitable[Sequence[int]]], *, count_max: int = JOBS_MAX
) -> list[Answer]:
    results: list[Answer] = []
    for at in range(0, len(items), count_max):
        results += answers(await send(items[at : at + count_max]))
    return results


def _alteration(
    org: str, priority: int, run_at: datetime | None, delay: Span | None, attributes: Mapping[str, str] | None
) -> queue_pb2.AlterJobsRequest:
    if not 0 <= priority <= _PRIORITY_MAX:
        raise invalid_argument("priority", f"must be 1 to {_PRIORITY_MAX}, not {priority}")
    if run_at is not None and delay is not None:
        raise InvalidRequest("run_at and delay are both given; give only one")
    request = queue_pb2.AlterJobsRequest(org=org, priority=priority)
    set_time(request.run_at, "run_at", run_at)
    if delay is not None:
        try:
            request.delay.CopyFrom(duration(delay))
        except (TypeError, ValueError) as error:
            raise invalid_argument("delay", error) from error
    if attributes is not None:
        try:
            request.attributes.values.update(attributes)
        except (TypeError, ValueError) as error:
            raise invalid_argument("attributes", error) from error
        request.attributes.SetInParent()
    return request
