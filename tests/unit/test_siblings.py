"""What sibling processes tell each other, and which places and jobs they keep for each other."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import random
import socket
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest
import uvloop
from hypothesis import given
from hypothesis import strategies as st

from router.buffer import Buffer
from router.codec.fast_write import Delivery
from router.fleet.fleet import Fleet
from router.fleet.shares import Share, deal
from router.fleet.siblings import asks, promises, siblings
from router.fleet.siblings.asks import Asked, Promise
from router.fleet.siblings.frame import (
    SIZES,
    Answer,
    Ask,
    Frame,
    Leased,
    Outcome,
    Place,
    QueueKey,
    decoded,
)
from router.fleet.siblings.siblings import Siblings
from router.fleet.waiter import AwaitedQueue, Waiter
from router.process import server
from shard.lease_token import lease_of
from shard.queue.store import Store
from shard.vocabulary import Lease, Micros, NewJobs, OrgId, QueueName, ShardName
from tests.effort import luck_of, trials
from tests.jobs import some_jobs
from tests.routers import PATIENCE_S
from tests.streams import until
from tests.waiting import WaitingConsumer

ORG, QUEUE, SHARD = OrgId("o"), QueueName("mail"), ShardName("s1")
KEY = QueueKey(SHARD, ORG, QUEUE)


# ── Frames ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def parts(encoded: bytes) -> tuple[bytes, bytes]:
    in_head, in_jobs = SIZES.unpack_from(encoded)
    head, jobs = encoded[SIZES.size : SIZES.size + in_head], encoded[SIZES.size + in_head :]
    assert len(jobs) == in_jobs
    return head, jobs


def test_a_frame_is_read_as_it_was_written() -> None:
    frame = Frame(
        hints={KEY: True, QueueKey(SHARD, OrgId('ö"'), QUEUE): False},
        asks=[Ask(1, KEY, ["a", "b"], [0, 16_000], 1e6 / 3), Ask(2, KEY, ["c"], [1], 0.0)],
        answers=[Answer(3, [Place(2**63 - 1, 'w"ö', 1_000_000, 4)]), Answer(4, [])],
        outcomes=[
            Outcome(5, [Leased(Micros(7), None, [b"\x00\xff", b""]), Leased(Micros(0), [], [])]),
            Outcome(6, []),
            Outcome(7, [Leased(Micros(8), [1], [b"x"])]),
        ],
        received=[8, 9],
    )
    assert decoded(*parts(frame.encoded())) == frame
    assert decoded(*parts(Frame().encoded())) == Frame()


def test_large_outcomes_go_one_frame_after_another_and_nothing_is_lost() -> None:
    frame = Frame(outcomes=[Outcome(at, [Leased(Micros(0), None, [b"x" * 700_000])]) for at in range(5)])
    frame.hints = {QueueKey(SHARD, ORG, QueueName(f"q{at}")): True for at in range(2500)}
    hints, taken = dict(frame.hints), list(frame.outcomes)
    frames: list[Frame] = []
    while frame:
        frames.append(frame.take())
    assert [len(one.outcomes) for one in frames] == [2, 2, 1]
    assert [one for each in frames for one in each.outcomes] == taken
    assert {key: ready for one in frames for key, ready in one.hints.items()} == hints


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=6),
    max_leaves=60,
)


@given(head=st.binary(max_size=50) | _JSON.map(lambda value: repr(value).encode()), jobs=st.binary(max_size=9))
def test_what_is_no_frame_is_refused(head: bytes, jobs: bytes) -> None:
    with contextlib.suppress(ValueError):
        assert isinstance(decoded(head, jobs), Frame)


@given(parts=st.lists(st.lists(_JSON, max_size=2), min_size=5, max_size=5), jobs=st.binary(max_size=9))
def test_what_is_nearly_a_frame_is_refused(parts: object, jobs: bytes) -> None:
    with contextlib.suppress(ValueError):
        assert isinstance(decoded(json.dumps(parts).encode(), jobs), Frame)


# ── Two processes in one event loop ──────────────────────────────────────────────────────────────────────────────────


@dataclass(kw_only=True)
class Shard:
    """A store that keeps who holds which lease, instead of a database."""

    name: ShardName = SHARD
    # The number of the lease that an insert has made, by job.
    leased: dict[str, int] = field(default_factory=dict[str, int])
    released: list[Lease] = field(default_factory=list[Lease])
    has_released: asyncio.Event = field(default_factory=asyncio.Event)

    def release_soon(self, _: OrgId, leases: Sequence[Lease]) -> None:
        self.released += leases
        if leases:
            self.has_released.set()


class Waits(WaitingConsumer):
    """A consumer that keeps the jobs that it gets."""

    has_credit: Callable[[Waiter], None]

    def __init__(self, org: OrgId, **fields: Any) -> None:
        super().__init__(org, **fields)
        self.was_woken = asyncio.Event()
        self.got: list[Delivery] = []

    def wake(self) -> None:
        super().wake()
        self.was_woken.set()

    def give(self, jobs: Delivery) -> None:
        self.got.append(jobs)

    def free_places(self, unused: int) -> None:
        super().free_places(unused)
        if unused:
            self.has_credit(self)

    @property
    def ids(self) -> list[str]:
        return [one for delivery in self.got for one in delivery.ids]


class Process:
    """A router process as its siblings see it."""

    def __init__(self, shard: Shard) -> None:
        self.buffer = Buffer(2**24)
        self.store = cast("Store", shard)
        # The consumers that wait for the queue of each org.
        self.awaited: dict[OrgId, AwaitedQueue[Waiter]] = {}
        self.siblings = Siblings(self.buffer, consumers=lambda name: self if name == SHARD else None, ready=self._ready)

    def _ready(self) -> list[QueueKey]:
        return [QueueKey(SHARD, org, QUEUE) for org in self.awaited]

    def deal(self, org: OrgId, queue: QueueName, sizes: Sequence[int]) -> list[Share]:
        return deal(self.awaited.get(org), org, sizes) if queue == QUEUE else []

    def waits(self, org: OrgId = ORG, **fields: Any) -> Waits:
        waiter = Waits(org, buffer=self.buffer, **fields)
        awaited = self.awaited.setdefault(waiter.org, AwaitedQueue())
        awaited.enter(waiter)
        waiter.has_credit = awaited.has_credit
        self.siblings.tell_ready(QueueKey(SHARD, waiter.org, QUEUE))
        return waiter

    async def asks(self, jobs: NewJobs) -> list[Promise]:
        return await self.siblings.ask(SHARD, jobs, {QUEUE: range(len(jobs))})


async def settled() -> None:
    """Waits until all frames have arrived, and all frames that were sent as answers to these frames."""
    for _ in range(30):
        await asyncio.sleep(0)


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes sure that no request for places times out, even on a busy machine, unless a test wants that."""
    monkeypatch.setattr(asks, "_ASK_S_MAX", PATIENCE_S)
    monkeypatch.setattr(promises, "KEPT_S_MAX", 2 * PATIENCE_S)
    monkeypatch.setattr(asks, "KEPT_S_MAX", 2 * PATIENCE_S)


