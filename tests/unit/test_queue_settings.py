"""These tests, and tests/integration/test_moving.py, fail if a setting of a queue is forgotten somewhere."""

from __future__ import annotations

from dataclasses import fields

import pytest

import windrow
from cli.queues import Field, queue_json
from router.codec import convert
from router.codec.validate import violations_of
from shard.admin.queue_admin import QueueRecord
from shard.queue_settings import SETTING_COLUMNS, QueueSettings
from shard.vocabulary import Micros, OrgId, QueueName, ShardName
from tests.unit.test_statements import SHARD
from windrow.v1 import admin_pb2, job_pb2

FIELDS = list(admin_pb2.QueueConfig.DESCRIPTOR.fields_by_name)


def shown(settings: QueueSettings) -> admin_pb2.QueueConfig:
    record = QueueRecord(QueueName("mail"), Micros(1), settings)
    return convert.queue_info(OrgId("acme"), record, ShardName("s1")).config


def test_every_setting_has_a_column() -> None:
    assert [field.name for field in fields(QueueSettings)] == list(SETTING_COLUMNS)


def test_a_setting_of_zero_is_given_and_a_default_is_not() -> None:
    assert QueueSettings(retention_days=0, max_attempts=3, paused=False).given() == {
        "max_attempts": 3,
        "retention_days": 0,
    }


@pytest.mark.parametrize("name", FIELDS)
def test_a_field_of_a_configuration_is_read_and_shown(name: str) -> None:
    config = admin_pb2.QueueConfig()
    if name == "retry":
        config.retry.CopyFrom(job_pb2.RetryPolicy(fixed=job_pb2.FixedRetry()))
        config.retry.fixed.delay.seconds = 7
    else:
        setattr(config, name, 7)
    settings = convert.queue_settings(config)
    assert [setting for setting in SETTING_COLUMNS if getattr(settings, setting) is not None] == [name]
    assert getattr(shown(settings), name) == getattr(config, name)


def test_every_field_of_a_configuration_can_be_reset() -> None:
    assert [*Field] == FIELDS
    request = admin_pb2.UpdateQueueRequest(org="acme", queue="mail", config=admin_pb2.QueueConfig())
    request.update_mask.paths[:] = FIELDS
    assert violations_of(request) == []
    assert convert.queue_changes(request) == (admin_pb2.QueueConfig(), FIELDS)


def test_the_command_prints_every_setting_as_json() -> None:
    assert set(SETTING_COLUMNS) <= queue_json(admin_pb2.QueueInfo()).keys()


def test_the_python_client_gives_and_returns_every_setting() -> None:
    assert list(windrow.QueueOptions.__annotations__) == FIELDS
    assert set(SETTING_COLUMNS) <= {field.name for field in fields(windrow.QueueRecord)}


def test_every_setting_but_the_pause_is_a_field_of_the_configuration() -> None:
    assert [*FIELDS, "paused"] == list(SETTING_COLUMNS)


def test_statements_ask_in_one_way_whether_a_queue_gives_jobs() -> None:
    using = {path.stem for path in (SHARD / "queue" / "sql").glob("*.sql") if "{{gives_jobs" in path.read_text()}
    assert using == {
        "claim",
        "enqueue",
        "enqueue_plain",
        "explain_job",
        "explain_queue",
        "move_aged",
        "probe",
        "walk_queues",
        "sweep",
    }
    # explain_blocked is about workflows, which can be paused too.
    others = [path for path in (SHARD / "queue" / "sql").glob("*.sql") if path.stem != "explain_blocked"]
    assert not [path for path in others if "paused" in path.read_text()]
