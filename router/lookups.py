"""Where jobs are that are named by their ids, while slots move from shard to shard
(docs/decisions/0017-moving-slots.md): who is asked, and in which order, so that none is missed, and none stored
twice."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from router.fleet import Fleet
from router.member import Member
from shard.enqueuing import made_at_ms
from shard.errors import ShardUnavailable
from shard.placement import Placement
from shard.vocabulary import Answer, JobId, NewJobs, OrgId, ShardName

_T = TypeVar("_T")
# How long a job may be on its way from one shard to another, and between two looks.
DEPARTING_S_MAX = 5.0
DEPARTING_PAUSE_S = 0.020


async def known_before(fleet: Fleet, placement: Placement, jobs: NewJobs) -> dict[int, JobId]:
    """The positions of jobs that are known to a shard other than the writer, or by such a shard's dedup key, with the
    id each is known under. Ask before the writer stores anything. The answers stay true: former owners store no more
    jobs. Raises ShardUnavailable if a shard that may know one of the jobs does not answer."""
    by_id: dict[int, JobId] = {}
    by_key: dict[int, JobId] = {}
    for former in placement.former:
        if former.shard in placement.writes:
            continue
        positions = [
            at
            for at, job_id in enumerate(jobs.ids)
            if at not in by_id and former.may_know(made_at_ms(job_id), keyed=at in jobs.dedup_keys)
        ]
        if positions:
            found = await fleet.placed(former.shard).to_look_at().store.known(jobs.only(positions))
            for at, known_as in found.items():
                known = by_id if known_as == jobs.ids[positions[at]] else by_key
                known[positions[at]] = known_as
    for at in by_id:
        by_key.pop(at, None)
    if by_key:
        # An id is stronger than a key. A key that one shard knows does not say that no other shard knows the id.
        by_id |= await _known_by_id(fleet, jobs, list(by_key))
    return by_key | by_id


async def _known_by_id(fleet: Fleet, jobs: NewJobs, at: Sequence[int]) -> dict[int, JobId]:
    """Those of the jobs at these positions whose ids some shard knows. Raises ShardUnavailable if a shard that may know
    one of the others does not answer."""
    ids = [JobId(jobs.ids[position]) for position in at]

    async def ask(member: Member, positions: Sequence[int]) -> dict[int, JobId]:
        found = await member.store.known(jobs.only([at[position] for position in positions]))
        return {positions[n]: known_as for n, known_as in found.items() if known_as == ids[positions[n]]}

    found = await find(fleet, jobs.org, ids, ask)
    found.require(len(ids))
    return {at[position]: known_as for position, known_as in found.answers.items()}


@dataclass(slots=True)
class Found(Generic[_T]):
    """By the position of each id that somebody knows: what the last shard that knows it said."""

    answers: dict[int, _T] = field(default_factory=dict[int, _T])
    # Those that did not answer: of ids that nobody else knows, nothing can be said.
    unavailable: list[ShardName] = field(default_factory=list[ShardName])

    def require(self, count: int) -> None:
        """Raises ShardUnavailable if fewer than `count` ids were found and a shard that may know the rest was away."""
        if self.unavailable and len(self.answers) < count:
            raise ShardUnavailable(self.unavailable[0], "it may have jobs that no other shard has")


async def find(
    fleet: Fleet,
    org: OrgId,
    ids: Sequence[JobId],
    ask: Callable[[Member, Sequence[int]], Awaitable[Mapping[int, _T]]],
    *,
    at: Sequence[int] | None = None,
) -> Found[_T]:
    """Asks every shard that may know these jobs, in the order in which jobs travel; `ask` gets the positions of ids,
    and answers for those that the shard knows. `at`: of these positions only. What nobody knows was looked for by the
    placement that is in force. Raises ShardUnavailable if nobody answers, and what else `ask` raises."""
    found = Found[_T]()
    wanted: Sequence[int] = range(len(ids)) if at is None else at
    while True:
        placement = fleet.placement(org)
        found.unavailable = []
        refusal: ShardUnavailable | None = None
        answered = False
        for name, positions in _itinerary(placement, ids, wanted):
            try:
                found.answers.update(await ask(fleet.placed(name).to_look_at(), positions))
                answered = True
            except ShardUnavailable as error:
                found.unavailable.append(name)
                refusal = error
        if refusal is not None and not answered:
            raise refusal
        wanted = [position for position in wanted if position not in found.answers]
        if not wanted or found.unavailable:
            return found
        try:
            if await fleet.is_current(org, placement):
                return found
        except ShardUnavailable as error:
            found.unavailable.append(error.shard)
            return found


async def decide(
    fleet: Fleet,
    org: OrgId,
    ids: Sequence[JobId],
    act: Callable[[Member, Sequence[int]], Awaitable[Sequence[Answer]]],
) -> list[Answer]:
    """Changes jobs wherever they are; answers what became of each. `act` gets the positions of ids. A job on its way is
    waited for. Raises ShardUnavailable, also where a shard that may have one of them does not answer."""

    async def ask(member: Member, positions: Sequence[int]) -> dict[int, Answer]:
        told = await act(member.to_change(), positions)
        return {at: answer for at, answer in zip(positions, told, strict=True) if answer is not Answer.NOT_FOUND}

    answers: dict[int, Answer] = {}
    wanted: Sequence[int] = range(len(ids))
    give_up_s = asyncio.get_running_loop().time() + DEPARTING_S_MAX
    while True:
        found = await find(fleet, org, ids, ask, at=wanted)
        answers.update(found.answers)
        found.require(len(wanted))
        wanted = [at for at, answer in answers.items() if answer is Answer.DEPARTING]
        if not wanted:
            return [answers.get(at, Answer.NOT_FOUND) for at in range(len(ids))]
        if asyncio.get_running_loop().time() >= give_up_s:
            source = fleet.placement(org).reads[0]
            raise ShardUnavailable(source, f"{len(wanted)} job(s) of org {org!r} are on their way from it; try again")
        await asyncio.sleep(DEPARTING_PAUSE_S)


def _itinerary(
    placement: Placement, ids: Sequence[JobId], wanted: Sequence[int]
) -> list[tuple[ShardName, Sequence[int]]]:
    """Whom to ask about which: former owners, then those that hold jobs now, the one that jobs come from first."""
    stops: list[tuple[ShardName, Sequence[int]]] = []
    for former in placement.former_only:
        positions = [at for at in wanted if former.may_know(made_at_ms(ids[at]), keyed=False)]
        if positions:
            stops.append((former.shard, positions))
    return [*stops, *((name, wanted) for name in placement.reads)]
