"""What the audit log keeps of requests: every field of an audited request is recorded or left out on purpose."""

from __future__ import annotations

import asyncio
import json

from google.protobuf.descriptor import Descriptor

from router.codec.status import InvalidRequest, Violation
from router.gate.audit import CLUSTER_CHANGES, NAMES_ONLY, RECORDED, TEMPLATES, outcome_of, recorded_of
from shard.admin import audit
from windrow.v1 import access_pb2, admin_pb2, cluster_pb2, job_pb2, queue_pb2, schedules_pb2, workflows_pb2

# Fields with these names must never be in the log, at any depth of a request.
SECRET = {"payload", "result", "token", "secret", "password", "checkpoint", "log"}


def audited_requests() -> list[Descriptor]:
    services = (
        queue_pb2.DESCRIPTOR.services_by_name["Queue"],
        admin_pb2.DESCRIPTOR.services_by_name["Admin"],
        cluster_pb2.DESCRIPTOR.services_by_name["Cluster"],
        schedules_pb2.DESCRIPTOR.services_by_name["Schedules"],
        workflows_pb2.DESCRIPTOR.services_by_name["Workflows"],
    )
    return [
        method.input_type
        for service in services
        for method in service.methods
        if method.GetOptions().Extensions[access_pb2.scope] == access_pb2.SCOPE_ADMIN
        or f"{service.full_name}/{method.name}" in CLUSTER_CHANGES
    ]


def test_every_field_of_an_audited_request_is_recorded_or_left_out_on_purpose() -> None:
    names = {field.name for request in audited_requests() for field in request.fields} - {"org", "queue"}
    assert names == RECORDED | NAMES_ONLY | TEMPLATES


def test_no_recorded_message_has_a_field_for_content() -> None:
    seen: set[str] = set()
    todo = [
        field.message_type
        for request in audited_requests()
        for field in request.fields
        if field.name in RECORDED and field.message_type is not None
    ]
    while todo:
        message = todo.pop()
        if message.full_name not in seen:
            seen.add(message.full_name)
            assert SECRET.isdisjoint(field.name for field in message.fields), message.full_name
            assert "Attributes" not in message.full_name
            todo += [field.message_type for field in message.fields if field.message_type is not None]
    assert "windrow.v1.QueueConfig" in seen


def test_long_lists_and_texts_are_cut() -> None:
    many = queue_pb2.CancelJobsRequest(org="a", ids=[f"id-{at}" for at in range(1000)], reason="x" * 10_000)
    kept = recorded_of(many)
    assert isinstance(kept["ids"], list)
    assert kept["ids"][-1] == "1000 in all"
    assert len(kept["ids"]) == 11
    assert len(str(kept["reason"])) == 200
    values = queue_pb2.Attributes(values={f"key-{at:03}": "secret" for at in range(100)})
    assert "secret" not in str(recorded_of(queue_pb2.AlterJobsRequest(org="a", ids=["1"], attributes=values)))


def test_of_the_jobs_of_a_schedule_only_queue_and_kind_are_kept() -> None:
    job = job_pb2.JobTemplate(queue="mail", kind="send", payload=b"secret", attributes={"key": "secret"})
    request = schedules_pb2.CreateScheduleRequest(
        org="a", name="daily", spec=schedules_pb2.ScheduleSpec(cron="0 8 * * *"), job=job
    )
    kept = recorded_of(request)
    assert kept == {"name": "daily", "spec": {"cron": "0 8 * * *"}, "job": {"queue": "mail", "kind": "send"}}


def test_an_entry_has_at_most_a_kibibyte_whatever_it_is_about() -> None:
    ids = [f"{at:0128}" for at in range(1000)]
    request = recorded_of(queue_pb2.CancelJobsRequest(org="a", ids=ids, reason="\U0001f600" * 1000))
    org, queue, principal = "\u00e4" * 64, "q" * 128, "\U0001f600" * 1000
    peer, method = "ipv4:10.0.0.7", "windrow.v1.Queue/CancelJobs"
    made = audit.intent(principal=principal, peer=peer, method=method, org=org, queue=queue, request=request)
    whole = [*(str(field) for field in made[:-1]), json.dumps(made.request, ensure_ascii=False)]
    assert sum(len(text.encode()) for text in whole) <= 1024
    assert (made.org, made.queue) == (org, queue)
    # Only the longest field is left out.
    assert made.request["ids"] == audit.LEFT_OUT
    assert made.request["reason"] != audit.LEFT_OUT
    many = {str(at): "x" * 200 for at in range(99)}
    assert audit.intent(principal="p", peer="h", method="m", request=many).request == {}


def test_an_outcome_is_the_code_and_the_reason_and_quotes_nothing() -> None:
    assert outcome_of(InvalidRequest([Violation("ids", "quoted")])) == "INVALID_ARGUMENT INVALID_REQUEST"
    assert outcome_of(asyncio.CancelledError()) == "CANCELLED"
    assert outcome_of(KeyError("secret")) == "INTERNAL INTERNAL_ERROR"
