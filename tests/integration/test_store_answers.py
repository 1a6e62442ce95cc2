"""The answers to lookups and lists are bounded, however large the jobs are. An answer ends with the job that fills
it."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable

import pytest

from shard.admin.job_pages import Wanted
from shard.admin.queue_admin import QueueAdmin
from shard.job_record import ANSWER_BYTES_MAX, JobRecord
from shard.queue.settle import Nack, Settlement
from shard.queue.store import Store
from shard.vocabulary import Failure, JobId, JobState, NewJobs, OrgId
from tests.jobs import HOUR_US, QUEUE, ids_of, lease_jobs, some_jobs

# Two jobs with this payload fill an answer.
LARGE = b"x" * (ANSWER_BYTES_MAX // 2)
COUNT = 5


async def enqueue_large(store: Store, org: OrgId, *, delay_us: int | None = None) -> list[JobId]:
    jobs = some_jobs(org, COUNT, delay_us=delay_us)
    jobs.payloads = [LARGE] * COUNT
    await store.enqueue(jobs)
    return ids_of(jobs)


def whole(records: list[JobRecord]) -> list[bool]:
    return [record.whole for record in records]


async def test_a_lookup_answers_jobs_in_the_order_of_their_ids_until_it_is_full(store: Store, org: OrgId) -> None:
    ids = (await enqueue_large(store, org))[::-1]
    records = await store.get(org, ids, include_payload=True)
    assert [(record.id, record.state) for record in records] == [(name, "ready") for name in ids]
    assert whole(records) == [True, True, False, False, False]
    assert [record.payload for record in records] == [LARGE, LARGE, None, None, None]
    assert whole(await store.get(org, ids, include_payload=False)) == [True] * COUNT


async def test_what_is_larger_than_an_answer_is_answered_alone_and_never_beside_others(
    store: Store, org: OrgId
) -> None:
    first, second = (await enqueue_large(store, org))[:2]
    assert whole(await store.get(org, [first, second], include_payload=True, bytes_max=1)) == [True, False]
    assert whole(await store.get(org, [first, second], include_payload=True, bytes_max=0)) == [False, False]
    assert whole(await store.get(org, [first, second], include_payload=True, bytes_max=-1)) == [False, False]


async def test_attributes_errors_and_results_fill_an_answer_as_payloads_do(store: Store, org: OrgId) -> None:
    text = LARGE.decode()

    async def labelled(jobs: NewJobs) -> None:
        jobs.attributes = {at: json.dumps({"label": text}) for at in range(len(jobs))}
        await store.enqueue(jobs)

    async def failed(jobs: NewJobs) -> None:
        await store.enqueue(jobs)
        held = [lease for _, lease in await lease_jobs(store, org, queue=jobs.queues[0])]
        await store.settle(Settlement.nack(org, [Nack(lease=lease, failure=Failure(message=text)) for lease in held]))

    async def finished(jobs: NewJobs) -> None:
        await store.enqueue(jobs)
        held = [lease for _, lease in await lease_jobs(store, org, queue=jobs.queues[0])]
        await store.settle(Settlement.ack(org, held, [LARGE] * len(held)))

    for make in (labelled, failed, finished):
        jobs = some_jobs(org, COUNT, queue=make.__name__)
        await make(jobs)
        found = await store.get(org, ids_of(jobs), include_payload=True)
        assert whole(found) == [True, True, False, False, False], make.__name__
        assert (found[2].attributes, found[2].history, found[2].result) == (None, None, None)


async def test_a_thousand_small_jobs_are_one_answer(store: Store, books: QueueAdmin, org: OrgId) -> None:
    jobs = some_jobs(org, 1000)
    jobs.payloads = [b"x" * 1000] * 1000
    await store.enqueue(jobs)
    assert whole(await store.get(org, ids_of(jobs), include_payload=True)) == [True] * 1000
    wanted = Wanted(org=org, queue=QUEUE, state=JobState.READY, include_payload=True)
    page = await books.list_jobs(wanted, page_size=1000, page_token="")
    assert (len(page.jobs), page.next_token) == (1000, "")


async def test_jobs_are_cancelled_however_large_they_are(store: Store, org: OrgId) -> None:
    ids = await enqueue_large(store, org)
    first = await store.cancel(org, ids, reason="")
    assert await store.cancel(org, ids, reason="") == first == [first[0]] * COUNT


async def ready(store: Store, org: OrgId) -> list[JobId]:
    return await enqueue_large(store, org)


async def scheduled(store: Store, org: OrgId) -> list[JobId]:
    return await enqueue_large(store, org, delay_us=HOUR_US)


async def leased(store: Store, org: OrgId) -> list[JobId]:
    ids = await enqueue_large(store, org)
    # One claim may return fewer jobs, because a claim has its own limit.
    while await lease_jobs(store, org, window_us=HOUR_US):
        pass
    return ids


async def dead(store: Store, org: OrgId) -> list[JobId]:
    ids = await enqueue_large(store, org)
    while held := await lease_jobs(store, org, window_us=HOUR_US):
        await store.settle(
            Settlement.nack(org, [Nack(lease=lease, failure=Failure(permanent=True)) for _, lease in held])
        )
    return ids


async def succeeded(store: Store, org: OrgId) -> list[JobId]:
    ids = await enqueue_large(store, org)
    while held := await lease_jobs(store, org, window_us=HOUR_US):
        await store.settle(Settlement.ack(org, [lease for _, lease in held]))
    return ids


async def cancelled(store: Store, org: OrgId) -> list[JobId]:
    ids = await enqueue_large(store, org)
    await store.cancel(org, ids, reason="not wanted")
    return ids


@pytest.mark.parametrize("brought", [ready, scheduled, leased, dead, succeeded, cancelled], ids=lambda f: f.__name__)
async def test_a_page_ends_early_with_the_job_that_fills_it_and_the_next_goes_on_there(
    store: Store, books: QueueAdmin, org: OrgId, brought: Callable[[Store, OrgId], Awaitable[list[JobId]]]
) -> None:
    ids, state = await brought(store, org), JobState(brought.__name__)

    async def pages(page_size: int, *, include_payload: bool) -> list[list[JobId]]:
        found: list[list[JobId]] = []
        token = ""
        while token or not found:
            wanted = Wanted(org=org, queue=QUEUE, state=state, include_payload=include_payload)
            page = await books.list_jobs(wanted, page_size=page_size, page_token=token)
            found.append([record.id for record in page.jobs])
            assert all(record.payload == (LARGE if include_payload else None) for record in page.jobs)
            token = page.next_token
        return found

    in_pages = await pages(1000, include_payload=True)
    assert [len(page) for page in in_pages] == [2, 2, 1]
    assert sorted(name for page in in_pages for name in page) == sorted(ids)
    assert [len(page) for page in await pages(1, include_payload=True)] == [1] * COUNT
    assert [len(page) for page in await pages(COUNT, include_payload=False)] == [COUNT]
    assert [len(page) for page in await pages(COUNT - 1, include_payload=False)] == [COUNT - 1, 1]
