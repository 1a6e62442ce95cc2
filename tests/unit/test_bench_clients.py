"""A benchmark's client process counts jobs correctly, and notices mistakes of a system."""

from __future__ import annotations

import asyncio
import time
from array import array
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import pytest

from bench.client_process import Client
from bench.payloads import stamped
from bench.system import Finished, Site, Taken, Wrong
from bench.tally import Tally

_SITE = Site(address="", dsns={}, dsn="", cache="", callers=2)


class Fake:
    """A queue in memory, which loses and invents jobs as the test wants."""

    title: ClassVar[str] = "fake"

    def __init__(self, site: Site = _SITE) -> None:
        self.queue: deque[bytes] = deque()
        self.lost = 0
        self.forgotten = 0
        self.calls: list[int] = []
        self.fails: Exception | None = None
        self.emptied = asyncio.Event()

    async def prepare(self, run: str) -> None:
        self.queue.clear()

    async def enqueue(self, payloads: Sequence[bytes]) -> None:
        self.calls.append(len(payloads))
        await asyncio.sleep(0)
        self.queue.extend(payloads)

    async def work(self, *, batch: int, concurrency: int, taken: Taken, finished: Finished) -> None:
        while True:
            if self.fails:
                raise self.fails
            while len(self.queue) > self.lost:
                taken(time.monotonic_ns(), self.queue.popleft())
                finished(1)
                self.emptied.set()
            await asyncio.sleep(0.001)

    async def left(self) -> int:
        self.forgotten = max(0, self.forgotten - 1)
        return len(self.queue) + self.forgotten

    async def check(self, jobs: int) -> None: ...

    async def close(self) -> None: ...


@pytest.fixture
def fake() -> Fake:
    return Fake()


@pytest.fixture
def client(fake: Fake, tmp_path: Path) -> Client:
    return Client(fake, _tally(tmp_path))


def _tally(folder: Path, *, places: int = 1, mine: int = 0) -> Tally:
    file = folder / "tally"
    file.touch()
    return Tally(file, places=places, mine=mine)


def test_processes_count_in_places_of_their_own(tmp_path: Path) -> None:
    first, second = (_tally(tmp_path, places=2, mine=mine) for mine in (0, 1))
    first.take(3)
    first.finish(1)
    second.finish(4)
    assert (first.taken, second.taken, first.finished, second.finished) == (3, 3, 5, 5)
    first.reset()
    assert (second.taken, second.finished) == (0, 4)


async def test_jobs_are_enqueued_in_batches_with_a_smaller_one_at_the_end(client: Client, fake: Fake) -> None:
    await client.prepare("run")
    await client.enqueue(jobs=25, batch=10, callers=3)
    assert sorted(fake.calls) == [5, 10, 10]


async def test_a_whole_life_ends_when_every_job_is_finished_and_the_database_agrees(client: Client) -> None:
    await client.prepare("run")
    called_s = time.monotonic()
    began_s, ended_s = await client.live(jobs=100, total=100, batch=7, callers=2, concurrency=1)
    assert called_s <= began_s <= ended_s <= time.monotonic()
    assert await client.settle(total=100) is None
    assert await client.counts() == (100, 100)
    await client.rest()


async def test_jobs_that_finish_later_in_the_database_count_until_then(client: Client, fake: Fake) -> None:
    await client.prepare("run")
    _, ended_s = await client.live(jobs=10, total=10, batch=5, callers=1, concurrency=1)
    fake.forgotten = 3
    settled_s = await client.settle(total=10)
    assert settled_s is not None
    assert settled_s > ended_s
    await client.rest()


async def test_jobs_that_never_come_out_are_noticed(
    client: Client, fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bench.client_process.STUCK_S", 0.05)
    fake.lost = 10
    await client.prepare("run")
    await client.enqueue(jobs=100, batch=10, callers=1)
    with pytest.raises(Wrong, match=r"90 jobs came out, 90 finished, .* no more; awaited: 100"):
        await client.drain(total=100, batch=10, concurrency=1)
    await client.rest()


async def test_jobs_that_come_out_twice_are_noticed(client: Client, fake: Fake) -> None:
    await client.prepare("run")
    await client.enqueue(jobs=10, batch=10, callers=1)
    fake.queue.append(fake.queue[0])
    await client.drain(total=10, batch=10, concurrency=1)
    with pytest.raises(Wrong, match="11 jobs came out, 11 finished, and 10 had gone in"):
        await client.settle(total=10)
    await client.rest()


async def test_a_payload_that_changed_is_noticed(client: Client, fake: Fake) -> None:
    await client.prepare("run")
    fake.queue.append(b"another")
    await client.work(batch=1, concurrency=1)
    await fake.emptied.wait()
    with pytest.raises(Wrong, match="another payload"):
        await client.counts()
    await client.rest()


async def test_a_consumer_that_fails_is_noticed_by_the_next_order(client: Client, fake: Fake) -> None:
    await client.prepare("run")
    fake.fails = Wrong("broken")
    with pytest.raises(Wrong, match="broken"):
        await client.drain(total=1, batch=1, concurrency=1)


async def test_waits_are_recorded_with_the_moment_each_job_was_taken(
    client: Client, fake: Fake, tmp_path: Path
) -> None:
    await client.prepare("run", record=True)
    fake.queue.extend(stamped(2, at_ns=5))
    await client.work(batch=1, concurrency=1)
    assert await client.calm(seconds_max=10) == 0
    file = tmp_path / "pickups"
    await client.pickups(file=str(file))
    numbers = array("q", file.read_bytes())
    assert len(numbers) == 4
    assert numbers[0] - numbers[1] == 5
    await client.pickups(file=str(file))
    assert file.read_bytes() == b""
    await client.rest()


async def test_an_open_load_stores_what_is_due_however_the_jobs_fare(client: Client, fake: Fake) -> None:
    await client.prepare("run")
    assert await client.offer(rate=1000, seconds=0.1, batch=10, late_s_max=5) == 100
    assert fake.calls == [10] * 10


async def test_pings_go_one_by_one(client: Client, fake: Fake) -> None:
    await client.prepare("run")
    await client.work(batch=1, concurrency=1)
    assert await client.ping(jobs=5, seconds_max=60, pause_s=0) == 5
    assert fake.calls == [1] * 5
    assert await client.ping(jobs=5, seconds_max=-1, pause_s=0) == 0
    await client.rest()
