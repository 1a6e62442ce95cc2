"""The most frequent refusals of a router: the text of each refusal says what is wrong, what is allowed, and what the
caller sent."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Generator, Iterator
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from tests.jobs import job_id, job_message
from tests.postgres import Server
from tests.routers import PATIENCE_S, Stubs, running_routers, stubs, write_cluster
from windrow.v1 import admin_pb2, cluster_pb2, job_pb2, queue_pb2

DAY_S = 86_400


@pytest.fixture(scope="module")
def both(postgres: Server, tmp_path_factory: pytest.TempPathFactory) -> Generator[Stubs, None, None]:
    config = write_cluster(tmp_path_factory.mktemp("refusals") / "cluster.toml", {"s1": postgres.create("refusals")})
    with running_routers(config) as routers, stubs(routers.address) as opened:
        yield opened
    postgres.drop("refusals")


def enqueue(both: Stubs, *jobs: job_pb2.NewJob) -> None:
    both.queue.Enqueue(queue_pb2.EnqueueRequest(org="acme", jobs=jobs), timeout=PATIENCE_S)


def job(**fields: object) -> job_pb2.NewJob:
    return job_message(**{"id": job_id(), "queue": "mail", "kind": "greet", **fields})


def dequeue(both: Stubs, **fields: object) -> None:
    request: dict[str, object] = {"org": "acme", "queues": ["mail"], **fields}
    both.queue.Dequeue(queue_pb2.DequeueRequest(**request), timeout=PATIENCE_S)  # type: ignore[arg-type]


def ack(both: Stubs, lease: bytes) -> None:
    both.queue.Ack(queue_pb2.AckRequest(org="acme", acks=[queue_pb2.Ack(lease=lease)]), timeout=PATIENCE_S)


def update(both: Stubs, config: admin_pb2.QueueConfig | None) -> None:
    both.admin.UpdateQueue(admin_pb2.UpdateQueueRequest(org="acme", queue="mail", config=config), timeout=PATIENCE_S)


def list_jobs(both: Stubs, page_token: str, **fields: Any) -> None:
    both.admin.ListJobs(admin_pb2.ListJobsRequest(org="acme", page_token=page_token, **fields), timeout=PATIENCE_S)


def redrive(both: Stubs, **fields: Any) -> None:
    both.admin.RedriveQueue(admin_pb2.RedriveQueueRequest(org="acme", queue="mail", **fields), timeout=PATIENCE_S)


def set_limit(both: Stubs, **fields: Any) -> None:
    both.cluster.SetLimit(cluster_pb2.SetLimitRequest(org="acme", **fields), timeout=PATIENCE_S)


def check_shard(both: Stubs) -> Iterator[object]:
    return iter(list(both.cluster.CheckShard(cluster_pb2.CheckShardRequest(shard="s9"), timeout=PATIENCE_S)))


NAME = "must be 1 to 128 of A–Z a–z 0–9 . _ : / -, the first a letter or digit"
SEND_BACK = "send `lease` unchanged, as Dequeue or Consume gave it"

REFUSALS: dict[str, tuple[Callable[[Stubs], object], str]] = {
    "no jobs": (enqueue, "jobs: must not be empty"),
    "too many jobs": (
        lambda both: enqueue(both, *(job() for _ in range(1001))),
        "jobs: must have at most 1,000 items, not 1,001",
    ),
    "a long org": (
        lambda both: both.queue.GetJobs(queue_pb2.GetJobsRequest(org="ä" * 65, ids=[job_id()]), timeout=PATIENCE_S),
        "org: must be at most 128 bytes, not 130",
    ),
    "a long queue": (
        lambda both: enqueue(both, job(queue="q" * 129)),
        f"jobs[0].template.queue: {NAME}, not 129 characters",
    ),
    "a long value": (
        lambda both: enqueue(both, job(attributes={"a": "x" * 1025})),
        'jobs[0].template.attributes["a"]: must be at most 1024 bytes, not 1025',
    ),
    "many attributes": (
        lambda both: enqueue(both, job(attributes={str(number): "" for number in range(33)})),
        "jobs[0].template.attributes: must have at most 32 entries, not 33",
    ),
    "a long delay": (
        lambda both: enqueue(both, job(delay=Duration(seconds=4000 * DAY_S))),
        "jobs[0].delay: must be 0 s to 3,650 days, not 4,000 days",
    ),
    "no queues": (lambda both: dequeue(both, queues=[]), "queues: must not be empty"),
    "a queue twice": (
        lambda both: dequeue(both, queues=["a", "b", "a"]),
        "queues: must name each only once, and 'a' is named twice",
    ),
    "a long window": (
        lambda both: dequeue(both, visibility_window=Duration(seconds=13 * 3600)),
        "visibility_window: must be 100 ms to 12 h, not 13 h",
    ),
    "a short window": (
        lambda both: dequeue(both, visibility_window=Duration(nanos=1_500_000)),
        "visibility_window: must be 100 ms to 12 h, not 1.5 ms",
    ),
    "a long wait": (lambda both: dequeue(both, wait=Duration(seconds=90)), "wait: must be 0 s to 1 min, not 90 s"),
    "no token": (
        lambda both: ack(both, b"garbage"),
        f"acks[0].lease: is no lease token, which has 29 bytes, not 7: {SEND_BACK}",
    ),
    "a later token": (
        lambda both: ack(both, b"\x07" * 29),
        f"acks[0].lease: is no lease token of version 1, but begins with 7: {SEND_BACK}",
    ),
    "a long retention": (
        lambda both: update(both, admin_pb2.QueueConfig(retention_days=4000)),
        "config.retention_days: must be 0 to 3650, not 4000",
    ),
    "no measure": (lambda both: set_limit(both, amount=1), "measure: must be set"),
    "an unknown measure": (
        lambda both: set_limit(both, amount=1, measure=99),
        "measure: must be a value that the enum has, not 99",
    ),
    "no state": (lambda both: list_jobs(both, "", states=[0]), "states[0]: must be set"),
    "no delay": (
        lambda both: update(both, admin_pb2.QueueConfig(retry={"fixed": {}})),  # type: ignore[arg-type]
        "config.retry.fixed.delay: must be set",
    ),
    "a late expiry": (
        lambda both: enqueue(both, job(expires_at=Timestamp(seconds=253_402_300_799))),
        "jobs[0].expires_at: must be at most 7,300 days ahead",
    ),
    "a redrive that takes too long": (
        lambda both: redrive(both, per_second=0.01, already_redriven=4_000_000, limit=10),
        "already_redriven: must be at most 3,153,590 at 0.01 jobs per second and a limit of 10, not 4,000,000: no job "
        "may become due more than 3,650 days ahead",
    ),
    "a place in a redrive without a rate": (
        lambda both: redrive(both, already_redriven=1),
        "already_redriven: must be 0 without per_second",
    ),
    "no configuration": (lambda both: update(both, None), "config: must be set"),
    "a page token": (
        lambda both: list_jobs(both, "zzz"),
        "page_token: 'zzz' is not a page token of this call: begin at the first page, without a token",
    ),
    "an unknown shard": (
        check_shard,
        "the cluster has no shard 's9': ListShards (`windrow shards`) names those it has",
    ),
}


@pytest.mark.parametrize("refused", REFUSALS)
def test_a_refusal_can_be_understood(both: Stubs, refused: str) -> None:
    call, words = REFUSALS[refused]
    assert refusal(lambda: call(both)) == words


def refusal(call: Callable[[], object]) -> str:
    with pytest.raises(grpc.RpcError) as caught:
        call()
    return str(caught.value.details())


def test_an_id_that_is_too_old_or_too_new_is_told_the_bounds_and_what_the_shards_clock_says(both: Stubs) -> None:
    def of_year(year: str) -> str:
        made_ms = {"2020": 1_577_836_800_000, "2099": 4_070_908_800_000}[year]
        return str(uuid.UUID(bytes=made_ms.to_bytes(6, "big") + b"\x70\x00\x80" + bytes(7)))

    for year in ("2020", "2099"):
        told = refusal(lambda year=year: enqueue(both, job(), job(id=of_year(year))))  # type: ignore[misc]
        assert told.startswith(
            f"jobs[1].id: {of_year(year)} was made at {year}-01-01 00:00:00 UTC; the time in an id must be at most 7 "
            "days before and 1 hour after the shard's, which is 20"
        )
        assert told.endswith(" UTC: make a new id, and check the clock that ids are made by")
