"""How the benchmark runs a peer: the frames, the process, and the message if the process fails. `./run bench` itself
runs the real peers, and checks all their answers."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import ClassVar

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.payloads import intact, stamped
from bench.peers import wire
from bench.peers.child import ChildSystem, url
from bench.system import Site, Wrong

WAIT_S = 30.0
SITE = Site(address="", dsns={}, dsn="host=db user=ada password='a b/c' dbname=jobs", cache="/nowhere", callers=3)


class FakePeer(ChildSystem):
    title: ClassVar[str] = "fake"

    def command(self, cache: Path) -> list[str]:
        return [sys.executable, str(Path(__file__).with_name("peer_fake.py"))]


@pytest.fixture
async def peer() -> AsyncIterator[FakePeer]:
    made = FakePeer(SITE)
    async with asyncio.timeout(WAIT_S):
        yield made
        await made.close()


async def test_what_a_peer_raises_is_told_with_its_name(peer: FakePeer) -> None:
    with pytest.raises(Wrong, match="fake: ValueError: no queue, with 3 connections to postgresql://ada:a%20b%2Fc@db"):
        await peer.prepare("refused")
    await peer.prepare("run")


async def test_payloads_that_a_peer_would_have_to_store_otherwise_are_refused(peer: FakePeer) -> None:
    await peer.prepare("run")
    with pytest.raises(Wrong, match="only where they are ASCII text"):
        await peer.enqueue(["é".encode()])
    assert await peer.left() == 0


async def test_the_death_of_a_peer_fails_all_present_and_later_calls(peer: FakePeer) -> None:
    await peer.prepare("run")
    calls = [
        asyncio.create_task(peer.enqueue([b"wait"])),
        asyncio.create_task(peer.work(batch=1, concurrency=1, taken=lambda *_: None, finished=lambda _: None)),
        asyncio.create_task(peer.enqueue([b"die"])),
    ]
    for call in calls:
        with pytest.raises(Wrong, match="fake: its process has ended"):
            await call
    with pytest.raises(Wrong, match="fake: its process has ended"):
        await peer.enqueue([b"late"])


async def test_what_is_wrong_with_a_taken_job_ends_the_work(peer: FakePeer) -> None:
    def refuse(_at_ns: int, _payload: bytes) -> None:
        raise Wrong("not as it was stored")

    await peer.prepare("run")
    await peer.enqueue(stamped(1))
    with pytest.raises(Wrong, match="not as it was stored"):
        await peer.work(batch=1, concurrency=1, taken=refuse, finished=lambda _: None)
    # The peer has finished the jobs that it had begun.
    assert await peer.left() == 0


@pytest.mark.parametrize("batch", [1, 100])
async def test_a_peer_gives_out_every_job_once_and_counts_them_all(peer: FakePeer, batch: int) -> None:
    await peer.prepare("run")
    stored = [stamped(batch, at_ns=number) for number in range(10)]
    for payloads in stored:
        await peer.enqueue(payloads)
    jobs = 10 * batch
    assert await peer.left() == jobs
    with pytest.raises(Wrong, match=f"fake: of {jobs} jobs, the database knows"):
        await peer.check(jobs)

    taken: list[bytes] = []
    done = 0
    all_done = asyncio.Event()

    def finished(count: int) -> None:
        nonlocal done
        done += count
        if done >= jobs:
            all_done.set()

    working = asyncio.create_task(
        peer.work(batch=batch, concurrency=2, taken=lambda _, payload: taken.append(payload), finished=finished)
    )
    await all_done.wait()
    working.cancel()
    await asyncio.wait({working})
    assert working.cancelled()
    assert (await peer.left(), done) == (0, jobs)
    assert taken == [payload for payloads in stored for payload in payloads]
    assert all(map(intact, taken))
    await peer.check(jobs)
    with pytest.raises(Wrong):
        await peer.check(jobs + 1)


async def test_a_closed_peer_has_ended(peer: FakePeer) -> None:
    await peer.prepare("run")
    (pid,) = peer.child_pids
    await peer.close()
    assert peer.child_pids == []
    assert not psutil.pid_exists(pid)


@given(st.lists(st.tuples(st.binary(max_size=300), st.integers(-(2**63), 2**63 - 1)), max_size=50))
def test_what_was_taken_is_read_as_it_was_written(jobs: list[tuple[bytes, int]]) -> None:
    payloads, times_ns = [payload for payload, _ in jobs], [at_ns for _, at_ns in jobs]
    frame = wire.taken(payloads, times_ns)
    length, kind = wire.HEAD.unpack_from(frame)
    assert (length, wire.Kind(kind)) == (len(frame) - wire.HEAD.size, wire.Kind.TAKEN)
    told, told_ns = wire.read_taken(frame[wire.HEAD.size :])
    assert (told, list(told_ns)) == (payloads, times_ns)


def test_a_password_is_escaped_in_a_url() -> None:
    assert url("host=db user=u password='p@ss/w:rd' dbname=d") == "postgresql://u:p%40ss%2Fw%3Ard@db:5432/d"
