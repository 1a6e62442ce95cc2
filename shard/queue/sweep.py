"""Probes and sweeps of one shard. They find out when queues have their next jobs. Sweeps also find the jobs that every
hint has missed (invariant I7).

Decides how far back a sweep reads. Does not know who waits for jobs.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from shard.attempts import attempt
from shard.postgres import arrays
from shard.postgres.pool import Database
from shard.queue import statements
from shard.queue.claim_floor import GUARD_US, Floors
from shard.queue.groups import Groups
from shard.queue.quarantine import Quarantine
from shard.queue.queue_ids import QueueIds
from shard.vocabulary import Micros, QueueId

# Queues per probe statement.
_PROBE_QUEUES_MAX = 500
# If a full sweep (from the beginning of time) took longer than _FULL_SWEEP_S_MAX, only partial sweeps follow for
# _FULL_SWEEP_PAUSE times as long as the full sweep took.
_FULL_SWEEP_S_MAX = 0.1
_FULL_SWEEP_PAUSE = 50.0
# Upper bound for the jobs of one priority of a queue that a sweep moves because they have aged. The bound exists
# because the moved jobs get the priority of the queue's urgent jobs, and so delay those.
_AGED_MAX = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Due:
    """The time, by the shard's clock, at which the next job of each queue became or becomes visible. Queues without
    jobs, and queues that give no jobs, are missing."""

    now: Micros
    first: dict[QueueId, Micros]
    # Whether jobs may wait for group slots, and whether workflows may have arrivals to fold.
    groups_wait: bool
    workflows_wait: bool
    # Whether any of the queues has priorities that age.
    ages: bool
    # Whether any kinds are quarantined, any crashes must be judged, or any jobs that are set aside must be released.
    quarantines: bool


class Sweeper:
    """Looks into the queues of one shard."""

    def __init__(self, database: Database, names: QueueIds, floors: Floors, quarantine: Quarantine) -> None:
        self._database = database
        self._names = names
        self._floors = floors
        self._groups = Groups(database)
        self._quarantine = quarantine
        # The earliest time of the next full sweep, by time.monotonic.
        self._full_sweep_from_s = 0.0
        # The parts of sweeps that failed when they were last tried.
        self._failing: set[str] = set()

    async def probe(self, queues: Iterable[QueueId]) -> Due:
        """Returns the times at which these queues have their next jobs. Leaves out jobs below the floors."""
        return await self._probe(list(queues), self._floors.of)

    async def sweep(self, awaited: Iterable[QueueId]) -> Due:
        """Returns the times at which the `awaited` queues, and all queues that claims use, have their next jobs. Finds
        jobs below the floors too (invariant I7). Corrects the floors, checks the remembered queue ids, fills free slots
        of groups, moves jobs that have aged, and runs the sweep of the quarantined kinds.

        Normally a sweep begins at the beginning of time (a full sweep). Such a sweep takes long while an old snapshot
        keeps dead row versions of jobs. If a sweep took long, the next sweeps look only for jobs that may have
        committed late.

        If the times are found and another part of the sweep fails, the sweep logs the failure and returns the times.
        Raises ShardUnavailable."""
        queues = list({*self._floors.to_sweep(), *awaited})
        await self._names.prove(queues)
        due = await self._look(queues)

        async def fill_groups() -> None:
            due.first.update(dict.fromkeys(await self._groups.sweep(queues), due.now))

        async def look_after_kinds() -> None:
            due.first.update(dict.fromkeys(await self._quarantine.sweep(), due.now))

        if due.groups_wait:
            await self._attempt("fill slots of groups", fill_groups)
        if due.ages:
            await self._attempt("move jobs that have aged", partial(self._move_aged, queues))
        if due.quarantines:
            await self._attempt("look after quarantined kinds", look_after_kinds)
        else:
            self._quarantine.forget()
        return due

    async def _attempt(self, what: str, act: Callable[[], Awaitable[object]]) -> None:
        """Runs a part of a sweep. If the same part fails several times in a row, only the first failure is logged as a
        warning."""
        level = logging.DEBUG if what in self._failing else logging.WARNING
        if await attempt(f"{what} of shard {self._database.name!r}", act, level=level):
            self._failing.discard(what)
        else:
            self._failing.add(what)

    async def _move_aged(self, queues: Sequence[QueueId]) -> None:
        """Moves jobs that have been ready for a long time to priority 1. No consumer has to be woken, because the jobs
        were ready before."""
        for at in range(0, len(queues), _PROBE_QUEUES_MAX):
            part = queues[at : at + _PROBE_QUEUES_MAX]
            floors = [floor for queue in part for floor in self._floors.late(queue)]
            parameters = {"queue_ids": arrays.numbers(part), "floors_us": arrays.numbers(floors), "jobs_max": _AGED_MAX}
            await self._database.run(statements.MOVE_AGED, parameters)

    async def _look(self, queues: list[QueueId]) -> Due:
        """Looks into these queues, as part of a sweep."""
        began_s = time.monotonic()
        if began_s < self._full_sweep_from_s:
            return await self._probe(queues, self._floors.late, is_sweep=True)
        try:
            return await self._probe(queues, is_sweep=True)
        finally:
            # The time counts even if the statement failed, because it may have failed after statement_timeout.
            ended_s = time.monotonic()
            if ended_s - began_s > _FULL_SWEEP_S_MAX:
                self._full_sweep_from_s = ended_s + _FULL_SWEEP_PAUSE * (ended_s - began_s)

    async def _probe(
        self,
        queues: list[QueueId],
        floors_of: Callable[[QueueId], Sequence[Micros]] | None = None,
        *,
        is_sweep: bool = False,
    ) -> Due:
        """Finds the first live job of each queue, at or above these floors. If `floors_of` is None, there are no
        floors."""
        first: dict[QueueId, Micros] = {}
        now = Micros(0)
        groups_wait = workflows_wait = ages = quarantines = False
        # A sweep without queues still runs one statement, which finds group slots to fill, workflows to fold, and
        # quarantines.
        for at in range(0, max(len(queues), 1), _PROBE_QUEUES_MAX):
            part = queues[at : at + _PROBE_QUEUES_MAX]
            arrivals = self._floors.arrivals
            parameters = {"queue_ids": arrays.numbers(part)}
            if floors_of is None:
                rows = await self._database.run(statements.SWEEP, parameters)
            else:
                floors = [floor for queue in part for floor in floors_of(queue)]
                rows = await self._database.run(statements.PROBE, {**parameters, "floors_us": arrays.numbers(floors)})
            now, found, priorities, visible_at, gives_jobs, groups_wait, workflows_wait, ages_here, quarantines = rows[
                0
            ]
            ages = ages or ages_here
            lanes: dict[tuple[QueueId, int], Micros] = {}
            giving: set[QueueId] = set()
            if found is not None:
                lanes.update(zip(zip(found, priorities, strict=True), visible_at, strict=True))
                giving.update(queue for queue, gives in zip(found, gives_jobs, strict=True) if gives)
            if is_sweep:
                self._floors.swept(part, Micros(now - GUARD_US), lanes, arrivals=arrivals)
            for (queue, _), when in lanes.items():
                if queue in giving:
                    first[queue] = min(when, first.get(queue, when))
        return Due(
            now=now,
            first=first,
            groups_wait=groups_wait,
            workflows_wait=workflows_wait,
            ages=ages,
            quarantines=quarantines,
        )
