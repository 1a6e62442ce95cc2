"""The queue of one shard: enqueue, claim, settle, cancel, get.

Calls with the same purpose that arrive while other calls are running share a statement and a commit
(shard/queue/coalescer.py). The store remembers only hints (floors, queue ids). Without these hints its answers would be
the same, but slower. The store knows no gRPC, and never compares a Python clock with a time of the database.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Any

from shard.errors import IdsOutsideHorizon, NoAnswer, ShardUnavailable, UnknownQueue
from shard.job_id import made_at_ms
from shard.job_record import ANSWER_BYTES_MAX, JobRecord
from shard.lease_token import lease_of
from shard.limits import InFlightLimits, Limit, Measure
from shard.placement.slots import FIRST_EPOCH
from shard.postgres import arrays
from shard.postgres.clock import ShardClock
from shard.postgres.pool import Database
from shard.queue import act_metrics, explain, row_locks, statements
from shard.queue.claim import CLAIM_BYTES_MAX, Claimer, ClaimRequest, ClaimResult
from shard.queue.claim_floor import Floors
from shard.queue.coalescer import Coalescer, InFlight, SingleCall, one_by_one
from shard.queue.consumers_seen import ConsumersSeen
from shard.queue.enqueue import Enqueuer
from shard.queue.explain import BlockedFacts, JobFacts, QuarantineFacts, QueueFacts
from shard.queue.job_changes import JobChanges
from shard.queue.pending_enqueue import NOTHING_HANDED, Call, Handover
from shard.queue.quarantine import KINDS_MAX, Quarantine
from shard.queue.queue_ids import QueueIds
from shard.queue.queue_walk import QueueWalk
from shard.queue.revocation import Revocation
from shard.queue.settle import BYTES_PER_WEIGHT, VERBS, LeaseSettler, Settlement
from shard.queue.sweep import Due, Sweeper
from shard.queue.token_buckets import Draw, Drawn, TokenBuckets
from shard.vocabulary import (
    FINISHED,
    PRIORITIES,
    Alteration,
    Answer,
    JobId,
    JobState,
    Known,
    Lease,
    Micros,
    NewJobs,
    OrgId,
    QueueId,
    QueueName,
    ShardName,
    Signalled,
)
from shard.workflow import NodeOf

_log = logging.getLogger(__name__)

# How many times a job is read for an explanation, if it moves between tables or changes meanwhile.
_TRIES_MAX = 6
_UNRELEASED_MAX = 10_000
# Verbs after which a job may have ended.
_ENDING = frozenset({"ack", "nack"})
# This is large enough to be no bound: the number of waiting claims is bounded elsewhere, by the number of callers.
_CLAIMS_WEIGHT_MAX = 20_000_000
# Upper bound for the claims in one act. With large payloads a statement may serve only two claims, and each claim of an
# act waits until all claims of the act are served.
_CLAIMS_MAX = 100
# Calls that share no statement are bounded as well. Otherwise one org's calls could take all connections (invariant
# I4).
_SINGLE_CALLS_WEIGHT_MAX = 100


class Store:
    """One shard's queue. `on_visible` is called with the queues of jobs that can be claimed again, `on_revoked` with
    leases that were not ended by their consumer, and `on_settled` with jobs (as 32 hexadecimal digits) that may have
    ended.

    Every method that changes jobs raises ClockSetBack while `clock` knows that the shard's clock was set back."""

    def __init__(self, database: Database) -> None:
        self.name: ShardName = database.name
        self.names = QueueIds(database)
        self.walk = QueueWalk(database, self.names)
        self.clock = ShardClock(database)
        self.consumers_seen = ConsumersSeen(database, self.names)
        self.quarantine = Quarantine(
            database, partial(self._get, include_payload=False, bytes_max=ANSWER_BYTES_MAX, as_stored=True)
        )
        self.on_visible: Callable[[set[QueueId]], None] = _ignore
        self.on_revoked: Callable[[Sequence[Revocation]], None] = _ignore
        self.on_settled: Callable[[Iterable[str]], None] = _ignore
        self._database = database
        self._floors = Floors()
        self.sweeper = Sweeper(database, self.names, self._floors, self.quarantine)
        self._accepted_since_fold = False
        # Releases that failed while the shard was unavailable. The next sweep sends them again.
        self._unreleased: list[Settlement] = []
        locks = row_locks.of_jobs(database)
        self._enqueuer = Enqueuer(database, self.names, locks, self.clock)
        self._changes = JobChanges(
            database,
            locks,
            partial(self._get, include_payload=False, bytes_max=0),
            visible=lambda queues: self.on_visible(queues),
            revoked=lambda revocations: self.on_revoked(revocations),
            settled=lambda jobs: self.on_settled(jobs),
        )
        settler = LeaseSettler(database, locks, lambda queues: self.on_visible(queues))
        claimer = Claimer(
            database,
            self.names,
            self._floors,
            self.quarantine,
            lambda revocations: self.on_revoked(revocations),
            lambda queues: self.on_visible(queues),
            self.release_soon,
        )

        def overdue() -> ShardUnavailable:
            return ShardUnavailable(self.name, "earlier calls have not been answered yet")

        in_flight = InFlight()
        self._enqueues = Coalescer(
            act_metrics.recorded(self.name, "enqueue", self._enqueuer.enqueue, act_metrics.count_enqueued(self.name)),
            weight=_weight,
            key=lambda call: call.jobs.org,
            on_timeout=overdue,
            in_flight=in_flight,
            on_dropped=_tell_not_handed,
        )
        self._lookups = Coalescer(
            self._enqueuer.known, weight=len, key=lambda jobs: jobs.org, on_timeout=overdue, in_flight=in_flight
        )
        self._descriptions = Coalescer(
            self._enqueuer.describe,
            weight=lambda call: len(call[0]),
            key=lambda call: call[0].org,
            on_timeout=overdue,
            in_flight=in_flight,
        )
        self._claims = Coalescer(
            act_metrics.recorded(self.name, "claim", claimer.claim, act_metrics.count_claimed(self.name)),
            weight=lambda request: request.max_jobs,
            key=_org,
            calls_max=_CLAIMS_MAX,
            waiting_max=_CLAIMS_WEIGHT_MAX,
            on_timeout=overdue,
            in_flight=in_flight,
            on_abandoned=self._return_claim,
        )
        self._settlements = {
            verb: Coalescer(
                act_metrics.recorded(self.name, verb, settler.settle, act_metrics.count_settled(self.name, verb)),
                weight=Settlement.weight,
                key=_org,
                on_timeout=overdue,
                in_flight=in_flight,
            )
            for verb in VERBS
        }
        self._buckets = TokenBuckets(database)
        self._draws = Coalescer(
            self._buckets.draw, weight=lambda _: 1, key=lambda draw: draw.org, on_timeout=overdue, in_flight=in_flight
        )
        self._single_calls = Coalescer[SingleCall, Any](
            one_by_one,
            weight=lambda call: call.weight,
            key=_org,
            on_timeout=overdue,
            in_flight=in_flight,
            weight_max=_SINGLE_CALLS_WEIGHT_MAX,
        )

    # ── Producers ────────────────────────────────────────────────────────────────────────────────────────────────────

    async def enqueue(
        self, jobs: NewJobs, handover: Handover | None = None, *, epoch: int = FIRST_EPOCH
    ) -> dict[int, JobId]:
        """Stores all of the jobs or none, and each job once. `epoch`: the epoch of the placement by which the caller
        has chosen this shard. Before this call, the caller must ask the slot's former owners whether they know the jobs
        (`known`).

        Returns the positions of jobs that the shard knew already, each with the id of the known job; all other jobs are
        newly stored. Raises NotOwned, BadIds, TooManyQueues, ShardUnavailable, TooManyWaiting."""
        call = Call(jobs, handover, epoch)
        if not len(jobs):
            _tell_not_handed(call)
            return {}
        if self.clock.trouble is not None:
            _tell_not_handed(call)
            self.clock.check()
        self._accepted_since_fold = True
        try:
            self._enqueuer.refuse_outside_horizon(jobs.ids)
        except IdsOutsideHorizon:
            _tell_not_handed(call)
            raise
        return await self._enqueues.submit(call)

    async def known(self, jobs: NewJobs) -> dict[int, JobId]:
        """Looks jobs up by id and dedup key. Before an enqueue, routers call this on the former owners of the slot.

        Returns the positions of jobs that this shard knows, each with the id of the known job. Raises ShardUnavailable,
        TooManyWaiting."""
        return await self._lookups.submit(jobs) if len(jobs) else {}

    async def describe(self, jobs: NewJobs, found: Sequence[JobId]) -> dict[int, Known]:
        """Describes the jobs `found`, which enqueues found instead of storing `jobs`. Returns, by position, the
        descriptions of the jobs that this shard has. Raises ShardUnavailable, TooManyWaiting."""
        return await self._descriptions.submit((jobs, found)) if len(jobs) else {}

    async def draw(self, draw: Draw) -> Drawn:
        """Draws tokens from a bucket of this shard, or gives tokens back. Raises RowLocked, ShardUnavailable,
        TooManyWaiting."""
        return await self._draws.submit(draw)

    async def count_backlog(self, org: OrgId, limit: Limit) -> int:
        """Returns the size of the backlog that this limit bounds: how many jobs have not ended, or how many bytes they
        have. The count stops at the limit's amount. Raises ShardUnavailable, TooManyWaiting."""

        async def count() -> int:
            parameters = {
                "org": org,
                "queue": limit.key.queue,
                "in_bytes": limit.key.measure is Measure.BACKLOG_BYTES,
                "counted_max": limit.amount,
            }
            ((counted,),) = await self._database.run(statements.COUNT_BACKLOG, parameters)
            return int(counted)

        counted: int = await self._single_calls.submit(SingleCall(org, 1, count))
        return counted

    # ── Consumers ────────────────────────────────────────────────────────────────────────────────────────────────────

    async def claim(
        self,
        org: OrgId,
        queues: Sequence[QueueName],
        *,
        max_jobs: int,
        window_us: int,
        worker: str,
        bytes_max: int = CLAIM_BYTES_MAX,
        in_flight: InFlightLimits | None = None,
    ) -> ClaimResult:
        """Leases up to `max_jobs` due jobs for `window_us` microseconds. Leases fewer jobs if they fill `bytes_max` or
        the limits of jobs in flight. Raises ShardUnavailable and TooManyWaiting. Raises RowLocked if other sessions
        hold a lock for too long that the claim needs, such as other claims if there are limits of jobs in flight."""
        self.clock.check()
        request = ClaimRequest(org, tuple(queues), max_jobs, window_us, worker, bytes_max, in_flight)
        while True:
            result = self._claims.submit(request)
            try:
                claimed = await result
            except asyncio.CancelledError:
                if not result.cancelled() and result.exception() is None:
                    # The jobs were leased just before the caller was cancelled.
                    self._return_claim(request, result.result())
                raise
            if claimed.jobs or not claimed.cut:
                return claimed

    async def count_in_flight(
        self, org: OrgId, queue: QueueName, limits: InFlightLimits
    ) -> tuple[int | None, int | None]:
        """Returns how many jobs of the org, and how many of this queue, are leased and count towards these limits. The
        counts stop at the limits. None: there is no such limit. Raises ShardUnavailable, TooManyWaiting."""

        async def count() -> tuple[int | None, int | None]:
            numbers = await self.names.find([(org, queue)])
            for number in numbers.values():
                ((of_org, of_queue),) = await self._database.run(
                    statements.COUNT_IN_FLIGHT, {"queue_id": number, **limits._asdict()}
                )
                return of_org, of_queue
            return (None if limits.of_org is None else 0, None if limits.of_queue is None else 0)

        counts: tuple[int | None, int | None] = await self._single_calls.submit(SingleCall(org, 1, count))
        return counts

    async def settle(self, call: Settlement) -> list[Answer]:
        """Ends or extends leases. Returns an answer for each lease. Raises RowLocked, ShardUnavailable,
        TooManyWaiting."""
        self.clock.check()
        answers = await self._settlements[call.verb].submit(call)
        if call.verb in _ENDING:
            # Report only leases that belong to the org. A caller may have guessed the id of another org's job, and must
            # not wake that org's callers, who wait for the end of the job (invariant I4).
            ended = zip(call.leases, answers, strict=True)
            self.on_settled(lease.job_hex for lease, answer in ended if answer is Answer.OK)
        return answers

    def release_soon(self, org: OrgId, leases: Sequence[Lease]) -> None:
        """Begins to release jobs that their consumer will not get. Does not wait for the end of the release. While the
        shard is unavailable, every sweep tries again."""
        if not leases:
            return
        call = Settlement.release(org, leases)
        try:
            self.clock.check()
            result = self._settlements[call.verb].submit(call)
        except NoAnswer as error:
            self._release_later(call, error)
        else:
            result.add_done_callback(partial(self._on_released, call))

    def _on_released(self, call: Settlement, result: asyncio.Future[list[Answer]]) -> None:
        if not result.cancelled() and (error := result.exception()) is not None:
            self._release_later(call, error)

    def _release_later(self, call: Settlement, error: BaseException) -> None:
        if isinstance(error, NoAnswer) and len(self._unreleased) < _UNRELEASED_MAX:
            self._unreleased.append(call)
        else:
            _log.warning("%d job(s) stay leased until their window ends: %s", len(call.leases), error)

    def _return_claim(self, request: ClaimRequest, result: ClaimResult) -> None:
        """Releases the jobs of a claim whose caller was cancelled."""
        if result.jobs:
            self.release_soon(request.org, [lease_of(job.id, job.lease) for job in result.jobs])

    # ── Both ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    async def cancel(self, org: OrgId, ids: Sequence[JobId], *, reason: str) -> list[Answer]:
        """Cancels jobs that have not finished. Returns an answer for each job: STALE if the job has succeeded,
        DEPARTING if it is on its way to another shard. Raises RowLocked, ShardUnavailable, TooManyWaiting."""
        self.clock.check()
        answers: list[Answer] = await self._single_calls.submit(
            SingleCall(org, len(ids), partial(self._changes.cancel, org, ids, reason=reason))
        )
        return answers

    async def alter(self, org: OrgId, ids: Sequence[JobId], alteration: Alteration) -> list[Answer]:
        """Changes jobs that are blocked, scheduled or ready. Returns an answer for each job. It is STALE if the job is
        leased or dead, or has succeeded. It is also STALE if the job is blocked and the change sets its time. It is
        DEPARTING if the job is on its way to another shard. Raises RowLocked, ShardUnavailable, TooManyWaiting."""
        self.clock.check()
        answers: list[Answer] = await self._single_calls.submit(
            SingleCall(org, len(ids), partial(self._changes.alter, org, ids, alteration))
        )
        return answers

    async def redrive(self, org: OrgId, ids: Sequence[JobId]) -> list[Answer]:
        """Makes dead jobs ready again. Returns an answer for each job: STALE if the job is live or has succeeded,
        DEPARTING if it is on its way to another shard. Raises RowLocked, ShardUnavailable, TooManyWaiting."""
        self.clock.check()
        answers: list[Answer] = await self._single_calls.submit(
            SingleCall(org, len(ids), partial(self._changes.redrive, org, ids))
        )
        return answers

    async def signal(self, org: OrgId, job_id: JobId, node: NodeOf, payload: bytes) -> Signalled:
        """Gives a signal to the job of this node, which must be a node that waits for a signal. The first signal
        becomes the result of the job. The answer is CANCELLED if the job was cancelled before, and DEPARTING if it is
        on its way to another shard. Raises RowLocked, ShardUnavailable, TooManyWaiting."""
        self.clock.check()
        signalled: Signalled = await self._single_calls.submit(
            SingleCall(org, 1, partial(self._changes.signal, org, job_id, node, payload))
        )
        return signalled

    async def get(
        self,
        org: OrgId,
        ids: Sequence[JobId],
        *,
        include_payload: bool,
        bytes_max: int = ANSWER_BYTES_MAX,
        as_stored: bool = False,
    ) -> list[JobRecord]:
        """Returns the jobs with these ids, in the order of the ids, from any table of this shard. The jobs that follow
        the job that fills `bytes_max` are not whole: they lack their large columns. A job without retry settings of its
        own has the settings of its queue, unless `as_stored` is true. Raises ShardUnavailable, TooManyWaiting."""
        call = partial(self._get, org, ids, include_payload=include_payload, bytes_max=bytes_max, as_stored=as_stored)
        records: list[JobRecord] = await self._single_calls.submit(SingleCall(org, len(ids), call))
        return records

    async def _get(
        self, org: OrgId, ids: Sequence[JobId], *, include_payload: bool, bytes_max: int, as_stored: bool = False
    ) -> list[JobRecord]:
        if not ids:
            return []
        rows = await self._database.run(
            statements.GET_JOBS,
            {
                "org": org,
                "ids": arrays.plain(ids),
                "include_payload": include_payload,
                "bytes_max": bytes_max,
                "as_stored": as_stored,
                "oldest_ms": made_at_ms(min(ids)),
            },
        )
        return list(map(JobRecord._make, rows))

    async def find_ended(self, jobs: Sequence[tuple[OrgId, str]]) -> list[int]:
        """Returns the positions of the jobs that are not live on this shard. `jobs`: the org of each job, and its id as
        32 hexadecimal digits. Raises ShardUnavailable."""
        orgs = {org: position for position, org in enumerate(dict.fromkeys(org for org, _ in jobs), start=1)}
        parameters = {
            "ids": arrays.plain([job for _, job in jobs]),
            "orgs": arrays.texts(list(orgs)),
            "org_positions": arrays.numbers([orgs[org] for org, _ in jobs]),
        }
        return [position - 1 for (position,) in await self._database.run(statements.FIND_ENDED, parameters)]

    async def explain_job(self, org: OrgId, job_id: JobId) -> JobFacts | None:
        """Returns the facts that decide when this job is leased. None: this shard does not know the job. Raises
        ShardUnavailable, TooManyWaiting."""
        facts: JobFacts | None = await self._single_calls.submit(
            SingleCall(org, 1, partial(self._explain_job, org, job_id))
        )
        return facts

    async def _explain_job(self, org: OrgId, job_id: JobId) -> JobFacts | None:
        for _ in range(_TRIES_MAX):
            records = await self._get(org, [job_id], include_payload=False, bytes_max=ANSWER_BYTES_MAX)
            if not records:
                return JobFacts(None) if await explain.was_deleted(self._database, org, job_id) else None
            (record,) = records
            if JobState(record.state) in FINISHED:
                return JobFacts(record)
            if JobState(record.state) is JobState.BLOCKED and record.workflow_node is not None:
                of = NodeOf.parse(record.workflow_node)
                return JobFacts(record, blocked=await explain.read_blocked(self._database, org, of))
            signal: BlockedFacts | None = None
            if record.may_await_signal and record.workflow_node is not None:
                signal = await explain.read_blocked(self._database, org, NodeOf.parse(record.workflow_node))
            floors = self._late_floors(org, record.queue)
            live, departing = await explain.read_live(self._database, org, record.queue, job_id, floors=floors)
            if departing or (live is None and JobState(record.state) is JobState.DEAD):
                return JobFacts(record, departing=departing)
            if live is not None and (live.leased, live.visible_at) == (
                record.leased_at is not None,
                record.run_at if record.deadline is None else record.deadline,
            ):
                # `group` is None if the job is set aside, or has just got a slot.
                group = await explain.read_group(self._database, org, record.queue, job_id) if live.waits else None
                found = await explain.read_quarantines(self._database, org, record.queue, record.kind)
                quarantine = next((one for one in found if one.trial_id != job_id), None)
                return JobFacts(record, live, group=group, quarantine=quarantine, signal=signal)
        raise ShardUnavailable(self.name, f"job {job_id} of org {org!r} kept changing during the call; try again")

    async def explain_queue(self, org: OrgId, queue: QueueName) -> QueueFacts:
        """Returns the facts about a queue: the jobs that it would give now, and its next jobs. Raises UnknownQueue,
        ShardUnavailable, TooManyWaiting."""
        floors = self._late_floors(org, queue)
        facts: QueueFacts | None = await self._single_calls.submit(
            SingleCall(org, 1, partial(explain.read_queue, self._database, org, queue, floors=floors))
        )
        if facts is None:
            raise UnknownQueue(org, queue)
        return facts

    async def quarantines(self, org: OrgId, queue: QueueName | None) -> list[QuarantineFacts]:
        """Returns the quarantined kinds of a queue of the org, or of all its queues. Raises ShardUnavailable,
        TooManyWaiting."""
        read = partial(explain.read_quarantines, self._database, org, queue, kinds_max=KINDS_MAX)
        found: list[QuarantineFacts] = await self._single_calls.submit(SingleCall(org, 1, read))
        return found

    def _late_floors(self, org: OrgId, queue: QueueName) -> list[Micros]:
        """Returns the times from which to look for the queue's jobs, by priority. If this router does not claim from
        the queue, all times are 0."""
        known = self.names.known(org, [queue])
        return self._floors.late(known[0]) if known else [Micros(0)] * len(PRIORITIES)

    async def finish(self) -> None:
        """Waits until all calls have ended, including releases for which no caller waits."""
        await self._enqueues.finish()
        await self._lookups.finish()
        await self._descriptions.finish()
        # Abandoned claims release their jobs, so the settlements come after the claims.
        await self._claims.finish()
        for settlements in self._settlements.values():
            await settlements.finish()
        await self._draws.finish()
        await self._single_calls.finish()

    def jobs_stored(self, queues: set[QueueId]) -> None:
        """Notes that schedules or workflows have stored or released jobs in these queues. Call this after the change
        was committed."""
        self._accepted_since_fold = True
        self.on_visible(queues)

    # ── Upkeep ───────────────────────────────────────────────────────────────────────────────────────────────────────

    async def fold_tally(self) -> None:
        """Folds the tally of accepted jobs into one row per org, if this store has accepted any jobs since it did so
        last."""
        if self._accepted_since_fold:
            self._accepted_since_fold = False
            await self._database.run(statements.FOLD_TALLY, {})

    async def forget_full_buckets(self) -> None:
        """Deletes the rows of full buckets, if this store has drawn from any bucket since it did so last."""
        await self._buckets.forget_full()

    def arrived(self, queues: Collection[QueueId]) -> None:
        """Notes that jobs of these queues have arrived from another shard. These jobs may be older than all jobs that
        were claimed on this shard."""
        self._floors.arrived(queues)

    def emptied(self, queues: Collection[QueueId]) -> None:
        """Notes that a claim for consumers of all orgs has probably taken the last jobs of these queues."""
        self._floors.emptied(queues)

    async def sweep(self, awaited: Iterable[QueueId] = ()) -> Due:
        """Sends failed releases again, and sweeps (shard/queue/sweep.py). Raises ShardUnavailable."""
        unreleased, self._unreleased = self._unreleased, []
        for call in unreleased:
            self.release_soon(call.org, call.leases)
        return await self.sweeper.sweep(awaited)


def _tell_not_handed(call: Call) -> None:
    if call.handover is not None:
        call.handover.tell(NOTHING_HANDED)


def _weight(call: Call) -> int:
    return len(call.jobs) + sum(map(len, call.jobs.payloads)) // BYTES_PER_WEIGHT


def _org(call: SingleCall | ClaimRequest | Settlement) -> OrgId | None:
    return call.org


def _ignore(_: object) -> None:
    """The default of on_visible, on_revoked and on_settled of a Store."""
