"""Stores new jobs, each of them once, on the shard that takes new jobs of their org, and hands them over to waiting
consumers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from router.fleet.fleet import Fleet
from router.fleet.shard_handle import ShardHandle
from router.route.by_id import find, find_duplicates
from shard.errors import BadIds, LimitReached, NoAnswer
from shard.placement.slots import Placement
from shard.vocabulary import JobId, Known, NewJobs


async def describe(fleet: Fleet, jobs: NewJobs, duplicates: Mapping[int, JobId]) -> dict[int, Known]:
    """Returns a description of the known job for each position in `duplicates`, which has the ids of these known jobs.
    The result lacks a job that was deleted, or that may be on a shard that does not answer: the enqueue succeeds
    anyway."""
    at = list(duplicates)
    ids = [duplicates[position] for position in at]

    async def ask(member: ShardHandle, positions: Sequence[int]) -> dict[int, Known]:
        sent = jobs.only([at[position] for position in positions])
        told = await member.store.describe(sent, [ids[position] for position in positions])
        return {positions[n]: known for n, known in told.items()}

    try:
        found = await find(fleet, jobs.org, ids, ask)
    except NoAnswer:
        return {}
    return {at[position]: known for position, known in found.answers.items()}


async def store(fleet: Fleet, jobs: NewJobs, *, hand: bool, independent: bool = False) -> dict[int, JobId]:
    """Stores jobs and wakes consumers that wait for them. `hand`: leases the jobs to waiting consumers in the same
    insert. `independent`: each job may be stored without the others, so LimitReached names only the jobs that are too
    many. Returns the positions of jobs that were known already, with the id that each is known under. Raises BadIds,
    TooManyQueues, LimitReached, NoAnswer."""

    async def on(member: ShardHandle, placement: Placement) -> dict[int, JobId]:
        member.require_open()
        before = await find_duplicates(fleet, placement, jobs) if placement.former else {}
        remaining: Sequence[int] = [at for at in range(len(jobs)) if at not in before] if before else []
        new = jobs.only(remaining) if before else jobs
        try:
            charge = await fleet.limits.charge(member.store, new, independent=independent)
        except LimitReached:
            # A repeated enqueue of stored jobs costs nothing, so it must not be refused.
            known = await member.store.known(new)
            positions = remaining if before else range(len(jobs))
            before |= {positions[at]: known_as for at, known_as in known.items()}
            remaining = [at for at in range(len(jobs)) if at not in before]
            new = jobs.only(remaining)
            try:
                charge = await fleet.limits.charge(member.store, new, independent=independent)
            except LimitReached as error:
                error.positions = [remaining[at] for at in error.positions]
                raise
        with charge:
            try:
                handover = await member.handovers.offer(new) if hand else None
                duplicates = await member.store.enqueue(new, handover, epoch=placement.epoch)
            except BadIds as error:
                if before:
                    error.positions = [remaining[at] for at in error.positions]
                raise
            if duplicates:
                charge.refund_jobs(duplicates)
        member.room.stored(new, duplicates, handover)
        return before | {remaining[at]: known_as for at, known_as in duplicates.items()} if before else duplicates

    return await fleet.write(jobs.org, on)
