"""Other tests and benchmarks use the attacks of a hostile client. These tests check that each attack does to a real
router what the attack's name says."""

from __future__ import annotations

from collections.abc import Generator

import pytest

from proof.hostile_peer import (
    Silence,
    connect,
    drip,
    leave_answers_unread,
    leave_requests_unfinished,
    open_peer,
    reset_rapidly,
    say_nothing,
)
from tests.jobs import job_id
from tests.postgres import Server
from tests.routers import PATIENCE_S, Routers, Stubs, running_routers, stubs, write_cluster
from tests.streams import new_job, start, until
from windrow.v1 import admin_pb2, cluster_pb2, queue_pb2

ENQUEUE, GET_JOBS, CONSUME = (f"/windrow.v1.Queue/{name}" for name in ("Enqueue", "GetJobs", "Consume"))
OK, UNIMPLEMENTED = 0, 12
# Even a busy machine sends ten calls within this time.
SEND_S = 3.0


@pytest.fixture(scope="module")
def routers(postgres: Server, tmp_path_factory: pytest.TempPathFactory) -> Generator[Routers, None, None]:
    config = write_cluster(tmp_path_factory.mktemp("hostile") / "cluster.toml", {"s1": postgres.create("hostile")})
    with running_routers(config) as running:
        yield running


@pytest.fixture(scope="module")
def both(routers: Routers) -> Generator[Stubs, None, None]:
    with stubs(routers.address) as made:
        yield made


def _stored(both: Stubs, org: str, *, count: int, payload_bytes: int) -> bytes:
    """Stores jobs. Returns a GetJobs request for them."""
    jobs = [new_job(id=job_id(), payload=bytes(payload_bytes)) for _ in range(count)]
    both.queue.Enqueue(queue_pb2.EnqueueRequest(org=org, jobs=jobs), timeout=PATIENCE_S)
    ids = [job.id for job in jobs]
    return queue_pb2.GetJobsRequest(org=org, ids=ids, include_payload=True).SerializeToString()


async def test_answers_stay_with_the_router_while_the_window_is_zero(routers: Routers, both: Stubs) -> None:
    message = _stored(both, "unread", count=2, payload_bytes=4096)
    async with open_peer(routers.address, window_bytes=0) as peer:
        for _ in range(5):
            await peer.call(GET_JOBS, message)
        await peer.until(lambda seen: len(seen.answering) == 5, within_s=PATIENCE_S)
        assert peer.seen.answer_bytes == 0
        assert peer.seen.statuses == {}
        assert not peer.closed


async def test_answers_come_as_far_as_the_window_goes(routers: Routers, both: Stubs) -> None:
    message = _stored(both, "window", count=2, payload_bytes=4096)
    async with open_peer(routers.address, window_bytes=1_000) as peer:
        await peer.call(GET_JOBS, message)
        await peer.until(lambda seen: seen.answer_bytes == 1_000, within_s=PATIENCE_S)
        assert peer.seen.statuses == {}
    async with open_peer(routers.address, window_bytes=60_000) as peer:
        await peer.call(GET_JOBS, message)
        await peer.until(lambda seen: seen.statuses == {OK: 1}, within_s=PATIENCE_S)


async def test_a_socket_that_nobody_reads_holds_answers_back_too(routers: Routers, both: Stubs) -> None:
    message = _stored(both, "unread socket", count=2, payload_bytes=4096)
    seen = await leave_answers_unread(
        routers.address, GET_JOBS, message, calls=10, connections=2, seconds=SEND_S, reads=False
    )
    assert [one.calls_sent for one in seen] == [5, 5]
    assert [one.closed_after_s for one in seen] == [None, None]


async def test_a_request_whose_last_byte_never_comes_stays_open(routers: Routers, both: Stubs) -> None:
    async with open_peer(routers.address, window_bytes=65_535) as peer:
        await peer.begin(ENQUEUE, 200_000)
        assert peer.seen.request_bytes_sent == 5 + 199_999
        # The router still answers on this connection. It has not closed the connection, but waits for the missing byte.
        await peer.call("/windrow.v1.Queue/Nothing", b"")
        await peer.until(lambda seen: seen.statuses == {UNIMPLEMENTED: 1}, within_s=PATIENCE_S)


async def test_unfinished_requests_are_dealt_out_over_connections(routers: Routers, both: Stubs) -> None:
    seen = await leave_requests_unfinished(
        routers.address, ENQUEUE, size_bytes=50_000, calls=6, connections=2, seconds=SEND_S
    )
    assert [one.calls_sent for one in seen] == [3, 3]
    assert all(one.request_bytes_sent <= 3 * 50_004 for one in seen)


async def test_streams_take_jobs_that_they_never_read(routers: Routers, both: Stubs) -> None:
    org = "unread streams"
    _stored(both, org, count=4, payload_bytes=4096)
    first = queue_pb2.ConsumeRequest(start=start(org), credit=4).SerializeToString()
    async with open_peer(routers.address, window_bytes=0) as peer:
        await peer.call(CONSUME, first, ends=False)
        await peer.until(lambda seen: len(seen.answering) == 1, within_s=PATIENCE_S)

        def leased() -> int:
            return sum(
                queue.leased
                for queue in both.admin.GetStats(admin_pb2.GetStatsRequest(org=org), timeout=PATIENCE_S).queues
            )

        await until(leased, "its jobs are leased")
        assert peer.seen.answer_bytes == 0


async def test_calls_are_opened_and_reset_by_the_thousand_and_the_router_lives(routers: Routers, both: Stubs) -> None:
    (few,) = await reset_rapidly(routers.address, ENQUEUE, count=100, seconds=PATIENCE_S)
    assert (few.calls_sent, few.closed_after_s) == (100, None)
    (many,) = await reset_rapidly(routers.address, ENQUEUE, count=5_000, seconds=PATIENCE_S)
    # The router may close the connection before the last calls are sent.
    assert many.calls_sent >= 1_000
    assert many.lasted_s < PATIENCE_S
    assert both.cluster.ListShards(cluster_pb2.ListShardsRequest(), timeout=PATIENCE_S).shards


@pytest.mark.parametrize("silence", Silence)
async def test_a_silent_connection_stands_until_the_server_ends_it(
    routers: Routers, both: Stubs, silence: Silence
) -> None:
    seen = await say_nothing(routers.address, silence, connections=2, seconds=0.3)
    assert [(one.calls_sent, one.closed_after_s) for one in seen] == [(0, None)] * 2


async def test_a_dripping_connection_sends_one_byte_at_a_time(routers: Routers, both: Stubs) -> None:
    (seen,) = await drip(routers.address, ENQUEUE, connections=1, seconds=0.3, every_s=0.01)
    assert seen.closed_after_s is None
    assert seen.lasted_s < PATIENCE_S


async def test_what_the_server_announces_and_closes_is_reported(routers: Routers, both: Stubs) -> None:
    async with open_peer(routers.address) as peer:
        await peer.until(lambda seen: seen.settings, within_s=PATIENCE_S)
        # No server accepts a frame of this length. The server closes the connection and says why.
        await peer.write(b"\xff\xff\xff\x00\x00\x00\x00\x00\x01")
        await peer.until(lambda _: peer.closed, within_s=PATIENCE_S)
        assert peer.seen.closed_after_s is not None


async def test_only_servers_on_this_machine_are_attacked() -> None:
    with pytest.raises(ValueError, match="loopback"):
        async with connect("192.0.2.1:80"):
            pass
