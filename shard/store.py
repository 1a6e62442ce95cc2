"""The queue of one shard: enqueue, claim, ack, nack, extend, release, cancel, get.

Each verb is one statement (shard/sql), or one that looks and one that acts where a decision lies between. The
store keeps hints only (floors, remembered names); with all of them lost it answers the same, a little later. It
knows no gRPC, and compares no Python clock with anything the database says.
"""

from __future__ import annotations

import random
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import psycopg

from shard import arrays, partitions, retry, statements
from shard.database import Database
from shard.errors import BadIds, IdsOutsideHorizon, IdsTaken, NotOwned, ShardUnavailable
from shard.floor import GUARD_US, Floors, lanes_of
from shard.interning import Names
from shard.lease import token_prefix
from shard.placement import slot_of
from shard.records import JobRecord
from shard.vocabulary import (
    MAX_ATTEMPTS_DEFAULT,
    Answer,
    Claimed,
    JobId,
    Lease,
    Micros,
    NewJobs,
    OrgId,
    QueueName,
    ShardName,
)

# How many times an act is tried again after what stood in its way was mended. Each turn mends one thing for good.
_TURNS_MAX = 6
_HOUR_US = 3_600_000_000
# A claim ends with the job that fills this much payload. The largest payload (1 MiB) and the other fields of the
# jobs added, its answer stays below 4 MiB, which is the most that gRPC clients take unless told otherwise.
CLAIM_BYTES_MAX = 2 * 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Nack:
    """One job given back. `delay_us` None: as the retry policy says. `kill`: dead at once."""

    lease: Lease
    error: str = ""
    delay_us: int | None = None
    kill: bool = False


