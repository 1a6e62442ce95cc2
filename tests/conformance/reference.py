"""A worker over raw stubs. It does what docs/streams.md asks for, and records all messages.

The worker shows that a client can pass the scenarios, and that the fake server behaves as a router does.
wrong_clients.py replaces methods of the worker. As a program (`python -m tests.conformance.reference`) it is a client
under test, as README.md describes.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from google.protobuf.duration_pb2 import Duration
from google.rpc import status_pb2
from grpc import StatusCode, aio

from tests.conformance.fake_server import DETAILS
from tests.conformance.rules import ENTRIES_MAX, HANDLERS
from tests.conformance.transcript import Enqueue, Event, Stream, Transcript, retry_after_s, too_large
from tests.jobs import job_id, job_message
from windrow.v1 import job_pb2, queue_pb2, queue_pb2_grpc

FATAL = {
    StatusCode.INVALID_ARGUMENT,
    StatusCode.UNIMPLEMENTED,
    StatusCode.UNAUTHENTICATED,
    StatusCode.PERMISSION_DENIED,
}
PAUSE_FIRST_S, PAUSE_MAX_S = 0.05, 2.0
CALL_S = 10.0
_ENTRY_BYTES = 300
_OPTIONS: list[tuple[str, object]] = [
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_retries", 0),
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 1000),
    ("grpc.max_reconnect_backoff_ms", 2000),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 8_000),
    ("grpc.http2.ping_timeout_ms", 8_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.keepalive_permit_without_calls", 1),
]


class NoAnswer(Exception):
    """A message was not answered in time, so the stream was cancelled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """An entry that waits to be sent: an ack, nack, extend, release or snooze of a lease."""

    lease: bytes
    verb: str
    result: bytes = b""
    # The delay of a snooze.
    after_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """A message that has no answer yet."""

    entries: tuple[Entry, ...]
    credit: int
    sent_s: float


@dataclass(slots=True, kw_only=True, eq=False)
class Held:
    """A leased job whose handler runs."""

    job: job_pb2.LeasedJob
    # When the window began. This is the time of the job's arrival, or the time just before the worker sent the last
    # extend that was answered OK.
    renewed_s: float
    extending: bool = False
    timer: asyncio.TimerHandle | None = None
    task: asyncio.Task[None] | None = None


