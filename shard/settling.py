"""How leases end or go on: ack, nack, extend, release. Many calls, of many orgs, in one statement each.

A call is about leases of one org. What is not that org's is not found (I4); what has ended is STALE (I2)."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Generic, NamedTuple, TypeVar

from shard import arrays, partitions, retry, row_locks, statements
from shard.database import Database
from shard.errors import RowLocked
from shard.row_locks import JobRow, RowLocks
from shard.vocabulary import Answer, JobId, Lease, OrgId, QueueId


@dataclass(frozen=True, slots=True, kw_only=True)
class Nack:
    """One job given back. `delay_us` None: as the retry policy says. `kill`: dead at once."""

    lease: Lease
    error: str = ""
    delay_us: int | None = None
    kill: bool = False


class Acks(NamedTuple):
    org: OrgId
    leases: Sequence[Lease]
    # As many as leases, or none at all.
    results: Sequence[bytes | None]

    def only(self, at: Sequence[int]) -> Acks:
        return Acks(self.org, [self.leases[one] for one in at], [self.results[one] for one in at if self.results])


class Nacks(NamedTuple):
    org: OrgId
    nacks: Sequence[Nack]

    @property
    def leases(self) -> list[Lease]:
        return [nack.lease for nack in self.nacks]

    def only(self, at: Sequence[int]) -> Nacks:
        return Nacks(self.org, [self.nacks[one] for one in at])


class Extends(NamedTuple):
    org: OrgId
    leases: Sequence[Lease]
    window_us: int

    def only(self, at: Sequence[int]) -> Extends:
        return Extends(self.org, [self.leases[one] for one in at], self.window_us)


class Releases(NamedTuple):
    org: OrgId
    leases: Sequence[Lease]

    def only(self, at: Sequence[int]) -> Releases:
        return Releases(self.org, [self.leases[one] for one in at])


_Call = Acks | Nacks | Extends | Releases
_AnyCall = TypeVar("_AnyCall", Acks, Nacks, Extends, Releases)
_Fate = TypeVar("_Fate", int, str)
# What was done: job id and number of each lease. A call may name a job by a live lease and by an ended one.
_Done = set[tuple[str, int]]
_Answers = Sequence[list[Answer] | Exception]


class Settling:
    """`visible` is told the queues of jobs that can be claimed again, or will be some time. `locks`: of jobs.

    Each verb answers for every call its leases, or RowLocked where the call names a job that another session keeps
    locked: its other leases are settled even so. Raises ShardUnavailable."""

    def __init__(self, database: Database, locks: RowLocks[JobRow], visible: Callable[[set[QueueId]], None]) -> None:
        self._database = database
        self._locks = locks
        self._visible = visible

    async def ack(self, calls: Sequence[Acks]) -> _Answers:
        """Finishes jobs."""
        return await self._past_locks(calls, self._ack)

    async def nack(self, calls: Sequence[Nacks]) -> _Answers:
        """Gives jobs back: to run again after a delay, or dead when attempts are used up or the nack kills."""
        return await self._past_locks(calls, self._nack)

    async def extend(self, calls: Sequence[Extends]) -> _Answers:
        """Prolongs leases: each then ends no earlier than its call's window from now."""
        return await self._past_locks(calls, self._extend)

    async def release(self, calls: Sequence[Releases]) -> _Answers:
        """Gives jobs back at once, the attempt uncounted."""
        return await self._past_locks(calls, self._release)

    async def _past_locks(
        self, calls: Sequence[_AnyCall], act: Callable[[Sequence[_AnyCall]], Awaitable[list[list[Answer]]]]
    ) -> _Answers:
        """Settles all leases but those of jobs that another session keeps locked."""
        locked = await self._locks.expect(_rows(calls))
        for _ in range(row_locks.TURNS_MAX):
            try:
                if not locked:
                    return await act(calls)
                return await self._settle_others(calls, locked, act)
            except RowLocked:
                locked |= await self._locks.find(row for row in _rows(calls) if row not in locked)
        raise RowLocked(self._database.name, "something that leases need to be settled")

    async def _settle_others(
        self,
        calls: Sequence[_AnyCall],
        locked: Collection[JobRow],
        act: Callable[[Sequence[_AnyCall]], Awaitable[list[list[Answer]]]],
    ) -> _Answers:
        answers: dict[int, list[Answer] | Exception] = {}
        parts: dict[int, _AnyCall] = {}
        for turn, call in enumerate(calls):
            leases = call.leases
            free = [at for at, lease in enumerate(leases) if (call.org, lease.job_hex) not in locked]
            if len(free) < len(leases):
                answers[turn] = self._refusal(call, locked)
            if free:
                parts[turn] = call.only(free)
        if parts:
            for turn, answer in zip(parts, await act(list(parts.values())), strict=True):
                answers.setdefault(turn, answer)
        return [answers.get(turn, []) for turn in range(len(calls))]

    def _refusal(self, call: _Call, locked: Collection[JobRow]) -> RowLocked:
        found = [lease for lease in call.leases if (call.org, lease.job_hex) in locked]
        more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        return RowLocked(self._database.name, f"job {_dashed(found[0].job_hex)}{more}")

    async def _ack(self, calls: Sequence[Acks]) -> list[list[Answer]]:
        named = _Named.of(calls)
        results = [result for call in calls for result in call.results or [None] * len(call.leases)]
        rows = await partitions.finish(
            self._database,
            statements.ACK,
            {
                **named.parameters(),
                "results": arrays.blobs(results if any(result is not None for result in results) else ()),
                "jobs": len(named.leases),
            },
        )
        acked, acked_ids, acked_leases = rows[0]
        if acked == len(named.leases):
            return [[Answer.OK] * len(call.leases) for call in calls]
        return await self._answers(calls, set(zip(acked_ids or (), acked_leases or (), strict=True)), ended_as="acked")

    async def _nack(self, calls: Sequence[Nacks]) -> list[list[Answer]]:
        rows = await self._database.run(statements.INSPECT_LEASES, _Named.of(calls).parameters())
        held = {(job_id, number): rest for job_id, number, *rest in rows}
        again = _Chosen[int]()
        over = _Chosen[str]()
        for org, nacks in calls:
            for nack in nacks:
                if _key(nack.lease) not in held:
                    continue
                attempt, max_attempts, policy = held[_key(nack.lease)]
                if nack.kill:
                    over.add(org, nack, "killed")
                    continue
                luck = random.random()
                fate = retry.fate(retry.from_json(policy), attempt=attempt, max_attempts=max_attempts, luck=luck)
                match fate:
                    case retry.Bury(reason=reason):
                        over.add(org, nack, reason)
                    case retry.RetryAfter(delay_us=delay):
                        again.add(org, nack, delay if nack.delay_us is None else nack.delay_us)
        done: _Done = set()
        if again.nacks:
            parameters = {
                **_Named(again.orgs, [nack.lease for nack in again.nacks]).parameters(),
                "delays_us": arrays.numbers(again.fates),
                "errors": arrays.texts([nack.error for nack in again.nacks]),
            }
            retried = await self._database.run(statements.RETRY, parameters)
            done.update((job_id, number) for job_id, number, _ in retried)
            self._visible({queue_id for _, _, queue_id in retried})
        if over.nacks:
            parameters = {
                **_Named(over.orgs, [nack.lease for nack in over.nacks]).parameters(),
                "outcomes": arrays.texts(["nacked"] * len(over.nacks)),
                "errors": arrays.texts([nack.error for nack in over.nacks]),
                "reasons": arrays.texts(over.fates),
            }
            done.update(await self._database.run(statements.BURY, parameters))
        return await self._answers(calls, done, ended_as="nacked")

    async def _extend(self, calls: Sequence[Extends]) -> list[list[Answer]]:
        windows = arrays.numbers(chain.from_iterable([call.window_us] * len(call.leases) for call in calls))
        rows = await self._database.run(statements.EXTEND, {**_Named.of(calls).parameters(), "windows_us": windows})
        return await self._answers(calls, set(rows), ended_as=None)

    async def _release(self, calls: Sequence[Releases]) -> list[list[Answer]]:
        rows = await self._database.run(statements.RELEASE, _Named.of(calls).parameters())
        self._visible({queue_id for _, _, queue_id in rows})
        return await self._answers(calls, {(job_id, number) for job_id, number, _ in rows}, ended_as="released")

    async def _answers(self, calls: Sequence[_Call], done: _Done, *, ended_as: str | None) -> list[list[Answer]]:
        """OK for what was done now, or by an earlier try of the same call; STALE or NOT_FOUND for the rest."""
        orgs: list[OrgId] = []
        missed: list[Lease] = []
        for call in calls:
            there = [lease for lease in call.leases if _key(lease) not in done]
            missed += there
            orgs += [call.org] * len(there)
        if not missed:
            return [[Answer.OK] * len(call.leases) for call in calls]
        oldest_ms = min(int(lease.job_hex[:12], 16) for lease in missed)
        parameters = {**_Named(orgs, missed).parameters(), "oldest_ms": oldest_ms}
        rows = await self._database.run(statements.EXPLAIN_MISS, parameters)
        explained: dict[tuple[OrgId, Lease], Answer] = {}
        for org, lease, (how, known) in zip(orgs, missed, rows, strict=True):
            same = ended_as is not None and how == ended_as
            explained[org, lease] = Answer.OK if same else Answer.STALE if known else Answer.NOT_FOUND
        return [[explained.get((call.org, lease), Answer.OK) for lease in call.leases] for call in calls]


