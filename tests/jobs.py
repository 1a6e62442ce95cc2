"""Jobs and leases for tests, made as a client makes them."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import Awaitable, Sequence
from typing import TypeVar

from shard.lease_token import parse_token, token
from shard.queue.store import Store
from shard.retry_policy import Fixed, Policy, to_json
from shard.vocabulary import SPARSE_COLUMNS, Alteration, Claimed, JobId, Lease, NewJobs, OrgId, QueueName
from windrow.v1 import job_pb2

T = TypeVar("T")
MINUTE_US = 60_000_000
HOUR_US = 60 * MINUTE_US
# The window of a lease that a test lets expire. It is long enough for a call on a busy machine.
SHORT_US = 3_000_000
QUEUE = QueueName("mail")
_TEMPLATE = {field.name for field in job_pb2.JobTemplate.DESCRIPTOR.fields}
_DEDUP = {field.name for field in job_pb2.Dedup.DESCRIPTOR.fields}


def job_id(*, ahead_ms: int = 0) -> JobId:
    """Returns a UUIDv7 for the current time plus `ahead_ms`."""
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
    live_keys: Sequence[str] = (),
    max_runtime_us: int | None = None,
    group: str | None = None,
) -> NewJobs:
    """Returns jobs that differ only in their ids and dedup keys."""
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
        if max_runtime_us is not None:
            jobs.max_runtimes_us[at] = max_runtime_us
        if group is not None:
            jobs.groups[at] = group
        if retry is not None:
            jobs.retries[at] = to_json(retry)
    for at, key in enumerate(dedup_keys):
        jobs.dedup_keys[at] = key
        jobs.dedup_window_us[at] = dedup_window_us
    jobs.live_keys.update(enumerate(live_keys))
    return jobs


def job_message(**flat: object) -> job_pb2.NewJob:
    """Returns a NewJob. `flat` has the fields of the job and of its template. `dedup_key` and `dedup_window` are its
    dedup key and dedup window."""
    template = {name: flat.pop(name) for name in _TEMPLATE & flat.keys()}
    dedup = {name: flat.pop(f"dedup_{name}") for name in _DEDUP if f"dedup_{name}" in flat}
    job = job_pb2.NewJob(**flat, template=job_pb2.JobTemplate(**template))  # type: ignore[arg-type]
    if any(dedup.values()):
        job.dedup.CopyFrom(job_pb2.Dedup(**dedup))  # type: ignore[arg-type]
    return job


def ids_of(jobs: NewJobs) -> list[JobId]:
    return [JobId(name) for name in jobs.ids]


async def at_once(*calls: Awaitable[T]) -> list[T]:
    """Makes several calls in one iteration of the event loop. So the calls of one method on one store share a
    statement."""
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
    """Claims jobs, and reads each job's lease from its token as the router does."""
    prefix, claimed, *_ = await store.claim(
        org, [QueueName(queue)], max_jobs=max_jobs, window_us=window_us, worker=worker
    )
    return [(job, parse_token(token(prefix, job.id))[1]) for job in claimed]


async def alter_until(done: asyncio.Event, store: Store, org: OrgId, ids: list[JobId], altered: asyncio.Event) -> None:
    """Alters these jobs again and again until `done` is set. Each call alters a few of the jobs. Sets `altered` after
    each call."""
    while not done.is_set():
        for at in range(0, len(ids), 5):
            await store.alter(org, ids[at : at + 5], Alteration(priority=1 + at % 9))
            altered.set()


def history_of(text: str | None) -> list[dict[str, object]]:
    """Returns a job's ended attempts, as the database stores them."""
    history = json.loads(text or "[]")
    assert isinstance(history, list)
    return history


def fullest_job(org: OrgId, *, queue: str = QUEUE) -> NewJobs:
    """Returns a job that is due at once, with a value in every field. If a field is added to NewJobs, the job gets a
    value in this field, too."""
    jobs = NewJobs(org=org, ids=[job_id()], queues=[QueueName(queue)], kinds=["greet"], payloads=[b"\0 payload \xff"])
    values = {
        "priorities": 3,
        "attributes": '{"plan": "pro"}',
        "run_at_us": 1,
        "expires_at_us": time.time_ns() // 1000 + HOUR_US,
        "max_attempts": 7,
        "retries": to_json(Fixed(delay_us=5)),
        "dedup_window_us": HOUR_US,
        "delay_us": 0,
        "max_runtimes_us": HOUR_US,
    }
    for name in SPARSE_COLUMNS:
        getattr(jobs, name)[0] = values.get(name, f"of {name}")
    return jobs
