"""Ends and extends leases. VERBS has the verbs, such as ack and extend. The answer for each lease is OK, STALE,
CANCELLED or NOT_FOUND. One statement serves many calls, of many orgs.

A call is about leases of one org. A lease of another org is NOT_FOUND (invariant I4). A lease that has ended is STALE
(invariant I2)."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Generic, NamedTuple, TypeVar

from shard import metrics, retry_policy
from shard.errors import RowLocked
from shard.postgres import arrays, partitions
from shard.postgres.pool import Database
from shard.queue import row_locks, statements
from shard.queue.bisect_errors import bisect_errors
from shard.queue.row_locks import JobRow, RowLocks
from shard.vocabulary import Answer, Failure, JobId, Lease, OrgId, Outcome, Progress, QueueId

_NO_TEXTS: Mapping[int, str] = {}
# How many bytes of payloads and results weigh as much as one job. So a statement takes at most 4 MiB of payloads and
# results, and a single call with more bytes gets a statement of its own. Calls that do not fit wait for the next
# statement, of which each org gets its share.
BYTES_PER_WEIGHT = 4 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Nack:
    """Ends one attempt that failed. `retry_after_us` is the delay until the job may run again. None: the retry policy
    decides. A permanent failure makes the job dead at once."""

    lease: Lease
    # None: no failure is stored.
    failure: Failure | None = None
    retry_after_us: int | None = None

    @property
    def permanent(self) -> bool:
        return self.failure is not None and self.failure.permanent

    @property
    def size(self) -> int:
        """How many characters the texts of the failure have."""
        return 0 if self.failure is None else len(self.failure.message) + len(self.failure.stack)


class Snooze(NamedTuple):
    """Gives one job back, which becomes ready again after a delay."""

    lease: Lease
    after_us: int = 0
    # For the attempt history; may be empty.
    reason: str = ""


class Report(NamedTuple):
    """What a consumer reports about a job while it holds the lease. None: keeps what was reported before. An empty
    checkpoint removes the earlier checkpoint."""

    progress: Progress | None = None
    checkpoint: bytes | None = None


class Extension(NamedTuple):
    """What an extend does to one lease."""

    window_us: int
    report: Report


class Settlement(NamedTuple):
    """One call: ends or extends leases of one org. The class method with the name of the verb makes it."""

    # One of VERBS.
    verb: str
    org: OrgId
    leases: Sequence[Lease]
    # What the verb must know about each lease. There is one entry for each lease, or no entry at all.
    details: Sequence[Any] = ()
    # The whole logs of the attempts until now, by the lease's position. For leases without an entry, the log that was
    # reported before is kept.
    logs: Mapping[int, str] = _NO_TEXTS

    @classmethod
    def ack(cls, org: OrgId, leases: Sequence[Lease], results: Sequence[bytes | None] = ()) -> Settlement:
        """Finishes jobs and stores their results (at most 64 KiB each)."""
        return cls("ack", org, leases, results)

    @classmethod
    def nack(cls, org: OrgId, nacks: Sequence[Nack]) -> Settlement:
        """Gives jobs back, which run again after a delay. A job that has no attempt left, or whose failure is
        permanent, becomes dead."""
        return cls("nack", org, [nack.lease for nack in nacks], nacks)

    @classmethod
    def extend(
        cls, org: OrgId, leases: Sequence[Lease], *, window_us: int, reports: Sequence[Report] = ()
    ) -> Settlement:
        """Extends leases to at least `window_us` (microseconds) from now, and stores what the consumer reports: one
        report for each lease, or none at all."""
        return cls(
            "extend", org, leases, [Extension(window_us, report) for report in reports or [Report()] * len(leases)]
        )

    @classmethod
    def release(cls, org: OrgId, leases: Sequence[Lease]) -> Settlement:
        """Gives jobs back, which can be claimed again at once. The attempts do not count."""
        return cls("release", org, leases)

    @classmethod
    def snooze(cls, org: OrgId, snoozes: Sequence[Snooze]) -> Settlement:
        """Gives jobs back, each after its delay. The attempts do not count."""
        return cls("snooze", org, [snooze.lease for snooze in snoozes], snoozes)

    def only(self, positions: Sequence[int]) -> Settlement:
        """Returns a settlement of the leases at these positions only."""
        leases = [self.leases[at] for at in positions]
        details = [self.details[at] for at in positions if self.details]
        logs = {new: self.logs[old] for new, old in enumerate(positions) if old in self.logs}
        return Settlement(self.verb, self.org, leases, details, logs)

    def weight(self) -> int:
        """Returns how much of a statement the call takes: its leases, and the size of its results, failures, reasons,
        checkpoints and logs."""
        match self.verb:
            case "ack":
                size = sum([len(result) for result in self.details if result])
            case "nack":
                size = sum([nack.size for nack in self.details])
            case "snooze":
                size = sum([len(snooze.reason) for snooze in self.details])
            case "extend":
                size = sum([len(one.report.checkpoint) for one in self.details if one.report.checkpoint])
            case _:
                size = 0
        if self.logs:
            size += sum([len(log) for log in self.logs.values()])
        return len(self.leases) + size // BYTES_PER_WEIGHT


_Fate = TypeVar("_Fate", int, str)
# The leases that a statement found, as pairs of job id and lease number. The number is needed too, because a call may
# name a valid lease and an ended lease of one job.
_Done = set[tuple[str, int]]
_Answers = Sequence[list[Answer] | Exception]


class LeaseSettler:
    """Settles leases. `visible` is called with the queues of jobs that can be claimed again, now or later. `locks`
    finds jobs that other sessions keep locked."""

    def __init__(self, database: Database, locks: RowLocks[JobRow], visible: Callable[[set[QueueId]], None]) -> None:
        self._database = database
        self._locks = locks
        self._visible = visible
        self._died = metrics.DEAD.labels(database.name)

    async def settle(self, calls: Sequence[Settlement]) -> _Answers:
        """Settles the leases of calls with the same verb, if possible in one statement.

        Returns for every call the answers to its leases, or its error. The error is RowLocked if the call names a job
        that another session keeps locked. The other leases of that call are settled nevertheless. Raises
        ShardUnavailable."""
        if len(calls) == 1:
            return await self._past_locks(calls)
        answers: dict[int, list[Answer] | Exception] = {}
        for part in split_by_owner(calls):
            answers.update(zip(map(id, part), await bisect_errors(self._past_locks, part), strict=True))
        return [answers[id(call)] for call in calls]

    async def _past_locks(self, calls: Sequence[Settlement]) -> _Answers:
        """Settles all leases, except leases of jobs that another session keeps locked."""
        locked = await self._locks.expect(_rows(calls))
        for _ in range(row_locks.TRIES_MAX):
            try:
                if not locked:
                    return await self._run(calls)
                return await self._settle_unlocked(calls, locked)
            except RowLocked:
                locked |= await self._locks.find(row for row in _rows(calls) if row not in locked)
        raise RowLocked(self._database.name, "something that leases need to be settled")

    async def _settle_unlocked(self, calls: Sequence[Settlement], locked: Collection[JobRow]) -> _Answers:
        answers: dict[int, list[Answer] | Exception] = {}
        parts: dict[int, Settlement] = {}
        for index, call in enumerate(calls):
            leases = call.leases
            free = [at for at, lease in enumerate(leases) if (call.org, lease.job_hex) not in locked]
            if len(free) < len(leases):
                answers[index] = self._row_locked(call, locked)
            if free:
                parts[index] = call.only(free)
        if parts:
            for index, answer in zip(parts, await self._run(list(parts.values())), strict=True):
                answers.setdefault(index, answer)
        return [answers.get(index, []) for index in range(len(calls))]

    def _row_locked(self, call: Settlement, locked: Collection[JobRow]) -> RowLocked:
        refused = [lease for lease in call.leases if (call.org, lease.job_hex) in locked]
        more = f" (and {len(refused) - 1} more)" if len(refused) > 1 else ""
        return RowLocked(self._database.name, f"job {_dashed(refused[0].job_hex)}{more}")

    async def _run(self, calls: Sequence[Settlement]) -> list[list[Answer]]:
        verb = VERBS[calls[0].verb]
        done = await verb.run(self, calls)
        if done is None:
            return [[Answer.OK] * len(call.leases) for call in calls]
        return await self._answers(calls, done, ended_as=verb.ended_as)

    async def ack(self, calls: Sequence[Settlement]) -> _Done | None:
        columns = _LeaseColumns.of(calls)
        results = [result for call in calls for result in call.details or [None] * len(call.leases)]
        rows = await partitions.finish(
            self._database,
            statements.ACK,
            {
                **columns.parameters(),
                "results": arrays.blobs(results if any(result is not None for result in results) else ()),
                "logs": _logs(calls),
                "jobs": len(columns.leases),
            },
        )
        acked, acked_ids, acked_leases, freed_in = rows[0]
        if freed_in is not None:
            # The next jobs of the groups have got the free slots, and workflows may have released jobs.
            self._visible(set(freed_in))
        return None if acked == len(columns.leases) else set(zip(acked_ids or (), acked_leases or (), strict=True))

    async def nack(self, calls: Sequence[Settlement]) -> _Done:
        rows = await self._database.run(statements.INSPECT_LEASES, _LeaseColumns.of(calls).parameters())
        held = {(job_id, number): settings for job_id, number, *settings in rows}
        retries = _NackColumns[int]()
        deaths = _NackColumns[str]()
        for call in calls:
            for at, nack in enumerate(call.details):
                if _key(nack.lease) not in held:
                    continue
                attempt, max_attempts, policy = held[_key(nack.lease)]
                log = call.logs.get(at)
                if nack.permanent:
                    deaths.add(call.org, nack, "failed permanently", log)
                    continue
                luck = random.random()
                fate = retry_policy.fate(
                    retry_policy.from_json(policy), attempt=attempt, max_attempts=max_attempts, luck=luck
                )
                match fate:
                    case retry_policy.MarkDead(reason=reason):
                        deaths.add(call.org, nack, reason, log)
                    case retry_policy.RetryAfter(delay_us=delay):
                        after_us = delay if nack.retry_after_us is None else nack.retry_after_us
                        retries.add(call.org, nack, after_us, log)
        done: _Done = set()
        if retries.nacks:
            columns = _LeaseColumns(retries.orgs, [nack.lease for nack in retries.nacks])
            done |= await self._give_back(
                columns,
                arrays.sparse_texts(retries.logs, len(retries.nacks)),
                Outcome.NACKED,
                counts=True,
                delays_us=retries.fates,
                failures=retries.failures(),
            )
        if deaths.nacks:
            parameters = {
                **_LeaseColumns(deaths.orgs, [nack.lease for nack in deaths.nacks]).parameters(),
                "outcomes": arrays.texts(["nacked"] * len(deaths.nacks)),
                "failures": arrays.sparse_texts(deaths.failures(), len(deaths.nacks)),
                "logs": arrays.sparse_texts(deaths.logs, len(deaths.nacks)),
                "reasons": arrays.texts(deaths.fates),
            }
            rows = await partitions.finish(self._database, statements.MARK_DEAD, parameters)
            self._died.inc(len(rows))
            done.update((job_id, number) for job_id, number, _ in rows)
            freed_in = {queue_id for *_, freed in rows for queue_id in freed or ()}
            if freed_in:
                self._visible(freed_in)
        return done

    async def extend(self, calls: Sequence[Settlement]) -> _Done:
        extensions: list[Extension] = list(chain.from_iterable(call.details for call in calls))
        reports = [one.report for one in extensions]
        progress = {at: one.progress.to_json() for at, one in enumerate(reports) if one.progress is not None}
        checkpoints = [one.checkpoint for one in reports]
        parameters = {
            **_LeaseColumns.of(calls).parameters(),
            "windows_us": arrays.numbers([one.window_us for one in extensions]),
            "progress": arrays.sparse_texts(progress, len(extensions)),
            "checkpoints": arrays.blobs(checkpoints if any(one is not None for one in checkpoints) else ()),
            "logs": _logs(calls),
        }
        return set(await self._database.run(statements.EXTEND, parameters))

    async def release(self, calls: Sequence[Settlement]) -> _Done:
        return await self._give_back(_LeaseColumns.of(calls), arrays.texts(()), Outcome.RELEASED, counts=False)

    async def snooze(self, calls: Sequence[Settlement]) -> _Done:
        snoozes: list[Snooze] = list(chain.from_iterable(call.details for call in calls))
        return await self._give_back(
            _LeaseColumns.of(calls),
            _logs(calls),
            Outcome.RELEASED,
            counts=False,
            delays_us=[snooze.after_us for snooze in snoozes],
            failures={at: Failure(message=one.reason).to_json() for at, one in enumerate(snoozes) if one.reason},
        )

    async def _give_back(
        self,
        columns: _LeaseColumns,
        logs: arrays.Texts,
        outcome: Outcome,
        *,
        counts: bool,
        delays_us: Sequence[int] = (),
        failures: Mapping[int, str] = _NO_TEXTS,
    ) -> _Done:
        """Makes jobs visible again. `counts`: whether the attempt counts. `delays_us`: one delay for each lease, or no
        delay at all. `failures`: by the lease's position."""
        parameters = {
            **columns.parameters(),
            "outcome": outcome.value,
            "counts": counts,
            "delays_us": arrays.numbers(delays_us),
            "failures": arrays.sparse_texts(failures, len(columns.leases)),
            "logs": logs,
        }
        rows = await self._database.run(statements.GIVE_BACK, parameters)
        self._visible({queue_id for _, _, queue_id in rows})
        return {(job_id, number) for job_id, number, _ in rows}

    async def _answers(
        self, calls: Sequence[Settlement], done: _Done, *, ended_as: Outcome | None
    ) -> list[list[Answer]]:
        """Returns the answer to each lease. The answer is OK if the lease was settled now, or by an earlier try of the
        same call. `ended_as` is the outcome that this call stores: an earlier try of the call has stored the same. For
        all other leases, the answer is CANCELLED, STALE or NOT_FOUND."""
        orgs: list[OrgId] = []
        missed: list[Lease] = []
        for call in calls:
            missed_of_call = [lease for lease in call.leases if _key(lease) not in done]
            missed += missed_of_call
            orgs += [call.org] * len(missed_of_call)
        if not missed:
            return [[Answer.OK] * len(call.leases) for call in calls]
        oldest_ms = min(int(lease.job_hex[:12], 16) for lease in missed)
        parameters = {**_LeaseColumns(orgs, missed).parameters(), "oldest_ms": oldest_ms}
        rows = await self._database.run(statements.EXPLAIN_MISS, parameters)
        explained: dict[tuple[OrgId, Lease], Answer] = {}
        for org, lease, (outcome, is_known, is_cancelled) in zip(orgs, missed, rows, strict=True):
            if ended_as is not None and outcome == ended_as.value:
                answer = Answer.OK
            elif is_cancelled:
                answer = Answer.CANCELLED
            else:
                answer = Answer.STALE if is_known else Answer.NOT_FOUND
            explained[org, lease] = answer
        return [[explained.get((call.org, lease), Answer.OK) for lease in call.leases] for call in calls]


