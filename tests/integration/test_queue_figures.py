"""The metrics of routers show the number of jobs of each queue. The jobs are counted once for all routers. The largest
queues have their own series, and all other queues are added up."""

from __future__ import annotations

import asyncio
import contextlib
import urllib.request
from collections.abc import AsyncGenerator
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from psycopg.conninfo import make_conninfo

from router.fleet import shard_gauges
from router.fleet.fleet import Fleet
from router.process.metrics import Metrics
from shard.admin import queue_figures, statements
from shard.admin.queue_admin import QueueAdmin
from shard.admin.queue_figures import QueueFigures, folded
from shard.health import signs
from shard.health.signs import Signs
from shard.postgres.pool import Database
from shard.queue.settle import Nack, Settlement
from shard.queue.store import Store
from shard.queue_settings import QueueSettings
from shard.vocabulary import Failure, OrgId, QueueName, ShardName
from tests.conftest import SHARD
from tests.jobs import HOUR_US, MINUTE_US, lease_jobs, some_jobs
from tests.routers import PATIENCE_S, metrics_of, running_routers, until, write_cluster
from tests.timemachine import until_blocked

NOW, HOUR = 0, HOUR_US


def sample(folder: Path, name: str, **labels: str) -> float | None:
    """Returns the value of a series as the scrape endpoint serves it from this folder, or None."""
    text = generate_latest(cast("CollectorRegistry", Metrics(folder))).decode()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    found = [one.value for one in families[name].samples if one.labels == labels] if name in families else []
    return found[0] if found else None


@pytest.fixture
async def admin(fresh_dsn: str) -> AsyncGenerator[QueueAdmin]:
    database = Database(SHARD, fresh_dsn, connections=2, may_scan=True)
    await database.open()
    yield QueueAdmin(database)
    await database.close()


async def some_of_each(store: Store, org: OrgId) -> None:
    """Stores 4 ready jobs, 3 scheduled jobs, 2 leased jobs and 1 dead job in the queue `large`, and 1 ready job in the
    queue `small`."""
    await store.enqueue(some_jobs(org, 7, queue="large"))
    await store.enqueue(some_jobs(org, 3, queue="large", delay_us=HOUR_US))
    await store.enqueue(some_jobs(org, 1, queue="small"))
    (_, lease), *_ = await lease_jobs(store, org, queue="large", max_jobs=3, window_us=HOUR_US)
    await store.settle(Settlement.nack(org, [Nack(lease=lease, failure=Failure(permanent=True))]))


def by_queue(found: list[QueueFigures]) -> dict[tuple[str | None, str | None], tuple[int, ...]]:
    return {(one.org, one.queue): (one.scheduled, one.ready, one.leased, one.dead) for one in found}


async def test_the_jobs_of_each_queue_are_counted_by_state(
    admin: QueueAdmin, fresh_database: Database, org: OrgId, other_org: OrgId
) -> None:
    store = Store(fresh_database)
    await some_of_each(store, org)
    await store.enqueue(some_jobs(other_org, 2, queue="small"))
    found = await admin.queue_figures(max_age_us=NOW)
    assert by_queue(found) == {
        (org, "large"): (3, 4, 2, 1),
        (other_org, "small"): (0, 2, 0, 0),
        (org, "small"): (0, 1, 0, 0),
    }
    assert [(one.org, one.queue) for one in found][:2] == [(org, "large"), (other_org, "small")], "the largest first"
    assert all(one.oldest_ready_s is not None for one in found)


async def test_a_paused_queue_has_no_job_that_is_late(admin: QueueAdmin, fresh_database: Database, org: OrgId) -> None:
    store = Store(fresh_database)
    await store.enqueue(some_jobs(org, 2, queue="mail"))
    (before,) = await admin.queue_figures(max_age_us=NOW)
    assert before.oldest_ready_s is not None
    await admin.alter_queue(org, QueueName("mail"), QueueSettings(paused=True))
    assert await admin.queue_figures(max_age_us=NOW) == [QueueFigures(org, QueueName("mail"), 0, 2, 0, 0, None)]


