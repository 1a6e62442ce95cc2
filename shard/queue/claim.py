"""Claims jobs: leases due jobs of one shard. One statement serves several claim requests."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from shard import metrics
from shard.errors import ShardUnavailable
from shard.lease_token import draw_number, lease_of, token_prefix
from shard.limits import InFlightLimits
from shard.postgres import arrays, partitions
from shard.postgres.pool import Database
from shard.queue import statements
from shard.queue.bisect_errors import bisect_errors
from shard.queue.claim_floor import Floors
from shard.queue.quarantine import Quarantine
from shard.queue.queue_ids import QueueIds
from shard.queue.revocation import Revocation
from shard.vocabulary import MAX_ATTEMPTS_DEFAULT, Answer, Claimed, Lease, OrgId, QueueId, QueueName

# Upper bound for the statements of one act. Usually one statement serves all takers (requests). An act needs more
# statements if some of the jobs have expired or have no attempt left, or if the jobs are large: two jobs of 1 MiB fill
# a statement.
_RUNS_MAX = 8
# Upper bound for the sets of queues in one statement. In names of this module, `group` means such a set, and not a
# group of jobs.
_GROUPS_MAX = 64
# A claim ends with the job that fills this many bytes of payload, attributes and checkpoint. There is room for the
# largest job (1 MiB of payload, 36 KiB of attributes, 64 KiB of checkpoint), for the other fields of 1,000 jobs (up to
# 1,081 bytes each) and for the answers to 1,000 acks (37 bytes each). With all of these the answer stays below 4 MiB,
# the default limit of gRPC clients.
CLAIM_BYTES_MAX = 2 * 1024 * 1024 - 192 * 1024
_LARGEST_JOB_BYTES = (1024 + 36 + 64) * 1024
# A claim asks for at least this many bytes. A taker that may get fewer bytes counts as served. A statement has one
# limit of bytes: the smallest number that any of its takers may still get. With this lower bound, each of the _RUNS_MAX
# statements of an act may return at least this many bytes, and all of them together may return CLAIM_BYTES_MAX, as a
# single statement may. A taker that may get few bytes then does not reduce what the other takers get from the act.
CLAIM_BYTES_MIN = CLAIM_BYTES_MAX // _RUNS_MAX
# The memory that a job needs in addition to its payload, attributes and checkpoint.
JOB_BYTES = 500


def bytes_most(jobs: int) -> int:
    """Returns the most memory that this many jobs of one claim take. Callers reserve this memory before they claim."""
    return min(jobs * _LARGEST_JOB_BYTES, CLAIM_BYTES_MAX + _LARGEST_JOB_BYTES) + jobs * JOB_BYTES


class ClaimRequest(NamedTuple):
    """Asks for up to `max_jobs` jobs, with up to `bytes_max` (at least CLAIM_BYTES_MIN) of payload, attributes and
    checkpoint, from these queues of one org, leased for `window_us` (microseconds)."""

    org: OrgId
    queues: tuple[QueueName, ...]
    max_jobs: int
    window_us: int
    worker: str
    # The last job may exceed this bound. A claim may also end when it could get less than CLAIM_BYTES_MIN more.
    bytes_max: int = CLAIM_BYTES_MAX
    # The limits of jobs in flight of the org and, if the request names a single queue, of this queue. None: no such
    # limits.
    in_flight: InFlightLimits | None = None


class ClaimResult(NamedTuple):
    """The leased jobs, ordered by priority, then by run_at. `prefix` is the prefix of their lease tokens
    (shard/lease_token.py). `cut`: the act ended before the claim had got all that it may get, so there may be more
    jobs."""

    prefix: bytes
    jobs: list[Claimed]
    cut: bool = False

    @property
    def bytes(self) -> int:
        """How many bytes the payloads, attributes and checkpoints of the jobs have, as `bytes_max` counts them."""
        return sum(map(_size, self.jobs))


@dataclass(slots=True, kw_only=True, eq=False)
class _Taker:
    """One request of a batch, and what it has received so far."""

    request: ClaimRequest
    # The number that all leases of this taker get (shard/lease_token.py).
    number: int
    jobs: list[Claimed] = field(default_factory=list[Claimed])
    # True if the statement must run for this taker, or must run again. It must run again if some of the returned jobs
    # cannot run (such as expired jobs), or if the statement had no room for the taker's jobs.
    again: bool = True
    error: Exception | None = None
    # The queues in which a statement has locked rows that it then did not lease, because it had reached its limit of
    # bytes.
    cut: set[QueueId] = field(default_factory=set[QueueId])

    @property
    def remaining_jobs(self) -> int:
        return self.request.max_jobs - len(self.jobs)

    @property
    def remaining_bytes(self) -> int:
        return self.request.bytes_max - sum(map(_size, self.jobs))


class Claimer:
    """Leases jobs of one shard. Calls `revoked` with the leases that had expired before their jobs were leased again.
    Calls `visible` with queues whose jobs other claims may just have missed. Calls `release` with leases that no
    consumer will get; their attempts must not count."""

    def __init__(
        self,
        database: Database,
        names: QueueIds,
        floors: Floors,
        quarantine: Quarantine,
        revoked: Callable[[Sequence[Revocation]], None],
        visible: Callable[[set[QueueId]], None],
        release: Callable[[OrgId, Sequence[Lease]], None],
    ) -> None:
        self._database = database
        self._revoked = revoked
        self._visible = visible
        self._release = release
        self._names = names
        self._floors = floors
        self._quarantine = quarantine
        self._expired = metrics.LEASES_EXPIRED.labels(database.name)
        self._died = metrics.DEAD.labels(database.name)

    async def claim(self, requests: Sequence[ClaimRequest]) -> list[ClaimResult | Exception]:
        """Leases jobs to each request. Returns the result or the error of each, in order. A request that has got jobs
        gets a result even if an error occurred afterwards. Otherwise nobody could run these jobs before their window
        ends."""
        takers = [
            _Taker(request=request, number=draw_number(counted=request.in_flight is not None)) for request in requests
        ]
        unavailable: ShardUnavailable | None = None
        # The number of runs is bounded, because all takers wait for the end of the act. A taker that has got nothing
        # when the act ends claims again in another act.
        runs = 0
        while runs < _RUNS_MAX and unavailable is None and (waiting := _unserved(takers)):
            while waiting and unavailable is None:
                batch, waiting = _next_batch(waiting)
                runs += 1
                for taker, error in zip(batch, await bisect_errors(self._claim, batch), strict=True):
                    taker.error = error
                    if isinstance(error, ShardUnavailable):
                        unavailable = error
        cut = set[QueueId]().union(*(taker.cut for taker in takers))
        if cut:
            # Other claims have skipped the rows that were locked, so the consumers of these claims now assume that the
            # queues are empty.
            self._visible(cut)
        unserved = set(_unserved(takers)) if unavailable is None else set[_Taker]()
        results: list[ClaimResult | Exception] = []
        for taker in takers:
            error = taker.error or unavailable
            if taker.jobs or error is None:
                taker.jobs.sort(key=_order)
                prefix = token_prefix(self._database.name, taker.number)
                results.append(ClaimResult(prefix, taker.jobs, cut=taker in unserved or taker.error is not None))
            else:
                results.append(error)
        return results

    async def _claim(self, takers: Sequence[_Taker]) -> list[Exception | None]:
        """Runs the claim statement once. The sets of queues of any two takers must be equal or disjoint. Returns for
        each taker an error that occurred after its jobs were leased, or None. Raises errors that occurred before
        anything was leased.

        If the connection is lost before the answer arrives, the statement runs again on another connection. The first
        run may have leased jobs. No consumer gets these jobs: this process does not know them, and no index finds jobs
        by their leases. When their window ends, they can be claimed again. Their number is at most the number of jobs
        that the takers asked for."""
        groups: dict[tuple[OrgId, tuple[QueueName, ...]], list[_Taker]] = {}
        for taker in takers:
            taker.again = False
            groups.setdefault((taker.request.org, taker.request.queues), []).append(taker)
        columns = _Columns()
        queue_names: dict[QueueId, QueueName] = {}
        queue_ids = await self._names.find([(org, queue) for org, queues in groups for queue in queues])
        for (org, queues), group in groups.items():
            found = {queue: queue_ids[org, queue] for queue in queues if (org, queue) in queue_ids}
            if not found:
                continue
            columns.add(org, found, group, self._floors)
            queue_names.update((queue_id, queue) for queue, queue_id in found.items())
        if not queue_names:
            return [None] * len(takers)
        bytes_max = min(taker.remaining_bytes for taker in takers)
        arrivals = self._floors.arrivals
        floors = {queue_id: list(self._floors.of(queue_id)) for queue_id in queue_names}
        parameters = {**columns.parameters(), "bytes_max": bytes_max}
        statement = statements.CLAIM
        if (in_flight := takers[0].request.in_flight) is not None:
            statement = statements.CLAIM_WITHIN_LIMITS
            parameters.update(in_flight._asdict())
        rows: list[Any] = await self._database.run(statement, parameters)
        by_lease = {taker.number: taker for taker in takers}
        began_to_wait = any(row[7] is None for row in rows)
        if began_to_wait:
            # Rows without a lease are jobs of groups that were scheduled and have just become due. If such a job got a
            # group slot at once, it can be claimed now. The rows do not show for which takers they were, so the
            # statement runs again for all takers.
            self._visible({row[1] for row in rows if row[7] is None})
            rows = [row for row in rows if row[7] is not None]
        claimed = [Claimed(row[0], queue_names[row[1]], *row[2:]) for row in rows]
        # A window may end while a claim runs several times. A job of an earlier run can then be leased again, even with
        # the same lease number (invariant I2). Only the new lease counts.
        leased_again = {(by_lease[job.lease].request.org, job.id) for job in claimed}
        for taker in takers:
            taker.jobs = [job for job in taker.jobs if (taker.request.org, job.id) not in leased_again]
            taker.again |= began_to_wait
        unfit: dict[int, list[Claimed]] = {}
        suspects: dict[int, list[Claimed]] = {}
        for job in claimed:
            is_unfit = job.expired or job.attempt > (job.max_attempts or MAX_ATTEMPTS_DEFAULT)
            if is_unfit:
                unfit.setdefault(job.lease, []).append(job)
            kinds = self._quarantine.kinds(by_lease[job.lease].request.org, job.queue)
            if job.expired_lease is not None or (job.kind in kinds and not is_unfit):
                suspects.setdefault(job.lease, []).append(job)
            elif not is_unfit:
                by_lease[job.lease].jobs.append(job)
        # A claim that runs several times may lease a job twice with one lease number. The lease with that number has
        # not ended, so it must not be revoked.
        expired = [job for job in claimed if job.expired_lease not in (None, job.lease)]
        if expired:
            self._expired.inc(len(expired))
            self._revoke_expired(by_lease, expired)
        self._floors.claimed(zip([row[1] for row in rows], claimed, strict=True), arrivals=arrivals)
        if sum(map(_size, claimed)) >= bytes_max:
            # The statement serves one set of queues after another. It has locked rows that it did not lease: rows of
            # the last set from which it leased jobs, or of later sets. Claims that ran at the same time have skipped
            # these rows.
            served = {job.lease for job in claimed}
            last = max(at for at, group in enumerate(groups.values()) if any(taker.number in served for taker in group))
            for (org, queues), group in list(groups.items())[last:]:
                cut = {queue_ids[org, queue] for queue in queues if (org, queue) in queue_ids}
                self._floors.missed({queue_id: floors[queue_id] for queue_id in cut})
                for taker in group:
                    taker.again = True
                    taker.cut.update(cut)
        errors: dict[int, Exception] = {}
        for number, jobs in suspects.items():
            taker = by_lease[number]
            ending = {job.id for job in unfit.get(number, ())}
            fit = [job for job in jobs if job.id not in ending]
            try:
                leased = await self._quarantine.contain(taker.request.org, jobs, ending, lease=number)
            except Exception as error:  # noqa: BLE001 - the other takers must not fail because of it
                errors[number] = error
                # It is not known whether the kinds of these jobs are quarantined, so no consumer may get them.
                self._release(taker.request.org, [lease_of(job.id, number) for job in fit])
            else:
                taker.jobs += [job for job in fit if job.id in leased]
                taker.again |= any(job.id not in leased for job in fit)
        for number, jobs in unfit.items():
            taker = by_lease[number]
            try:
                await self._set_aside(taker.request.org, jobs, number)
            except Exception as error:  # noqa: BLE001 - the other takers must not fail because of it
                # The jobs remain leased, and can be claimed again when their window ends. If they were released now,
                # they would be claimed again at once, and the statement that ends them would fail again.
                errors[number] = error
            else:
                taker.again = True
        for number in errors:
            # This taker must not lease more jobs in this act. The new leases would have the same lease number as the
            # leases of the failed jobs, and a late release of these jobs could end the new leases.
            by_lease[number].again = False
        return [errors.get(taker.number) for taker in takers]

    def _revoke_expired(self, takers: Mapping[int, _Taker], claimed: Sequence[Claimed]) -> None:
        """Reports the leases that had expired before these jobs were leased again."""
        ended: dict[tuple[OrgId, Answer], list[tuple[str, Lease]]] = {}
        for job in claimed:
            answer = Answer.CANCELLED if job.expired else Answer.STALE
            lease = lease_of(job.id, job.expired_lease or 0)
            of_org = ended.setdefault((takers[job.lease].request.org, answer), [])
            of_org.append((job.expired_worker or "", lease))
        for (org, answer), leases in ended.items():
            self._revoked(Revocation.by_worker(org, answer, leases))

    async def _set_aside(self, org: OrgId, jobs: list[Claimed], lease: int) -> None:
        """Cancels the jobs whose `expires_at` has passed. Marks the other jobs dead, because they have no attempt
        left."""
        rows: list[Any] = []
        expired = [job.id for job in jobs if job.expired]
        if expired:
            parameters = {"ids": arrays.plain(expired), "lease": lease, "org": org}
            rows += await partitions.finish(self._database, statements.EXPIRE_UNRUN, parameters)
        exhausted = [job for job in jobs if not job.expired]
        if exhausted:
            count = len(exhausted)
            died = await self._database.run(
                statements.MARK_DEAD,
                {
                    "ids": arrays.plain(job.id for job in exhausted),
                    "leases": arrays.numbers([lease] * count),
                    "orgs": arrays.texts([org]),
                    "org_positions": "{}",
                    "outcomes": arrays.texts(()),
                    "failures": arrays.texts(()),
                    "logs": arrays.texts(()),
                    "reasons": arrays.texts(
                        [f"out of attempts ({job.attempt - 1}), the last one expired" for job in exhausted]
                    ),
                },
            )
            self._died.inc(len(died))
            rows += died
        freed_in = {queue_id for row in rows for queue_id in row[-1] or ()}
        if freed_in:
            self._visible(freed_in)


class _Columns:
    """Collects the parameters of the claim statement, one set of queues after another."""

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
        # The first queue is chosen at random. Otherwise, among jobs of one priority, consumers would get no jobs of a
        # queue that is named last while a queue that is named first is busy.
        names = list(queues)
        first = random.randrange(len(names))
        self._firsts.append(self._next)
        for name in names[first:] + names[:first]:
            self._groups.append(len(self._firsts))
            self._queue_ids.append(queues[name])
            self._orgs.append(org)
            self._queues.append(name)
            self._floors += floors.of(queues[name])
        self._max_jobs.append(sum(taker.remaining_jobs for taker in takers))
        for taker in takers:
            self._takers.append(taker)
            self._taker_firsts.append(self._next)
            self._next += taker.remaining_jobs

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
            "workers": arrays.texts([taker.request.worker for taker in self._takers]),
            "windows_us": arrays.numbers([taker.request.window_us for taker in self._takers]),
        }


def _unserved(takers: Sequence[_Taker]) -> list[_Taker]:
    """Returns the takers that need another statement. The order is by the bytes that were received, added up for takers
    with the same org and the same queues. The smallest sum comes first, because the first takers of a statement may
    leave no room for the others."""
    got = Counter[tuple[OrgId, tuple[QueueName, ...]]]()
    for taker in takers:
        if taker.jobs:
            got[taker.request.org, taker.request.queues] += sum(map(_size, taker.jobs))
    unserved = [
        taker
        for taker in takers
        if taker.again and taker.remaining_jobs > 0 and taker.remaining_bytes >= CLAIM_BYTES_MIN
    ]
    return sorted(unserved, key=lambda taker: got[taker.request.org, taker.request.queues]) if got else unserved


def _next_batch(takers: Sequence[_Taker]) -> tuple[list[_Taker], list[_Taker]]:
    """Splits takers into takers for the next statement and takers that wait for a later statement. A taker waits if
    there are too many sets of queues. It also waits if one of its queues is in a different set of the statement: SKIP
    LOCKED does not skip rows that the same statement has locked, so the statement would lease such rows twice. A set
    with limits of jobs in flight gets a statement of its own. That statement may have to wait for other claims of the
    org, and it counts the leased jobs for one set only."""
    batch: list[_Taker] = []
    later: list[_Taker] = []
    owners: dict[tuple[OrgId, QueueName], tuple[QueueName, ...]] = {}
    groups: set[tuple[OrgId, tuple[QueueName, ...]]] = set()
    for taker in takers:
        org, queues = group = taker.request.org, taker.request.queues
        is_alone = batch and (taker.request.in_flight is not None or batch[0].request.in_flight is not None)
        if group not in groups and (len(groups) == _GROUPS_MAX or is_alone):
            later.append(taker)
        elif is_alone and taker.request.in_flight != batch[0].request.in_flight:
            # The limits have changed between the two requests.
            later.append(taker)
        elif all(owners.get((org, queue), queues) == queues for queue in queues):
            groups.add(group)
            owners.update(((org, queue), queues) for queue in queues)
            batch.append(taker)
        else:
            later.append(taker)
    return batch, later


def _size(job: Claimed) -> int:
    size = len(job.payload)
    if job.attributes:
        size += len(job.attributes.encode())
    return size + len(job.checkpoint) if job.checkpoint else size


def _order(job: Claimed) -> tuple[int, int]:
    return job.priority, job.run_at
