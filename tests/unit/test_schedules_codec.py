"""A schedule that operators read has the same values in all fields as the schedule that they created."""

from __future__ import annotations

from dataclasses import fields

import pytest
from google.protobuf.duration_pb2 import Duration
from google.protobuf.field_mask_pb2 import FieldMask
from google.protobuf.timestamp_pb2 import Timestamp

from router.codec import convert
from router.codec import schedules as codec
from shard.schedule import RunCause, ScheduledRun, ScheduleName, ScheduleSpec, Timing, spec_of, spec_values
from shard.vocabulary import Micros
from windrow.v1 import job_pb2
from windrow.v1 import schedules_pb2 as pb

FULL_JOB = job_pb2.JobTemplate(
    queue="mail",
    kind="send",
    payload=b"hello",
    attributes={"a": "b"},
    priority=3,
    max_attempts=7,
    retry=job_pb2.RetryPolicy(fixed=job_pb2.FixedRetry(delay=Duration(seconds=9))),
    max_runtime=Duration(seconds=60),
    group="order-7",
)
FULL_SPEC = pb.ScheduleSpec(
    cron="0 8 * * *",
    time_zone="Europe/Paris",
    start=Timestamp(seconds=1_700_000_000),
    end=Timestamp(seconds=1_800_000_000),
    jitter=Duration(seconds=5),
    overlap=pb.OVERLAP_POLICY_BUFFER_ALL,
    catch_up=pb.CATCH_UP_POLICY_WINDOW,
    catch_up_window=Duration(seconds=3600),
    note="a note",
    declared_by="app",
)


def test_a_job_of_a_schedule_has_every_field_of_its_template() -> None:
    # This fails for a new field: give it a value in FULL_JOB.
    assert {field.name for field, _ in FULL_JOB.ListFields()} == {
        field.name for field in job_pb2.JobTemplate.DESCRIPTOR.fields
    }
    assert convert.template_message(codec.template(FULL_JOB)) == FULL_JOB


def test_a_spec_is_stored_and_read_with_every_field() -> None:
    assert codec.spec_message(codec.spec(FULL_SPEC)) == FULL_SPEC
    for timing in (pb.ScheduleSpec(interval=Duration(seconds=60)), pb.ScheduleSpec(at=Timestamp(seconds=5))):
        read = codec.spec_message(codec.spec(timing))
        assert read.WhichOneof("timing") == timing.WhichOneof("timing")
    stored = codec.spec(FULL_SPEC)
    assert spec_of(list(spec_values(stored).values())) == stored
    assert len(spec_values(stored)) == len(fields(ScheduleSpec)) - 1 + len(fields(Timing))


@pytest.mark.parametrize("name", [field.name for field in pb.ScheduleSpec.DESCRIPTOR.fields])
def test_a_mask_changes_the_field_that_it_names_and_no_other(name: str) -> None:
    before = codec.spec(pb.ScheduleSpec(cron="0 0 1 1 *"))
    given = FULL_SPEC
    if name in ("interval", "at"):
        given = pb.ScheduleSpec(**{name: Duration(seconds=9) if name == "interval" else Timestamp(seconds=9)})  # type: ignore[arg-type]
    request = pb.UpdateScheduleRequest(org="a", name="b", spec=given, update_mask=FieldMask(paths=[name]))
    after, _ = codec.change(request)(before, {})
    was, now = codec.spec_message(before), codec.spec_message(after)
    changed = {
        field.name
        for field in pb.ScheduleSpec.DESCRIPTOR.fields
        if was.HasField(field.name) != now.HasField(field.name) or getattr(was, field.name) != getattr(now, field.name)  # type: ignore[arg-type]
    }
    # A catch-up window is changed together with its policy, and a timing replaces the timing before it.
    expected = {"catch_up_window": set[str](), "catch_up": {name, "catch_up_window"}}.get(name, {name})
    assert changed == (expected | {"cron"} if name in ("interval", "at") else expected)


def test_what_a_mask_names_and_the_spec_lacks_is_reset() -> None:
    before = codec.spec(FULL_SPEC)
    mask = FieldMask(paths=["note", "overlap", "start", "jitter", "time_zone"])
    after, had = codec.change(pb.UpdateScheduleRequest(org="a", name="b", update_mask=mask))(before, {"queue": "mail"})
    message = codec.spec_message(after)
    assert (message.note, message.overlap, message.time_zone) == ("", pb.OVERLAP_POLICY_SKIP, "UTC")
    assert not message.HasField("start")
    assert had == {"queue": "mail"}


def test_what_a_job_knows_of_its_run_is_read_as_it_was_written() -> None:
    run = ScheduledRun(ScheduleName("daily"), Micros(5_000_000), Micros(4_000_000), RunCause.BACKFILL)
    assert ScheduledRun.from_json(run.to_json()) == run
    first = run._replace(previous=None)
    assert ScheduledRun.from_json(first.to_json()) == first
    # A newer release may write more fields.
    assert ScheduledRun.from_json(run.to_json().replace("{", '{"more":1,', 1)) == run
