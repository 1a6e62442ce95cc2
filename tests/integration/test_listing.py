"""Tests lists of jobs that are read page by page. A list has each job that matches the filter once, wherever the job is
stored, and the newest job first."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any
from uuid import UUID

import pytest

from shard.admin import job_counts, job_pages
from shard.admin.job_counts import Part, WantedCount
from shard.admin.job_pages import Page, Wanted
from shard.admin.queue_admin import QueueAdmin
from shard.errors import BadPageToken, UnknownQueue
from shard.history.days import days_over, turn_cold
from shard.postgres.pool import Database
from shard.queue.settle import Nack, Settlement
from shard.queue.store import Store
from shard.queue_settings import QueueSettings
from shard.vocabulary import Failure, JobId, JobState, Micros, OrgId, QueueName
from tests.conftest import SHARD
from tests.jobs import HOUR_US, QUEUE, ids_of, job_id, lease_jobs, some_jobs
from tests.timemachine import age_finished

OTHER_QUEUE = QueueName("post")
DAY_US = 24 * HOUR_US


@pytest.fixture
async def fresh_books(fresh_dsn: str) -> AsyncGenerator[QueueAdmin]:
    opened = Database(SHARD, fresh_dsn, connections=1, may_scan=True)
    await opened.open()
    yield QueueAdmin(opened)
    await opened.close()


async def pages(books: QueueAdmin, wanted: Wanted, page_size: int = 2) -> list[list[JobId]]:
    found: list[list[JobId]] = []
    token = ""
    while token or not found:
        page = await books.list_jobs(wanted, page_size=page_size, page_token=token)
        assert [job.id for job in page.jobs] == [str(key[-1]) for key in page.keys]
        found.append([job.id for job in page.jobs])
        token = page.next_token
    return found


async def listed(books: QueueAdmin, wanted: Wanted) -> list[JobId]:
    """Returns the jobs of all pages together, because the number of jobs in each page depends on how long the search
    took."""
    return [one for page in await pages(books, wanted, 1000) for one in page]


async def finish(store: Store, org: OrgId, count: int = 1, *, queue: str = QUEUE) -> list[JobId]:
    jobs = some_jobs(org, count, queue=queue)
    await store.enqueue(jobs)
    await store.settle(Settlement.ack(org, [lease for _, lease in await lease_jobs(store, org, queue=queue)]))
    return ids_of(jobs)


async def finish_cold(database: Database, org: OrgId, *, days: int, count: int = 1) -> list[JobId]:
    """Makes jobs that finished this many days ago, on a day that is cold."""
    await finish(Store(database), org, count)
    ids = await age_finished(database, org, days=days)
    for day in await days_over(database):
        await turn_cold(database, day)
    return ids


async def test_a_queue_that_is_unknown_and_a_token_of_another_list_are_refused(books: QueueAdmin, org: OrgId) -> None:
    with pytest.raises(UnknownQueue):
        await books.list_jobs(Wanted(org=org, queue=QUEUE), page_size=1, page_token="")
    assert await pages(books, Wanted(org=org)) == [[]]
    for token in (job_pages.pack(5, 0, job_id()), job_pages.pack("mail")):
        with pytest.raises(BadPageToken):
            await books.list_jobs(Wanted(org=org), page_size=1, page_token=token)


async def test_jobs_of_every_state_are_one_list_newest_first(
    fresh_database: Database, fresh_books: QueueAdmin, org: OrgId
) -> None:
    store = Store(fresh_database)
    other = OrgId(f"{org}-other")
    cold = [*await finish_cold(fresh_database, org, days=9), *await finish_cold(fresh_database, org, days=3, count=2)]
    await finish_cold(fresh_database, other, days=3)
    dead, cancelled, leased = (some_jobs(org, 1) for _ in range(3))
    await store.enqueue(dead)
    await store.settle(
        Settlement.nack(
            org, [Nack(lease=lease, failure=Failure(permanent=True)) for _, lease in await lease_jobs(store, org)]
        )
    )
    await store.enqueue(cancelled)
    await store.cancel(org, ids_of(cancelled), reason="")
    await store.enqueue(leased)
    await lease_jobs(store, org, window_us=HOUR_US)
    succeeded = await finish(store, org, queue=OTHER_QUEUE)
    scheduled, ready = some_jobs(org, 2, delay_us=HOUR_US), some_jobs(org, 1, queue=OTHER_QUEUE)
    for jobs in (scheduled, ready, some_jobs(other, 2)):
        await store.enqueue(jobs)
    by_state = {
        JobState.SUCCEEDED: [*cold, *succeeded],
        JobState.DEAD: ids_of(dead),
        JobState.CANCELLED: ids_of(cancelled),
        JobState.LEASED: ids_of(leased),
        JobState.SCHEDULED: ids_of(scheduled),
        JobState.READY: ids_of(ready),
    }
    everything = sorted((one for ids in by_state.values() for one in ids), reverse=True)
    for page_size in (1, 2, 4, 1000):
        found = await pages(fresh_books, Wanted(org=org), page_size)
        assert [one for page in found for one in page] == everything
        assert [len(page) for page in found[:-1]] == [page_size] * (len(found) - 1)
    page = await fresh_books.list_jobs(Wanted(org=org), page_size=1000, page_token="")
    assert {job.id: job.state for job in page.jobs} == {
        one: state.value for state, ids in by_state.items() for one in ids
    }
    for state, ids in by_state.items():
        assert await listed(fresh_books, Wanted(org=org, state=state)) == sorted(ids, reverse=True)
    there = {*succeeded, *ids_of(ready)}
    assert await listed(fresh_books, Wanted(org=org, queue=OTHER_QUEUE)) == sorted(there, reverse=True)
    assert await listed(fresh_books, Wanted(org=org, kind="other")) == []
    assert await pages(fresh_books, Wanted(org=OrgId("nobody"))) == [[]]


async def test_times_before_and_beyond_all_that_there_are_bound_a_list_as_others_do(
    fresh_database: Database, fresh_books: QueueAdmin, org: OrgId
) -> None:
    jobs = some_jobs(org, 1)
    await Store(fresh_database).enqueue(jobs)
    early, late = Micros(-(10**18)), Micros(10**18)
    assert await pages(fresh_books, Wanted(org=org, made_after=early, made_before=late)) == [ids_of(jobs)]
    assert await pages(fresh_books, Wanted(org=org, made_after=late)) == [[]]
    assert await pages(fresh_books, Wanted(org=org, made_before=early)) == [[]]


@pytest.mark.parametrize("queue", [QUEUE, None])
@pytest.mark.parametrize("state", [JobState.SCHEDULED, JobState.SUCCEEDED, None])
async def test_a_span_of_time_chooses_by_when_jobs_were_made(
    fresh_database: Database, fresh_books: QueueAdmin, org: OrgId, queue: QueueName | None, state: JobState | None
) -> None:
    store = Store(fresh_database)
    ids: list[JobId] = []
    if state is not JobState.SCHEDULED:
        for days in (20, 10, 5):
            ids += await finish_cold(fresh_database, org, days=days)
    if state is not JobState.SUCCEEDED:
        scheduled = some_jobs(org, ids=[job_id(ahead_ms=-days * 86_400_000) for days in (6, 4, 2)], delay_us=HOUR_US)
        await store.enqueue(scheduled)
        ids += ids_of(scheduled)
    ids.sort()
    made = [Micros(int(one[:8] + one[9:13], 16) * 1000) for one in ids]
    wanted = Wanted(org=org, queue=queue, state=state)

    async def chosen(after: int | None, before: int | None) -> list[JobId]:
        spanned = replace(
            wanted,
            made_after=None if after is None else Micros(after),
            made_before=None if before is None else Micros(before),
        )
        return sorted(one for page in await pages(fresh_books, spanned, 1) for one in page)

    assert await chosen(None, None) == ids
    for at, when in enumerate(made):
        assert await chosen(when, None) == ids[at:]
        assert await chosen(None, when) == ids[:at]
        # The bounds are precise to the millisecond, as ids are.
        assert await chosen(when + 1, None) == ids[at + 1 :]
        assert await chosen(None, when + 1) == ids[: at + 1]
    assert await chosen(made[1], made[2]) == ids[1:2]
    assert await chosen(made[2], made[1]) == []
    assert await chosen(-DAY_US, 2**62) == ids


async def test_a_job_that_goes_from_state_to_state_meanwhile_is_listed_once(
    fresh_database: Database, fresh_books: QueueAdmin, org: OrgId
) -> None:
    store = Store(fresh_database)
    jobs = some_jobs(org, 8)
    await store.enqueue(jobs)
    wanted, found, token = Wanted(org=org), list[JobId](), ""

    async def leave_one_state() -> Page:
        page = await fresh_books.list_jobs(wanted, page_size=2, page_token=token)
        held = [lease for _, lease in await lease_jobs(store, org, max_jobs=3)]
        await store.settle(Settlement.ack(org, held[:1]))
        await store.settle(
            Settlement.nack(org, [Nack(lease=lease, failure=Failure(permanent=True)) for lease in held[1:2]])
        )
        await store.settle(Settlement.release(org, held[2:]))
        return page

    while token or not found:
        page = await leave_one_state()
        found += [job.id for job in page.jobs]
        token = page.next_token
    assert found == sorted(ids_of(jobs), reverse=True)


async def test_a_look_that_takes_long_ends_with_what_it_has_and_the_next_one_goes_on_there(
    fresh_database: Database, fresh_books: QueueAdmin, org: OrgId, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time limit of this test is negative, so every query takes too long."""
    ids = [*await finish_cold(fresh_database, org, days=20), *await finish_cold(fresh_database, org, days=2)]
    monkeypatch.setattr(job_pages, "_SEARCH_S_MAX", -1.0)
    found = await pages(fresh_books, Wanted(org=org), 9)
    assert [one for page in found for one in page] == sorted(ids, reverse=True)
    assert [] in found


