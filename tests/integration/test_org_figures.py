"""The figures of all orgs agree with their jobs, on one shard, on several shards, and while an org moves."""

from __future__ import annotations

import asyncio
import os
import pty
import select
import subprocess
import sys
from collections.abc import AsyncGenerator, Generator
from datetime import timedelta

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration

from shard.admin import org_figures
from shard.admin.org_figures import START, OrgFigures, OrgSort, Place, WantedOrgs
from shard.admin.queue_admin import QueueAdmin
from shard.placement.slots import slot_of
from shard.postgres.pool import Database
from shard.queue.settle import Nack, Settlement
from shard.queue.store import Store
from shard.vocabulary import Failure, OrgId
from tests.balancers import until
from tests.command import windrow
from tests.conftest import SHARD
from tests.jobs import HOUR_US, ids_of, job_id, job_message, lease_jobs, some_jobs
from tests.pair import A, B, Pair
from tests.postgres import Server
from tests.routers import PATIENCE_S, Stubs, running_routers, stubs, write_cluster
from windrow.v1 import cluster_pb2, queue_pb2

NOW, MINUTE = 0, 60_000_000


@pytest.fixture
async def fresh_books(fresh_dsn: str) -> AsyncGenerator[QueueAdmin]:
    opened = Database(SHARD, fresh_dsn, connections=2, may_scan=True)
    await opened.open()
    yield QueueAdmin(opened)
    await opened.close()


async def populate(
    store: Store, org: OrgId, *, scheduled: int = 0, ready: int = 0, leased: int = 0, dead: int = 0
) -> None:
    if dead:
        await store.enqueue(some_jobs(org, dead))
        nacks = [Nack(lease=lease, failure=Failure(permanent=True)) for _, lease in await lease_jobs(store, org)]
        await store.settle(Settlement.nack(org, nacks))
    if leased:
        await store.enqueue(some_jobs(org, leased))
        await lease_jobs(store, org, window_us=HOUR_US)
    if ready:
        await store.enqueue(some_jobs(org, ready))
    if scheduled:
        await store.enqueue(some_jobs(org, scheduled, delay_us=HOUR_US))


async def listed(
    books: QueueAdmin, sort: OrgSort = OrgSort.BACKLOG, *, search: str = "", max_age_us: int = NOW, page_size: int = 100
) -> list[OrgFigures]:
    found: list[OrgFigures] = []
    after, more = START, True
    while more:
        wanted = WantedOrgs(search, sort, max_age_us)
        orgs, more = await books.list_orgs(wanted, after=after, page_size=page_size)
        found += orgs
        # Allow an older count from now on, so that the later pages use the count of the first page.
        max_age_us = MINUTE
        if orgs:
            after = Place(orgs[-1].figure(sort), orgs[-1].org)
    return found


def counts(figures: OrgFigures) -> tuple[str, int, int, int, int]:
    return figures.org, figures.scheduled, figures.ready, figures.leased, figures.dead


async def test_the_figures_of_each_org_are_those_of_its_stats(
    fresh_database: Database, fresh_books: QueueAdmin
) -> None:
    store = Store(fresh_database)
    for at in range(12):
        org = OrgId(f"org-{at}")
        await populate(store, org, scheduled=at % 3, ready=at % 4, leased=at % 5, dead=at % 2)
        # An org that has no jobs is listed too.
        await store.enqueue(jobs := some_jobs(org, queue="empty"))
        await store.cancel(org, ids_of(jobs), reason="")
    for sort in OrgSort:
        for page_size in (1, 5, 100):
            found = await listed(fresh_books, sort, page_size=page_size)
            assert len(found) == 12
            assert sorted(found, key=lambda one: Place(one.figure(sort), one.org).key) == found
    for one in await listed(fresh_books):
        by_queue = await fresh_books.stats(one.org, None, include_finished=False)
        assert counts(one)[1:] == tuple(
            sum(getattr(queue, state) for queue in by_queue) for state in ("scheduled", "ready", "leased", "dead")
        )
        ages = [queue.oldest_ready_age_us for queue in by_queue if queue.oldest_ready_age_us is not None]
        assert (one.oldest_ready_age_us is None) == (not ages)


