"""Connections are cut at the worst moments. What was committed exists exactly once, and a repeated call gets the answer
of the first call (I1, I3)."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable
from pathlib import Path

import grpc
import psycopg
import pytest
from google.protobuf.duration_pb2 import Duration

from proof.proxy import Moment, Proxy, grpc_answered, open_proxy, open_proxy_before, through
from shard.admin import limits
from shard.admin.queue_admin import OrgBooks, QueueAdmin
from shard.errors import InDoubt, ShardUnavailable, UnknownQueue
from shard.limits import LimitKey, Measure
from shard.placement import catalog, identity
from shard.postgres import clock
from shard.postgres.pool import Database
from shard.queue.pending_enqueue import Handed, Handover, Taker
from shard.queue.settle import Nack, Settlement
from shard.queue.store import Store
from shard.queue_settings import QueueSettings
from shard.vocabulary import Answer, Failure, JobId, Lease, OrgId, Outcome, QueueName, ShardName
from tests.balancers import until
from tests.conftest import CLUSTER, SHARD
from tests.effort import luck_of, trials
from tests.jobs import HOUR_US, QUEUE, ids_of, job_id, job_message, lease_jobs, some_jobs
from tests.routers import PATIENCE_S, Routers, running_routers, write_cluster
from tests.streams import client
from tests.timemachine import end_leases
from tests.workflows import Flows
from windrow.v1 import job_pb2, queue_pb2, queue_pb2_grpc

ORG = OrgId("cut")
# How many trials there are for each moment at which the outcome of a statement is unknown.
TRIALS = trials(24, thorough=1000)
CUTS = trials(40, thorough=600)


@pytest.fixture
async def proxy(fresh_dsn: str) -> AsyncGenerator[Proxy, None]:
    """A proxy in front of this test's shard."""
    async with open_proxy_before(fresh_dsn) as opened:
        yield opened


@pytest.fixture
async def store(fresh_dsn: str, proxy: Proxy) -> AsyncGenerator[Store, None]:
    """The store of this test's shard. The store connects through the proxy, as the store of a router would."""
    database = Database(SHARD, through(fresh_dsn, proxy), connections=2)
    await database.open()
    yield Store(database)
    await database.close()


async def books_of(database: Database) -> OrgBooks:
    """Returns the books of the only org, read without the proxy."""
    (books,) = await QueueAdmin(database).check()
    assert books.balanced
    return books


async def copies(database: Database) -> Counter[str]:
    """Returns how often each job id is stored, in all tables together."""
    rows = await database.run(
        b"SELECT id::text FROM windrow.job UNION ALL SELECT id::text FROM windrow.dead"
        b" UNION ALL SELECT id::text FROM windrow.finished",
        {},
    )
    return Counter(row[0] for row in rows)


# ── Between the shard's code and Postgres ────────────────────────────────────────────────────────────────────────────


@pytest.mark.thorough
@pytest.mark.timeout(600)
@pytest.mark.parametrize("moment", Moment)
async def test_an_enqueue_cut_around_its_commit_stores_each_job_once(
    store: Store, proxy: Proxy, fresh_database: Database, moment: Moment
) -> None:
    luck = luck_of(f"enqueue {moment}")
    expected: list[str] = []
    await store.enqueue(some_jobs(ORG))
    for _ in range(TRIALS):
        jobs = some_jobs(ORG, luck.randint(1, 3), dedup_keys=[str(job_id())] if luck.random() < 0.5 else ())
        cut = proxy.cut_at(luck.choice(jobs.ids).encode(), moment)
        known = await store.enqueue(jobs)
        assert cut.done
        # Jobs stored before the cut are recognised by their ids, and the caller gets no error.
        assert {jobs.ids[at] for at in known} <= set(jobs.ids)
        assert all(jobs.ids[at] == known_as for at, known_as in known.items())
        if moment is Moment.ANSWERED:
            assert len(known) == len(jobs)
        assert await store.enqueue(jobs) == {at: JobId(name) for at, name in enumerate(jobs.ids)}
        if jobs.dedup_keys:
            other = some_jobs(ORG, 1, dedup_keys=[jobs.dedup_keys[0]])
            assert await store.enqueue(other) == {0: jobs.ids[0]}
        expected += jobs.ids
    assert proxy.cuts_done == TRIALS
    stored = await copies(fresh_database)
    assert set(stored.values()) == {1}
    assert set(expected) <= set(stored)
    books = await books_of(fresh_database)
    assert (books.accepted, books.ready) == (len(expected) + 1, len(expected) + 1)