@pytest.mark.parametrize(
    "conditions",
    [{"kind": "other"}, {"state": JobState.CANCELLED}, {"queue": OTHER_QUEUE}],
    ids=["kind", "state", "queue"],
)
async def test_a_search_that_matches_nothing_reads_a_bounded_number_of_jobs_for_each_page(
    fresh_database: Database, fresh_books: QueueAdmin, org: OrgId, monkeypatch: pytest.MonkeyPatch, conditions: Any
) -> None:
    store = Store(fresh_database)
    for _ in range(9):
        await finish(store, org)
    # Make the other queue exist.
    await finish(store, org, queue=OTHER_QUEUE)
    monkeypatch.setattr(job_pages, "_SCAN_ROWS", 2)
    monkeypatch.setattr(job_pages, "_SCAN_S_MAX", -1.0)
    found = await pages(fresh_books, Wanted(org=org, **conditions), 9)
    # Each page has read about two jobs, and its token has led to the next page.
    assert len(found) >= 4
    assert len([one for page in found for one in page]) == ("queue" in conditions)


async def test_a_search_by_attributes_finds_each_job_once_wherever_it_is(
    fresh_database: Database, fresh_books: QueueAdmin, org: OrgId, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, other = Store(fresh_database), OrgId(f"{org}-other")
    monkeypatch.setattr(job_pages, "_SCAN_ROWS", 2)
    # Each page ends after one range of jobs.
    monkeypatch.setattr(job_pages, "_SCAN_S_MAX", -1.0)
    cold = await finish_cold(fresh_database, org, days=3, count=4)
    by_state: dict[JobState, list[JobId]] = {}
    for state in (JobState.SUCCEEDED, JobState.CANCELLED, JobState.DEAD, JobState.LEASED, JobState.READY):
        jobs = some_jobs(org, 6)
        by_state[state] = ids_of(jobs)
        jobs.attributes.update({at: f'{{"campaign": "42", "n": "{at}"}}' for at in (1, 4)})
        jobs.attributes[2] = '{"campaign": "43"}'
        await store.enqueue(jobs)
        if state is JobState.CANCELLED:
            await store.cancel(org, ids_of(jobs), reason="")
        elif state is not JobState.READY:
            held = [lease for _, lease in await lease_jobs(store, org, window_us=HOUR_US)]
            if state is JobState.SUCCEEDED:
                await store.settle(Settlement.ack(org, held))
            elif state is JobState.DEAD:
                nacks = [Nack(lease=lease, failure=Failure(permanent=True)) for lease in held]
                await store.settle(Settlement.nack(org, nacks))
        strangers = some_jobs(other, 3)
        strangers.attributes.update(dict.fromkeys(range(3), '{"campaign": "42"}'))
        await store.enqueue(strangers)

    async def found(attributes: str, page_size: int = 9, **conditions: Any) -> list[JobId]:
        wanted = Wanted(org=org, attributes=attributes, **conditions)
        return [one for page in await pages(fresh_books, wanted, page_size) for one in page]

    def chosen(states: frozenset[JobState]) -> list[JobId]:
        return [one for state in states for one in by_state[state]]

    wanted = sorted((ids[at] for ids in by_state.values() for at in (1, 4)), reverse=True)
    for page_size in (1, 9):
        assert await found('{"campaign": "42"}', page_size) == wanted
        assert await found('{"campaign": "42"}', page_size, queue=QUEUE) == wanted
    for state, ids in by_state.items():
        assert await found('{"campaign": "42"}', state=state, queue=QUEUE) == sorted((ids[1], ids[4]), reverse=True)
    several = frozenset({JobState.READY, JobState.DEAD, JobState.SUCCEEDED})
    assert await found('{"campaign": "42"}', states=several) == [one for one in wanted if one in chosen(several)]
    for page_size in (2, 9):
        listed = await pages(fresh_books, Wanted(org=org, queue=QUEUE, states=several), page_size)
        assert [one for page in listed for one in page] == sorted([*chosen(several), *cold], reverse=True)
    fourth = {ids[4] for ids in by_state.values()}
    assert set(await found('{"campaign": "42", "n": "4"}')) == fourth
    assert await found('{"campaign": "44"}') == []
    assert len(await pages(fresh_books, Wanted(org=org, attributes='{"campaign": "44"}'), 9)) > 3
    assert cold


# ── Counts ───────────────────────────────────────────────────────────────────────────────────────────────────────────


async def parts(books: QueueAdmin, wanted: WantedCount, *, with_ids: bool = False) -> list[Part]:
    found: list[Part] = []
    token = ""
    while token or not found:
        found.append(await books.count_jobs(wanted, page_token=token, with_ids=with_ids))
        token = found[-1].next_token
    return found


async def counted(books: QueueAdmin, org: OrgId, **conditions: Any) -> int:
    return sum(part.count for part in await parts(books, WantedCount(org=org, **conditions)))


async def test_a_count_refuses_an_unknown_queue_and_a_token_of_another_list(books: QueueAdmin, org: OrgId) -> None:
    with pytest.raises(UnknownQueue):
        await counted(books, org, queue=QUEUE)
    assert await counted(books, org) == 0
    with pytest.raises(BadPageToken):
        await books.count_jobs(WantedCount(org=org), page_token=job_pages.pack(5, 0, job_id()), with_ids=False)


async def test_a_count_has_what_a_list_has(
    fresh_database: Database, fresh_books: QueueAdmin, org: OrgId, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Each range has one job, and each `Part` has one range.
    monkeypatch.setattr(job_counts, "_ROWS", 1)
    monkeypatch.setattr(job_counts, "_S_MAX", 0.0)
    store = Store(fresh_database)
    await finish_cold(fresh_database, org, days=3, count=2)
    for permanent in (True, False):
        await store.enqueue(some_jobs(org, 1, max_attempts=1))
        failure = Failure(permanent=permanent)
        await store.settle(
            Settlement.nack(org, [Nack(lease=lease, failure=failure) for _, lease in await lease_jobs(store, org)])
        )
    await store.enqueue(some_jobs(org, 1))
    await lease_jobs(store, org, window_us=HOUR_US)
    await finish(store, org, 3, queue=OTHER_QUEUE)
    labelled = some_jobs(org, 5)
    labelled.attributes.update({0: '{"a": "1"}', 1: '{"a": "2"}'})
    for jobs in (
        some_jobs(org, 4, delay_us=HOUR_US, queue=OTHER_QUEUE),
        labelled,
        some_jobs(OrgId(f"{org}-other"), 2),
    ):
        await store.enqueue(jobs)
    expected = {
        JobState.SUCCEEDED: 5,
        JobState.DEAD: 2,
        JobState.CANCELLED: 0,
        JobState.LEASED: 1,
        JobState.SCHEDULED: 4,
        JobState.READY: 5,
    }
    for state, count in expected.items():
        assert await counted(fresh_books, org, states=frozenset({state})) == count
        listed = await pages(fresh_books, Wanted(org=org, state=state), 1000)
        assert sum(map(len, listed)) == count
    assert await counted(fresh_books, org) == sum(expected.values())
    assert len(await parts(fresh_books, WantedCount(org=org))) > 3
    assert await counted(fresh_books, org, queue=OTHER_QUEUE) == 7
    assert await counted(fresh_books, org, kind="other") == 0
    assert await counted(fresh_books, org, attributes='{"a": "1"}') == 1
    assert await counted(fresh_books, OrgId("nobody")) == 0
    # Conditions on the time or cause of death are true only for dead jobs.
    assert await counted(fresh_books, org, not_killed=True) == 1
    assert await counted(fresh_books, org, died_after=0) == 2
    assert await counted(fresh_books, org, died_before=0) == 0
    assert await counted(fresh_books, org, states=frozenset({JobState.READY}), died_after=0) == 0


async def test_a_job_that_is_on_two_shards_counts_once(books: QueueAdmin, store: Store, org: OrgId) -> None:
    await store.enqueue(some_jobs(org, 3))
    (part,) = await parts(books, WantedCount(org=org), with_ids=True)
    assert (part.count, len(part.ids)) == (3, 48)
    ids = sorted(part.ids[at : at + 16] for at in range(0, 48, 16))
    assert job_counts.merged([part, part]).count == 3
    # One shard has counted only up to the second id, so later ids belong to the next `Part`.
    cut = Part(count=1, ids=ids[2], until=str(UUID(bytes=ids[1])))
    both = job_counts.merged([part, cut])
    assert (both.count, both.until) == (2, cut.until)


async def test_calls_about_queues_of_one_org_do_not_hold_up_those_of_another(
    books: QueueAdmin, org: OrgId, other_org: OrgId
) -> None:
    for one in (org, other_org):
        await books.create_queue(one, QUEUE, QueueSettings())
    ended: list[OrgId] = []

    async def ask(one: OrgId) -> None:
        await books.get_queue(one, QUEUE)
        ended.append(one)

    await asyncio.gather(*(ask(org) for _ in range(40)), ask(other_org))
    # Only two calls of the first org may end before the other org's call: the call that already runs, and the call
    # after it.
    assert ended.index(other_org) <= 2