@pytest.fixture
def shard() -> Shard:
    return Shard()


@pytest.fixture
async def pair(shard: Shard) -> AsyncGenerator[tuple[Process, Process], None]:
    here, there = Process(shard), Process(shard)
    connect(here, there)
    await settled()
    yield here, there
    await here.siblings.finish()
    await there.siblings.finish()
    await settled()


def connect(*processes: Process) -> None:
    for process, end in zip(processes, socket.socketpair(), strict=True):
        process.siblings.connect(end)


def delivery(shard: Shard, jobs: NewJobs, promise: Promise, *, but: Sequence[int] = ()) -> list[Delivery | None]:
    """Returns what an insert has leased: all jobs of the promise except those at the positions `but`."""
    deliveries: list[Delivery | None] = []
    for taker, positions in promise.takers:
        ids = [jobs.ids[at] for at in positions if at not in but]
        shard.leased.update(dict.fromkeys(ids, taker.number))
        one = Delivery(cast("Store", shard), taker.number, Micros(5), ids, [b"job" for _ in ids])
        deliveries.append(one if ids else None)
    return deliveries


async def test_a_promise_keeps_places_until_its_outcome(pair: tuple[Process, Process], shard: Shard) -> None:
    here, there = pair
    few, many = there.waits(credit=2), there.waits(credit=10)
    await settled()
    jobs = some_jobs(ORG, 9)
    (promise,) = await here.asks(jobs)
    assert sorted(len(positions) for _, positions in promise.takers) == [2, 7]
    assert (few.credit, many.credit) == (0, 3)
    assert there.buffer.held > 0
    assert here.buffer.held > 0
    promise.end(delivery(shard, jobs, promise, but=[8]))
    await settled()
    assert sorted(few.ids + many.ids) == sorted(jobs.ids[:8])
    # One job was not leased. The place of this job is free again, and the consumer that has this place looks for jobs
    # itself.
    assert (few.credit, many.credit, few.woken, many.woken) == (0, 4, 0, 1)
    assert {lease.number for one in (few, many) for each in one.got for lease in each.leases()} == set(
        shard.leased.values()
    )
    assert here.buffer.held == 0
    assert there.buffer.held == sum(one.bytes for each in (few, many) for one in each.got)
    assert shard.released == []


