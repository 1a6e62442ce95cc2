"""Operators' calls to one shard: queue configurations, lists, counts, redrive, purge, and the check of the books
(`check`).

These calls use connections of their own. So a long count never takes a connection from an enqueue or a claim, and the
planner may choose plans that it may not choose for the statements of the hot path.
"""

from __future__ import annotations

import asyncio
import base64
import json
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any, NamedTuple, TypeVar, cast

from shard.admin import job_counts, job_pages, org_figures, queue_figures, statements
from shard.admin.job_counts import Part, WantedCount
from shard.admin.job_pages import Page, Wanted
from shard.admin.org_figures import OrgPage, Place, SomeFigures, WantedOrgs
from shard.admin.queue_figures import QueueFigures
from shard.errors import BadPageToken, QueueExists, QueueNotEmpty, ShardUnavailable, TooManyQueues, UnknownQueue
from shard.placement.slots import FIRST_EPOCH
from shard.postgres import partitions
from shard.postgres import statements as postgres_statements
from shard.postgres.clock import ShardClock
from shard.postgres.pool import Database
from shard.queue.coalescer import SingleCall, single_calls
from shard.queue.enqueue import find_refused
from shard.queue.groups import Groups
from shard.queue.queue_ids import QUEUES_MAX, QueueIds
from shard.queue_settings import QueueSettings
from shard.vocabulary import Micros, OrgId, QueueName, ShardName

T = TypeVar("T")
_NAME = re.compile(r"[A-Za-z0-9._:/-]{1,128}")
# Upper bounds for the time that a scan for one org takes, so that other scans get their turn, and for the time that a
# scan waits for its turn.
_SCAN_S_MAX = 20.0
_SCAN_WAIT_S_MAX = 60.0
# Upper bounds for a count of work. _WORK_LANES_MAX bounds the lanes that a count reads; a queue has one lane for each
# of its up to nine priorities. To find leased jobs, a count also reads jobs that become visible later. _WORK_LATER_MAX
# bounds how many such jobs a count reads in each lane.
_WORK_LANES_MAX = 100_000
_WORK_LATER_MAX = 10_000
# A count that only asks whether there is any work uses this bound instead of _WORK_LATER_MAX.
_ANY_WORK_LATER_MAX = 100
# How often the creation of a queue is tried if its org is erased meanwhile.
_CREATE_TRIES_MAX = 6


class QueueRecord(NamedTuple):
    """A queue and its settings. If the queue has no retention of its own, `retention_days` is the org's retention."""

    queue: QueueName
    created_at: Micros
    settings: QueueSettings


class Work(NamedTuple):
    """The numbers of jobs that consumers would get now (`ready`) and of jobs that consumers have (`leased`)."""

    ready: int
    leased: int


class Chunk(NamedTuple):
    """Identifies jobs that were exported to another shard together (shard/placement/move_steps.py)."""

    # The epoch of the move.
    epoch: int
    number: int


class LeavingCounts(NamedTuple):
    """Counts of a queue's exported jobs, which are about to leave a shard, in the order of stats.sql's columns. If the
    target shard of the move has imported their chunk, the target shard counts these jobs too."""

    blocked: int
    scheduled: int
    ready: int
    dead: int
    oldest_ready_age_us: int | None
    next_due: Micros | None
    chunk: Chunk


class QueueCounts(NamedTuple):
    """Counts of one queue's jobs, in the order of stats.sql's columns."""

    queue: QueueName
    blocked: int
    scheduled: int
    ready: int
    leased: int
    dead: int
    succeeded: int
    cancelled: int
    oldest_ready_age_us: int | None
    next_due: Micros | None
    paused: bool
    # Jobs on their way to another shard, which are not counted above.
    leaving: LeavingCounts | None = None
    # The last chunk that this shard imported or exported.
    chunk: Chunk | None = None


class OrgBooks(NamedTuple):
    """One org's books on one shard, in the order of check_books.sql's columns."""

    org: str
    accepted: int
    # Includes blocked jobs.
    scheduled: int
    ready: int
    leased: int
    succeeded: int
    dead: int
    cancelled: int
    # Cold jobs: succeeded and cancelled jobs together.
    archived: int
    # Jobs that were dropped after their retention.
    expired: int

    @property
    def unfinished(self) -> int:
        return self.scheduled + self.ready + self.leased + self.dead

    @property
    def balanced(self) -> bool:
        """Whether the number of accepted jobs equals the sum of all other counts (invariant I5)."""
        return self.accepted == self.unfinished + self.succeeded + self.cancelled + self.archived + self.expired


