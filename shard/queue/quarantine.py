"""Quarantines, on one shard, the kinds of jobs whose leases keep expiring because the jobs crash the workers that run
them (docs/decisions/0064-kinds-that-crash-their-workers.md).

Claims record crashes and set jobs of quarantined kinds aside. Sweeps judge the crashes, let one job of a kind through
at a time, and release the jobs that are set aside when their kind is no longer quarantined. This process remembers
which kinds are quarantined, and reads them again at each sweep or notification. What it remembers is a hint (invariant
I7): a claim asks the database about each job whose kind is remembered, and about each job whose lease had expired. So a
wrong hint only lets a few jobs through, or costs a statement.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from enum import Enum, auto
from typing import NamedTuple, NoReturn

from shard import metrics
from shard.errors import TooManyQuarantines, UnknownQueue
from shard.job_record import JobRecord
from shard.postgres import arrays
from shard.postgres.pool import Database
from shard.queue import statements
from shard.queue.enqueue import find_refused
from shard.queue.queue_ids import Name
from shard.vocabulary import Claimed, JobId, JobState, Micros, OrgId, Outcome, QueueId, QueueName

_log = logging.getLogger(__name__)

# The pause before the first trial of a kind. The pause doubles after each trial that crashes.
PAUSE_S = 60
PAUSE_S_MAX = 3600
# How many kinds of an org may be quarantined on a shard. After each change, every router process reads all of these
# kinds.
KINDS_MAX = 1_000
# How many kinds one sweep judges by their crashes, and how many trials one sweep begins.
_JUDGED_MAX = 20
_TRIALS_MAX = 100
# How many jobs one statement releases, and how many of these statements one sweep runs.
_RELEASED_AT_ONCE = 1_000
_RELEASES_MAX = 10
_NO_KINDS: frozenset[str] = frozenset()

# Returns the jobs with these ids that the shard still knows.
_Get = Callable[[OrgId, Sequence[JobId]], Awaitable[Sequence[JobRecord]]]


class Verdict(Enum):
    """What became of a trial."""

    WAITS = auto()
    PROPER = auto()
    CRASHED = auto()
    # The job was cancelled, or the shard does not know it any more. The trial has shown nothing.
    GONE = auto()


class _Quarantined(NamedTuple):
    """A quarantined kind. The fields have the order of read_quarantines.sql's columns."""

    queue_id: QueueId
    org: OrgId
    queue: QueueName
    kind: str
    trial_id: JobId | None
    trial_at: Micros | None
    # False: the org is moving away, and the other shard counts this kind.
    is_owned: bool
    # False: the org is moving, and the job of the trial may be on the other shard.
    is_whole: bool


