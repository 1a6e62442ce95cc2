"""Sends each request with each kind of value that the contract forbids, in each field.

A bad request is refused with a status that names the field, and changes nothing. The requests name a seeded org, so
that a bad request that is not refused changes the books of the org.
"""

from __future__ import annotations

import base64
import functools
import json
import math
import re
import time
import uuid
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import protovalidate
import pytest
from google.protobuf.duration_pb2 import Duration
from google.protobuf.field_mask_pb2 import FieldMask
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp
from hypothesis import example, given
from hypothesis import strategies as st

from router.codec import validate
from router.codec.lease_verbs import VERBS
from shard.lease_token import shard_tag, token, token_prefix
from shard.vocabulary import JobId, ShardName
from tests.jobs import job_id, job_message
from tests.postgres import Server
from tests.routers import PATIENCE_S, Stubs, fields_of, running_routers, stubs, violated_fields, write_cluster
from tests.streams import extends
from tests.verbs import lease_request
from windrow.v1 import admin_pb2, cluster_pb2, job_pb2, queue_pb2, schedules_pb2, workflows_pb2

SHARDS = ("s1", "s2")
ORG = "seeded"
QUEUE = "mail"
TEN_YEARS_S = 3650 * 86400
SECOND_JOB = JobId("01890a5d-ac96-774b-bcce-b302099a8057")
THIRD_JOB = JobId("01890a5d-ac96-774b-bcce-b302099a8058")
# A well-formed token that this cluster could have issued.
LEASE = token(token_prefix(ShardName("s1"), 7), SECOND_JOB)


class Bad(NamedTuple):
    """A request with one bad field, and the path by which the answer must name the field."""

    rpc: str
    field: str
    why: str
    request: Message

    def __str__(self) -> str:
        return f"{self.rpc}: {self.field} {self.why}"


# ── Bad values ───────────────────────────────────────────────────────────────────────────────────────────────────────

ORGS = {
    "empty": "",
    "too long": "x" * 129,
    "too many bytes": "é" * 65,
    "with NUL": "a\0b",
    "with a line break": "seeded\n",
    "with a tab": "a\tb",
    "with DEL": "a\x7f",
}
OPTIONAL_NAMES = {
    "too long": "x" * 129,
    "with a dash first": "-mail",
    "with a space": "ma il",
    "with an accent": "café",
    "with a line break": "mail\n",
    "with NUL": "mail\0",
    "with a quote": 'ma"il',
    "with a comma": "a,b",
    "with a brace": "{mail}",
    "with another script's digit": "mail٣",
}
NAMES = {"empty": "", **OPTIONAL_NAMES}
TEXTS = {"with NUL": "a\0b"}
# Bad values of a required id.
IDS = {
    "empty": "",
    "no UUID": "mail",
    "upper-case": str(SECOND_JOB).upper(),
    "without dashes": SECOND_JOB.replace("-", ""),
    "in braces": f"{{{SECOND_JOB}}}",
    "a UUIDv4": str(uuid.UUID("f47ac10b-58cc-4372-a567-0e02b2c3d479")),
    "a UUIDv1": "c232ab00-9414-11ec-b3c8-9f6bdeced846",
    "of another variant": "01890a5d-ac96-774b-7cce-b302099a8057",
    "two ids": f"{SECOND_JOB},{SECOND_JOB}",
    "with a line break": f"{SECOND_JOB}\n",
    "with NUL": f"{SECOND_JOB[:-1]}\0",
}
LEASES = {
    "empty": b"",
    "too short": LEASE[:-1],
    "too long": LEASE + b"\0",
    "far too long": b"\1" * 256,
    "of version 0": b"\0" + LEASE[1:],
    "of version 2": b"\2" + LEASE[1:],
    "text": b"lease",
}
# Values that google.protobuf.Duration itself does not allow, so they are invalid in any field.
BROKEN_DURATIONS = {
    "with 2e9 nanoseconds": Duration(seconds=1, nanos=2_000_000_000),
    "of two signs": Duration(seconds=5, nanos=-1),
    "beyond the type": Duration(seconds=2**62),
    "below the type": Duration(seconds=-(2**62)),
}
DELAYS = {
    **BROKEN_DURATIONS,
    "negative": Duration(seconds=-1),
    "a little negative": Duration(nanos=-1),
    "above ten years": Duration(seconds=TEN_YEARS_S, nanos=1),
}
TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
WINDOWS = {
    **BROKEN_DURATIONS,
    "zero": Duration(),
    "negative": Duration(seconds=-1),
    "below 100 ms": Duration(nanos=99_999_999),
    "above 12 h": Duration(seconds=43200, nanos=1),
}
TIMESTAMPS = {
    "with 1e9 nanoseconds": Timestamp(seconds=1, nanos=1_000_000_000),
    "with negative nanoseconds": Timestamp(seconds=1, nanos=-1),
    "before year 1": Timestamp(seconds=-62_135_596_801),
    "after year 9999": Timestamp(seconds=253_402_300_800),
    "beyond all": Timestamp(seconds=2**63 - 1),
    "below all": Timestamp(seconds=-(2**63)),
}
NUMBERS_BELOW_0 = {"negative": -1, "far below": -(2**31)}
PAGE_SIZES = {**NUMBERS_BELOW_0, "above 1,000": 1001, "far above": 2**31 - 1}
LIMITS = {**NUMBERS_BELOW_0, "above 10,000": 10_001}


def packed(value: object) -> str:
    return base64.urlsafe_b64encode(json.dumps(value).encode()).decode()


NOBODYS_TOKENS = {
    "no base64": "what's this?",
    "half base64": "abc",
    "no JSON": base64.urlsafe_b64encode(b"\xff\xfe[").decode(),
    "not a list": packed({"after": "mail"}),
    "an empty list": packed([]),
    "too many parts": packed(["a", "b", "c", "d"]),
    "deep": base64.urlsafe_b64encode(b"[" * 700).decode(),
    "too long": "A" * 1025,
}
STRANGE: tuple[object, ...] = (None, True, 7, 1.5, {}, [], "", "a\0b", "\ud800", "a b", "x" * 129)
NAME_TOKENS = {**NOBODYS_TOKENS, **{f"of {part!r:.20}": packed([part]) for part in STRANGE}}
UUID_TOKENS = {**NAME_TOKENS, "of a name": packed(["mail"]), "of more than an id": packed([f"{SECOND_JOB}0"])}
BAD_PLACES: tuple[list[object], ...] = (
    [None, 0, SECOND_JOB],
    [True, 0, SECOND_JOB],
    [-1, 0, SECOND_JOB],
    [10**30, 0, SECOND_JOB],
    [5.5, 0, SECOND_JOB],
    ["5", 0, SECOND_JOB],
    [[5], 0, SECOND_JOB],
    [5, -1, SECOND_JOB],
    [5, 2**63, SECOND_JOB],
    [5, 1e300, SECOND_JOB],
    [5, math.nan, SECOND_JOB],
    [5, "0", SECOND_JOB],
    [5, 0, "mail"],
    [5, 0, "\ud800"],
    [5, 0, None],
    [5, 0, {"id": 1}],
    [SECOND_JOB],
)
LIVE_TOKENS = {**NOBODYS_TOKENS, **{f"of {place!r:.40}": packed(place) for place in BAD_PLACES}}
RETRIES: dict[str, tuple[str, dict[str, Any]]] = {
    "without a policy": (".policy", {}),
    "without a delay": (".fixed.delay", {"fixed": {}}),
    **{f"fixed, {why}": (".fixed.delay", {"fixed": {"delay": bad}}) for why, bad in DELAYS.items()},
    **{
        f"{field} {why}": (f".exponential.{field}", {"exponential": {field: bad}})
        for field in ("initial_delay", "max_delay")
        for why, bad in DELAYS.items()
    },
    "max_delay below initial_delay": (
        ".exponential.max_delay",
        {"exponential": {"initial_delay": Duration(seconds=2), "max_delay": Duration(seconds=1)}},
    ),
    "initial_delay above the max_delay that is not given": (
        ".exponential.max_delay",
        {"exponential": {"initial_delay": Duration(seconds=3601)}},
    ),
    **{
        f"multiplier {bad}": (".exponential.multiplier", {"exponential": {"multiplier": bad}})
        for bad in (0.5, -1.0, 100.5, math.inf, math.nan)
    },
    **{
        f"jitter {bad}": (".exponential.jitter", {"exponential": {"jitter": bad}})
        for bad in (-0.1, 1.1, math.inf, math.nan)
    },
}


