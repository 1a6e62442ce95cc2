"""Lease tokens that name a shard which the cluster does not have: the shard never existed, or it was forgotten."""

from __future__ import annotations

import asyncio
from collections.abc import Generator, Sequence
from pathlib import Path

import pytest
from google.protobuf.duration_pb2 import Duration

from shard.lease_token import token, token_prefix
from shard.placement import catalog
from shard.placement.slots import slot_of
from shard.postgres.pool import Database
from shard.vocabulary import JobId, OrgId, ShardName
from tests.integration.test_reload import Live, databases, live, place
from tests.integration.test_router import (
    NOT_FOUND,
    OK,
    QUEUE,
    STALE,
    assert_unavailable,
    dequeue,
    enqueue,
    found,
    new_job,
    refusal,
    succeeds,
)
from tests.jobs import job_id
from tests.moves import begin_move
from tests.routers import PATIENCE_S, Stubs, until
from tests.streams import answers_of
from windrow.v1 import job_pb2, queue_pb2

__all__ = ["databases"]
WINDOW = Duration(seconds=60)
Answers = list[job_pb2.JobAnswer.ValueType]


@pytest.fixture
def cluster(databases: dict[str, str], tmp_path: Path) -> Generator[Live, None, None]:
    with live(databases, tmp_path) as running:
        yield running


def nacks(leases: Sequence[bytes]) -> list[queue_pb2.Nack]:
    return [queue_pb2.Nack(lease=lease, retry_after=Duration()) for lease in leases]


def acks(leases: Sequence[bytes]) -> list[queue_pb2.Ack]:
    return [queue_pb2.Ack(lease=lease) for lease in leases]


def settle(both: Stubs, org: str, *leases: bytes) -> dict[str, Answers]:
    """Sends every call that names leases, first as unary calls and then on a stream. Returns the answers. Ack comes
    last, because an ack ends the leases."""
    queue = both.queue
    extends = [queue_pb2.Extend(lease=lease) for lease in leases]
    extend = queue_pb2.ExtendRequest(org=org, extends=extends, visibility_window=WINDOW)
    unary = {
        "extend": queue.Extend(extend, timeout=PATIENCE_S).answers,
        "nack": queue.Nack(queue_pb2.NackRequest(org=org, nacks=nacks(leases)), timeout=PATIENCE_S).answers,
        "release": queue.Release(queue_pb2.ReleaseRequest(org=org, leases=leases), timeout=PATIENCE_S).answers,
        "ack": queue.Ack(queue_pb2.AckRequest(org=org, acks=acks(leases)), timeout=PATIENCE_S).answers,
    }
    start = queue_pb2.ConsumeStart(org=org, queues=[QUEUE], visibility_window=WINDOW)
    messages = [
        queue_pb2.ConsumeRequest(start=start),
        queue_pb2.ConsumeRequest(request_id=1, extends=extends),
        queue_pb2.ConsumeRequest(request_id=2, nacks=nacks(leases)),
        queue_pb2.ConsumeRequest(request_id=3, releases=leases),
        queue_pb2.ConsumeRequest(request_id=4, acks=acks(leases)),
    ]
    settled = [one for answer in queue.Consume(iter(messages), timeout=PATIENCE_S) for one in answer.settled]
    assert not any(one.HasField("error") for one in settled), settled
    ways = {1: "extend", 2: "nack", 3: "release", 4: "ack"}
    streamed = {f"stream {ways[one.request_id]}": answers_of(one, leases) for one in settled}
    return {way: list(answers) for way, answers in unary.items()} | streamed


WAYS = [f"{how}{what}" for how in ("", "stream ") for what in ("extend", "nack", "release", "ack")]


def foreign(job: str, number: int = 7) -> bytes:
    return token(token_prefix(ShardName("another clusters"), number), JobId(job))


def test_a_lease_of_a_shard_that_never_existed_is_not_found_by_any_router(cluster: Live) -> None:
    for shard in ("s1", "s2"):
        org = cluster.org_on(shard)
        assert settle(cluster.stubs, org, foreign(job_id())) == {way: [NOT_FOUND] for way in WAYS}
        # A bad lease does not affect the other leases in the same call.
        enqueue(cluster.stubs, org)
        (leased,) = dequeue(cluster.stubs, org)
        request = queue_pb2.AckRequest(org=org, acks=acks([foreign(job_id()), leased.lease, foreign(job_id())]))
        answers = cluster.stubs.queue.Ack(request, timeout=PATIENCE_S).answers
        assert list(answers) == [NOT_FOUND, OK, NOT_FOUND]