class Quarantine:
    """The quarantined kinds of one shard. `get` looks jobs up by id. Methods that ask the database raise
    ShardUnavailable."""

    def __init__(self, database: Database, get: _Get) -> None:
        self._database = database
        self._get = get
        # Called when a kind was quarantined or released, so that other routers are told.
        self.on_changed: Callable[[], None] = lambda: None
        self._kinds: Mapping[Name, frozenset[str]] = {}
        self._count = metrics.QUARANTINED_KINDS.labels(database.name)

    def kinds(self, org: OrgId, queue: QueueName) -> frozenset[str]:
        """Returns the kinds of a queue that are quarantined, as far as this router knows."""
        return self._kinds.get((org, queue), _NO_KINDS)

    async def contain(
        self, org: OrgId, jobs: Sequence[Claimed], ending: Collection[JobId], *, lease: int
    ) -> set[JobId]:
        """Checks jobs that were just leased with this lease number. Records crashes, and sets aside the jobs whose kind
        is quarantined. Returns the jobs that keep their lease. `ending`: the jobs that the caller is about to mark dead
        or to cancel, because they have no attempt left or their `expires_at` has passed."""
        rows: list[tuple[str]] = await self._database.run(
            statements.CONTAIN,
            {
                "ids": arrays.plain(job.id for job in jobs),
                "lost": arrays.plain("t" if job.expired_lease is not None else "f" for job in jobs),
                "ends": arrays.plain("t" if job.id in ending else "f" for job in jobs),
                "lease": lease,
                "org": org,
            },
        )
        return {JobId(job_id) for (job_id,) in rows}

    async def refresh(self) -> list[_Quarantined]:
        """Reads which kinds are quarantined."""
        rows = list(map(_Quarantined._make, await self._database.run(statements.READ_QUARANTINES, {})))
        kinds: dict[Name, set[str]] = defaultdict(set)
        for row in rows:
            kinds[row.org, row.queue].add(row.kind)
        self._kinds = {name: frozenset(of_queue) for name, of_queue in kinds.items()}
        self._count.set(sum(row.is_owned for row in rows))
        return rows

    def forget(self) -> None:
        """Forgets all kinds. Call this when a sweep has seen that no kind is quarantined, and that there is nothing to
        judge or to release."""
        self._kinds = {}
        self._count.set(0)

    async def add(
        self, org: OrgId, queue: QueueName, kind: str, reason: str, *, epoch: int, draining: bool = False
    ) -> None:
        """Quarantines a kind until `release` is called. `epoch` and `draining` have the same meaning as for
        QueueAdmin.alter_queue. Raises UnknownQueue, TooManyQuarantines, NotOwned."""
        parameters = _named(org, queue, kind, epoch, draining=draining)
        bounds = {"pause_s": PAUSE_S, "kinds_max": KINDS_MAX}
        if not await self._database.run(statements.ADD_QUARANTINE, {**parameters, **bounds, "reason": reason}):
            await self._refuse(org, queue, epoch)
        self.on_changed()
        await self.refresh()

    async def release(self, org: OrgId, queue: QueueName, kind: str, *, epoch: int, draining: bool = False) -> bool:
        """Ends the quarantine of a kind. Returns whether the kind was quarantined. Also returns True if a run whose
        answer was lost may have ended the quarantine. Later sweeps release the jobs of the kind. Raises UnknownQueue,
        NotOwned."""
        parameters = _named(org, queue, kind, epoch, draining=draining)
        rows = await self._database.run(statements.RELEASE_QUARANTINE, parameters)
        if not rows:
            await self._refuse(org, queue, epoch)
        self.on_changed()
        await self.refresh()
        return bool(rows[0][0]) or rows.ran_before

    async def _refuse(self, org: OrgId, queue: QueueName, epoch: int) -> NoReturn:
        for error in (await find_refused(self._database, [(org, epoch)])).values():
            raise error
        names = {"orgs": arrays.texts([org]), "queues": arrays.names([queue])}
        if await self._database.run(statements.FIND_QUEUE_IDS, names):
            raise TooManyQuarantines(org, kinds_max=KINDS_MAX)
        raise UnknownQueue(org, queue)

    async def sweep(self) -> set[QueueId]:
        """Judges crashes and trials, begins trials, and releases jobs. Returns the queues in which jobs may have become
        ready."""
        await self._database.run(statements.FORGET_CRASHES, {})
        await self._judge_crashes()
        for row in await self.refresh():
            if row.is_whole and row.trial_id is not None and row.trial_at is not None:
                await self._judge_trial(row, row.trial_id, row.trial_at)
        begun = await self._database.run(statements.BEGIN_TRIALS, {"trials_max": _TRIALS_MAX})
        ready = {queue_id for (queue_id,) in begun}
        for _ in range(_RELEASES_MAX):
            rows = await self._database.run(statements.RELEASE_SET_ASIDE, {"rows": _RELEASED_AT_ONCE})
            ready.update(queue_id for (queue_id,) in rows)
            if len(rows) < _RELEASED_AT_ONCE:
                break
        return ready

    async def _judge_crashes(self) -> None:
        """If kinds of an org have too many crashes, quarantines the kind with the most crashes. Then forgets all
        crashes of the org: jobs of the quarantined kind may have caused the crashes of the other kinds."""
        judged: set[OrgId] = set()
        for queue_id, org, kind, allowed, jobs in await self._database.run(
            statements.FIND_SUSPECTS, {"kinds_max": _JUDGED_MAX}
        ):
            if org in judged:
                continue
            acquitted = await self._acquitted(org, [JobId(job_id) for job_id in dict.fromkeys(jobs)])
            crashes = sum(job_id not in acquitted for job_id in jobs)
            parameters = {"queue_id": queue_id, "kind": kind}
            if crashes < allowed:
                await self._database.run(statements.ACQUIT, {**parameters, "jobs": arrays.plain(acquitted)})
                continue
            judged.add(org)
            if await self._database.run(
                statements.QUARANTINE_KIND,
                {**parameters, "org": org, "crashes": crashes, "pause_s": PAUSE_S, "kinds_max": KINDS_MAX},
            ):
                self.on_changed()
                _log.warning(
                    "shard %r: kind %r of org %r is quarantined after %d crashes",
                    self._database.name,
                    kind,
                    org,
                    crashes,
                )

    async def _acquitted(self, org: OrgId, jobs: Sequence[JobId]) -> set[JobId]:
        """Returns the jobs, of those given, whose crashes no longer count."""
        acquitted: set[JobId] = set()
        while jobs:
            records = await self._get(org, jobs)
            acquitted.update(record.id for record in records if record.whole and _ended_properly(record))
            # Records that are not whole lack their attempts. At least one record of each answer is whole.
            jobs = [record.id for record in records if not record.whole]
        return acquitted

    async def _judge_trial(self, row: _Quarantined, trial_id: JobId, trial_at: Micros) -> None:
        records = await self._get(row.org, [trial_id])
        parameters = {"queue_id": row.queue_id, "kind": row.kind, "trial_id": trial_id}
        match verdict(records[0] if records else None, trial_at):
            case Verdict.WAITS:
                pass
            case Verdict.PROPER:
                await self._database.run(statements.REOPEN_KIND, parameters)
                self.on_changed()
            case Verdict.CRASHED | Verdict.GONE as ended:
                crashed = ended is Verdict.CRASHED
                await self._database.run(
                    statements.END_TRIAL, {**parameters, "crashed": crashed, "pause_s_max": PAUSE_S_MAX}
                )