# ── Bad requests ─────────────────────────────────────────────────────────────────────────────────────────────────────


def new_job(**fields: Any) -> job_pb2.NewJob:
    whole: dict[str, Any] = {"queue": QUEUE, "kind": "greet", **fields}
    return job_message(**whole)


def enqueue(*jobs: job_pb2.NewJob, org: str = ORG) -> queue_pb2.EnqueueRequest:
    return queue_pb2.EnqueueRequest(org=org, jobs=jobs)


def acks(leases: Iterable[bytes], org: str = ORG) -> queue_pb2.AckRequest:
    return queue_pb2.AckRequest(org=org, acks=[queue_pb2.Ack(lease=lease) for lease in leases])


def nacks(leases: Iterable[bytes], org: str = ORG) -> queue_pb2.NackRequest:
    return queue_pb2.NackRequest(org=org, nacks=[queue_pb2.Nack(lease=lease) for lease in leases])


def path_of(field: str) -> str:
    """Returns the path of a field within a NewJob. `field`: the name of the field as an argument of `job_message`."""
    name = re.split(r"[.\[]", field)[0]
    if name in job_pb2.JobTemplate.DESCRIPTOR.fields_by_name:
        return f"template.{field}"
    return field.replace("dedup_", "dedup.")


def bad_jobs() -> Iterator[tuple[str, str, job_pb2.NewJob]]:
    """Yields what can be wrong with a job: the field, the reason, and the job."""
    for why, bad in IDS.items():
        if bad:
            yield "id", why, new_job(id=bad)
    yield "id", "older than the horizon", new_job(id=job_id(ahead_ms=-8 * 86_400_000))
    yield "id", "of 1970", new_job(id="00000000-0000-7000-8000-000000000000")
    yield "id", "a day ahead", new_job(id=job_id(ahead_ms=26 * 3_600_000))
    yield "id", "of the year 10889", new_job(id="ffffffff-ffff-7fff-bfff-ffffffffffff")
    for field in ("queue", "kind"):
        for why, bad in NAMES.items():
            yield field, why, new_job(**{field: bad})
    yield "payload", "too long", new_job(payload=b"\0" * (1 << 20) + b"\0")
    yield "attributes", "too many", new_job(attributes={str(at): "" for at in range(33)})
    for why, key in {"empty": "", "with NUL": "a\0", "too long": "x" * 129, "too many bytes": "é" * 65}.items():
        yield f"attributes[{json.dumps(shown(key), ensure_ascii=False)}]", f"key {why}", new_job(attributes={key: "v"})
    yield f'attributes["{"k" * 64}…"]', "key far too long", new_job(attributes={"k" * 100_000: "v"})
    for why, value in {"with NUL": "a\0", "too long": "x" * 1025, "too many bytes": "é" * 513}.items():
        yield 'attributes["a"]', f"value {why}", new_job(attributes={"a": value})
    for why, number in {**NUMBERS_BELOW_0, "above 9": 10}.items():
        yield "priority", why, new_job(priority=number)
    for why, number in {**NUMBERS_BELOW_0, "above 1,000": 1001}.items():
        yield "max_attempts", why, new_job(max_attempts=number)
    for why, stamp in TIMESTAMPS.items():
        yield "run_at", why, new_job(run_at=stamp)
        yield "expires_at", why, new_job(expires_at=stamp)
    # The cases are built at collection time and sent later, so the times need a wide margin.
    tomorrow = int(time.time()) + 86_400
    yield "run_at", "more than ten years ahead", new_job(run_at=Timestamp(seconds=tomorrow + TEN_YEARS_S))
    expiry = Timestamp(seconds=tomorrow + 2 * TEN_YEARS_S)
    yield "expires_at", "more than twenty years ahead", new_job(expires_at=expiry)
    for why, span in DELAYS.items():
        yield "delay", why, new_job(delay=span)
    for why, (path, policy) in RETRIES.items():
        yield f"retry{path}", why, new_job(retry=policy)
    for why, text in {**TEXTS, "too long": "x" * 257, "too many bytes": "é" * 129}.items():
        yield "dedup_key", why, new_job(dedup_key=text)
    spans = {"zero": Duration(), "below 1 s": Duration(nanos=999_999_999), "above 30 days": Duration(seconds=2_592_001)}
    for why, span in {**BROKEN_DURATIONS, **spans}.items():
        yield "dedup_window", why, new_job(dedup_key="k", dedup_window=span)
        yield "max_runtime", why, new_job(max_runtime=span)
    yield "dedup_key", "absent", new_job(dedup_window=Duration(seconds=60))
    yield "dedup_key", "absent, while live", new_job(dedup_while_live=True)
    both = new_job(dedup_key="k", dedup_while_live=True, dedup_window=Duration(seconds=60))
    yield "dedup_window", "and while live", both
    good = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    for why, parent in {"text": "x", "upper-case": good.upper(), "too long": good + "0", "short": good[:-1]}.items():
        yield "trace.traceparent", why, new_job(trace={"traceparent": parent})
    for why, state in {"too long": "x" * 513, "with a line break": "a=1\n", "not ASCII": "é=1", **TEXTS}.items():
        yield "trace.tracestate", why, new_job(trace={"traceparent": good, "tracestate": state})


def shown(key: str) -> str:
    return key if len(key) <= 64 else key[:64] + "…"


def each(rpc: str, make: type[Message], field: str, values: dict[str, Any], good: dict[str, Any]) -> Iterator[Bad]:
    for why, bad in values.items():
        yield Bad(rpc, field, why, make(**{**good, field: bad}))


