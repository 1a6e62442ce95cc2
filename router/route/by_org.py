"""Asks every shard that may hold an org's jobs, and merges the answers. If a shard does not answer, the result names
it; if no shard answers, the call fails."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence
from functools import partial
from typing import Generic, NamedTuple, TypeVar

from router.fleet.fleet import Fleet
from router.fleet.shard_handle import ShardHandle
from router.route.by_id import DEPARTING_PAUSE_S, DEPARTING_S_MAX
from shard.admin.job_counts import Part, WantedCount
from shard.admin.job_counts import merged as merged_counts
from shard.admin.job_pages import Key, Listed, Page, Wanted, merged
from shard.admin.queue_admin import Chunk, LeavingCounts, QueueCounts
from shard.errors import NoAnswer, ShardUnavailable, UnknownQueue
from shard.placement.slots import Placement
from shard.vocabulary import FINISHED, JobId, NewJobs, OrgId, QueueName, ShardName
from windrow.ids import uuid7

_T = TypeVar("_T")


class Asked(NamedTuple, Generic[_T]):
    answers: list[tuple[ShardName, _T]]
    # The shards that did not answer.
    unavailable: list[ShardName]
    # The placement that decided which shards to ask.
    placement: Placement


class MergedPage(NamedTuple):
    jobs: list[Listed]
    # The page is complete up to this key. None: it is the last page.
    until: Key | None
    # The shards that did not answer.
    unavailable: list[ShardName]


async def ask_readers(
    fleet: Fleet, org: OrgId, ask: Callable[[ShardHandle], Awaitable[_T]], *, finished: bool = False
) -> Asked[_T]:
    """Asks every shard of the org's current placement, in the order in which jobs move, so that no job is missed.

    `finished`: first asks former owners, which may still hold finished jobs. Raises NoAnswer if no shard answers,
    UnknownQueue if no shard that answers knows the queue, and every other error of `ask`.
    """
    while True:
        placement = fleet.placement(org)
        asked, refusal = await _ask_all(fleet, placement, ask, finished=finished)
        if asked.answers:
            refusal = None
        elif isinstance(refusal, NoAnswer):
            raise refusal
        try:
            if not await fleet.is_current(org, placement):
                continue
        except ShardUnavailable as error:
            asked.unavailable.append(error.shard)
        if refusal is not None:
            raise refusal
        return asked


async def _ask_all(
    fleet: Fleet, placement: Placement, ask: Callable[[ShardHandle], Awaitable[_T]], *, finished: bool
) -> tuple[Asked[_T], NoAnswer | UnknownQueue | None]:
    """Returns the answers of the shards, and the error of a shard that gave none (None: all shards gave an answer)."""
    asked = Asked[_T]([], [], placement)
    refusal: NoAnswer | UnknownQueue | None = None
    for name in _names(placement, finished=finished):
        try:
            asked.answers.append((name, await ask(fleet.placed(name).require_up())))
        except NoAnswer as error:
            asked.unavailable.append(name)
            refusal = error
        except UnknownQueue as error:
            refusal = refusal or error
    return asked, refusal


async def change_readers(
    fleet: Fleet, org: OrgId, queue: QueueName, limit: int, change: Callable[[ShardHandle, int], Awaitable[int]]
) -> int:
    """Changes up to `limit` jobs of a queue on the shards of the org's current placement, in the order in which jobs
    move. `change` gets how many jobs it may still change, and returns how many it has changed.

    Returns the number of changed jobs. Raises UnknownQueue, and ShardUnavailable, after which some jobs may have been
    changed.
    """
    changed = 0
    while True:
        placement = fleet.placement(org)
        unknown: list[UnknownQueue] = []
        for name in placement.reads:
            if changed >= limit:
                return changed
            member = fleet.placed(name).require_writable()
            try:
                changed += await change(member, limit - changed)
            except UnknownQueue as error:
                unknown.append(error)
            if name != placement.reads[-1]:
                await _until_arrived(member, org, queue)
        if changed >= limit or await fleet.is_current(org, placement):
            if len(unknown) == len(placement.reads):
                raise unknown[0]
            return changed


async def _until_arrived(member: ShardHandle, org: OrgId, queue: QueueName) -> None:
    """Waits until all jobs of the queue that were leaving this shard have arrived. Raises ShardUnavailable if that
    takes longer than 5 s."""
    give_up_s = asyncio.get_running_loop().time() + DEPARTING_S_MAX
    while await member.queue_admin.departs(org, queue):
        if asyncio.get_running_loop().time() >= give_up_s:
            raise ShardUnavailable(member.name, f"jobs of org {org!r} are on their way from it; try again")
        await asyncio.sleep(DEPARTING_PAUSE_S)


async def list_readers(
    fleet: Fleet,
    wanted: Wanted,
    ask: Callable[[ShardHandle, str], Awaitable[Page]],
    *,
    page_size: int,
    page_token: str,
) -> MergedPage:
    """Returns the next page of the jobs on all shards. `ask` gets the page token. Raises ShardUnavailable,
    UnknownQueue, BadPageToken."""

    async def page(member: ShardHandle) -> Page:
        try:
            return await ask(member, page_token)
        except UnknownQueue:
            if not page_token:
                raise
            # The queue was deleted after the first page.
            return Page(jobs=[], keys=[], until=None)

    asked = await ask_readers(fleet, wanted.org, page, finished=not FINISHED.isdisjoint(wanted.all_states))
    jobs, until = merged(asked.answers, page_size=page_size, newest_first=wanted.newest_first)
    return MergedPage(jobs, until, asked.unavailable)


async def count_readers(fleet: Fleet, wanted: WantedCount, *, page_token: str) -> tuple[Part, list[ShardName]]:
    """Returns the next part of a count over all shards, and the shards that did not answer. Raises ShardUnavailable,
    UnknownQueue, BadPageToken."""
    finished = not FINISHED.isdisjoint(wanted.all_states)

    async def ask(member: ShardHandle, *, with_ids: bool) -> Part:
        try:
            return await member.queue_admin.count_jobs(wanted, page_token=page_token, with_ids=with_ids)
        except UnknownQueue:
            if not page_token:
                raise
            # The queue was deleted after the first part.
            return Part(count=0, ids=b"", until=None)

    while True:
        several = len(_names(fleet.placement(wanted.org), finished=finished)) > 1
        asked = await ask_readers(fleet, wanted.org, partial(ask, with_ids=several), finished=finished)
        # If several shards have answered without ids, a move has begun since `several` was computed, and a job may have
        # been counted on two shards: count again, with ids.
        if several or len(asked.answers) == 1:
            return merged_counts([part for _, part in asked.answers]), asked.unavailable


async def find_keyed(fleet: Fleet, org: OrgId, queue: QueueName, key: str, *, live: bool) -> JobId | None:
    """Returns the id of the job that has a dedup key now. `live`: whether it is a live key; otherwise it is a key with
    a dedup window. Raises ShardUnavailable if no shard that answers knows the key, and another shard does not
    answer."""
    # Ask in the same way as an enqueue. The id is new, so only the key can be known.
    wanted = NewJobs(org=org, ids=[uuid7()], queues=[queue], kinds=["any"], payloads=[b""])
    (wanted.live_keys if live else wanted.dedup_keys)[0] = key
    # Ask former owners too: a key that they know counts until its window is over.
    asked = await ask_readers(fleet, org, lambda member: member.store.known(wanted), finished=True)
    known = [found[0] for _, found in asked.answers if found]
    if not known and asked.unavailable:
        raise ShardUnavailable(asked.unavailable[0], "it may have a job with this key")
    return known[-1] if known else None


def _names(placement: Placement, *, finished: bool) -> Sequence[ShardName]:
    return (*(former.shard for former in placement.former_only), *placement.reads) if finished else placement.reads


def paused_queues(asked: Asked[list[QueueCounts]]) -> set[QueueName]:
    """Returns the paused queues. The writer decides, because it has the org's queue configurations, and other shards
    may have old configurations. If the writer does not answer, the last of `placement.reads` that answers decides."""
    answers = dict(asked.answers)
    for name in (*asked.placement.writes, *reversed(asked.placement.reads)):
        if name not in asked.unavailable:
            return {counts.queue for counts in answers.get(name, ()) if counts.paused}
    return set()


def summed(counts: Sequence[Sequence[QueueCounts]], *, paused: Collection[QueueName] = ()) -> list[QueueCounts]:
    """Adds up the counts of each queue over all shards, and returns them ordered by queue name.

    `counts` has the shards in the order in which jobs move. Jobs that are about to leave a shard are counted on that
    shard, unless a shard that was asked later has already imported them. `paused` names the paused queues.
    """
    by_queue: dict[str, list[QueueCounts]] = {}
    for at, of_shard in enumerate(counts):
        imported = [later.chunk for of_later in counts[at + 1 :] for later in of_later if later.chunk is not None]
        for queue_counts in of_shard:
            leaving = queue_counts.leaving
            if leaving is not None and not any(map(partial(_includes, leaving.chunk), imported)):
                queue_counts = _with_leaving(queue_counts, leaving)
            by_queue.setdefault(queue_counts.queue, []).append(queue_counts._replace(leaving=None, chunk=None))
    return [_sum(by_queue[queue])._replace(paused=queue in paused) for queue in sorted(by_queue)]


def _includes(chunk: Chunk, imported: Chunk) -> bool:
    return imported.epoch == chunk.epoch and imported.number >= chunk.number


def _with_leaving(counts: QueueCounts, leaving: LeavingCounts) -> QueueCounts:
    also = QueueCounts(
        queue=counts.queue,
        blocked=leaving.blocked,
        scheduled=leaving.scheduled,
        ready=leaving.ready,
        leased=0,
        dead=leaving.dead,
        succeeded=0,
        cancelled=0,
        oldest_ready_age_us=leaving.oldest_ready_age_us,
        next_due=leaving.next_due,
        paused=False,
    )
    return _sum([counts, also])


def _sum(counts: Sequence[QueueCounts]) -> QueueCounts:
    if len(counts) == 1:
        return counts[0]
    ages = [part.oldest_ready_age_us for part in counts if part.oldest_ready_age_us is not None]
    dues = [part.next_due for part in counts if part.next_due is not None]
    return QueueCounts(
        queue=counts[0].queue,
        blocked=sum(part.blocked for part in counts),
        scheduled=sum(part.scheduled for part in counts),
        ready=sum(part.ready for part in counts),
        leased=sum(part.leased for part in counts),
        dead=sum(part.dead for part in counts),
        succeeded=sum(part.succeeded for part in counts),
        cancelled=sum(part.cancelled for part in counts),
        oldest_ready_age_us=max(ages, default=None),
        next_due=min(dues, default=None),
        # The shards may disagree about this. `summed` sets it, from its argument `paused`.
        paused=False,
    )
