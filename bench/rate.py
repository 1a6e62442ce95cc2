"""One system's turn at being timed: jobs a second in, out, and through."""

from __future__ import annotations

import itertools
import os
import time
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from bench.clients import Clients
from bench.meter import Spent
from bench.stage import Servers, Stage, fresh_run

# Warm-ups grow until one takes this share of the time that a run is to take.
_WARM_SHARE = 0.4
_WARM_GROWTH_MAX = 10.0
_JOBS_MAX = 400_000


class Figure(StrEnum):
    # Into empty queues.
    ENQUEUE = "enqueue"
    # Finishes the jobs that were stored before the measurement.
    DRAIN = "drain"
    # Enqueues and drains at the same time: from the first job stored to the last job finished.
    LIFE = "whole life"


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """How a system is driven. Callers and workers are counted over all client processes together."""

    batch: int
    callers: int
    workers: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """One figure of one run, as it was measured."""

    figure: Figure
    jobs: int
    seconds: float
    # CPU, in the time that it took with what belongs to it: a little longer.
    spent: Spent
    wall_s: float
    load_average: float

    @property
    def jobs_per_s(self) -> float:
        return self.jobs / self.seconds

    def told(self) -> dict[str, object]:
        return {**asdict(self), "figure": str(self.figure), "jobs_per_s": self.jobs_per_s}


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    stage: Stage
    clients: Clients
    servers: Servers

    async def filled_and_drained(self, load: Load, jobs: int) -> tuple[Timed, Timed]:
        """Fills empty queues, then drains them. Raises Wrong."""
        await fresh_run(self.clients)
        callers, workers = self._shares(load.callers), self._shares(load.workers)
        share = self._dealt(jobs, callers)
        enqueue = await self._timed(
            Figure.ENQUEUE,
            jobs,
            "enqueue",
            lambda at: {"jobs": share[at], "batch": load.batch, "callers": callers[at]},
        )
        drain = await self._timed(
            Figure.DRAIN,
            jobs,
            "drain",
            lambda at: {"total": jobs, "batch": load.batch, "concurrency": workers[at]},
        )
        await self.clients.one(0, "check", jobs=jobs)
        return enqueue, drain

    async def lived(self, load: Load, jobs: int) -> Timed:
        """Enqueues, with the workers up before, and drains at the same time. Raises Wrong."""
        await fresh_run(self.clients)
        callers, workers = self._shares(load.callers), self._shares(load.workers)
        share = self._dealt(jobs, callers)
        timed = await self._timed(
            Figure.LIFE,
            jobs,
            "live",
            lambda at: {
                "jobs": share[at],
                "total": jobs,
                "batch": load.batch,
                "callers": callers[at],
                "concurrency": workers[at],
            },
        )
        await self.clients.one(0, "check", jobs=jobs)
        return timed

    async def warmed(self, load: Load, seconds: float) -> tuple[int, int]:
        """Warms the system up; answers how many jobs fill and drain, and live, in about so many seconds."""
        found: list[int] = []
        for life in (False, True):
            jobs = _least(load.batch)
            while True:
                if life:
                    took_s = (await self.lived(load, jobs)).seconds
                else:
                    filled, drained = await self.filled_and_drained(load, jobs)
                    # Enqueuing is faster than draining everywhere; a fill of several times `seconds` helps nobody.
                    took_s = max(filled.seconds, drained.seconds)
                if took_s >= _WARM_SHARE * seconds or jobs >= _JOBS_MAX:
                    break
                jobs = _rounded(jobs * min(_WARM_GROWTH_MAX, 0.7 * seconds / took_s), load.batch)
            found.append(max(_least(load.batch), _rounded(jobs * seconds / took_s, load.batch)))
        return found[0], found[1]

    def _shares(self, total: int) -> list[int]:
        """Divides a total over the client processes."""
        count = len(self.clients.pids)
        return [total * (at + 1) // count - total * at // count for at in range(count)]

    def _dealt(self, jobs: int, callers: list[int]) -> list[int]:
        """Returns how many of the jobs each client process does, by the number of its callers."""
        bounds = [jobs * sum(callers[:at]) // sum(callers) for at in range(len(callers) + 1)]
        return [past - first for first, past in itertools.pairwise(bounds)]

    async def _timed(self, figure: Figure, jobs: int, verb: str, order: Any) -> Timed:
        load_average = os.getloadavg()[0]
        before, began_s = self.stage.spent([self.clients], self.servers), time.monotonic()
        answers = await self.clients.all(verb, order)
        spent, took_s = self.stage.spent([self.clients], self.servers) - before, time.monotonic() - began_s
        first_s = min(answer.began_s for answer in answers)
        if figure is Figure.ENQUEUE:
            last_s = max(answer.ended_s for answer in answers)
        else:
            if figure is Figure.LIFE:
                first_s = min(answer.found[0] for answer in answers)
                last_s = max(answer.found[1] for answer in answers)
            else:
                last_s = max(answer.found for answer in answers)
            settled = (await self.clients.one(0, "settle", total=jobs)).found
            # Finished in the database later than the consumers thought: that counts.
            last_s = max(last_s, settled or 0.0)
            await self.clients.all("rest")
        seconds = last_s - first_s
        return Timed(figure=figure, jobs=jobs, seconds=seconds, spent=spent, wall_s=took_s, load_average=load_average)


def _least(batch: int) -> int:
    """So many calls that they are worth being timed."""
    return _rounded(max(500, min(2_000, 20 * batch), 4 * batch), batch)


def _rounded(jobs: float, batch: int) -> int:
    """Rounds to whole batches, up to the most jobs that a run may have."""
    return max(batch, int(min(jobs, _JOBS_MAX)) // batch * batch)
