"""What is asked of every shard that may hold an org's jobs, and how their answers become one. A shard that does not
answer is named beside the answers of the others; where none answers, the call fails as with one shard."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Generic, NamedTuple, TypeVar

from router.fleet import Fleet
from router.lookups import DEPARTING_PAUSE_S, DEPARTING_S_MAX
from router.member import Member
from shard.books import Page, QueueCounts
from shard.errors import BadPageToken, ShardUnavailable, UnknownQueue
from shard.vocabulary import OrgId, QueueName, ShardName

_T = TypeVar("_T")
# Between what a shard says and its name; what it says is base64.
_OF = "."


class Asked(NamedTuple, Generic[_T]):
    answers: list[tuple[ShardName, _T]]
    # Those that did not answer.
    unavailable: list[ShardName]


class PageOf(NamedTuple):
    """A page of jobs that one shard holds."""

    shard: ShardName
    page: Page
    # Empty on the last one.
    next_token: str
    # Those that did not answer when it was their turn.
    unavailable: list[ShardName]


async def ask_readers(
    fleet: Fleet, org: OrgId, ask: Callable[[Member], Awaitable[_T]], *, finished: bool = False
) -> Asked[_T]:
    """Asks all of them at the same time; where it is about `finished` jobs too, those too that have no others. A queue
    is unknown where nobody who answers knows it. Raises ShardUnavailable, UnknownQueue, and what else `ask` raises."""
    names = _names(fleet, org, finished=finished)
    if len(names) == 1:
        return Asked([(names[0], await ask(fleet.placed(names[0]).to_look_at()))], [])

    async def one(name: ShardName) -> _T:
        return await ask(fleet.placed(name).to_look_at())

    outcomes = await asyncio.gather(*map(one, names), return_exceptions=True)
    asked = Asked[_T]([], [])
    refusal: ShardUnavailable | UnknownQueue | None = None
    for name, outcome in zip(names, outcomes, strict=True):
        match outcome:
            case ShardUnavailable():
                asked.unavailable.append(name)
                refusal = outcome
            case UnknownQueue():
                refusal = refusal or outcome
            case BaseException():
                raise outcome
            case _:
                asked.answers.append((name, outcome))
    if refusal is not None and not asked.answers:
        raise refusal
    return asked


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
    fleet: Fleet, org: OrgId, token: str, ask: Callable[[Member, str], Awaitable[Page]], *, finished: bool = False
) -> PageOf:
    """The next page: shard by shard, by name, each in its own order. `ask` gets the shard's own token. `finished`: as
    for `ask_readers`. Raises ShardUnavailable, UnknownQueue, BadPageToken."""
    inner, of, begun = token.partition(_OF)
    if token and not of:
        raise BadPageToken(token)
    names = [name for name in sorted(_names(fleet, org, finished=finished)) if name >= begun]
    unavailable: list[ShardName] = []
    refusal: ShardUnavailable | UnknownQueue | None = None
    last: tuple[ShardName, Page] | None = None
    for at, name in enumerate(names):
        try:
            page = await ask(fleet.placed(name).to_look_at(), inner if name == begun else "")
        except ShardUnavailable as error:
            unavailable.append(name)
            refusal = error
            continue
        except UnknownQueue as error:
            refusal = refusal or error
            continue
        last = name, page
        if page.next_token:
            return PageOf(name, page, page.next_token + _OF + name, unavailable)
        if page.jobs:
            rest = names[at + 1 :]
            return PageOf(name, page, _OF + rest[0] if rest else "", unavailable)
    if last is None and refusal is not None and not token:
        raise refusal
    shard, page = last or (ShardName(begun), Page(jobs=[], next_token=""))
    return PageOf(shard, page, "", unavailable)


def _names(fleet: Fleet, org: OrgId, *, finished: bool) -> Sequence[ShardName]:
    placement = fleet.placement(org)
    return (*(one.shard for one in placement.former_only), *placement.reads) if finished else placement.reads


def summed(counts: Sequence[Iterable[QueueCounts]]) -> list[QueueCounts]:
    """Each queue's counts on all shards, by its name."""
    by_queue: dict[str, list[QueueCounts]] = {}
    for one in (one for shard in counts for one in shard):
        by_queue.setdefault(one.queue, []).append(one)
    return [_sum(by_queue[queue]) for queue in sorted(by_queue)]


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
        paused=all(one.paused for one in counts),
    )
