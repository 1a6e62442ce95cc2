"""The memory that a method reserves for its answer is enough for the largest answer that the contract and the router's
modules allow (I9)."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any, cast

import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor, MethodDescriptor
from google.protobuf.message import Message

from router import buffer
from router.buffer import Buffer
from router.codec import convert
from router.codec.status import InvalidRequest, RouterFull, Violation, status_of
from router.fleet.fleet import Fleet
from router.fleet.reload import Reloader
from router.gate.admission import Gate
from router.gate.call import Call
from router.gate.calls import ANSWER_HELD_BYTES, RESERVED_BY_METHOD, AnswerBytes, for_each
from router.keda import externalscaler_pb2
from router.route.by_lease import Leases
from router.services import queue as queue_service
from router.services.admin import AdminService
from router.services.cluster import ClusterService
from router.services.external_scaler import ExternalScalerService
from router.services.queue import QueueService
from router.services.schedules import SchedulesService
from router.services.workflows import WorkflowsService
from shard.errors import LimitReached
from shard.job_record import ANSWER_BYTES_MAX
from shard.limits import LIMITS_MAX, Limit, LimitKey, Measure
from shard.schedule import RUNS_KEPT
from shard.schedules.schedule_admin import LISTED_BYTES_MAX
from shard.vocabulary import OrgId, QueueName, ShardName
from tests.unit.test_job_fields import RECORD
from windrow.rules import Rule, limit
from windrow.v1 import admin_pb2, cluster_pb2, job_pb2, queue_pb2, schedules_pb2, workflows_pb2

ORG = OrgId("acme")
FLEET, GATE = cast("Fleet", None), cast("Gate", None)
SERVICES: dict[Any, Any] = {
    queue_pb2: QueueService(FLEET, GATE),
    admin_pb2: AdminService(FLEET, cast("Any", None)),
    cluster_pb2: ClusterService(FLEET, cast("Reloader", None)),
    schedules_pb2: SchedulesService(FLEET),
    workflows_pb2: WorkflowsService(FLEET),
    externalscaler_pb2: ExternalScalerService(FLEET, GATE),
}
METHODS = {
    method.full_name: (getattr(service, method.name), method)
    for module, service in SERVICES.items()
    for of_module in module.DESCRIPTOR.services_by_name.values()
    for method in of_module.methods
    if not method.client_streaming
}
# The router ends each of these answers when it has ANSWER_BYTES_MAX bytes.
ENDS_AT_ANSWER_BYTES = {
    "windrow.v1.Queue.GetJobs",
    "windrow.v1.Queue.FindJob",
    "windrow.v1.Admin.ListJobs",
    "windrow.v1.Workflows.ListParents",
}
# The size of the jobs in these answers has no bound here. A Dequeue and a WaitJob reserve memory for the jobs while
# they run.
RESERVE_LATER = {"windrow.v1.Queue.Dequeue", "windrow.v1.Queue.WaitJob"}

# A cluster may have more shards. An answer that names all of these shards fits nevertheless, because its other fields
# are smaller than this test assumes.
SHARDS = 100
ATTRIBUTES = limit(job_pb2.JobTemplate, "attributes", Rule.MAP_MAX_PAIRS)
# The largest length of a text in bytes, by field.
TEXTS = {
    # An org that is being erased has another name, which is a little longer (shard/history/erasure.py).
    "org": 160,
    "queue": 128,
    "kind": 128,
    "name": 128,
    "node": 128,
    "shard": 63,
    "shards": 63,
    "home_shard": 63,
    "source": 63,
    "target": 63,
    "unavailable_shards": 63,
    "id": 36,
    "job_id": 36,
    "job_ids": 36,
    "first_id": 36,
    "holder_id": 36,
    "trial_id": 36,
    "workflow_id": 36,
    "retry_of": 36,
    "reason": 1024,
    "Quarantine.reason": 256,
    "QuarantineCause.reason": 256,
    "worker": 128,
    "group": limit(job_pb2.JobTemplate, "group", Rule.STRING_MAX_BYTES),
    "taken_kinds": 128,
    "waits_for": 128,
    "next_page_token": 1024,
    "ListOrgsResponse.next_page_token": 2048,
    "Failure.type": limit(job_pb2.Failure, "type", Rule.STRING_MAX_BYTES),
    "Failure.message": limit(job_pb2.Failure, "message", Rule.STRING_MAX_BYTES),
    # The failure in a cause has no stack.
    "Failure.stack": 0,
    "payload": 65_536,
    "cron": 256,
    "time_zone": 64,
    "note": 1024,
    "declared_by": 128,
    "error": 1000,
    "digest": 12,
    "postgres_version": 64,
    "needs_restart": 100,
    "what": 300,
    "version": 64,
    "consume_lists": 64,
    "metricName": 64,
}
# The largest number of items in a list, by field.
ITEMS = {
    # The shards where an org is, and the shards that the org has left.
    "unavailable_shards": 16,
    "ListOrgsResponse.unavailable_shards": SHARDS,
    "answers": limit(queue_pb2.AckRequest, "acks", Rule.REPEATED_MAX_ITEMS),
    "EnqueueResponse.results": limit(queue_pb2.EnqueueRequest, "jobs", Rule.REPEATED_MAX_ITEMS),
    "RestoreJobsResponse.results": limit(admin_pb2.RestoreJobsRequest, "jobs", Rule.REPEATED_MAX_ITEMS),
    "ListQueuesResponse.queues": limit(admin_pb2.ListQueuesRequest, "page_size", Rule.INT32_LTE),
    # Each shard gives at most 1,000 queues. Most queues of an org are on all shards of the org.
    "GetStatsResponse.queues": 4 * 1000,
    "quarantines": 1000,
    # Each type of cause occurs at most once, except causes about quarantined kinds and about shards that do not answer.
    "causes": 16,
    "taken_kinds": 20,
    "waits_for": 10,
    "ListLimitsResponse.limits": LIMITS_MAX,
    "ListAllLimitsResponse.limits": LIMITS_MAX,
    "weights": 10_000,
    "shards": SHARDS,
    "OrgFigures.shards": 2,
    "labels": 16,
    "needs_restart": 20,
    "ListOrgsResponse.orgs": limit(cluster_pb2.ListOrgsRequest, "page_size", Rule.INT32_LTE),
    "CheckShardResponse.orgs": 500,
    "workflow_faults": 100,
    "features": 32,
    "consume_lists": 32,
    "attributes": ATTRIBUTES,
    "ScheduleInfo.next": 5,
    "runs": RUNS_KEPT,
    "schedules": limit(schedules_pb2.ListSchedulesRequest, "page_size", Rule.INT32_LTE),
    "times": limit(schedules_pb2.PreviewScheduleRequest, "count", Rule.INT32_LTE),
    "StartWorkflowResponse.job_ids": limit(workflows_pb2.StartWorkflowRequest, "nodes", Rule.REPEATED_MAX_ITEMS),
    "AddNodesResponse.job_ids": limit(workflows_pb2.AddNodesRequest, "nodes", Rule.REPEATED_MAX_ITEMS),
    "workflows": limit(workflows_pb2.ListWorkflowsRequest, "page_size", Rule.INT32_LTE),
    "ListNodesResponse.nodes": limit(workflows_pb2.ListNodesRequest, "page_size", Rule.INT32_LTE),
    # The nodes of a page have at most 20,000 edges in total.
    "NodeInfo.after": 20,
    "metricSpecs": 1,
    "metricValues": 1,
}
MAP_ENTRIES = {"AttributesEntry": 128 + 1024, "LabelsEntry": 2 * 128}


def known(of: dict[str, int], field: FieldDescriptor) -> int:
    named = ".".join(field.full_name.split(".")[-2:])
    assert named in of or field.name in of, f"say how large {field.full_name} may be"
    return of.get(named, of.get(field.name, 0))


def largest(message: Descriptor) -> int:
    """Returns the size of the largest message of a type."""
    alone = sum(size(field) for field in message.fields if field.containing_oneof is None)
    return alone + sum(max(map(size, oneof.fields)) for oneof in message.oneofs)


def size(field: FieldDescriptor) -> int:
    # `around`: the bytes of the tag, and of the length in front of texts and messages.
    around = 2 if field.number < 16 else 3
    message = field.message_type
    match field.cpp_type:
        case FieldDescriptor.CPPTYPE_MESSAGE if message is not None and message.full_name == "google.rpc.Status":
            # Memory for errors is reserved later, when the number of errors is known.
            return 0
        case FieldDescriptor.CPPTYPE_MESSAGE if message is not None and message.GetOptions().map_entry:
            each = MAP_ENTRIES[message.name] + 6 + around
        case FieldDescriptor.CPPTYPE_MESSAGE if message is not None:
            each = largest(message)
            around += each > 127
            each += around + (each > 16_383)
        case FieldDescriptor.CPPTYPE_STRING:
            each = known(TEXTS, field) + around + 2
        case FieldDescriptor.CPPTYPE_BOOL | FieldDescriptor.CPPTYPE_ENUM:
            # In a list, values of these types are packed.
            each = 1 if field.is_repeated else 1 + around
        case _:
            each = 10 + around
    return each * known(ITEMS, field) if field.is_repeated else each


def reserved(declared: AnswerBytes, method: MethodDescriptor) -> int:
    if isinstance(declared, int):
        return declared
    request: Any = REQUESTS[method.name]
    return declared(request)


REQUESTS: dict[str, Message] = {
    "Enqueue": queue_pb2.EnqueueRequest(jobs=[job_pb2.NewJob()] * ITEMS["EnqueueResponse.results"]),
    "StartWorkflow": workflows_pb2.StartWorkflowRequest(
        nodes=[workflows_pb2.NewNode()] * ITEMS["StartWorkflowResponse.job_ids"]
    ),
    "AddNodes": workflows_pb2.AddNodesRequest(nodes=[workflows_pb2.NewNode()] * ITEMS["AddNodesResponse.job_ids"]),
}


@pytest.mark.parametrize("name", METHODS)
def test_a_method_reserves_enough_memory_for_its_largest_answer(name: str) -> None:
    act, method = METHODS[name]
    declared: AnswerBytes = act.options.answer_bytes
    if name in RESERVE_LATER:
        assert declared == RESERVED_BY_METHOD
    elif name in ENDS_AT_ANSWER_BYTES:
        assert declared == ANSWER_HELD_BYTES
    elif name == "windrow.v1.Schedules.ListSchedules":
        # A page of schedules has no payloads, and ends when the schedules' attributes fill LISTED_BYTES_MAX.
        one = largest(schedules_pb2.ScheduleInfo.DESCRIPTOR) - TEXTS["payload"]
        attributes = size(job_pb2.JobTemplate.DESCRIPTOR.fields_by_name["attributes"])
        assert reserved(declared, method) >= ITEMS["schedules"] * (one - attributes) + LISTED_BYTES_MAX + attributes
    else:
        assert reserved(declared, method) >= largest(method.output_type)


def test_a_request_with_more_items_than_are_allowed_reserves_no_more_than_the_largest_allowed_one() -> None:
    answer_bytes = for_each(queue_pb2.EnqueueRequest, "jobs", 64)
    request = queue_pb2.EnqueueRequest()
    for _ in range(5000):
        request.jobs.add()
    assert answer_bytes(request) == answer_bytes(REQUESTS["Enqueue"])


def test_a_refused_job_takes_no_more_memory_than_is_reserved_for_it() -> None:
    violations = [Violation(f"jobs[{at}].template.{'x' * 64}", "\U0001f600" * 128) for at in range(100)]
    org = OrgId("\U0001f600" * 32)
    of_queue = Limit(LimitKey(org, QueueName("q" * 128), Measure.JOBS), 10**12, 10**6, version=1)
    for error in (
        InvalidRequest(violations),
        LimitReached(org, of_queue, usage=10**12, asked=10**12, retry_after_s=3600.5, positions=range(1000)),
    ):
        result = queue_pb2.EnqueueResult(id="i" * 36, error=status_of(error))
        assert result.ByteSize() + 4 <= queue_service.REFUSAL_BYTES


def serving(bytes_max: int) -> Call:
    """Returns a call that the current task serves. The buffer of the call has this size."""
    call = Call(Buffer(bytes_max), peer="ipv4:10.0.0.1:1")
    call.org = ORG
    call.set_current()
    return call


async def test_memory_for_the_refusals_of_an_independent_enqueue_is_reserved_before_they_are_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(buffer, "WAIT_S_MAX", 0.05)
    request = queue_pb2.EnqueueRequest(org=ORG, independent=True)
    for _ in range(300):
        request.jobs.add(template=job_pb2.JobTemplate(queue="?" * 100, kind="?" * 100))
    service = QueueService(FLEET, GATE)
    call = serving(64 * 1024 * 1024)
    answer = await service.Enqueue(request)
    assert isinstance(answer, Message)
    assert call.held >= answer.ByteSize() > 100_000
    # Without room for the errors, the call is refused.
    other = serving(100_000)
    other.hold(90_000)
    with pytest.raises(RouterFull):
        await service.Enqueue(request)


async def test_the_memory_of_acks_that_a_dequeue_answers_is_kept() -> None:
    acks = [queue_pb2.Ack(lease=bytes(200)) for _ in range(1000)]
    request = queue_pb2.DequeueRequest(org=ORG, acks=acks)
    service = QueueService(FLEET, GATE)

    async def settle(*_: object, **__: object) -> list[job_pb2.JobAnswer.ValueType]:
        return [job_pb2.JOB_ANSWER_STALE] * len(acks)

    service._leases = cast("Leases", SimpleNamespace(settle=settle))
    call = serving(64 * 1024 * 1024)
    call.hold(request.ByteSize())
    answer = queue_pb2.DequeueResponse(not_ok=await service._ack_before(request))
    assert len(answer.not_ok) == 1000
    assert call.held >= answer.ByteSize()


@pytest.mark.parametrize("character", ["x", "é", "\x01", "\x7f", '"'])
def test_an_answer_that_ends_with_the_largest_job_is_one_that_clients_accept(character: str) -> None:
    def fill(message: type[Message], field: str) -> str:
        return character * (limit(message, field, Rule.STRING_MAX_BYTES) // len(character.encode()))

    bytes_max = limit(job_pb2.JobTemplate, "payload", Rule.BYTES_MAX_LEN)
    failure = job_pb2.Failure(
        type=fill(job_pb2.Failure, "type"),
        message=fill(job_pb2.Failure, "message"),
        stack=fill(job_pb2.Failure, "stack"),
    )
    log = convert.printable(fill(queue_pb2.Extend, "log"))
    # Old attempts have neither stacks nor logs.
    entries = [
        {
            "attempt": 1000,
            "worker": "w" * 128,
            "leased_at_us": 2**51,
            "ended_at_us": 2**51,
            "outcome": "nacked",
            "failure": json.loads(convert.failure(failure).to_json()),
            "log": log,
        }
        for _ in range(50)
    ]
    for entry in entries[:-5]:
        del entry["failure"]["stack"], entry["log"]
    largest = convert.job(
        RECORD._replace(
            payload=bytes(bytes_max),
            result=bytes(limit(queue_pb2.Ack, "result", Rule.BYTES_MAX_LEN)),
            checkpoint=bytes(limit(queue_pb2.Extend, "checkpoint", Rule.BYTES_MAX_LEN)),
            attributes=json.dumps({f"{at:0128}": "v" * 1024 for at in range(ATTRIBUTES)}),
            reason="r" * TEXTS["reason"],
            history=json.dumps(entries),
        ),
        ShardName("s" * 63),
    )
    assert ANSWER_BYTES_MAX + largest.ByteSize() < 4 * 1024 * 1024
