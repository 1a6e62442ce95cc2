"""How jobs get out of one shard: under a lease each, to several takers in one statement."""

from __future__ import annotations

import random
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from shard import arrays, partitions, statements
from shard.database import Database
from shard.errors import ShardUnavailable
from shard.floor import Floors
from shard.halving import by_halves
from shard.interning import Names
from shard.lease import token_prefix
from shard.vocabulary import MAX_ATTEMPTS_DEFAULT, Claimed, OrgId, QueueId, QueueName

# How many times a claim goes on behind jobs that were only taken to be set aside.
_TURNS_MAX = 6
# Sets of queues in one statement, which looks through all of their lanes for each.
_GROUPS_MAX = 32
# A claim ends with the job that fills this much payload. The largest payload (1 MiB) and the other fields of the
# jobs added, its answer stays below 4 MiB, which is the most that gRPC clients take unless told otherwise.
CLAIM_BYTES_MAX = 2 * 1024 * 1024
# What a job takes beside payload and attributes.
JOB_BYTES = 500


class Memory(Protocol):
    """Where a taker's jobs are kept: what is claimed is counted there, and nothing is claimed while it is full."""

    def has_room(self) -> bool: ...
    def hold(self, count: int) -> None: ...
    def give_back(self, count: int) -> None: ...


class Ask(NamedTuple):
    """One taker: up to `max_jobs` jobs, and `bytes_max` of payload and attributes, of these queues of one org, for
    `window_us`."""

    org: OrgId
    queues: tuple[QueueName, ...]
    max_jobs: int
    window_us: int
    worker: str
    # The last job may fill more than is left of it.
    bytes_max: int = CLAIM_BYTES_MAX
    # None: it is not counted.
    memory: Memory | None = None


class Taken(NamedTuple):
    """What a taker gets: the jobs, by priority, then by run_at, and what their lease tokens begin with
    (shard/lease.py). `held`: how many bytes its memory holds for them, which are the taker's to give back."""

    prefix: bytes
    jobs: list[Claimed]
    held: int = 0
    # Its memory was full: there may be more jobs than these.
    was_full: bool = False

    @property
    def bytes(self) -> int:
        """By which its room is measured."""
        return sum(map(_size, self.jobs))


@dataclass(slots=True, kw_only=True)
class _Taker:
    ask: Ask
    number: int = field(default_factory=lambda: secrets.randbits(63))
    jobs: list[Claimed] = field(default_factory=list[Claimed])
    # Of those it took last, some were only set aside, or there was no room for a first one: others may wait.
    again: bool = True
    error: Exception | None = None
    held: int = 0
    was_full: bool = False

    def may_take(self) -> bool:
        memory = self.ask.memory
        self.was_full = memory is not None and not memory.has_room()
        return not self.was_full

    def count(self) -> None:
        """Has its memory hold what it has by now."""
        memory = self.ask.memory
        if memory is not None:
            held = sum(map(_size, self.jobs)) + JOB_BYTES * len(self.jobs)
            if held > self.held:
                memory.hold(held - self.held)
            elif held < self.held:
                memory.give_back(self.held - held)
            self.held = held

    @property
    def wants(self) -> int:
        return self.ask.max_jobs - len(self.jobs)

    @property
    def room(self) -> int:
        return self.ask.bytes_max - sum(map(_size, self.jobs))


