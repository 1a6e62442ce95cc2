"""Tests what each call about schedules does over gRPC, and that routers fire due instants."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import AsyncGenerator, Generator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import pairwise
from typing import Any, cast

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from google.protobuf.field_mask_pb2 import FieldMask
from google.protobuf.timestamp_pb2 import Timestamp

import windrow
from shard.vocabulary import OrgId
from tests.conftest import SHARD
from tests.routers import PATIENCE_S, Routers, Stubs, running_routers, stubs, until, violated_fields, write_cluster
from windrow.ids import uuid7
from windrow.v1 import admin_pb2, job_pb2, queue_pb2
from windrow.v1 import schedules_pb2 as pb

# 2026-01-05, a Monday.
MONDAY_S = 1_767_571_200
DAY_S = 86_400


@pytest.fixture(scope="module")
def routers(module_dsn: str, tmp_path_factory: pytest.TempPathFactory) -> Generator[Routers, None, None]:
    config = write_cluster(tmp_path_factory.mktemp("schedules") / "cluster.toml", {SHARD: module_dsn})
    with running_routers(config, processes=2) as running:
        yield running


@pytest.fixture(scope="module")
def router(routers: Routers) -> Generator[Stubs, None, None]:
    with stubs(routers.address) as opened:
        yield opened


def cron(expression: str = "0 0 1 1 *", **fields: object) -> pb.ScheduleSpec:
    return pb.ScheduleSpec(cron=expression, **fields)  # type: ignore[arg-type]


def create(router: Stubs, org: str, spec: pb.ScheduleSpec, name: str = "daily") -> pb.ScheduleInfo:
    job = job_pb2.JobTemplate(queue="mail", kind="send", payload=b"hello", attributes={"a": "b"})
    request = pb.CreateScheduleRequest(org=org, name=name, spec=spec, job=job)
    return router.schedules.CreateSchedule(request, timeout=PATIENCE_S).schedule


def get(router: Stubs, org: str, name: str = "daily") -> pb.GetScheduleResponse:
    return router.schedules.GetSchedule(pb.GetScheduleRequest(org=org, name=name), timeout=PATIENCE_S)


def refusal(router: Stubs, org: str, spec: pb.ScheduleSpec) -> grpc.RpcError:
    with pytest.raises(grpc.RpcError) as refused:
        create(router, org, spec)
    return refused.value


@pytest.mark.parametrize(
    ("spec", "field", "words"),
    [
        (pb.ScheduleSpec(), "spec.timing", "exactly one of cron, interval and at"),
        (cron("61 * * * *"), "spec.cron", "its field 1 (minute) must not be '61': it takes 0 to 59"),
        (cron("* * * 13 *"), "spec.cron", "its field 4 (month) must not be '13'"),
        (cron("* * * * * * *"), "spec.cron", "must have five fields"),
        (cron("0 0 30 2 *"), "spec.cron", "names days that never come"),
        (cron(time_zone="Europe/Pariss"), "spec.time_zone", "did you mean 'Europe/Paris'?"),
        (cron(time_zone="../etc/passwd"), "spec.time_zone", "must be a name of the IANA time zone database"),
        (pb.ScheduleSpec(interval=Duration(nanos=1)), "spec.interval", "1 s to 3,650 days"),
        (cron(jitter=Duration(seconds=86_401)), "spec.jitter", "0 s to 1 day"),
        (cron(start=Timestamp(seconds=MONDAY_S), end=Timestamp(seconds=MONDAY_S)), "spec.end", "after start"),
        (cron(catch_up=pb.CATCH_UP_POLICY_WINDOW), "spec.catch_up_window", "must be set"),
        (cron(note="a\nb"), "spec.note", "control characters"),
    ],
)
def test_a_bad_spec_is_named_by_its_field_with_what_is_wrong(
    router: Stubs, org: OrgId, spec: pb.ScheduleSpec, field: str, words: str
) -> None:
    error = refusal(router, org, spec)
    assert (error.code(), violated_fields(error)) == (grpc.StatusCode.INVALID_ARGUMENT, [field])
    assert words in str(error.details())


def test_a_schedule_is_created_once_and_found_with_what_it_has(router: Stubs, org: OrgId) -> None:
    made = create(router, org, cron("0 8 * * 1-5", time_zone="Europe/Paris", note="the digest"))
    assert (made.org, made.name, made.shard, made.paused) == (org, "daily", SHARD, False)
    assert (made.spec.cron, made.spec.time_zone, made.spec.note) == ("0 8 * * 1-5", "Europe/Paris", "the digest")
    assert (made.spec.overlap, made.spec.catch_up) == (pb.OVERLAP_POLICY_SKIP, pb.CATCH_UP_POLICY_LATEST)
    assert (made.job.queue, made.job.payload, made.job.priority) == ("mail", b"hello", 5)
    assert len(made.next) == 5
    assert get(router, org).schedule == made
    error = refusal(router, org, cron())
    assert error.code() == grpc.StatusCode.ALREADY_EXISTS


def test_an_update_changes_what_the_mask_names(router: Stubs, org: OrgId) -> None:
    create(router, org, cron(note="before", jitter=Duration(seconds=5)))

    def update(spec: pb.ScheduleSpec | None, *paths: str, job: job_pb2.JobTemplate | None = None) -> pb.ScheduleInfo:
        request = pb.UpdateScheduleRequest(
            org=org, name="daily", spec=spec, job=job, update_mask=FieldMask(paths=paths) if paths else None
        )
        return router.schedules.UpdateSchedule(request, timeout=PATIENCE_S).schedule

    assert update(pb.ScheduleSpec(note="after")).spec.note == "after"
    changed = update(pb.ScheduleSpec(interval=Duration(seconds=60)), "interval", "jitter")
    assert changed.spec.WhichOneof("timing") == "interval"
    assert not changed.spec.jitter.seconds
    assert changed.spec.note == "after"
    assert update(None, job=job_pb2.JobTemplate(queue="other", kind="push")).job.queue == "other"
    with pytest.raises(grpc.RpcError) as refused:
        update(pb.ScheduleSpec(catch_up=pb.CATCH_UP_POLICY_WINDOW))
    assert violated_fields(refused.value) == ["spec.catch_up_window"]
    with pytest.raises(grpc.RpcError) as refused:
        update(pb.ScheduleSpec(cron="60 * * * *"))
    assert violated_fields(refused.value) == ["spec.cron"]
    for paths, field in ((["cron"], "update_mask.paths[0]"), (["colour"], "update_mask.paths[0]")):
        with pytest.raises(grpc.RpcError) as refused:
            update(pb.ScheduleSpec(note="x"), *paths)
        assert violated_fields(refused.value) == [field]


def test_an_update_that_is_refused_does_not_make_the_queue_of_its_jobs(router: Stubs, org: OrgId) -> None:
    create(router, org, cron())
    request = pb.UpdateScheduleRequest(
        org=org,
        name="daily",
        spec=pb.ScheduleSpec(end=Timestamp(seconds=31_536_001)),
        job=job_pb2.JobTemplate(queue="other", kind="push"),
    )
    with pytest.raises(grpc.RpcError, match="leaves no instant"):
        router.schedules.UpdateSchedule(request, timeout=PATIENCE_S)
    listed = router.admin.ListQueues(admin_pb2.ListQueuesRequest(org=org), timeout=PATIENCE_S).queues
    assert [one.queue for one in listed] == ["mail"]


def test_a_schedule_that_is_refused_does_not_make_the_queue_of_its_jobs(router: Stubs, org: OrgId) -> None:
    create(router, org, cron())
    job = job_pb2.JobTemplate(queue="other", kind="push")
    request = pb.CreateScheduleRequest(org=org, name="daily", spec=cron(), job=job)
    with pytest.raises(grpc.RpcError) as refused:
        router.schedules.CreateSchedule(request, timeout=PATIENCE_S)
    assert refused.value.code() == grpc.StatusCode.ALREADY_EXISTS
    listed = router.admin.ListQueues(admin_pb2.ListQueuesRequest(org=org), timeout=PATIENCE_S).queues
    assert [one.queue for one in listed] == ["mail"]


def test_schedules_are_listed_a_page_at_a_time_by_name(router: Stubs, org: OrgId) -> None:
    for name in ("c", "a", "b"):
        create(router, org, cron(declared_by="worker" if name != "b" else ""), name)
    listed: list[str] = []
    token = ""
    while True:
        request = pb.ListSchedulesRequest(org=org, page_size=2, page_token=token)
        page = router.schedules.ListSchedules(request, timeout=PATIENCE_S)
        listed += [schedule.name for schedule in page.schedules]
        assert not any(schedule.job.payload for schedule in page.schedules)
        token = page.next_page_token
        if not token:
            break
    assert listed == ["a", "b", "c"]
    request = pb.ListSchedulesRequest(org=org, declared_by="worker")
    found = router.schedules.ListSchedules(request, timeout=PATIENCE_S).schedules
    assert [schedule.name for schedule in found] == ["a", "c"]


def test_a_page_of_schedules_ends_before_it_is_too_large_for_clients(router: Stubs, org: OrgId) -> None:
    names = [f"s{at:02}" for at in range(40)]
    template = job_pb2.JobTemplate(queue="q", kind="k", attributes={f"{at:02}": "x" * 1024 for at in range(32)})
    for name in names:
        request = pb.CreateScheduleRequest(org=org, name=name, spec=cron(), job=template)
        router.schedules.CreateSchedule(request, timeout=PATIENCE_S)
    pages: list[list[str]] = []
    token = ""
    while token or not pages:
        asked = pb.ListSchedulesRequest(org=org, page_size=1000, page_token=token)
        answer = router.schedules.ListSchedules(asked, timeout=PATIENCE_S)
        pages.append([schedule.name for schedule in answer.schedules])
        assert answer.ByteSize() < 2 * 1024 * 1024
        token = answer.next_page_token
    assert len(pages) == 2
    assert [name for page in pages for name in page] == names


def test_a_preview_shows_the_next_times_of_a_spec_or_of_a_schedule(router: Stubs, org: OrgId) -> None:
    spec = cron("30 2 * * *", time_zone="Europe/Paris")
    # The clocks skip 2:30 on 2026-03-29.
    after = Timestamp(seconds=1_774_656_000)
    request = pb.PreviewScheduleRequest(org=org, spec=spec, count=2, after=after)
    times = router.schedules.PreviewSchedule(request, timeout=PATIENCE_S).times
    assert [time.ToJsonString() for time in times] == ["2026-03-28T01:30:00Z", "2026-03-29T01:00:00Z"]
    made = create(router, org, spec)
    request = pb.PreviewScheduleRequest(org=org, name="daily", count=5)
    assert list(router.schedules.PreviewSchedule(request, timeout=PATIENCE_S).times) == list(made.next)


def test_a_trigger_stores_a_run_once_for_each_request(router: Stubs, org: OrgId) -> None:
    create(router, org, cron())
    request = pb.TriggerScheduleRequest(org=org, name="daily", request_id=uuid7())
    first = router.schedules.TriggerSchedule(request, timeout=PATIENCE_S)
    again = router.schedules.TriggerSchedule(request, timeout=PATIENCE_S)
    assert (again.job_id, first.duplicate, again.duplicate) == (first.job_id, False, True)
    (run,) = get(router, org).runs
    assert (run.cause, run.job_id, run.job_state) == (
        job_pb2.RUN_CAUSE_TRIGGER,
        first.job_id,
        job_pb2.JOB_STATE_READY,
    )
    dequeue = queue_pb2.DequeueRequest(org=org, queues=["mail"], max_jobs=10)
    (leased,) = router.queue.Dequeue(dequeue, timeout=PATIENCE_S).jobs
    assert (leased.id, leased.payload, dict(leased.attributes)) == (first.job_id, b"hello", {"a": "b"})
    assert (leased.scheduled_run.schedule, leased.scheduled_run.cause) == ("daily", job_pb2.RUN_CAUSE_TRIGGER)
    assert leased.scheduled_run.at == run.at


def test_a_backfill_of_last_year_stores_each_instant_once(router: Stubs, org: OrgId) -> None:
    create(
        router, org, pb.ScheduleSpec(interval=Duration(seconds=DAY_S), start=Timestamp(seconds=MONDAY_S - 900 * DAY_S))
    )
    start = MONDAY_S - 400 * DAY_S
    request = pb.BackfillScheduleRequest(
        org=org, name="daily", begin=Timestamp(seconds=start), end=Timestamp(seconds=start + 30 * DAY_S)
    )
    done = router.schedules.BackfillSchedule(request, timeout=PATIENCE_S)
    assert (done.stored, done.known) == (30, 0)
    done = router.schedules.BackfillSchedule(request, timeout=PATIENCE_S)
    assert (done.stored, done.known) == (0, 30)
    for end, words in ((start + 1500 * DAY_S * 1000, "must not be after"), (start, "must be after begin")):
        request.end.CopyFrom(Timestamp(seconds=end))
        with pytest.raises(grpc.RpcError) as refused:
            router.schedules.BackfillSchedule(request, timeout=PATIENCE_S)
        assert violated_fields(refused.value) == ["end"]
        assert words in str(refused.value.details())


def test_a_paused_schedule_has_no_next_times_and_a_deleted_one_is_gone(router: Stubs, org: OrgId) -> None:
    create(router, org, cron())
    paused = router.schedules.PauseSchedule(pb.PauseScheduleRequest(org=org, name="daily"), timeout=PATIENCE_S)
    assert paused.schedule.paused
    assert list(paused.schedule.next) == []
    resumed = router.schedules.ResumeSchedule(pb.ResumeScheduleRequest(org=org, name="daily"), timeout=PATIENCE_S)
    assert not resumed.schedule.paused
    assert len(resumed.schedule.next) == 5
    router.schedules.DeleteSchedule(pb.DeleteScheduleRequest(org=org, name="daily"), timeout=PATIENCE_S)
    with pytest.raises(grpc.RpcError) as refused:
        get(router, org)
    assert refused.value.code() == grpc.StatusCode.NOT_FOUND


def test_routers_fire_a_new_schedule_though_none_of_them_was_told_when(router: Stubs, org: OrgId) -> None:
    create(router, org, pb.ScheduleSpec(interval=Duration(seconds=1), overlap=pb.OVERLAP_POLICY_ALLOW))
    got: list[job_pb2.LeasedJob] = []
    deadline_s = time.monotonic() + PATIENCE_S
    while len(got) < 3:
        assert time.monotonic() < deadline_s
        request = queue_pb2.DequeueRequest(org=org, queues=["mail"], max_jobs=10, wait=Duration(seconds=10))
        got += router.queue.Dequeue(request, timeout=PATIENCE_S).jobs
    router.schedules.DeleteSchedule(pb.DeleteScheduleRequest(org=org, name="daily"), timeout=PATIENCE_S)
    at = [job.scheduled_run.at.seconds for job in got]
    assert at == sorted(set(at))
    for before, job in pairwise(got):
        assert job.scheduled_run.previous_at == before.scheduled_run.at


def test_routers_cancel_the_running_job_before_they_store_the_next_run(router: Stubs, org: OrgId) -> None:
    create(router, org, pb.ScheduleSpec(interval=Duration(seconds=1), overlap=pb.OVERLAP_POLICY_CANCEL_RUNNING))
    request = queue_pb2.DequeueRequest(org=org, queues=["mail"], max_jobs=1, wait=Duration(seconds=10))
    (first,) = router.queue.Dequeue(request, timeout=PATIENCE_S).jobs
    (second,) = router.queue.Dequeue(request, timeout=PATIENCE_S).jobs
    router.schedules.DeleteSchedule(pb.DeleteScheduleRequest(org=org, name="daily"), timeout=PATIENCE_S)
    assert second.scheduled_run.at.seconds > first.scheduled_run.at.seconds
    (job,) = router.queue.GetJobs(queue_pb2.GetJobsRequest(org=org, ids=[first.id]), timeout=PATIENCE_S).jobs
    assert (job.state, job.reason) == (job_pb2.JOB_STATE_CANCELLED, "replaced by the next run of its schedule")


def test_routers_store_a_buffered_run_when_the_job_has_ended(router: Stubs, org: OrgId) -> None:
    create(router, org, pb.ScheduleSpec(interval=Duration(seconds=1), overlap=pb.OVERLAP_POLICY_BUFFER_ONE))
    request = queue_pb2.DequeueRequest(org=org, queues=["mail"], max_jobs=10, wait=Duration(seconds=10))
    (first,) = router.queue.Dequeue(request, timeout=PATIENCE_S).jobs
    until(lambda: get(router, org).schedule.buffered == 1, "a run waits")
    router.queue.Ack(queue_pb2.AckRequest(org=org, acks=[queue_pb2.Ack(lease=first.lease)]), timeout=PATIENCE_S)
    (second,) = router.queue.Dequeue(request, timeout=PATIENCE_S).jobs
    router.schedules.DeleteSchedule(pb.DeleteScheduleRequest(org=org, name="daily"), timeout=PATIENCE_S)
    assert second.scheduled_run.at.seconds == first.scheduled_run.at.seconds + 1


# ── The Python client ────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
async def client(routers: Routers, org: OrgId) -> AsyncGenerator[windrow.Client, None]:
    async with windrow.Client(routers.address, org=org) as opened:
        yield opened


async def test_the_client_creates_changes_and_removes_schedules(client: windrow.Client) -> None:
    weekdays = windrow.Schedule(cron="0 8 * * 1-5", tz="Europe/Paris", overlap=windrow.Overlap.BUFFER_ONE)
    job = windrow.NewJob("mail", "send", {"to": "all"}, priority=3)
    made = await client.create_schedule("digest", weekdays, job)
    assert replace(made.schedule, jitter=0.0) == weekdays
    assert (made.job.queue, made.job.payload, made.job.priority) == ("mail", b'{"to":"all"}', 3)
    with pytest.raises(windrow.AlreadyExists):
        await client.create_schedule("digest", weekdays, job)
    with pytest.raises(windrow.InvalidRequest, match="must not be '61'"):
        await client.create_schedule("other", windrow.Schedule(cron="61 * * * *"), job)
    with pytest.raises(windrow.InvalidRequest, match="exactly one of cron, every and at"):
        await client.preview_schedule(windrow.Schedule())
    with pytest.raises(windrow.InvalidRequest, match="delay"):
        await client.create_schedule("other", weekdays, windrow.NewJob("mail", "send", delay=5))
    often = windrow.Schedule(every=3600, catch_up=windrow.CatchUp.WINDOW, catch_up_window=7200)
    changed = await client.update_schedule("digest", often)
    assert (changed.schedule.cron, changed.schedule.every) == ("", timedelta(hours=1))
    assert changed.job.payload == made.job.payload
    assert (await client.pause_schedule("digest")).paused
    job_id = await client.trigger_schedule("digest")
    resumed = await client.resume_schedule("digest")
    assert await client.preview_schedule("digest", count=5) == list(resumed.next)
    end = datetime.now(UTC) - timedelta(days=2)
    done = await client.backfill_schedule("digest", end - timedelta(hours=3), end)
    assert (done.stored, done.known) == (3, 0)
    found, runs = await client.get_schedule("digest")
    assert found == await one(client)
    assert runs[0].job_id == job_id
    assert {run.cause for run in runs} == {windrow.RunCause.TRIGGER, windrow.RunCause.BACKFILL}
    assert runs[0].job_state is windrow.JobState.READY
    record = (await client.get_jobs([job_id]))[job_id]
    assert record is not None
    assert record.scheduled_run == windrow.ScheduledRun(
        schedule="digest", at=runs[0].at, previous_at=None, cause=windrow.RunCause.TRIGGER
    )
    await client.delete_schedule("digest")
    with pytest.raises(windrow.NotFound):
        await client.get_schedule("digest")


async def one(client: windrow.Client) -> windrow.ScheduleRecord:
    """Returns the only schedule. The payload is included, although a list of schedules has no payloads."""
    (record,) = await client.list_schedules()
    found, _ = await client.get_schedule(record.name)
    return found


async def test_what_is_put_twice_is_changed_once_and_only_if_it_differs(client: windrow.Client) -> None:
    schedule = windrow.Schedule(cron="0 8 * * *", jitter=1.5, note="a")
    job = windrow.NewJob("mail", "send", {"a": 1}, retry=windrow.ExponentialRetry(), attributes={"x": "y"})
    made = await asyncio.gather(*(client.put_schedule("digest", schedule, job) for _ in range(5)))
    assert len({record.created_at for record in made}) == 1
    await client.pause_schedule("digest")
    put = await client.put_schedule("digest", replace(schedule, note="b"), job)
    assert (put.schedule.note, put.paused, put.created_at) == ("b", True, made[0].created_at)


async def test_a_run_that_is_asked_for_again_with_the_same_id_is_stored_once(client: windrow.Client) -> None:
    await client.create_schedule("digest", windrow.Schedule(cron="0 0 1 1 *"), windrow.NewJob("mail", "send"))
    asked = windrow.uuid7()
    assert len({await client.trigger_schedule("digest", request_id=asked) for _ in range(2)}) == 1
    _, runs = await client.get_schedule("digest")
    assert len(runs) == 1
    with pytest.raises(windrow.NotFound) as refused:
        await client.trigger_schedule("nosuch", request_id=asked)
    assert refused.value.made_ids == (asked,)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({}, "schedule: must have exactly one of cron, every and at, and has none of them"),
        ({"cron": "* * * * *", "every": 1}, "schedule: must have exactly one of cron, every and at, and has cron and "),
        ({"cron": 5}, "cron: must be a str, not 5"),
        ({"every": "1 h"}, "every: '1 h' is neither a number of seconds nor a timedelta"),
        ({"at": "2030-01-01"}, "at: '2030-01-01' is not a datetime"),
        ({"every": 1, "tz": UTC}, "tz: must be a str, not datetime.timezone.utc"),
        ({"every": 1, "note": "\ud800"}, "note: must not have lone surrogates"),
        ({"every": 1, "overlap": "skip"}, "overlap: must be an Overlap, not 'skip'"),
        ({"every": 1, "catch_up": windrow.CatchUp.WINDOW}, "catch_up_window: must be set with CatchUp.WINDOW"),
    ],
)
async def test_a_schedule_that_cannot_be_sent_is_refused_by_its_field_without_a_call(
    fields: dict[str, Any], told: str
) -> None:
    job, schedule, match = windrow.NewJob("mail", "send"), windrow.Schedule(**fields), "^" + re.escape(told)
    # No router is at this address, so a call would raise Unavailable.
    async with windrow.Client("127.0.0.1:1", org="acme", timeout=0.1) as client:
        for call in (
            partial(client.create_schedule, "digest", schedule, job),
            partial(client.update_schedule, "digest", schedule),
            partial(client.put_schedule, "digest", schedule, job),
            partial(client.preview_schedule, schedule),
            partial(client.declare_schedules, [("digest", schedule, job)], declared_by="app"),
        ):
            with pytest.raises(windrow.InvalidRequest, match=match):
                await call()
        worker = windrow.Worker(client, "mail")
        with pytest.raises(windrow.InvalidRequest, match=match):

            @worker.every(schedule)
            async def digest(_: windrow.Job) -> None: ...


async def test_what_is_no_schedule_or_no_name_of_one_is_refused_without_a_call() -> None:
    wrong: Any = "0 8 * * *"
    number: Any = 5
    job = windrow.NewJob("mail", "send")
    async with windrow.Client("127.0.0.1:1", org="acme", timeout=0.1) as client:
        for call in (client.create_schedule, client.put_schedule):
            with pytest.raises(windrow.InvalidRequest, match=r"^schedule: must be a windrow\.Schedule, not '0 8 "):
                await call("digest", wrong, job)
            with pytest.raises(windrow.InvalidRequest, match=r"^name: must be a str, not 5$"):
                await call(number, windrow.Schedule(every=1), job)
            with pytest.raises(windrow.InvalidJob, match=r"^jobs\[0\]: must be a windrow\.NewJob, not None$"):
                await call("digest", windrow.Schedule(every=1), cast("Any", None))


async def test_a_declared_schedule_that_is_refused_is_named(client: windrow.Client) -> None:
    worker = windrow.Worker(client, "mail", declares_as="app")

    @worker.every("0 0 1 1 *")
    async def good(_: windrow.Job) -> None: ...

    @worker.every("61 0 1 1 *")
    async def bad(_: windrow.Job) -> None: ...

    with pytest.raises(windrow.InvalidRequest, match=r"spec\.cron: its field 1") as refused:
        await asyncio.wait_for(worker.run(), PATIENCE_S)
    assert refused.value.__notes__[0] == "This is about the schedule 'bad'."


async def test_a_worker_declares_its_schedules_and_names_those_that_it_no_longer_declares(
    client: windrow.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    got: list[windrow.Job] = []

    def worker(*, removes: bool = False) -> windrow.Worker:
        return windrow.Worker(client, "mail", declares_as="app", removes_undeclared=removes)

    first = worker()

    @first.every(1)
    async def tick(job: windrow.Job) -> None:
        got.append(job)
        first.stop()

    @first.every("0 0 1 1 *", tz="Europe/Paris", name="new-year")
    async def greet(_: windrow.Job) -> None: ...

    with pytest.raises(windrow.InvalidRequest, match="declared twice"):

        @first.every(5, name="tick")
        async def other(_: windrow.Job) -> None: ...

    with pytest.raises(windrow.InvalidRequest, match="does not take jobs"):
        first.every(5, queue="elsewhere")
    await asyncio.wait_for(first.run(), PATIENCE_S)
    (job,) = got
    assert (job.kind, job.scheduled_run is not None and job.scheduled_run.schedule) == ("tick", "tick")
    declared = {record.name: record.schedule for record in await client.list_schedules(declared_by="app")}
    assert set(declared) == {"tick", "new-year"}
    assert (declared["new-year"].tz, declared["tick"].every) == ("Europe/Paris", timedelta(seconds=1))

    told = asyncio.Event()
    monkeypatch.setattr(logging.getLogger("windrow.worker"), "warning", lambda *_: told.set())

    async def declare(keeper: windrow.Worker) -> None:
        task = asyncio.create_task(keeper.run())
        await asyncio.wait_for(told.wait(), PATIENCE_S)
        told.clear()
        keeper.stop()
        await task

    for removes, left in ((False, {"tick", "new-year"}), (True, {"tick"})):
        again = worker(removes=removes)
        again.every(1)(tick)
        await declare(again)
        assert {record.name for record in await client.list_schedules(declared_by="app")} == left
    await client.create_schedule("by-hand", windrow.Schedule(cron="0 0 1 1 *"), windrow.NewJob("mail", "send"))
    thief = worker()
    thief.every("0 0 1 1 *", name="by-hand")(greet)
    with pytest.raises(windrow.InvalidRequest, match="kept by nobody in code"):
        await asyncio.wait_for(thief.run(), PATIENCE_S)
    await client.delete_schedule("tick")