def test_a_lease_of_a_shard_that_never_was_on_a_job_that_the_org_has_is_stale(cluster: Live) -> None:
    org, job = cluster.org_on("s2"), new_job()
    enqueue(cluster.stubs, org, job)
    (leased,) = dequeue(cluster.stubs, org)
    assert settle(cluster.stubs, org, foreign(job.id)) == {way: [STALE] for way in WAYS}
    # The real lease is still valid.
    request = queue_pb2.AckRequest(org=org, acks=acks([leased.lease]))
    assert list(cluster.stubs.queue.Ack(request, timeout=PATIENCE_S).answers) == [OK]
    # For another org, the answer is NOT_FOUND.
    other = cluster.org_on("s2")
    assert settle(cluster.stubs, other, foreign(job.id)) == {way: [NOT_FOUND] for way in WAYS}


def test_of_leases_of_a_forgotten_shard_is_told_what_the_shards_that_are_left_know(cluster: Live) -> None:
    org, acked, nacked, left = cluster.org_on("s2"), new_job(), new_job(), new_job()
    enqueue(cluster.stubs, org, acked, nacked, left)
    leases = {leased.id: leased.lease for leased in dequeue(cluster.stubs, org)}
    queue = cluster.stubs.queue
    queue.Ack(queue_pb2.AckRequest(org=org, acks=acks([leases[acked.id]])), timeout=PATIENCE_S)
    queue.Nack(queue_pb2.NackRequest(org=org, nacks=nacks([leases[nacked.id]])), timeout=PATIENCE_S)
    queue.Release(queue_pb2.ReleaseRequest(org=org, leases=[leases[left.id]]), timeout=PATIENCE_S)
    begin_move(cluster.dsns, org, to="s1").finish()
    forget(cluster)
    assert [job.shard for job in found(cluster.stubs, org, nacked.id, left.id).jobs] == ["s1", "s1"]

    def ways(**others: Answers) -> dict[str, Answers]:
        said = {way: [STALE] for way in WAYS}
        return said | others | {f"stream {way}": answers for way, answers in others.items()}

    # The histories of these jobs have moved with the jobs, and say how the leases ended.
    assert settle(cluster.stubs, org, leases[nacked.id]) == ways(nack=[OK])
    assert settle(cluster.stubs, org, leases[left.id]) == ways(release=[OK])
    # This job had finished, so it is still on the shard that routers no longer ask.
    assert settle(cluster.stubs, org, leases[acked.id]) == {way: [NOT_FOUND] for way in WAYS}


def forget(cluster: Live) -> None:
    """Moves all other slots away from shard s2, forgets it, and removes it from the cluster file."""
    place(cluster, None, writes="s1", reads=["s1"])

    async def forget_owner() -> None:
        database = Database(ShardName("s1"), cluster.dsns["s1"], connections=1)
        await database.open()
        assert await catalog.forget_owner(database, ShardName("s2"), force=True)
        await database.close()

    asyncio.run(forget_owner())
    digest = cluster.write({"s1": {"dsn": cluster.dsns["s1"]}})
    until(lambda: cluster.file().digest == digest, "the file is in use")


def test_a_lease_of_a_shard_that_only_the_catalog_knows_is_unavailable(cluster: Live) -> None:
    """Another router may have a newer cluster file, and may have leased the job on that shard."""
    org = cluster.org_on("s2")
    place(cluster, slot_of(OrgId(org)), writes="s3", reads=["s3"])
    lease = token(token_prefix(ShardName("s3"), 7), JobId(job_id()))
    request = queue_pb2.AckRequest(org=org, acks=acks([lease]))
    until(lambda: not succeeds(lambda: cluster.stubs.queue.Ack(request, timeout=PATIENCE_S)), "the router has learnt")
    assert_unavailable(refusal(lambda: cluster.stubs.queue.Ack(request, timeout=PATIENCE_S)))
