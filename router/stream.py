"""One Consume stream: what it reads, what it writes, and what goes back when it ends."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Coroutine
from itertools import chain
from typing import Any

from router import convert
from router.calls import Received, told
from router.consuming import Consumer
from router.fleet import Fleet
from router.gate import Call, Context, Gate
from router.leases import Answers, Leases
from router.status import InvalidRequest, ShuttingDown, Violation
from router.validation import check, check_consume
from router.wire import Given
from shard.coalescing import TooManyWaiting
from shard.errors import ShardError
from shard.vocabulary import OrgId, QueueName
from windrow.v1 import job_pb2, queue_pb2

CREDIT_MAX = 10_000
# Of jobs that wait to be written; with more, no more are taken.
_WAITING_BYTES_MAX = 8 * 1024 * 1024
# A message ends with the job that fills this much: with the largest payload added, it stays below 4 MiB.
_MESSAGE_BYTES_MAX = 2 * 1024 * 1024
# Messages of one stream that are being settled, or whose answers wait to be written; with more, no more are read.
_SETTLING_MAX = 64
# How long a stream may keep to itself whose it is.
_START_S_MAX = 10.0
# Before clients take the silence for a dead connection.
_SETTLE_S_MAX = 8.0


async def first_message(messages: AsyncIterator[Received], draining: asyncio.Event) -> Received | None:
    """None: there is none. Raises ShuttingDown, and InvalidRequest if it does not come."""

    async def come() -> Received | None:
        return await anext(messages, None)

    reading = asyncio.create_task(come())
    drained = asyncio.create_task(draining.wait())
    try:
        await asyncio.wait({reading, drained}, timeout=_START_S_MAX, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in (reading, drained):
            task.cancel()
        await asyncio.wait({reading, drained})
    if reading.cancelled():
        if draining.is_set():
            raise ShuttingDown
        raise InvalidRequest([Violation("start", f"did not come within {_START_S_MAX:g} s")])
    return reading.result()


class Stream:
    """`run` serves a stream until its consumer closes its side, the router drains, or it is cancelled. Raises
    InvalidRequest if its first message does not start one."""

    def __init__(
        self,
        fleet: Fleet,
        gate: Gate,
        call: Call,
        received: Received,
        messages: AsyncIterator[Received],
        context: Context,
    ) -> None:
        first: queue_pb2.ConsumeRequest = received.message
        check(first)
        if not first.HasField("start"):
            raise InvalidRequest([Violation("start", "is missing: the first message says what the stream consumes")])
        self._leases = Leases(fleet)
        self._gate = gate
        self._call = call
        # From now on it is its org's.
        call.set(0)
        call.org = first.start.org
        self._first = Received(first, 0)
        self._messages = messages
        self._context = context
        self._org, self._window_us = OrgId(first.start.org), convert.window_us(first.start)
        self._consumer = Consumer(
            fleet,
            self,
            call,
            org=self._org,
            queues=[QueueName(queue) for queue in first.start.queues],
            worker=first.start.worker,
            window_us=self._window_us,
        )
        # To be written, and since when: by the event loop's clock, which is only compared with itself.
        self._jobs: deque[tuple[float, Given]] = deque()
        self._jobs_bytes = 0
        self._late: asyncio.TimerHandle | None = None
        # Jobs were taken back because the consumer did not read, and it has not read all since.
        self._behind = False
        self._settled: list[queue_pb2.Settled] = []
        self._to_write = asyncio.Event()
        self._room = asyncio.Event()
        # Being settled.
        self._settling = 0
        self._fewer = asyncio.Event()
        self._ending = False

    async def run(self, draining: asyncio.Event) -> None:
        """Raises InvalidRequest, ShardError, ShuttingDown."""
        # An idle consumer, too, knows that it is served.
        await self._context.send_initial_metadata(())
        try:
            async with asyncio.TaskGroup() as group:
                serving = group.create_task(self._consumer.serve())
                reading = group.create_task(self._read(group))
                drained = group.create_task(draining.wait())

                def finish(_: object) -> None:
                    """No more jobs; then every answer that is owed."""
                    if not self._ending:
                        self._ending = True
                        for task in (serving, reading, drained):
                            task.cancel()
                        self._consumer.close()
                        self._give_back()
                        self._to_write.set()

                reading.add_done_callback(finish)
                drained.add_done_callback(finish)
                group.create_task(self._write())
        except BaseExceptionGroup as troubles:
            raise troubles.exceptions[0] from None
        except asyncio.CancelledError as cancelled:
            # It comes through the group, whose frame keeps it, and is kept by it.
            raise cancelled.with_traceback(None) from None
        finally:
            self._consumer.close()
            self._give_back()
            # Each holds the other: nobody else should have to find that out.
            del self._consumer
        if draining.is_set():
            raise ShuttingDown

    # ── What comes in ────────────────────────────────────────────────────────────────────────────────────────────────

    async def _read(self, group: asyncio.TaskGroup) -> None:
        check_consume(self._first.message)
        self._take(self._first, group)
        async for received in self._messages:
            if received.message.HasField("start"):
                raise InvalidRequest([Violation("start", "is set again; a stream is started by its first message")])
            check_consume(received.message)
            while self._settling + len(self._settled) >= _SETTLING_MAX:
                self._fewer.clear()
                await self._fewer.wait()
            self._take(received, group)

    def _take(self, received: Received, group: asyncio.TaskGroup) -> None:
        request: queue_pb2.ConsumeRequest = received.message
        if request.credit and self._consumer.credit + request.credit > CREDIT_MAX:
            raise InvalidRequest([Violation("credit", f"more than {CREDIT_MAX:,} jobs would be outstanding")])
        if request.credit:
            self._consumer.add_credit(request.credit)
        if request.acks or request.nacks or request.extends or request.releases:
            self._settling += 1
            group.create_task(self._settle(request, received.bytes))
        else:
            self._call.give_back(received.bytes)

    async def _settle(self, request: queue_pb2.ConsumeRequest, held: int) -> None:
        settled = queue_pb2.Settled(number=request.number)
        try:
            async with asyncio.timeout(_SETTLE_S_MAX):
                answers = await self._answers(request)
            if answers.count(job_pb2.JOB_ANSWER_OK) < len(answers):
                settled.answers.extend(answers)
        except (ShardError, TooManyWaiting, TimeoutError) as error:
            status = told(error)
            settled.error.code, settled.error.message = status.code, status.message
        finally:
            self._settling -= 1
            self._call.give_back(held)
            self._fewer.set()
            self._to_write.set()
        self._settled.append(settled)

    async def _answers(self, request: queue_pb2.ConsumeRequest) -> Answers:
        acts: list[Coroutine[Any, Any, Answers]] = []
        if request.acks:
            acts.append(self._leases.ack(self._org, request.acks))
        if request.nacks:
            acts.append(self._leases.nack(self._org, request.nacks))
        if request.extends:
            acts.append(self._leases.extend(self._org, request.extends, window_us=self._window_us, field="extends[{}]"))
        if request.releases:
            acts.append(self._leases.release(self._org, request.releases, field="releases[{}]"))
        if len(acts) == 1:
            return await acts[0]
        return [answer for answers in await asyncio.gather(*acts) for answer in answers]

    # ── What goes out ────────────────────────────────────────────────────────────────────────────────────────────────

    def receive(self, jobs: Given) -> None:
        loop = asyncio.get_running_loop()
        self._jobs.append((loop.time(), jobs))
        self._jobs_bytes += jobs.bytes
        self._to_write.set()
        if self._late is None:
            self._late = loop.call_later(self._patience_s, self._take_back)

    @property
    def _patience_s(self) -> float:
        """How long a job waits to be written: who has it then has half of its window left."""
        return self._window_us / 2_000_000

    def _take_back(self) -> None:
        """Jobs that have waited for too long are others'."""
        loop = asyncio.get_running_loop()
        while self._jobs and self._jobs[0][0] + self._patience_s <= loop.time():
            _, jobs = self._jobs.popleft()
            self._jobs_bytes -= jobs.bytes
            self._behind = True
            self._consumer.take_back(jobs)
        self._late = loop.call_at(self._jobs[0][0] + self._patience_s, self._take_back) if self._jobs else None

    @property
    def takes_once(self) -> bool:
        return False

    def is_full(self) -> bool:
        return self._behind or self._jobs_bytes > _WAITING_BYTES_MAX

    async def has_room(self) -> None:
        while self.is_full():
            self._room.clear()
            await self._room.wait()
        await self._call.until_room()

    async def _write(self) -> None:
        while True:
            while self._jobs or self._settled:
                settled, self._settled = self._settled, []
                waiting_bytes = self._jobs_bytes
                jobs = self._next_jobs()
                sent_bytes = waiting_bytes - self._jobs_bytes
                message = b"".join(
                    [
                        *chain.from_iterable(given.jobs for given in jobs),
                        queue_pb2.ConsumeResponse(settled=settled).SerializeToString() if settled else b"",
                    ]
                )
                self._gate.writing(self._call)
                # From here on the consumer may have read them, whatever becomes of the stream: they stay leased.
                await self._context.write(message)
                self._gate.written(self._call)
                self._call.give_back(sent_bytes)
                self._room.set()
                self._fewer.set()
            self._behind = False
            self._room.set()
            if self._ending and not self._settling:
                return
            self._to_write.clear()
            await self._to_write.wait()

    def _next_jobs(self) -> list[Given]:
        """As many as one message holds."""
        jobs: list[Given] = []
        room = _MESSAGE_BYTES_MAX
        while self._jobs and room > 0:
            since_s, given = self._jobs.popleft()
            count = 0
            while count < len(given.jobs) and room > 0:
                room -= len(given.jobs[count])
                count += 1
            if count < len(given.jobs):
                given, rest = given.split(count)
                self._jobs.appendleft((since_s, rest))
            jobs.append(given)
        self._jobs_bytes -= _MESSAGE_BYTES_MAX - room
        return jobs

    def _give_back(self) -> None:
        """Jobs that were not sent."""
        if self._late is not None:
            self._late.cancel()
        while self._jobs:
            self._consumer.release(self._jobs.popleft()[1])
