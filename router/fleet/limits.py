"""The limits of enqueues, as one router process enforces them: what a call is charged, and when it is refused
(docs/decisions/0045-tokens-are-drawn-in-blocks.md, 0053-backlogs-are-counted-by-those-who-add-to-them.md)."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import TypeAlias

from router.fleet.backlog import Backlog
from router.fleet.buckets import PAUSE_S, Bucket, Buckets
from shard.errors import ClockSetBack, LimitReached, RowLocked, ShardError, ShardUnavailable
from shard.limits import ALL_QUEUES, BACKLOG, ENQUEUED, Limit, LimitTable
from shard.queue.store import Store
from shard.vocabulary import NewJobs, OrgId, QueueName

# A call draws tokens at most this many times. It draws again if other calls have taken the tokens that it drew.
_TRIES_MAX = 20


# What a call costs in one bucket or backlog. The fields are the bucket or backlog, the positions of the jobs that cost
# tokens of it (None: all jobs of the call), and the number of tokens. This is a plain tuple because a tuple is quick to
# make, and each call to a limited org makes several.
_Cost: TypeAlias = tuple[Bucket | Backlog, Sequence[int] | None, int]
# When the process remembers this many backlogs, it forgets those that it can count again.
_BACKLOGS_MAX = 20_000


class Charge:
    """The tokens that a call has used. The block `with charge:` is the part of the call that stores jobs. If the block
    ends with an error that says for certain that nothing was stored, the tokens are put back. After other errors the
    tokens are not put back."""

    __slots__ = ("_costs", "_jobs")

    def __init__(self, costs: Sequence[_Cost], jobs: NewJobs) -> None:
        self._costs = costs
        self._jobs = jobs

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if error is not None and _stored_nothing(error):
            self.refund()
        for bucket, _, tokens in self._costs:
            if isinstance(bucket, Backlog):
                bucket.settled(tokens)

    def refund(self) -> None:
        """Puts all tokens back, because nothing was stored."""
        for bucket, _, tokens in self._costs:
            bucket.put_back(tokens)

    def refund_jobs(self, known: Collection[int]) -> None:
        """Puts back the tokens of the jobs at these positions, because these jobs had been stored before."""
        for bucket, positions, _ in self._costs:
            of_bucket = known if positions is None else [at for at in positions if at in known]
            bucket.put_back(_cost(bucket, self._jobs, of_bucket))


def _stored_nothing(error: BaseException) -> bool:
    """Whether this error of a shard says for certain that the call stored nothing."""
    if isinstance(error, ShardUnavailable):
        return isinstance(error, (RowLocked, ClockSetBack))
    return isinstance(error, ShardError)


class Limits(Buckets):
    """The limits of enqueues, and the buckets from which this process draws."""

    def __init__(self) -> None:
        super().__init__(ENQUEUED)
        self._backlog_table = LimitTable()
        self._backlogs: dict[tuple[OrgId, Limit], Backlog] = {}

    def replace(self, table: LimitTable) -> None:
        super().replace(table)
        self._backlog_table = of_backlogs = table.only(BACKLOG)
        self._backlogs = {
            (org, limit): one
            for (org, limit), one in self._backlogs.items()
            if of_backlogs.limits.get(limit.key) == limit
        }

    async def charge(self, store: Store, jobs: NewJobs, *, independent: bool) -> Charge:
        """Uses the tokens that these jobs cost, in all buckets of their org and queues. `independent`: each job may be
        stored without the others. Raises LimitReached or NoAnswer; then no tokens are used."""
        costs = self._costs(jobs)
        if not costs:
            return Charge(costs, jobs)
        worst = costs[0]
        for _ in range(_TRIES_MAX):
            short = [cost for cost in costs if cost[0].tokens < cost[2]]
            if not short:
                for bucket, _, tokens in costs:
                    bucket.take(tokens, store)
                return Charge(costs, jobs)
            # If one bucket refuses the call, draw from no bucket.
            worst = max(short, key=_wait_s)
            if _wait_s(worst) > 0:
                break
            bucket, _, tokens = worst
            await bucket.draw(store, tokens - bucket.tokens)
        bucket, positions, tokens = worst
        raise _reached(jobs, bucket, positions, tokens, independent=independent)

    def _costs(self, jobs: NewJobs) -> list[_Cost]:
        """Returns what these jobs cost in each bucket and backlog of their org and queues."""
        org, table, of_backlogs = jobs.org, self.table, self._backlog_table
        if not table.is_limited(org) and not of_backlogs.is_limited(org):
            return []
        costs: list[_Cost] = [(bucket, None, _cost(bucket, jobs)) for bucket in self._all_of(org, ALL_QUEUES)]
        if table.limits_queues(org) or of_backlogs.limits_queues(org):
            queues = jobs.queues
            for queue in dict.fromkeys(queues):
                buckets = self._all_of(org, queue)
                if buckets:
                    positions = None
                    if queues.count(queue) < len(queues):
                        positions = [at for at, of in enumerate(queues) if of == queue]
                    costs += [(bucket, positions, _cost(bucket, jobs, positions)) for bucket in buckets]
        return costs

    def _all_of(self, org: OrgId, queue: QueueName) -> Sequence[Bucket | Backlog]:
        """Returns the buckets and the backlogs of an org as a whole, or of one of its queues."""
        return [*self.of(org, queue), *(self._backlog(org, limit) for limit in self._backlog_table.of(org, queue))]

    def _backlog(self, org: OrgId, limit: Limit) -> Backlog:
        backlog = self._backlogs.get((org, limit))
        if backlog is None:
            if len(self._backlogs) >= _BACKLOGS_MAX:
                self._backlogs = {key: one for key, one in self._backlogs.items() if not one.is_idle}
            backlog = self._backlogs[org, limit] = Backlog(org, limit)
        return backlog


def _wait_s(cost: _Cost) -> float:
    """Returns in how many seconds the shard may have the tokens that are lacking, at the earliest; inf: never."""
    bucket, _, tokens = cost
    return math.inf if tokens > bucket.limit.amount else bucket.ready_in_s(tokens - bucket.tokens)


def _reached(
    jobs: NewJobs, bucket: Bucket | Backlog, positions: Sequence[int] | None, asked: int, *, independent: bool
) -> LimitReached:
    limit = bucket.limit
    if positions is None:
        positions = range(len(jobs))
    retry_after_s = bucket.ready_in_s(asked - bucket.tokens) if asked <= limit.amount else None
    if independent:
        each = {at: _cost(bucket, jobs, [at]) for at in positions}
        # If there are jobs that no later call could store, refuse only these jobs, because for them it does not help to
        # wait.
        positions = [at for at in positions if each[at] > limit.amount]
        if positions:
            asked, retry_after_s = max(each[at] for at in positions), None
        else:
            positions = _without_room(each, min(limit.amount, bucket.tokens + bucket.left))
            asked = min(each[at] for at in positions)
            # Compute the wait as if no tokens were left, because the jobs that are not refused take the tokens that are
            # left now.
            retry_after_s = max(PAUSE_S, asked / limit.tokens_per_s if limit.interval_us else bucket.ready_in_s(asked))
    if retry_after_s is not None:
        # The shard rounds differently, so a caller that calls again at once could still be too early.
        retry_after_s = max(retry_after_s, 0.001)
    return LimitReached(
        jobs.org, limit, asked=asked, usage=bucket.usage(), retry_after_s=retry_after_s, positions=positions
    )


def _without_room(each: Mapping[int, int], room: float) -> list[int]:
    """Goes through the jobs in their order, and subtracts from `room` the tokens of each job that still fits. Returns
    the positions of the jobs that do not fit, or the last position if all jobs fit."""
    left: list[int] = []
    for at, tokens in each.items():
        if tokens <= room:
            room -= tokens
        else:
            left.append(at)
    return left or list(each)[-1:]


def _cost(bucket: Bucket | Backlog, jobs: NewJobs, positions: Collection[int] | None = None) -> int:
    """Returns how many tokens of this bucket the jobs at these positions cost. `positions` None: all jobs."""
    if not bucket.in_bytes:
        return len(jobs.ids if positions is None else positions)
    payloads, attributes = jobs.payloads, jobs.attributes
    tokens = sum(map(len, payloads if positions is None else [payloads[at] for at in positions]))
    if attributes:
        of = attributes if positions is None else attributes.keys() & positions
        tokens += sum(len(attributes[at].encode()) for at in of)
    return tokens
