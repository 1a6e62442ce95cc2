"""What operators ask of one shard: queue configurations, lists, counts, redrive, purge, and whether the books balance.

Runs on connections of its own, so that a long count never takes one from the queue, and may be planned freely.
"""

from __future__ import annotations

import asyncio
import base64
import json
import re
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar, cast

from shard import listing, partitions, statements
from shard.coalescing import Coalescer
from shard.database import Database
from shard.enqueuing import find_refused
from shard.errors import BadPageToken, QueueExists, QueueNotEmpty, ShardUnavailable, TooManyQueues, UnknownQueue
from shard.interning import QUEUES_MAX, Names
from shard.listing import Page, Wanted
from shard.placement import FIRST_EPOCH
from shard.retry import Policy, to_json
from shard.turns import Alone, one_by_one
from shard.vocabulary import Micros, OrgId, QueueName, ShardName

T = TypeVar("T")
_NAME = re.compile(r"[A-Za-z0-9._:/-]{1,128}")
# Then others have their turn.
_SCAN_S_MAX = 20.0
_SCAN_WAIT_S_MAX = 60.0


class QueueRecord(NamedTuple):
    """In the order of get_queue.sql's columns. NULL: the default."""

    queue: QueueName
    retry: str | None
    max_attempts: int | None
    # Days.
    retention: int | None
    paused: bool
    created_at: Micros


class Chunk(NamedTuple):
    """Jobs that go from shard to shard together (shard/moving.py)."""

    # Of the move.
    epoch: int
    number: int


class LeavingCounts(NamedTuple):
    """Of a queue's jobs that are about to leave a shard, in the order of stats.sql's columns. Where the other shard has
    taken their chunk, it counts them too."""

    scheduled: int
    ready: int
    dead: int
    oldest_ready_age_us: int | None
    next_due: Micros | None
    chunk: Chunk


class QueueCounts(NamedTuple):
    """In the order of stats.sql's columns."""

    queue: QueueName
    scheduled: int
    ready: int
    leased: int
    dead: int
    succeeded: int
    cancelled: int
    oldest_ready_age_us: int | None
    next_due: Micros | None
    paused: bool
    # Not counted above.
    leaving: LeavingCounts | None = None
    # The last one that this shard has taken, or given away.
    chunk: Chunk | None = None


class OrgBooks(NamedTuple):
    """One org's books on one shard, in the order of check_books.sql's columns."""

    org: str
    accepted: int
    scheduled: int
    ready: int
    leased: int
    succeeded: int
    dead: int
    cancelled: int
    # Cold: of whatever state.
    archived: int
    # Kept for their time, and gone.
    expired: int

    @property
    def unfinished(self) -> int:
        return self.scheduled + self.ready + self.leased + self.dead

    @property
    def balanced(self) -> bool:
        """Invariant I5."""
        return self.accepted == self.unfinished + self.succeeded + self.cancelled + self.archived + self.expired