class Claiming:
    def __init__(self, database: Database, names: Names, floors: Floors) -> None:
        self._database = database
        self._names = names
        self._floors = floors

    async def together(self, asks: Sequence[Ask]) -> list[Taken | Exception]:
        """Leases jobs to each taker. Whatever goes wrong then, what is leased is handed out: nobody else could give it
        out before its window ends. Who has none is told what went wrong."""
        takers = [_Taker(ask=ask) for ask in asks]
        away: ShardUnavailable | None = None
        # Each turn for want of room serves one taker at least.
        for _ in range(_TURNS_MAX + len(takers)):
            rest = [
                taker for taker in takers if taker.again and taker.wants > 0 and taker.room > 0 and taker.may_take()
            ]
            if not rest or away is not None:
                break
            while rest and away is None:
                now, rest = _apart(rest)
                # Meanwhile the others may have filled what they share.
                now = [taker for taker in now if taker.may_take()]
                if not now:
                    continue
                for taker, error in zip(now, await by_halves(self._claim, now), strict=True):
                    taker.error = error
                    if isinstance(error, ShardUnavailable):
                        away = error
        taken: list[Taken | Exception] = []
        for taker in takers:
            error = taker.error or away
            if taker.jobs or error is None:
                taker.jobs.sort(key=_order)
                prefix = token_prefix(self._database.name, taker.number)
                taken.append(Taken(prefix, taker.jobs, taker.held, taker.was_full))
            else:
                taken.append(error)
        return taken

    async def _claim(self, takers: Sequence[_Taker]) -> list[Exception | None]:
        """Once, for takers whose queues are the same or have nothing in common. Answers what went wrong for each of
        them after it was leased what fits; raises what went wrong before anything was leased.

        With one exception: where a connection is lost before the answer has come, the statement is run again on another
        one, and jobs that the first run may have leased are nobody's. Nobody here knows which they are, and leases have
        no index. They come back when their window ends; there are no more of them in a run than were asked for."""
        groups: dict[tuple[OrgId, tuple[QueueName, ...]], list[_Taker]] = {}
        for taker in takers:
            taker.again = False
            groups.setdefault((taker.ask.org, taker.ask.queues), []).append(taker)
        columns = _Columns()
        asked: dict[QueueId, QueueName] = {}
        numbers = await self._names.find([(org, queue) for org, queues in groups for queue in queues])
        for (org, queues), sharers in groups.items():
            found = {queue: numbers[org, queue] for queue in queues if (org, queue) in numbers}
            if not found:
                continue
            columns.add(org, found, sharers, self._floors)
            asked.update((number, queue) for queue, number in found.items())
        if not asked:
            return [None] * len(takers)
        room = min(taker.room for taker in takers)
        arrivals = self._floors.arrivals
        rows = await self._database.run(statements.CLAIM, {**columns.parameters(), "bytes_max": room})
        by_lease = {taker.number: taker for taker in takers}
        taken = [Claimed(row[0], asked[row[1]], *row[2:]) for row in rows]
        # A window may be over before the turns are: what it held has come again, even under the same number (I2).
        anew = {(by_lease[job.lease].ask.org, job.id) for job in taken}
        for taker in takers:
            taker.jobs = [job for job in taker.jobs if (taker.ask.org, job.id) not in anew]
        unfit: dict[int, list[Claimed]] = {}
        for job in taken:
            if job.expired or job.attempt > (job.max_attempts or MAX_ATTEMPTS_DEFAULT):
                unfit.setdefault(job.lease, []).append(job)
            else:
                by_lease[job.lease].jobs.append(job)
        for taker in takers:
            taker.count()
        self._floors.claimed(zip([row[1] for row in rows], taken, strict=True), arrivals=arrivals)
        if sum(map(_size, taken)) >= room:
            # The others' jobs may have left no room for theirs.
            for taker in takers:
                taker.again = True
        errors: dict[int, Exception] = {}
        for number, jobs in unfit.items():
            taker = by_lease[number]
            try:
                await self._set_aside(taker.ask.org, jobs, number)
            except Exception as error:  # noqa: BLE001 - the others have nothing to do with it
                # These are tried again after their window; given back now, they would be claimed and fail at once.
                errors[number] = error
            else:
                taker.again = True
        return [errors.get(taker.number) for taker in takers]

    async def _set_aside(self, org: OrgId, jobs: list[Claimed], lease: int) -> None:
        """What a claim found past its time is cancelled; what it found out of attempts is dead."""
        expired = [job.id for job in jobs if job.expired]
        if expired:
            parameters = {"ids": arrays.plain(expired), "lease": lease, "org": org}
            await partitions.finish(self._database, statements.EXPIRE_UNRUN, parameters)
        exhausted = [job for job in jobs if not job.expired]
        if exhausted:
            count = len(exhausted)
            await self._database.run(
                statements.BURY,
                {
                    "ids": arrays.plain(job.id for job in exhausted),
                    "leases": arrays.numbers([lease] * count),
                    "orgs": arrays.texts([org]),
                    "turns": "{}",
                    "outcomes": arrays.texts(()),
                    "errors": arrays.texts(()),
                    "reasons": arrays.texts(
                        [f"out of attempts ({job.attempt - 1}), the last one expired" for job in exhausted]
                    ),
                },
            )