async def test_jobs_that_a_sibling_has_received_are_not_in_memory_any_more(
    pair: tuple[Process, Process], shard: Shard
) -> None:
    here, there = pair
    there.waits(credit=5)
    await settled()
    jobs = some_jobs(ORG, 3)
    # Collects the garbage of earlier tests.
    gc.collect()
    gc.disable()
    try:
        (promise,) = await here.asks(jobs)
        (sibling,) = here.siblings._siblings
        (asked,) = sibling.asks._promised.values()
        promise.end(delivery(shard, jobs, promise))
        await settled()
        assert (asked.told, here.buffer.held) == ((), 0)
        del asked, promise
        assert not [one for one in gc.get_objects() if isinstance(one, Asked | Promise)]
    finally:
        gc.enable()


async def test_a_call_that_takes_one_delivery_gets_one_from_one_sibling(
    pair: tuple[Process, Process], shard: Shard
) -> None:
    here, there = pair
    third = Process(shard)
    connect(third, there)
    call = there.waits(credit=10, takes_once=True)
    await settled()
    ours, theirs = await asyncio.gather(here.asks(some_jobs(ORG, 3)), third.asks(some_jobs(ORG, 3)))
    assert sorted([len(ours), len(theirs)]) == [0, 1]
    assert (call.promised, call.idle, call.credit) == (True, False, 7)
    for promise in [*ours, *theirs]:
        promise.end([None])
    await settled()
    assert (call.promised, call.credit, call.woken) == (False, 10, 1)
    await third.siblings.finish()
    await settled()


async def test_an_ask_in_vain_ends_a_hint_until_the_next_one(pair: tuple[Process, Process]) -> None:
    here, there = pair
    waiter = there.waits(credit=1)
    await settled()
    assert here.siblings.any_ready()
    (promise,) = await here.asks(some_jobs(ORG, 2))
    assert not here.siblings.any_ready()
    assert await here.asks(some_jobs(ORG, 1)) == []
    promise.end([None])
    await settled()
    assert waiter.credit == 1
    there.siblings.tell_ready(KEY)
    await settled()
    assert here.siblings.any_ready()
    there.siblings.tell_gone(KEY)
    await settled()
    assert not here.siblings.any_ready()


