"""Finds and changes jobs by id, also while slots move from shard to shard (docs/decisions/0017-moving-slots.md). Asks
the shards in the order in which jobs move, so that no job is missed and none is stored twice."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from router.fleet.fleet import Fleet
from router.fleet.shard_handle import ShardHandle
from shard.errors import NoAnswer, ShardUnavailable
from shard.job_id import made_at_ms
from shard.placement.slots import Placement
from shard.vocabulary import Answer, JobId, NewJobs, OrgId, ShardName

_T = TypeVar("_T")
# How long to wait for a job that is moving from one shard to another, and the pause between two checks.
DEPARTING_S_MAX = 5.0
DEPARTING_PAUSE_S = 0.020


async def find_duplicates(fleet: Fleet, placement: Placement, jobs: NewJobs) -> dict[int, JobId]:
    """Looks for jobs that a shard other than the writer already knows, by id or by dedup key. Returns the positions of
    those jobs, with the id that each is known under. Call this before the writer stores anything. The result stays
    true, because former owners store no more jobs. Raises ShardUnavailable if a shard that may know one of the jobs
    does not answer."""
    by_id: dict[int, JobId] = {}
    by_key: dict[int, JobId] = {}
    for former in placement.former:
        if former.shard in placement.writes:
            continue
        positions = [
            at
            for at, job_id in enumerate(jobs.ids)
            if at not in by_id
            and (
                former.may_know(made_at_ms(job_id), keyed=at in jobs.dedup_keys)
                # Only a shard that still has live jobs of the slot knows live keys.
                or (at in jobs.live_keys and former.shard in placement.sources)
            )
        ]
        if positions:
            found = await fleet.placed(former.shard).require_up().store.known(jobs.only(positions))
            for at, known_as in found.items():
                duplicates = by_id if known_as == jobs.ids[positions[at]] else by_key
                duplicates[positions[at]] = known_as
    for at in by_id:
        by_key.pop(at, None)
    if by_key:
        # A match by id outranks a match by dedup key. So look for the ids of the jobs that were found by key: another
        # shard than the one that knows the key may know the id.
        by_id |= await _known_by_id(fleet, jobs, list(by_key))
    return by_key | by_id


async def _known_by_id(fleet: Fleet, jobs: NewJobs, at: Sequence[int]) -> dict[int, JobId]:
    """Returns the jobs at these positions whose id a shard knows. Raises ShardUnavailable if a shard that may know one
    of the remaining jobs does not answer."""
    ids = [JobId(jobs.ids[position]) for position in at]

    async def ask(member: ShardHandle, positions: Sequence[int]) -> dict[int, JobId]:
        found = await member.store.known(jobs.only([at[position] for position in positions]))
        return {positions[n]: known_as for n, known_as in found.items() if known_as == ids[positions[n]]}

    found = await find(fleet, jobs.org, ids, ask)
    found.require(len(ids))
    return {at[position]: known_as for position, known_as in found.answers.items()}


@dataclass(slots=True)
class Found(Generic[_T]):
    """The answers by position of the id. If several shards know an id, the answer of the last shard counts."""

    answers: dict[int, _T] = field(default_factory=dict[int, _T])
    # Why shards did not answer. An id that no other shard knows may be on one of these shards.
    refusals: dict[ShardName, NoAnswer] = field(default_factory=dict[ShardName, NoAnswer])

    @property
    def unavailable(self) -> list[ShardName]:
        return list(self.refusals)

    def require(self, count: int) -> None:
        """Raises the first refusal if fewer than `count` ids were found and a shard that may know the missing ids did
        not answer."""
        if self.refusals and len(self.answers) < count:
            raise next(iter(self.refusals.values()))


async def find(
    fleet: Fleet,
    org: OrgId,
    ids: Sequence[JobId],
    ask: Callable[[ShardHandle, Sequence[int]], Awaitable[Mapping[int, _T]]],
    *,
    at: Sequence[int] | None = None,
) -> Found[_T]:
    """Asks every shard that may know these jobs, in the order in which jobs move.

    `ask` gets positions of ids, and returns the answers for those ids that the shard knows. `at` limits the search to
    these positions. An id counts as unknown only if the current placement was used to look for it. Raises NoAnswer if
    no shard answers, and every other error of `ask`.
    """
    found = Found[_T]()
    unknown: Sequence[int] = range(len(ids)) if at is None else at
    while True:
        placement = fleet.placement(org)
        found.refusals = {}
        answered = False
        for name, positions in _itinerary(placement, ids, unknown):
            try:
                found.answers.update(await ask(fleet.placed(name).require_up(), positions))
                answered = True
            except NoAnswer as error:
                found.refusals[name] = error
        if found.refusals and not answered:
            raise next(reversed(found.refusals.values()))
        unknown = [position for position in unknown if position not in found.answers]
        if not unknown or found.refusals:
            return found
        try:
            if await fleet.is_current(org, placement):
                return found
        except ShardUnavailable as error:
            found.refusals[error.shard] = error
            return found


async def decide(
    fleet: Fleet,
    org: OrgId,
    ids: Sequence[JobId],
    act: Callable[[ShardHandle, Sequence[int]], Awaitable[Sequence[Answer]]],
) -> list[Answer]:
    """Changes jobs, wherever they are. Returns the answer for each id. `act` gets positions of ids. Waits for jobs that
    are moving to another shard. Raises ShardUnavailable, for example if a shard that may have one of the jobs does not
    answer."""

    async def ask(member: ShardHandle, positions: Sequence[int]) -> dict[int, Answer]:
        outcome = await act(member.require_writable(), positions)
        return {at: answer for at, answer in zip(positions, outcome, strict=True) if answer is not Answer.NOT_FOUND}

    answers: dict[int, Answer] = {}
    pending: Sequence[int] = range(len(ids))
    give_up_s = asyncio.get_running_loop().time() + DEPARTING_S_MAX
    while True:
        found = await find(fleet, org, ids, ask, at=pending)
        # A job that was departing may be unknown by now.
        for at in pending:
            answers.pop(at, None)
        answers.update(found.answers)
        found.require(len(pending))
        pending = [at for at, answer in answers.items() if answer is Answer.DEPARTING]
        if not pending:
            return [answers.get(at, Answer.NOT_FOUND) for at in range(len(ids))]
        if asyncio.get_running_loop().time() >= give_up_s:
            source = fleet.placement(org).reads[0]
            raise ShardUnavailable(source, f"{len(pending)} job(s) of org {org!r} are on their way from it; try again")
        await asyncio.sleep(DEPARTING_PAUSE_S)


def _itinerary(
    placement: Placement, ids: Sequence[JobId], wanted: Sequence[int]
) -> list[tuple[ShardName, Sequence[int]]]:
    """Returns which shards to ask, and for which positions: former owners first, then the current owners. Of the
    current owners, the shard that jobs move away from comes before the shard that they move to."""
    stops: list[tuple[ShardName, Sequence[int]]] = []
    for former in placement.former_only:
        positions = [at for at in wanted if former.may_know(made_at_ms(ids[at]), keyed=False)]
        if positions:
            stops.append((former.shard, positions))
    return [*stops, *((name, wanted) for name in placement.reads)]
