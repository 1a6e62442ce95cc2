"""Records each act of a coalescer: how long it took, how many calls shared it, and what became of their jobs."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from shard import metrics
from shard.queue.claim import ClaimRequest, ClaimResult
from shard.queue.pending_enqueue import Call
from shard.queue.settle import Settlement
from shard.vocabulary import Answer, JobId, ShardName

_Call = TypeVar("_Call")
_Result = TypeVar("_Result")
_Act = Callable[[list[_Call]], Awaitable[Sequence[_Result | Exception]]]
_Count = Callable[[Sequence[_Call], Sequence[_Result | Exception]], None]


def recorded(
    shard: ShardName, name: str, act: _Act[_Call, _Result], count: _Count[_Call, _Result] | None = None
) -> _Act[_Call, _Result]:
    """Returns an act that does what `act` does, and records the metrics of each run. `count` gets the calls and their
    results if the act succeeds."""
    seconds, size = metrics.ACT_SECONDS.labels(shard, name), metrics.ACT_CALLS.labels(shard, name)

    async def run(calls: list[_Call]) -> Sequence[_Result | Exception]:
        began_s = time.perf_counter()
        try:
            results = await act(calls)
        finally:
            seconds.observe(time.perf_counter() - began_s)
            size.observe(len(calls))
        if count is not None:
            count(calls, results)
        return results

    return run


def count_enqueued(shard: ShardName) -> _Count[Call, dict[int, JobId]]:
    new, known = metrics.ENQUEUED.labels(shard, "new"), metrics.ENQUEUED.labels(shard, "duplicate")

    def count(calls: Sequence[Call], results: Sequence[dict[int, JobId] | Exception]) -> None:
        stored = [
            (len(call.jobs), len(found)) for call, found in zip(calls, results, strict=True) if isinstance(found, dict)
        ]
        duplicates = sum(found for _, found in stored)
        new.inc(sum(jobs for jobs, _ in stored) - duplicates)
        known.inc(duplicates)

    return count


def count_claimed(shard: ShardName) -> _Count[ClaimRequest, ClaimResult]:
    claimed, waited = metrics.CLAIMED.labels(shard), metrics.PICKUP_SECONDS.labels(shard)

    def count(_: Sequence[ClaimRequest], results: Sequence[ClaimResult | Exception]) -> None:
        jobs = [job for result in results if isinstance(result, ClaimResult) for job in result.jobs]
        if jobs:
            claimed.inc(len(jobs))
            # Both times are by the shard's clock.
            waited.observe(max(0, max(job.leased_at - job.run_at for job in jobs)) / 1e6)

    return count


def count_settled(shard: ShardName, verb: str) -> _Count[Settlement, list[Answer]]:
    by_answer = {answer: metrics.SETTLED.labels(shard, verb, answer.name.lower()) for answer in Answer}

    def count(_: Sequence[Settlement], results: Sequence[list[Answer] | Exception]) -> None:
        answers: Counter[Answer] = Counter()
        for result in results:
            if isinstance(result, list):
                answers.update(result)
        for answer, leases in answers.items():
            by_answer[answer].inc(leases)

    return count
