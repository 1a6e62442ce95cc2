"""Changes of jobs by id: cancel, alter, redrive, signal. If a job moves between tables during the change, or another
session has locked it, the change of this job is tried again."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from shard.errors import RowLocked, ShardUnavailable
from shard.job_id import to_hex
from shard.job_record import JobRecord
from shard.lease_token import lease_of
from shard.postgres import arrays, partitions
from shard.postgres import statements as postgres_statements
from shard.postgres.pool import Database
from shard.postgres.sql_loader import Statement
from shard.queue import statements
from shard.queue.revocation import Revocation
from shard.queue.row_locks import JobRow, RowLocks
from shard.vocabulary import Alteration, Answer, JobId, OrgId, QueueId, Signalled
from shard.workflow import NodeOf

# How many times a change is tried for jobs that moved between tables, or were locked, while the statement ran.
_TRIES_MAX = 6


class _Changed(NamedTuple):
    """The answers for the jobs that a statement has changed. `ran_before`: see Rows in shard/postgres/pool.py."""

    answers: dict[JobId, Answer]
    ran_before: bool = False


class JobChanges:
    """Changes jobs of one shard. `get` returns the jobs with these ids, without their large columns. `visible`,
    `revoked` and `settled` are callbacks of a Store (shard/queue/store.py)."""

    def __init__(
        self,
        database: Database,
        locks: RowLocks[JobRow],
        get: Callable[[OrgId, Sequence[JobId]], Awaitable[Sequence[JobRecord]]],
        *,
        visible: Callable[[set[QueueId]], None],
        revoked: Callable[[Sequence[Revocation]], None],
        settled: Callable[[Iterable[str]], None],
    ) -> None:
        self._database = database
        self._locks = locks
        self._get = get
        self._visible = visible
        self._revoked = revoked
        self._settled = settled

    async def signal(self, org: OrgId, job_id: JobId, node: NodeOf, payload: bytes) -> Signalled:
        outcomes: list[str] = []

        async def act(free: Sequence[JobId]) -> _Changed:
            parameters = {"org": org, "id": job_id, "node": str(node), "payload": payload}
            rows = await partitions.finish(self._database, statements.SIGNAL, parameters)
            if not rows:
                return _Changed({})
            ((what, freed_in),) = rows
            outcomes.append(what)
            if what == "taken":
                self._settled([to_hex(job_id)])
            if freed_in:
                self._visible(set(freed_in))
            return _Changed({job_id: Answer.DEPARTING if what == "departing" else Answer.OK})

        (answer,) = await self._change(
            org, [job_id], act, {"succeeded": Answer.OK, "cancelled": Answer.CANCELLED, "dead": Answer.STALE}
        )
        if "repeated" in outcomes:
            # The commit of the earlier signal may still be waiting for the standby.
            await self._database.run(postgres_statements.WAIT_FOR_STANDBY, {})
        # If the answer of the first run was lost, the next run finds the signal of the first run, and returns
        # "repeated". At most one call may be told that its signal counts.
        return Signalled(answer, is_first="taken" in outcomes)

    async def cancel(self, org: OrgId, ids: Sequence[JobId], *, reason: str) -> list[Answer]:
        async def act(free: Sequence[JobId]) -> _Changed:
            rows = await partitions.finish(
                self._database,
                statements.CANCEL,
                {"ids": arrays.plain(free), "org": org, "reason": reason or "cancelled"},
            )
            self._settled(to_hex(JobId(name)) for name, *_ in rows)
            ended = [(worker, lease_of(name, lease)) for name, _, lease, worker, _ in rows if lease is not None]
            if ended:
                self._revoked(Revocation.by_worker(org, Answer.CANCELLED, ended))
            freed_in = {queue_id for *_, freed in rows for queue_id in freed or ()}
            if freed_in:
                self._visible(freed_in)
            return _Changed({JobId(name): Answer.DEPARTING if departing else Answer.OK for name, departing, *_ in rows})

        # If a job moved between the tables job and dead while the statement read them, the statement may not find it.
        # Such a job has none of the states below, so its change is tried again.
        return await self._change(org, ids, act, {"cancelled": Answer.OK, "succeeded": Answer.STALE})

    async def alter(self, org: OrgId, ids: Sequence[JobId], alteration: Alteration) -> list[Answer]:
        act = partial(self._show, statements.ALTER, {"org": org, **alteration._asdict()})
        stale = dict.fromkeys(("blocked", "leased", "dead", "succeeded"), Answer.STALE)
        return await self._change(org, ids, act, {"cancelled": Answer.CANCELLED, **stale})

    async def redrive(self, org: OrgId, ids: Sequence[JobId]) -> list[Answer]:
        act = partial(self._show, statements.REDRIVE, {"org": org})
        live = ("scheduled", "ready", "leased")
        stale = dict.fromkeys(("blocked", *live, "succeeded"), Answer.STALE)
        return await self._change(org, ids, act, {"cancelled": Answer.CANCELLED, **stale}, changed_in=live)

    async def _show(self, statement: Statement, parameters: Mapping[str, object], ids: Sequence[JobId]) -> _Changed:
        """Runs a statement that may make jobs visible, and notifies the wait room about their queues."""
        rows = await self._database.run(statement, {**parameters, "ids": arrays.plain(ids)})
        self._visible({queue_id for _, queue_id in rows if queue_id is not None})
        return _Changed(
            {JobId(name): Answer.DEPARTING if queue_id is None else Answer.OK for name, queue_id in rows},
            ran_before=rows.ran_before,
        )

    async def _change(
        self,
        org: OrgId,
        ids: Sequence[JobId],
        act: Callable[[Sequence[JobId]], Awaitable[_Changed]],
        missed_in: Mapping[str, Answer],
        *,
        changed_in: Collection[str] = (),
    ) -> list[Answer]:
        """Changes jobs by id. `act` changes the jobs that it can change, and returns the answers for them. `missed_in`:
        the answers for the other jobs, by their state. A job in none of these states has changed while the statement
        ran, so its change is tried again. `changed_in`: states in which the answer is OK if an earlier run, whose
        answer was lost, may have changed the job."""
        answers: dict[JobId, Answer] = {}
        done_before: list[JobId] = []
        ran_before = False
        remaining: Sequence[JobId] = list(dict.fromkeys(ids))
        ids_by_row = {(org, to_hex(job_id)): job_id for job_id in remaining}
        locked = {ids_by_row[row] for row in await self._locks.expect(ids_by_row)}
        for _ in range(_TRIES_MAX):
            free = [job_id for job_id in remaining if job_id not in locked]
            if not free:
                break
            try:
                changed = await act(free)
            except RowLocked:
                locked |= {ids_by_row[row] for row in await self._locks.find(ids_by_row) if ids_by_row[row] in free}
                continue
            answers.update(changed.answers)
            ran_before = ran_before or changed.ran_before
            missed = [job_id for job_id in free if job_id not in answers]
            records = await self._get(org, missed)
            states = {record.id: record.state for record in records}
            for job_id in missed:
                if job_id not in states:
                    answers[job_id] = Answer.NOT_FOUND
                elif ran_before and states[job_id] in changed_in:
                    answers[job_id] = Answer.OK
                    done_before.append(job_id)
                elif states[job_id] in missed_in:
                    answers[job_id] = missed_in[states[job_id]]
                    if answers[job_id] is Answer.OK:
                        done_before.append(job_id)
            remaining = [job_id for job_id in missed if job_id not in answers]
        if locked:
            more = f" (and {len(locked) - 1} more)" if len(locked) > 1 else ""
            raise RowLocked(self._database.name, f"job {min(locked)}{more}")
        if not remaining:
            if done_before:
                # The commit of the earlier call may still be waiting for the standby.
                await self._database.run(postgres_statements.WAIT_FOR_STANDBY, {})
                # The answer of the run that ended these jobs may be lost. Then nobody was notified, so notify now.
                self._settled(map(to_hex, done_before))
            return [answers[job_id] for job_id in ids]
        raise ShardUnavailable(
            self._database.name, f"{len(remaining)} job(s) of org {org!r} kept changing during the call; try again"
        )