async def test_hints_that_end_before_they_are_sent_are_forgotten(pair: tuple[Process, Process]) -> None:
    here, there = pair
    (told,) = there.siblings._siblings
    there.siblings.tell_ready(KEY)
    await settled()
    # From here on the sibling does not read.
    told.link.pause_writing()
    for number in range(100):
        key = QueueKey(SHARD, ORG, QueueName(f"q{number}"))
        there.siblings.tell_ready(key)
        there.siblings.tell_gone(key)
    there.siblings.tell_gone(KEY)
    assert told.link.out.hints == {KEY: False}
    there.siblings.tell_ready(KEY)
    assert told.link.out.hints == {}
    there.siblings.tell_gone(KEY)
    assert here.siblings.any_ready()
    told.link.resume_writing()
    await settled()
    assert not here.siblings.any_ready()


async def test_an_org_with_many_queues_leaves_hints_for_others(
    pair: tuple[Process, Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = pair
    monkeypatch.setattr(siblings, "_HINTS_MAX", 200)
    # Each sibling has a share of the hints, so a second sibling has one, too.
    third = Process(Shard())
    connect(third, there)
    await settled()
    greedy = [QueueKey(SHARD, OrgId("greedy"), QueueName(f"q{number}")) for number in range(300)]
    for key in greedy:
        there.siblings.tell_ready(key)
    there.waits(credit=5)
    await settled()
    for process in (here, third):
        assert len(process.siblings._hints) == 51
        assert KEY in process.siblings._hints
    # The places of the first hints are free again, and other hints take them.
    for key in greedy:
        there.siblings.tell_gone(key)
    for key in greedy[100:]:
        there.siblings.tell_ready(key)
    await settled()
    assert len(here.siblings._hints) == 51
    await third.siblings.finish()
    await settled()


async def test_nobody_is_asked_about_a_queue_that_is_not_told_ready(pair: tuple[Process, Process]) -> None:
    here, there = pair
    there.waits(credit=5)
    await settled()
    assert await here.siblings.ask(ShardName("s2"), some_jobs(ORG, 1), {QUEUE: [0]}) == []
    assert await here.siblings.ask(SHARD, some_jobs(OrgId("p"), 1), {QUEUE: [0]}) == []
    assert await here.siblings.ask(SHARD, some_jobs(ORG, 1), {QueueName("other"): [0]}) == []


@pytest.mark.parametrize("granted", [False, True], ids=["before the answer", "in the turn of the answer"])
async def test_an_enqueue_that_is_cancelled_while_it_asks_keeps_no_places(
    pair: tuple[Process, Process], granted: bool
) -> None:
    here, there = pair
    waiter = there.waits(credit=5)
    await settled()
    asking = asyncio.create_task(here.asks(some_jobs(ORG, 5)))
    await asyncio.sleep(0)
    if granted:
        for _ in range(100):
            if not waiter.credit:
                break
            await asyncio.sleep(0)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    await settled()
    assert (waiter.credit, waiter.ids) == (5, [])
    assert here.buffer.held == there.buffer.held == 0


async def test_a_promise_that_comes_too_late_is_given_back_and_until_then_nobody_else_waits(
    pair: tuple[Process, Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asks, "_ASK_S_MAX", 0.01)
    monkeypatch.setattr(asks, "_REST_S", 0)
    # The clock of the promises stands still, so the request for places does not time out.
    monkeypatch.setattr(promises, "time", SimpleNamespace(monotonic=lambda: 0))
    here, there = pair
    waiter = there.waits(credit=5)
    await settled()
    (link,) = [one.link for one in there.siblings._siblings]
    # The sibling's answers wait.
    link.pause_writing()
    async with asyncio.timeout(PATIENCE_S):
        assert await here.asks(some_jobs(ORG, 5)) == []
        assert (waiter.credit, here.siblings.any_ready()) == (0, True)
        # The sibling is not asked at all.
        assert await here.asks(some_jobs(ORG, 1)) == []
        assert here.buffer.held > 0
        link.resume_writing()
        await settled()
        assert (waiter.credit, here.buffer.held, there.buffer.held) == (5, 0, 0)
        monkeypatch.setattr(asks, "_ASK_S_MAX", PATIENCE_S)
        (promise,) = await here.asks(some_jobs(ORG, 5))
        promise.end([None])


async def test_a_sibling_that_reads_an_ask_too_late_wakes_nobody_and_is_asked_nothing_for_a_while(
    pair: tuple[Process, Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asks, "_ASK_S_MAX", 0.01)
    monkeypatch.setattr(asks, "_REST_S", PATIENCE_S)
    here, there = pair
    waiter = there.waits(credit=5)
    await settled()
    (link,) = [one.link for one in there.siblings._siblings]
    link._transport.pause_reading()  # type: ignore[union-attr]
    async with asyncio.timeout(PATIENCE_S):
        assert await here.asks(some_jobs(ORG, 5)) == []
    link._transport.resume_reading()  # type: ignore[union-attr]
    await settled()
    assert (waiter.credit, waiter.woken, here.buffer.held, there.buffer.held) == (5, 0, 0, 0)
    there.siblings.tell_ready(KEY)
    await settled()
    assert here.siblings.any_ready()
    (sibling,) = here.siblings._siblings
    assert not sibling.asks.may_ask()
    sibling.asks._rests_until_s = 0
    monkeypatch.setattr(asks, "_ASK_S_MAX", PATIENCE_S)
    (promise,) = await here.asks(some_jobs(ORG, 5))
    promise.end([None])


async def test_places_are_free_again_if_no_outcome_comes_and_late_jobs_are_released(
    pair: tuple[Process, Process], shard: Shard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(promises, "KEPT_S_MAX", 0.01)
    here, there = pair
    waiter = there.waits(credit=5)
    await settled()
    jobs = some_jobs(ORG, 3)
    (promise,) = await here.asks(jobs)
    async with asyncio.timeout(PATIENCE_S):
        await waiter.was_woken.wait()
    assert (waiter.credit, there.buffer.held) == (5, 0)
    # The insert may have committed before its process was stopped, so its jobs are released.
    number = promise.takers[0][0].number
    assert shard.released == [lease_of(one, number) for one in jobs.ids]
    shard.released.clear()
    # The insert commits only now.
    promise.end(delivery(shard, jobs, promise))
    await settled()
    assert (waiter.credit, waiter.ids) == (5, [])
    assert sorted(lease.number for lease in shard.released) == sorted(shard.leased[one] for one in jobs.ids)
    assert here.buffer.held == there.buffer.held == 0


async def test_jobs_for_a_sibling_that_is_stopped_are_released_and_its_consumers_do_not_get_them(
    pair: tuple[Process, Process], shard: Shard, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = pair
    waiter = there.waits(credit=5)
    await settled()
    jobs = some_jobs(ORG, 3)
    (promise,) = await here.asks(jobs)
    monkeypatch.setattr(asks, "KEPT_S_MAX", 0.01)
    (link,) = [one.link for one in there.siblings._siblings]
    (promised,) = [one._promises for one in there.siblings._siblings]
    link._transport.pause_reading()  # type: ignore[union-attr]
    promise.end(delivery(shard, jobs, promise))
    async with asyncio.timeout(PATIENCE_S):
        await shard.has_released.wait()
    number = promise.takers[0][0].number
    leases = [lease_of(one, number) for one in jobs.ids]
    assert shard.released == leases
    # The memory of the jobs is held until the sibling has read the jobs.
    assert here.buffer.held > 0
    # The sibling continues, and reads the outcome before its timers fire.
    for kept in promised._kept.values():
        kept.until_s = 0
    link._transport.resume_reading()  # type: ignore[union-attr]
    await settled()
    assert (waiter.credit, waiter.ids) == (5, [])
    assert here.buffer.held == there.buffer.held == 0
    assert shard.released == leases * 2


@pytest.mark.parametrize("told", [False, True], ids=["before the outcome", "before the outcome is received"])
async def test_jobs_for_a_sibling_that_is_gone_are_released(
    pair: tuple[Process, Process], shard: Shard, told: bool
) -> None:
    here, there = pair
    there.waits(credit=5)
    await settled()
    jobs = some_jobs(ORG, 3)
    (promise,) = await here.asks(jobs)
    (link,) = [one.link for one in there.siblings._siblings]
    if told:
        promise.end(delivery(shard, jobs, promise))
        link._transport.abort()  # type: ignore[union-attr]
        await settled()
    else:
        link._transport.abort()  # type: ignore[union-attr]
        await settled()
        promise.end(delivery(shard, jobs, promise))
    assert sorted(lease.number for lease in shard.released) == sorted(shard.leased[one] for one in jobs.ids)
    assert here.buffer.held == 0
    assert not here.siblings.any_ready()


async def test_what_a_sibling_that_is_gone_may_have_leased_is_released(
    pair: tuple[Process, Process], shard: Shard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(promises, "_RELEASES_AFTER_S", (0.01,))
    here, there = pair
    waiter = there.waits(credit=5)
    await settled()
    jobs = some_jobs(ORG, 3)
    (promise,) = await here.asks(jobs)
    number = promise.takers[0][0].number
    (link,) = [one.link for one in here.siblings._siblings]
    link._transport.abort()  # type: ignore[union-attr]
    async with asyncio.timeout(PATIENCE_S):
        await shard.has_released.wait()
    assert (waiter.credit, waiter.woken, there.buffer.held) == (5, 1, 0)
    assert [(lease.job_hex, lease.number) for lease in shard.released] == [
        (one.replace("-", ""), number) for one in jobs.ids
    ]
    promise.end([None])


async def test_a_sibling_is_asked_for_no_more_than_it_may_be(pair: tuple[Process, Process]) -> None:
    here, there = pair
    there.waits(credit=100_000)
    await settled()
    # An enqueue asks a sibling for places for at most 1 MiB of its jobs.
    jobs = some_jobs(ORG, 200)
    jobs.payloads = [b"x" * 16_000] * 200
    (promise,) = await here.asks(jobs)
    assert len(promise.takers[0][1]) == 2**20 // 16_500
    promise.end([None])
    held: list[Promise] = []
    there.siblings.tell_ready(KEY)
    await settled()
    while promised := await here.asks(some_jobs(ORG, 1000)):
        held += promised
        there.siblings.tell_ready(KEY)
        await settled()
    assert sum(len(positions) for one in held for _, positions in one.takers) <= asks.JOBS_MAX
    for one in held:
        one.end([None] * len(one.takers))
    await settled()
    assert here.buffer.held == there.buffer.held == 0


async def test_an_org_with_many_enqueues_leaves_places_for_others(pair: tuple[Process, Process]) -> None:
    here, there = pair
    key = QueueKey(SHARD, OrgId("greedy"), QUEUE)
    there.waits(credit=100_000, org=key.org)
    there.waits(credit=5)
    held: list[Promise] = []
    while True:
        there.siblings.tell_ready(key)
        await settled()
        promised = await here.asks(some_jobs(key.org, 500))
        if not promised:
            break
        held += promised
    assert sum(len(positions) for one in held for _, positions in one.takers) == asks.JOBS_MAX // 2
    # The memory that the greedy org uses does not count for other orgs.
    assert here.buffer.peers.fits(f"sibling {ORG}", here.buffer.bytes_max - here.buffer.held)
    held += await here.asks(some_jobs(ORG, 5))
    assert sum(len(positions) for _, positions in held[-1].takers) == 5
    for one in held:
        one.end([None] * len(one.takers))
    await settled()
    assert here.buffer.held == there.buffer.held == 0


@pytest.mark.thorough
async def test_no_place_and_no_job_is_lost_whatever_comes_between() -> None:
    """Three processes enqueue for each other's consumers. Enqueues succeed, fail or are cancelled, answers are late,
    and connections break. At the end, the credit of every consumer has fallen by the number of jobs that the consumer
    got. Every job that was leased is at exactly one consumer, or released."""
    luck = luck_of("siblings")
    for _ in range(trials(15, thorough=300)):
        await _one_history(luck)


async def _one_history(luck: random.Random) -> None:
    shard = Shard()
    processes = [Process(shard) for _ in range(3)]
    for at, one in enumerate(processes):
        for other in processes[at + 1 :]:
            connect(one, other)
    await settled()
    waiters: list[tuple[Waits, int]] = []
    for process in processes:
        for _ in range(luck.randint(0, 3)):
            credit = luck.randint(1, 6)
            waiters.append((process.waits(credit=credit, takes_once=luck.random() < 0.2), credit))

    async def enqueue(process: Process) -> None:
        jobs = some_jobs(ORG, luck.randint(1, 8))
        for promise in await process.asks(jobs):
            for _ in range(luck.randint(0, 20)):
                await asyncio.sleep(0)
            but = [at for at in range(len(jobs)) if luck.random() < luck.choice([0, 0.5, 1])]
            promise.end(delivery(shard, jobs, promise, but=but))

    tasks: list[asyncio.Task[None]] = []
    for _ in range(60):
        process = luck.choice(processes)
        match luck.randint(0, 9):
            case 0 if tasks:
                # An enqueue is cancelled only while it asks for places, because an insert that has begun always tells
                # its outcome.
                asking = asyncio.create_task(process.asks(some_jobs(ORG, 3)))
                for _ in range(luck.randint(0, 6)):
                    await asyncio.sleep(0)
                if not asking.done():
                    asking.cancel()
                    await asyncio.wait({asking})
                for promise in [] if asking.cancelled() else asking.result():
                    promise.end([None] * len(promise.takers))
            case 1 if luck.random() < 0.2 and process.siblings._siblings:
                luck.choice(list(process.siblings._siblings)).link._transport.abort()  # type: ignore[union-attr]
            case 2:
                process.siblings.tell_ready(KEY)
            case 3:
                for waiter, _ in waiters:
                    waiter.idle = True
            case _:
                tasks.append(asyncio.create_task(enqueue(process)))
        await asyncio.sleep(0)
    if tasks:
        await asyncio.gather(*tasks)
    await settled()
    for process in processes:
        await process.siblings.finish()
    await settled()
    got = Counter(one for waiter, _ in waiters for one in waiter.ids)
    assert set(got.values()) <= {1}
    for waiter, credit in waiters:
        assert waiter.credit + len(waiter.ids) == credit
        assert not waiter.promised
        assert waiter.account.held == sum(one.bytes for one in waiter.got)
        assert all(shard.leased[one] == each.number for each in waiter.got for one in each.ids)
    released = {lease.job_hex for lease in shard.released}
    assert {one for one in shard.leased if one not in got} <= {
        one for one in shard.leased if one.replace("-", "") in released
    }
    for process in processes:
        ours = sum(waiter.account.held for waiter, _ in waiters if waiter.buffer is process.buffer)
        assert process.buffer.held == ours


# ── The supervisor ───────────────────────────────────────────────────────────────────────────────────────────────────


async def test_programs_that_a_process_starts_do_not_inherit_its_connections() -> None:
    received: list[socket.socket] = []
    fleet = cast("Fleet", SimpleNamespace(siblings=SimpleNamespace(connect=received.append)))
    supervisor, child = socket.socketpair()
    one, other = socket.socketpair()
    with supervisor, child, one, other:
        socket.send_fds(supervisor, [b"+"], [one.fileno()])
        server._hear(child, fleet, asyncio.Event())
        (connection,) = received
        with connection:
            assert not connection.get_inheritable()


# ── Descriptors ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_sibling_that_has_ended_at_once_costs_no_other_file_its_descriptor() -> None:
    """If a file lost its descriptor, gRPC could write answers for one client to the connection of another client."""

    async def connect_to_the_dead() -> None:
        ours, theirs = socket.socketpair()
        number = ours.fileno()
        theirs.close()
        made = Siblings(Buffer(1000), consumers=lambda _: None, ready=list)
        made.connect(ours)
        del ours
        await until(lambda: not made._siblings and not made._connecting, "it is found to have ended")
        files: list[int] = []
        while number not in files:
            files.append(os.open(os.devnull, os.O_RDONLY))
        gc.collect()
        for file in files:
            # The close fails if the file was already closed by mistake.
            os.close(file)

    uvloop.run(connect_to_the_dead())