class QueueAdmin:
    """Administers one shard. All methods may raise ShardUnavailable in addition to the errors that their docstrings
    name.

    Every method that changes jobs or queues raises ClockSetBack while `clock` knows that the shard's clock was set
    back. Without `clock`, no method raises ClockSetBack."""

    def __init__(self, database: Database, clock: ShardClock | None = None) -> None:
        self.name: ShardName = database.name
        self._database = database
        self._clock = clock or ShardClock(database)
        self._queue_ids = QueueIds(database)
        # One scan runs at a time, and the orgs take turns. So quick statements find a free connection while a scan
        # runs.
        self._scans = single_calls(
            lambda: ShardUnavailable(self.name, "earlier counts and lists take long"), wait_s=_SCAN_WAIT_S_MAX
        )
        # Calls about queues run one at a time, and the orgs take turns, so that one org's calls do not delay the calls
        # of other orgs (invariant I4).
        self._calls = single_calls(lambda: ShardUnavailable(self.name, "earlier calls about queues take long"))

    async def create_queue(
        self, org: OrgId, queue: QueueName, settings: QueueSettings, *, epoch: int = FIRST_EPOCH
    ) -> QueueRecord:
        """Creates a queue. `epoch` has the same meaning as for `alter_queue`. Raises QueueExists, TooManyQueues,
        TooManyRetentions, NotOwned."""
        return await self._in_turn(org, partial(self._create_queue, org, queue, settings, epoch))

    async def _create_queue(self, org: OrgId, queue: QueueName, settings: QueueSettings, epoch: int) -> QueueRecord:
        self._clock.check()
        parameters = {"org": org, "queue": queue, **asdict(settings), "reset": [], "epoch": epoch}
        # If the org is erased meanwhile, the next try makes the org's name and the queue's name again, for a new org of
        # that name.
        for _ in range(_CREATE_TRIES_MAX):
            existing = await self._database.run(statements.GET_QUEUE, {"org": org, "queue": queue})
            # If this shard does not own the org's slot, refuse the call before the org's name is stored on this shard.
            await self._refuse_unowned(org, epoch)
            if existing:
                raise QueueExists(org, queue)
            if settings.retention_days is not None:
                await partitions.refuse_another(self._database, settings.retention_days)
            if not await self._queue_ids.make_names((org, queue)):
                raise TooManyQueues(self.name, org, [queue], queues_max=QUEUES_MAX)
            # One statement stores the queue and its settings. So nobody can find the queue without its settings.
            rows: Sequence[tuple[Any, ...]]
            if settings.retention_days is None:
                rows = await self._database.run(statements.CREATE_QUEUE, parameters)
            else:
                async with partitions.room_for(self._database, settings.retention_days) as connection:
                    rows = await connection.run(statements.CREATE_QUEUE, parameters)
                # This may be the first queue with this retention, so create its partitions.
                await partitions.make_ahead(self._database)
            if rows:
                return _record(rows[0])
        raise ShardUnavailable(self.name, f"org {org!r} is being erased; try again")

    async def alter_queue(
        self,
        org: OrgId,
        queue: QueueName,
        settings: QueueSettings,
        *,
        reset: Sequence[str] = (),
        epoch: int = FIRST_EPOCH,
        draining: bool = False,
    ) -> QueueRecord:
        """Changes the settings that are not None, and resets the settings that `reset` names to their defaults. `epoch`
        is the epoch of the placement that names this shard as the org's writer. With `draining`, this shard is the
        source of a move that has not ended: `epoch` is the epoch of the move, and the same change was already made on
        the target. Raises UnknownQueue, TooManyRetentions, NotOwned."""
        act = partial(self._alter_queue, org, queue, settings, reset, epoch, draining=draining)
        return await self._in_turn(org, act)

    async def _alter_queue(
        self,
        org: OrgId,
        queue: QueueName,
        settings: QueueSettings,
        reset: Sequence[str],
        epoch: int,
        *,
        draining: bool,
    ) -> QueueRecord:
        self._clock.check()
        parameters = {
            "org": org,
            "queue": queue,
            **asdict(settings),
            "reset": list(reset),
            "epoch": epoch,
            "draining": draining,
        }
        if settings.retention_days is None or draining:
            rows: list[Any] = await self._database.run(statements.ALTER_QUEUE, parameters)
        else:
            async with partitions.room_for(self._database, settings.retention_days) as connection:
                rows = await connection.run(statements.ALTER_QUEUE, parameters)
        if not rows:
            await self._refuse_unowned(org, epoch)
            raise UnknownQueue(org, queue)
        if settings.retention_days is not None:
            # This may be the first queue with this retention, so create its partitions.
            await partitions.make_ahead(self._database)
        if settings.group_concurrency is not None or "group_concurrency" in reset:
            # If the queue's group_concurrency was raised, more jobs of each group may be leased: give them their group
            # slots now. If this call is interrupted, sweeps continue it.
            for number in (await QueueIds(self._database).find([(org, queue)])).values():
                await Groups(self._database).fill_queue(number)
        return _record(rows[0])

    async def _refuse_unowned(self, org: OrgId, epoch: int) -> None:
        for error in (await find_refused(self._database, [(org, epoch)])).values():
            raise error

    async def get_queue(self, org: OrgId, queue: QueueName) -> QueueRecord:
        """Returns a queue's configuration. Raises UnknownQueue."""
        return await self._in_turn(org, partial(self._get_queue, org, queue))

    async def _get_queue(self, org: OrgId, queue: QueueName) -> QueueRecord:
        rows = await self._database.run(statements.GET_QUEUE, {"org": org, "queue": queue})
        if not rows:
            raise UnknownQueue(org, queue)
        return _record(rows[0])

    async def list_queues(self, org: OrgId, *, page_size: int, page_token: str) -> tuple[list[QueueRecord], str]:
        """Returns a page of queues by name, and the token of the next page (empty on the last page). Raises
        BadPageToken."""
        after = _unpack(page_token) if page_token else ""
        parameters = {"org": org, "after": after, "rows": page_size + 1}
        rows = await self._in_turn(org, partial(self._database.run, statements.LIST_QUEUES, parameters))
        queues = list(map(_record, rows[:page_size]))
        return queues, _pack(queues[-1].queue) if len(rows) > page_size else ""

    async def delete_queue(self, org: OrgId, queue: QueueName, *, epoch: int = FIRST_EPOCH) -> None:
        """Deletes an empty queue. Raises UnknownQueue, QueueNotEmpty, NotOwned."""
        await self._in_turn(org, partial(self._delete_queue, org, queue, epoch))

    async def _delete_queue(self, org: OrgId, queue: QueueName, epoch: int) -> None:
        self._clock.check()
        await self._get_queue(org, queue)
        if not await self._database.run(statements.DELETE_QUEUE, {"org": org, "queue": queue, "epoch": epoch}):
            await self._refuse_unowned(org, epoch)
            # If the queue does not exist by now, it was deleted: by another call, or by the first run of this
            # statement, whose answer was lost.
            if await self._database.run(statements.GET_QUEUE, {"org": org, "queue": queue}):
                raise QueueNotEmpty(org, queue)

    async def holds_jobs(self, org: OrgId, queue: QueueName) -> bool:
        """Returns whether the shard has unfinished jobs of the queue, including jobs on their way to another shard."""
        rows = await self._database.run(statements.HOLDS_JOBS, {"org": org, "queue": queue})
        return bool(rows and rows[0][0])

    async def departs(self, org: OrgId, queue: QueueName) -> bool:
        """Returns whether jobs of the queue are on their way to another shard."""
        rows = await self._database.run(statements.IS_EXPORTING, {"org": org, "queue": queue})
        return bool(rows[0][0])

    async def purge_queue(self, org: OrgId, queue: QueueName, *, limit: int, include_dead: bool) -> int:
        """Cancels up to `limit` jobs that have no valid lease, and returns how many. Raises UnknownQueue. If this
        raises ShardUnavailable, some jobs may have been cancelled."""
        return await self._in_turn(org, partial(self._purge_queue, org, queue, limit=limit, include_dead=include_dead))

    async def _purge_queue(self, org: OrgId, queue: QueueName, *, limit: int, include_dead: bool) -> int:
        self._clock.check()
        await self._get_queue(org, queue)
        parameters: dict[str, object] = {"org": org, "queue": queue, "rows": limit}
        cancelled = len(await partitions.finish(self._database, statements.PURGE_LIVE, parameters))
        if include_dead and cancelled < limit:
            cancelled += len(
                await partitions.finish(
                    self._database, statements.PURGE_DEAD, {**parameters, "rows": limit - cancelled}
                )
            )
        return cancelled

    async def redrive(
        self,
        org: OrgId,
        queue: QueueName,
        *,
        kind: str,
        died_after: Micros | None,
        died_before: Micros | None,
        limit: int,
        gap_us: int = 0,
        ahead: int = 0,
    ) -> int:
        """Redrives up to `limit` dead jobs, and returns how many. The jobs become due one after another, `gap_us`
        apart. The first job becomes due after `ahead` times `gap_us`: earlier calls have redriven `ahead` jobs, which
        become due before that job. Raises UnknownQueue. If this raises ShardUnavailable, some jobs may have been
        redriven."""
        parameters = {
            "org": org,
            "queue": queue,
            "kind": kind,
            "after_us": died_after,
            "before_us": died_before,
            "rows": limit,
            "gap_us": gap_us,
            "ahead": ahead,
        }
        return await self._in_turn(org, partial(self._redrive, org, queue, parameters))

    async def _redrive(self, org: OrgId, queue: QueueName, parameters: Mapping[str, object]) -> int:
        self._clock.check()
        await self._get_queue(org, queue)
        return len(await self._database.run(statements.REDRIVE_QUEUE, parameters))

    async def list_jobs(self, wanted: Wanted, *, page_size: int, page_token: str) -> Page:
        """Returns the next page of jobs. The page ends early with the job that fills ANSWER_BYTES_MAX, or when the
        search takes long. Raises UnknownQueue, BadPageToken."""
        if wanted.queue is not None:
            await self.get_queue(wanted.org, wanted.queue)
        return await self._scan(
            wanted.org, partial(job_pages.page, self._database, wanted, page_size=page_size, page_token=page_token)
        )

    async def count_jobs(self, wanted: WantedCount, *, page_token: str, with_ids: bool) -> Part:
        """Returns the next part of a count. Raises UnknownQueue, BadPageToken."""
        if wanted.queue is not None:
            await self.get_queue(wanted.org, wanted.queue)
        count = partial(job_counts.count, self._database, wanted, page_token=page_token, with_ids=with_ids)
        return await self._scan(wanted.org, count)

    async def stats(self, org: OrgId, queue: QueueName | None, *, include_finished: bool) -> list[QueueCounts]:
        """Counts jobs by queue and state; exported jobs, which are about to leave the shard, are counted separately.
        Raises UnknownQueue if `queue` is given and does not exist."""
        parameters = {"org": org, "queue": queue or "", "include_finished": include_finished}
        rows = await self._scan(org, partial(self._database.run, statements.STATS, parameters))
        if queue and not rows:
            raise UnknownQueue(org, queue)
        return [_counts(row) for row in rows]

    async def has_work(self, org: OrgId | None, queue: QueueName) -> bool:
        """Returns whether a queue of the org (None: of any org) has jobs that are ready or leased. May miss a leased
        job if 100 or more jobs of the same queue and priority become due before the lease ends."""
        parameters = _work_parameters(org, queue, jobs_max=1, later_max=_ANY_WORK_LATER_MAX)
        # This statement takes turns with short calls, and not with scans. So it never waits for a long count.
        rows = await self._in_turn(org or OrgId(""), partial(self._database.run, statements.COUNT_WORK, parameters))
        return any(rows[0])

    async def count_work(self, org: OrgId | None, queue: QueueName, *, jobs_max: int) -> Work:
        """Counts the ready and leased jobs of a queue of the org (None: of all orgs), up to `jobs_max` jobs in all."""
        parameters = _work_parameters(org, queue, jobs_max=jobs_max, later_max=_WORK_LATER_MAX)
        rows = await self._scan(org, partial(self._database.run, statements.COUNT_WORK, parameters))
        return Work._make(rows[0])

    async def check(self) -> list[OrgBooks]:
        """Returns every org's books, all as they were at one moment."""
        rows = await self._scan(None, partial(self._database.run, statements.CHECK_BOOKS, {}))
        return list(map(OrgBooks._make, rows))

    async def list_orgs(self, wanted: WantedOrgs, *, after: Place, page_size: int) -> OrgPage:
        """Returns the next page of orgs by their figures. Counts the jobs first if the last count is too old."""
        await self._scan(None, partial(org_figures.count, self._database, max_age_us=wanted.max_age_us))
        return await self._scan(
            None, partial(org_figures.page, self._database, wanted, after=after, page_size=page_size)
        )

    async def org_figures(self, orgs: Sequence[OrgId]) -> SomeFigures:
        """Returns the figures of the given orgs that live on this shard, from the last count, and the age of that
        count."""
        return await org_figures.read(self._database, orgs)

    async def queue_figures(self, *, max_age_us: int) -> list[QueueFigures]:
        """Returns the figures of the largest queues, and the sums of all other queues, from a count that is at most
        about `max_age_us` old."""
        return await self._scan(None, partial(queue_figures.measure, self._database, max_age_us=max_age_us))

    async def _in_turn(self, org: OrgId, act: Callable[[], Awaitable[T]]) -> T:
        """Runs a call about an org's queues when its turn comes. `act` must not call `_in_turn`: the inner call would
        wait for the end of the outer call, which waits for the inner call."""
        answer: T = await self._calls.submit(SingleCall(org, 1, act))
        return answer

    async def _scan(self, org: OrgId | None, act: Callable[[], Awaitable[T]]) -> T:
        async def in_time() -> T:
            try:
                async with asyncio.timeout(None if org is None else _SCAN_S_MAX):
                    return await act()
            except TimeoutError:
                raise ShardUnavailable(
                    self.name, f"the count or list for org {org!r} takes longer than {_SCAN_S_MAX:g} s"
                ) from None

        answer: T = await self._scans.submit(SingleCall(org, 1, in_time))
        return answer

    async def versions(self) -> tuple[str, int, bool]:
        """Returns the server's version, such as "18.6", the number of the schema's newest migration, and whether the
        server is a standby."""
        rows = await self._database.run(statements.READ_VERSIONS, {})
        version, newest, is_standby = rows[0]
        return str(version), int(newest), bool(is_standby)

    async def probe_disk(self) -> None:
        """Checks that the server can write. Raises DiskFull if its disk is full. Raises ShardUnavailable."""
        await self._database.run(postgres_statements.PROBE_DISK, {})

    async def make_partitions(self) -> int:
        return await partitions.make_ahead(self._database)