class ReferenceWorker:
    unanswered_max = 2

    def __init__(
        self,
        address: str,
        *,
        org: str,
        queue: str,
        window_s: float = 30.0,
        answer_s: float = 10.0,
        handlers: int = HANDLERS,
        message_bytes_max: int = 4 << 20,
        hears_revoked: bool = True,
    ) -> None:
        self.seen = Transcript(org=org, queue=queue)
        self.handlers = handlers
        self.held: dict[bytes, Held] = {}
        self.outbox: deque[Entry] = deque()
        # The parts of messages that were too large. Each part is a message of its own.
        self.parts: deque[tuple[Entry, ...]] = deque()
        self.unanswered: dict[int, Message] = {}
        self.credit = 0
        self.stopping = False
        self.draining = False
        self.wake = asyncio.Event()
        self._address = address
        self._window_s, self._answer_s = window_s, answer_s
        self._message_bytes_max = message_bytes_max
        self._hears_revoked = hears_revoked
        self._loop = asyncio.get_running_loop()
        self._channel = aio.insecure_channel(address, options=_OPTIONS)
        self._stub = queue_pb2_grpc.QueueStub(self._channel)
        # The ids of the jobs that were snoozed.
        self._snoozed = set[str]()
        self._request_id = 0
        self._tries = self._settle_tries = 0
        # The time before which nothing is settled, because the router has asked for a pause.
        self._not_before_s = 0.0
        self._may_work = asyncio.Event()
        self._may_work.set()

    # Methods for programs and tests.

    async def run(self) -> None:
        """Works until `stop()` is called. Raises AioRpcError for a status that would be the same after a repetition."""
        try:
            while not self._is_done():
                try:
                    await self._session()
                    if self.draining:
                        # The router is about to close the connection.
                        await self._pause(None)
                except aio.AioRpcError as error:
                    if self.is_fatal(error.code()):
                        raise
                    await self._pause(_retry_after_s(error))
                except NoAnswer:
                    await self._pause(None)
        except aio.AioRpcError:
            self.seen.code = 1
            raise
        else:
            self.seen.code = 0
        finally:
            for held in [*self.held.values()]:
                self.let_fall(held)
            await self._channel.close()

    def stop(self) -> None:
        """Makes the worker give no more credit, and end when the running jobs are done."""
        self.stopping = True
        self.wake.set()

    def hold(self) -> None:
        """Makes all handlers wait until `let_go` is called."""
        self._may_work.clear()

    def let_go(self) -> None:
        self._may_work.set()

    async def enqueue(self) -> str:
        """Stores a job. Tries again until the job is stored. Returns its id."""
        id_ = self.new_id()
        while True:
            job = job_message(id=id_, queue=self.seen.queue, kind="work", payload=b"0")
            request = queue_pb2.EnqueueRequest(org=self.seen.org, jobs=[job])
            began_s, metadata = self._loop.time(), self.metadata()
            code, asked_s = StatusCode.OK, None
            try:
                await self._stub.Enqueue(request, timeout=CALL_S, metadata=metadata)
            except aio.AioRpcError as error:
                code, asked_s = error.code(), _retry_after_s(error)
            self.seen.enqueues.append(
                Enqueue(
                    at_s=began_s,
                    answered_s=self._loop.time(),
                    metadata=dict(metadata),
                    ids=(id_,),
                    code=code,
                    retry_after_s=asked_s,
                )
            )
            if code is StatusCode.OK:
                return id_
            await self._pause(asked_s)
            id_ = self.id_again(id_)

    # The methods that wrong clients replace.

    def metadata(self) -> tuple[tuple[str, str], ...]:
        return (("windrow-org", quote(self.seen.org, safe="")),)

    def new_id(self) -> str:
        return job_id()

    def id_again(self, id_: str) -> str:
        """Returns the id for another try."""
        return id_

    def is_fatal(self, code: StatusCode) -> bool:
        return code in FATAL

    def pause_s(self, asked_s: float | None, tries: int) -> float:
        """Returns the pause before the next try. `tries`: how many tries there were since the last answer."""
        own_s = min(PAUSE_MAX_S, PAUSE_FIRST_S * 2.0 ** min(tries, 10))
        return max(own_s * random.uniform(0.5, 1.0), asked_s or 0.0)

    def credit_wanted(self) -> int:
        """Returns for how many more jobs the worker has room now."""
        if self.stopping or self.draining:
            return 0
        return max(0, self.handlers - len(self.held) - self.credit)

    def result_of(self, job: job_pb2.LeasedJob) -> bytes:
        return job.payload

    def snooze(self, job: job_pb2.LeasedJob) -> None:
        self.say(Entry(lease=job.lease, verb="snooze", after_s=int(job.payload) / 1000))

    def on_runtime_over(self, held: Held) -> None:
        self.let_fall(held)

    def extend(self, held: Held) -> None:
        held.extending = True
        self.say(Entry(lease=held.job.lease, verb="extend"))

    def on_draining(self) -> None:
        self.draining = True

    def on_revoked(self, lease: bytes) -> None:
        """Called when the router has ended a lease. The worker may not have this lease."""
        held = self.held.get(lease)
        if held is not None and self._hears_revoked:
            self.let_fall(held)

    def on_answer(self, entry: Entry, answer: job_pb2.JobAnswer.ValueType, sent_s: float) -> None:
        held = self.held.get(entry.lease)
        if entry.verb != "extend" or held is None:
            return
        held.extending = False
        if answer == job_pb2.JOB_ANSWER_OK:
            held.renewed_s = sent_s
        else:
            self.let_fall(held)

    def on_error(self, message: Message, asked_s: float | None) -> None:
        """Called when a message was not settled. Sends its entries again after a pause."""
        self.outbox.extendleft(reversed(message.entries))
        pause_s = self.pause_s(asked_s, self._settle_tries)
        self._settle_tries += 1
        self._not_before_s = self._loop.time() + pause_s
        self._loop.call_later(pause_s, self.wake.set)

    def on_too_large(self, message: Message) -> None:
        """Called when a message was too large. Nothing in the message took effect, and its credit did not count
        either."""
        self.credit -= message.credit
        half = len(message.entries) // 2
        # A message of one entry cannot be split, so its lease will expire.
        if half:
            self.parts += [message.entries[:half], message.entries[half:]]

    def say_again(self) -> None:
        """Sends the entries that have no answer again, on a new stream."""
        for message in reversed([*self.unanswered.values()]):
            self.outbox.extendleft(reversed(message.entries))
        self.unanswered.clear()

    def has_held(self) -> bool:
        """Returns whether the worker must wait for its handlers before it ends."""
        return bool(self.held)

    # Methods of one stream.

    async def _session(self) -> None:
        """Opens a stream, and serves it to its end. Raises AioRpcError or NoAnswer."""
        self.credit, self.draining = 0, False
        self.say_again()
        metadata = self.metadata()
        stream = Stream(opened_s=self._loop.time(), metadata=dict(metadata))
        self.seen.streams.append(stream)
        call: Any = self._stub.Consume(metadata=metadata)
        writing = asyncio.create_task(self._write(call, stream))
        try:
            async for response in call:
                stream.events.append(Event(at_s=self._loop.time(), message=response))
                self._on_response(response)
            stream.ended = StatusCode.OK
        except aio.AioRpcError as error:
            stream.retry_after_s = _retry_after_s(error)
            stream.ended = error.code()
            raise
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            stream.ended = StatusCode.CANCELLED
            raise NoAnswer from None
        finally:
            stream.ended_s = self._loop.time()
            writing.cancel()
            await asyncio.gather(writing, return_exceptions=True)
            call.cancel()

    async def _write(self, call: Any, stream: Stream) -> None:
        start = queue_pb2.ConsumeStart(
            org=self.seen.org, queues=[self.seen.queue], visibility_window=_duration(self._window_s), worker="reference"
        )
        request = queue_pb2.ConsumeRequest(start=start)
        while True:
            self.wake.clear()
            if self._fill(request, call):
                stream.events.append(Event(at_s=self._loop.time(), message=request))
                try:
                    await call.write(request)
                except (aio.AioRpcError, asyncio.InvalidStateError):
                    # The stream has ended. The reader raises the reason.
                    return
                request = queue_pb2.ConsumeRequest()
            elif self._may_close():
                stream.closed_after = len(stream.events)
                await call.done_writing()
                return
            else:
                await self.wake.wait()

    def _fill(self, request: queue_pb2.ConsumeRequest, call: Any) -> bool:
        """Adds the entries and the credit that may be sent now to the message. Returns whether the message has any
        content."""
        batch: tuple[Entry, ...] = ()
        may_say = not self.draining and self._loop.time() >= self._not_before_s
        if may_say and len(self.unanswered) < self.unanswered_max:
            batch = self.parts.popleft() if self.parts else self._next_batch()
        wanted = self.credit_wanted()
        # Give credit when half of the room is free, or when a message is sent anyway.
        if batch or request.HasField("start") or wanted * 2 >= self.handlers or not self.credit:
            request.credit = wanted
            self.credit += wanted
        if batch:
            self._request_id += 1
            request.request_id = self._request_id
            for entry in batch:
                _add(request, entry)
            message = Message(entries=batch, credit=request.credit, sent_s=self._loop.time())
            self.unanswered[self._request_id] = message
            self._loop.call_later(self._answer_s, self._on_silence, call, self._request_id)
        return bool(batch or request.credit or request.HasField("start"))

    def _next_batch(self) -> tuple[Entry, ...]:
        batch: dict[bytes, Entry] = {}
        size = 0
        while self.outbox and len(batch) < ENTRIES_MAX:
            entry = self.outbox[0]
            size += _ENTRY_BYTES + len(entry.result)
            if batch and size > self._message_bytes_max:
                break
            self.outbox.popleft()
            # A job that is done needs no extend.
            if entry.verb != "extend" or entry.lease in self.held:
                batch[entry.lease] = entry
        return tuple(batch.values())

    def _on_silence(self, call: Any, request_id: int) -> None:
        if request_id in self.unanswered:
            call.cancel()

    def _may_close(self) -> bool:
        if self.draining:
            # Entries that come from now on go to the next stream.
            return not self.unanswered
        return self.stopping and not (self.has_held() or self.outbox or self.parts)

    def _is_done(self) -> bool:
        return self.stopping and not (self.has_held() or self.outbox or self.parts or self.unanswered)

    async def _pause(self, asked_s: float | None) -> None:
        pause_s = self.pause_s(asked_s, self._tries)
        self._tries += 1
        await asyncio.sleep(pause_s)

    # Messages of the router.

    def _on_response(self, response: queue_pb2.ConsumeResponse) -> None:
        self._tries = 0
        self._take(response.jobs)
        for settled in response.settled:
            self._on_settled(settled)
        for revoked in response.revoked:
            self.on_revoked(revoked.lease)
        if response.draining:
            self.on_draining()
        self.wake.set()

    def _on_settled(self, settled: queue_pb2.Settled) -> None:
        message = self.unanswered.pop(settled.request_id)
        if too_large(settled):
            self.on_too_large(message)
        elif settled.HasField("error"):
            self.on_error(message, retry_after_s(settled.error))
        else:
            self._settle_tries = 0
            not_ok = {one.lease: one.answer for one in settled.not_ok}
            for entry in message.entries:
                self.on_answer(entry, not_ok.get(entry.lease, job_pb2.JOB_ANSWER_OK), message.sent_s)

    # Work on jobs.

    def _take(self, jobs: Iterable[job_pb2.LeasedJob]) -> None:
        for job in jobs:
            self.credit -= 1
            if self.stopping:
                # The router had sent this job before the worker stopped.
                self.say(Entry(lease=job.lease, verb="release"))
                continue
            held = self.held[job.lease] = Held(job=job, renewed_s=self._loop.time())
            held.task = asyncio.create_task(self._work(held))
            held.timer = self._loop.call_later(self._window_s / 3, self._keep, held)
            if job.HasField("max_runtime"):
                self._loop.call_later(job.max_runtime.ToMilliseconds() / 1000, self.on_runtime_over, held)

    def say(self, entry: Entry) -> None:
        self.outbox.append(entry)
        self.wake.set()

    async def _work(self, held: Held) -> None:
        job = held.job
        await self._may_work.wait()
        if job.kind == "snooze" and job.id not in self._snoozed:
            self._snoozed.add(job.id)
            self._forget(held)
            self.snooze(job)
            return
        if job.kind == "enqueue":
            await self.enqueue()
        else:
            await asyncio.sleep(int(job.payload.lstrip(b"0") or b"0") / 1000)
        self._forget(held)
        self.say(Entry(lease=job.lease, verb="ack", result=self.result_of(job)))

    def _keep(self, held: Held) -> None:
        if self._loop.time() - held.renewed_s >= self._window_s:
            # Another consumer may have the job.
            self.let_fall(held)
            return
        if not held.extending:
            self.extend(held)
        held.timer = self._loop.call_later(self._window_s / 3, self._keep, held)

    def let_fall(self, held: Held) -> None:
        """Stops working on a job."""
        self._forget(held)
        if held.task is not None:
            held.task.cancel()
        self.wake.set()

    def _forget(self, held: Held) -> None:
        self.held.pop(held.job.lease, None)
        if held.timer is not None:
            held.timer.cancel()


