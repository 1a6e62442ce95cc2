"""Batches of any number of jobs: splits them into calls, and counts the stored jobs. No I/O."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from windrow.errors import InvalidRequest, invalid_argument, shifted
from windrow.ids import nth_id
from windrow.job_rules import JOBS_MAX
from windrow.jobs import Enqueued
from windrow.new_jobs import NewJob, batch_requests
from windrow.v1 import queue_pb2

# Calls are small, so that the progress is visible, and the jobs need not all be in memory.
_CALL_BYTES_MAX = 1024 * 1024
# How many calls run at the same time.
_CALLS_MAX = 4

# Calls that run at the same time, each with the number of its first job.
Together = Sequence[tuple[int, queue_pb2.EnqueueRequest]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """How many jobs an enqueue_batch has stored so far."""

    # How many jobs are stored. These are the first jobs of the batch.
    jobs: int = 0
    # How many of these jobs were stored before, by an earlier call with the same batch.
    duplicates: int = 0


def calls_of(org: str, jobs: Iterable[NewJob], batch: str) -> Iterator[Together]:
    """Yields the calls that store a batch, a few at a time. Reads jobs from the iterable only when they are needed.
    Raises InvalidJob. Raises InvalidRequest if `batch` is not a UUIDv7."""
    try:
        nth_id(batch, 0)
    except ValueError as error:
        raise invalid_argument("batch", f"{error}; make one with windrow.uuid7()") from error
    requests = batch_requests(org, jobs, batch, jobs_max=JOBS_MAX, bytes_max=_CALL_BYTES_MAX)
    while calls := list(islice(requests, _CALLS_MAX)):
        yield calls


def progress(done: Batch, calls: Together, outcomes: Sequence[list[Enqueued] | BaseException]) -> Iterator[Batch]:
    """Yields, after each of the calls, how many jobs of the batch are stored. Raises the error of the first call that
    failed. Raises InvalidRequest if the batch's id was used for other jobs."""
    for (first, _), outcome in zip(calls, outcomes, strict=True):
        if isinstance(outcome, InvalidRequest):
            raise type(outcome)(f"after {first:,} jobs: {outcome}", shifted(outcome.violations, first)) from outcome
        if isinstance(outcome, BaseException):
            raise outcome
        other = next((first + at for at, one in enumerate(outcome) if one.differs), None)
        if other is not None:
            fault = f"job {other:,} of it was stored before with another queue, kind or payload"
            raise invalid_argument("batch", f"{fault}; make an id for each batch with windrow.uuid7()")
        duplicates = done.duplicates + sum(one.duplicate for one in outcome)
        done = Batch(jobs=first + len(outcome), duplicates=duplicates)
        yield done
