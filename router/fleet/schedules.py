"""Fires the schedules of one shard. Every other router does this too. A router looks for due schedules when the next
schedule is due, when a schedule was changed, and at the interval of the sweeps. These times are only hints (I7): the
shard decides which schedules are due (shard/schedules/due_schedules.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable, Sequence
from typing import Protocol

from shard.errors import ClockSetBack, ShardError
from shard.job_id import to_hex
from shard.queue.store import Store
from shard.schedules.due_schedules import BATCH_MAX, DueSchedules, Needed
from shard.vocabulary import Answer, JobId, OrgId

_log = logging.getLogger(__name__)

# The pause after a failure, and after a round in which no due instant could be decided.
_PAUSE_S = 1.0
_UNDECIDED_S = 0.1
# How long the answers of other shards about a job are used.
_KNOWN_S = 2.0
# The interval at which a router asks a shard that has no schedule with a future instant. When a schedule is created,
# the routers are told, and look at once.
_NONE_S = 10.0
_REASON = "replaced by the next run of its schedule"


class OtherShard(Protocol):
    """Another shard that may have jobs of an org (router/fleet/shard_handle.py)."""

    @property
    def store(self) -> Store: ...

    def require_up(self) -> OtherShard:
        """Returns the shard. Raises ShardUnavailable while it does not answer."""
        ...

    def require_writable(self) -> OtherShard:
        """Returns the shard. Raises ShardUnavailable if it does not answer or takes no changes."""
        ...


async def have_ended(shards: Sequence[OtherShard], org: OrgId, job: JobId) -> bool:
    """Returns True if the job is not live on any of these shards. Raises ShardError."""
    return all([await shard.require_up().store.find_ended([(org, to_hex(job))]) for shard in shards])


class Scheduler:
    """`may_fire` returns whether the shard's state allows new jobs. `elsewhere` returns the other shards that may have
    live jobs of an org, or None if these shards are not known now. While no schedule is due, the shard is asked every
    `sweep_s` seconds for the earliest schedule, or more rarely if the shard has none. Each such question reads one
    index entry."""

    def __init__(
        self,
        due: DueSchedules,
        store: Store,
        *,
        sweep_s: float,
        may_fire: Callable[[], bool],
        elsewhere: Callable[[OrgId], Sequence[OtherShard] | None],
    ) -> None:
        self._due = due
        self._store = store
        self._sweep_s = sweep_s
        self._may_fire = may_fire
        self._elsewhere = elsewhere
        self._changed = asyncio.Event()
        # For each job on which a decision depends: whether it is live, and until when this answer is used, by the event
        # loop's clock.
        self._known: dict[JobId, tuple[bool, float]] = {}

    def look(self) -> None:
        """Looks at the schedules again, because one may be due earlier than before."""
        self._changed.set()

    async def run(self) -> None:
        """Fires until cancelled."""
        failing = False
        while True:
            self._changed.clear()
            try:
                sleep_s = await self._turn()
                failing = False
            except ShardError as error:
                # If the clock of the shard was set back, shard/postgres/clock.py has logged that.
                quiet = failing or isinstance(error, ClockSetBack)
                _log.log(
                    logging.DEBUG if quiet else logging.WARNING,
                    "could not fire the schedules of shard %r: %s",
                    *(self._store.name, error),
                )
                failing, sleep_s = True, _PAUSE_S * random.uniform(0.5, 1.5)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(sleep_s):
                    await self._changed.wait()

    async def _turn(self) -> float:
        """Fires the due schedules. Returns for how many seconds there is nothing to do."""
        is_more = False
        while self._may_fire():
            if not is_more:
                wake = await self._due.next_wake()
                # Both times are by the shard's clock, which may differ from this machine's clock: use only their
                # difference.
                if wake.at is None:
                    return _NONE_S * random.uniform(0.9, 1.1)
                left_s = (wake.at - wake.now) / 1_000_000
                if left_s > 0:
                    return min(left_s, self._sweep_s * random.uniform(0.9, 1.1))
            loop = asyncio.get_running_loop()
            self._known = {job: found for job, found in self._known.items() if loop.time() < found[1]}
            known = {job: is_live for job, (is_live, _) in self._known.items()}
            fired = await self._due.fire(is_whole=self._is_whole, known=known)
            until_s = loop.time() + _KNOWN_S
            learned = await self._learn(fired.needed)
            self._known.update((job, (is_live, until_s)) for job, is_live in learned.items())
            is_more = fired.taken == BATCH_MAX
            if not is_more and not fired.jobs:
                # Other routers have locked the due schedules, or the schedules wait for an answer about a job.
                await asyncio.sleep(_UNDECIDED_S)
        return self._sweep_s

    def _is_whole(self, org: OrgId) -> bool:
        """Whether the shard has all live jobs of the org."""
        try:
            others = self._elsewhere(org)
        except ShardError:
            return False
        return others is not None and not others

    async def _learn(self, needed: Sequence[Needed]) -> dict[JobId, bool]:
        """Cancels or looks for the jobs on which decisions depend. Returns for each job whether it is live, but leaves
        out jobs for which a shard did not answer."""
        known: dict[JobId, bool] = {}
        for org, job, cancel in needed:
            try:
                if cancel:
                    if await self._cancel(org, job):
                        known[job] = False
                elif (others := self._elsewhere(org)) is not None:
                    known[job] = not await have_ended(others, org, job)
            except ShardError as error:
                _log.debug("a schedule of org %r waits for its job %s: %s", org, job, error)
        return known

    async def _cancel(self, org: OrgId, job: JobId) -> bool:
        """Cancels the job of an earlier run. Returns whether it has certainly ended."""
        others = self._elsewhere(org)
        if others is None:
            return False
        stores = [*(other.require_writable().store for other in others), self._store]
        for store in stores:
            (answer,) = await store.cancel(org, [job], reason=_REASON)
            if answer is not Answer.NOT_FOUND:
                return answer is not Answer.DEPARTING
        return True
