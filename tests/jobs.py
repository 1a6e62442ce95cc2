"""Jobs for tests: made as a client makes them, and their leases as a worker holds them."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import Awaitable, Sequence
from typing import TypeVar

from shard.lease import parse_token, token
from shard.retry import Policy, to_json
from shard.store import Store
from shard.vocabulary import Claimed, JobId, Lease, NewJobs, OrgId, QueueName

T = TypeVar("T")
MINUTE_US = 60_000_000
HOUR_US = 60 * MINUTE_US
QUEUE = QueueName("mail")


def job_id(*, ahead_ms: int = 0) -> JobId:
    """A UUIDv7 of this moment, or of one a little ahead of (or, below 0, behind) it."""
    made_ms = time.time_ns() // 1_000_000 + ahead_ms
    number = made_ms << 80 | 7 << 76 | secrets.randbits(12) << 64 | 2 << 62 | secrets.randbits(62)
    text = f"{number:032x}"
    return JobId("-".join((text[:8], text[8:12], text[12:16], text[16:20], text[20:])))


def some_jobs(
    org: OrgId,
    count: int = 1,
    *,
    queue: str = QUEUE,
    ids: Sequence[JobId] | None = None,
    priority: int | None = None,
    delay_us: int | None = None,
    max_attempts: int | None = None,
    retry: Policy | None = None,
    dedup_keys: Sequence[str] = (),
    dedup_window_us: int = HOUR_US,
) -> NewJobs:
    """Jobs that are alike but for their ids and dedup keys."""
    ids = ids or [job_id() for _ in range(count)]
    jobs = NewJobs(org=org)
    for at, name in enumerate(ids):
        jobs.ids.append(name)
        jobs.queues.append(QueueName(queue))
        jobs.kinds.append("greet")
        jobs.payloads.append(b"%d" % at)
        if priority is not None:
            jobs.priorities[at] = priority
        if delay_us is not None:
            jobs.delay_us[at] = delay_us
        if max_attempts is not None:
            jobs.max_attempts[at] = max_attempts
        if retry is not None:
            jobs.retries[at] = to_json(retry)
    for at, key in enumerate(dedup_keys):
        jobs.dedup_keys[at] = key
        jobs.dedup_window_us[at] = dedup_window_us
    return jobs


def ids_of(jobs: NewJobs) -> list[JobId]:
    return [JobId(name) for name in jobs.ids]


async def at_once(*calls: Awaitable[T]) -> list[T]:
    """Several calls in one turn of the event loop: those of one store and one sort go together."""
    return await asyncio.gather(*calls)


async def lease_jobs(
    store: Store,
    org: OrgId,
    *,
    queue: str = QUEUE,
    max_jobs: int = 1000,
    window_us: int = MINUTE_US,
    worker: str = "w",
) -> list[tuple[Claimed, Lease]]:
    """Claims, and reads each job's lease from its token as the router does."""
    prefix, claimed, *_ = await store.claim(
        org, [QueueName(queue)], max_jobs=max_jobs, window_us=window_us, worker=worker
    )
    return [(job, parse_token(token(prefix, job.id))[1]) for job in claimed]


def history_of(text: str | None) -> list[dict[str, object]]:
    """A job's ended attempts, as the database keeps them."""
    history = json.loads(text or "[]")
    assert isinstance(history, list)
    return history