async def test_jobs_are_counted_once_for_all_who_ask_within_a_minute(
    admin: QueueAdmin, fresh_database: Database, org: OrgId
) -> None:
    store = Store(fresh_database)
    await store.enqueue(some_jobs(org, 1, queue="mail"))
    both = await asyncio.gather(*(queue_figures.measure(fresh_database, max_age_us=HOUR) for _ in range(4)))
    assert all(by_queue(found) == {(org, "mail"): (0, 1, 0, 0)} for found in both)
    await store.enqueue(some_jobs(org, 1, queue="mail"))
    assert by_queue(await admin.queue_figures(max_age_us=HOUR)) == {(org, "mail"): (0, 1, 0, 0)}
    assert by_queue(await admin.queue_figures(max_age_us=NOW)) == {(org, "mail"): (0, 2, 0, 0)}


async def test_a_count_of_a_clock_that_was_set_back_since_is_not_fresh(
    admin: QueueAdmin, fresh_database: Database, org: OrgId
) -> None:
    """If the count were used, the figures would not change until the clock reaches the time of the count again."""
    await admin.queue_figures(max_age_us=NOW)
    await fresh_database.run(b"UPDATE windrow.queue_figures SET at = now() + interval '1 hour'", {})
    await Store(fresh_database).enqueue(some_jobs(org, 1, queue="mail"))
    assert by_queue(await admin.queue_figures(max_age_us=HOUR)) == {(org, "mail"): (0, 1, 0, 0)}


