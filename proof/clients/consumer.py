"""A worker of one org that takes jobs by Consume, and settles them on the stream. When a stream ends, the worker opens
a new stream, and repeats the settles that were not answered."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import grpc

from proof.clients import calls
from proof.clients.fates import NACK_DELAY_S_MAX, Fate, draw
from proof.clients.site import QUEUE, Orders, Site
from proof.history import Outcome, Recorder, Verb
from windrow.v1 import job_pb2, queue_pb2, queue_pb2_grpc

_CREDIT = 5
_WORK_S = 0.05
_TRIES_MAX = 5
# If a message has no answer after this time, the connection counts as dead.
_ANSWER_S_MAX = 6.0
_LIFE_S = (10.0, 60.0)
_AGAIN_S_MAX = 1.0
# A message may have several kinds of settles. A router handles them in this order.
_ORDER = (Verb.ACK, Verb.NACK, Verb.KILL, Verb.EXTEND, Verb.RELEASE)


@dataclass(slots=True, kw_only=True)
class _Saying:
    """What a message says about one lease."""

    verb: Verb
    lease: bytes
    span_s: float = 0.0
    tries: int = 0


@dataclass(slots=True, kw_only=True)
class _Sent:
    """One message that has not been answered yet."""

    sayings: Sequence[_Saying]
    # For each saying, the number of its call in the history.
    numbers: Sequence[int]
    sent_s: float


class Consumer:
    """Consumes the jobs of one org on a stream, which is opened again whenever it ends."""

    def __init__(
        self,
        site: Site,
        orders: Orders,
        stub: queue_pb2_grpc.QueueAsyncStub,
        recorder: Recorder,
        *,
        org: str,
        add: Callable[[str, job_pb2.LeasedJob, random.Random], Awaitable[bool]] | None = None,
    ) -> None:
        """`add`: a function that adds nodes to the workflow of a job before the job is settled. It returns whether to
        forget the job instead of settling it."""
        self._add = add
        self._site = site
        self._orders = orders
        self._stub = stub
        self._recorder = recorder
        self._org = org
        self._luck: random.Random = site.luck(org)
        self._to_say: list[_Saying] = []
        self._news = asyncio.Event()
        self._sent: dict[int, _Sent] = {}
        self._number = 0
        # The number of jobs that the consumer has and has not settled, and the credit that the stream still has. Their
        # sum is at most _CREDIT.
        self._in_hand = 0
        self._room_given = 0

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            while not self._orders.over.is_set():
                await self._stream(group)
                await self._orders.pause(self._luck.uniform(0.05, _AGAIN_S_MAX))

    async def _stream(self, group: asyncio.TaskGroup) -> None:
        window_s = self._site.window_s
        history = self._recorder.begin(Verb.CONSUME, self._org, {"window_s": window_s})
        # Give some streams a random deadline, so that the client ends them at any moment.
        life_s = None if self._orders.calm.is_set() else self._luck.uniform(*_LIFE_S)
        call: Any = self._stub.Consume(timeout=life_s)
        writing = asyncio.create_task(self._write(call))
        outcome, code = Outcome.OK, ""
        try:
            while True:
                message = await calls.read(call)
                if message is grpc.aio.EOF:
                    break
                if message.jobs:
                    self._recorder.got(history, [calls.told(job) for job in message.jobs])
                for job in message.jobs:
                    self._in_hand += 1
                    self._room_given -= 1
                    group.create_task(self._work(job))
                for settled in message.settled:
                    self._heard(settled)
            status = await call.code()
            if status is not grpc.StatusCode.OK:
                outcome, code = Outcome.UNKNOWN, calls.code_name(status, await call.details())
        except grpc.aio.AioRpcError as error:
            outcome, code = calls.outcome_of(error)
        except asyncio.InvalidStateError:
            outcome, code = Outcome.UNKNOWN, calls.WRITE_FAILED
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            # The method `_write` of this client has cancelled the call, because the stream was silent for too long.
            outcome, code = Outcome.UNKNOWN, "CANCELLED"
        finally:
            writing.cancel()
            (ended,) = await asyncio.gather(writing, return_exceptions=True)
            self._recorder.end(history, outcome, code=code)
            self._forget_sent()
            if isinstance(ended, Exception):
                raise ended

    async def _write(self, call: Any) -> None:
        start = queue_pb2.ConsumeStart(
            org=self._org,
            queues=[QUEUE],
            visibility_window=calls.duration(self._site.window_s),
            worker=self._site.name,
        )
        self._room_given = 0
        message = queue_pb2.ConsumeRequest(start=start)
        try:
            while True:
                room = _CREDIT - self._in_hand - self._room_given
                message.credit = max(0, room)
                self._room_given += message.credit
                self._fill(message)
                async with asyncio.timeout(_ANSWER_S_MAX):
                    await call.write(message)
                message = queue_pb2.ConsumeRequest()
                await self._until_something_to_say(call)
                if self._orders.over.is_set() and not self._to_say:
                    await call.done_writing()
                    return
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            # The stream has ended. The coroutine that reads the stream gets the reason.
            pass
        except TimeoutError:
            call.cancel()

    async def _until_something_to_say(self, call: Any) -> None:
        self._news.clear()
        while not (self._to_say or self._orders.over.is_set() or self._in_hand + self._room_given < _CREDIT):
            oldest_s = min((sent.sent_s for sent in self._sent.values()), default=time.monotonic())
            if time.monotonic() - oldest_s > _ANSWER_S_MAX:
                call.cancel()
            try:
                async with asyncio.timeout(1.0):
                    await self._news.wait()
            except TimeoutError:
                pass
            self._news.clear()

    def _fill(self, message: queue_pb2.ConsumeRequest) -> None:
        """Adds to the message everything that waits to be sent."""
        if not self._to_say:
            return
        sayings, self._to_say = sorted(self._to_say, key=lambda one: _ORDER.index(one.verb)), []
        self._number += 1
        message.request_id = self._number
        for saying in sayings:
            match saying.verb:
                case Verb.ACK:
                    message.acks.add(lease=saying.lease)
                case Verb.NACK | Verb.KILL:
                    message.nacks.append(calls.nack(saying.verb, saying.lease, saying.span_s))
                case Verb.EXTEND:
                    message.extends.add(lease=saying.lease)
                case _:
                    message.releases.append(saying.lease)
        numbers = [
            self._recorder.begin(saying.verb, self._org, {"leases": [saying.lease.hex()], "span_s": saying.span_s})
            for saying in sayings
        ]
        self._sent[self._number] = _Sent(sayings=sayings, numbers=numbers, sent_s=time.monotonic())

    def _heard(self, settled: queue_pb2.Settled) -> None:
        sent = self._sent.pop(settled.request_id, None)
        if sent is None:
            return
        if settled.HasField("error"):
            self._again(sent, f"SETTLED_{grpc_code(settled.error.code)}")
            return
        not_ok = {answer.lease: answer.answer for answer in settled.not_ok}
        for number, saying in zip(sent.numbers, sent.sayings, strict=True):
            answer = not_ok.get(saying.lease, job_pb2.JOB_ANSWER_OK)
            self._recorder.end(number, Outcome.OK, answered=[calls.answer_of(answer)])

    def _forget_sent(self) -> None:
        """Plans to send again whatever had no answer when the stream ended."""
        for number in list(self._sent):
            self._again(self._sent.pop(number), "STREAM_ENDED")

    def _again(self, sent: _Sent, code: str) -> None:
        for number, saying in zip(sent.numbers, sent.sayings, strict=True):
            self._recorder.end(number, Outcome.UNKNOWN, code=code)
            saying.tries += 1
            if saying.tries < _TRIES_MAX and saying.verb is not Verb.EXTEND:
                self._say(saying)

    def _say(self, saying: _Saying) -> None:
        self._to_say.append(saying)
        self._news.set()

    async def _work(self, job: job_pb2.LeasedJob) -> None:
        luck, window_s, lease = self._luck, self._site.window_s, job.lease
        forgets = self._add is not None and await self._add(self._org, job, luck)
        match Fate.FORGET if forgets else draw(luck, calm=self._orders.calm.is_set()):
            case Fate.ACK:
                await self._orders.pause(luck.expovariate(1 / _WORK_S))
                self._say(_Saying(verb=Verb.ACK, lease=lease))
            case Fate.NACK:
                self._say(_Saying(verb=Verb.NACK, lease=lease, span_s=luck.uniform(0.0, NACK_DELAY_S_MAX)))
            case Fate.KILL:
                self._say(_Saying(verb=Verb.KILL, lease=lease))
            case Fate.RELEASE:
                self._say(_Saying(verb=Verb.RELEASE, lease=lease))
            case Fate.EXTEND:
                for _ in range(luck.randint(1, 4)):
                    await self._orders.pause(window_s * luck.uniform(0.3, 0.7))
                    self._say(_Saying(verb=Verb.EXTEND, lease=lease, span_s=window_s))
                await self._orders.pause(window_s * luck.uniform(0.3, 0.7))
                self._say(_Saying(verb=Verb.ACK, lease=lease))
            case Fate.OVERSLEEP:
                await self._orders.pause(window_s * luck.uniform(0.9, 1.5))
                self._say(_Saying(verb=Verb.ACK, lease=lease))
            case Fate.FORGET:
                pass
        self._in_hand -= 1
        self._news.set()


def grpc_code(number: int) -> str:
    return next((code.name for code in grpc.StatusCode if code.value[0] == number), str(number))