def _work_parameters(org: OrgId | None, queue: QueueName, *, jobs_max: int, later_max: int) -> dict[str, Any]:
    return {
        "org": org,
        "queue": queue,
        "jobs_max": jobs_max,
        "lanes_max": _WORK_LANES_MAX,
        "later_max": later_max,
    }


def _record(row: Sequence[Any]) -> QueueRecord:
    return QueueRecord(row[0], row[1], QueueSettings.from_row(row[2:]))


def _counts(row: Sequence[Any]) -> QueueCounts:
    *counts, leaving_epoch, leaving_chunk, epoch, number = row
    leaving = None
    if leaving_epoch is not None:
        leaving = LeavingCounts._make([*counts[11:], Chunk(leaving_epoch, leaving_chunk)])
    chunk = None if epoch is None else Chunk(epoch, number)
    return QueueCounts._make([*counts[:11], leaving, chunk])


def _pack(name: QueueName) -> str:
    return base64.urlsafe_b64encode(json.dumps([name]).encode()).decode()


def _unpack(token: str) -> str:
    """Returns the name in a page token, which a caller may have forged. Raises BadPageToken."""
    try:
        key: Any = json.loads(base64.urlsafe_b64decode(token.encode()))
    except (ValueError, RecursionError) as error:
        raise BadPageToken(token) from error
    if not isinstance(key, list) or len(parts := cast("list[object]", key)) != 1:
        raise BadPageToken(token)
    (name,) = parts
    if not isinstance(name, str) or _NAME.fullmatch(name) is None:
        raise BadPageToken(token)
    return name
