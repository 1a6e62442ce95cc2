"""GetServerInfo tells the limits that the router enforces and that the Python client uses."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.message import Message

import windrow.client
import windrow.job_rules
import windrow.payloads
import windrow.settlements
from router.codec import validate
from router.codec.lease_verbs import VERBS
from router.services.consume_stream import CREDIT_MAX
from router.services.server_info import server_info
from tests.unit.client_fake import FakeRouter
from windrow import Client, ServerInfo, channels
from windrow.rules import Rule, limit
from windrow.server_info import read_server_info
from windrow.v1 import admin_pb2, queue_pb2, server_pb2

LIMITS = server_info().limits
PROTO = Path(__file__).resolve().parents[2] / "proto/windrow/v1"
LEASES = [getattr(queue_pb2, f"{verb.method}Request") for verb in VERBS]
FEATURES = {server_pb2.ServerFeature.Name(one).removeprefix("SERVER_FEATURE_") for one in server_info().features}


def test_every_limit_is_told() -> None:
    assert {field.name for field, _ in LIMITS.ListFields()} == set(LIMITS.DESCRIPTOR.fields_by_name)
    assert re.fullmatch(r"\d+\.\d+\.\d+.*", server_info().version)
    assert set(server_info().features) == set(server_pb2.ServerFeature.values()) - {0}


def test_every_list_of_a_stream_message_is_told() -> None:
    lists = [field.name for field in queue_pb2.ConsumeRequest.DESCRIPTOR.fields if field.is_repeated]
    assert sorted(server_info().consume_lists) == sorted(lists)


def test_limits_are_those_that_the_comments_of_the_contract_tell() -> None:
    queue, job, admin = ((PROTO / name).read_text() for name in ("queue.proto", "job.proto", "admin.proto"))
    assert f"{LIMITS.max_message_bytes // 1024**2} MiB" in queue
    assert f"1 to {LIMITS.max_jobs_per_enqueue:,}" in queue
    assert f"1 to {LIMITS.max_queues_per_dequeue} distinct queues" in queue
    assert f"0 to {LIMITS.max_credit:,}" in queue
    assert f"At most {LIMITS.max_result_bytes // 1024} KiB." in queue
    assert f"At most {LIMITS.max_failure_type_bytes} bytes, no NUL." in job
    assert f"At most {LIMITS.max_failure_message_bytes // 1024} KiB, no NUL." in job
    assert f"At most {LIMITS.max_failure_stack_bytes // 1024} KiB, no NUL." in job
    window = (LIMITS.min_visibility_window.ToMilliseconds(), LIMITS.max_visibility_window.seconds // 3600)
    assert "{} ms to {} h; absent: 30 s".format(*window) in queue
    assert f"0 s to {LIMITS.max_wait.seconds} s;" in queue
    assert f"0 to {LIMITS.max_payload_bytes // 1024**2} MiB." in job
    assert f"At most {LIMITS.max_attributes};" in job
    assert f"0 s to {LIMITS.max_delay.seconds // 86_400:,} days." in job
    assert f"1 s to {LIMITS.max_dedup_window.seconds // 86_400} days;" in job
    assert f"dedup horizon ({LIMITS.max_id_age.seconds // 86_400} days)" in job
    assert f"an org may have {LIMITS.max_queues_per_org:,} queues on a shard" in job
    assert f"1 to {LIMITS.max_jobs_per_change:,}; 0 or absent: 1,000." in admin
    assert f"1 to {LIMITS.max_page_size:,}; 0 or absent: 100." in admin


def test_timestamps_have_the_bounds_that_the_comments_of_the_contract_tell() -> None:
    contract = re.sub(r"\n *// ", " ", "".join(path.read_text() for path in sorted(PROTO.glob("*.proto"))))
    told = re.findall(r"At most ([\d,]+) days ahead", contract)
    assert Counter(told) == Counter(f"{days:,}" for days in validate._DAYS_AHEAD_MAX.values())
    assert LIMITS.max_delay.seconds == min(validate._DAYS_AHEAD_MAX.values()) * 86_400


@pytest.mark.parametrize("request_type", [*LEASES, queue_pb2.ConsumeRequest])
def test_one_limit_holds_for_the_leases_of_every_verb(request_type: type[Message]) -> None:
    repeated = [field.name for field in request_type.DESCRIPTOR.fields if field.is_repeated]
    assert repeated
    for name in repeated:
        assert limit(request_type, name, Rule.REPEATED_MAX_ITEMS) == LIMITS.max_leases_per_call


def test_one_limit_holds_for_calls_of_a_kind() -> None:
    assert limit(queue_pb2.CancelJobsRequest, "ids", Rule.REPEATED_MAX_ITEMS) == LIMITS.max_ids_per_call
    assert limit(queue_pb2.RedriveJobsRequest, "ids", Rule.REPEATED_MAX_ITEMS) == LIMITS.max_ids_per_call
    assert limit(queue_pb2.AlterJobsRequest, "ids", Rule.REPEATED_MAX_ITEMS) == LIMITS.max_ids_per_call
    assert limit(queue_pb2.ConsumeStart, "queues", Rule.REPEATED_MAX_ITEMS) == LIMITS.max_queues_per_dequeue
    assert limit(admin_pb2.RedriveQueueRequest, "limit", Rule.INT32_LTE) == LIMITS.max_jobs_per_change
    assert limit(admin_pb2.ListQueuesRequest, "page_size", Rule.INT32_LTE) == LIMITS.max_page_size


def test_a_field_without_the_rule_is_an_error() -> None:
    with pytest.raises(LookupError, match="EnqueueRequest"):
        limit(queue_pb2.EnqueueRequest, "independent", Rule.INT32_LTE)


def test_the_shortcuts_of_the_checks_have_the_same_limits() -> None:
    assert validate._JOBS_MAX == LIMITS.max_jobs_per_enqueue == LIMITS.max_leases_per_call
    assert CREDIT_MAX == validate._CREDIT_MAX == LIMITS.max_credit
    assert LIMITS.max_result_bytes == validate._RESULT_BYTES_MAX


async def test_the_client_shows_what_the_router_tells(router: FakeRouter, client: Client) -> None:
    async def tell(request: server_pb2.GetServerInfoRequest, context: Any) -> server_pb2.GetServerInfoResponse:
        return server_info()

    router.scripts["GetServerInfo"] = tell
    info = await client.server_info()
    assert info.version == server_info().version
    assert info.features == FEATURES
    assert info.consume_lists == set(server_info().consume_lists)
    assert set(info.limits) == set(LIMITS.DESCRIPTOR.fields_by_name)
    assert info.limits["max_message_bytes"] == LIMITS.max_message_bytes
    assert info.limits["max_wait"] == LIMITS.max_wait.ToTimedelta()


def test_the_client_shows_what_routers_of_other_releases_tell() -> None:
    limits = server_pb2.ServerLimits(max_message_bytes=1)
    told = server_pb2.GetServerInfoResponse(version="9.0.0", limits=limits)
    # These bytes are the feature 99, which this client does not know.
    told.MergeFromString(b"\x1a\x01\x63")
    info = read_server_info(told)
    assert info == ServerInfo(
        version="9.0.0", limits={"max_message_bytes": 1}, features=frozenset({"99"}), consume_lists=frozenset()
    )


def test_the_client_has_the_same_limits() -> None:
    assert LIMITS.max_message_bytes == channels.MESSAGE_BYTES_MAX
    jobs_max = windrow.job_rules.JOBS_MAX
    assert jobs_max == LIMITS.max_jobs_per_enqueue == LIMITS.max_leases_per_call == LIMITS.max_ids_per_call
    assert LIMITS.max_payload_bytes == windrow.job_rules.PAYLOAD_BYTES_MAX
    assert LIMITS.max_wait.seconds == windrow.client.WAIT_S_MAX
    assert LIMITS.max_result_bytes == windrow.payloads.RESULT_BYTES_MAX
    assert LIMITS.max_checkpoint_bytes == windrow.payloads.CHECKPOINT_BYTES_MAX
    assert LIMITS.max_progress_note_bytes == windrow.payloads.NOTE_BYTES_MAX
    assert LIMITS.max_failure_type_bytes == windrow.payloads.FAILURE_TYPE_BYTES_MAX
    assert LIMITS.max_failure_message_bytes == windrow.payloads.FAILURE_MESSAGE_BYTES_MAX
    assert LIMITS.max_failure_stack_bytes == windrow.payloads.FAILURE_STACK_BYTES_MAX
    assert LIMITS.max_leases_per_call == windrow.settlements.ENTRIES_MAX