def apart(calls: Sequence[_AnyCall]) -> list[list[_AnyCall]]:
    """What may go together: a lease that calls of different orgs name is one org's at most, and what became of it is
    nobody else's to hear."""
    rest = list(calls)
    if len({call.org for call in rest}) == 1:
        # Nearly always, and then there is no need to look at each lease.
        return [rest]
    parts: list[list[_AnyCall]] = []
    while rest:
        owners: dict[Lease, OrgId] = {}
        together: list[_AnyCall] = []
        later: list[_AnyCall] = []
        for call in rest:
            mine = all(owners.setdefault(lease, call.org) == call.org for lease in call.leases)
            (together if mine else later).append(call)
        parts.append(together)
        rest = later
    return parts


class _Named(NamedTuple):
    """Leases, and whose each must be."""

    orgs: Sequence[OrgId]
    leases: Sequence[Lease]

    @classmethod
    def of(cls, calls: Sequence[_Call]) -> _Named:
        leases: list[Lease] = []
        orgs: list[OrgId] = []
        for call in calls:
            there = call.leases
            leases += there
            orgs += [call.org] * len(there)
        return cls(orgs, leases)

    def parameters(self) -> dict[str, object]:
        turns = {org: turn for turn, org in enumerate(dict.fromkeys(self.orgs), start=1)}
        return {
            "ids": arrays.plain([lease.job_hex for lease in self.leases]),
            "leases": arrays.numbers([lease.number for lease in self.leases]),
            "orgs": arrays.texts(list(turns)),
            # None: all are the first one's.
            "turns": "{}" if len(turns) == 1 else arrays.numbers([turns[org] for org in self.orgs]),
        }


class _Chosen(Generic[_Fate]):
    """Nacks that meet a fate of one sort."""

    def __init__(self) -> None:
        self.orgs: list[OrgId] = []
        self.nacks: list[Nack] = []
        self.fates: list[_Fate] = []

    def add(self, org: OrgId, nack: Nack, fate: _Fate) -> None:
        self.orgs.append(org)
        self.nacks.append(nack)
        self.fates.append(fate)


def _key(lease: Lease) -> tuple[str, int]:
    """A lease as the statements answer it."""
    return _dashed(lease.job_hex), lease.number


def _dashed(text: str) -> JobId:
    return JobId(f"{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}")


def _rows(calls: Sequence[_AnyCall]) -> Iterator[JobRow]:
    return ((call.org, lease.job_hex) for call in calls for lease in call.leases)