class Books:
    """One shard's books. All verbs raise ShardUnavailable besides what they say."""

    def __init__(self, database: Database) -> None:
        self.name: ShardName = database.name
        self._database = database
        self._names = Names(database)
        # One at a time, and each org's in turn: what is quick finds a connection beside it.
        self._scans = Coalescer[Alone, Any](
            one_by_one,
            weigh=lambda call: call.weight,
            whose=lambda call: call.org,
            late=lambda: ShardUnavailable(self.name, "counts and lists before this one take long"),
            acts_max=1,
            weight_max=1,
            wait_s=_SCAN_WAIT_S_MAX,
        )

    async def create_queue(
        self,
        org: OrgId,
        queue: QueueName,
        *,
        retry: Policy | None,
        max_attempts: int | None,
        retention: int | None = None,
        epoch: int = FIRST_EPOCH,
    ) -> QueueRecord:
        """Raises QueueExists, TooManyQueues, NotOwned."""
        there = await self._database.run(statements.GET_QUEUE, {"org": org, "queue": queue})
        # Before it is made, too: where the slot goes, it is made again, and would be there already.
        await self._refuse_unowned(org, epoch)
        if there:
            raise QueueExists(org, queue)
        if not await self._names.make([(org, queue)]):
            raise TooManyQueues(self.name, org, [queue], queues_max=QUEUES_MAX)
        return await self.alter_queue(
            org, queue, retry=retry, max_attempts=max_attempts, retention=retention, epoch=epoch
        )

    async def alter_queue(
        self,
        org: OrgId,
        queue: QueueName,
        *,
        retry: Policy | None = None,
        max_attempts: int | None = None,
        retention: int | None = None,
        paused: bool | None = None,
        reset: Sequence[str] = (),
        epoch: int = FIRST_EPOCH,
        draining: bool = False,
    ) -> QueueRecord:
        """Changes what is not None; puts back to the default what `reset` names. `epoch`: of the placement by which
        this shard is the org's writer; or, `draining`, the source of the move under way, where the change is made
        second. Raises UnknownQueue, NotOwned."""
        rows = await self._database.run(
            statements.ALTER_QUEUE,
            {
                "org": org,
                "queue": queue,
                "retry": None if retry is None else to_json(retry),
                "max_attempts": max_attempts,
                "retention": retention,
                "paused": paused,
                "reset": list(reset),
                "epoch": epoch,
                "draining": draining,
            },
        )
        if not rows:
            await self._refuse_unowned(org, epoch)
            raise UnknownQueue(org, queue)
        if retention is not None:
            # It may be the first queue that keeps its jobs for so long.
            await partitions.make_ahead(self._database)
        return QueueRecord._make(rows[0])

    async def _refuse_unowned(self, org: OrgId, epoch: int) -> None:
        for error in (await find_refused(self._database, [(org, epoch)])).values():
            raise error

    async def get_queue(self, org: OrgId, queue: QueueName) -> QueueRecord:
        """Raises UnknownQueue."""
        rows = await self._database.run(statements.GET_QUEUE, {"org": org, "queue": queue})
        if not rows:
            raise UnknownQueue(org, queue)
        return QueueRecord._make(rows[0])

    async def list_queues(self, org: OrgId, *, page_size: int, page_token: str) -> tuple[list[QueueRecord], str]:
        """A page of queues by name, and the token of the next. Raises BadPageToken."""
        after = _unpack(page_token) if page_token else ""
        rows = await self._database.run(statements.LIST_QUEUES, {"org": org, "after": after, "rows": page_size + 1})
        queues = list(map(QueueRecord._make, rows[:page_size]))
        return queues, _pack(queues[-1].queue) if len(rows) > page_size else ""

    async def delete_queue(self, org: OrgId, queue: QueueName, *, epoch: int = FIRST_EPOCH) -> None:
        """Raises UnknownQueue, QueueNotEmpty, NotOwned."""
        await self.get_queue(org, queue)
        if not await self._database.run(statements.DELETE_QUEUE, {"org": org, "queue": queue, "epoch": epoch}):
            await self._refuse_unowned(org, epoch)
            # Gone by now, it was deleted at the same time, or by this very statement, whose first answer was lost.
            if await self._database.run(statements.GET_QUEUE, {"org": org, "queue": queue}):
                raise QueueNotEmpty(org, queue)

    async def holds_jobs(self, org: OrgId, queue: QueueName) -> bool:
        """Whether jobs of the queue are here that have not finished, on their way to another shard too."""
        rows = await self._database.run(statements.HOLDS_JOBS, {"org": org, "queue": queue})
        return bool(rows and rows[0][0])

    async def departs(self, org: OrgId, queue: QueueName) -> bool:
        """Whether jobs of the queue are on their way to another shard."""
        rows = await self._database.run(statements.DEPARTS, {"org": org, "queue": queue})
        return bool(rows[0][0])

    async def purge_queue(self, org: OrgId, queue: QueueName, *, limit: int, include_dead: bool) -> int:
        """Cancels up to `limit` jobs that nobody holds; answers how many. Raises UnknownQueue; also after a
        ShardUnavailable some may have been cancelled."""
        await self.get_queue(org, queue)
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
    ) -> int:
        """Brings up to `limit` dead jobs back; answers how many. Raises UnknownQueue; also after a ShardUnavailable
        some may have been brought back."""
        await self.get_queue(org, queue)
        rows = await self._database.run(
            statements.REDRIVE,
            {
                "org": org,
                "queue": queue,
                "kind": kind,
                "after_us": died_after,
                "before_us": died_before,
                "rows": limit,
            },
        )
        return len(rows)

    async def list_jobs(self, wanted: Wanted, *, page_size: int, page_token: str) -> Page:
        """The next page of jobs; it ends early with the job that fills ANSWER_BYTES_MAX, or where it takes long. Raises
        UnknownQueue, BadPageToken."""
        if wanted.queue is not None:
            await self.get_queue(wanted.org, wanted.queue)
        return await self._scan(
            wanted.org, partial(listing.page, self._database, wanted, page_size=page_size, page_token=page_token)
        )

    async def stats(self, org: OrgId, queue: QueueName | None, *, include_finished: bool) -> list[QueueCounts]:
        """Counts by state, by queue, those about to leave the shard apart. Raises UnknownQueue where one was named."""
        parameters = {"org": org, "queue": queue or "", "include_finished": include_finished}
        rows = await self._scan(org, partial(self._database.run, statements.STATS, parameters))
        if queue and not rows:
            raise UnknownQueue(org, queue)
        return [_counts(row) for row in rows]

    async def check(self) -> list[OrgBooks]:
        """Every org's books, at one moment."""
        rows = await self._scan(None, partial(self._database.run, statements.CHECK_BOOKS, {}))
        return list(map(OrgBooks._make, rows))

    async def _scan(self, org: OrgId | None, act: Callable[[], Awaitable[T]]) -> T:
        async def in_time() -> T:
            try:
                async with asyncio.timeout(None if org is None else _SCAN_S_MAX):
                    return await act()
            except TimeoutError:
                raise ShardUnavailable(
                    self.name, f"what was to be counted or listed of org {org!r} takes longer than {_SCAN_S_MAX:g} s"
                ) from None

        answer: T = await self._scans.submit(Alone(org, 1, in_time))
        return answer

    async def versions(self) -> tuple[str, int]:
        """What the server calls its version, such as "18.6", and the number of the schema's newest migration."""
        rows = await self._database.run(statements.READ_VERSIONS, {})
        version, newest = rows[0]
        return str(version), int(newest)

    async def probe_disk(self) -> None:
        """Raises DiskFull where the server cannot write, and ShardUnavailable."""
        await self._database.run(statements.PROBE_DISK, {})

    async def make_partitions(self) -> int:
        return await partitions.make_ahead(self._database)


def _counts(row: Sequence[Any]) -> QueueCounts:
    *there, leaving_epoch, leaving_chunk, epoch, number = row
    leaving = None
    if leaving_epoch is not None:
        leaving = LeavingCounts._make([*there[10:], Chunk(leaving_epoch, leaving_chunk)])
    chunk = None if epoch is None else Chunk(epoch, number)
    return QueueCounts._make([*there[:10], leaving, chunk])


def _pack(name: QueueName) -> str:
    return base64.urlsafe_b64encode(json.dumps([name]).encode()).decode()


def _unpack(token: str) -> str:
    """The name in a token. A caller may have made it up."""
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