async def test_the_jobs_are_counted_again_only_when_the_count_is_too_old(
    fresh_database: Database, fresh_books: QueueAdmin, org: OrgId
) -> None:
    store = Store(fresh_database)
    await populate(store, org, ready=2)
    assert [counts(one) for one in await listed(fresh_books)] == [(org, 0, 2, 0, 0)]
    await populate(store, org, ready=1, scheduled=4)
    assert [counts(one) for one in await listed(fresh_books, max_age_us=MINUTE)] == [(org, 0, 2, 0, 0)]
    assert [counts(one) for one in await listed(fresh_books)] == [(org, 4, 3, 0, 0)]
    await fresh_books.purge_queue(org, some_jobs(org).queues[0], limit=100, include_dead=True)
    assert [counts(one) for one in await listed(fresh_books)] == [(org, 0, 0, 0, 0)]
    # A count locks the row of the last count, and may have to wait for this lock. When the wait ends, the last count is
    # young enough, so nothing is counted again.
    two = await asyncio.gather(*(org_figures.count(fresh_books._database, max_age_us=MINUTE) for _ in range(2)))
    assert two == [None, None]


async def test_rates_are_of_the_jobs_stored_and_ended_between_two_counts(
    fresh_database: Database, fresh_books: QueueAdmin
) -> None:
    store = Store(fresh_database)
    busy, idle = OrgId("busy"), OrgId("idle")
    await populate(store, idle, ready=3)
    await populate(store, busy, ready=5)
    assert {(one.enqueued_per_1000_s, one.rates_over_us) for one in await listed(fresh_books)} == {(0, None)}
    # All jobs of one org finish, so the org has no live jobs any more. Its dead job is not live.
    leases = [lease for _, lease in await lease_jobs(store, busy)]
    await store.settle(Settlement.ack(busy, leases))
    await populate(store, busy, dead=1)
    await store.enqueue(gone := some_jobs(busy, 4))
    await store.cancel(busy, ids_of(gone), reason="")
    # A list that is sorted by rates does not count the jobs again.
    first, second = (
        await listed(fresh_books, OrgSort.BACKLOG),
        await listed(fresh_books, OrgSort.RATE, max_age_us=MINUTE),
    )
    assert ([one.org for one in first], [one.org for one in second]) == (["idle", "busy"], ["busy", "idle"])
    over_us = second[0].rates_over_us
    assert over_us
    assert second[0].enqueued_per_1000_s == 5 * 1_000_000_000 // over_us
    assert second[0].ended_per_1000_s == 9 * 1_000_000_000 // over_us
    assert (second[1].enqueued_per_1000_s, second[1].ended_per_1000_s) == (0, 0)
    assert {(one.enqueued_per_1000_s, one.ended_per_1000_s) for one in await listed(fresh_books)} == {(0, 0)}


async def test_a_count_by_an_older_release_gives_no_wrong_rates(
    fresh_database: Database, fresh_books: QueueAdmin, org: OrgId
) -> None:
    store = Store(fresh_database)
    await listed(fresh_books)
    await populate(store, org, ready=4)
    # Write a count as an older release does: it does not write how many jobs were accepted.
    await fresh_database.run(b"UPDATE windrow.org_figures_counted SET at = clock_timestamp()", {})
    assert [(one.enqueued_per_1000_s, one.rates_over_us) for one in await listed(fresh_books)] == [(0, None)]
    await populate(store, org, ready=1)
    assert [one.rates_over_us is not None for one in await listed(fresh_books)] == [True]


async def test_a_count_that_waited_for_another_does_not_count_again(
    fresh_database: Database, fresh_books: QueueAdmin, org: OrgId
) -> None:
    store = Store(fresh_database)
    await populate(store, org, ready=4)
    await listed(fresh_books)
    await populate(store, org, ready=4)
    async with fresh_database.transaction() as connection:
        # This transaction is the other count. It keeps the row locked until it commits.
        await connection.execute("UPDATE windrow.org_figures_counted SET before = at, at = now(), accepted_at = now()")
        await connection.execute("UPDATE windrow.org_figures SET ready = 8, accepted = 8, enqueued = 4")
        second = asyncio.create_task(org_figures.count(fresh_books._database, max_age_us=NOW))
        waiting = b"SELECT FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
        await until(lambda: fresh_database.run(waiting, {}), bool)
    await second
    (one,) = await listed(fresh_books, max_age_us=MINUTE)
    assert one.rates_over_us
    assert one.enqueued_per_1000_s == 4 * 1_000_000_000 // one.rates_over_us