async def test_a_session_that_waits_for_the_count_of_another_reads_no_job(
    admin: QueueAdmin, fresh_database: Database, org: OrgId
) -> None:
    await Store(fresh_database).enqueue(some_jobs(org, 3, queue="mail"))
    await admin.queue_figures(max_age_us=NOW)
    minute_ago = b"UPDATE windrow.queue_figures SET at = now() - interval '1 minute'"
    await fresh_database.run(minute_ago, {})
    measured = {"max_age_us": MINUTE_US // 2, "named_max": 1, "share": 1}
    read = b"SELECT seq_tup_read + idx_tup_fetch FROM pg_stat_xact_user_tables WHERE relid = 'windrow.job'::regclass"

    async def second() -> int:
        async with fresh_database.transaction() as connection:
            await connection.run(statements.MEASURE_QUEUES, measured)
            ((tuples,),) = await connection.run(read, {})
            return int(tuples)

    async with fresh_database.transaction() as connection:
        await connection.run(statements.MEASURE_QUEUES, measured)
        assert await connection.run(read, {}) == [(3,)]
        waiting = asyncio.create_task(second())
        await until_blocked(fresh_database)
    assert await waiting == 0


async def test_of_many_queues_the_largest_have_names_and_the_others_are_added_up_exactly(
    admin: QueueAdmin, fresh_database: Database, org: OrgId
) -> None:
    store = Store(fresh_database)
    many = queue_figures.NAMED_MAX + 50
    for at in range(many):
        await store.enqueue(some_jobs(org, 1 + (at < 10), queue=f"q{at:03}"))
    found = await admin.queue_figures(max_age_us=NOW)
    assert len(found) == queue_figures.NAMED_MAX + 1
    assert sum(one.ready for one in found) == many + 10
    assert {one.queue for one in found[1:11]} == {f"q{at:03}" for at in range(10)}
    for named_max in (0, 1, 10):
        some = folded(found, named_max=named_max)
        assert [one.queue for one in some] == [*(one.queue for one in found[1 : named_max + 1]), None]
        assert sum(one.ready for one in some) == many + 10


async def test_an_org_with_many_large_queues_leaves_names_to_the_others(
    admin: QueueAdmin, fresh_database: Database, org: OrgId, other_org: OrgId
) -> None:
    store = Store(fresh_database)
    for at in range(queue_figures.NAMED_MAX):
        await store.enqueue(some_jobs(other_org, 2, queue=f"q{at:03}"))
    await store.enqueue(some_jobs(org, 1, queue="mail"))
    found = await admin.queue_figures(max_age_us=NOW)
    for named_max in (2, 10, queue_figures.NAMED_MAX):
        some = folded(found, named_max=named_max)
        # The large org gets all named series that no other org needs.
        assert [one.org for one in some] == [*[other_org] * (named_max - 1), org, None]
        assert sum(one.ready for one in some) == 2 * queue_figures.NAMED_MAX + 1


async def test_the_name_of_an_org_that_is_erased_is_gone_at_once(
    admin: QueueAdmin, fresh_database: Database, org: OrgId
) -> None:
    store = Store(fresh_database)
    await store.enqueue(some_jobs(org, 1, queue="mail"))
    assert by_queue(await admin.queue_figures(max_age_us=NOW)) == {(org, "mail"): (0, 1, 0, 0)}
    # Rename the org as begin_erasure.sql does.
    await fresh_database.run(
        b"UPDATE windrow.queue SET org = chr(127) || '1', slot = -1 WHERE org = %(org)s", {"org": org}
    )
    assert by_queue(await admin.queue_figures(max_age_us=HOUR)) == {(None, None): (0, 1, 0, 0)}


class Asked:
    """A shard as `record` sees it. `again` is set when `record` asks for a second time, that is, after `record` has
    written the first answer."""

    is_usable = True

    def __init__(self, database: Database) -> None:
        self.queue_admin = self
        self.questions = 0
        self.again = asyncio.Event()
        self.name = database.name
        self._database = database

    async def queue_figures(self, *, max_age_us: int) -> list[QueueFigures]:
        self.questions += 1
        if self.questions > 1:
            self.again.set()
        return await queue_figures.measure(self._database, max_age_us=max_age_us)

    async def signs(self) -> Signs:
        return await signs.read(self._database)


@contextlib.asynccontextmanager
async def recorded(folder: Path, monkeypatch: pytest.MonkeyPatch, **shards: Asked) -> AsyncGenerator[None]:
    """During the `with` block, records the figures of these shards again and again."""
    monkeypatch.setattr(shard_gauges, "_EVERY_S", 0.01)
    fleet = cast("Fleet", SimpleNamespace(shards=lambda: shards, holdings=dict))
    recording = asyncio.create_task(shard_gauges.record(fleet, folder, named_max=1))
    yield
    assert not recording.done()
    recording.cancel()
    await asyncio.wait({recording})


async def test_the_figures_of_a_shard_are_written_whatever_fails_beside_it(
    fresh_database: Database, spare_dsn: str, org: OrgId, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The recording continues although the folder cannot be written, and although a shard has an unforeseen fault."""
    await Store(fresh_database).enqueue(some_jobs(org, 1, queue="mail"))
    faulty = Database(ShardName("s2"), spare_dsn, connections=1, may_scan=True)
    await faulty.open()
    await faulty.run(b"DROP TABLE windrow.queue_figures", {})
    folder = tmp_path / "metrics"
    asked = Asked(fresh_database)
    async with asyncio.timeout(PATIENCE_S), recorded(folder, monkeypatch, s1=asked, s2=Asked(faulty)):
        await asked.again.wait()
        folder.mkdir()
        for _ in range(2):
            asked.again.clear()
            await asked.again.wait()
    await faulty.close()
    assert sample(folder, "windrow_queue_jobs", shard=SHARD, org=org, queue="mail", state="ready") == 1


async def test_a_process_that_gets_no_answer_leaves_the_figures_that_another_has_written(
    fresh_database: Database, fresh_dsn: str, org: OrgId, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the figures disappeared for a time, this gap would reset the alerts."""
    await Store(fresh_database).enqueue(some_jobs(org, 1, queue="mail"))
    for database in (fresh_database, Database(SHARD, make_conninfo(fresh_dsn, port=1), connections=1)):
        asked = Asked(database)
        async with asyncio.timeout(PATIENCE_S), recorded(tmp_path, monkeypatch, s1=asked):
            await asked.again.wait()
    assert sample(tmp_path, "windrow_queue_jobs", shard=SHARD, org=org, queue="mail", state="ready") == 1
    assert sample(tmp_path, "windrow_queue_jobs", shard=SHARD, org="", queue="", state="ready") == 0


async def test_a_count_that_does_not_end_holds_up_no_other_shard(
    fresh_database: Database, spare_dsn: str, org: OrgId, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await Store(fresh_database).enqueue(some_jobs(org, 1, queue="mail"))
    slow = Database(ShardName("s2"), spare_dsn, connections=2, may_scan=True)
    await slow.open()
    asked, waits = Asked(fresh_database), Asked(slow)
    async with slow.transaction() as connection:
        await connection.run(b"SELECT FROM windrow.queue_figures FOR UPDATE", {})
        async with asyncio.timeout(PATIENCE_S), recorded(tmp_path, monkeypatch, s1=asked, s2=waits):
            await asked.again.wait()
            assert waits.questions == 1
    await slow.close()
    assert sample(tmp_path, "windrow_queue_jobs", shard=SHARD, org=org, queue="mail", state="ready") == 1


@pytest.mark.parametrize("named", [0, 1])
async def test_a_scrape_has_the_largest_queues_by_name_and_the_sums_of_the_others(
    fresh_dsn: str, fresh_database: Database, org: OrgId, tmp_path: Path, named: int
) -> None:
    await some_of_each(Store(fresh_database), org)
    config = write_cluster(tmp_path / "cluster.toml", {"s1": fresh_dsn}, metrics_queues=named)
    config.write_text(config.read_text() + 'metrics = "127.0.0.1:0"\n')
    with running_routers(config, processes=2) as routers:

        def jobs() -> dict[tuple[str, str, str, str], float]:
            return scraped(metrics_of(routers), "windrow_queue_jobs")

        await asyncio.to_thread(until, jobs, "the jobs are counted")
        large = {"scheduled": 3, "ready": 4, "leased": 2, "dead": 1}
        small = {"scheduled": 0, "ready": 1, "leased": 0, "dead": 0}
        others = small if named else {state: jobs + small[state] for state, jobs in large.items()}
        expected = {("s1", "", "", state): number for state, number in others.items()}
        if named:
            expected |= {("s1", org, "large", state): number for state, number in large.items()}
        assert jobs() == expected
        waits = scraped(metrics_of(routers), "windrow_queue_oldest_ready_seconds")
        assert waits.keys() == {(shard, name, queue, "") for shard, name, queue, _ in expected}
        assert all(0 < wait < 10 * PATIENCE_S for wait in waits.values())


@pytest.mark.thorough
async def test_ten_thousand_orgs_have_few_series_whose_sum_is_exact(
    fresh_dsn: str, fresh_database: Database, tmp_path: Path
) -> None:
    store, orgs, named = Store(fresh_database), 10_000, 100
    for first in range(0, orgs, 500):
        await asyncio.gather(
            *(store.enqueue(some_jobs(OrgId(f"org-{at}"), 1 + at % 3)) for at in range(first, first + 500))
        )
    config = write_cluster(tmp_path / "cluster.toml", {"s1": fresh_dsn}, metrics_queues=named)
    config.write_text(config.read_text() + 'metrics = "127.0.0.1:0"\n')
    with running_routers(config) as routers:

        def jobs() -> dict[tuple[str, str, str, str], float]:
            return scraped(metrics_of(routers), "windrow_queue_jobs")

        await asyncio.to_thread(until, jobs, "the jobs are counted")
        assert len(jobs()) == 4 * (named + 1)
        assert sum(jobs().values()) == sum(1 + at % 3 for at in range(orgs))


def scraped(address: str, name: str) -> dict[tuple[str, str, str, str], float]:
    """Returns the values of this metric by shard, org, queue and state."""
    with urllib.request.urlopen(address, timeout=PATIENCE_S) as answer:
        text = answer.read().decode()
    return {
        (one["shard"], one["org"], one["queue"], one.get("state", "")): value
        for family in text_string_to_metric_families(text)
        for _, one, value, *_ in family.samples
        if family.name == name
    }
