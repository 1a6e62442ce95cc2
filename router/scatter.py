"""What is asked of every shard that may hold an org's jobs, and how their answers become one. A shard that does not
answer is named beside the answers of the others; where none answers, the call fails as with one shard."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence
from functools import partial
from typing import Generic, NamedTuple, TypeVar

from router.fleet import Fleet
from router.lookups import DEPARTING_PAUSE_S, DEPARTING_S_MAX
from router.member import Member
from shard.books import Chunk, LeavingCounts, QueueCounts
from shard.errors import BadPageToken, ShardUnavailable, UnknownQueue
from shard.listing import Key, Listed, Page, Wanted, merged
from shard.placement import Placement
from shard.vocabulary import FINISHED, OrgId, QueueName, ShardName

_T = TypeVar("_T")
# Routers of the release before this one put it between what a shard said and its name.
_OF = "."


class Asked(NamedTuple, Generic[_T]):
    answers: list[tuple[ShardName, _T]]
    # Those that did not answer.
    unavailable: list[ShardName]
    # By which they were asked.
    placement: Placement


class MergedPage(NamedTuple):
    jobs: list[Listed]
    # The page has all that there is up to this key; None: to the end.
    until: Key | None
    # Those that did not answer.
    unavailable: list[ShardName]


async def ask_readers(
    fleet: Fleet, org: OrgId, ask: Callable[[Member], Awaitable[_T]], *, finished: bool = False
) -> Asked[_T]:
    """Asks all of them by the placement that is in force, in the order in which jobs travel, so that none is missed;
    where it is about `finished` jobs too, those before that have no others. A queue is unknown where nobody who answers
    knows it. Raises ShardUnavailable, UnknownQueue, and what else `ask` raises."""
    while True:
        placement = fleet.placement(org)
        asked, refusal = await _ask_all(fleet, placement, ask, finished=finished)
        if asked.answers:
            refusal = None
        elif isinstance(refusal, ShardUnavailable):
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
    fleet: Fleet, placement: Placement, ask: Callable[[Member], Awaitable[_T]], *, finished: bool
) -> tuple[Asked[_T], ShardUnavailable | UnknownQueue | None]:
    """Also why one has not answered, if one has not."""
    asked = Asked[_T]([], [], placement)
    refusal: ShardUnavailable | UnknownQueue | None = None
    for name in _names(placement, finished=finished):
        try:
            asked.answers.append((name, await ask(fleet.placed(name).to_look_at())))
        except ShardUnavailable as error:
            asked.unavailable.append(name)
            refusal = error
        except UnknownQueue as error:
            refusal = refusal or error
    return asked, refusal


async def change_readers(
    fleet: Fleet, org: OrgId, queue: QueueName, most: int, change: Callable[[Member, int], Awaitable[int]]
) -> int:
    """Changes up to `most` jobs of a queue, shard by shard in the order in which jobs travel, by the placement that is
    in force; `change` is told how many more it may, and answers how many it has. Raises ShardUnavailable, after which
    some may have been changed; UnknownQueue."""
    changed = 0
    while True:
        placement = fleet.placement(org)
        unknown: list[UnknownQueue] = []
        for name in placement.reads:
            if changed >= most:
                return changed
            member = fleet.placed(name).to_change()
            try:
                changed += await change(member, most - changed)
            except UnknownQueue as error:
                unknown.append(error)
            if name != placement.reads[-1]:
                await _until_arrived(member, org, queue)
        if changed >= most or await fleet.is_current(org, placement):
            if len(unknown) == len(placement.reads):
                raise unknown[0]
            return changed


async def _until_arrived(member: Member, org: OrgId, queue: QueueName) -> None:
    """What was on its way from this shard is where it is to be. Raises ShardUnavailable if that takes long."""
    give_up_s = asyncio.get_running_loop().time() + DEPARTING_S_MAX
    while await member.books.departs(org, queue):
        if asyncio.get_running_loop().time() >= give_up_s:
            raise ShardUnavailable(member.name, f"jobs of org {org!r} are on their way from it; try again")
        await asyncio.sleep(DEPARTING_PAUSE_S)


async def list_readers(
    fleet: Fleet,
    wanted: Wanted,
    ask: Callable[[Member, str], Awaitable[Page]],
    *,
    page_size: int,
    page_token: str,
) -> MergedPage:
    """The next page of what all of them have. `ask` gets the token. Raises ShardUnavailable, UnknownQueue,
    BadPageToken."""
    token, of, name = page_token.partition(_OF)
    # Such a token names one shard's place in a list. It is every shard's where there is one shard.
    if of and [name] != [*_names(fleet.placement(wanted.org), finished=True)]:
        raise BadPageToken(page_token)

    async def page(member: Member) -> Page:
        try:
            return await ask(member, token)
        except UnknownQueue:
            if not token:
                raise
            # It was deleted meanwhile.
            return Page(jobs=[], keys=[], until=None)

    asked = await ask_readers(fleet, wanted.org, page, finished=wanted.state is None or wanted.state in FINISHED)
    jobs, until = merged(asked.answers, page_size=page_size, newest_first=wanted.newest_first)
    return MergedPage(jobs, until, asked.unavailable)


def _names(placement: Placement, *, finished: bool) -> Sequence[ShardName]:
    return (*(one.shard for one in placement.former_only), *placement.reads) if finished else placement.reads


def paused_queues(asked: Asked[list[QueueCounts]]) -> set[QueueName]:
    """The queues that are paused. The writer decides, for it has the org's queue configurations; others may have an old
    one. While the writer does not answer, the shard decides that the jobs come to last."""
    told = dict(asked.answers)
    for name in (*asked.placement.writes, *reversed(asked.placement.reads)):
        if name not in asked.unavailable:
            return {one.queue for one in told.get(name, ()) if one.paused}
    return set()


def summed(counts: Sequence[Sequence[QueueCounts]], *, paused: Collection[QueueName] = ()) -> list[QueueCounts]:
    """Each queue's counts on all shards, by its name. The shards come in the order in which jobs travel: what is about
    to leave one is counted there, unless another that was asked later has taken it. `paused` names the paused ones."""
    by_queue: dict[str, list[QueueCounts]] = {}
    for at, shard in enumerate(counts):
        taken = [one.chunk for later in counts[at + 1 :] for one in later if one.chunk is not None]
        for one in shard:
            leaving = one.leaving
            if leaving is not None and not any(map(partial(_has, leaving.chunk), taken)):
                one = _with(one, leaving)
            by_queue.setdefault(one.queue, []).append(one._replace(leaving=None, chunk=None))
    return [_sum(by_queue[queue])._replace(paused=queue in paused) for queue in sorted(by_queue)]


def _has(chunk: Chunk, taken: Chunk) -> bool:
    return taken.epoch == chunk.epoch and taken.number >= chunk.number


def _with(one: QueueCounts, leaving: LeavingCounts) -> QueueCounts:
    also = QueueCounts(
        queue=one.queue,
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
    return _sum([one, also])


def _sum(counts: Sequence[QueueCounts]) -> QueueCounts:
    if len(counts) == 1:
        return counts[0]
    ages = [one.oldest_ready_age_us for one in counts if one.oldest_ready_age_us is not None]
    dues = [one.next_due for one in counts if one.next_due is not None]
    return QueueCounts(
        queue=counts[0].queue,
        scheduled=sum(one.scheduled for one in counts),
        ready=sum(one.ready for one in counts),
        leased=sum(one.leased for one in counts),
        dead=sum(one.dead for one in counts),
        succeeded=sum(one.succeeded for one in counts),
        cancelled=sum(one.cancelled for one in counts),
        oldest_ready_age_us=max(ages, default=None),
        next_due=min(dues, default=None),
        # This differs between the shards: `summed` is told.
        paused=False,
    )
