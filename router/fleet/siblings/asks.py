"""Asks one sibling whether its consumers have room for jobs that are enqueued through this process, and tells the
sibling which of these jobs were leased to its consumers."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from router.buffer import Account, Buffer
from router.codec.fast_write import Delivery
from router.fleet.siblings.frame import Answer, Ask, Leased, Outcome, Place, QueueKey
from router.fleet.siblings.link import Link
from shard.fair_quota import FairQuota
from shard.queue.claim import JOB_BYTES
from shard.queue.pending_enqueue import Taker
from shard.vocabulary import Micros, NewJobs

# How long an enqueue waits for an answer. After that, the jobs of the enqueue are stored without the sibling. The
# sibling is not asked again until it has answered and another `_REST_S` seconds have passed: otherwise a busy sibling
# would delay one enqueue after another.
_ASK_S_MAX = 0.020
_REST_S = 1.0
# The most jobs, and the most bytes of jobs, that one ask is about; further jobs get no place.
_ASK_JOBS_MAX = 1000
_ASK_BYTES_MAX = 1024 * 1024
# At any time, this process has asked one sibling about at most this many jobs, and has promised that sibling places for
# at most this many jobs. Orgs share each of these two amounts (I4).
JOBS_MAX = 10_000
# How long places are kept for a sibling that does not tell the outcome. This time is short, because no hint wakes a
# `Dequeue` call while its places are kept for a sibling. The outcome takes this long only if the shard hardly answers,
# or if the sibling was stopped.
KEPT_S_MAX = 3.0
# An insert that begins later than this after the ask does not use the promise.
_USED_S_MAX = 2.0


@dataclass(slots=True, kw_only=True, eq=False)
class Promise:
    """Places at a sibling's consumers for jobs of one enqueue. `takers`: these consumers, each with the positions of
    its jobs. `end` must be called exactly once."""

    takers: Sequence[tuple[Taker, Sequence[int]]]
    # Until when an insert that uses the promise may begin, by the clock `time.monotonic`.
    until_s: float
    # The owner calls this once, with the jobs that were leased to each taker, in the order of `takers`. None: no job
    # was leased to that taker.
    end: Callable[[Sequence[Delivery | None]], None]


@dataclass(slots=True, kw_only=True, eq=False)
class Asked:
    """A question to a sibling."""

    key: QueueKey
    # The jobs, and their positions in the enqueue.
    ids: Sequence[str]
    positions: Sequence[int]
    # The result of this future is the promise. None: the sibling has promised nothing, or its answer did not come in
    # time.
    promise: asyncio.Future[Promise | None]
    # Holds the memory of the encoded jobs until the sibling has received them.
    account: Account
    # The time of the ask by the event loop's clock, which is the clock `time.monotonic`.
    since_s: float
    # The leased jobs of which the sibling was told, and which it has not confirmed yet.
    told: Sequence[Delivery] = ()
    # When the jobs in `told` are released if the sibling has not confirmed them. From then on the sibling gives these
    # jobs to no consumer, whatever it reads later.
    release_s: float = math.inf

    def abandon(self) -> None:
        """Call this when the enqueue does not continue. Gives the promise back, even if the promise comes only
        later."""
        if not self.promise.done():
            self.promise.cancel()
        elif not self.promise.cancelled() and (promise := self.promise.result()) is not None:
            promise.end([None] * len(promise.takers))


class Asks:
    """`on_in_vain` is called with a queue for whose jobs the sibling did not have enough places."""

    def __init__(self, link: Link, buffer: Buffer, on_in_vain: Callable[[QueueKey], None]) -> None:
        self._link = link
        self._buffer = buffer
        self._on_in_vain = on_in_vain
        self._numbers = itertools.count(1)
        # The asks without an answer, and the asks whose answer promised places, both by number. The oldest ask is
        # first.
        self._unanswered: dict[int, Asked] = {}
        self._promised: dict[int, Asked] = {}
        self._jobs = FairQuota(JOBS_MAX)
        self._timer: asyncio.TimerHandle | None = None
        self._release_timer: asyncio.TimerHandle | None = None
        # The sibling is asked nothing before this time, because an answer was late.
        self._rests_until_s = -math.inf
        self._closed = False
        self._all_over = asyncio.Event()

    def may_ask(self) -> bool:
        """Returns whether the sibling will probably answer soon."""
        if not self._link.is_open or self._link.is_paused:
            return False
        if asyncio.get_running_loop().time() < self._rests_until_s:
            return False
        oldest = next(iter(self._unanswered.values()), None)
        # If the oldest ask has a result already, its enqueue has stopped waiting because the sibling is slow.
        return oldest is None or not oldest.promise.done()

    def ask(self, key: QueueKey, jobs: NewJobs, positions: Sequence[int]) -> Asked | None:
        """Asks for places for the jobs at these positions, in this order of preference. Returns None if the org's open
        asks are about too many jobs already, or if there is not enough free memory."""
        sizes: list[int] = []
        room = _ASK_BYTES_MAX
        for size in jobs.sizes(positions[:_ASK_JOBS_MAX]):
            room -= size + JOB_BYTES
            if room < 0:
                break
            sizes.append(size)
        # For the buffer, all asks of one org are together one connection.
        account = Account(self._buffer, org=key.org, peer=f"sibling {key.org}")
        if not sizes or not self._jobs.fits(key.org, len(sizes)) or not account.take(_ASK_BYTES_MAX - room):
            return None
        loop = asyncio.get_running_loop()
        ids = [jobs.ids[at] for at in positions[: len(sizes)]]
        asked = Asked(
            key=key,
            ids=ids,
            positions=positions[: len(sizes)],
            promise=loop.create_future(),
            account=account,
            since_s=loop.time(),
        )
        number = next(self._numbers)
        self._unanswered[number] = asked
        self._jobs.take(key.org, len(sizes))
        self._link.out.asks.append(Ask(number, key, ids, sizes, asked.since_s + _ASK_S_MAX))
        self._link.send_soon()
        if self._timer is None:
            self._timer = loop.call_later(_ASK_S_MAX, self._give_up)
        return asked

    def _give_up(self) -> None:
        """Ends the waits of enqueues for answers that take too long."""
        loop = asyncio.get_running_loop()
        self._timer = None
        for asked in self._unanswered.values():
            if asked.since_s + _ASK_S_MAX > loop.time():
                self._timer = loop.call_at(asked.since_s + _ASK_S_MAX, self._give_up)
                return
            if not asked.promise.done():
                asked.promise.set_result(None)

    def on_answer(self, answer: Answer) -> None:
        """Raises ValueError if the answer fits no ask."""
        number, places = answer
        asked = self._unanswered.get(number)
        count = sum(place.jobs for place in places)
        if asked is None or count > len(asked.positions):
            raise ValueError(f"answer {number} is to no ask: {answer!r:.100}")
        del self._unanswered[number]
        now_s = asyncio.get_running_loop().time()
        if now_s >= asked.since_s + _ASK_S_MAX:
            self._rests_until_s = now_s + _REST_S
        if count < len(asked.positions):
            self._on_in_vain(asked.key)
        if not places:
            self._over(asked)
            if not asked.promise.done():
                asked.promise.set_result(None)
            return
        self._promised[number] = asked
        takers: list[tuple[Taker, Sequence[int]]] = []
        at = 0
        for place in places:
            taker = Taker(place.lease, place.worker, place.window_us)
            takers.append((taker, asked.positions[at : at + place.jobs]))
            at += place.jobs
        # The promise must not refer to `asked`, which refers to the promise. Such a cycle would keep the encoded jobs
        # in memory until Python's garbage collector runs, although that memory is not reserved for them any more.
        promise = Promise(
            takers=takers,
            until_s=asked.since_s + _USED_S_MAX,
            end=lambda deliveries: self._end(number, places, deliveries),
        )
        if asked.promise.done():
            # The enqueue of this ask does not wait any more.
            promise.end([None] * len(takers))
        else:
            asked.promise.set_result(promise)

    def _end(self, number: int, places: Sequence[Place], deliveries: Sequence[Delivery | None]) -> None:
        """Tells the sibling which jobs were leased to its consumers."""
        asked = self._promised[number]
        asked.told = [delivery for delivery in deliveries if delivery is not None]
        if self._closed:
            del self._promised[number]
            self._release(asked)
            return
        leased: list[Leased] = []
        at = 0
        for place, delivery in zip(places, deliveries, strict=True):
            leased.append(_leased(asked.ids[at : at + place.jobs], delivery))
            at += place.jobs
        self._link.out.outcomes.append(Outcome(number, leased if asked.told else []))
        self._link.send_soon()
        if not asked.told:
            del self._promised[number]
            self._over(asked)
            return
        loop = asyncio.get_running_loop()
        asked.release_s = loop.time() + KEPT_S_MAX
        if self._release_timer is None:
            self._release_timer = loop.call_at(asked.release_s, self._release_late)

    def _release_late(self) -> None:
        """Releases the jobs that the sibling should have confirmed long ago. Perhaps the sibling was stopped for a
        while."""
        loop = asyncio.get_running_loop()
        self._release_timer = None
        for asked in self._promised.values():
            if asked.release_s <= loop.time():
                asked.release_s = math.inf
                self._release_told(asked)
        next_s = min((asked.release_s for asked in self._promised.values()), default=math.inf)
        if next_s < math.inf:
            self._release_timer = loop.call_at(next_s, self._release_late)

    def on_received(self, number: int) -> None:
        """Records that the sibling has confirmed an outcome: its consumers get the jobs. Raises ValueError."""
        asked = self._promised.pop(number, None)
        if asked is None or not asked.told:
            raise ValueError(f"it has received outcome {number}, which was not sent")
        self._over(asked)

    def _over(self, asked: Asked) -> None:
        asked.told = ()
        asked.account.close()
        self._jobs.give_back(asked.key.org, len(asked.positions))
        if not self._jobs.taken:
            self._all_over.set()

    def _release(self, asked: Asked) -> None:
        """Releases leased jobs, because the sibling has ended and has not confirmed that its consumers get these
        jobs."""
        self._release_told(asked)
        self._over(asked)

    def _release_told(self, asked: Asked) -> None:
        for delivery in asked.told:
            delivery.store.release_soon(asked.key.org, delivery.leases())

    def close(self) -> None:
        """Call this when the sibling is gone. Ends all asks, and releases the jobs that the sibling has not
        confirmed."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        if self._release_timer is not None:
            self._release_timer.cancel()
        unanswered, self._unanswered = self._unanswered, {}
        for asked in unanswered.values():
            self._over(asked)
            if not asked.promise.done():
                asked.promise.set_result(None)
        # Release the jobs of enqueues that have ended. The enqueues of the other promises are still running, and `_end`
        # releases the jobs that they lease.
        for number in [number for number, asked in self._promised.items() if asked.told]:
            self._release(self._promised.pop(number))

    async def finish(self) -> None:
        """Waits until the sibling has received all outcomes."""
        while self._jobs.taken:
            self._all_over.clear()
            await self._all_over.wait()


def _leased(ids: Sequence[str], delivery: Delivery | None) -> Leased:
    if delivery is None:
        return Leased(Micros(0), [], [])
    got = set(delivery.ids)
    which = None if len(got) == len(ids) else [at for at, job_id in enumerate(ids) if job_id in got]
    return Leased(delivery.deadline, which, delivery.jobs)