def queue_cases() -> Iterator[Bad]:
    for why, org in ORGS.items():
        yield Bad("Enqueue", "org", why, enqueue(new_job(), org=org))
    yield Bad("Enqueue", "jobs", "none", enqueue())
    yield Bad("Enqueue", "jobs", "too many", enqueue(*[new_job()] * 1001))
    for field, why, job in bad_jobs():
        # The bad job follows a good one, which must not be stored either.
        yield Bad("Enqueue", f"jobs[1].{path_of(field)}", why, enqueue(new_job(), job))

    good: dict[str, Any] = {"org": ORG, "queues": [QUEUE], "max_jobs": 1}
    dequeue = queue_pb2.DequeueRequest
    yield from each("Dequeue", dequeue, "org", ORGS, good)
    yield from each("Dequeue", dequeue, "max_jobs", {**NUMBERS_BELOW_0, "above 1,000": 1001}, good)
    yield from each("Dequeue", dequeue, "visibility_window", WINDOWS, good)
    waits = {"negative": Duration(seconds=-1), "too long": Duration(seconds=61)}
    yield from each("Dequeue", dequeue, "wait", waits, good)
    wait_job, named = queue_pb2.WaitJobRequest, {"org": ORG, "id": SECOND_JOB}
    for field, wrong in (("org", ORGS), ("id", IDS), ("wait", waits)):
        yield from each("WaitJob", wait_job, field, wrong, named)
    find_job, keyed = queue_pb2.FindJobRequest, {"org": ORG, "queue": QUEUE, "dedup_key": "k"}
    keys = {**TEXTS, "empty": "", "too long": "x" * 257, "too many bytes": "é" * 129}
    for field, wrong in (("org", ORGS), ("queue", NAMES), ("dedup_key", keys)):
        yield from each("FindJob", find_job, field, wrong, keyed)
    yield from each("Dequeue", dequeue, "worker", {**TEXTS, "with a line break": "w\n", "too long": "w" * 129}, good)
    ack, long = queue_pb2.Ack(lease=LEASE), queue_pb2.Ack(lease=LEASE, result=b"r" * 65_537)
    yield from each("Dequeue", dequeue, "acks", {"too many": [ack] * 1001}, good)
    yield Bad("Dequeue", "acks[1].lease", "twice", dequeue(**good, acks=[ack, ack]))
    yield Bad("Dequeue", "acks[0].result", "too long", dequeue(**good, acks=[long]))
    for why, lease in LEASES.items():
        yield Bad("Dequeue", "acks[1].lease", why, dequeue(**good, acks=[ack, queue_pb2.Ack(lease=lease)]))
    names = [f"q{at}" for at in range(65)]
    yield from each("Dequeue", dequeue, "queues", {"none": [], "too many": names, "twice": [QUEUE, QUEUE]}, good)
    for why, name in NAMES.items():
        yield Bad("Dequeue", "queues[1]", why, dequeue(org=ORG, queues=[QUEUE, name]))
        yield Bad("Dequeue", "kinds[1]", why, dequeue(**good, kinds=["greet", name]))
    yield from each("Dequeue", dequeue, "kinds", {"too many": names}, good)

    for why, org in ORGS.items():
        for verb in VERBS:
            yield Bad(verb.method, "org", why, lease_request(verb, [LEASE], org))
        yield Bad("GetJobs", "org", why, queue_pb2.GetJobsRequest(org=org, ids=[SECOND_JOB]))
        yield Bad("CancelJobs", "org", why, queue_pb2.CancelJobsRequest(org=org, ids=[SECOND_JOB]))
        yield Bad("RedriveJobs", "org", why, queue_pb2.RedriveJobsRequest(org=org, ids=[SECOND_JOB]))
        yield Bad("AlterJobs", "org", why, queue_pb2.AlterJobsRequest(org=org, ids=[SECOND_JOB], priority=1))
    for why, lease in LEASES.items():
        for verb in VERBS:
            of_message = "" if verb.request_field == "leases" else ".lease"
            request = lease_request(verb, [LEASE, lease], ORG)
            yield Bad(verb.method, f"{verb.request_field}[1]{of_message}", why, request)
    for why, count in {"none": 0, "too many": 1001}.items():
        for verb in VERBS:
            yield Bad(verb.method, verb.request_field, why, lease_request(verb, [LEASE] * count, ORG))
        yield Bad("GetJobs", "ids", why, queue_pb2.GetJobsRequest(org=ORG, ids=[SECOND_JOB] * count))
        yield Bad("CancelJobs", "ids", why, queue_pb2.CancelJobsRequest(org=ORG, ids=[SECOND_JOB] * count))
        yield Bad("RedriveJobs", "ids", why, queue_pb2.RedriveJobsRequest(org=ORG, ids=[SECOND_JOB] * count))
        yield Bad("AlterJobs", "ids", why, queue_pb2.AlterJobsRequest(org=ORG, ids=[SECOND_JOB] * count, priority=1))
    yield Bad("Ack", "acks[0].result", "too long", queue_pb2.AckRequest(org=ORG, acks=[long]))
    for field, limit in (("type", 256), ("message", 8192), ("stack", 32_768)):
        for why, text in {**TEXTS, "too long": "x" * (limit + 1), "too many bytes": "é" * (limit // 2 + 1)}.items():
            nack = queue_pb2.Nack(lease=LEASE, failure=job_pb2.Failure(**{field: text}))  # type: ignore[arg-type]
            yield Bad("Nack", f"nacks[0].failure.{field}", why, queue_pb2.NackRequest(org=ORG, nacks=[nack]))
    for why, span in DELAYS.items():
        nack = queue_pb2.Nack(lease=LEASE, retry_after=span)
        yield Bad("Nack", "nacks[0].retry_after", why, queue_pb2.NackRequest(org=ORG, nacks=[nack]))
    for why, span in DELAYS.items():
        snooze = queue_pb2.Snooze(lease=LEASE, after=span)
        yield Bad("Snooze", "snoozes[0].after", why, queue_pb2.SnoozeRequest(org=ORG, snoozes=[snooze]))
    for why, text in {"NUL": "a\0b", "too long": "x" * 1025, "too many bytes": "é" * 513}.items():
        snooze = queue_pb2.Snooze(lease=LEASE, reason=text)
        yield Bad("Snooze", "snoozes[0].reason", why, queue_pb2.SnoozeRequest(org=ORG, snoozes=[snooze]))
    for why, text in {"NUL": "a\0b", "too long": "x" * 4097, "too many bytes": "é" * 2049}.items():
        acks = [queue_pb2.Ack(lease=LEASE, log=text)]
        yield Bad("Ack", "acks[0].log", why, queue_pb2.AckRequest(org=ORG, acks=acks))
        yield Bad("Dequeue", "acks[0].log", why, queue_pb2.DequeueRequest(org=ORG, queues=[QUEUE], acks=acks))
        nack = queue_pb2.Nack(lease=LEASE, log=text)
        yield Bad("Nack", "nacks[0].log", why, queue_pb2.NackRequest(org=ORG, nacks=[nack]))
        extend = queue_pb2.Extend(lease=LEASE, log=text)
        yield Bad("Extend", "extends[0].log", why, queue_pb2.ExtendRequest(org=ORG, extends=[extend]))
        snooze = queue_pb2.Snooze(lease=LEASE, log=text)
        yield Bad("Snooze", "snoozes[0].log", why, queue_pb2.SnoozeRequest(org=ORG, snoozes=[snooze]))
    dead = queue_pb2.Nack(lease=LEASE, failure=job_pb2.Failure(permanent=True), retry_after=Duration(seconds=1))
    yield Bad("Nack", "nacks[0].retry_after", "permanent", queue_pb2.NackRequest(org=ORG, nacks=[dead]))
    yield from each(
        "Extend", queue_pb2.ExtendRequest, "visibility_window", WINDOWS, {"org": ORG, "extends": extends(LEASE)}
    )
    for why, bad in IDS.items():
        yield Bad("GetJobs", "ids[1]", why, queue_pb2.GetJobsRequest(org=ORG, ids=[SECOND_JOB, bad]))
        yield Bad("CancelJobs", "ids[1]", why, queue_pb2.CancelJobsRequest(org=ORG, ids=[SECOND_JOB, bad]))
        yield Bad("RedriveJobs", "ids[1]", why, queue_pb2.RedriveJobsRequest(org=ORG, ids=[SECOND_JOB, bad]))
        yield Bad("AlterJobs", "ids[1]", why, queue_pb2.AlterJobsRequest(org=ORG, ids=[SECOND_JOB, bad], priority=1))
    good = {"org": ORG, "ids": [SECOND_JOB]}
    yield Bad("AlterJobs", "priority", "no change", queue_pb2.AlterJobsRequest(org=ORG, ids=[SECOND_JOB]))
    yield from each("AlterJobs", queue_pb2.AlterJobsRequest, "priority", {"below": -1, "above": 10}, good)
    yield from each("AlterJobs", queue_pb2.AlterJobsRequest, "delay", DELAYS, good)
    many = queue_pb2.Attributes(values={str(at): "" for at in range(33)})
    request = queue_pb2.AlterJobsRequest(org=ORG, ids=[SECOND_JOB], attributes=many)
    yield Bad("AlterJobs", "attributes.values", "too many", request)
    far = Timestamp(seconds=int(time.time()) + 86_400 + TEN_YEARS_S)
    yield from each("AlterJobs", queue_pb2.AlterJobsRequest, "run_at", {"too far ahead": far}, good)
    reasons = {**TEXTS, "too long": "x" * 1025, "too many bytes": "é" * 513}
    yield from each("CancelJobs", queue_pb2.CancelJobsRequest, "reason", reasons, {"org": ORG, "ids": [SECOND_JOB]})


def admin_cases() -> Iterator[Bad]:
    good: dict[str, Any] = {"org": ORG, "queue": QUEUE}
    requests: dict[str, tuple[type[Message], dict[str, Any]]] = {
        "CreateQueue": (admin_pb2.CreateQueueRequest, {"org": ORG, "queue": "new"}),
        "UpdateQueue": (admin_pb2.UpdateQueueRequest, {**good, "config": {"max_attempts": 3}}),
        "GetQueue": (admin_pb2.GetQueueRequest, good),
        "ListQueues": (admin_pb2.ListQueuesRequest, {"org": ORG}),
        "DeleteQueue": (admin_pb2.DeleteQueueRequest, good),
        "PauseQueue": (admin_pb2.PauseQueueRequest, good),
        "ResumeQueue": (admin_pb2.ResumeQueueRequest, good),
        "PurgeQueue": (admin_pb2.PurgeQueueRequest, {**good, "include_dead": True}),
        "ListJobs": (admin_pb2.ListJobsRequest, {**good, "state": job_pb2.JOB_STATE_READY}),
        "CountJobs": (admin_pb2.CountJobsRequest, good),
        "RedriveQueue": (admin_pb2.RedriveQueueRequest, good),
        "GetStats": (admin_pb2.GetStatsRequest, good),
        "ExplainQueue": (admin_pb2.ExplainQueueRequest, good),
        "ListQuarantines": (admin_pb2.ListQuarantinesRequest, {"org": ORG}),
        "QuarantineKind": (admin_pb2.QuarantineKindRequest, {**good, "kind": "greet"}),
        "ReleaseKind": (admin_pb2.ReleaseKindRequest, {**good, "kind": "greet"}),
    }
    any_queue = {"GetStats", "ListJobs", "CountJobs", "ListQuarantines"}

    def of(rpc: str, field: str, values: dict[str, Any], **more: Any) -> Iterator[Bad]:
        make, fields = requests[rpc]
        yield from each(rpc, make, field, values, {**fields, **more})

    for rpc in requests:
        yield from of(rpc, "org", ORGS)
        if rpc != "ListQueues":
            yield from of(rpc, "queue", OPTIONAL_NAMES if rpc in any_queue else NAMES)
    explain_job, named = admin_pb2.ExplainJobRequest, {"org": ORG, "id": SECOND_JOB}
    for field, wrong in (("org", ORGS), ("id", IDS)):
        yield from each("ExplainJob", explain_job, field, wrong, named)
    for rpc in ("CreateQueue", "UpdateQueue"):
        make, fields = requests[rpc]
        for why, number in {**NUMBERS_BELOW_0, "zero": 0, "above 1,000": 1001}.items():
            yield Bad(rpc, "config.max_attempts", why, make(**{**fields, "config": {"max_attempts": number}}))
        for why, days in {"negative": -1, "too many": 3651}.items():
            yield Bad(rpc, "config.retention_days", why, make(**{**fields, "config": {"retention_days": days}}))
        for why, (path, policy) in RETRIES.items():
            yield Bad(rpc, f"config.retry{path}", why, make(**{**fields, "config": {"retry": policy}}))
        for why, crashes in {"negative": -1, "zero": 0, "above 1,000": 1001}.items():
            yield Bad(rpc, "config.quarantine_after", why, make(**{**fields, "config": {"quarantine_after": crashes}}))
    for rpc in ("QuarantineKind", "ReleaseKind"):
        yield from of(rpc, "kind", NAMES)
    reasons = {"too long": "x" * 257, "too many bytes": "é" * 129, "with NUL": "a\0b", "with a line break": "a\n"}
    yield from of("QuarantineKind", "reason", reasons)
    update, config = admin_pb2.UpdateQueueRequest, admin_pb2.QueueConfig(max_attempts=3)
    yield Bad("UpdateQueue", "config", "absent", update(org=ORG, queue=QUEUE))
    for why, paths in {
        "unknown": ["retry", "paused"],
        "within a field": ["retry", "retry.fixed"],
        "empty": ["retry", ""],
    }.items():
        request = update(org=ORG, queue=QUEUE, config=config, update_mask=FieldMask(paths=paths))
        yield Bad("UpdateQueue", "update_mask.paths[1]", why, request)
    too_many = FieldMask(paths=["retry"] * 101)
    yield Bad(
        "UpdateQueue",
        "update_mask.paths",
        "too long",
        update(org=ORG, queue=QUEUE, config=config, update_mask=too_many),
    )
    for rpc in ("ListQueues", "ListJobs"):
        yield from of(rpc, "page_size", PAGE_SIZES)
    yield from of("ListQueues", "page_token", NAME_TOKENS)
    yield from of("ListJobs", "page_token", LIVE_TOKENS)
    for state in (job_pb2.JOB_STATE_DEAD, job_pb2.JOB_STATE_SUCCEEDED):
        yield from of("ListJobs", "page_token", UUID_TOKENS, state=state)
    yield from of("ListJobs", "state", {"unknown": 8, "negative": -1, "unspecified": 0})
    yield from of("CountJobs", "page_token", UUID_TOKENS)
    listing, ready = admin_pb2.ListJobsRequest, job_pb2.JOB_STATE_READY
    for rpc in ("ListJobs", "CountJobs"):
        for field in ("created_after", "created_before"):
            yield from of(rpc, field, TIMESTAMPS)
        yield from of(rpc, "attributes", {"too many": {str(at): "" for at in range(33)}})
        make, _ = requests[rpc]
        for why, bad_state in {"unknown": 8, "negative": -1, "unspecified": 0}.items():
            yield Bad(rpc, "states[1]", why, make(org=ORG, states=[ready, job_pb2.JobState.ValueType(bad_state)]))
        yield Bad(rpc, "states", "too many", make(org=ORG, states=[ready] * 8))
    for rpc in ("ListJobs", "CountJobs", "RedriveQueue"):
        yield from of(rpc, "kind", OPTIONAL_NAMES)
    yield Bad("ListJobs", "states", "beside state", listing(org=ORG, state=ready, states=[ready]))
    for rpc in ("PurgeQueue", "RedriveQueue"):
        yield from of(rpc, "limit", LIMITS)
    rates = {"negative": -1.0, "too slow": 0.0001, "too fast": 100_001.0, "no number": math.nan}
    yield from of("RedriveQueue", "per_second", rates)
    yield from of("RedriveQueue", "already_redriven", {"negative": -1, "too many": 1_000_000_001})
    yield from of("RedriveQueue", "already_redriven", {"due in 32,000 years": 1_000_000_000}, per_second=0.001)
    yield from of("RedriveQueue", "already_redriven", {"without per_second": 1})
    for rpc in ("CountJobs", "RedriveQueue"):
        for field in ("died_after", "died_before"):
            yield from of(rpc, field, TIMESTAMPS)
    restore, one = admin_pb2.RestoreJobsRequest, admin_pb2.RestoreJob
    for why, org in ORGS.items():
        yield Bad("RestoreJobs", "org", why, restore(org=org, jobs=[one(id=SECOND_JOB)]))
    for why, count in {"none": 0, "too many": 1001}.items():
        yield Bad("RestoreJobs", "jobs", why, restore(org=ORG, jobs=[one(id=SECOND_JOB)] * count))
    for why, bad in IDS.items():
        yield Bad("RestoreJobs", "jobs[1].id", why, restore(org=ORG, jobs=[one(id=SECOND_JOB), one(id=bad)]))
        if bad:
            jobs = [one(id=SECOND_JOB), one(id=SECOND_JOB, new_id=bad)]
            yield Bad("RestoreJobs", "jobs[1].new_id", why, restore(org=ORG, jobs=jobs))
    for why, new_id in {"its own": SECOND_JOB, "twice": THIRD_JOB}.items():
        jobs = [one(id=SECOND_JOB, new_id=THIRD_JOB), one(id=SECOND_JOB, new_id=new_id)]
        yield Bad("RestoreJobs", "jobs[1].new_id", why, restore(org=ORG, jobs=jobs))
    for why, shard in {"empty": "", "too long": "s" * 64}.items():
        yield Bad("CheckShard", "shard", why, cluster_pb2.CheckShardRequest(shard=shard))
    figures: dict[str, dict[str, Any]] = {
        "search": {"too long": "x" * 129, "with NUL": "a\0b", "with a line break": "a\n"},
        "sort": {"unknown": 9, "negative": -1},
        "shard": {"too long": "s" * 64},
        "max_age": {**BROKEN_DURATIONS, "negative": Duration(seconds=-1), "above a day": Duration(seconds=86_401)},
        "page_size": PAGE_SIZES,
        "page_token": {**NAME_TOKENS, "of another order": packed(["dead", 1, "acme"])},
    }
    for field, values in figures.items():
        yield from each("ListOrgs", cluster_pb2.ListOrgsRequest, field, values, {})
    for why, org in ORGS.items():
        yield Bad("ListLimits", "org", why, admin_pb2.ListLimitsRequest(org=org))
    yield from limit_cases()


def limit_cases() -> Iterator[Bad]:
    names: dict[str, dict[str, Any]] = {
        # An empty org means the default for all orgs, and an empty queue means all queues.
        "org": {why: org for why, org in ORGS.items() if org},
        "queue": OPTIONAL_NAMES,
        "measure": {"none": 0, "unknown": 9, "negative": -1},
    }
    amounts: dict[str, dict[str, Any]] = {
        "amount": {"zero": 0, "negative": -1, "huge": 10**12 + 1, "the least": -(2**63), "the most": 2**63 - 1},
        "interval": {
            **BROKEN_DURATIONS,
            "zero": Duration(),
            "negative": Duration(seconds=-1),
            "too short": Duration(nanos=999_999_999),
            "too long": Duration(seconds=86_400, nanos=1),
        },
    }
    limited: dict[str, Any] = {"org": ORG, "measure": 1}
    whole = {**limited, "amount": 1, "interval": Duration(seconds=1)}
    for field, values in names.items():
        yield from each("ClearLimit", cluster_pb2.ClearLimitRequest, field, values, limited)
    for field, values in (names | amounts).items():
        yield from each("SetLimit", cluster_pb2.SetLimitRequest, field, values, whole)
    yield Bad("SetLimit", "interval", "absent", cluster_pb2.SetLimitRequest(**limited, amount=1))
    weights: dict[str, dict[str, Any]] = {
        "org": ORGS,
        "weight": {"zero": 0.0, "negative": -1.0, "tiny": 0.000_9, "huge": 1000.1, "NaN": math.nan, "inf": math.inf},
    }
    for field, values in weights.items():
        yield from each("SetWeight", cluster_pb2.SetWeightRequest, field, values, {"org": ORG, "weight": 1.0})


# ── The cluster ──────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def cluster(postgres: Server, template: str, tmp_path_factory: pytest.TempPathFactory) -> Generator[Stubs, None, None]:
    """Two shards. One shard has an org with jobs in every state."""
    folder: Path = tmp_path_factory.mktemp("bad-input")
    config = write_cluster(folder / "cluster.toml", {shard: postgres.create(f"bad_input_{shard}") for shard in SHARDS})
    with running_routers(config) as routers, stubs(routers.address, ("grpc.max_send_message_length", -1)) as both:
        seed(both)
        yield both


def seed(both: Stubs) -> None:
    jobs = [new_job(kind=f"kind-{at}") for at in range(6)]
    stored = both.queue.Enqueue(enqueue(*jobs, new_job(delay=Duration(seconds=TEN_YEARS_S))), timeout=PATIENCE_S)
    taken = both.queue.Dequeue(
        queue_pb2.DequeueRequest(org=ORG, queues=[QUEUE], max_jobs=4, visibility_window=Duration(seconds=43200)),
        timeout=PATIENCE_S,
    ).jobs
    both.queue.Ack(queue_pb2.AckRequest(org=ORG, acks=[queue_pb2.Ack(lease=taken[0].lease)]), timeout=PATIENCE_S)
    nack = queue_pb2.Nack(lease=taken[1].lease, failure=job_pb2.Failure(permanent=True))
    both.queue.Nack(queue_pb2.NackRequest(org=ORG, nacks=[nack]), timeout=PATIENCE_S)
    both.queue.CancelJobs(queue_pb2.CancelJobsRequest(org=ORG, ids=[taken[2].id]), timeout=PATIENCE_S)
    states = {
        job.state
        for job in both.queue.GetJobs(
            queue_pb2.GetJobsRequest(org=ORG, ids=[result.id for result in stored.results]), timeout=PATIENCE_S
        ).jobs
    }
    # Only jobs of workflows are BLOCKED.
    assert states == set(job_pb2.JobState.values()) - {job_pb2.JOB_STATE_UNSPECIFIED, job_pb2.JOB_STATE_BLOCKED}


def schedule_cases() -> Iterator[Bad]:
    """The cases with bad timings are in test_schedules_calls.py."""
    good: dict[str, Any] = {"org": ORG, "name": "daily"}
    spec, job = {"cron": "0 0 1 1 *"}, {"queue": QUEUE, "kind": "send"}
    past, now = Timestamp(seconds=1_000_000_000), Timestamp(seconds=1_000_086_400)
    requests: dict[str, tuple[type[Message], dict[str, Any]]] = {
        "CreateSchedule": (schedules_pb2.CreateScheduleRequest, {**good, "spec": spec, "job": job}),
        "UpdateSchedule": (schedules_pb2.UpdateScheduleRequest, {**good, "spec": spec}),
        "GetSchedule": (schedules_pb2.GetScheduleRequest, good),
        "ListSchedules": (schedules_pb2.ListSchedulesRequest, {"org": ORG}),
        "DeleteSchedule": (schedules_pb2.DeleteScheduleRequest, good),
        "PauseSchedule": (schedules_pb2.PauseScheduleRequest, good),
        "ResumeSchedule": (schedules_pb2.ResumeScheduleRequest, good),
        "TriggerSchedule": (schedules_pb2.TriggerScheduleRequest, good),
        "BackfillSchedule": (schedules_pb2.BackfillScheduleRequest, {**good, "begin": past, "end": now}),
        "PreviewSchedule": (schedules_pb2.PreviewScheduleRequest, good),
    }

    def of(rpc: str, field: str, values: dict[str, Any], **more: Any) -> Iterator[Bad]:
        make, fields = requests[rpc]
        yield from each(rpc, make, field, values, {**fields, **more})

    for rpc in requests:
        yield from of(rpc, "org", ORGS)
        if rpc != "ListSchedules":
            yield from of(rpc, "name", NAMES)
    yield from of("CreateSchedule", "spec", {"absent": None})
    yield from of("CreateSchedule", "job", {"absent": None})
    yield from of("ListSchedules", "page_size", PAGE_SIZES)
    yield from of("ListSchedules", "page_token", NAME_TOKENS)
    yield from of("ListSchedules", "declared_by", {"too long": "x" * 129, "with a line break": "a\n"})
    yield from of("TriggerSchedule", "request_id", {why: bad for why, bad in IDS.items() if bad})
    yield from of("PreviewSchedule", "count", {**NUMBERS_BELOW_0, "above 100": 101})
    broken = {"before the year 1": Timestamp(seconds=-62_135_596_801), "bad nanoseconds": Timestamp(nanos=-1)}
    yield from of("PreviewSchedule", "after", broken)
    for field in ("begin", "end"):
        yield from of("BackfillSchedule", field, {"absent": None, **broken})
    yield from of("BackfillSchedule", "overlap", {"unspecified": 0, "cancel running": 5, "unknown": 99})
    yield from of("BackfillSchedule", "end", {"before begin": Timestamp(seconds=999_999_999)})
    make, fields = requests["CreateSchedule"]
    jobs = {
        "job.queue": {**job, "queue": ""},
        "job.kind": {**job, "kind": "a b"},
        "job.priority": {**job, "priority": 10},
        "job.payload": {**job, "payload": b"x" * 65_537},
        "job.retry.exponential.max_delay": {
            **job,
            "retry": {"exponential": {"initial_delay": Duration(seconds=9), "max_delay": Duration(seconds=1)}},
        },
    }
    for path, bad in jobs.items():
        yield Bad("CreateSchedule", path, "bad", make(**{**fields, "job": bad}))
    yield Bad(
        "UpdateSchedule",
        "job.payload",
        "too large",
        schedules_pb2.UpdateScheduleRequest(
            **good, job=job_pb2.JobTemplate(queue=QUEUE, kind="send", payload=b"x" * 65_537)
        ),
    )
    masks = {"unknown": "colour", "nested": "spec.note", "of a timing that is not there": "interval"}
    for why, path in masks.items():
        mask = FieldMask(paths=["note", path])
        yield Bad(
            "UpdateSchedule",
            "update_mask.paths[1]",
            why,
            schedules_pb2.UpdateScheduleRequest(
                **good, spec=schedules_pb2.ScheduleSpec(cron="0 0 1 1 *"), update_mask=mask
            ),
        )
    preview = schedules_pb2.PreviewScheduleRequest
    yield Bad(
        "PreviewSchedule",
        "spec.note",
        "bad",
        preview(org=ORG, spec=schedules_pb2.ScheduleSpec(cron="0 0 1 1 *", note="\x00")),
    )
    yield Bad(
        "PreviewSchedule", "spec.cron", "bad", preview(org=ORG, spec=schedules_pb2.ScheduleSpec(cron="60 * * * *"))
    )
    update, changed = requests["UpdateSchedule"]
    yield Bad("UpdateSchedule", "spec.note", "bad", update(**{**changed, "spec": {"note": "\x00"}}))
    for field, value in {"overlap": 99, "catch_up": 99, "note": "\x00", "declared_by": "x" * 129}.items():
        yield Bad("CreateSchedule", f"spec.{field}", "bad", make(**{**fields, "spec": {**spec, field: value}}))


def workflow_cases() -> Iterator[Bad]:
    """The cases with bad graphs are in test_workflows_codec.py."""
    good: dict[str, Any] = {"org": ORG, "id": SECOND_JOB}
    job = {"template": {"queue": QUEUE, "kind": "send"}}
    node = {"name": "first", "job": job}
    requests: dict[str, tuple[type[Message], dict[str, Any]]] = {
        "StartWorkflow": (workflows_pb2.StartWorkflowRequest, {**good, "nodes": [node]}),
        "AddNodes": (workflows_pb2.AddNodesRequest, {**good, "lease": LEASE, "nodes": [node]}),
        "GetWorkflow": (workflows_pb2.GetWorkflowRequest, good),
        "ListNodes": (workflows_pb2.ListNodesRequest, good),
        "ListWorkflows": (workflows_pb2.ListWorkflowsRequest, {"org": ORG}),
        "CancelWorkflow": (workflows_pb2.CancelWorkflowRequest, good),
        "PauseWorkflow": (workflows_pb2.PauseWorkflowRequest, good),
        "ResumeWorkflow": (workflows_pb2.ResumeWorkflowRequest, good),
        "SkipNode": (workflows_pb2.SkipNodeRequest, {**good, "node": "first"}),
        "SignalNode": (workflows_pb2.SignalNodeRequest, {**good, "node": "first"}),
        "RetryWorkflow": (workflows_pb2.RetryWorkflowRequest, {**good, "new_id": SECOND_JOB}),
        "ListParents": (workflows_pb2.ListParentsRequest, good),
    }

    def of(rpc: str, field: str, values: dict[str, Any]) -> Iterator[Bad]:
        make, fields = requests[rpc]
        yield from each(rpc, make, field, values, fields)

    texts = {"too long": "x" * 129, "with a line break": "a\n", "with NUL": "a\0b"}
    for rpc in requests:
        yield from of(rpc, "org", ORGS)
        if rpc != "ListWorkflows":
            yield from of(rpc, "id", IDS)
    yield from of("StartWorkflow", "name", texts)
    yield from of("StartWorkflow", "nodes", {"empty": []})
    yield from of("AddNodes", "nodes", {"empty": []})
    for why, parent in {"empty": "", **texts}.items():
        make, fields = requests["AddNodes"]
        waits = {**node, "after": [{"node": parent}]}
        yield Bad("AddNodes", "nodes[0].after[0].node", why, make(**{**fields, "nodes": [waits]}))
    yield from of("AddNodes", "lease", LEASES)
    yield from of("AddNodes", "on_failed", {"unknown": 99})
    yield from of("SkipNode", "node", {"empty": "", **texts})
    yield from of("SignalNode", "node", {"empty": "", **texts})
    yield from of("SignalNode", "payload", {"too long": bytes(64 * 1024 + 1)})
    yield from of("RetryWorkflow", "new_id", IDS)
    yield from of("CancelWorkflow", "reason", {"too long": "x" * 1025, "with NUL": "a\0b"})
    yield from of("ListWorkflows", "state", {"unknown": 99})
    for rpc in ("ListNodes", "ListWorkflows"):
        yield from of(rpc, "page_size", PAGE_SIZES)
    yield from of("ListParents", "page_size", {**NUMBERS_BELOW_0, "above 100": 101})
    yield from of("ListParents", "node", {**NUMBERS_BELOW_0, "above 10,000": 10_001})
    forged = {
        "no base64": "what's this?",
        "half base64": "abc",
        "no UTF-8": base64.urlsafe_b64encode(b"\xff\xfe").decode(),
        "of a word": base64.urlsafe_b64encode(b"mail").decode(),
        "of a negative number": base64.urlsafe_b64encode(b"-1").decode(),
        "of a large number": base64.urlsafe_b64encode(b"9" * 20).decode(),
        # If the router accepted the next two page tokens, the database would refuse the ids in these tokens.
        "of almost an id": base64.urlsafe_b64encode(b"01234567-0123-7fff-bfff-ff-fffffffff").decode(),
        "of an id without dashes": base64.urlsafe_b64encode(b"0123456701" * 3 + b"234567").decode(),
        "too long": "x" * 100,
    }
    for rpc in ("ListNodes", "ListWorkflows", "ListParents"):
        yield from of(rpc, "page_token", forged)
    make, fields = requests["StartWorkflow"]
    nodes: dict[str, dict[str, Any]] = {
        "nodes[0].name": {**node, "name": "a\nb"},
        "nodes[0].job": {"name": "first"},
        "nodes[0].job.template.queue": {"name": "first", "job": {"template": {"queue": "", "kind": "send"}}},
        "nodes[0].job.id": {**node, "job": {**job, "id": SECOND_JOB}},
        "nodes[0].job.dedup": {**node, "job": {**job, "dedup": {"key": "k"}}},
        "nodes[0].job.run_at": {**node, "job": {**job, "run_at": Timestamp(seconds=2 * TEN_YEARS_S + 10**9 * 2)}},
        "nodes[0].after[0].node": {**node, "after": [{"node": "first"}]},
        "nodes[0].after[0].on_failed": {**node, "after": [{"node": "other", "on_failed": 99}]},
        "nodes[0].job.template.retry.exponential.max_delay": {
            **node,
            "job": {
                "template": {**job["template"], "retry": {"exponential": {"initial_delay": Duration(seconds=3601)}}}
            },
        },
        "nodes[0].callback": {**node, "callback": 99},
    }
    for path, bad in nodes.items():
        yield Bad("StartWorkflow", path, "bad", make(**{**fields, "nodes": [bad]}))
    adds, added = requests["AddNodes"]
    for path, bad in {**nodes, "nodes[0].callback": {**node, "callback": 1}}.items():
        yield Bad("AddNodes", path, "bad", adds(**{**added, "nodes": [bad]}))
    yield Bad(
        "StartWorkflow",
        "id",
        "too old",
        make(**{**fields, "id": "01000000-0000-7000-8000-000000000000"}),
    )


def books_of(both: Stubs) -> dict[tuple[str, str], bytes]:
    return {place: one.SerializeToString() for place, one in both.books(*SHARDS).items()}


def refusal(call: Callable[[], object]) -> grpc.RpcError:
    with pytest.raises(grpc.RpcError) as refused:
        call()
    return refused.value


def send(both: Stubs, rpc: str, request: Message) -> object:
    service = next(
        one for one in (both.queue, both.admin, both.cluster, both.schedules, both.workflows) if hasattr(one, rpc)
    )
    answer = getattr(service, rpc)(request, timeout=PATIENCE_S)
    return list(answer) if rpc == "CheckShard" else answer


CASES = [*queue_cases(), *admin_cases(), *schedule_cases(), *workflow_cases()]


@pytest.fixture(scope="module")
def before(cluster: Stubs) -> dict[tuple[str, str], bytes]:
    """The books before the first bad request. The bad requests follow one another, and none of them may change the
    books."""
    return books_of(cluster)


# There is one test for each RPC and not for each request, because every process of pytest collects all tests, and
# reporting a test costs more than sending a request.
@pytest.mark.parametrize("rpc", sorted({bad.rpc for bad in CASES}))
def test_a_bad_field_is_named_by_its_path_and_nothing_is_stored(
    cluster: Stubs, before: dict[tuple[str, str], bytes], rpc: str
) -> None:
    bads = [bad for bad in CASES if bad.rpc == rpc]
    answers = [(str(bad), *answer_to(cluster, bad)) for bad in bads]
    assert answers == [(str(bad), grpc.StatusCode.INVALID_ARGUMENT, [bad.field], False) for bad in bads]
    assert books_of(cluster) == before


def answer_to(both: Stubs, bad: Bad) -> tuple[grpc.StatusCode, list[str], bool]:
    """Returns the status code, the fields that the status names, and whether the status shows a regular expression."""
    try:
        send(both, bad.rpc, bad.request)
    except grpc.RpcError as error:
        return error.code(), violated_fields(error), "regex" in (error.details() or "")
    return grpc.StatusCode.OK, [], False


def test_every_rpc_that_takes_input_is_among_the_bad_requests() -> None:
    services = (
        queue_pb2.DESCRIPTOR.services_by_name["Queue"],
        admin_pb2.DESCRIPTOR.services_by_name["Admin"],
        cluster_pb2.DESCRIPTOR.services_by_name["Cluster"],
        schedules_pb2.DESCRIPTOR.services_by_name["Schedules"],
        workflows_pb2.DESCRIPTOR.services_by_name["Workflows"],
    )
    takes_input = {
        (method.name, field.name)
        for one in services
        for method in one.methods
        for field in method.input_type.fields
        # test_streams.py covers bad messages on streams.
        if not method.client_streaming
    }
    seen = {(bad.rpc, bad.field.partition("[")[0].partition(".")[0]) for bad in CASES}
    # These fields are booleans, which have no bad values.
    free = {"independent", "include_payload", "include_dead", "include_finished", "not_killed", "paused", "wait"}
    assert {place for place in takes_input - seen if place[1] not in free} == set()


@pytest.mark.parametrize(
    ("field", "why", "job"), list(bad_jobs()), ids=lambda value: value if isinstance(value, str) else ""
)
def test_a_bad_job_of_an_independent_enqueue_fails_alone(
    cluster: Stubs, field: str, why: str, job: job_pb2.NewJob
) -> None:
    del why
    org = f"org-{job_id()}"
    request = queue_pb2.EnqueueRequest(org=org, jobs=[new_job(), job, new_job()], independent=True)
    first, second, third = cluster.queue.Enqueue(request, timeout=PATIENCE_S).results
    assert fields_of(second.error) == [f"jobs[1].{path_of(field)}"]
    assert (second.id, second.error.code) == ("", grpc.StatusCode.INVALID_ARGUMENT.value[0])
    assert not first.HasField("error")
    assert not third.HasField("error")
    assert [one.accepted for (_, name), one in cluster.books(*SHARDS).items() if name == org] == [2]


def test_bounds_themselves_are_allowed(cluster: Stubs) -> None:
    org = f"é{'x' * 126}"
    job = new_job(
        queue="q" * 128,
        kind="0" + "._:/-" * 25,
        payload=b"\0" * (1 << 20),
        attributes={f"{at:0128}": "é" * 512 for at in range(32)},
        priority=9,
        max_attempts=1000,
        delay=Duration(seconds=TEN_YEARS_S),
        retry={"exponential": {"multiplier": 100, "jitter": 0, "max_delay": Duration(seconds=TEN_YEARS_S)}},
        dedup_key="\x01" * 256,
        dedup_window=Duration(seconds=2_592_000),
        trace={"traceparent": "", "tracestate": "x" * 512},
    )
    past = new_job(
        run_at=Timestamp(seconds=-62_135_596_800), expires_at=Timestamp(seconds=int(time.time()) + TEN_YEARS_S)
    )
    late = new_job(run_at=Timestamp(seconds=int(time.time()) + TEN_YEARS_S - 60, nanos=999_999_999))
    stored = cluster.queue.Enqueue(enqueue(job, past, late, org=org), timeout=PATIENCE_S)
    ids = [result.id for result in stored.results]
    found = cluster.queue.GetJobs(
        queue_pb2.GetJobsRequest(org=org, ids=ids, include_payload=True), timeout=PATIENCE_S
    ).jobs
    assert [one.state for one in found] == [
        job_pb2.JOB_STATE_SCHEDULED,
        job_pb2.JOB_STATE_READY,
        job_pb2.JOB_STATE_SCHEDULED,
    ]
    assert (dict(found[0].attributes), found[0].payload) == (dict(job.template.attributes), job.template.payload)


@pytest.mark.parametrize("count", [20, 1000])
def test_a_thousand_bad_jobs_are_still_an_invalid_argument(cluster: Stubs, count: int) -> None:
    # A status is sent in headers, and a client accepts only 8 KiB of headers.
    error = refusal(lambda: cluster.queue.Enqueue(enqueue(*[new_job(kind="no name")] * count), timeout=PATIENCE_S))
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
    fields = violated_fields(error)
    assert fields == [f"jobs[{at}].template.kind" for at in range(len(fields))]
    assert len(fields) >= 10
    assert f"and {count - 1} more" in (error.details() or "")


def test_a_message_above_16_mib_is_refused_whole(cluster: Stubs) -> None:
    before = books_of(cluster)
    error = refusal(
        lambda: cluster.queue.Enqueue(enqueue(*[new_job(payload=b"\0" * (1 << 20))] * 17), timeout=PATIENCE_S)
    )
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert re.search(r"the message has 17,\d{3},\d{3} bytes, and at most 16,777,216 are allowed", error.details() or "")
    assert books_of(cluster) == before


@pytest.mark.parametrize("data", [b"\xff\xff", b"\x0a\x02\xff\xfe"], ids=["no protobuf", "text that is not UTF-8"])
def test_bytes_that_are_no_request_are_refused(cluster: Stubs, data: bytes) -> None:
    call: grpc.UnaryUnaryMultiCallable[bytes, bytes] = cluster.channel.unary_unary("/windrow.v1.Queue/Enqueue")
    error = refusal(lambda: call(data, timeout=PATIENCE_S))
    assert error.code() in {grpc.StatusCode.UNKNOWN, grpc.StatusCode.INVALID_ARGUMENT}


def test_leases_of_foreign_shards_jobs_and_orgs_are_not_found(cluster: Stubs) -> None:
    foreign = next(
        name for name in ("x1", "x2") if shard_tag(ShardName(name)) not in map(shard_tag, map(ShardName, SHARDS))
    )
    leases = [
        token(token_prefix(ShardName(foreign), 7), SECOND_JOB),
        token(token_prefix(ShardName("s1"), 7), job_id()),
        token(token_prefix(ShardName("s2"), -(2**63)), JobId("ffffffff-ffff-ffff-ffff-ffffffffffff")),
    ]
    before = books_of(cluster)
    for org in (ORG, "nobody"):
        answers: list[Any] = [
            cluster.queue.Ack(acks(leases, org), timeout=PATIENCE_S),
            cluster.queue.Nack(nacks(leases, org), timeout=PATIENCE_S),
            cluster.queue.Extend(
                queue_pb2.ExtendRequest(org=org, extends=extends(*leases)),
                timeout=PATIENCE_S,
            ),
            cluster.queue.Release(queue_pb2.ReleaseRequest(org=org, leases=leases), timeout=PATIENCE_S),
            cluster.queue.Snooze(
                queue_pb2.SnoozeRequest(org=org, snoozes=[queue_pb2.Snooze(lease=lease) for lease in leases]),
                timeout=PATIENCE_S,
            ),
        ]
        assert [list(answer.answers) for answer in answers] == [[job_pb2.JOB_ANSWER_NOT_FOUND] * 3] * 5
    assert books_of(cluster) == before


def test_an_unknown_shard_or_queue_is_not_found(cluster: Stubs) -> None:
    requests: dict[str, Message] = {
        "CheckShard": cluster_pb2.CheckShardRequest(shard="nowhere\0\n"),
        "GetQueue": admin_pb2.GetQueueRequest(org=ORG, queue="nowhere"),
        "GetStats": admin_pb2.GetStatsRequest(org=ORG, queue="nowhere"),
        "ExplainQueue": admin_pb2.ExplainQueueRequest(org=ORG, queue="nowhere"),
        "ExplainJob": admin_pb2.ExplainJobRequest(org="nobody", id=SECOND_JOB),
        "DeleteQueue": admin_pb2.DeleteQueueRequest(org="nobody\u2028é", queue=QUEUE),
        "PurgeQueue": admin_pb2.PurgeQueueRequest(org="nobody", queue=QUEUE),
    }
    codes = {rpc: refusal(functools.partial(send, cluster, rpc, request)).code() for rpc, request in requests.items()}
    assert set(codes.values()) == {grpc.StatusCode.NOT_FOUND}, codes


# ── The fast path ────────────────────────────────────────────────────────────────────────────────────────────────────

_ids = st.sampled_from(
    [*IDS.values(), SECOND_JOB, SECOND_JOB, SECOND_JOB, f"{SECOND_JOB},{SECOND_JOB}", f"{SECOND_JOB},"]
)
_names = st.sampled_from([*NAMES.values(), "mail", "a/b", "x" * 128]) | st.text(max_size=3)
_jobs = st.builds(
    job_message,
    id=_ids,
    queue=_names,
    kind=_names,
    payload=st.sampled_from([b"", b"x", b"\0" * (1 << 20), b"\0" * ((1 << 20) + 1)]),
    priority=st.integers(-2, 11),
    max_attempts=st.sampled_from([0, 0, 0, 1, 1000, 1001, -1]),
    dedup_key=st.sampled_from(["", "", "k", "\0"]),
    attributes=st.sampled_from([{}, {}, {"a": "b"}, {"": ""}, {"a": "\0"}]),
    delay=st.sampled_from([None, None, *DELAYS.values()]),
)
_traces = st.sampled_from(
    [
        None,
        None,
        job_pb2.TraceContext(traceparent=TRACEPARENT),
        job_pb2.TraceContext(traceparent=TRACEPARENT, tracestate="a=b,c=d"),
        job_pb2.TraceContext(traceparent=TRACEPARENT, tracestate="é"),
        job_pb2.TraceContext(traceparent=TRACEPARENT, tracestate="x" * 513),
        job_pb2.TraceContext(traceparent=f"{TRACEPARENT}\n"),
        job_pb2.TraceContext(tracestate="a=b"),
    ]
)
_plain_jobs = st.builds(
    job_message,
    id=_ids,
    queue=st.sampled_from(["mail", "a/b"]),
    kind=st.sampled_from(["k", "a\n"]),
    group=st.sampled_from(["", "", "g", "é" * 128, "é" * 129, "a\0"]),
    trace=_traces,
)
_requests = st.builds(
    queue_pb2.EnqueueRequest,
    org=st.sampled_from([*ORGS.values(), "org", "é", "x" * 128]) | st.text(max_size=3),
    jobs=st.lists(_jobs | _plain_jobs, max_size=4),
)


@given(_requests)
@example(enqueue(new_job(id=f"{SECOND_JOB},{SECOND_JOB}")))
@example(enqueue(new_job(id=f"{SECOND_JOB},{SECOND_JOB}"), new_job()))
@example(enqueue(new_job(id=SECOND_JOB), new_job()))
@example(enqueue(*[new_job(id=SECOND_JOB)] * 1001))
def test_what_the_fast_path_accepts_the_rules_accept(request: queue_pb2.EnqueueRequest) -> None:
    if validate.plain_jobs(request) is not None:
        assert protovalidate.collect_violations(request) == []


@given(
    st.lists(
        st.builds(
            lambda payload, priority, group, trace: new_job(
                id=job_id(), payload=payload, priority=priority, group=group, trace=trace
            ),
            st.binary(max_size=9),
            st.integers(0, 9),
            st.sampled_from(["", "g", "é" * 128]),
            st.sampled_from([None, job_pb2.TraceContext(traceparent=TRACEPARENT, tracestate="a=b")]),
        ),
        min_size=1,
        max_size=5,
    )
)
def test_the_fast_path_takes_plain_batches(jobs: Sequence[job_pb2.NewJob]) -> None:
    assert validate.plain_jobs(enqueue(*jobs)) is not None


def test_a_compressed_request_is_refused_with_the_reason(cluster: Stubs) -> None:
    """Otherwise 16 KiB on the wire could become 16 MiB in memory."""
    request = enqueue(new_job(payload=b"x" * 100_000))
    refused = refusal(lambda: cluster.queue.Enqueue(request, timeout=PATIENCE_S, compression=grpc.Compression.Gzip))
    assert refused.code() is grpc.StatusCode.UNIMPLEMENTED
    assert "gzip" in (refused.details() or "")
