"""How new jobs of an org get to where it lives: stored once, by the placement in force, and told to those who wait."""

from __future__ import annotations

from router.fleet import Fleet
from router.lookups import known_before
from router.member import Member
from shard.errors import BadIds
from shard.placement import Placement
from shard.vocabulary import JobId, NewJobs


async def store(fleet: Fleet, jobs: NewJobs, *, hand: bool) -> dict[int, JobId]:
    """Stores jobs, and has those know who wait for some; `hand`: has them leased to those at once. Answers the
    positions of those that were known already, with the id each is known under. Raises BadIds, TooManyQueues,
    ShardUnavailable, TooManyWaiting."""

    async def on(member: Member, placement: Placement) -> dict[int, JobId]:
        member.to_enqueue()
        before = await known_before(fleet, placement, jobs) if placement.former else {}
        left = [at for at in range(len(jobs)) if at not in before] if before else []
        new = jobs.only(left) if before else jobs
        handover = member.room.offer(new) if hand else None
        try:
            known = await member.store.enqueue(new, handover, epoch=placement.epoch)
        except BadIds as error:
            if before:
                error.positions = [left[at] for at in error.positions]
            raise
        member.room.stored(new, known, handover)
        return before | {left[at]: known_as for at, known_as in known.items()} if before else known

    return await fleet.write(jobs.org, on)