class Store:
    """One shard's queue. `horizon_days`: how old a job id may be, and so how long a retried enqueue is recognised
    by it."""

    def __init__(self, database: Database, *, horizon_days: float = 7.0) -> None:
        self.name: ShardName = database.name
        self.names = Names(database)
        self._database = database
        self._floors = Floors()
        self._horizon_days = horizon_days
        self._accepted_since_fold = False

    # ── Producers ────────────────────────────────────────────────────────────────────────────────────────────────────

    async def enqueue(self, jobs: NewJobs) -> dict[int, JobId]:
        """Stores the jobs, all or none, each once. Answers the positions of those that were known already, with the
        id each is known under; all others are newly stored. Raises NotOwned, BadIds, ShardUnavailable."""
        if not len(jobs):
            return {}
        twins = _twins(jobs)
        if twins:
            alone = [at for at in range(len(jobs)) if at not in twins]
            try:
                known = {alone[at]: known_as for at, known_as in (await self._enqueue(jobs.only(alone))).items()}
            except BadIds as error:
                error.positions = [alone[at] for at in error.positions]
                raise
            # A first one that was known already need not hold the key any more: then its twin is new.
            again = [at for at, first in twins.items() if first in known and jobs.ids[at] != jobs.ids[first]]
            if again:
                known.update((again[at], known_as) for at, known_as in (await self.enqueue(jobs.only(again))).items())
            for at, first in twins.items():
                if at not in again:
                    known[at] = known.get(first, JobId(jobs.ids[first]))
            return known
        return await self._enqueue(jobs)

    async def _enqueue(self, jobs: NewJobs) -> dict[int, JobId]:
        """Same, for jobs that differ from each other in id and dedup key."""
        known: dict[int, JobId] = {}
        # The positions in `jobs` of what is in `part`.
        rest: list[int] = list(range(len(jobs)))
        stored: set[str] | None
        part = jobs
        for _ in range(_TURNS_MAX):
            try:
                stored = await self._insert(part)
            except _RefusedBatch:
                stored = set()
            if stored is None:
                return known
            missing = [at for at in range(len(part)) if part.ids[at] not in stored]
            try:
                found = await self._find_known(part, missing)
            except BadIds as error:
                error.positions = [rest[at] for at in error.positions]
                raise
            for at, known_as in found.items():
                known[rest[at]] = known_as
            # Stored now, or known before: what is left was in nobody's books when we looked, so it is tried again.
            left = [at for at in missing if rest[at] not in known]
            if not left:
                return known
            rest = [rest[at] for at in left]
            part = part.only(left)
        raise ShardUnavailable(self.name, f"{len(rest)} job(s) of org {jobs.org!r} stayed in the balance; try again")

    async def _insert(self, jobs: NewJobs) -> set[str] | None:
        """Runs the enqueue statement. None: every job was stored; else the ids of those that were."""
        queues = set(jobs.queues)
        count = len(jobs)
        for _ in range(_TURNS_MAX):
            ids = await self.names.make(jobs.org, queues)
            oldest, newest = min(jobs.ids), max(jobs.ids)
            parameters = {
                "lane_ids": arrays.numbers(ids.values()),
                "lane_orgs": [jobs.org] * len(ids),
                "lane_queues": arrays.names(ids),
                "oldest_ms": _made_at_ms(oldest),
                "newest_ms": _made_at_ms(newest),
                "horizon_us": round(self._horizon_days * 24 * _HOUR_US),
                "jobs": count,
                "ids": arrays.plain(jobs.ids),
                "queue_ids": arrays.numbers([ids[queue] for queue in jobs.queues]),
                "kinds": arrays.names(jobs.kinds),
                "payloads": jobs.payloads,
                "priorities": arrays.sparse_numbers(jobs.priorities, count),
                "attributes": arrays.sparse_texts(jobs.attributes, count),
                "run_at_us": arrays.sparse_numbers(jobs.run_at_us, count),
                "delay_us": arrays.sparse_numbers(jobs.delay_us, count),
                "expires_at_us": arrays.sparse_numbers(jobs.expires_at_us, count),
                "max_attempts": arrays.sparse_numbers(jobs.max_attempts, count),
                "retries": arrays.sparse_texts(jobs.retries, count),
                "dedup_keys": arrays.sparse_texts(jobs.dedup_keys, count),
                "dedup_window_us": arrays.sparse_numbers(jobs.dedup_window_us, count),
                "traces": arrays.sparse_texts(jobs.traces, count),
            }
            try:
                rows = await self._database.run(statements.ENQUEUE, parameters)
            except psycopg.Error as error:
                if error.sqlstate in {"WD001", "WD002"}:
                    raise _RefusedBatch from error
                raise
            now, ids_fit, admitted, stored, stored_ids, *_ = rows[0]
            if not ids_fit:
                raise self._outside_horizon(jobs, now)
            if len(admitted or ()) == len(ids):
                self._accepted_since_fold = True
                return None if stored == count else set(stored_ids or ())
            # Nothing was stored: a call's jobs are of one org, and so of one slot.
            await self._refuse_unowned(jobs.org)
            self.names.forget()
        raise ShardUnavailable(self.name, f"the queues of org {jobs.org!r} keep changing their numbers")

    async def _refuse_unowned(self, org: OrgId) -> None:
        slot = slot_of(org)
        for _, state, epoch in await self._database.run(
            statements.FIND_REFUSED_SLOTS, {"slots": arrays.numbers([slot])}
        ):
            raise NotOwned(self.name, org, slot, state=state, epoch=epoch)

    async def _find_known(self, jobs: NewJobs, positions: list[int]) -> dict[int, JobId]:
        part = jobs.only(positions)
        ids = await self.names.make(jobs.org, set(part.queues))
        rows = await self._database.run(
            statements.FIND_KNOWN,
            {
                "ids": arrays.plain(part.ids),
                "queue_ids": arrays.numbers([ids[queue] for queue in part.queues]),
                "dedup_keys": arrays.sparse_texts(part.dedup_keys, len(part)),
                "oldest_ms": _made_at_ms(min(part.ids)),
            },
        )
        foreign = {job_id for job_id, _, ours in rows if not ours}
        if foreign:
            raise IdsTaken([at for at in positions if jobs.ids[at] in foreign])
        known = {job_id: known_as for job_id, known_as, _ in rows}
        return {at: JobId(known[jobs.ids[at]]) for at in positions if jobs.ids[at] in known}

    def _outside_horizon(self, jobs: NewJobs, now: int) -> IdsOutsideHorizon:
        oldest_ms = -(-(now - round(self._horizon_days * 24 * _HOUR_US)) // 1000)
        newest_ms = (now + _HOUR_US) // 1000
        positions = [at for at, job_id in enumerate(jobs.ids) if not oldest_ms <= _made_at_ms(job_id) <= newest_ms]
        return IdsOutsideHorizon(positions, now=Micros(now), horizon_days=self._horizon_days)

    # ── Consumers ────────────────────────────────────────────────────────────────────────────────────────────────────

    async def claim(
        self, org: OrgId, queues: Sequence[QueueName], *, max_jobs: int, window_us: int, worker: str
    ) -> tuple[bytes, list[Claimed]]:
        """Leases up to `max_jobs` due jobs for `window_us`. Answers the jobs, by priority, then by run_at, and what
        their lease tokens begin with (shard/lease.py). Raises ShardUnavailable."""
        found = list((await self.names.find(org, queues)).values())
        # Equal priorities are served in turn: a busy queue named first must not starve one named last.
        first = random.randrange(len(found)) if found else 0
        queue_ids = found[first:] + found[:first]
        lease = secrets.randbits(63)
        claimed: list[Claimed] = []
        for _ in range(_TURNS_MAX):
            if not queue_ids or len(claimed) >= max_jobs:
                break
            ids, priorities, floors = self._floors.lanes(queue_ids)
            rows = await self._database.run(
                statements.CLAIM,
                {
                    "org": org,
                    "queues": arrays.names(queues),
                    "lane_ids": arrays.numbers(ids),
                    "lane_priorities": arrays.numbers(priorities),
                    "lane_floors_us": arrays.numbers(floors),
                    "max_jobs": max_jobs - len(claimed),
                    "bytes_max": CLAIM_BYTES_MAX,
                    "lease": lease,
                    "window_us": window_us,
                    "worker": worker,
                },
            )
            taken = list(map(Claimed._make, rows))
            self._floors.claimed(taken)
            unfit = [job for job in taken if job.expired or job.attempt > (job.max_attempts or MAX_ATTEMPTS_DEFAULT)]
            if not unfit:
                claimed += taken
                break
            # These were taken off the queue only to be set aside; others may wait behind them.
            aside = {job.id for job in unfit}
            claimed += [job for job in taken if job.id not in aside]
            try:
                await self._set_aside(org, unfit, lease)
            except ShardUnavailable:
                # What fits is leased by now, and nobody else can give it out. The rest is tried again after its window.
                if not claimed:
                    raise
                break
        claimed.sort(key=lambda job: (job.priority, job.run_at))
        return token_prefix(self.name, lease), claimed

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
                    "outcomes": "{}",
                    "errors": "{}",
                    "reasons": [f"out of attempts ({job.attempt - 1}), the last one expired" for job in exhausted],
                    "org": org,
                },
            )

    async def ack(self, org: OrgId, leases: Sequence[Lease], results: Sequence[bytes | None]) -> list[Answer]:
        """Finishes jobs; a result (≤ 64 KiB) is kept with each that has one."""
        rows = await partitions.finish(
            self._database,
            statements.ACK,
            {
                **_named(leases),
                "results": list(results) if any(result is not None for result in results) else [],
                "jobs": len(leases),
                "org": org,
            },
        )
        acked, acked_ids, acked_leases = rows[0]
        if acked == len(leases):
            return [Answer.OK] * len(leases)
        return await self._answers(org, leases, zip(acked_ids or (), acked_leases or (), strict=True), ended_as="acked")

    async def nack(self, org: OrgId, nacks: Sequence[Nack]) -> list[Answer]:
        """Gives jobs back: to run again after a delay, or dead when attempts are used up or the nack kills."""
        leases = [nack.lease for nack in nacks]
        rows = await self._database.run(statements.INSPECT_LEASES, {**_named(leases), "org": org})
        held = {Lease(job_hex=_hex(job_id), number=number): rest for job_id, number, *rest in rows}
        again: list[tuple[Nack, int]] = []
        over: list[tuple[Nack, str]] = []
        for nack in nacks:
            if nack.lease not in held:
                continue
            attempt, max_attempts, policy = held[nack.lease]
            if nack.kill:
                over.append((nack, "killed"))
                continue
            fate = retry.fate(retry.from_json(policy), attempt=attempt, max_attempts=max_attempts, luck=random.random())
            match fate:
                case retry.Bury(reason=reason):
                    over.append((nack, reason))
                case retry.RetryAfter(delay_us=delay):
                    again.append((nack, delay if nack.delay_us is None else nack.delay_us))
        done: list[tuple[str, int]] = []
        if again:
            parameters = {
                **_named([nack.lease for nack, _ in again]),
                "delays_us": arrays.numbers(delay for _, delay in again),
                "errors": [nack.error for nack, _ in again],
                "org": org,
            }
            done += await self._database.run(statements.RETRY, parameters)
        if over:
            parameters = {
                **_named([nack.lease for nack, _ in over]),
                "outcomes": ["nacked"] * len(over),
                "errors": [nack.error for nack, _ in over],
                "reasons": [reason for _, reason in over],
                "org": org,
            }
            done += await self._database.run(statements.BURY, parameters)
        return await self._answers(org, leases, done, ended_as="nacked")

    async def extend(self, org: OrgId, leases: Sequence[Lease], *, window_us: int) -> list[Answer]:
        """Prolongs leases: each then ends no earlier than `window_us` from now."""
        return await self._touch(statements.EXTEND, org, leases, {"window_us": window_us}, ended_as=None)

    async def release(self, org: OrgId, leases: Sequence[Lease]) -> list[Answer]:
        """Gives jobs back at once, the attempt uncounted."""
        return await self._touch(statements.RELEASE, org, leases, {}, ended_as="released")

    async def _touch(
        self,
        statement: bytes,
        org: OrgId,
        leases: Sequence[Lease],
        more: dict[str, object],
        *,
        ended_as: str | None,
    ) -> list[Answer]:
        rows = await self._database.run(statement, {**_named(leases), **more, "org": org})
        return await self._answers(org, leases, rows, ended_as=ended_as)

    async def _answers(
        self, org: OrgId, leases: Sequence[Lease], done: Iterable[tuple[str, int]], *, ended_as: str | None
    ) -> list[Answer]:
        """OK for what was done now, or by an earlier try of the same call; STALE or NOT_FOUND for the rest. `done`
        are job ids with the numbers of their leases: a call may name a job by a live lease and by an ended one."""
        done_now = {Lease(job_hex=_hex(job_id), number=number) for job_id, number in done}
        missed = [lease for lease in leases if lease not in done_now]
        if not missed:
            return [Answer.OK] * len(leases)
        oldest_ms = min(int(lease.job_hex[:12], 16) for lease in missed)
        rows = await self._database.run(statements.EXPLAIN_MISS, {**_named(missed), "org": org, "oldest_ms": oldest_ms})
        explained: dict[Lease, Answer] = {}
        for lease, (how, known) in zip(missed, rows, strict=True):
            same = ended_as is not None and how == ended_as
            explained[lease] = Answer.OK if same else Answer.STALE if known else Answer.NOT_FOUND
        return [explained.get(lease, Answer.OK) for lease in leases]

    # ── Both ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    async def cancel(self, org: OrgId, ids: Sequence[JobId], *, reason: str) -> list[Answer]:
        """Cancels jobs that have not finished; STALE for those that have."""
        answers: dict[JobId, Answer] = {}
        rest: Sequence[JobId] = list(dict.fromkeys(ids))
        for _ in range(_TURNS_MAX):
            rows = await partitions.finish(
                self._database,
                statements.CANCEL,
                {"ids": arrays.plain(rest), "org": org, "reason": reason or "cancelled"},
            )
            answers.update((JobId(row[0]), Answer.OK) for row in rows)
            missed = [job_id for job_id in rest if job_id not in answers]
            states = {record.id: record.state for record in await self.get(org, missed, include_payload=False)}
            for job_id in missed:
                match states.get(job_id):
                    case None:
                        answers[job_id] = Answer.NOT_FOUND
                    case "cancelled":
                        answers[job_id] = Answer.OK
                    case "succeeded":
                        answers[job_id] = Answer.STALE
                    case _:
                        # It was on its way between two tables, dead or redriven, while the statement looked at both.
                        pass
            rest = [job_id for job_id in missed if job_id not in answers]
            if not rest:
                return [answers[job_id] for job_id in ids]
        raise ShardUnavailable(self.name, f"{len(rest)} job(s) of org {org!r} would not stand still; try again")

    async def get(self, org: OrgId, ids: Sequence[JobId], *, include_payload: bool) -> list[JobRecord]:
        """The jobs with these ids, in no particular order, wherever they are on this shard."""
        if not ids:
            return []
        rows = await self._database.run(
            statements.GET_JOBS,
            {
                "org": org,
                "ids": arrays.plain(ids),
                "include_payload": include_payload,
                "oldest_ms": _made_at_ms(min(ids)),
            },
        )
        return list(map(JobRecord._make, rows))

    async def fold_tally(self) -> None:
        """Keeps the tally of accepted jobs short; does nothing if this store has accepted none since the last time."""
        if self._accepted_since_fold:
            self._accepted_since_fold = False
            await self._database.run(statements.FOLD_TALLY, {})

    async def sweep(self) -> int:
        """Puts the floor of every lane in use where it belongs, and has the numbers of their queues proved. Answers how
        many lanes were looked at."""
        queues = self._floors.to_sweep()
        await self.names.prove(queues)
        swept = 0
        for at in range(0, len(queues), 100):
            ids, priorities = lanes_of(queues[at : at + 100])
            rows = await self._database.run(
                statements.SWEEP,
                {
                    "lane_ids": arrays.numbers(ids),
                    "lane_priorities": arrays.numbers(priorities),
                    "guard_us": GUARD_US,
                },
            )
            for queue_id, priority, floor in rows:
                self._floors.swept(queue_id, priority, floor)
            swept += len(rows)
        return swept