class _Verb(NamedTuple):
    # Runs calls. Returns the leases that the statement found, or None if it found all of them.
    run: Callable[[LeaseSettler, Sequence[Settlement]], Awaitable[_Done | None]]
    # The outcome of the attempt, or None if the verb does not end the attempt. A repeated call finds this outcome, and
    # is answered OK.
    ended_as: Outcome | None


VERBS = {
    "ack": _Verb(LeaseSettler.ack, Outcome.ACKED),
    "nack": _Verb(LeaseSettler.nack, Outcome.NACKED),
    "extend": _Verb(LeaseSettler.extend, None),
    "release": _Verb(LeaseSettler.release, Outcome.RELEASED),
    "snooze": _Verb(LeaseSettler.snooze, Outcome.RELEASED),
}


def split_by_owner(calls: Sequence[Settlement]) -> list[list[Settlement]]:
    """Splits calls into parts, so that in each part a lease is named by calls of one org only. If calls of two orgs
    name one lease, the lease belongs to at most one of these orgs, and the other org must not learn the lease's outcome
    (invariant I4)."""
    remaining = list(calls)
    if len({call.org for call in remaining}) == 1:
        # This is the usual case. The leases need not be compared.
        return [remaining]
    parts: list[list[Settlement]] = []
    while remaining:
        owners: dict[Lease, OrgId] = {}
        part: list[Settlement] = []
        later: list[Settlement] = []
        for call in remaining:
            is_only_owner = all(owners.setdefault(lease, call.org) == call.org for lease in call.leases)
            (part if is_only_owner else later).append(call)
        parts.append(part)
        remaining = later
    return parts