def _named(org: OrgId, queue: QueueName, kind: str, epoch: int, *, draining: bool) -> dict[str, object]:
    return {"org": org, "queue": queue, "kind": kind, "epoch": epoch, "draining": draining}


def verdict(record: JobRecord | None, trial_at: Micros) -> Verdict:
    """Returns the verdict on a trial that began at `trial_at`. `record` None: the shard does not know its job."""
    if record is None or record.state == JobState.CANCELLED.value:
        return Verdict.GONE
    outcomes = [attempt.outcome for attempt in record.attempts() if attempt.ended_at >= trial_at]
    if record.state == JobState.SUCCEEDED.value or Outcome.ACKED in outcomes or Outcome.NACKED in outcomes:
        return Verdict.PROPER
    # A time-out is no crash elsewhere, because its worker may be alive. But it does not show that the kind may be
    # released, and a next trial at once could take down one worker after another.
    if Outcome.EXPIRED in outcomes or Outcome.TIMED_OUT in outcomes:
        return Verdict.CRASHED
    return Verdict.GONE if record.state == JobState.DEAD.value else Verdict.WAITS


def _ended_properly(record: JobRecord) -> bool:
    """Returns whether a crash of this job no longer counts. This is so if the job has succeeded or was cancelled, or if
    its latest attempt, without released attempts, has not expired."""
    if record.state in (JobState.SUCCEEDED.value, JobState.CANCELLED.value):
        return True
    last = next((one.outcome for one in reversed(record.attempts()) if one.outcome is not Outcome.RELEASED), None)
    return last is not None and last is not Outcome.EXPIRED
