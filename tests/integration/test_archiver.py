"""Runs the archiver as operators do, with the shards of a cluster file."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import sys
from collections.abc import AsyncGenerator, Iterable
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta, tzinfo
from pathlib import Path
from typing import Any

import grpc
import psycopg
import pytest
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2, metrics_service_pb2_grpc
from opentelemetry.proto.common.v1 import common_pb2

from archiver import reporting, run, service
from archiver.reporting import Listener
from archiver.run import AnotherArchives, Pass
from shard.admin import audit
from shard.admin.queue_admin import QueueAdmin
from shard.errors import ClocksDiffer, ShardUnavailable
from shard.placement.cluster_file import Cluster, ShardEntry
from shard.placement.file_watcher import WatchedFile
from shard.postgres.leader_lock import ARCHIVER, leader_session
from shard.postgres.pool import Database
from shard.queue.settle import Settlement
from shard.queue.store import Store
from shard.vocabulary import OrgId, ShardName
from tests.balancers import Field, open_field, until
from tests.jobs import lease_jobs, some_jobs
from tests.postgres import Server
from tests.routers import CHECKOUT, PATIENCE_S
from tests.timemachine import SetClock, age_finished

A, B = ShardName("s1"), ShardName("s2")


@pytest.fixture
async def field(tmp_path: Path, fresh_dsn: str, postgres: Server) -> AsyncGenerator[Field, None]:
    async with open_field(tmp_path, fresh_dsn, postgres, B) as opened:
        yield opened


async def finished_before(field: Field, org: OrgId, *, days: int) -> None:
    store = Store(field.databases[A])
    await store.enqueue(some_jobs(org, 2))
    await store.settle(Settlement.ack(org, [lease for _, lease in await lease_jobs(store, org)]))
    await age_finished(field.databases[A], org, days=days)


async def once(field: Field) -> dict[ShardName, Pass | Exception]:
    return dict(await service.archive_once(field.cluster, stop=asyncio.Event()))


@contextlib.asynccontextmanager
async def archiving(field: Field, cluster: Cluster, listener: Listener = reporting.log) -> AsyncGenerator[None]:
    """Runs the archiver during the `with` block, and then waits until the archiver has stopped."""
    stop = asyncio.Event()
    running = asyncio.create_task(service.archive(WatchedFile(field.config), cluster, stop=stop, listener=listener))
    try:
        yield
    finally:
        stop.set()
        await running


async def test_a_pass_turns_days_cold_drops_what_was_kept_for_its_time_and_says_so(field: Field, org: OrgId) -> None:
    field.write(s1={}, s2={})
    await finished_before(field, org, days=40)
    outcomes = await once(field)
    assert set(outcomes) == {A, B}
    done = outcomes[A]
    assert isinstance(done, Pass)
    assert [aged.jobs for aged in done.turned_cold] == [2]
    assert [aged.jobs for aged in done.dropped] == [2]
    assert "1 day(s) dropped: 2 job(s)" in str(done)
    again = (await once(field))[A]
    assert isinstance(again, Pass)
    assert (again.turned_cold, again.dropped, again.in_use, again.more) == ([], [], [], False)
    assert "nothing was due" in str(again)


async def test_of_two_archivers_one_works_and_the_other_names_it(field: Field) -> None:
    field.write(s1={}, s2={})
    async with leader_session(field.dsns[A], "cafe", role=ARCHIVER, shard=A) as other:
        assert await other.lead()
        outcomes = await once(field)
        refused = outcomes[A]
        assert isinstance(refused, AnotherArchives)
        assert str(refused).startswith("shard 's1': another archiver is at work: windrow archiver ")
        assert "cafe at 127.0.0.1 (process " in str(refused)
        assert isinstance(outcomes[B], Pass)
    assert isinstance((await once(field))[A], Pass)


async def test_a_shard_that_is_away_keeps_no_other_from_its_pass(field: Field) -> None:
    field.write(s1={}, s2={"dsn": "host=127.0.0.1 port=1 connect_timeout=1"})
    outcomes = await once(field)
    assert isinstance(outcomes[A], Pass)
    assert isinstance(outcomes[B], ShardUnavailable)


async def test_a_day_in_use_is_named_and_the_next_pass_takes_it(
    field: Field, org: OrgId, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shard.history.days._PAUSE_S", 0.001)
    field.write(s1={})
    await finished_before(field, org, days=3)
    async with await psycopg.AsyncConnection.connect(field.dsns[A], application_name="a report") as reader:
        await reader.execute("SELECT count(*) FROM windrow.finished")
        done = (await once(field))[A]
        assert isinstance(done, Pass)
        assert "(a report)" in done.in_use[0]
        assert "day(s) in use" in str(done)
    done = (await once(field))[A]
    assert isinstance(done, Pass)
    assert [aged.jobs for aged in done.turned_cold] == [2]


async def test_it_passes_on_schedule_by_the_file_as_it_is_and_keeps_the_one_before_a_bad_one(
    field: Field, org: OrgId, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    cluster = field.write("[archiver]\nschedule = '1d'\n", s1={})

    async def said() -> str:
        return caplog.text

    async with archiving(field, cluster):
        field.write("[archiver]\nschedule = '1s'\n", s1={})
        await until(said, lambda text: "shard 's1': nothing was due" in text)
        field.config.write_text(field.config.read_text().replace("'1s'", "'soon'"))
        await until(said, lambda text: "the cluster file is refused" in text and "'soon' is neither" in text)
        await finished_before(field, org, days=3)
        await until(said, lambda text: "turned cold: 2 job(s)" in text)
    (books,) = [found for found in await QueueAdmin(field.databases[A]).check() if found.org == org]
    assert (books.archived, books.balanced) == (2, True)


async def test_a_clock_that_is_set_back_during_a_pass_does_not_put_off_the_next_one(
    field: Field, monkeypatch: pytest.MonkeyPatch
) -> None:
    ahead = timedelta(days=30)

    class Clock(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> datetime:  # type: ignore[override]
            return datetime.now(tz) + ahead

    monkeypatch.setattr(service, "datetime", Clock)
    passes, twice = 0, asyncio.Event()

    def count(_: ShardName, __: Pass | Exception) -> None:
        nonlocal ahead, passes
        ahead = timedelta()
        passes += 1
        if passes == 2:
            twice.set()

    cluster = field.write("[archiver]\nschedule = '1s'\n", s1={})
    async with archiving(field, cluster, count), asyncio.timeout(PATIENCE_S):
        await twice.wait()


async def test_a_shard_whose_pass_takes_long_does_not_delay_the_passes_of_others(
    field: Field, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = field.write("[archiver]\nschedule = '1s'\n", s1={}, s2={})
    real = run.pass_over
    began, goes_on, others, again = 0, asyncio.Event(), asyncio.Event(), asyncio.Event()
    passes: list[ShardName] = []

    async def pass_slowly(entry: ShardEntry, *arguments: Any, **more: Any) -> Pass:
        nonlocal began
        if entry.name == A:
            began += 1
            await goes_on.wait()
        return await real(entry, *arguments, **more)

    def note(shard: ShardName, _: Pass | Exception) -> None:
        passes.append(shard)
        if passes.count(B) == 3:
            others.set()
        if passes.count(A) == 2:
            again.set()

    monkeypatch.setattr(service, "pass_over", pass_slowly)
    async with archiving(field, cluster, note):
        try:
            async with asyncio.timeout(PATIENCE_S):
                await others.wait()
                assert (began, passes) == (1, [B] * 3)
                goes_on.set()
                await again.wait()
        finally:
            goes_on.set()


async def test_a_pass_that_takes_long_keeps_no_connection_to_the_catalog(
    field: Field, monkeypatch: pytest.MonkeyPatch
) -> None:
    field.write(s1={}, s2={})
    real = run.pass_over
    open_now: set[ShardName] = set()
    seen: list[set[ShardName]] = []

    @contextlib.asynccontextmanager
    async def opened(name: ShardName, dsn: str) -> AsyncGenerator[Database]:
        async with opened_really(name, dsn) as database:
            open_now.add(name)
            try:
                yield database
            finally:
                open_now.discard(name)

    async def look(entry: ShardEntry, *arguments: Any, **more: Any) -> Pass:
        if entry.name == B:
            seen.append(set(open_now))
        return await real(entry, *arguments, **more)

    opened_really = service.opened
    monkeypatch.setattr(service, "opened", opened)
    monkeypatch.setattr(service, "pass_over", look)
    monkeypatch.setattr(service, "_entries", lambda cluster: [one for one in cluster.shards if one.name == B])
    await once(field)
    assert seen == [{B}]


async def test_an_unexpected_error_in_the_audit_log_ends_no_pass(
    field: Field, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cluster = field.write("[archiver]\nschedule = '1s'\n", s1={})
    failed, passed = asyncio.Event(), asyncio.Event()
    real = run.pass_over

    async def forget(*_: Any, **__: Any) -> int:
        failed.set()
        raise psycopg.errors.DeadlockDetected("deadlock detected")

    async def pass_after(*arguments: Any, **more: Any) -> Pass:
        await failed.wait()
        return await real(*arguments, **more)

    def note(_: ShardName, outcome: Pass | Exception) -> None:
        if isinstance(outcome, Pass):
            passed.set()

    monkeypatch.setattr(audit, "forget", forget)
    monkeypatch.setattr(service, "pass_over", pass_after)
    async with archiving(field, cluster, note), asyncio.timeout(PATIENCE_S):
        await passed.wait()
    assert "old entries of the audit log stay: unexpected error" in caplog.text


async def test_a_directory_that_no_export_can_be_written_to_is_reported_at_the_start(
    field: Field, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    place = tmp_path / "a file"
    place.write_text("")
    cluster = field.write(f"[archiver]\nschedule = '1d'\nexport = '{place}'\n", s1={})

    async def errors() -> list[str]:
        return [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]

    async with archiving(field, cluster):
        (error,) = await until(errors, bool)
    assert error.startswith(f"no job can be exported, so no day is dropped: {place}: ")


class Sink(metrics_service_pb2_grpc.MetricsServiceServicer):
    """Receives metrics, as a collector does."""

    def __init__(self) -> None:
        self.numbers: dict[tuple[str, str], float] = {}

    def Export(  # noqa: N802 - as the service calls it  # pyrefly: ignore[bad-override]
        self, request: metrics_service_pb2.ExportMetricsServiceRequest, context: grpc.ServicerContext
    ) -> metrics_service_pb2.ExportMetricsServiceResponse:
        del context
        for metric in request.resource_metrics[0].scope_metrics[0].metrics:
            for counted in metric.sum.data_points:
                self.note(metric.name, counted.attributes, counted.as_int)
            for measured in metric.histogram.data_points:
                self.note(metric.name, measured.attributes, measured.count)
        return metrics_service_pb2.ExportMetricsServiceResponse()

    def note(self, name: str, attributes: Iterable[common_pb2.KeyValue], number: float) -> None:
        told = {one.key: one.value.string_value for one in attributes}
        self.numbers[name, f"{told['shard']} {told.get('what') or told.get('outcome') or ''}".rstrip()] = number


async def test_what_a_pass_did_is_told_as_metrics_where_the_environment_wants_them(field: Field, org: OrgId) -> None:
    field.write(s1={}, s2={"dsn": "host=127.0.0.1 port=1 connect_timeout=1"})
    await finished_before(field, org, days=3)
    sink, server = Sink(), grpc.server(ThreadPoolExecutor(1))
    metrics_service_pb2_grpc.add_MetricsServiceServicer_to_server(sink, server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        command = (sys.executable, "-m", "cli.main", "archiver", "--once", "--config", str(field.config))
        environ = os.environ | {"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{port}"}
        done = await asyncio.create_subprocess_exec(*command, env=environ, cwd=CHECKOUT)
        assert await done.wait() == 3
    finally:
        server.stop(None).wait()
    assert sink.numbers["windrow.archiver.jobs", "s1 turned cold"] == 2
    assert sink.numbers["windrow.archiver.bytes", "s1 turned cold"] > 0
    assert sink.numbers["windrow.archiver.pass.duration", "s1 done"] == 1
    assert sink.numbers["windrow.archiver.pass.duration", "s2 ShardUnavailable"] == 1


@pytest.mark.parametrize("ahead", [timedelta(days=400), -timedelta(hours=2)], ids=["ahead", "behind"])
async def test_where_a_shards_clock_differs_from_the_archivers_by_more_than_an_hour_nothing_is_deleted(
    field: Field, org: OrgId, ahead: timedelta, caplog: pytest.LogCaptureFixture
) -> None:
    clock = SetClock.of(field.dsns[A])
    field.write(s1={"dsn": clock.dsn}, s2={})
    await finished_before(field, org, days=40)
    entry = audit.intent(principal="operator", peer="", method="PurgeQueue", org=org, request={})
    await audit.begin(field.catalog, [entry])
    clock.set(ahead)
    outcomes = await once(field)
    assert isinstance(outcomes[A], ClocksDiffer)
    assert isinstance(outcomes[B], Pass)
    # The audit log is in the database of s1.
    assert [record.message for record in caplog.records if "audit log" in record.message] != []
    assert await field.catalog.run(b"SELECT id::text FROM windrow.audit", {}) == [(entry.id,)]
    reporting.log(A, outcomes[A])
    assert caplog.records[-1].levelno == logging.ERROR
    assert caplog.records[-1].message.startswith("shard 's1': its clock shows ")
    command = (sys.executable, "-m", "cli.main", "archiver", "--once", "--json", "--config", str(field.config))
    done = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, cwd=CHECKOUT)
    out, _ = await done.communicate()
    assert done.returncode == 5
    assert "nothing is deleted by its clock" in json.loads(out.splitlines()[0])["error"]
    # A clock that is half an hour ahead is no reason to stop.
    clock.set(timedelta(minutes=30))
    passed = (await once(field))[A]
    assert isinstance(passed, Pass)
    assert [aged.jobs for aged in passed.dropped] == [2]