class _LeaseColumns(NamedTuple):
    """Leases, each with the org that it must belong to."""

    orgs: Sequence[OrgId]
    leases: Sequence[Lease]

    @classmethod
    def of(cls, calls: Sequence[Settlement]) -> _LeaseColumns:
        leases: list[Lease] = []
        orgs: list[OrgId] = []
        for call in calls:
            leases_of_call = call.leases
            leases += leases_of_call
            orgs += [call.org] * len(leases_of_call)
        return cls(orgs, leases)

    def parameters(self) -> dict[str, object]:
        positions = {org: position for position, org in enumerate(dict.fromkeys(self.orgs), start=1)}
        return {
            "ids": arrays.plain([lease.job_hex for lease in self.leases]),
            "leases": arrays.numbers([lease.number for lease in self.leases]),
            "orgs": arrays.texts(list(positions)),
            # Empty: all leases are of the first org.
            "org_positions": "{}" if len(positions) == 1 else arrays.numbers([positions[org] for org in self.orgs]),
        }


class _NackColumns(Generic[_Fate]):
    """The columns of nacks. Each nack has a delay if its job runs again, or a reason if its job becomes dead. One
    object has only delays, or only reasons."""

    def __init__(self) -> None:
        self.orgs: list[OrgId] = []
        self.nacks: list[Nack] = []
        self.fates: list[_Fate] = []
        # The logs, by the position of their nack.
        self.logs: dict[int, str] = {}

    def add(self, org: OrgId, nack: Nack, fate: _Fate, log: str | None) -> None:
        if log is not None:
            self.logs[len(self.nacks)] = log
        self.orgs.append(org)
        self.nacks.append(nack)
        self.fates.append(fate)

    def failures(self) -> dict[int, str]:
        """Returns the failures as JSON, by the position of their nack."""
        return {at: nack.failure.to_json() for at, nack in enumerate(self.nacks) if nack.failure is not None}


def _logs(calls: Sequence[Settlement]) -> arrays.Texts:
    """Returns the logs of the attempts of all leases of these calls."""
    logs: dict[int, str] = {}
    leases = 0
    for call in calls:
        for at, log in call.logs.items():
            logs[leases + at] = log
        leases += len(call.leases)
    return arrays.sparse_texts(logs, leases)


def _key(lease: Lease) -> tuple[str, int]:
    """Returns the pair that the statements return for a lease."""
    return _dashed(lease.job_hex), lease.number


def _dashed(text: str) -> JobId:
    return JobId(f"{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}")


def _rows(calls: Sequence[Settlement]) -> Iterator[JobRow]:
    return ((call.org, lease.job_hex) for call in calls for lease in call.leases)
