"""Measures how many jobs a second one system enqueues, how many it finishes, and how many it finishes if it does both
at the same time."""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import assert_never

from bench.client_process import WORKERS_UP_S
from bench.clients import Answered, Clients
from bench.counts import Counter, Counts
from bench.meter import Spent
from bench.stage import Servers, Stage, fresh_run

# Warm-ups get longer until a warm-up takes at least this share of the planned time of a run.
_WARM_SHARE = 0.4
_WARM_GROWTH_MAX = 10.0
_JOBS_MAX = 400_000


class Figure(StrEnum):
    # Enqueues into empty queues.
    ENQUEUE = "enqueue"
    # Finishes the jobs that were stored before the measurement.
    DRAIN = "drain"
    # Enqueues and drains at the same time. The time is from the first stored job to the last finished job.
    LIFE = "whole life"


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The load of a system. `callers`: how many callers enqueue in all client processes together. `consumers`: how many
    consumers work in all client processes together."""

    batch: int
    callers: int
    consumers: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """One figure of one run, as it was measured."""

    figure: Figure
    jobs: int
    seconds: float
    # CPU time spent during `wall_s`, which is a little longer than `seconds`: `wall_s` includes preparation and end.
    spent: Spent
    counts: Counts
    wall_s: float
    load_average: float

    @property
    def jobs_per_s(self) -> float:
        return self.jobs / self.seconds

    def told(self) -> dict[str, object]:
        return {**asdict(self), "figure": str(self.figure), "jobs_per_s": self.jobs_per_s}


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """`producers` and `workers` are separate client processes. They can also be the same processes, which then enqueue
    and work."""

    stage: Stage
    producers: Clients
    workers: Clients
    servers: Servers
    counter: Counter

    async def filled_and_drained(self, load: Load, jobs: int) -> tuple[Timed, Timed]:
        """Fills empty queues, then drains them. Raises Wrong."""
        await self._fresh_run()
        enqueue = await self._timed(Figure.ENQUEUE, jobs, load)
        drain = await self._timed(Figure.DRAIN, jobs, load)
        await self.workers.one(0, "check", jobs=jobs)
        return enqueue, drain

    async def lived(self, load: Load, jobs: int) -> Timed:
        """Enqueues and drains at the same time. The workers run before the first job is enqueued. Raises Wrong."""
        await self._fresh_run()
        timed = await self._timed(Figure.LIFE, jobs, load)
        await self.workers.one(0, "check", jobs=jobs)
        return timed

    async def _fresh_run(self) -> None:
        await fresh_run(*((self.workers,) if self._together else (self.workers, self.producers)))

    @property
    def _together(self) -> bool:
        return self.producers is self.workers

    async def warmed(self, load: Load, seconds: float) -> tuple[int, int]:
        """Warms the system up. Returns how many jobs the system can fill or drain in about `seconds`, and how many it
        can enqueue and drain at the same time in about `seconds`."""
        found: list[int] = []
        for life in (False, True):
            jobs = _least(load.batch)
            while True:
                if life:
                    took_s = (await self.lived(load, jobs)).seconds
                else:
                    filled, drained = await self.filled_and_drained(load, jobs)
                    # The slower of the two steps decides how many jobs a run has. A run that takes much longer than
                    # `seconds` would show nothing more.
                    took_s = max(filled.seconds, drained.seconds)
                if took_s >= _WARM_SHARE * seconds or jobs >= _JOBS_MAX:
                    break
                jobs = _rounded(jobs * min(_WARM_GROWTH_MAX, 0.7 * seconds / took_s), load.batch)
            found.append(max(_least(load.batch), _rounded(jobs * seconds / took_s, load.batch)))
        return found[0], found[1]

    async def _timed(self, figure: Figure, jobs: int, load: Load) -> Timed:
        load_average = os.getloadavg()[0]
        looked = await self.counter.look()
        before, began_s = self._spent(), time.monotonic()
        match figure:
            case Figure.ENQUEUE:
                answers = await self._enqueue(jobs, load)
                first_s, last_s = _began(answers), max(answer.ended_s for answer in answers)
            case Figure.DRAIN:
                answers = await self._drain(jobs, load)
                first_s, last_s = _began(answers), max(answer.found for answer in answers)
            case Figure.LIFE:
                first_s, last_s = await self._live(jobs, load)
            case _:
                assert_never(figure)
        spent, took_s = self._spent() - before, time.monotonic() - began_s
        if figure is not Figure.ENQUEUE:
            settled = (await self.workers.one(0, "settle", total=jobs)).found
            # If jobs finished in the database later than their consumers assumed, the later time counts.
            last_s = max(last_s, settled or 0.0)
        # Look only now, because by now the acks of the last jobs have been sent.
        counts = (await self.counter.look()).since(looked)
        if figure is not Figure.ENQUEUE:
            await self.workers.all("rest")
        seconds = last_s - first_s
        return Timed(
            figure=figure,
            jobs=jobs,
            seconds=seconds,
            spent=spent,
            counts=counts,
            wall_s=took_s,
            load_average=load_average,
        )

    async def _enqueue(self, jobs: int, load: Load) -> list[Answered]:
        callers = _shares(load.callers, self.producers)
        share = _dealt(jobs, callers)
        return await self.producers.all(
            "enqueue", lambda at: {"jobs": share[at], "batch": load.batch, "callers": callers[at]}
        )

    async def _drain(self, jobs: int, load: Load) -> list[Answered]:
        consumers = _shares(load.consumers, self.workers)
        return await self.workers.all(
            "drain", lambda at: {"total": jobs, "batch": load.batch, "concurrency": consumers[at]}
        )

    async def _live(self, jobs: int, load: Load) -> tuple[float, float]:
        """Returns the times at which the first job was enqueued, and at which the last job finished."""
        if self._together:
            callers, consumers = _shares(load.callers, self.producers), _shares(load.consumers, self.workers)
            share = _dealt(jobs, callers)
            answers = await self.workers.all(
                "live",
                lambda at: {
                    "jobs": share[at],
                    "total": jobs,
                    "batch": load.batch,
                    "callers": callers[at],
                    "concurrency": consumers[at],
                },
            )
            return min(answer.found[0] for answer in answers), max(answer.found[1] for answer in answers)

        async def enqueue() -> list[Answered]:
            await asyncio.sleep(WORKERS_UP_S)
            return await self._enqueue(jobs, load)

        drained, enqueued = await asyncio.gather(self._drain(jobs, load), enqueue())
        return _began(enqueued), max(answer.found for answer in drained)

    def _spent(self) -> Spent:
        producers = None if self._together else self.producers
        return self.stage.spent(self.servers, producers=producers, workers=self.workers)


def _began(answers: list[Answered]) -> float:
    return min(answer.began_s for answer in answers)


def _shares(total: int, clients: Clients) -> list[int]:
    """Divides a total evenly among the client processes."""
    count = len(clients.pids)
    return [total * (at + 1) // count - total * at // count for at in range(count)]


def _dealt(jobs: int, callers: list[int]) -> list[int]:
    """Divides the jobs among the client processes, in proportion to the number of callers of each process."""
    bounds = [jobs * sum(callers[:at]) // sum(callers) for at in range(len(callers) + 1)]
    return [past - first for first, past in itertools.pairwise(bounds)]


def _least(batch: int) -> int:
    """Returns a number of jobs whose calls take long enough for a useful measurement."""
    return _rounded(max(500, min(2_000, 20 * batch), 4 * batch), batch)


def _rounded(jobs: float, batch: int) -> int:
    """Rounds down to whole batches, and to at most _JOBS_MAX jobs."""
    return max(batch, int(min(jobs, _JOBS_MAX)) // batch * batch)