class _Columns:
    """The claim statement's parameters, a group at a time."""

    def __init__(self) -> None:
        self._groups: list[int] = []
        self._queue_ids: list[QueueId] = []
        self._orgs: list[str] = []
        self._queues: list[str] = []
        self._floors: list[int] = []
        self._max_jobs: list[int] = []
        self._firsts: list[int] = []
        self._takers: list[_Taker] = []
        self._taker_firsts: list[int] = []
        self._next = 1

    def add(self, org: OrgId, queues: Mapping[QueueName, QueueId], takers: Sequence[_Taker], floors: Floors) -> None:
        # Equal priorities are served in turn: a busy queue named first must not starve one named last.
        names = list(queues)
        first = random.randrange(len(names))
        self._firsts.append(self._next)
        for name in names[first:] + names[:first]:
            self._groups.append(len(self._firsts))
            self._queue_ids.append(queues[name])
            self._orgs.append(org)
            self._queues.append(name)
            self._floors += floors.of(queues[name])
        self._max_jobs.append(sum(taker.wants for taker in takers))
        for taker in takers:
            self._takers.append(taker)
            self._taker_firsts.append(self._next)
            self._next += taker.wants

    def parameters(self) -> dict[str, object]:
        return {
            "groups": arrays.numbers(self._groups),
            "queue_ids": arrays.numbers(self._queue_ids),
            "orgs": arrays.texts(self._orgs),
            "queues": arrays.names(self._queues),
            "floors_us": arrays.numbers(self._floors),
            "max_jobs": arrays.numbers(self._max_jobs),
            "firsts": arrays.numbers(self._firsts),
            "taker_firsts": arrays.numbers(self._taker_firsts),
            "leases": arrays.numbers([taker.number for taker in self._takers]),
            "workers": arrays.texts([taker.ask.worker for taker in self._takers]),
            "windows_us": arrays.numbers([taker.ask.window_us for taker in self._takers]),
        }


def _apart(takers: Sequence[_Taker]) -> tuple[list[_Taker], list[_Taker]]:
    """Those that can go together, and the others: one too many, or with some of the queues, but not all, of one that
    goes. A row that a statement has locked it would take twice."""
    now: list[_Taker] = []
    later: list[_Taker] = []
    owners: dict[tuple[OrgId, QueueName], tuple[QueueName, ...]] = {}
    groups: set[tuple[OrgId, tuple[QueueName, ...]]] = set()
    for taker in takers:
        org, queues = group = taker.ask.org, taker.ask.queues
        if len(groups) == _GROUPS_MAX and group not in groups:
            later.append(taker)
        elif all(owners.get((org, queue), queues) == queues for queue in queues):
            groups.add(group)
            owners.update(((org, queue), queues) for queue in queues)
            now.append(taker)
        else:
            later.append(taker)
    return now, later


def _size(job: Claimed) -> int:
    return len(job.payload) + (len(job.attributes.encode()) if job.attributes else 0)


def _order(job: Claimed) -> tuple[int, int]:
    return job.priority, job.run_at