async def test_a_count_of_a_clock_that_was_set_back_since_is_not_used(
    fresh_database: Database, fresh_books: QueueAdmin, org: OrgId
) -> None:
    """If the count were used, the figures would not change until the clock reaches the time of the count again."""
    await listed(fresh_books)
    await fresh_database.run(
        b"UPDATE windrow.org_figures_counted SET at = at + interval '1 hour', accepted_at = at + interval '1 hour'", {}
    )
    await populate(Store(fresh_database), org, ready=4)
    (one,) = await listed(fresh_books, max_age_us=MINUTE)
    assert (one.ready, one.rates_over_us) == (4, None)


async def test_a_search_finds_parts_of_names_in_either_case(fresh_database: Database, fresh_books: QueueAdmin) -> None:
    store = Store(fresh_database)
    for name in ("Acme", "pacme%", "initech"):
        await populate(store, OrgId(name), ready=1)
    for search, names in {"acME": ["Acme", "pacme%"], "%": ["pacme%"], "_": []}.items():
        assert [one.org for one in await listed(fresh_books, OrgSort.NAME, search=search)] == names


async def test_an_org_that_moves_is_on_both_shards_and_afterwards_only_where_it_lives(pair: Pair, org: OrgId) -> None:
    await populate(pair.store(A), org, ready=3, leased=1)
    await pair.store(A).enqueue(some_jobs(OrgId("other"), 1))
    move = await pair.begin([org], target=B)
    assert slot_of(org) in {slot for slot, place in enumerate((await pair.known()).slots) if len(place.reads) > 1}
    assert org in {one.org for one in await listed(pair.books[A])}
    # Release the leased job. Otherwise the move would wait until the lease ends.
    await pair.databases[A].run(
        b"UPDATE windrow.job SET lease = NULL, leased_at = NULL, worker = NULL, visible_at = run_at", {}
    )
    await pair.mover(move).finish()
    assert [counts(one) for one in await listed(pair.books[B])] == [(org, 0, 4, 0, 0)]
    assert [one.org for one in await listed(pair.books[A])] == ["other"]


@pytest.fixture(scope="module")
def cluster(postgres: Server, tmp_path_factory: pytest.TempPathFactory) -> Generator[tuple[Stubs, str], None, None]:
    databases = {shard: postgres.create(f"figures_{shard}") for shard in ("s1", "s2")}
    config = write_cluster(tmp_path_factory.mktemp("figures") / "cluster.toml", databases)
    with running_routers(config) as routers, stubs(routers.address) as both:
        for at in range(20):
            jobs = [job_message(id=job_id(), queue="mail", kind="greet") for _ in range(at + 1)]
            both.queue.Enqueue(queue_pb2.EnqueueRequest(org=f"org-{at:02}", jobs=jobs), timeout=PATIENCE_S)
        yield both, routers.address


def test_the_orgs_of_all_shards_are_one_list(cluster: tuple[Stubs, str]) -> None:
    both, _ = cluster
    request = cluster_pb2.ListOrgsRequest(page_size=7, max_age=Duration())
    found: list[cluster_pb2.OrgFigures] = []
    while True:
        answer = both.cluster.ListOrgs(request, timeout=PATIENCE_S)
        found += answer.orgs
        assert answer.HasField("age")
        assert answer.age.ToTimedelta() < timedelta(seconds=PATIENCE_S)
        if not answer.next_page_token:
            break
        request.page_token = answer.next_page_token
    assert [(one.org, one.ready) for one in found] == [(f"org-{at:02}", at + 1) for at in reversed(range(20))]
    assert {shard for one in found for shard in one.shards} == {"s1", "s2"}
    alone = both.cluster.ListOrgs(cluster_pb2.ListOrgsRequest(shard="s1"), timeout=PATIENCE_S).orgs
    assert [one.org for one in alone] == [one.org for one in found if list(one.shards) == ["s1"]]
    with pytest.raises(grpc.RpcError) as refused:
        both.cluster.ListOrgs(cluster_pb2.ListOrgsRequest(shard="s9"), timeout=PATIENCE_S)
    assert refused.value.code() is grpc.StatusCode.NOT_FOUND