def _add(request: queue_pb2.ConsumeRequest, entry: Entry) -> None:
    match entry.verb:
        case "ack":
            request.acks.add(lease=entry.lease, result=entry.result)
        case "extend":
            request.extends.add(lease=entry.lease)
        case "snooze":
            request.snoozes.add(lease=entry.lease, after=_duration(entry.after_s))
        case _:
            request.releases.append(entry.lease)


def _retry_after_s(error: aio.AioRpcError) -> float | None:
    for key, value in error.trailing_metadata() or ():
        if key == DETAILS and isinstance(value, bytes):
            return retry_after_s(status_pb2.Status.FromString(value))
    return None


def _duration(seconds: float) -> Duration:
    return Duration(seconds=int(seconds), nanos=round(seconds % 1 * 1e9))


async def main() -> int:
    environ = os.environ
    worker = ReferenceWorker(
        environ["WINDROW_ADDRESS"],
        org=environ["WINDROW_ORG"],
        queue=environ["WINDROW_QUEUE"],
        window_s=int(environ["WINDROW_WINDOW_MS"]) / 1000,
        answer_s=int(environ["WINDROW_ANSWER_MS"]) / 1000,
    )
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, worker.stop)
    try:
        await worker.run()
    except aio.AioRpcError as error:
        print(error.details(), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