class _RefusedBatch(Exception):
    """The enqueue was rolled back: a job of it has finished or died before, or has the id of another org's job."""


def _twins(jobs: NewJobs) -> dict[int, int]:
    """Jobs that repeat the id, or the queue and dedup key, of an earlier one of the batch: position → the first's."""
    twins: dict[int, int] = {}
    if len(set(jobs.ids)) < len(jobs):
        first_of: dict[str, int] = {}
        for at, job_id in enumerate(jobs.ids):
            first = first_of.setdefault(job_id, at)
            if first != at:
                twins[at] = first
    if len(jobs.dedup_keys) > 1:
        first_key: dict[tuple[str, str], int] = {}
        for at, key in sorted(jobs.dedup_keys.items()):
            if at not in twins:
                first = first_key.setdefault((jobs.queues[at], key), at)
                if first != at:
                    twins[at] = first
    return twins


def _made_at_ms(job_id: str) -> int:
    """The milliseconds since 1970 that a UUIDv7 begins with. As text, UUIDv7s sort by them."""
    return int(job_id[:8] + job_id[9:13], 16)


def _hex(job_id: str) -> str:
    return job_id.replace("-", "")


def _named(leases: Sequence[Lease]) -> dict[str, object]:
    return {
        "ids": arrays.plain(lease.job_hex for lease in leases),
        "leases": arrays.numbers(lease.number for lease in leases),
    }
