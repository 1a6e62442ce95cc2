"""The answer of GetServerInfo (proto/windrow/v1/server.proto). Each limit is imported from the module that enforces
it."""

from __future__ import annotations

from functools import cache
from importlib.metadata import version

from google.protobuf.duration_pb2 import Duration

from router.codec.lease_verbs import VERBS
from router.gate.admission import MESSAGE_BYTES_MAX
from shard.queue.queue_ids import QUEUES_MAX
from shard.vocabulary import HORIZON_DAYS
from windrow.rules import Rule, SpanRule, limit, span_limit
from windrow.v1 import admin_pb2, job_pb2, queue_pb2, server_pb2


@cache
def server_info() -> server_pb2.GetServerInfoResponse:
    features = [feature for feature in server_pb2.ServerFeature.values() if feature]
    return server_pb2.GetServerInfoResponse(
        version=version("windrow-server"),
        limits=_limits(),
        features=features,
        consume_lists=[verb.stream_field for verb in VERBS],
    )


def _limits() -> server_pb2.ServerLimits:
    dequeue = queue_pb2.DequeueRequest
    return server_pb2.ServerLimits(
        max_message_bytes=MESSAGE_BYTES_MAX,
        max_jobs_per_enqueue=limit(queue_pb2.EnqueueRequest, "jobs", Rule.REPEATED_MAX_ITEMS),
        max_leases_per_call=limit(queue_pb2.AckRequest, "acks", Rule.REPEATED_MAX_ITEMS),
        max_ids_per_call=limit(queue_pb2.GetJobsRequest, "ids", Rule.REPEATED_MAX_ITEMS),
        max_jobs_per_dequeue=limit(dequeue, "max_jobs", Rule.INT32_LTE),
        max_queues_per_dequeue=limit(dequeue, "queues", Rule.REPEATED_MAX_ITEMS),
        max_credit=limit(queue_pb2.ConsumeRequest, "credit", Rule.INT32_LTE),
        max_jobs_per_restore=limit(admin_pb2.RestoreJobsRequest, "jobs", Rule.REPEATED_MAX_ITEMS),
        max_jobs_per_change=limit(admin_pb2.PurgeQueueRequest, "limit", Rule.INT32_LTE),
        max_page_size=limit(admin_pb2.ListJobsRequest, "page_size", Rule.INT32_LTE),
        max_queues_per_org=QUEUES_MAX,
        max_payload_bytes=limit(job_pb2.JobTemplate, "payload", Rule.BYTES_MAX_LEN),
        max_result_bytes=limit(queue_pb2.Ack, "result", Rule.BYTES_MAX_LEN),
        max_failure_type_bytes=limit(job_pb2.Failure, "type", Rule.STRING_MAX_BYTES),
        max_failure_message_bytes=limit(job_pb2.Failure, "message", Rule.STRING_MAX_BYTES),
        max_failure_stack_bytes=limit(job_pb2.Failure, "stack", Rule.STRING_MAX_BYTES),
        max_attributes=limit(job_pb2.JobTemplate, "attributes", Rule.MAP_MAX_PAIRS),
        max_dedup_key_bytes=limit(job_pb2.Dedup, "key", Rule.STRING_MAX_BYTES),
        max_org_bytes=limit(queue_pb2.EnqueueRequest, "org", Rule.STRING_MAX_BYTES),
        min_visibility_window=span_limit(dequeue, "visibility_window", SpanRule.GTE),
        max_visibility_window=span_limit(dequeue, "visibility_window", SpanRule.LTE),
        max_wait=span_limit(dequeue, "wait", SpanRule.LTE),
        max_delay=span_limit(job_pb2.NewJob, "delay", SpanRule.LTE),
        max_dedup_window=span_limit(job_pb2.Dedup, "window", SpanRule.LTE),
        max_id_age=Duration(seconds=HORIZON_DAYS * 86_400),
        max_checkpoint_bytes=limit(queue_pb2.Extend, "checkpoint", Rule.BYTES_MAX_LEN),
        max_progress_note_bytes=limit(job_pb2.Progress, "note", Rule.STRING_MAX_BYTES),
    )