def test_the_command_lists_them(cluster: tuple[Stubs, str]) -> None:
    _, address = cluster
    done = windrow("orgs", "list", "--limit", "2", "--max-age", "0s", "--address", address)
    assert (done.code, [line.split()[:3] for line in done.lines]) == (
        0,
        [["org", "scheduled", "ready"], ["org-19", "0", "20"], ["org-18", "0", "19"]],
    )
    assert "there are more orgs" in done.err
    (one,) = windrow("orgs", "list", "--search", "ORG-07", "--json", "--address", address).documents
    assert (one["org"], one["ready"], one["dead"]) == ("org-07", 8, 0)
    assert [d["org"] for d in windrow("orgs", "list", "--sort", "name", "--json", "--address", address).documents] == [
        f"org-{at:02}" for at in range(20)
    ]
    (first, *_) = windrow("top", "--json", "--interval", "10ms", "--address", address).documents
    assert (first["org"], first["ready"], first["enqueued_per_s"]) == ("org-19", 20, 0)
    assert first["rates_over_s"] > 0
    once = windrow("top", "--once", "--limit", "1", "--interval", "10ms", "--sort", "name", "--address", address)
    assert ([line.split()[0] for line in once.lines], "orgs by name, counted" in once.err) == (["org", "org-00"], True)
    assert windrow("top", "--sort", "rate", "org-07", "--address", address).code == 2
    (queue,) = windrow("top", "org-07", "--json", "--address", address).documents
    assert (queue["queue"], queue["ready"]) == ("mail", 8)
    assert "no org matches" in windrow("orgs", "list", "--search", "nobody", "--address", address).err


def test_top_prints_its_figures_once_on_a_terminal_that_cannot_update_them(cluster: tuple[Stubs, str]) -> None:
    _, address = cluster
    ours, terminal = pty.openpty()
    command = [sys.executable, "-m", "cli.main", "top", "--interval", "10ms", "--limit", "3", "--address", address]
    with subprocess.Popen(
        command, stdin=terminal, stdout=terminal, stderr=subprocess.PIPE, env={**os.environ, "TERM": "dumb"}
    ) as process:
        try:
            assert process.wait(PATIENCE_S) == 0
            assert select.select([ours], [], [], 0)[0], "nothing was printed"
            assert b"org-19" in os.read(ours, 65536)
        finally:
            process.kill()
            os.close(ours)
            os.close(terminal)


def test_top_updates_its_figures_in_place_until_q_is_pressed(cluster: tuple[Stubs, str]) -> None:
    both, address = cluster
    ours, terminal = pty.openpty()
    command = [sys.executable, "-m", "cli.main", "top", "--interval", "50ms", "--address", address]
    env = {**os.environ, "TERM": "xterm", "LINES": "12", "COLUMNS": "100"}
    shown = bytearray()

    def until_shown(text: bytes) -> None:
        while text not in shown:
            assert select.select([ours], [], [], PATIENCE_S)[0], bytes(shown)
            shown.extend(os.read(ours, 65536))

    with subprocess.Popen(command, stdin=terminal, stdout=terminal, stderr=terminal, env=env) as process:
        try:
            until_shown(b"q quits")
            shown.clear()
            jobs = [job_message(id=job_id(), queue="mail", kind="greet") for _ in range(77)]
            both.queue.Enqueue(queue_pb2.EnqueueRequest(org="newcomer", jobs=jobs), timeout=PATIENCE_S)
            os.write(ours, b"x")
            until_shown(b"newcomer")
            until_shown(b"org-1")
            # The screen shows only as many orgs as it has room for.
            assert b"org-02" not in shown
            os.write(ours, b"q")
            while process.poll() is None:
                if select.select([ours], [], [], 0.05)[0]:
                    shown.extend(os.read(ours, 65536))
            # The terminal shows its earlier screen again.
            assert b"\x1b[?1049l" in shown
            assert process.returncode == 0
        finally:
            process.kill()
            os.close(ours)
            os.close(terminal)