@pytest.mark.thorough
@pytest.mark.timeout(600)
@pytest.mark.parametrize("moment", Moment)
async def test_a_handover_cut_around_its_commit_is_told_once_and_a_release_makes_sure(
    store: Store, proxy: Proxy, fresh_database: Database, moment: Moment
) -> None:
    await store.enqueue(some_jobs(ORG))
    leased: list[str] = []
    lost: list[str] = []
    for trial in range(1, TRIALS // 2 + 1):
        jobs = some_jobs(ORG, 2)
        leases = [Lease(job_hex=name.replace("-", ""), number=trial) for name in jobs.ids]
        told: list[Handed] = []
        takers = dict.fromkeys(range(2), Taker(trial, "w", HOUR_US))
        cut = proxy.cut_at(jobs.ids[trial % 2].encode(), moment)
        known = await store.enqueue(jobs, Handover(takers=takers, done=told.append))
        assert cut.done
        (handed,) = told
        assert set(known) | set(handed.positions) == {0, 1}
        if handed.positions:
            # The second try stored the jobs.
            assert (handed.positions, known) == ([0, 1], {})
            assert await store.settle(Settlement.ack(ORG, leases)) == [Answer.OK] * 2
            leased += jobs.ids
        else:
            # The answer was lost, so the router was told that nothing was leased. It now releases the leases, so that
            # this becomes true.
            assert await store.settle(Settlement.release(ORG, leases)) == [Answer.OK] * 2
            lost += jobs.ids
    # After a cut right after sending, the server may have received the statement or not.
    if moment is not Moment.SENT:
        assert (bool(leased), bool(lost)) == (moment is Moment.UNSENT, moment is Moment.ANSWERED)
    stored = await copies(fresh_database)
    assert set(stored.values()) == {1}
    books = await books_of(fresh_database)
    assert (books.succeeded, books.ready, books.leased) == (len(leased), len(lost) + 1, 0)


Act = Callable[[Store, list[Lease]], Awaitable[list[Answer]]]


def settle(**fields: object) -> Act:
    async def act(store: Store, leases: list[Lease]) -> list[Answer]:
        return await store.settle(Settlement.nack(ORG, [Nack(lease=lease, **fields) for lease in leases]))  # type: ignore[arg-type]

    return act


# For each verb of a consumer: the call, how many statements of the call name the job (a cut hits one of these
# statements), and the state of the job after the call.
ACTS: dict[str, tuple[Act, int, str]] = {
    "ack": (lambda store, leases: store.settle(Settlement.ack(ORG, leases, [b"done"] * len(leases))), 1, "succeeded"),
    "nack": (settle(failure=Failure(message="no"), retry_after_us=HOUR_US), 2, "scheduled"),
    "kill": (settle(failure=Failure(message="no", permanent=True)), 2, "dead"),
    "extend": (lambda store, leases: store.settle(Settlement.extend(ORG, leases, window_us=2 * HOUR_US)), 1, "leased"),
    "release": (lambda store, leases: store.settle(Settlement.release(ORG, leases)), 1, "ready"),
}
# How the attempts of the jobs end after each verb.
ENDED: dict[str, list[tuple[Outcome, Failure | None]]] = {
    "ack": [(Outcome.ACKED, None)],
    "nack": [(Outcome.NACKED, Failure(message="no"))],
    "kill": [(Outcome.NACKED, Failure(message="no", permanent=True))],
    "extend": [],
    "release": [(Outcome.RELEASED, None)],
}


@pytest.mark.thorough
@pytest.mark.timeout(600)
@pytest.mark.parametrize("verb", ACTS)
async def test_what_a_consumer_says_is_ok_again_after_a_cut(
    store: Store, proxy: Proxy, fresh_database: Database, verb: str
) -> None:
    act, statements, state = ACTS[verb]
    luck = luck_of(verb)
    jobs: list[str] = []
    for trial in range(TRIALS // 2):
        # Each trial has a queue of its own, because released jobs can be leased again.
        batch = some_jobs(ORG, 2, queue=f"queue-{trial}")
        await store.enqueue(batch)
        held = await lease_jobs(store, ORG, queue=f"queue-{trial}", window_us=HOUR_US)
        assert {job.id for job, _ in held} == set(batch.ids)
        leases = [lease for _, lease in held]
        moment = luck.choice(list(Moment))
        cut = proxy.cut_at(luck.choice(leases).job_hex.encode(), moment, nth=luck.randint(1, statements))
        assert await act(store, leases) == [Answer.OK] * len(leases)
        assert cut.done
        assert await act(store, leases) == [Answer.OK] * len(leases)
        jobs += batch.ids
    records = await Store(fresh_database).get(ORG, [JobId(name) for name in jobs], include_payload=True)
    assert Counter(record.state for record in records) == {state: len(jobs)}
    for record in records:
        # Each attempt ended only once, however often the call was repeated.
        ended = [(attempt.outcome, attempt.failure) for attempt in record.attempts()]
        assert ended == ENDED[verb]
        assert record.result == (b"done" if verb == "ack" else None)
    await books_of(fresh_database)


@pytest.mark.thorough
async def test_a_cancel_cut_after_its_commit_is_ok_again(store: Store, proxy: Proxy, fresh_database: Database) -> None:
    luck = luck_of("cancel")
    for _ in range(TRIALS // 4):
        jobs = some_jobs(ORG, 2)
        await store.enqueue(jobs)
        ids = [JobId(name) for name in jobs.ids]
        cut = proxy.cut_at(jobs.ids[0].encode(), luck.choice(list(Moment)))
        assert await store.cancel(ORG, ids, reason="") == [Answer.OK] * 2
        assert cut.done
        assert await store.cancel(ORG, ids, reason="") == [Answer.OK] * 2
    books = await books_of(fresh_database)
    assert books.cancelled == books.accepted == TRIALS // 4 * 2


@pytest.fixture
async def books(fresh_dsn: str, proxy: Proxy) -> AsyncGenerator[QueueAdmin, None]:
    """The administration of this test's shard, which connects through the proxy."""
    database = Database(SHARD, through(fresh_dsn, proxy), connections=1, may_scan=True)
    await database.open()
    yield QueueAdmin(database)
    await database.close()


@pytest.mark.parametrize(("moment", "done"), [(Moment.UNSENT, 0), (Moment.ANSWERED, 3)], ids=["unsent", "answered"])
async def test_of_a_redrive_and_a_purge_that_are_cut_the_caller_is_told_and_they_are_done_once_at_most(
    books: QueueAdmin, proxy: Proxy, fresh_database: Database, moment: Moment, done: int
) -> None:
    store = Store(fresh_database)
    await store.enqueue(some_jobs(ORG, 5))
    dead = [
        Nack(lease=lease, failure=Failure(message="no", permanent=True)) for _, lease in await lease_jobs(store, ORG)
    ]
    await store.settle(Settlement.nack(ORG, dead))

    async def redrive(limit: int) -> int:
        return await books.redrive(ORG, QUEUE, kind="", died_after=None, died_before=None, limit=limit)

    async def counts() -> tuple[int, int, int]:
        (one,) = await QueueAdmin(fresh_database).stats(ORG, QUEUE, include_finished=True)
        return one.dead, one.ready, one.cancelled

    # The first statement that names the queue only checks whether the queue exists.
    proxy.cut_at(QUEUE.encode(), moment, nth=2)
    with pytest.raises(ShardUnavailable, match="the change may have been made nevertheless"):
        await redrive(3)
    assert await counts() == (5 - done, done, 0)
    assert await redrive(5) == 5 - done

    proxy.cut_at(QUEUE.encode(), moment, nth=2)
    with pytest.raises(ShardUnavailable, match="the change may have been made nevertheless"):
        await books.purge_queue(ORG, QUEUE, limit=3, include_dead=True)
    assert await counts() == (0, 5 - done, done)
    assert await books.purge_queue(ORG, QUEUE, limit=5, include_dead=True) == 5 - done
    assert proxy.cuts_done == 2


async def test_a_deletion_of_a_queue_that_is_cut_around_its_commit_is_answered_as_done(
    books: QueueAdmin, proxy: Proxy
) -> None:
    for moment in Moment:
        await books.create_queue(ORG, QUEUE, QueueSettings())
        cut = proxy.cut_at(QUEUE.encode(), moment, nth=2)
        await books.delete_queue(ORG, QUEUE)
        assert cut.done
        with pytest.raises(UnknownQueue):
            await books.delete_queue(ORG, QUEUE)


# ── What a second run of a statement finds is not what the call has done ─────────────────────────────────────────────


async def no_leases(database: Database) -> bool:
    return await database.run(b"SELECT FROM windrow.job WHERE lease IS NOT NULL", {}) == []


@pytest.mark.parametrize("moment", Moment)
async def test_a_claim_whose_look_at_quarantined_kinds_is_cut_hands_out_no_job_without_a_lease(
    store: Store, proxy: Proxy, fresh_database: Database, moment: Moment
) -> None:
    await store.enqueue(some_jobs(ORG))
    jobs = some_jobs(ORG, 2)
    jobs.kinds[:] = ["poison"] * 2
    await store.quarantine.add(ORG, QUEUE, "poison", "", epoch=1)
    await store.enqueue(jobs)
    # The claim itself does not name the job.
    cut = proxy.cut_at(jobs.ids[0].encode(), moment)
    ((job, lease),) = await lease_jobs(store, ORG)
    assert cut.done
    assert job.kind != "poison"
    assert await store.settle(Settlement.ack(ORG, [lease])) == [Answer.OK]
    assert await no_leases(fresh_database)
    records = await store.get(ORG, ids_of(jobs), include_payload=False)
    assert [(record.state, record.attempt) for record in records] == [("ready", 0)] * 2


async def test_a_crash_of_a_kind_in_last_attempts_is_recorded_once_if_the_answer_is_lost(
    store: Store, proxy: Proxy, fresh_database: Database
) -> None:
    await QueueAdmin(fresh_database).create_queue(ORG, QUEUE, QueueSettings(quarantine_after=9))
    await store.enqueue(jobs := some_jobs(ORG, 2, max_attempts=1))
    for count in (1, 2):
        await lease_jobs(store, ORG)
        assert await end_leases(fresh_database, ORG) == 2
        cut = proxy.cut_at(jobs.ids[0].encode(), Moment.ANSWERED)
        assert await lease_jobs(store, ORG) == []
        assert cut.done
        assert await fresh_database.run(b"SELECT count(*) FROM windrow.crash", {}) == [(count,)]
        # The next crash of the same jobs counts.
        assert await store.redrive(ORG, ids_of(jobs)) == [Answer.OK] * 2


@pytest.mark.parametrize("moment", Moment)
async def test_a_redrive_of_jobs_that_is_cut_is_ok_and_a_later_one_is_stale(
    store: Store, proxy: Proxy, moment: Moment
) -> None:
    await store.enqueue(jobs := some_jobs(ORG, 2))
    kills = [
        Nack(lease=lease, failure=Failure(message="no", permanent=True)) for _, lease in await lease_jobs(store, ORG)
    ]
    await store.settle(Settlement.nack(ORG, kills))
    cut = proxy.cut_at(jobs.ids[0].encode(), moment)
    assert await store.redrive(ORG, ids_of(jobs)) == [Answer.OK] * 2
    assert cut.done
    assert await store.redrive(ORG, ids_of(jobs)) == [Answer.STALE] * 2
    assert {job.id for job, _ in await lease_jobs(store, ORG)} == set(jobs.ids)


@pytest.mark.parametrize("moment", Moment)
async def test_an_end_of_a_quarantine_that_is_cut_is_told_as_made(store: Store, proxy: Proxy, moment: Moment) -> None:
    await store.enqueue(some_jobs(ORG))
    await store.quarantine.add(ORG, QUEUE, "poison", "", epoch=1)
    cut = proxy.cut_at(b"poison", moment)
    assert await store.quarantine.release(ORG, QUEUE, "poison", epoch=1)
    assert cut.done
    assert not await store.quarantine.release(ORG, QUEUE, "poison", epoch=1)


@pytest.mark.parametrize("moment", Moment)
async def test_a_limit_whose_removal_is_cut_is_told_as_removed(
    fresh_dsn: str, proxy: Proxy, fresh_database: Database, moment: Moment
) -> None:
    await identity.admit(fresh_database, fresh_database, cluster=CLUSTER)
    key = LimitKey(ORG, QueueName(""), Measure.JOBS)
    await limits.set_limit(fresh_database, key, amount=1, interval_us=HOUR_US)
    database = Database(SHARD, through(fresh_dsn, proxy), connections=1)
    await database.open()
    cut = proxy.cut_at(ORG.encode(), moment)
    assert await limits.clear(database, key)
    assert cut.done
    assert not await limits.clear(database, key)
    await database.close()


@pytest.mark.parametrize("is_early", [False, True], ids=["released", "blocked"])
@pytest.mark.parametrize("moment", Moment)
async def test_of_two_signals_that_are_cut_at_most_one_is_told_that_it_counts(
    store: Store, proxy: Proxy, fresh_database: Database, moment: Moment, is_early: bool
) -> None:
    flows = Flows(fresh_database, ORG)
    flow = await flows.start({"build": [], "approve": ["build"]}, signals=["approve"])
    if not is_early:
        await flows.run_all()
    told = []
    for _ in range(2):
        cut = proxy.cut_at(b"approved", moment)
        told.append(await flows.signal(flow, "approve", b"approved", at=store))
        assert cut.done
    # If the answer to the first signal was lost, no caller is told that this signal counts.
    assert told in ([True, False], [moment is Moment.UNSENT, False])


async def test_changes_whose_second_answer_would_be_that_there_was_nothing_to_do_are_not_made_twice(
    fresh_dsn: str, proxy: Proxy
) -> None:
    database = Database(SHARD, through(fresh_dsn, proxy), connections=1)
    await database.open()
    acts: dict[bytes, Callable[[], Awaitable[object]]] = {
        b"setval": lambda: clock.accept(database),
        b"former_owner": lambda: catalog.forget_owner(database, ShardName("gone"), force=True),
    }
    for written, act in acts.items():
        cut = proxy.cut_at(written, Moment.ANSWERED)
        with pytest.raises(InDoubt, match="the change may have been made nevertheless"):
            await act()
        assert cut.done
    await database.close()


@pytest.mark.parametrize("consumers_router", ["the same router", "another router"])
async def test_a_release_whose_answer_is_lost_wakes_a_consumer_before_any_sweep(
    fresh_dsn: str, proxy: Proxy, fresh_database: Database, tmp_path: Path, consumers_router: str
) -> None:
    async def sessions(name: str, query: str) -> int:
        """Returns how many sessions of the routers with this `application_name` are idle after a query that matches
        `query`."""
        ((count,),) = await fresh_database.run(
            b"SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid() "
            b"AND state = 'idle' AND application_name = %(name)s AND query ~ %(query)s",
            {"name": name, "query": query},
        )
        return int(count)

    shards: dict[str, str] = {SHARD: through(fresh_dsn, proxy)}
    one = write_cluster(tmp_path / "one.toml", shards, name=CLUSTER, sweep_seconds=3600)
    other = write_cluster(tmp_path / "other.toml", shards, name=CLUSTER, sweep_seconds=3600)
    async with (
        routers_beside(one) as routers,
        routers_beside(other) as others,
        client(routers.address) as near,
        client(others.address) as far,
    ):
        (job,) = await near.enqueue(ORG, job_message(id=job_id(), queue=QUEUE, kind="greet"))
        (leased,) = await near.dequeue(ORG, QUEUE)
        # A router that begins to listen looks into all queues.
        await until(lambda: sessions("windrow doorbell", "^LISTEN"), lambda count: count == 2)
        consumer = near if consumers_router == "the same router" else far
        waiting = asyncio.create_task(consumer.dequeue(ORG, QUEUE, wait_s=PATIENCE_S))
        # The router has claimed for the consumer, and knows that no job will become due. So only the release below can
        # wake the consumer before its wait ends.
        await until(lambda: sessions("windrow", "first.visible_at"), bool)
        cut = proxy.cut_at(job.replace("-", "").encode(), Moment.ANSWERED)
        released = await near.queue.Release(queue_pb2.ReleaseRequest(org=ORG, leases=[leased.lease]))
        assert (cut.done, list(released.answers)) == (True, [job_pb2.JOB_ANSWER_OK])
        # At the end of its wait, the consumer looks for jobs once more.
        async with asyncio.timeout(PATIENCE_S / 2):
            assert [one.id for one in await waiting] == [job]


async def test_callers_cancelled_while_connections_break_cost_no_connection(fresh_dsn: str) -> None:
    luck = luck_of("cancelled")
    database = Database(SHARD, fresh_dsn, connections=4)
    await database.open()
    admin = await psycopg.AsyncConnection.connect(fresh_dsn, autocommit=True)
    try:
        for _ in range(60):
            callers = [asyncio.create_task(database.run(b"SELECT pg_sleep(0.002)", {})) for _ in range(8)]
            await admin.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                " WHERE datname = current_database() AND pid <> pg_backend_pid() AND backend_type = 'client backend'"
            )
            # A random pause, so that the cuts hit many different moments.
            await asyncio.sleep(luck.uniform(0, 0.01))
            for caller in callers:
                caller.cancel()
            await asyncio.gather(*callers, return_exceptions=True)

        everyone = asyncio.Barrier(4)

        async def one_of_four() -> None:
            while True:
                # A pooled connection may have been broken while it was not used.
                with contextlib.suppress(ShardUnavailable):
                    async with database.transaction():
                        await everyone.wait()
                    return
                await asyncio.sleep(0.05)

        # A broken connection must never be handed out again. The last round's connections may still be in the pool.
        await asyncio.wait_for(until_reached(database), PATIENCE_S)
        await asyncio.wait_for(asyncio.gather(*(one_of_four() for _ in range(4))), PATIENCE_S)
    finally:
        await admin.close()
        await database.close()


async def until_reached(database: Database) -> None:
    for _ in range(1000):
        with contextlib.suppress(ShardUnavailable):
            await database.run(b"SELECT 1", {})
            return
        await asyncio.sleep(0.05)


async def test_tries_to_connect_do_not_get_rarer(fresh_dsn: str, proxy: Proxy) -> None:
    # The proxy acts like a pooler that has lost its server: a client can connect, but its first statement fails.
    database = Database(SHARD, through(fresh_dsn, proxy), connections=1)
    cut = proxy.cut_at(b"set_config", Moment.UNSENT)
    await database.open()
    try:
        for cuts in range(1, 6):
            await asyncio.wait_for(proxy.until_cut(cuts), 5)
            assert cut.done
            with pytest.raises(ShardUnavailable):
                await database.run(b"SELECT 1", {})
            cut = proxy.cut_at(b"set_config", Moment.UNSENT)
        proxy.cut_no_more()
        await asyncio.wait_for(until_reached(database), 5)
    finally:
        await database.close()


# ── Between a client and its router ──────────────────────────────────────────────────────────────────────────────────


@contextlib.asynccontextmanager
async def routers_beside(config: Path) -> AsyncGenerator[Routers, None]:
    """Starts and stops routers without blocking the event loop, because they may talk to a proxy that runs in it."""
    running = running_routers(config)
    routers = await asyncio.to_thread(running.__enter__)
    try:
        yield routers
    finally:
        await asyncio.to_thread(running.__exit__, None, None, None)


async def until_answered(call: Callable[[], Awaitable[object]]) -> tuple[object, int]:
    """Repeats a call that has no answer, as a client does. Returns the answer and the number of tries."""
    async with asyncio.timeout(PATIENCE_S):
        for tries in itertools.count(1):
            try:
                return await call(), tries
            except grpc.aio.AioRpcError as error:
                if error.code() not in {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED}:
                    raise
                # The first pauses are short, because a cut connection needs no more. Later pauses are longer, for an
                # outage of the shard.
                await asyncio.sleep(min(0.02 * tries, 0.2))
    raise AssertionError("unreachable")


def channel(port: int | str) -> grpc.aio.Channel:
    """Returns a channel that reconnects at once (a client waits a second) and never retries by itself."""
    return grpc.aio.insecure_channel(
        f"127.0.0.1:{port}",
        options=[
            ("grpc.enable_retries", 0),
            ("grpc.initial_reconnect_backoff_ms", 10),
            ("grpc.min_reconnect_backoff_ms", 1000),
            ("grpc.max_reconnect_backoff_ms", 50),
        ],
    )


@pytest.mark.thorough
@pytest.mark.timeout(600)
async def test_calls_cut_on_the_way_back_to_the_client_are_answered_the_same_again(
    fresh_dsn: str, fresh_database: Database, tmp_path: Path
) -> None:
    luck = luck_of("client")
    jobs: list[str] = []
    config = write_cluster(tmp_path / "cluster.toml", {SHARD: fresh_dsn}, name=CLUSTER)
    async with routers_beside(config) as routers:
        host, _, port = routers.address.rpartition(":")
        async with open_proxy(host, int(port), grpc_answered) as proxy, channel(proxy.port) as made:
            queue = queue_pb2_grpc.QueueStub(made)
            for _ in range(TRIALS):
                job = job_message(id=job_id(), queue=QUEUE, kind="greet")
                enqueue = queue_pb2.EnqueueRequest(org=ORG, jobs=[job])
                cut = proxy.cut_at(job.id.encode(), Moment.ANSWERED)
                answer, tries = await until_answered(lambda: queue.Enqueue(enqueue, timeout=PATIENCE_S))  # noqa: B023
                assert (cut.done, tries > 1) == (True, True)
                assert isinstance(answer, queue_pb2.EnqueueResponse)
                assert [(result.id, result.duplicate) for result in answer.results] == [(job.id, True)]
                jobs.append(job.id)

                request = queue_pb2.DequeueRequest(org=ORG, queues=[QUEUE], visibility_window=Duration(seconds=3600))
                (leased,) = (await queue.Dequeue(request, timeout=PATIENCE_S)).jobs
                assert leased.id == job.id
                call: Callable[[], Awaitable[object]]
                match luck.randrange(4):
                    case 0:
                        ack = queue_pb2.AckRequest(org=ORG, acks=[queue_pb2.Ack(lease=leased.lease)])
                        call = lambda: queue.Ack(ack, timeout=PATIENCE_S)  # noqa: B023, E731
                    case 1:
                        kill = queue_pb2.Nack(lease=leased.lease, failure=job_pb2.Failure(permanent=True))
                        nack = queue_pb2.NackRequest(org=ORG, nacks=[kill])
                        call = lambda: queue.Nack(nack, timeout=PATIENCE_S)  # noqa: B023, E731
                    case 2:
                        extend = queue_pb2.ExtendRequest(org=ORG, extends=[queue_pb2.Extend(lease=leased.lease)])
                        call = lambda: queue.Extend(extend, timeout=PATIENCE_S)  # noqa: B023, E731
                    case _:
                        release = queue_pb2.ReleaseRequest(org=ORG, leases=[leased.lease])
                        call = lambda: queue.Release(release, timeout=PATIENCE_S)  # noqa: B023, E731
                cut = proxy.cut_at(leased.lease, Moment.ANSWERED)
                answer, tries = await until_answered(call)
                assert (cut.done, tries > 1) == (True, True)
                assert list(answer.answers) == [job_pb2.JOB_ANSWER_OK]  # type: ignore[attr-defined]
                cancel = queue_pb2.CancelJobsRequest(org=ORG, ids=[job.id])
                await queue.CancelJobs(cancel, timeout=PATIENCE_S)
    assert await copies(fresh_database) == Counter(jobs)
    assert (await books_of(fresh_database)).accepted == TRIALS


# ── Cuts at any place ────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.thorough
@pytest.mark.timeout(600)
async def test_cuts_anywhere_lose_and_double_nothing(
    fresh_dsn: str, fresh_database: Database, proxy: Proxy, tmp_path: Path
) -> None:
    luck = luck_of("anywhere")
    stored: set[str] = set()
    acked: set[str] = set()
    over = asyncio.Event()
    config = write_cluster(tmp_path / "cluster.toml", {SHARD: through(fresh_dsn, proxy)}, name=CLUSTER)
    async with routers_beside(config) as routers, channel(routers.address.rpartition(":")[2]) as made:
        queue = queue_pb2_grpc.QueueStub(made)

        async def produce() -> None:
            while not over.is_set():
                ids = [job_id() for _ in range(luck.randint(1, 20))]
                jobs = [job_message(id=one, queue=QUEUE, kind="k", payload=b"p" * luck.randint(0, 2000)) for one in ids]
                request = queue_pb2.EnqueueRequest(org=ORG, jobs=jobs)
                await until_answered(lambda: queue.Enqueue(request, timeout=PATIENCE_S))  # noqa: B023
                stored.update(ids)

        async def consume(worker: str) -> None:
            window = Duration(seconds=1)
            request = queue_pb2.DequeueRequest(
                org=ORG, queues=[QUEUE], max_jobs=10, visibility_window=window, worker=worker
            )
            while not (over.is_set() and len(acked) == len(stored)):
                answer, _ = await until_answered(lambda: queue.Dequeue(request, timeout=PATIENCE_S))
                assert isinstance(answer, queue_pb2.DequeueResponse)
                fates: dict[int, list[job_pb2.LeasedJob]] = {0: [], 1: [], 2: []}
                for job in answer.jobs:
                    fate = 0 if over.is_set() or luck.random() < 0.7 else luck.randint(1, 3)
                    # For fate 3, the consumer forgets the lease, and the lease expires.
                    fates.get(fate, []).append(job)
                if fates[0]:
                    acks = [queue_pb2.Ack(lease=job.lease) for job in fates[0]]
                    ack = queue_pb2.AckRequest(org=ORG, acks=acks)
                    said, _ = await until_answered(lambda: queue.Ack(ack, timeout=PATIENCE_S))  # noqa: B023
                    assert isinstance(said, queue_pb2.AckResponse)
                    done = {
                        job.id
                        for job, word in zip(fates[0], said.answers, strict=True)
                        if word == job_pb2.JOB_ANSWER_OK
                    }
                    assert not done & acked, "a job was finished twice"
                    acked.update(done)
                if fates[1]:
                    nacks = [queue_pb2.Nack(lease=job.lease, retry_after=Duration()) for job in fates[1]]
                    nack = queue_pb2.NackRequest(org=ORG, nacks=nacks)
                    await until_answered(lambda: queue.Nack(nack, timeout=PATIENCE_S))  # noqa: B023
                if fates[2]:
                    release = queue_pb2.ReleaseRequest(org=ORG, leases=[job.lease for job in fates[2]])
                    await until_answered(lambda: queue.Release(release, timeout=PATIENCE_S))  # noqa: B023

        async with asyncio.timeout(240), asyncio.TaskGroup() as group:
            for _ in range(2):
                group.create_task(produce())
            for number in range(3):
                group.create_task(consume(f"w{number}"))
            proxy.cut_at_random(luck, bytes_max=60_000)
            await proxy.until_cut(CUTS)
            proxy.cut_no_more()
            over.set()
    records = await Store(fresh_database).get(ORG, [JobId(one) for one in stored], include_payload=False)
    assert {record.id for record in records} == stored
    assert {record.state for record in records} == {"succeeded"}
    assert acked == stored
    for record in records:
        attempts = record.attempts()
        assert [attempt.outcome.value for attempt in attempts].count("acked") == 1
        for earlier, later in itertools.pairwise(attempts):
            assert earlier.ended_at <= later.leased_at
    books = await books_of(fresh_database)
    assert (books.accepted, books.succeeded) == (len(stored), len(stored))
